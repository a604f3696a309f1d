"""A package index and PyTorch's own, both in this process: what pip and uv would reach by the network ends here.

It is an HTTP server, and a proxy that ends TLS itself, under any host name. So the real pip and the real uv run with no
setting of theirs changed but the proxy and its certificate: what they ask for by themselves is seen.
"""

import datetime
import ssl
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DEFAULT = "/simple"
PYTORCH = "/whl/cpu"


def wheel(folder: Path, name: str, version: str, **files: str) -> Path:
    """Write a wheel of the given files (`package__main`: package/__main__.py), and return its path."""
    info = f"{name}-{version}.dist-info"
    content = {f"{module.replace('__main', '/__main__')}.py": text for module, text in files.items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
    return path


class StandIn:
    """Serves wheels under the paths of the two indexes.

    Attributes:
        asked: (host, path) of every request.
        held: a file whose download waits for `release`.
        pytorch_unreachable: whether the proxy refuses every host but the first.
    """

    def __init__(self, folder: Path):
        self.wheels: dict[tuple[str, str], list[Path]] = {}
        self.asked: list[tuple[str, str]] = []
        self.held, self.release = "", threading.Event()
        self.pytorch_unreachable, self.first_host = False, ""
        self._authority = _Authority(folder)
        self.certificate = self._authority.certificate
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"index": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, path: Path, index: str = DEFAULT) -> None:
        """Serve a wheel."""
        self.wheels.setdefault((index, path.name.split("-")[0]), []).append(path)

    def close(self) -> None:
        """Stop serving."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def context(self, host: str) -> ssl.SSLContext:
        """Return TLS under a host's name."""
        return self._authority.context(host)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return status and body for a path."""
        index, _, rest = path.rpartition("/")[0].rpartition("/")
        if path.endswith("/") and (files := self.wheels.get((index, rest))):
            links = "".join(f'<a href="/files/{quote(file.name)}">{file.name}</a>\n' for file in files)
            return 200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        for file in (file for files in self.wheels.values() for file in files):
            if path == f"/files/{file.name}":
                if file.name == self.held:
                    self.release.wait(60)
                return 200, file.read_bytes()
        return 404, b""


class _Handler(BaseHTTPRequestHandler):
    index: StandIn
    protocol_version = "HTTP/1.1"
    host = ""

    def do_CONNECT(self) -> None:
        host = self.path.rpartition(":")[0]
        self.index.first_host = self.index.first_host or host
        if self.index.pytorch_unreachable and host != self.index.first_host:
            self.index.asked.append((host, ""))
            self.send_error(502)
            return
        self.send_response(200)
        self.end_headers()
        self.connection = self.index.context(host).wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.host, self.close_connection = host, False

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.index.asked.append((self.host, path))
        status, body = self.index.answer(path)
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        """Say nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True  # the client was killed, or has what it wanted


class _Authority:
    """A certificate authority of one test."""

    def __init__(self, folder: Path):
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stand-in")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()
        self.certificate = folder / "authority.pem"
        self.certificate.write_bytes(self._sign(self._issuer, self._key, constraints, "stand-in"))

    def _sign(self, subject: x509.Name, key, constraints: x509.BasicConstraints, host: str) -> bytes:
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def context(self, host: str) -> ssl.SSLContext:
        with self._lock:
            if host not in self._contexts:
                key = ec.generate_private_key(ec.SECP256R1())
                subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "leaf")])
                chain = self._folder / f"{len(self._contexts)}.pem"
                private = key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
                chain.write_bytes(private + self._sign(subject, key, x509.BasicConstraints(False, None), host))
                self._contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._contexts[host].load_cert_chain(chain)
            return self._contexts[host]
