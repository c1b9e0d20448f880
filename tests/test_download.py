"""Downloads from a server on this machine: what is right arrives whole, and nothing else
arrives.
"""

import gzip
import hashlib
import io
import os
import shutil
import ssl
import subprocess
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from stoker.data import datasets, download
from stoker.data.download import File, Source
from stoker.trainer.errors import TrainingError, UserError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that this process trusts, made anew."""
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(folder / "cert.pem"))
        patch.setenv("no_proxy", "*")
        yield folder


class Handler(BaseHTTPRequestHandler):
    """Gives `server.files`: bytes, or a function of the handler."""

    def do_GET(self):
        self.server.asked.append(self.path)
        content = self.server.files.get(self.path.strip("/"))
        if callable(content):
            return content(self)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_):
        pass


def serve(certificate=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.files, server.asked = True, {}, []
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    server.url = f"http{'s' * (certificate is not None)}://127.0.0.1:{server.server_port}/"
    return server


@pytest.fixture
def server(certificate):
    server = serve(certificate)
    yield server
    server.shutdown()
    server.server_close()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def everything(folder):
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def idx(tensor):
    return (
        bytes((0, 0, 8, tensor.ndim))
        + b"".join(n.to_bytes(4, "big") for n in tensor.shape)
        + bytes(tensor.flatten())
    )


@pytest.fixture
def small_mnist(server, monkeypatch):
    """MNIST's four files with 60 and 20 random images; gives {name: contents}, unpacked."""
    generator, files, contents = torch.Generator().manual_seed(0), [], {}
    for part, n in (("train", 60), ("t10k", 20)):
        images = torch.randint(256, (n, 28, 28), generator=generator, dtype=torch.uint8)
        labels = (torch.arange(n) % 10).to(torch.uint8)
        for name, tensor in (
            (f"{part}-images-idx3-ubyte", images),
            (f"{part}-labels-idx1-ubyte", labels),
        ):
            contents[name] = idx(tensor)
            packed = gzip.compress(contents[name])
            server.files[f"{name}.gz"] = packed
            files.append(File(f"{name}.gz", len(packed), sha256(packed), len(contents[name])))
    monkeypatch.setitem(download.SOURCES, "mnist", Source(server.url, "MNIST/raw", tuple(files)))
    return contents


def test_what_is_missing_is_fetched_and_read(small_mnist, server, tmp_path, capsys):
    with pytest.raises(UserError, match="MNIST is not in .*\nType dataset.download=true"):
        datasets.mnist(str(tmp_path / "data"))
    assert not server.asked
    data = datasets.mnist(str(tmp_path / "data"), download=True)
    assert len(data.train) + len(data.val) == 60 and len(data.test) == 20
    assert bytes(data.test.inputs.flatten().tolist()) == small_mnist["t10k-images-idx3-ubyte"][16:]
    there = everything(tmp_path / "data" / "MNIST" / "raw")
    assert there == small_mnist and len(server.asked) == 4
    assert capsys.readouterr().out.startswith(
        f"download {server.url}train-images-idx3-ubyte.gz (0.0 MB)\n"
    )
    datasets.mnist(str(tmp_path / "data"), download=True)
    assert len(server.asked) == 4  # nothing is fetched that is there
    torchvision = pytest.importorskip("torchvision")
    assert torch.equal(
        torchvision.datasets.MNIST(tmp_path / "data", train=False).data, data.test.inputs.squeeze(1)
    )
    (tmp_path / "data" / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"damaged")
    with pytest.raises(
        UserError, match=r"cannot be read .*no IDX file.*\n.*download=true to fetch it again"
    ):
        datasets.mnist(str(tmp_path / "data"))
    datasets.mnist(str(tmp_path / "data"), download=True)
    assert everything(tmp_path / "data" / "MNIST" / "raw") == small_mnist


def hang(handler):
    handler.send_response(200)
    handler.end_headers()
    time.sleep(30)


def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.1)


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(2**16))


def cut_short(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)


def redirect(url):
    def answer(handler):
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()

    return answer


def garbage(handler):
    handler.wfile.write(b"\x1b[2Jno http\r\n\r\n")


ANSWERS = {
    "other bytes": (b"y" * 1000, "its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}"),
    "one bit": (b"x" * 999 + b"y", "its SHA-256 is "),
    "short": (b"x" * 999, "it ended after 999 of 1,000 bytes"),
    "long": (b"x" * 1001, "it has more than the 1,000 bytes"),
    "empty": (b"", "it ended after 0 of"),
    "missing": (None, "Not Found"),
    "cut short": (cut_short, "it ended after 10 of|IncompleteRead"),
    "endless": (endless, "it has more than the 1,000 bytes"),
    "hang": (hang, "timed out"),
    "drip": (drip, "of 1,000 bytes came in time"),
    "to http": (lambda handler: redirect(handler.server.plain)(handler), "unknown url type: http"),
    "to a file": (redirect("file:///etc/passwd"), "redirect|not allowed|unknown url type"),
    "to ftp": (redirect("ftp://127.0.0.1/x"), "unknown url type: ftp|not allowed"),
    "in circles": (lambda handler: redirect(handler.path)(handler), "redirect"),
    "no http": (garbage, r"x1b\[2J|BadStatusLine|no http"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_not_the_file_leaves_nothing(name, server, tmp_path, monkeypatch):
    content, words = ANSWERS[name]
    right = b"x" * 1000
    plain = serve()
    plain.files["f.gz"], server.plain = right, plain.url + "f.gz"
    server.files["f.gz"] = content
    source = Source(server.url, "sub/folder", (File("f.gz", 1000, sha256(right), 10**6),))
    monkeypatch.setitem(download.SOURCES, "mnist", source)
    monkeypatch.setattr(download, "SILENCE", 0.5)
    monkeypatch.setattr(download, "SLOWEST", 10**6)
    with pytest.raises(UserError, match=words) as caught:
        download.fetch("mnist", tmp_path)
    message = str(caught.value)
    assert (
        message.count("\n") == 1
        and message.replace("\n", "").isprintable()
        and "dataset.root=DIR" in message
    )
    assert everything(tmp_path) == {"sub": False} and not plain.asked
    plain.shutdown()
    plain.server_close()


def test_a_certificate_that_is_not_trusted(server, tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        download.get(server.url + "f", 1, sha256(b"x"), tmp_path / "f")
    assert not server.asked


def test_http_itself_is_refused(tmp_path):
    with pytest.raises(OSError, match="unknown url type: http"):
        download.get("http://127.0.0.1:1/f", 1, sha256(b"x"), tmp_path / "f")


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(bytes(10**7)), b"no gzip", gzip.compress(bytes(1000))[:-10], b"\x1f\x8b"],
    ids=["a bomb", "no gzip", "a part", "the beginning"],
)
def test_bombs_and_broken_gz_leave_nothing(packed, server, tmp_path, monkeypatch):
    server.files["f.gz"] = packed
    source = Source(server.url, "sub/folder", (File("f.gz", len(packed), sha256(packed), 1000),))
    monkeypatch.setitem(download.SOURCES, "mnist", source)
    with pytest.raises(UserError, match="could not be downloaded"):
        download.fetch("mnist", tmp_path)
    assert everything(tmp_path) == {"sub": False, "sub/folder": False}


def member(name, content=b"", **attributes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def link(name, target, kind=tarfile.SYMTYPE):
    return member(name, type=kind, linkname=target)


GOOD = [
    member("batches", type=tarfile.DIRTYPE),
    member("batches/data_1", b"one"),
    member("batches/meta", b"two"),
]
HOSTILE = {
    "..": [member("batches/../out", b"x")],
    "../..": [member("../../out", b"x")],
    "absolute": [member("/tmp/stoker-out", b"x")],
    "beside": [member("out", b"x")],
    "deeper": [member("batches/sub/out", b"x")],
    "dot": [member("batches/.", b"x")],
    "backslash": [member("batches/..\\out", b"x")],
    "drive": [member("batches/C:out", b"x")],
    "link": [link("batches/link", "../out")],
    "link and file through it": [link("batches", ".."), member("batches/out", b"x")],
    "hard link": [link("batches/link", "../out", tarfile.LNKTYPE)],
    "fifo": [member("batches/pipe", type=tarfile.FIFOTYPE)],
    "device": [member("batches/zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "sparse": [member("batches/hole", type=tarfile.GNUTYPE_SPARSE)],
    "too many": [member(f"batches/{i}", b"x") for i in range(30)],
    "bomb": [member("batches/zeros", bytes(3 * 10**6))],
    "escapes": [member("batches/\x1b[2J/\n", b"x")],
    "another folder": [member("other", type=tarfile.DIRTYPE)],
}


def archive(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def fetch_archive(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MOST_UNPACKED", 2 * 10**6)

    def fetch(packed):
        server.files["a.tar.gz"] = packed
        source = Source(server.url, "batches", (File("a.tar.gz", len(packed), sha256(packed)),))
        monkeypatch.setitem(download.SOURCES, "cifar10", source)
        (tmp_path / "root").mkdir(exist_ok=True)
        download.fetch("cifar10", tmp_path / "root")

    return fetch


def test_an_archive_is_unpacked(fetch_archive, tmp_path):
    expected = {
        "root": False,
        "root/batches": False,
        "root/batches/data_1": b"one",
        "root/batches/meta": b"two",
    }
    fetch_archive(archive(GOOD))
    assert everything(tmp_path) == expected
    (tmp_path / "root/batches/meta").write_bytes(b"damaged")
    fetch_archive(archive(GOOD[1:]))
    assert everything(tmp_path) == expected
    if os.name == "posix":
        umask = os.umask(0o077)
        os.umask(umask)
        assert (tmp_path / "root/batches/meta").stat().st_mode & 0o7777 == 0o666 & ~umask


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_leaves_nothing(name, fetch_archive, tmp_path):
    with pytest.raises(UserError, match="cifar10 could not be downloaded") as caught:
        fetch_archive(archive(GOOD + HOSTILE[name]))
    assert str(caught.value).replace("\n", "", 1).isprintable()
    assert everything(tmp_path) == {"root": False} and not os.path.lexists("/tmp/stoker-out")


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(bytes(10**7)), gzip.compress(b"\xff" * 5000), b"", b"x" * 600],
    ids=["zeros", "ones", "nothing", "no gzip"],
)
def test_what_is_no_archive_leaves_nothing(packed, fetch_archive, tmp_path):
    with pytest.raises(UserError, match="cifar10 could not be downloaded"):
        fetch_archive(packed)
    assert everything(tmp_path) == {"root": False}


def test_a_place_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="mnist could not be downloaded to .*file"):
        download.fetch("mnist", tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "get", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        download.fetch("mnist", tmp_path)


def test_every_file_is_pinned_to_https_a_size_and_a_sum():
    for source in download.SOURCES.values():
        assert source.url.startswith("https://") and source.url.endswith("/")
        for file in source.files:
            assert file.size > 1000 and len(bytes.fromhex(file.sha256)) == 32
    assert len({file.sha256 for source in download.SOURCES.values() for file in source.files}) == 14
