"""A package index and PyTorch's own, both in this process: what pip and uv would reach by the network ends here.

It is an HTTP server of a folder, and a proxy that ends TLS itself, under the host names of both. So the real pip and
the real uv run with no setting of theirs changed but the proxy and its certificate: what they ask for is seen.
"""

import datetime
import functools
import ssl
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DEFAULT = "/simple"
PYTORCH = "/whl/cpu"
HOSTS = ("pypi.org", "download.pytorch.org")


class StandIn(ThreadingHTTPServer):
    """Serves wheels under the paths of the two indexes; `asked` is host and path of every request.

    The download of the file `held` waits for `release`; the proxy refuses the hosts that are `unreachable`.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        self.folder, self.asked, self.held, self.unreachable = folder / "index", [], None, set()
        self.release = threading.Event()
        self.certificate, self.context = _certify(folder)
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=self.folder))
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, name: str, version: str, index: str = DEFAULT, **files: str) -> Path:
        """Serve a wheel of the given files (`package__main`: package/__main__.py), and return its path."""
        info = f"{name}-{version}.dist-info"
        content = {f"{module.replace('__main', '/__main__')}.py": text for module, text in files.items()}
        content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
        path = self.folder / index.strip("/") / name / f"{name}-{version}-py3-none-any.whl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in content.items():
                archive.writestr(member, text)
        return path

    def close(self) -> None:
        self.release.set()
        self.shutdown()
        self.server_close()


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    host = ""

    def do_CONNECT(self):
        host = self.path.rpartition(":")[0]
        if host in self.server.unreachable:
            return self.send_error(502)
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.host, self.close_connection = host, False

    def send_head(self):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.host, path))
        if path.rpartition("/")[2] == self.server.held:
            self.server.release.wait(60)
        return super().send_head()

    def log_message(self, *_) -> None:
        """Say nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True  # the client was killed, or has what it wanted


def _certify(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return a certificate of the two hosts that vouches for itself, and TLS with it."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=stand-in")
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    hosts = x509.SubjectAlternativeName([x509.DNSName(host) for host in HOSTS])
    signed = builder.add_extension(hosts, critical=False).sign(key, hashes.SHA256())
    path, private = folder / "certificate.pem", folder / "key.pem"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, private)
    return path, context
