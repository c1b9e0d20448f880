"""Devices, precisions, seeds, fused optimizers; what is said of a wrong device; backends stay in
one file.
"""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import torch
from conftest import make_trainer
from torch.nn.utils.rnn import pack_sequence

from stoker import Trainer
from stoker.command.exit_codes import code_of
from stoker.command.messages import message
from stoker.trainer import device as devices
from stoker.trainer import memory, seeding, step_errors, transfer
from stoker.trainer.errors import UserError, explanation_of

ROOT = Path(__file__).resolve().parent.parent
CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
needs_no_accelerator = pytest.mark.skipif(
    ACCELERATOR is not None,
    reason="this machine has an accelerator; without one every other device is absent",
)


# choose


def test_auto_is_the_best_that_is_there():
    there = devices.available()
    assert there[0] == "cpu" and there == list(dict.fromkeys(there))
    assert (
        devices.choose("auto").type
        == (ACCELERATOR.type if ACCELERATOR else "cpu")
        == devices.choose().type
    )
    for name in there:
        assert devices.choose(name).type == name.partition(":")[0]


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu")])
def test_cpu(name):
    assert devices.choose(name) == CPU


@pytest.mark.parametrize(
    ("reason", "names"),
    [
        ("not a valid device name", ["cpu:x", "cuda:", "", "CUDA", "cuda 1", 7.5, 0]),
        ("this machine has no such device", ["gpu", "cuda:99", "cpu:1", "meta", "vulkan", "hpu:0"]),
    ],
)
def test_a_device_that_is_not_there_says_why_and_what_to_type(reason, names):
    for name in names:
        with pytest.raises(UserError) as caught:
            devices.choose(name)
        text = str(caught.value)
        assert text.startswith(f"device={name}: ") and reason in text and "Type device=auto" in text
        assert len(text.splitlines()) <= 3


@needs_no_accelerator
def test_the_refusal_of_a_gpu_says_why():
    with pytest.raises(UserError) as caught:
        devices.choose("cuda")
    assert f"has no such device: {devices.no_cuda()}.\nType" in str(caught.value)


def test_what_a_backend_does_not_count_is_left_out(monkeypatch):
    """The module that a backend registers may have no memory statistics and no names."""
    monkeypatch.setattr(torch, "meta", types.ModuleType("torch.meta"), raising=False)
    assert memory.free_memory(META) == 4 * 2**30
    assert devices.describe(META) == "meta"


@pytest.mark.parametrize(("kind", "expected"), [("cpu", torch.float64), ("nothing", torch.float32)])
def test_sums_are_as_wide_as_the_device_allows(kind, expected):
    assert devices.wide_type(kind) is expected


@needs_no_accelerator
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1", "mps", "xpu", "xpu:0"])
def test_on_a_machine_with_cpu_only(name):
    assert devices.available() == ["cpu"]
    with pytest.raises(
        UserError,
        match=rf"^device={name}: this machine has no such device.*\nType device=auto, or one of: cpu\.$",
    ):
        devices.choose(name)


def test_describe():
    text = devices.describe(CPU)
    threads = torch.get_num_threads()
    assert text == f"cpu, {threads} thread{'s' if threads > 1 else ''}"


# precision


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        *[(old, None) for old in ((5, 2), (6, 0), (6, 1))],
        *[(volta, torch.float16) for volta in ((7, 0), (7, 2), (7, 5))],
        *[(new, torch.bfloat16) for new in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))],
    ],
)
def test_precision_auto_on_cuda_is_what_the_architecture_has(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices.choose_precision("auto", CUDA) is expected
    assert devices.choose_precision("fp32", CUDA) is None  # what is asked for is what there is
    assert devices.choose_precision("bf16", CUDA) is torch.bfloat16


def test_precision_auto_on_rocm_is_bf16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert devices.choose_precision("auto", CUDA) is torch.bfloat16


def test_precision_elsewhere():
    assert devices.choose_precision("auto", CPU) is None
    assert devices.choose_precision("auto", torch.device("mps")) is None
    assert devices.choose_precision("auto", torch.device("xpu")) is torch.bfloat16
    for device in (CPU, CUDA, torch.device("mps")):
        found = [devices.choose_precision(name, device) for name in ("fp32", "bf16", "fp16")]
        assert found == [None, torch.bfloat16, torch.float16]
    with pytest.raises(
        UserError,
        match=r"precision=bf6: .* Did you mean 'bf16'\?\nChoose one of: auto, fp32, bf16, fp16",
    ):
        devices.choose_precision("bf6", CPU)


@pytest.mark.parametrize(
    ("precision", "enabled"), [("fp32", False), ("bf16", False), ("fp16", True)]
)
def test_the_scaler_and_autocast_do_nothing_where_they_are_not_wanted(precision, enabled):
    assert make_trainer(precision=precision).scaler.is_enabled() is enabled
    dtype = devices.DTYPES[precision]
    context = devices.autocast(CPU, dtype)
    inputs = torch.randn(3, 4)
    for _ in range(3):  # entered again and again
        with context:
            assert (inputs @ inputs.T).dtype == (dtype or torch.float32)
        assert (inputs @ inputs.T).dtype == torch.float32


# seeds


def test_mix_seed_is_a_known_hash():
    """These numbers are in every run that was ever made: a change of them changes all results."""
    assert seeding.mix_seed(0, "model") == 1689353482259370465
    assert seeding.mix_seed(0, "step", 1) == 4238720567276977853
    assert seeding.mix_seed() == 2847183694713211083


def test_mix_seed_separates_neighbours():
    seeds = {seeding.mix_seed(seed, "step", step) for seed in range(60) for step in range(60)}
    assert len(seeds) == 3600 and all(0 <= seed < 2**63 for seed in seeds)
    assert (
        seeding.mix_seed(1, 2)
        != seeding.mix_seed(2, 1)
        != seeding.mix_seed(12)
        != seeding.mix_seed("1", 2)
    )
    assert seeding.mix_seed(0, 1) != seeding.mix_seed(1, 0) and seeding.mix_seed(
        1, 23
    ) != seeding.mix_seed(12, 3)
    differing = [
        (seeding.mix_seed(0, i) ^ seeding.mix_seed(0, i + 1)).bit_count() for i in range(200)
    ]
    assert 27 < sum(differing) / 200 < 36  # half of 63 bits


def test_seed_generators_repeats_draws_and_touches_nothing_else():
    import random

    import numpy

    own = torch.Generator().manual_seed(5)
    before = own.get_state()
    seeding.seed_generators(CPU, 123)
    first = (
        torch.rand(5),
        torch.randn(3),
        torch.randperm(9),
        torch.nn.functional.dropout(torch.ones(20)),
        torch.tensor(random.random()),
        torch.tensor(numpy.random.rand()),
    )
    seeding.seed_generators(CPU, 123)
    second = (
        torch.rand(5),
        torch.randn(3),
        torch.randperm(9),
        torch.nn.functional.dropout(torch.ones(20)),
        torch.tensor(random.random()),
        torch.tensor(numpy.random.rand()),
    )
    assert all(map(torch.equal, first, second))
    seeding.seed_generators(CPU, 124)
    assert not torch.equal(torch.rand(5), first[0])
    assert random.random() != float(first[4]) and numpy.random.rand() != float(first[5])
    assert torch.equal(own.get_state(), before)
    random.gauss(0, 1)  # keeps a second number for the next call
    seeding.seed_generators(CPU, 2**62 + 123)
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    random.seed(2**62 + 123)
    numpy.random.seed(123)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())
    seeding.seed_generators(CPU, 123)
    assert torch.equal(
        torch.rand(5), torch.rand(5, generator=torch.Generator().manual_seed(123))
    )  # as if it were a generator of one's own


# moving


class Pair(typing.NamedTuple):
    inputs: torch.Tensor
    name: str


def test_move_moves_every_tensor_and_nothing_else():
    thing = object()
    batch = {
        "x": torch.ones(2),
        "list": [torch.ones(1), 3, "text", None, thing],
        "pair": Pair(torch.ones(2), "a"),
        "tuple": (torch.ones(1, dtype=torch.int64),),
        "packed": pack_sequence([torch.ones(2)]),
    }
    moved = transfer.move(batch, META)
    assert all(
        tensor.device == META
        for tensor in (
            moved["x"],
            moved["list"][0],
            moved["pair"].inputs,
            moved["tuple"][0],
            moved["packed"].data,
        )
    )
    assert (
        moved["list"][1:] == [3, "text", None, thing]
        and moved["list"][4] is thing
        and type(moved["pair"]) is Pair
        and moved["pair"].name == "a"
    )
    assert moved["tuple"][0].dtype == torch.int64
    assert (
        batch["x"].device == CPU and batch["list"][0].device == CPU
    )  # the batch itself stays where it was


def test_move_to_where_it_is_copies_nothing():
    x = torch.ones(2)
    assert transfer.move([x], CPU)[0] is x
    assert transfer.move("text", CPU) == "text"


# memory


def test_memory_is_plausible():
    import os

    installed = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else 2**50
    )
    assert 2**20 < memory.free_memory(CPU) <= installed
    before = memory.peak_memory(CPU)
    block = torch.ones(2**25)  # 128 MiB, written
    after = memory.peak_memory(CPU)
    assert 10 * 2**20 < before <= after <= installed and after >= block.nbytes
    del block
    assert memory.peak_memory(CPU) >= after  # the most that there was


def test_release_collects_cycles_and_may_be_called_again():
    import weakref

    class Node:
        pass

    node = Node()
    node.itself, gone = node, weakref.ref(node)
    del node
    memory.release(CPU)
    assert gone() is None
    memory.release(CPU)
    devices.synchronize(CPU)


# a wrong device


class Net(torch.nn.Module):
    """Adds a buffer and a plain attribute to a linear layer's output."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.inner = torch.nn.Module()
        self.register_buffer("offset", torch.zeros(2))
        self.inner.scale = torch.ones(2)

    def forward(self, inputs):
        return self.linear(inputs) * self.inner.scale + self.offset


def wrong_parameter(net):
    net.linear.bias = torch.nn.Parameter(torch.zeros(2, device="meta"))


def wrong_buffer(net):
    net.offset = torch.zeros(2, device="meta")


def wrong_attribute(net):
    net.inner.scale = torch.ones(2, device="meta")


@pytest.mark.parametrize("wrong", [wrong_parameter, wrong_buffer, wrong_attribute])
def test_the_advice_for_a_model_on_two_devices(wrong):
    """torch's own error for such a model, on the way forward."""
    net = Net()
    wrong(net)
    with pytest.raises(RuntimeError) as caught:
        net(torch.ones(4, 3)).sum().item()
    assert "self.register_buffer" in step_errors.advice(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "Expected all tensors to be on the same device, but found at least two devices",
        "Input and hidden tensors are not at the same device, found input tensor at cuda:0",
        "Tensor on device cpu is not on the expected device meta!",
        "Expected object of device type cuda but got device type cpu for argument #1 'self'",
    ],
)
def test_the_advice_for_torchs_words_about_two_devices(text):
    assert "device=inputs.device" in step_errors.advice(RuntimeError(text))


def test_explain_a_failed_check_inside_a_kernel():
    """As a class out of range ends a training on a GPU; the device refuses every call after it."""
    error = torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with ...")
    text = step_errors.advice(error)
    assert "a class in the targets" in text and "Type device=cpu" in text


@pytest.mark.parametrize("kind", ["CUDA error", "HIP error", "CUDA driver error"])
def test_out_of_memory_without_a_type_of_its_own(kind):
    assert memory.is_out_of_memory(RuntimeError(f"{kind}: out of memory\nmore"))
    assert not memory.is_out_of_memory(RuntimeError(f"{kind}: an illegal memory access"))


class HiddenState(torch.nn.Module):
    """Starts an RNN from a state on another device."""

    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(3, 2, batch_first=True)

    def forward(self, inputs):
        state = torch.zeros(1, len(inputs), 2, device="meta")
        return self.rnn(inputs.unsqueeze(1), state)[0].squeeze(1)  # here


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("device"),
        RuntimeError(""),
    ],
)
def test_other_errors_have_no_advice(error):
    assert step_errors.advice(error) is None


def loader():
    return [(torch.ones(4, 3), torch.zeros(4, 2))] * 2


def trainer(net=None, kind=Trainer):
    return kind(
        net or Net(), torch.nn.MSELoss(), functools.partial(torch.optim.SGD, lr=0.1), device="cpu"
    )


@pytest.mark.parametrize("doing", ["fit", "evaluate"])
@pytest.mark.parametrize("wrong", [wrong_parameter, wrong_buffer, wrong_attribute])
def test_an_error_about_two_devices_shows_the_line_and_the_advice(wrong, doing):
    """The model is right when it is built, as it has to be, and wrong afterwards."""
    with trainer() as own:
        wrong(own.module)
        with pytest.raises(RuntimeError, match="device") as caught:
            getattr(own, doing)(loader())
    place, advice = explanation_of(caught.value).split("\n")
    assert re.match(
        rf"RuntimeError in forward \({re.escape(__file__)}:\d+\)\. The .*batch: ", place
    )
    assert advice == (
        "The model uses a tensor on another device. Register the model's tensors as buffers "
        "(self.register_buffer), and create others with device=inputs.device."
    )
    assert code_of(caught.value) == 2
    assert message(caught.value).split("\n")[1:] == [
        place,
        f"{advice} debug=true shows the traceback.",
    ]


@pytest.mark.parametrize("doing", ["fit", "evaluate"])
def test_an_error_about_a_batch_on_another_device_shows_the_line(doing):
    class Misplaced(Trainer):
        def compute_loss(self, batch):
            outputs = self.model(batch["x"].to("meta"))
            return self.loss(outputs, batch["y"]), outputs

    batches = [{"x": torch.ones(4, 3), "y": torch.zeros(4, 2)}]
    with trainer(kind=Misplaced) as own, pytest.raises(RuntimeError, match="device") as caught:
        getattr(own, doing)(batches)
    assert "device=inputs.device" in explanation_of(caught.value)


def test_a_state_made_on_another_device_shows_its_line_and_the_advice():
    with trainer(HiddenState()) as own, pytest.raises(RuntimeError, match="device") as caught:
        own.fit(loader())
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# here"))
    text = explanation_of(caught.value)
    assert f"{Path(__file__).name}:{line})" in text and "device=inputs.device" in text


@pytest.mark.parametrize("doing", ["fit", "evaluate"])
def test_the_trainer_leaves_other_errors_alone(doing):
    with trainer() as own, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        getattr(own, doing)([(torch.ones(4, 7), torch.zeros(4, 2))])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton")
def test_what_is_left_alone_is_gone_at_the_end():
    code = "import triton; from stoker.command import tuning; tuning.freeze_imports()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        0,
        "",
    )  # and not 27 lines of "nanobind: leaked 4 instances!"


# the rules

SOURCES = sorted(
    [
        ROOT / "train.py",
        *(
            path
            for folder in ("stoker", "trainer", "data", "models", "examples")
            for path in (ROOT / folder).rglob("*.py")
        ),
    ]
)


def docstrings(tree):
    """The ids of the nodes that are docstrings."""
    owners = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
    ]
    first = [owner.body[0] for owner in owners]
    return {
        id(node.value)
        for node in first
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def backend_names(tree):
    """The lines that know a backend: an attribute or a name such as `torch.cuda`, or a string with
    "cuda" in it.

    Not so: docstrings, and strings that are only shown: those inside a `raise`, and the help's
        example commands.
    """
    shown = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            shown |= {id(inner) for inner in ast.walk(node)}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.endswith(" device=cuda epochs=3")
        ):
            shown.add(id(node))
    for node in ast.walk(tree):
        text = (
            node.value
            if isinstance(node, ast.Constant)
            else node.attr
            if isinstance(node, ast.Attribute)
            else node.id
            if isinstance(node, ast.Name)
            else ""
        )
        if isinstance(text, str) and "cuda" in text.lower() and id(node) not in shown:
            yield node.lineno


def test_the_sources_are_all_looked_at():
    names = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    assert {
        "train.py",
        "trainer/trainer.py",
        "stoker/command/exit_codes.py",
        "data/loader.py",
        "models/mlp.py",
    } <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_the_modules_of_devices_know_a_backend(path):
    lines = list(backend_names(ast.parse(path.read_text(encoding="utf-8"))))
    # help.py shows a name in its examples.
    knows = path.relative_to(ROOT).as_posix() in ("trainer/device.py", "stoker/command/help.py")
    assert (lines == []) != knows


@pytest.mark.parametrize(
    "source", ["x = 'cuda'", "torch.cuda.synchronize()", "x.cuda()", "f(device=f'cuda:{i}')"]
)
def test_the_rule_sees_what_it_forbids(source):
    assert list(backend_names(ast.parse(source)))


def test_and_nothing_else():
    assert list(backend_names(ast.parse("raise UserError('Type device=cuda')"))) == []


@pytest.mark.parametrize("kernels", ["avx2", "native"])
def test_channels_last_is_not_used_where_torch_computes_wrong_gradients(kernels):
    program = """if True:
        import torch
        from stoker.trainer import device
        from stoker.trainer.errors import UserError

        def make():
            return torch.nn.Conv2d(CHANNELS, 16, kernel_size=1, stride=2, bias=False)

        torch.set_num_threads(2)

        try:
            device.place(make(), torch.device("cpu"), channels_last=True)
        except UserError as error:
            print(str(error).split(":")[0])
        convolution = device.place(make(), torch.device("cpu"))
        for _ in range(10):
            inputs = torch.randn(25, CHANNELS, 32, 32)
            convolution.zero_grad()
            outputs = convolution(inputs)
            gradient = torch.randn_like(outputs)
            outputs.backward(gradient)
            by_hand = torch.einsum("nohw,nihw->oi", gradient, inputs[:, :, ::2, ::2])
            found = convolution.weight.grad[:, :, 0, 0]
            torch.testing.assert_close(found, by_hand, rtol=1e-3, atol=1e-3)
        print("same")
    """
    program = program.replace("CHANNELS", "4" if kernels == "avx2" else "8")
    without_avx512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(without_avx512 if kernels == "avx2" else {})},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["channels_last=true", "same"], done.stderr
