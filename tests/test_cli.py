"""What is typed and what comes of it: mistakes, runs that repeat themselves, sweeps, resumes, and
every config.
"""

import concurrent.futures
import contextlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
from forks import PROGRAM
from hydra.core.hydra_config import HydraConfig
from made_runs import MEASURED
from omegaconf import OmegaConf, open_dict

import stoker
from stoker import Trainer
from stoker.command import check, settings, trust
from stoker.runs import resume, saved_config
from stoker.tasks import evaluate
from stoker.tasks.parts import building
from stoker.trainer import checkpoint
from stoker.trainer.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
TRAIN = str(ROOT / "train.py")
# One thread: sums have one order, and two runs fit beside each other. No GPU: what is expected is
# what a CPU gives.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
PATIENCE = 300  # seconds for one command: for a hang, no limit to be near to


def run(folder, *arguments, python=(TRAIN,), patience=PATIENCE, **environment):
    """`python train.py ...` in `folder`: its exit code, its output, and what lies in the folder
    afterwards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *python, *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    return SimpleNamespace(
        code=done.returncode, out=done.stdout, err=done.stderr, files=listing(folder)
    )


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def at_once(*calls):
    """The results of functions without arguments, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def rows(folder):
    """The rows of metrics.jsonl, without what a clock says."""
    lines = [
        json.loads(line)
        for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        {name: value for name, value in line.items() if name != "train/seconds"} for line in lines
    ]


def equal(first, second):
    """Whether two checkpoints are the same, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal(first[key], second[key]) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


# mistakes

EARLY = [  # what is typed; what the answer names; what it suggests
    ("seeed=1", "error: seeed: no such key.", "Did you mean 'seed'?"),
    ("modle=mlp", "error: modle: no such key.", "Did you mean 'model'?"),
    (
        "model=cnn model.hiden=[3]",
        "error: model.hiden: no such key",
        "The keys of model: channels,",
    ),
    ("overfit", "error: overfit: this cannot be parsed.", "Type settings as key=value"),
    (
        "model.hiden=[3]",
        "error: model.hiden: no such key.",
        "Did you mean 'model.hidden'?",
    ),
    ("hidden=[3]", "error: hidden: no such key.", "Did you mean 'model.hidden'?"),
    ("lr=0.1", "error: lr: no such key.", "Did you mean 'optimizer.lr'?"),
    ("lrate=3", "error: lrate: no such key.", "Did you mean 'optimizer.lr'?"),
    ("trusted=mine", "error: trusted=mine: expected a list", "as in 'trusted=[mine]'."),
    ("epochs=1e1", "error: epochs=10.0: expected a whole number", "at least 1"),
    ("path=a.csv", "error: path: no such key.", "type dataset=csv dataset.path=..."),
    ("--model cnn", "error: --model: no such option.", "as in device=cpu."),
    ("resume=true", "error: resume=true: expected auto, never, or a checkpoint file", ""),
    (
        "checkpoint=false",
        "error: checkpoint=false: expected a group of keys",
        "as in 'checkpoint={every:null,",
    ),
    (
        "checkpoint.evry=3",
        "error: checkpoint.evry: no such key.",
        "Did you mean 'checkpoint.every'?",
    ),
    ("+typo=1", "error: typo: no such key.", "Type --help"),
    (
        "model=ccn",
        "error: model=ccn: not a valid choice. Did you mean 'cnn'?",
        "Choose one of: cnn, gpt, linear, mlp, resnet",
    ),
    ("optimizer=adamm", "error: optimizer=adamm: not a valid choice.", "Did you mean 'adam'?"),
    ("dataset=minst", "error: dataset=minst: not a valid choice.", "Did you mean 'mnist'?"),
    (
        "task=tarin",
        "error: task=tarin: not a valid choice. Did you mean 'train'?",
        "Choose one of: train, plan, evaluate, predict, generate, export, lr_find, reproduce.",
    ),
    (
        "callbacks=[tensorbord]",
        "error: callbacks=tensorbord: not a valid choice.",
        "Did you mean 'tensorboard'?",
    ),
    (
        "-m model=mlp,ccn",
        "error: model=ccn: not a valid choice. Did you mean 'cnn'?",
        "Choose one of: cnn, gpt",
    ),
    ("-m seeed=1,2", "error: seeed: no such key.", "Did you mean 'seed'?"),
    ("batch_size=", "error: batch_size=: expected a whole number", "at least 1"),
    ("optimizer.lr=abc", "error: optimizer.lr=abc: expected a number", "as in optimizer.lr=0.003."),
    ("epochs=2.5", "error: epochs=2.5: expected a whole number", "at least 1"),
    ("epochs=true", "error: epochs=true: expected a whole number", "at least 1"),
    ("compile=yes", "error: compile=yes: not a valid choice.", "false, true, graph"),
    (
        "model.hidden=abc",
        "error: model.hidden=abc: expected a list",
        "as in 'model.hidden=[256,256]'.",
    ),
    (
        "model.activation=3",
        "error: model.activation=3: expected a string",
        "as in model.activation=relu.",
    ),
    (
        "dataset.augment=flip",
        "error: dataset.augment=flip: expected a list",
        "as in 'dataset.augment=[flip]'.",
    ),
    ("checkpoint=3", "error: checkpoint=3: expected a group of keys", "checkpoint={every:"),
    (
        "callbacks.ema=3",
        "error: callbacks.ema=3: expected a group of keys",
        "callbacks.ema={_target_:",
    ),
    ("seed=[1", "error: seed=[1: this cannot be parsed.", "inside the shell's quotes"),
    (
        "-m seed=0,1 hydra.sweep.dri=x",
        "error: Could not override 'hydra.sweep.dri'.",
        "Did you mean: 'dir'?",
    ),
    ("hydra.foo=1", "error: Could not override 'hydra.foo'.", "'foo' not in 'HydraConf'"),
    ("dataset.augment[0]=3", "override dataset.augment[0]=3", "list index out of range"),
    (
        "-m seed=0,1 hydra/launcher=basik",
        "error: hydra/launcher=basik: not a valid choice.",
        "one of: local, submitit_slurm.",
    ),
    ("model", "error: model: this cannot be parsed.", "key=value, as in epochs=3"),
    ("predict run=x a.png", "error: a.png: this cannot be parsed.", "key=value, as in epochs=3"),
    ("evalute run=x", "error: evalute: this cannot be parsed. Did you mean 'evaluate'?", ""),
    ("tran", "error: tran: this cannot be parsed. Did you mean 'train'?", ""),
    (
        "run_dir=,",
        "error: run_dir=,: this cannot be parsed.",
        "inside the shell's quotes",
    ),
    ("epochs=${nope}", "error: epochs: Interpolation key 'nope' not found", "Type epochs=VALUE"),
    ("~model", "error: model: a run needs a value for this key.", "Remove ~model."),
    ("~trainer.epochs", "a Trainer always gets the run's epochs.", "Remove ~trainer.epochs."),
    ("~seed", "error: seed: a run needs a value for this key.", "Remove ~seed."),
    ("--bogus", "error: --bogus: no such option.", "as in device=cpu."),
    ("--epochs=3", "error: --epochs=3: no such option.", "as in device=cpu."),
    ("-c", "error: argument --cfg/-c: expected one argument.", "Type --hydra-help"),
    (
        "-c jobb",
        "error: argument --cfg/-c: invalid choice: 'jobb' (choose from",
        "Type --hydra-help",
    ),
    ("--config-dir=x", "error: --config-dir=x: no such option.", "as in device=cpu."),
    ("-patience=1", "error: -patience=1: no such option.", "as in device=cpu."),
    (
        "dataset=csv dataset.path=x",
        "error: dataset.target: Missing mandatory value: target.",
        "Type dataset.target=VALUE",
    ),
    (
        "dataset=digits,synthetic",
        "error: dataset=digits,synthetic:",
        "Type -m dataset=digits,synthetic",
    ),
    (
        "seed=1,2",
        "error: seed=1,2: several values need a sweep.",
        "Type -m seed=1,2.\nOr type 'key=[1,2]' for a list",
    ),
    (
        "task=predict run=x input=a,b.jpg",
        "error: input=a,b.jpg: several values need a sweep.",
        "\"key='1,2'\" for one value with a comma.",
    ),
    (
        "task=evaluate run=x dataset.path=a,b.csv",
        "dataset.path=a,b.csv: several values need a sweep.",
        "\"key='1,2'\" for one value with a comma.",
    ),
    (
        "model=[cnn]",
        "error: model=[cnn]: this is a group",
        "model=NAME, with one of: cnn, gpt",
    ),
    (
        "model=[mlp,cnn]",
        "error: model=[mlp,cnn]: this is a group",
        "model=NAME, with one of: cnn, gpt",
    ),
    ("+model=cnn", "error: +model=cnn: this is a group", "model=NAME, with one of: cnn, gpt"),
    ("model=null", "error: model=null: this is a group", "model=NAME, with one of: cnn, gpt"),
    ("model=3", "error: model=3: this is a group", "model=NAME, with one of: cnn, gpt"),
    ("model={a:1}", "error: model={a:1}: this is a group", "model=NAME, with one of: cnn, gpt"),
    (
        "+epochs=3",
        "error: Could not append to config. An item is already at 'epochs'",
        "'epochs=3'",
    ),
    ("~foo", "error: Could not delete", "'foo'"),
    ("~model.foo", "error: Could not delete", "foo"),
    ("=3", "error: =3: these settings cannot be read", ""),
    ("--hlep", "error: --hlep: no such option.", ""),
    ("run_dir=", "error: run_dir=: type a string", ""),
    (
        "-m seed=0,1 run_dir=x",
        "error: run_dir=x: this setting is for a single run.",
        "type hydra.sweep.dir=DIR.",
    ),
    (
        "-m seed=0,1 run_dir=",
        "error: run_dir=: this setting is for a single run.",
        "type hydra.sweep.dir=DIR.",
    ),
    (
        "micro_batch=0",
        "error: micro_batch=0: expected auto, or a whole number of at least 1",
        "or null",
    ),
    ("micro_batch=atuo", "error: micro_batch=atuo: expected auto", "or null"),
    (
        "micro_batch=8 grad_accum_steps=2",
        "micro_batch=8 and grad_accum_steps=2 both split",
        "Type only one of them.",
    ),
    (
        "dataset.workers=-1",
        "error: dataset.workers=-1: expected auto, or a whole number of at least 0.",
        "",
    ),
    ("channels_last=maybe", "channels_last=maybe", "auto, true, false"),
    ("tune=[foo]", "error: tune=[foo]: expected a list", "allocator, threads"),
    ("batch_size=0", "error: batch_size=0: expected a whole number of at least 1.", ""),
    (
        "eval_batch_size=0 max_steps=2",
        "error: eval_batch_size=0: expected a whole number of at least 1",
        "",
    ),
    ("epochs=-1", "error: epochs=-1: expected a whole number of at least 1.", ""),
    ("max_steps=0", "error: max_steps=0: expected a whole number of at least 1", "or null"),
    ("seed=-1", "error: seed=-1: expected a whole number of at least 0.", ""),
    ("eval_every=0", "error: eval_every=0:", "or null"),
    ("max_grad_norm=0", "error: max_grad_norm=0:", "above 0, or null"),
    ("max_minutes=0", "error: max_minutes=0:", "above 0"),
    ("patience=0", "error: patience=0:", "at least 1"),
    ("ema=2", "error: ema=2:", "above 0 and at most 1"),
    ("checkpoint.keep=1", "error: checkpoint.keep=1:", "at least 2"),
    (
        "checkpoint.keep=null",
        "error: checkpoint.keep=null: expected a whole number",
        "at least 2",
    ),
    ("checkpoint.epochs=null checkpoint.minutes=0", "error: checkpoint.minutes=0:", "or null"),
    ("checkpoint.epochs=0", "error: checkpoint.epochs=0:", "or null"),
    (
        "device=cuda:",
        "error: device=cuda:: not a valid device name.",
        "Type device=auto, or name a device, as in device=cuda:1.",
    ),
    (
        "precision=fp8",
        "error: precision=fp8: not a valid choice.",
        "Choose one of: auto, fp32, bf16, fp16.",
    ),
    (
        "strategy=ddq",
        "error: strategy=ddq: not a valid choice. Did you mean 'ddp'?",
        "Choose one of: auto, single, dp, ddp, fsdp.",
    ),
    (
        "monitor_mode=maxx",
        "error: monitor_mode=maxx: not a valid choice.",
        "Did you mean 'max'?",
    ),
    ("dataset.resident=maybe", "error: dataset.resident=maybe:", "one of: auto, true, false"),
    ("task=evaluate", "error: task=evaluate needs a run directory.", "Type run=DIR."),
    ("task=evaluate run_dir=mine", "error: task=evaluate needs a run directory.", "Type run=mine."),
    (
        "task=evaluate run=nope",
        f"error: run=nope: not a run directory, because {Path('nope/config.yaml')} does not exist.",
        "Type run=DIR.",
    ),
    (f"task=evaluate run={TRAIN}", f"error: run={TRAIN}: not a run directory", "Type run=DIR."),
    (f"task=evaluate run={ROOT / 'tests'}", "tests: not a run directory", "Type run=DIR."),
    (f"resume={ROOT / 'tests'}", "tests: expected auto, never, or a checkpoint file", ""),
    (
        "resume=nope",
        "error: resume=nope: expected auto, never, or a checkpoint file.",
        "",
    ),
]
LATE = [
    ("optimizer.lr=-1", "error: optimizer: Invalid learning rate: -1", ""),
    (
        "dataset.augment=[flop]",
        "error: dataset.augment=flop: not a valid choice. Did you mean 'flip'?",
        "Choose one of: flip, shift, crop",
    ),
    ("dataset.augment=[flip,{shfit:2}]", "error: dataset.augment=shfit:", "Did you mean 'shift'?"),
    (
        "optimizer=decoupled_sgd optimizer.lr=0",
        "error: optimizer.lr=0: expected a number above 0.",
        "",
    ),
    ("model.dropout=1.5", "error: model.dropout=1.5: expected a number", "at most 0.95"),
    ("compile=graph device=cpu", "compile=graph", "Type compile=true"),
    ("channels_last=true", "channels_last=true", "channels_last=auto"),
    (
        "model._target_=models.mlp",
        "error: model._target_=models.mlp: this is not a class or function that a config may call.",
        "",
    ),
    (
        "+model.typo=1",
        "error: model.typo: stoker.models.mlp.MLP has no such argument.",
        "Its arguments are: hidden, activation, dropout, norm.",
    ),
    (
        "+optimizer.typo=1",
        "error: optimizer.typo: torch.optim.AdamW has no such argument.",
        "Its arguments are: params, lr,",
    ),
    (
        "batch_size=99999 drop_last=true",
        "error: batch_size=99999: digits has only 1259 training samples, so drop_last=true would",
        "Type drop_last=false, or a batch_size of at most 1259.",
    ),
    ("scheduler.warmup=-1", "error: scheduler.warmup=-1:", "at least 0"),
    (
        "optimizer.betas=[2,0.9]",
        "error: optimizer: Invalid beta parameter",
        "Choose a different value.",
    ),
    (f"run_dir={TRAIN}/below/it", "cannot write to this folder", "Not a directory"),
    ("model.hidden=[a]", "error: model.hidden=a: expected a whole number of at least 1.", ""),
    (
        "model.activation=rleu",
        "error: model.activation=rleu: not a valid choice. Did you mean 'relu'?",
        "Choose one of: relu, gelu, silu, tanh.",
    ),
    ("device=cuda", "error: device=cuda: this machine has no such device", "Type device=auto"),
    ("device=gpu", "error: device=gpu: this machine has no such device.", "Type device=auto"),
    (
        "monitor=val/accc",
        "error: monitor=val/accc: no such number is logged, or ",
        "Did you mean 'val/acc'?",
    ),
    ("monitor=null", "error: monitor=null: no such number is logged", "Choose one of: val/acc"),
    (
        "scheduler._target_=torch.optim.lr_scheduler.MultiStepLR +scheduler.milestones=5",
        "error: scheduler: 'int' object is not iterable.",
        "Check its arguments.",
    ),
    (
        "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=0",
        "error: scheduler: integer modulo by zero.",
        "Check its arguments.",
    ),
    (
        "scheduler._target_=torch.optim.lr_scheduler.StepLR +scheduler.step_size=abc",
        "error: scheduler: unsupported operand type(s) for %",
        "Check its arguments.",
    ),
    (
        "model._target_=torchvision.models.resnet18 +model.weights=FOO",
        "error: model (torchvision.models.resnet18): KeyError: 'FOO'",
        "",
    ),
    (
        "loss=mse",
        "error: MSELoss is a loss for regression, but digits is a data set for classification.",
        "Type loss=cross_entropy, or dataset.kind=regression for a table.",
    ),
    (
        "dataset=synthetic dataset.kind=regression",
        "error: CrossEntropyLoss is a loss for classification",
        "Type loss=mse (or l1, huber), or dataset.kind=classification for a table.",
    ),
    (
        "model=cnn dataset=synthetic",
        "error: model: cnn takes images",
        "Type model=mlp or model=linear, or model=gpt for text.",
    ),
    (
        "dataset=synthetic dataset.n=10000000000000",
        "error: dataset (stoker.data.datasets.synthetic): ",
        "can't allocate memory",
    ),
    ("dataset.val_fraction=2", "error: dataset.val_fraction=2:", "at most 0.95"),
    (
        "dataset=csv dataset.path=nope.csv dataset.target=y",
        "error: dataset.path=nope.csv: no such file.",
        "",
    ),
    (
        "dataset=mnist dataset.root=/nope",
        "error: MNIST cannot be read from /nope/MNIST/raw ",
        "Type dataset.download=true",
    ),
    (
        "dataset=image_folder dataset.root=/nope",
        "error: dataset.root=/nope: there is no folder /nope.",
        "Type dataset.root=DIR",
    ),
    (
        "model._target_=os.system",
        "error: model._target_=os.system: this is not a class or function that a config may call",
        "",
    ),
    ("trainer._target_=torch.nn.Identity", "this returns an Identity, not a stoker.Trainer", ""),
    ("+loss.weight=abc", "error: loss.weight=abc: expected a list with one number per class.", ""),
    (
        "trainer._target_=examples.nope.X",
        "error: trainer._target_=examples.nope.X: No module named 'examples.nope'",
        "",
    ),
    (
        "optimizer._target_=torch.optim.AdmaW",
        "AdmaW: ",
        "Did you mean 'torch.optim.AdamW'?",
    ),
    ("model._target_=stoker.models.mpl.MLP", "mpl", "No module named"),
    ("model._target_=modells.TinyNet", "modells", "start Python in the folder that contains it"),
    ("optimizer._target_=torch.optim.Nope", "error: optimizer._target_=torch.optim.Nope:", ""),
    ("+metrics.a=3", "error: metrics.a: this needs a _target_", "Type +metrics.a._target_=..."),
    ("+metrics.a._target_=", "_target_=: expected the dotted name of a class", "as in mine.Name."),
    (
        "metrics.a=3",
        "error: metrics.a: no such key.",
        "Type +metrics.a._target_=... to add",
    ),
    (
        "groups={match:a}",
        "error: Error merging override groups={match:a}",
        "incompatible container",
    ),
    ("checkpoint=[1]", "error: Error merging override checkpoint=[1]", "incompatible container"),
]

# One process imports what each command needs, and a fork of it answers each, two at a time: 0.5 s
# each and not 2.
FORKS = """
    import atexit, gc, importlib, json, os, runpy, sys
    train, commands = sys.argv[1], json.load(open(sys.argv[2]))
    for module in sys.argv[3:]:
        importlib.import_module(module)
    sys.path.insert(0, os.path.dirname(train))
    gc.freeze()
    codes, running = {}, 0
    for number, (folder, arguments) in enumerate(commands):
        if running == 2:
            child, status = os.wait()
            codes[child], running = os.waitstatus_to_exitcode(status), 1
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for stream, name in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(folder + name, os.O_WRONLY | os.O_CREAT), stream)
            from stoker.runs import report
            report.html = lambda folder, state: ""  # half a second of drawing, of which tests/test_report.py has enough
            sys.argv = [train, *arguments]
            try:
                runpy.run_path(train, run_name="__main__")
            except SystemExit as end:  # as Python ends, but for the memory of the parent, which it takes 1 s to free
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code or 0)
            os._exit(99)
        commands[number], running = child, running + 1
    while running:
        child, status = os.wait()
        codes[child], running = os.waitstatus_to_exitcode(status), running - 1
    print(json.dumps([codes[child] for child in commands]))
    """


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A folder for PYTHONPATH whose torch cannot be imported: with it, what is answered is answered
    without torch.
    """
    folder = tmp_path_factory.mktemp("no_torch")
    for name in ("torch", "torchvision", "numpy"):
        (folder / f"{name}.py").write_text(
            f"raise ImportError('{name} was imported')\n", encoding="utf-8"
        )
    return str(folder)


def answers(folder, table, *modules, **environment):
    """{what is typed: what came of it} for a table of mistakes, each in a folder of its own."""
    done = forked(folder, [typed.split() for typed, _, _ in table], *modules, **environment)
    return {typed: answer for (typed, _, _), answer in zip(table, done, strict=True)}


def forked(folder, commands, *modules, **environment):
    """What came of each command (a list of arguments), run in a folder of its own, folder/0,
    folder/1, ...
    """
    if not hasattr(os, "fork"):
        pytest.skip("os.fork is not on this platform")
    commands = [(str(folder / str(i)), arguments) for i, arguments in enumerate(commands)]
    for place, _ in commands:
        os.makedirs(place, exist_ok=True)
    (folder / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
    python, patience = ("-c", textwrap.dedent(FORKS)), PATIENCE + 10 * len(commands)
    done = run(
        folder,
        TRAIN,
        str(folder / "commands.json"),
        *modules,
        python=python,
        patience=patience,
        **environment,
    )
    assert done.code == 0, done.err
    return [
        SimpleNamespace(
            code=code,
            out=Path(f"{place}.out").read_text(encoding="utf-8", errors="replace"),
            err=Path(f"{place}.err").read_text(encoding="utf-8", errors="replace"),
            files=listing(place),
        )
        for (place, _), code in zip(commands, json.loads(done.out), strict=True)
    ]


@pytest.fixture(scope="module")
def early(tmp_path_factory, no_torch):
    return answers(tmp_path_factory.mktemp("early"), EARLY, "hydra", PYTHONPATH=no_torch)


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("late"), LATE, "hydra", "torch")


def assert_answered(done, key, suggestion):
    lines = done.err.splitlines()
    assert "Traceback" not in done.err and done.code == 2, done.err
    assert lines[0].startswith("error: ") and key in lines[0] and suggestion in done.err
    assert 1 <= len(lines) <= 3 and all(line.strip() for line in lines)
    assert done.files == []


@pytest.mark.parametrize(("typed", "key", "suggestion"), EARLY, ids=[row[0] for row in EARLY])
def test_a_mistake_is_answered_without_torch(early, typed, key, suggestion):
    assert_answered(early[typed], key, suggestion)
    begun = "sweep    2 jobs; " if typed.startswith("-m") else ""  # a job finds the mistake
    assert early[typed].out == "" or (begun and early[typed].out.startswith(begun))


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "key", "suggestion"), LATE, ids=[row[0] for row in LATE])
def test_a_mistake_that_a_constructor_finds_is_answered_too(late, typed, key, suggestion):
    assert_answered(late[typed], key, suggestion)
    assert all(
        line.startswith(("data ", "device ", "model ", "plan ", "report "))
        for line in late[typed].out.splitlines()
    )


@pytest.mark.skipif(os.name != "posix", reason="a POSIX shell closes streams by >&-")
@pytest.mark.parametrize(
    ("closed", "typed", "code"), [(">&-", "--help", 0), (">&- 2>&-", "seeed=1", 2)]
)
def test_a_closed_stream_is_no_error(tmp_path, no_torch, closed, typed, code):
    command = f'"{sys.executable}" "{TRAIN}" {typed} {closed}'
    environment = ENVIRONMENT | {"PYTHONPATH": no_torch}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"") and listing(
        tmp_path
    ) == []


def test_help_has_every_group_and_every_key(tmp_path, no_torch):
    asked = at_once(
        *(lambda flag=flag: run(tmp_path, flag, PYTHONPATH=no_torch) for flag in ("--help", "-h"))
    )
    assert (
        [done.code for done in asked] == [0, 0]
        and asked[0].out == asked[1].out
        and asked[0].files == []
    )
    text = asked[0].out
    keys = [
        key for key in OmegaConf.load(CONFIGS / "train.yaml") if key not in ("defaults", "hydra")
    ]
    assert (
        "task" in keys
        and [key for key in keys if not re.search(rf"^ *{key}:", text, re.MULTILINE)] == []
    )
    words = set(re.split(r"[\s,]+", text))
    for path in CONFIGS.rglob("*/*.yaml"):
        assert {path.parent.relative_to(CONFIGS).as_posix(), path.stem} <= words
    assert "hydra:" not in text


def test_the_version_is_that_of_the_package(tmp_path, no_torch):
    asked = run(tmp_path, "--version", PYTHONPATH=no_torch)
    assert (asked.code, asked.out) == (0, f"stoker {stoker.__version__}\n")


# the default run

MODULES = """
    import json, runpy, sys
    out = sys.argv.pop(1)
    train = sys.argv[0] = sys.argv.pop(1)
    sys.path.insert(0, train.rpartition("/")[0])
    try:
        runpy.run_path(train, run_name="__main__")
    finally:
        json.dump(sorted(sys.modules), open(out, "w"))
    """


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The default run, beside it the same with a name, whose modules are listed; then what is asked
    of them.
    """
    folder = tmp_path_factory.mktemp("default")
    wrapper = ("-c", textwrap.dedent(MODULES), str(folder / "modules.json"), TRAIN)
    first, second = at_once(
        lambda: run(folder / "a"), lambda: run(folder / "b", "run_dir=again", python=wrapper)
    )
    found = [path for path in (folder / "a" / "runs").iterdir() if path.is_dir()]
    name = f"runs/{found[0].name}"
    before = {path.name: path.read_bytes() for path in found[0].iterdir() if path.is_file()}
    other = run(folder / "a", f"run_dir={name}", "optimizer.lr=0.1", "seed=3")
    never = run(folder / "a", f"run_dir={name}", "resume=never")
    after = {path.name: path.read_bytes() for path in found[0].iterdir() if path.is_file()}
    asked, continued = at_once(
        lambda: run(folder / "a", "task=evaluate", f"run={name}"),
        lambda: run(folder / "b", "run_dir=again"),
    )
    return SimpleNamespace(**locals())


def test_the_default_run_learns_the_digits(default):
    assert (default.first.code, default.first.err) == (0, "")
    assert len(default.first.out.splitlines()) <= 22
    [run_directory] = default.found
    visible = {name for name in os.listdir(run_directory.parent) if not name.startswith(".")}
    assert visible == {run_directory.name, "index.html"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-mlp-digits", run_directory.name)
    result = json.loads(default.before["result.json"])
    assert (
        result["test/acc"] >= 0.95 and result["best"]["name"] == "val/acc" and result["step"] == 200
    )
    assert {
        "test/loss",
        "seconds",
        "samples_per_second",
        "device",
        "versions",
        "parameters",
        "memory_mib",
        "overrides",
    } <= result.keys()
    # The bytes of an image and its class, of all three parts, as in the line "data".
    assert result["memory_mib"]["data"] * 2**20 == (64 + 8) * (1259 + 179 + 359)
    assert result["overrides"] == [] and result["stopped"] is None and result["device"] == "cpu"
    for text in (
        "10 classes",
        "MLP, 85,002 parameters",
        "AdamW (fused)",
        f"acc {result['test/acc']:.4f}",
        f"{PROGRAM} evaluate run={default.name}",
    ):
        assert text in default.first.out
    assert len(re.findall(r"^epoch +\d+/10 .* samples/s$", default.first.out, re.MULTILINE)) == 10


RUN_FILES = {
    "checkpoints",
    "config.yaml",
    "metrics.jsonl",
    "model.safetensors",
    "model.md",
    "result.json",
}
RUN_FILES |= {"evaluation.json", "provenance", "status.json"}


def test_the_run_directory(default):
    [folder] = default.found
    assert {path.name for path in folder.iterdir()} == RUN_FILES | {"report.html"}
    assert [
        name for name in default.first.files if not name.startswith("runs")
    ] == []  # and nothing beside it
    assert default.second.code == 0 and all(
        name.startswith("again") for name in default.second.files
    )
    found = checkpoint.files(folder / "checkpoints")
    best = json.loads(default.before["result.json"])["best"]["step"]
    assert set(found) == {200, 180, best} and {path.name for path in found.values()} == set(
        os.listdir(folder / "checkpoints")
    )
    config = OmegaConf.load(folder / "config.yaml")
    assert set(config) == {*OmegaConf.load(CONFIGS / "train.yaml")} - {"defaults", "hydra"} | {
        "dataset",
        "model",
        "loss",
        "optimizer",
        "scheduler",
        "callbacks",
        "trainer",
        "sweep",
    }


def test_the_rows_of_the_metrics(default):
    found = rows(default.found[0])
    steps = [row["step"] for row in found]
    assert (
        steps == sorted(steps)
        and steps[-1] == 200
        and all(row["epoch"] == row["step"] / 20 for row in found)
    )
    assert [row["step"] for row in found if "val/acc" in row] == list(range(20, 201, 20))
    assert [row["step"] for row in found if "train/loss" in row] == sorted(
        {*range(20, 201, 20), 50, 100, 150, 200}
    )
    assert (
        sum(row.get("train/samples", 0) for row in found) == 10 * 1259
    )  # no sample is missing and none is there twice
    result = json.loads(default.before["result.json"])
    assert result["val/acc"] == found[-1]["val/acc"] and result["best"]["value"] == max(
        row.get("val/acc", 0) for row in found
    )


def test_the_same_command_gives_the_same_numbers(default):
    """Also in another process, under another name, and beside another run."""
    assert rows(default.found[0]) == rows(default.folder / "b" / "again")
    first, second = (
        checkpoint.newest(folder / "checkpoints")[1]
        for folder in (default.found[0], default.folder / "b" / "again")
    )
    assert first["step"] == 200 and equal(first, second)


def test_the_default_run_imports_only_what_it_needs(default):
    modules = set(read(default.folder / "modules.json"))
    assert "torch" in modules and "hydra" in modules
    unwanted = {  # Pillow draws the samples of the report, after the results were printed
        "torchvision",
        "tensorboard",
        "torchmetrics",
        "pandas",
        "sklearn",
        "torch.utils.tensorboard",
    }
    assert {name for name in unwanted if name in modules} == set()


def test_evaluate_gives_the_same_numbers_to_the_last_digit(default):
    assert default.asked.code == 0 and default.asked.err == ""
    result = json.loads(default.before["result.json"])
    [line] = [line for line in default.asked.out.splitlines() if line.startswith("test ")]
    words = line.split()[1:]
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        name: repr(result[f"test/{name}"]) for name in ("loss", "acc")
    }
    best = checkpoint.best(default.found[0] / "checkpoints")[0].relative_to(default.folder / "a")
    assert f"weights  {best}" in default.asked.out.splitlines()
    assert default.asked.files == default.first.files  # and writes nothing


def test_a_finished_run_continues_to_the_same_result(default):
    """Nothing is left to train, so the result and the rows are what they were; only clocks and
    memory may differ.
    """
    assert (
        default.continued.code == 0
        and default.continued.err == ""
        and default.continued.files == default.second.files
    )
    assert rows(default.folder / "b" / "again") == rows(default.found[0])
    found, expected = (
        read(default.folder / "b" / "again" / "result.json"),
        json.loads(default.before["result.json"]),
    )
    volatile = (*MEASURED, "train/seconds", "samples_per_second", "memory_mib", "overrides")
    assert {key: value for key, value in found.items() if key not in volatile} == {
        key: value for key, value in expected.items() if key not in volatile
    }


def test_another_config_is_refused_with_the_differences(default):
    assert (
        default.other.code == 2
        and len(default.other.err.splitlines()) <= 3
        and "Traceback" not in default.other.err
    )
    assert default.other.err.startswith(
        f"error: run_dir={default.name} holds a run with different settings: optimizer.lr=0.1 (was 0.003), seed=3 (was 0)."
    )
    assert default.never.code == 2 and "overwrite=true to replace" in default.never.err
    assert default.before == default.after and default.other.files == default.first.files


def test_a_callback_is_compared_by_the_values_that_it_reads():
    def callbacks(decay):
        return {"callbacks": {"ema": {"_target_": "stoker.EMA", "decay": decay}}}

    old = {"ema": 0.9, **callbacks("${ema}")}
    resume.check_same("run_dir=a", old, {**old, **callbacks(0.9)})
    for changed in (callbacks(0.8), {"callbacks": {"ema": None}}):
        with pytest.raises(UserError, match="a run with different settings"):
            resume.check_same("run_dir=a", old, old | changed)


def test_the_settings_of_a_callback_of_your_own_may_change(caplog):
    def config(target, **settings):
        ema = {"_target_": "stoker.EMA", "decay": 0.9}
        return {"epochs": 1, "callbacks": {"ema": ema, "own": {"_target_": target, **settings}}}

    old = config("mine.Own", path="a")
    without = config("mine.Own")
    del without["callbacks"]["own"]
    for new in (config("mine.Own", path="b"), config("mine.Other"), without):
        caplog.clear()
        resume.check_same("run_dir=a", old, new)
        resume.check_same("run_dir=a", new, old)
        assert caplog.text.count("Settings of your own callbacks have changed") == 2
    with pytest.raises(UserError, match=r"epochs=2 \(was 1\)"):
        resume.check_same("run_dir=a", old, config("mine.Own", path="b") | {"epochs": 2})
    with pytest.raises(UserError, match="a run with different settings"):
        resume.check_same("run_dir=a", config("stoker.EMA", decay=0.9), old)


def test_differences_are_shown_as_they_are_typed():
    def refusal(**changed):
        with pytest.raises(UserError) as caught:
            resume.check_same("run_dir=a", before, {**before, **changed})
        return str(caught.value)

    before = {
        "model": {"_target_": "stoker.models.mlp.MLP", "hidden": [3, 4], "dropout": 0.0},
        "ema": 0.9,
        "epochs": 1,
    }
    first = refusal(model={**before["model"], "hidden": [3]}, ema=None).splitlines()[0]
    assert first.endswith("different settings: ema=null (was 0.9), model.hidden=[3] (was [3,4]).")
    first, *advice = refusal(
        model={"_target_": "stoker.models.cnn.CNN", "channels": [8]}
    ).splitlines()
    assert first.endswith(
        "different settings: model._target_=stoker.models.cnn.CNN (was stoker.models.mlp.MLP), "
        "model.channels=[8] (was null), model.dropout=null (was 0.0), "
        "model.hidden=null (was [3,4])."
    )
    assert advice == [
        "To continue that run, use its settings. For a new run, choose a different run_dir.",
        "To train that run for longer, choose a different run_dir and set resume=FILE to one of its checkpoints.",
    ]


def test_evaluate_says_which_folder_is_meant(tmp_path):
    def refusal(run):
        with pytest.raises(UserError) as caught:
            saved_config.load_config("run", str(run))
        return str(caught.value)

    file = tmp_path / "mine" / "checkpoints" / "step_00000003.ckpt"
    file.parent.mkdir(parents=True)
    file.touch()
    for run in (file, tmp_path / "mien", tmp_path / "mine"):
        assert refusal(run) == (
            f"run={run}: not a run directory, because {run / 'config.yaml'} does not exist. "
            "Type run=DIR."
        )


def test_evaluate_without_a_good_checkpoint_says_what_there_is(default, tmp_path):
    shutil.copytree(default.found[0], tmp_path / "run")
    for path in checkpoint.files(tmp_path / "run" / "checkpoints").values():
        path.write_bytes(path.read_bytes()[:-1])
    done = run(tmp_path, "task=evaluate", "run=run")
    first, second = done.err.splitlines()
    assert done.code == 3 and re.fullmatch(
        r"error: All [23] checkpoints in run.checkpoints are damaged\.", first
    )
    assert "model.safetensors" in second and "run_dir" not in second


def test_evaluate_says_that_nothing_is_measured(monkeypatch, capsys):
    trainer = SimpleNamespace(evaluate=lambda loader, split: {})
    found = ("best.ckpt", SimpleNamespace(trainer=trainer), "test", [])
    monkeypatch.setattr(evaluate, "tested", lambda cfg: contextlib.nullcontext(found))
    evaluate.evaluate(SimpleNamespace(split=None))
    assert capsys.readouterr().out == "weights  best.ckpt\ntest     no loss or metrics\n"


@pytest.mark.skipif(os.name != "posix", reason="ulimit is of POSIX")
def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    command = f'ulimit -f 1; exec "{sys.executable}" "{TRAIN}" epochs=1 run_dir=run'
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=False
    )
    assert (
        done.returncode == 3
        and b"run_dir=DIR to resume" in done.stderr
        and b"Traceback" not in done.stderr
    )


# a sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    done = run(folder, "-m", "model=linear,mlp", "seed=0,1,-1", "epochs=2", "hydra.sweep.dir=all")
    return SimpleNamespace(folder=folder / "all", **vars(done))


def test_a_sweep_ends_with_a_table_the_best_first_and_the_failed_last(sweep):
    assert (
        sweep.code == 2 and "Traceback" not in sweep.err
    )  # two jobs failed, by the user's mistake
    assert sweep.err.splitlines() == ["error: seed=-1: expected a whole number of at least 0."] * 2
    lines = sweep.out.splitlines()
    start = next(
        i
        for i, line in enumerate(lines)
        if re.match(r"job +val/acc +test/acc +seconds +settings", line)
    )
    table = [re.split(" {2,}", line) for line in lines[start + 1 : start + 5]]
    assert [row[4] for row in table[:2]] == ["model=mlp", "model=linear"]
    assert [row[:2] for row in table[2:]] == [
        ["2", "failed"],
        ["5", "failed"],
    ] and "seed=-1" in table[2][2]
    assert [line.split()[0] for line in lines[start + 5 :]] == [
        "best",
        "sweep",
        "report",
        "resume",
    ]
    assert lines[start + 5] == f"best     {PROGRAM} model=mlp epochs=2"
    for job in map(str, range(6)):
        left = {
            *RUN_FILES,
            "job.json",
            *["report.html"] * (sweep.folder / job / "report.html").exists(),
        }
        assert set(os.listdir(sweep.folder / job)) == ({"result.json"} if job in "25" else left)
    assert {path.name for path in sweep.folder.iterdir() if path.is_file()} == {
        "multirun.yaml",
        "sweep.csv",
        "sweep.html",
        "sweep.json",
    }


@pytest.mark.slow
def test_a_job_of_a_sweep_is_the_run_that_it_would_be_alone(sweep, tmp_path):
    alone = run(tmp_path, "model=mlp", "seed=1", "epochs=2", "run_dir=alone")
    assert alone.code == 0
    [job] = [
        path.parent
        for path in sweep.folder.glob("*/result.json")
        if read(path)["overrides"][:2] == ["model=mlp", "seed=1"]
    ]
    assert rows(job) == rows(tmp_path / "alone")
    states = [checkpoint.newest(folder / "checkpoints")[1] for folder in (tmp_path / "alone", job)]
    assert equal(*states)


# Ctrl-C


@pytest.mark.slow
def test_a_key_inside_a_list_and_keys_of_other_options_are_explained(tmp_path):
    answers = {
        "model.hidden.x=1": "model.hidden.x=1: these settings cannot be read",
        "dataset.path=x": "This is a key of dataset=csv: type dataset=csv dataset.path=...",
        "run_dir=press.py": "run_dir=press.py: cannot write to this folder (it is a file, or not writable)",
    }
    (tmp_path / "press.py").touch()
    for typed, answer in answers.items():
        done = run(tmp_path, typed)
        assert done.code == 2, typed
        assert answer in done.err, typed
        assert len(done.err.splitlines()) <= 3, typed
        assert done.files == ["press.py"], typed


PRESS = """
import os, pathlib, signal
from stoker.command import signals
from stoker.trainer.callbacks import Callback

class Press(Callback):
    def __init__(self, pressed):
        self.pressed = pathlib.Path(pressed)

    def on_step_end(self, trainer):
        if trainer.step == 517 and not self.pressed.exists():
            self.pressed.touch()
            signal.signal(signal.SIGINT, signals.handle)  # a shell may have it ignored
            os.kill(os.getpid(), signal.SIGINT)
"""
LONG = (
    "dataset=synthetic",
    "dataset.n=8000",
    "batch_size=128",
    "epochs=20",
    "log_every=15",
    "checkpoint.every=33",
)
LONG += (
    "+callbacks.press._target_=press.Press",
    "+callbacks.press.pressed=pressed",
    "run_dir=here",
)


@pytest.mark.skipif(os.name != "posix", reason="sends itself a SIGINT")
def test_ctrl_c_and_the_same_command_again_end_where_the_whole_run_ends(tmp_path):
    """The signal that Ctrl-C sends, in the middle of an epoch, between two checkpoints: always at
    the same step.
    """
    (tmp_path / "press.py").write_text(PRESS, encoding="utf-8")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "pressed").touch()  # so that nothing is pressed there
    whole, cut = at_once(
        lambda: run(tmp_path / "whole", *LONG, PYTHONPATH=str(tmp_path)),
        lambda: run(tmp_path / "cut", *LONG, PYTHONPATH=str(tmp_path)),
    )
    cut.at = max(checkpoint.files(tmp_path / "cut" / "here" / "checkpoints"))
    cut.continued = run(tmp_path / "cut", *LONG, PYTHONPATH=str(tmp_path))
    assert whole.code == 0
    assert (
        cut.code == 130
        and "Traceback" not in cut.err
        and len(cut.err.strip().splitlines()) <= 3
        and "interrupted" in cut.err
    )
    assert (
        cut.at == 517
        and "here/result.json" not in cut.files
        and not [name for name in cut.files if name.endswith(".part")]
    )
    assert cut.continued.code == 0 and f"continued at step {cut.at}" in cut.continued.out
    first, second = (
        checkpoint.newest(tmp_path / name / "here" / "checkpoints")[1] for name in ("whole", "cut")
    )
    assert first["step"] == 20 * 50 and equal(first, second)
    assert rows(tmp_path / "whole" / "here") == rows(tmp_path / "cut" / "here")
    first, second = (read(tmp_path / name / "here" / "result.json") for name in ("whole", "cut"))
    assert all(
        first[name] == second[name]
        for name in ("test/loss", "test/acc", "best", "val/loss", "step")
    )


# every config

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONFIGS.iterdir())
    if folder.is_dir()
}
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]


@pytest.fixture
def compose():
    """A function from overrides to the config, as `main` gets it; checked as `main` checks it."""

    def composed(*overrides):
        cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        return cfg

    with (
        hydra.initialize_config_dir(str(CONFIGS)),
        hydra.utils.execution_whitelist(trust.patterns(trust.TRUSTED, [])),
    ):
        yield composed
    HydraConfig.instance().cfg = None


def trained(compose, tmp_path, *overrides):
    """What was built, after two steps on 200 made-up samples (or what the overrides say), and an
    evaluation.
    """
    cfg = compose(
        "max_steps=2",
        "batch_size=32",
        "dataset=synthetic",
        "device=cpu",
        f"run_dir={tmp_path}",
        "log_every=1",
        *overrides,
    )
    with open_dict(cfg):
        if cfg.dataset._target_.endswith(".synthetic"):
            cfg.dataset.n = 200
    check.check_config(cfg)
    with building(cfg) as parts:
        trainer = parts.trainer
        train_loader, val_loader, test_loader = parts.loaders
        before = [p.detach().clone() for p in trainer.module.parameters()]
        trainer.fit(train_loader, val_loader)
        results = trainer.evaluate(test_loader, "test")
        assert trainer.step == 2 and all(
            torch.isfinite(p).all() for p in trainer.module.parameters()
        )
        assert not all(map(torch.equal, before, trainer.module.parameters()))
        assert results["test/loss"] == results["test/loss"]  # not nan
        names = [type(callback).__name__ for callback in trainer.callbacks]
        return SimpleNamespace(
            optimizer=type(trainer.optimizer).__name__,
            schedule=trainer.scheduler.description,
            metrics=list(trainer.metrics),
            callbacks=names,
        )


def test_there_are_options_to_compose():
    assert {
        "callbacks",
        "dataset",
        "loss",
        "model",
        "optimizer",
        "scheduler",
        "trainer",
    } <= GROUPS.keys() and len(OPTIONS) > 20
    assert len(GROUPS["scheduler"]) >= len(GROUPS["optimizer"])  # each optimizer trains below


@pytest.mark.parametrize(
    ("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS]
)
def test_every_option_composes(compose, group, option):
    if group == "sweep" and option != "grid":
        pytest.importorskip(option, reason=f"needs pip install -e '.[{option}]'")
    needed = {"csv": ["dataset.path=x", "dataset.target=y"], "text": ["dataset.path=x"]}
    cfg = compose(f"{group}={option}", "run_dir=here", *needed.get(option, []))
    check.check_config(cfg)
    assert OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (GROUPS["optimizer"][i % len(GROUPS["optimizer"])], scheduler)
        for i, scheduler in enumerate(GROUPS["scheduler"])
    ],
)
def test_every_optimizer_and_scheduler_trains(compose, tmp_path, optimizer, scheduler):
    trainer = trained(compose, tmp_path, f"optimizer={optimizer}", f"scheduler={scheduler}")
    name = {"muon": "combined"}.get(optimizer, optimizer)  # of Muon and AdamW
    assert name.endswith(trainer.optimizer.lower()) and trainer.schedule.startswith(scheduler)


@pytest.mark.parametrize("loss", GROUPS["loss"])
def test_every_loss_trains(compose, tmp_path, loss):
    kind = "classification" if loss == "cross_entropy" else "regression"
    trainer = trained(compose, tmp_path, f"loss={loss}", f"dataset.kind={kind}")
    assert trainer.metrics == (["acc"] if kind == "classification" else ["r2", "mae", "mse"])


@pytest.mark.parametrize("model", GROUPS["model"])
def test_every_model_trains(compose, tmp_path, model):
    data = ["dataset.in_shape=[3,8,8]"]
    if model == "gpt":
        text = tmp_path / "text.txt"
        text.write_text("to be or not to be\n" * 50, encoding="utf-8")
        data = ["dataset=text", f"dataset.path={text}", "dataset.length=16"]
    trained(compose, tmp_path, f"model={model}", *data)


@pytest.mark.slow
@pytest.mark.parametrize("callbacks", GROUPS["callbacks"])
def test_every_set_of_callbacks_trains(compose, tmp_path, monkeypatch, callbacks):
    if callbacks in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(
            callbacks, reason=f"{callbacks} is not installed: pip install -e '.[{callbacks}]'"
        )
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    trainer = trained(
        compose, tmp_path, f"callbacks={callbacks}", "ema=0.9", "patience=3", "max_minutes=5"
    )
    assert (
        trainer.callbacks[:6]
        == ["Progress", "TimeLimit", "EMA", "EarlyStopping", "JSONL", "NaNGuard"]
        and (tmp_path / "metrics.jsonl").is_file()
    )
    for logger, left in (
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow.db"),
    ):
        assert (tmp_path / left).exists() == (callbacks == logger)


@pytest.mark.parametrize("dataset", ["digits", "synthetic"])
def test_the_whitened_recipe_trains_on_other_images(compose, tmp_path, dataset):
    shape = ["dataset.in_shape=[3,9,11]"] if dataset == "synthetic" else []
    recipe = ["experiment=cifar10_94", f"dataset={dataset}", "model.widths=[8,12]", *shape]
    trainer = trained(compose, tmp_path, *recipe)
    assert trainer.callbacks == ["Progress", "Lookahead", "JSONL", "NaNGuard", "Whiten", "Timing"]


def test_several_sets_of_callbacks_are_a_list(compose, tmp_path):
    pytest.importorskip(
        "tensorboard", reason="TensorBoard is not installed: pip install -e '.[tensorboard]'"
    )
    trainer = trained(
        compose, tmp_path, "callbacks=[doctor,tensorboard]", "callbacks.doctor.every=7"
    )
    assert trainer.callbacks == ["Progress", "JSONL", "NaNGuard", "Doctor", "TensorBoard", "Timing"]


def test_callbacks_with_a_null_are_off(compose, tmp_path):
    assert trained(compose, tmp_path).callbacks == ["Progress", "JSONL", "NaNGuard", "Timing"]


@pytest.mark.slow
def test_a_table_trains(compose, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(
        "a,b,y\n" + "".join(f"{i},{i % 7},{'yes' if i % 3 else 'no'}\n" for i in range(120)),
        encoding="utf-8",
    )
    trained(compose, tmp_path, "dataset=csv", f"dataset.path={table}", "dataset.target=y")


def nodes(config, name=""):
    """(its place, itself) of each node with a _target_."""
    if "_target_" in config:
        yield name, config
    for key, value in config.items():
        if isinstance(value, dict):
            yield from nodes(value, f"{name}.{key}")


@pytest.mark.parametrize(
    ("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS]
)
def test_the_keys_are_the_constructors_arguments(group, option):
    """All of them for what is ours; for torch's some of them.

    What the run itself hands over is not among them.
    """
    config = OmegaConf.to_container(
        OmegaConf.load(CONFIGS / group / f"{option}.yaml"), resolve=False
    )
    handed = {
        "dataset": {"trained"},
        "model": {"in_shape", "num_classes"},
        "optimizer": {"params", "fused", "foreach", "module"},
        "scheduler": {"optimizer", "total_steps"},
    }.get(group, set())
    if group == "trainer":
        handed = {"model", "loss", "optimizer", "scheduler", "metrics", "callbacks"}
    if group in ("experiment", "sweep"):
        return  # deltas of other groups, which test_every_option_composes checks
    for _, node in nodes(config):
        target = hydra.utils.get_object(node["_target_"])
        arguments = set(inspect.signature(target).parameters) - handed
        keys = {key for key in node if not key.startswith("_")} - (
            {*settings.LOADER_KEYS} if group == "dataset" else set()
        )
        if node["_target_"].startswith("torch"):
            assert keys <= arguments
        else:
            assert keys == arguments
        loading = {*settings.LOADER_KEYS} - ({"augment"} if option == "text" else set())
        assert (node.keys() >= loading) == (group == "dataset")
        assert node.get("_partial_", False) == (group in ("optimizer", "scheduler"))


def test_the_trainers_settings_are_top_level_keys():
    top = OmegaConf.load(CONFIGS / "train.yaml")
    keys = {
        key: value
        for key, value in OmegaConf.to_container(
            OmegaConf.load(CONFIGS / "trainer" / "default.yaml"), resolve=False
        ).items()
        if key != "_target_"
    }
    assert {key: f"${{{key}}}" for key in keys} == keys and set(keys) <= set(top)
    defaults = {name: p.default for name, p in inspect.signature(Trainer).parameters.items()}
    assert {key: top[key] for key in keys if key != "epochs"} == {
        key: defaults[key] for key in keys if key != "epochs"
    }  # a run is longer than an example


@pytest.mark.parametrize(
    "path",
    [CONFIGS / "train.yaml", *(CONFIGS / group / f"{option}.yaml" for group, option in OPTIONS)],
    ids=lambda path: path.stem,
)
def test_every_key_has_a_comment(path):
    """At the end of its line.

    Not so: _target_ and _partial_, which are Hydra's; a key that only passes another on (${...}),
    which has the comment; a key that opens a group; a callback on one line, whose class says it;
    the block for Hydra. Each file of a group begins with what it is.
    """
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    bare = []
    for line in text.partition("\nhydra:")[0].splitlines():
        found = re.match(r" *([\w.]+):\s+([^#\s].*)$", line)
        if (
            found
            and not found[1].startswith("_")
            and not re.match(r"\$\{\w+\}\s*$|\{_target_|\[default\]", found[2])
            and not re.search(r"\s# \S", line)
        ):
            bare.append(line)
    assert path.parent.name == "experiment" or bare == []
