"""Downloads, from a server of this process: only the known bytes are unpacked."""

import gzip
import hashlib
import io
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from stoker.data import datasets, download
from stoker.data.download import File, Source
from stoker.trainer.errors import TrainingError, UserError


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


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.files, server.asked = True, {}, []
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    server.url = f"http://127.0.0.1:{server.server_port}/"
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
            files.append(File(f"{name}.gz", len(packed), sha256(packed)))
    monkeypatch.setitem(download.SOURCES, "mnist", Source(server.url, "MNIST/raw", tuple(files)))
    return contents


def test_what_is_missing_is_fetched_and_read(small_mnist, server, tmp_path, capsys):
    with pytest.raises(UserError, match="MNIST cannot be read from .*\nType dataset.download=true"):
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
        UserError, match=r"cannot be read from .*not an IDX file.*\n.*download=true to fetch it"
    ):
        datasets.mnist(str(tmp_path / "data"))
    datasets.mnist(str(tmp_path / "data"), download=True)
    assert everything(tmp_path / "data" / "MNIST" / "raw") == small_mnist


def hang(handler):
    handler.send_response(200)
    handler.end_headers()
    time.sleep(30)


def garbage(handler):
    handler.wfile.write(b"\x1b[2Jno http\r\n\r\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x" * 999 + b"y", "got 1,000 bytes with the wrong SHA-256; expected 1,000 bytes"),
        (b"x" * 999, "got 999 bytes"),
        (b"x" * 10**6, "got 1,001 bytes"),
        (None, "Not Found"),
        (hang, "timed out"),
        (garbage, r"x1b\[2J|BadStatusLine|no http"),
    ],
)
def test_what_is_not_the_file_leaves_nothing(content, words, server, tmp_path, monkeypatch):
    server.files["f.gz"] = content
    source = Source(server.url, "sub/folder", (File("f.gz", 1000, sha256(b"x" * 1000)),))
    monkeypatch.setitem(download.SOURCES, "mnist", source)
    monkeypatch.setattr(download, "SILENCE", 0.5)
    with pytest.raises(UserError, match=words) as caught:
        download.fetch("mnist", tmp_path)
    message = str(caught.value)
    assert message.count("\n") == 1 and message.replace("\n", "").isprintable()
    assert "dataset.root=DIR" in message
    assert everything(tmp_path) == {}


def test_an_archive_is_unpacked(server, tmp_path, monkeypatch):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in (("batches/data_1", b"one"), ("batches/meta", b"two")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    packed = buffer.getvalue()
    server.files["a.tar.gz"] = packed
    source = Source(server.url, "batches", (File("a.tar.gz", len(packed), sha256(packed)),))
    monkeypatch.setitem(download.SOURCES, "cifar10", source)
    expected = {"batches": False, "batches/data_1": b"one", "batches/meta": b"two"}
    download.fetch("cifar10", tmp_path)
    assert everything(tmp_path) == expected
    (tmp_path / "batches/meta").write_bytes(b"damaged")
    download.fetch("cifar10", tmp_path)
    assert everything(tmp_path) == expected


def test_a_place_that_cannot_be_written(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    server.files["f.gz"] = b"x"
    source = Source(server.url, "a/b", (File("f.gz", 1, sha256(b"x")),))
    monkeypatch.setitem(download.SOURCES, "mnist", source)
    with pytest.raises(UserError, match="mnist could not be downloaded to .*file"):
        download.fetch("mnist", tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "unpack", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        download.fetch("mnist", tmp_path)


def test_every_file_is_pinned_to_https_a_size_and_a_sum():
    for source in download.SOURCES.values():
        assert source.url.startswith("https://") and source.url.endswith("/")
        for file in source.files:
            assert file.size > 1000 and len(bytes.fromhex(file.sha256)) == 32
    assert len({file.sha256 for source in download.SOURCES.values() for file in source.files}) == 14
