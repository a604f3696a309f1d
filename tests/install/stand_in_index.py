"""A package index and PyTorch's own, both in this process: what pip and uv would reach by the network ends here.

It is an HTTP server, and a proxy that ends TLS itself, under the host names of both. So the real pip and the real uv
run with no setting of theirs changed but the proxy and its certificate: what they ask for by themselves is seen.
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
HOSTS = ("pypi.org", "download.pytorch.org")


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
        asked: Host and path of every request.
        held: A file whose download waits for `release`.
        unreachable: hosts that the proxy refuses.
    """

    def __init__(self, folder: Path):
        self.wheels: dict[tuple[str, str], list[Path]] = {}
        self.asked: list[tuple[str, str]] = []
        self.held, self.release = "", threading.Event()
        self.unreachable: set[str] = set()
        self.certificate, self.context = _certify(folder)
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
        if host in self.index.unreachable:
            self.index.asked.append((host, ""))
            self.send_error(502)
            return
        self.send_response(200)
        self.end_headers()
        self.connection = self.index.context.wrap_socket(self.connection, server_side=True)
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


def _certify(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return the certificate of an authority made for one test, and TLS under the names of the two indexes."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority, leaf = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("stand-in", "leaf"))
    path, chain = folder / "authority.pem", folder / "leaf.pem"
    path.write_bytes(_sign(authority, keys[0], x509.BasicConstraints(True, 0), ["stand-in"], authority, keys[0]))
    signed = _sign(leaf, keys[1], x509.BasicConstraints(False, None), HOSTS, authority, keys[0])
    unencrypted = serialization.NoEncryption()
    chain.write_bytes(
        keys[1].private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted) + signed
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return path, context


def _sign(subject: x509.Name, key, constraints: x509.BasicConstraints, names, issuer: x509.Name, issuer_key) -> bytes:
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    alternatives = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(constraints, critical=True)
        .add_extension(alternatives, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)
