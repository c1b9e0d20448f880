"""Downloads, from a server of this process: only the known bytes are unpacked."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torchvision

from stoker.data import datasets
from stoker.trainer.errors import UserError


class Handler(BaseHTTPRequestHandler):
    """Gives `server.files`."""

    def do_HEAD(self):
        content = self.server.files.get(self.path.strip("/"))
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        return content or b""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.wfile.write(self.do_HEAD())

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
    monkeypatch.setattr(
        torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"]
    )
    yield server
    server.shutdown()
    server.server_close()


def unpacked(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*ubyte")}


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
            files.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", files)
    return contents


def test_what_is_missing_is_fetched_and_read(small_mnist, server, tmp_path):
    folder = tmp_path / "data" / "MNIST" / "raw"
    with pytest.raises(UserError, match="MNIST cannot be read from .*\nType dataset.download=true"):
        datasets.mnist(str(tmp_path / "data"))
    assert not server.asked
    data = datasets.mnist(str(tmp_path / "data"), download=True)
    assert len(data.train) + len(data.val) == 60 and len(data.test) == 20
    assert bytes(data.test.inputs.flatten().tolist()) == small_mnist["t10k-images-idx3-ubyte"][16:]
    assert unpacked(folder) == small_mnist and len(set(server.asked)) == 4
    server.asked.clear()
    datasets.mnist(str(tmp_path / "data"), download=True)
    assert not server.asked  # nothing is fetched that is there
    assert torch.equal(
        torchvision.datasets.MNIST(tmp_path / "data", train=False).data, data.test.inputs.squeeze(1)
    )
    damaged = folder / "train-labels-idx1-ubyte"
    damaged.write_bytes(b"damaged")
    advice = "Type dataset.download=true to fetch it (delete damaged files first)"
    for download in (False, True):
        with pytest.raises(UserError, match="^MNIST cannot be read from ") as error:
            datasets.mnist(str(tmp_path / "data"), download=download)
        _, last = str(error.value).split("\n")
        assert last == f"{advice}, or type dataset.root=DIR if it is elsewhere."
    damaged.unlink()
    datasets.mnist(str(tmp_path / "data"), download=True)
    assert unpacked(folder) == small_mnist


@pytest.mark.parametrize("content", [b"x" * 1000, None])
def test_what_is_not_the_file_is_not_unpacked(content, small_mnist, server, tmp_path):
    server.files["t10k-labels-idx1-ubyte.gz"] = content
    with pytest.raises(UserError, match="corrupted" if content else "Not Found") as caught:
        datasets.mnist(str(tmp_path), download=True)
    message = str(caught.value)
    assert (
        "\\n" not in message
        and message.count("\n") == 1
        and message.replace("\n", "").isprintable()
    )
    assert "dataset.root=DIR" in message
    assert not (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").exists()
