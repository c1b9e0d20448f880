"""Somebody's run directory is data: nothing in it is run, looked up in the environment, or written
to elsewhere.
"""

import ast
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import tracemalloc
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from PIL import Image
from test_cli import CONFIGS, ROOT, compose, forked  # noqa: F401

import stoker as package
from stoker import Trainer
from stoker.command import arguments, build, dotted, trust
from stoker.runs import inference, saved_config
from stoker.sweeps import table
from stoker.tasks.redraw import redraw
from stoker.trainer.errors import UserError

SOURCES = sorted(
    path for folder in ("trainer", "models", "data") for path in (ROOT / folder).rglob("*.py")
)
SOURCES += [ROOT / "train.py"]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "imp",
}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.save",
    "os.system",
    "os.popen",
    "yaml.load_all",
}
CALLS |= {
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.jit.load",
    "numpy.load",
    "np.load",
    "importlib.import_module",
}
KEYWORDS = {
    ("weights_only", False),
    ("allow_pickle", True),
    ("shell", True),
    ("trust_remote_code", True),
}


def forbidden(tree):
    """What a source has that could run what is in a file: (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                (node.lineno, name)
                for name in names
                if name.split(".")[0] in MODULES or name == "torch.hub"
            )
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
            ("torch.hub", "sys.meta_path")
        ):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            name, keywords = (
                ast.unparse(node.func),
                {k.arg: getattr(k.value, "value", None) for k in node.keywords},
            )
            if name in CALLS or (name == "yaml.load" and "SafeLoader" not in ast.unparse(node)):
                yield node.lineno, name
            if (
                name.endswith((".extractall", ".extract", ".unpack_archive"))
                and "filter" not in keywords
            ):
                yield node.lineno, name
            yield from (
                (node.lineno, f"{k}={v}") for k, v in keywords.items() if (k, v) in KEYWORDS
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_can_run_what_is_in_a_file(path):
    assert list(forbidden(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "torch.load(x)",
        "f(weights_only=False)",
        "t.extractall(p)",
    ]
    + [
        "yaml.load(x)",
        "yaml.load(x, Loader=yaml.Loader)",
        "torch.hub.load('x')",
        "run(c, shell=True)",
        "os.system('x')",
    ],
)
def test_what_is_forbidden_is_found(text):
    assert list(forbidden(ast.parse(text)))
    assert not list(
        forbidden(
            ast.parse("yaml.load(x, Loader=yaml.SafeLoader); model.compile(); re.compile('x')")
        )
    )


# What may be built.

TARGETS = [
    "os.system",
    "subprocess.run",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "torch.load",
]
TARGETS += [
    "torch.nn.modules.module.torch.load",
    "torch.nn.modules.module.torch.hub.load",
    "torch.nn.functional.sys.exit",
]
TARGETS += [
    "torch.nn.init",
    "torch.nn.utils.clip_grad_norm_",
    "torch.optim.optimizer.functools.partial",
    "torch.save",
]
TARGETS += [
    "torchvision.models._api.load_state_dict_from_url",
    "torchvision.models.get_model",
    "torchvision.models._api.os",
]
TARGETS += [
    "torchmetrics.text.BERTScore",
    "torchmetrics.utilities.checks.os.system",
    "functools.partial",
    "hydra.utils.call",
]
TARGETS += [
    "stoker.runs.json_files.write_json",
    "stoker.runs.json_files.Path.write_text",
    "stoker.trainer.checkpoint.save",
    "stoker.command.build.build",
]
TARGETS += [
    "stoker.trainer.files.replacing",
    "stoker.command.exit_codes.run",
    "stoker.sweeps.sweep.SweepCallback",
    "stoker.sweeps.launchers.Local",
    "stoker.sweeps.slurm.Slurm",
    "stoker.trainer.errors.UserError",
    "stoker.tasks.main.main",
]
TARGETS += [
    "stoker.data.cache.create",
    "stoker.data.cache.shutil.rmtree",
    "stoker.data.images.os.remove",
    "stoker.data.images.decode_image",
]
TARGETS += [
    "stoker.data.loader.HostLoader",
    "stoker.models.checks.check_sizes",
    "stoker.models.mlp.math.factorial",
    "examples.gan.nn.Linear.load",
]
TARGETS += [
    "stoker.trainer.callbacks.summary.plan",
    "stoker.trainer.metrics.torch.load",
    "stoker.trainer.schedules.inspect.getsource",
    ".",
    "a b",
]


@pytest.fixture
def typed(monkeypatch):
    """What is typed on the command line, a list; the whitelist is that of a run."""
    typed = []
    monkeypatch.setattr(arguments, "typed", lambda: typed)
    with hydra.utils.execution_whitelist(trust.patterns(trust.TRUSTED, [])):
        yield typed


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_not_of_the_listed_kinds_is_not_built(typed, target):
    bare = {"_target_": "torch.nn.Identity"}
    inside = [
        {"_target_": target},
        {**bare, "_args_": [{"_target_": target}]},
        {**bare, "x": {"y": [{"_target_": target}]}},
    ]
    for node in [*inside, {**bare, "a": {"_target_": target, "_partial_": True}}]:
        with pytest.raises(UserError, match=re.escape("_target_")):
            build.build("loss", node)


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
AS_ANOTHER = {key: LINEAR for key in build.PART_CLASSES if key not in ("model", "loss")}
AS_ANOTHER |= {
    "metrics.a": LINEAR,
    "callbacks.a": LINEAR,
    "optimizer": {**LINEAR, "_partial_": True},
}
AS_ANOTHER |= {
    "model": {"_target_": "stoker.data.datasets.synthetic"},
    "loss": {"_target_": "stoker.data.datasets.synthetic"},
}


@pytest.mark.parametrize("key", AS_ANOTHER)
def test_what_gives_another_part_is_not_called(typed, key):
    """Unless it is typed, and so the user's own: then what it returns is checked."""
    made = []
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda *registered: made.append(registered)
    )
    try:
        with pytest.raises(
            UserError, match=rf"{key}._target_=.*: this is not known to return an? "
        ):
            build.build(key, AS_ANOTHER[key])
        assert made == []
        typed += [f"{key}._target_={AS_ANOTHER[key]['_target_']}"]
        if key not in build.FACTORIES:
            answer = rf"{key}._target_=.*: this returns an? \w+, not an? "
            with pytest.raises(UserError, match=answer):
                build.build(key, AS_ANOTHER[key])
    finally:
        hook.remove()


def test_a_target_inside_a_node_of_somebodys_config_is_ones_own_or_refused(typed):
    for node in ({"a": LINEAR}, {"a": [[0, {"b": LINEAR}]]}, {"_args_": [LINEAR]}):
        with pytest.raises(
            UserError,
            match=r'(?s)metrics\.x\..*_target_=torch.nn.Linear.*type trusted=\["torch"\]\.',
        ):
            build.check_nested("metrics.x", {"_target_": "a", **node})
    typed += ["trusted=[torch]"]
    build.check_nested("metrics.x", {"_target_": "a", "b": [LINEAR]})


@pytest.mark.parametrize(
    "key", ["_convert_", "_recursive_", "_isolate_", "_execution_whitelist_", "_x_"]
)
def test_what_changes_hydras_rules_is_refused(typed, key):
    for node in ({key: True}, {"a": {key: ["os"]}}, {"a": [{"b": {key: "all"}}]}):
        with pytest.raises(UserError, match=key):
            build.build("model", {"_target_": "torch.nn.Identity", **node})


def test_what_configs_name_is_of_the_listed_kinds(typed):
    named = re.findall(
        r"_target_: ([\w.]+)", "\n".join(path.read_text() for path in CONFIGS.rglob("*.yaml"))
    )
    # Hydra's own, which builds them by itself.
    usual = {"stoker.sweeps.sweep.SweepCallback", "stoker.sweeps.slurm.Slurm"}
    usual |= {target for target in named if target.startswith("hydra_plugins.")}
    usual |= {"stoker.sweeps.optuna_search.OptunaSearch", "stoker.sweeps.launchers.Local"}
    usual |= {
        name
        for name in named
        if name.startswith("optuna.") and not importlib.util.find_spec("optuna")
    }
    usual_and_more = {*named} - usual | {
        "torch.optim.RMSprop",
        "torch.nn.NLLLoss",
        "stoker.Trainer",
    }
    for target in sorted(usual_and_more):
        if not target.startswith("torch") or target.startswith("torch."):
            located = hydra.utils.get_object(target)
            assert any(trust.builds(part, located) for part in trust.PART_CLASSES), target
    pytest.importorskip("torchvision")
    assert trust.locate("model", "torchvision.models.resnet18") and trust.locate(
        "model", "torchvision.models.VGG"
    )


def test_the_examples_are_nobodys_until_they_are_typed(typed):
    """An installed package has none, and a folder `examples` beside the user's files may hold
    anything.
    """
    with pytest.raises(UserError, match=r'If it is your own code, type trusted=\["examples"\]'):
        trust.locate("trainer", "examples.gan.GANTrainer")
    typed += ["trainer._target_=examples.gan.GANTrainer"]
    assert trust.locate("trainer", "examples.gan.GANTrainer").__name__ == "GANTrainer"
    assert trust.own_packages(typed) == ["examples"]


def test_a_target_for_another_part_is_named_with_what_the_part_needs():
    with pytest.raises(UserError) as caught:
        trust.locate("model", "torch.optim.AdamW")
    assert str(caught.value) == (
        "model._target_=torch.optim.AdamW: this is not known to return a torch.nn.Module.\nIf it does "
        'and you trust it, type trusted=["torch"].'
    )


def test_a_key_that_only_begins_like_the_augmentation_is_the_data_sets():
    keys = ("dataset.augment", "dataset.augment.0", "dataset.augmenter", "metrics.top3")
    parts = ["dataset.augment", "dataset.augment", "dataset", "metrics"]
    assert [trust.part_of(key) for key in keys] == parts


def test_what_is_typed_is_ones_own(typed):
    with pytest.raises(UserError, match="json.dumps: not trusted"):
        trust.locate("loss", "json.dumps")
    typed += ['trusted=["json"]']  # as the message says
    assert trust.locate("loss", "json.dumps") is json.dumps
    with pytest.raises(UserError, match=r'type trusted=\["json","mine"\]\.'):  # both together
        trust.locate("model", "mine.Net")


# Somebody's run directory. Each takes a good one and makes it hostile; `away` is a folder outside
# it, `canary` a file that is not there, which what must not run would make.

GOOD = ["epochs=1", "device=cpu", "run_dir=run", "model.hidden=[8]"]


def edit(**values):
    """A function that puts these values into config.yaml; "a__b" is the key a.b."""

    def hostile(run, away, canary):
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        filled = json.loads(
            json.dumps(values).replace("CANARY", str(canary)).replace("AWAY", str(away))
        )
        dotted.put(config, {key.replace("__", "."): value for key, value in filled.items()})
        (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    return hostile


def text(content, name="config.yaml"):
    def hostile(run, away, canary):
        written = content.replace("CANARY", str(canary)) if isinstance(content, str) else content
        (run / name).write_bytes(written if isinstance(written, bytes) else written.encode())

    return hostile


def instead(name, make):
    """A function that has `make(path, away)` put something in place of a file of the run."""

    def hostile(run, away, canary):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path, away)

    return hostile


def big(path, away):
    with open(path, "wb") as file:
        file.truncate(100 * 2**20)


def link(path, away):
    kept = away / "kept"
    shutil.copytree(
        away / "run" / "checkpoints", kept
    ) if path.name == "checkpoints" else kept.write_text("kept")
    path.symlink_to(kept)


def lines(name, *rows):
    return text("".join(f"{row}\n" for row in rows), name)


SHELL = "touch CANARY"
BUILT = {
    "os.system": edit(model={"_target_": "os.system", "command": SHELL}),
    "subprocess": edit(loss={"_target_": "subprocess.run", "args": SHELL, "shell": True}),
    "builtins.eval": edit(dataset={"_target_": "builtins.eval", "_args_": ["open('CANARY', 'w')"]}),
    "torch.load": edit(model={"_target_": "torch.nn.modules.module.torch.load", "f": "CANARY"}),
    "write_json": edit(
        metrics={
            "a": {"_target_": "stoker.runs.json_files.write_json", "path": "CANARY", "contents": 1}
        }
    ),
    "create": edit(
        callbacks__a={"_target_": "stoker.data.cache.create", "path": "CANARY", "size": 1}
    ),
    "a file's name": edit(
        callbacks__a={"_target_": "stoker.runs.loggers.ConfigFile", "path": "CANARY", "config": "x"}
    ),
    "rows elsewhere": edit(callbacks__jsonl__path="CANARY"),
    "checkpoints elsewhere": edit(
        callbacks__a={"_target_": "stoker.trainer.callbacks.Checkpoint", "folder": "AWAY"}
    ),
    "optimizer": edit(optimizer={"_target_": "os.system", "_partial_": True, "command": SHELL}),
    "trainer": edit(trainer___target_="subprocess.Popen"),
    "partial": edit(model={"_target_": "functools.partial", "_args_": [SHELL]}),
    "nested": edit(
        model={
            "_target_": "torch.nn.Sequential",
            "_args_": [{"_target_": "os.system", "command": SHELL}],
        }
    ),
    "in a list": edit(
        dataset__augment=[{"_target_": "os.system", "command": SHELL, "_partial_": True}]
    ),
    "whitelist": edit(
        model___execution_whitelist_=["os"], model__x={"_target_": "os.system", "command": SHELL}
    ),
    "recursive": edit(model___recursive_=False),
    "a partial model": edit(model___partial_=True),
    "hydra.utils.call": edit(
        model={"_target_": "hydra.utils.instantiate", "config": {"_target_": "os.system"}}
    ),
    "no target": edit(model={"a": 1}),
    "a number as target": edit(model___target_=3),
    "a download": edit(
        dataset={"_target_": "stoker.data.datasets.mnist", "root": "AWAY", "download": True}
    ),
    "a cache elsewhere": edit(
        dataset={"_target_": "stoker.data.images.image_folder", "root": "AWAY", "cache": "CANARY"}
    ),
    "a pipe as table": edit(
        dataset={"_target_": "stoker.data.tables.csv", "path": "/dev/zero", "target": "y"}
    ),
}
COSTLY = {
    "a huge layer": edit(model__hidden=[10**6, 10**6, 10**6]),
    "huge data": edit(dataset={"_target_": "stoker.data.datasets.synthetic", "n": 10**13}),
    "large samples": edit(
        dataset={"_target_": "stoker.data.datasets.synthetic", "in_shape": [3, 10**6, 10**6]}
    ),
    "workers": edit(dataset__workers=10**6, dataset__resident=False),
    "anchors": text(
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{b}: &{b} [{','.join('*' + a for _ in range(9))}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        )
    ),
    "chains": edit(**{f"x{i}": f"${{x{i + 1}}}${{x{i + 1}}}" for i in range(60)}, x60="x" * 100),
    "chains of lists": edit(**{f"x{i}": [f"${{x{i + 1}}}"] * 9 for i in range(15)}, x15=1),
    "a circle": edit(epochs="${seed}", seed="${epochs}"),
    "deep": text("model: " + "[" * 10**5),
    "deep blocks": text("".join(" " * i + "a:\n" for i in range(400))),
    "100 MB": instead("config.yaml", big),
    "many digits": text("epochs: " + "9" * 10**5),
    "many brackets": edit(monitor="${" * 10**4),
    "no metric": edit(metrics__a=3),
    "a large number": text("epochs: 0x" + "F" * 10**5),
    "chains in a text": edit(dataset__a="x" * 60_000, monitor="${dataset.a}" * 3_000),
}
LARGE = {"_target_": "torch.nn.Linear", "in_features": 20_000, "out_features": 20_000}
REFUSED = {  # with what is said of it: before it has taken any memory
    "a module as metric": (
        edit(metrics__a=LARGE),
        "this is not known to return a torchmetrics.Metric",
    ),
    "a module as callback": (
        edit(callbacks__a=LARGE),
        "this is not known to return a stoker.trainer.callbacks.Callback",
    ),
    "a module as data": (
        edit(dataset=LARGE),
        "this is not known to return a stoker.data.datasets.Data",
    ),
    "a module in a metric": (
        edit(metrics__a={"_target_": "stoker.trainer.metrics.TopK", "k": LARGE}),
        "metrics.a.k._target_=torch.nn.Linear: only a model",
    ),
    "a module in a setting": (
        edit(trainer__max_grad_norm=LARGE),
        "trainer.max_grad_norm._target_=torch.nn.Linear",
    ),
    "a module in a list": (
        edit(optimizer__betas=[LARGE, 0]),
        "optimizer.betas.0._target_=torch.nn.Linear: only",
    ),
}


TEXTS = {
    "python/object": text("model: !!python/object/apply:os.system ['touch CANARY']"),
    "python/name": text("model: !!python/name:os.system"),
    "an unknown tag": text("model: !x 1"),
    "binary": text(bytes(range(256)) * 10),
    "empty": text(""),
    "a list": text("- a\n- b\n"),
    "two documents": text("a: 1\n---\nb: 2\n"),
    "numbers as keys": text("1: 2\nnull: 3\n"),
    "oc.env": edit(monitor="${oc.env:SECRET}"),
    "oc.decode": edit(monitor="${oc.decode:${oc.env:SECRET}}"),
    "oc.create": edit(model="${oc.create:{_target_: os.system}}"),
    "hydra": edit(monitor="${hydra:runtime.cwd}"),
    "now": edit(monitor="${now:%Y}"),
    "oc.env in a node": edit(
        callbacks__a={"_target_": "stoker.trainer.callbacks.EMA", "decay": "${oc.env:SECRET}"}
    ),
    "oc.env of two keys": edit(half="$", monitor="${half}{oc.env:SECRET}"),
    "escaped": edit(monitor="\\${oc.env:SECRET}"),
    "to nowhere": edit(epochs="${nowhere.at.all}"),
    "to a group": edit(epochs="${model}"),
}
KINDS = {
    f"{key}={value}"[:40]: edit(**{key: value})
    for i, key in enumerate(["epochs", "batch_size", "eval_batch_size", "metrics", "callbacks", "model", "dataset"]
    + ["loss", "optimizer", "scheduler", "trainer", "seed", "drop_last", "precision", "tune", "checkpoint", "monitor"]
    + ["run_dir", "resume", "device", "deterministic", "channels_last"]
    + ["dataset__augment", "dataset__mean", "model__hidden"])
    for value in ([{"a": [1]}, "x\x1b[31m\n\n\nx", [[]], None, 10**30, -1] * 2)[i % 6 : i % 6 + 2]
}  # fmt: skip
PLACES = {
    f"{name}: {kind}": instead(name, make)
    for name in ("config.yaml", "metrics.jsonl", "result.json", ".lock", "checkpoints")
    for kind, make in {
        "a pipe": lambda path, away: os.mkfifo(path),
        "a link": link,
        "a link to a device": lambda path, away: path.symlink_to("/dev/zero"),
        "a folder": lambda path, away: path.mkdir(),
        "a link to itself": lambda path, away: path.symlink_to(path),
    }.items()
}
ROWS = {
    "garbage rows": lines("metrics.jsonl", "{", "[]", "null", '"x"', "\x00\xff"),
    "rows of other kinds": lines(
        "metrics.jsonl", '{"step": 1, "train/samples": "x", "best": 3, "steps": [], "test/x": {}}'
    ),
    "rows that are not finite": lines(
        "metrics.jsonl", '{"step": 1, "train/seconds": NaN, "train/samples": Infinity}'
    ),
    "a row of 10 MB": lines("metrics.jsonl", '{"step": 1, "train/samples": ' + "9" * 10**7 + "}"),
    "deep rows": lines("metrics.jsonl", '{"step": 1, "a": ' + "[" * 10**5 + "]" * 10**5 + "}"),
    "other results": lines("result.json", '{"steps": 20, "total_steps": 20, "seconds": "x"}'),
    "garbage results": text(b"\xff{", "result.json"),
    "results of a list": lines("result.json", "[1]"),
}
COSTLY |= {name: hostile for name, (hostile, _) in REFUSED.items()}
HOSTILE = BUILT | COSTLY | TEXTS | KINDS | PLACES | ROWS
FEW = ((BUILT, 2), (COSTLY, 1), (REFUSED, 2), (TEXTS, 1), (KINDS, 1), (PLACES, 1), (ROWS, 1))
SMALL = [name for names, count in FEW for name in random.Random(count).sample(sorted(names), count)]


def states(folder):
    """{path: its kind and bytes} of all below a folder."""
    found = {}
    for path in Path(folder).rglob("*"):
        plain = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if plain else "other"
        )
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a finished run in it."""
    folder = tmp_path_factory.mktemp("good")
    [done] = forked(folder, [GOOD], "hydra", "torch")
    assert done.code == 0, done.err
    return folder / "0"


@pytest.mark.skipif(os.name != "posix", reason="pipes and links")
def test_hostile_run_directories_do_nothing(tmp_path, good, large):
    """Evaluated, applied, exported, and continued by the command that made them: as ever, or three
    lines, and nothing outside.
    """
    names = [name for name in HOSTILE if large or name in SMALL]
    commands, before = [], []
    picture = tmp_path / "picture.png"
    Image.frombytes("L", (8, 8), bytes(range(64))).save(picture)
    tasks = [["task=evaluate", "run=run"], GOOD, ["task=predict", "run=run", f"input={picture}"]]
    tasks += [["task=export", "run=run", "format=torch_export"]]
    pairs = [
        (n, c)
        for k, n in enumerate(names)
        for c in (tasks if large else [*tasks[:2], tasks[2 + k % 2]])
    ]
    for i, (name, command) in enumerate(pairs):
        place = tmp_path / str(i)
        shutil.copytree(good / "run", place / "run")
        shutil.copytree(good, place / "away")
        HOSTILE[name](place / "run", place / "away", place / "canary")
        commands.append((name, command))
        before.append(states(place))
    answers = forked(
        tmp_path, [command for _, command in commands], "hydra", "torch", SECRET="geheim-wort"
    )
    problems = []
    for i, ((name, command), done) in enumerate(zip(commands, answers, strict=True)):
        what, after = f"{name}, {command[0]} ({i})", states(tmp_path / str(i))
        reading, using = (
            command[0] == "task=evaluate",
            command[0] in ("task=evaluate", "task=predict"),
        )
        own = {name for name in before[i].keys() | after if not name.startswith("run/") or using}
        if changed := sorted(name for name in own if before[i].get(name) != after.get(name)):
            problems.append(f"{what}: changed {changed}")
        if "Traceback" in done.err or done.code not in (0, 2, 3):
            problems.append(f"{what}: code {done.code}: {done.err[-600:]}")
        if (
            done.code
            and not 1 <= len([line for line in done.err.splitlines() if "WARNING" not in line]) <= 3
        ):
            problems.append(f"{what}: {done.err[:600]}")
        if "geheim-wort" in done.err + done.out or "\x1b" in done.err + done.out:
            problems.append(f"{what}: {done.err!r} {done.out!r}")
        if reading and name in (BUILT | TEXTS | COSTLY) and name not in HARMLESS and done.code == 0:
            problems.append(f"{what}: was evaluated")
        if reading and name in REFUSED and REFUSED[name][1] not in done.err:
            problems.append(f"{what}: {done.err!r}")
    print(f"{len(names)} hostile run directories, {len(commands)} commands")
    assert problems == []


WEIGHTS = {"_target_": "torchvision.models.shufflenet_v2_x0_5", "weights": "DEFAULT"}


def hostile(good, folder, **values):
    """A copy of the good run with these values in its config.yaml."""
    shutil.copytree(good / "run", folder)
    edit(**values)(folder, folder, folder)
    return folder


def test_a_task_for_a_run_has_no_weights_fetched_by_any_part(compose, good, tmp_path):  # noqa: F811
    pytest.importorskip("torchvision")
    body = {"_target_": "torch.nn.Sequential", "_args_": [{**WEIGHTS, "pretrained": True}]}
    cfg = compose("task=evaluate", f"run={hostile(good, tmp_path / 'run', model=body)}")
    own = saved_config.of_this_machine(cfg)
    assert own.model._args_ == [{**WEIGHTS, "weights": None}]
    parts = {"loss": WEIGHTS, "metrics": {"a": WEIGHTS}, "callbacks": {"a": WEIGHTS}}
    parts |= {"dataset": WEIGHTS, "trainer": WEIGHTS}
    for part, node in parts.items():
        cfg = compose("task=evaluate", f"run={hostile(good, tmp_path / part, **{part: node})}")
        with pytest.raises(
            UserError, match=r"shufflenet_v2_x0_5: this is not known to return an? "
        ):
            saved_config.of_this_machine(cfg)


def test_a_task_for_a_run_has_nothing_built_inside_a_part(compose, good, tmp_path):  # noqa: F811
    cfg = compose("task=evaluate", f"run={tmp_path / 'run'}")
    for name in [name for name in REFUSED if " in a " in name]:
        make, message = REFUSED[name]
        shutil.copytree(good / "run", tmp_path / "run", dirs_exist_ok=True)
        make(tmp_path / "run", tmp_path, tmp_path)
        with pytest.raises(UserError, match=re.escape(message)):
            saved_config.of_this_machine(cfg)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            {"_target_": "stoker.trainer.callbacks.Checkpoint", "_args_": ["/tmp"]},
            "a._args_: pass these",
        ),
        ({"_target_": "stoker.trainer.callbacks.NaNGuard", "folder": ".."}, "a.folder=.."),
        ({"_target_": "stoker.trainer.callbacks.Progress", "_args_": 3}, "expected a list"),
    ],
)
def test_a_run_that_is_trained_again_writes_into_its_own_folder(
    compose,  # noqa: F811
    good,
    tmp_path,
    callback,
    message,
):
    def again(run, **callbacks):
        nodes = {f"callbacks__{name}": node for name, node in callbacks.items()}
        cfg = compose("task=reproduce", f"run={hostile(good, tmp_path / run, **nodes)}")
        return saved_config.to_train_again(cfg, str(tmp_path / "again"))

    with pytest.raises(UserError, match=re.escape(message)):
        again("outside", a=callback)
    removes = {
        "_target_": "stoker.runs.loggers.ConfigFile",
        "path": str(tmp_path / "again" / "config.yaml"),
        "config": "",
        "stale": ["../victim"],
    }
    assert "jsonl" in again("usual").callbacks
    cfg = compose("task=reproduce", f"run={hostile(good, tmp_path / 'job', sweep__gone=1)}")
    assert saved_config.to_train_again(cfg, str(tmp_path / "again")).sweep == {}
    assert "jsonl" not in again("removes", jsonl=removes).callbacks


def test_what_python_loads_is_looked_at_before_it_takes_memory(good, tmp_path):
    with pytest.raises(UserError, match=r"Shape of .* in the model, .* in the checkpoint"):
        package.load(hostile(good, tmp_path / "large", model__hidden=[10**6, 10**6]))
    ignored = {"_target_": "stoker.trainer.callbacks.EMA", "decay": LINEAR}
    package.load(hostile(good, tmp_path / "callback", callbacks__a=ignored))  # builds no callback


def test_what_python_loads_fetches_no_weights(good, tmp_path, monkeypatch):
    """Not even from torchvision's cache, which has a broken file of theirs."""
    models = pytest.importorskip("torchvision.models")
    cached = (
        tmp_path / "hub" / "checkpoints" / Path(models.ShuffleNet_V2_X0_5_Weights.DEFAULT.url).name
    )
    cached.parent.mkdir(parents=True)
    cached.touch()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(EOFError):
        models.shufflenet_v2_x0_5(weights="DEFAULT")
    module, about = models.shufflenet_v2_x0_5(), {"in_shape": [3, 32, 32], "num_classes": 1000}
    with Trainer(module, device="cpu") as trainer:
        weights = trainer.state_dict()["model"]
    with trust.trusting(()):
        found = inference.tested({"model": {**WEIGHTS}}, weights, about)
    assert all(
        torch.equal(tensor, module.state_dict()[name])
        for name, tensor in found.state_dict().items()
    )


# What an evaluation leaves out, or has no use for.
HARMLESS = {
    "a file's name",
    "rows elsewhere",
    "checkpoints elsewhere",
    "in a list",
    "workers",
    "chains",
}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "null",
        '{"overrides": 3}',
        '{"overrides": ["a"], "best": 3, "seconds": 1}',
        '{"overrides": [1], "error": "x"}',
    ]
    + [
        '{"overrides": [], "error": 3}',
        '{"overrides": [], "best": {"name": 1, "value": 2}, "seconds": 1}',
        "\x00",
        "[" * 10**5,
    ]
    + [
        '{"overrides": [], "seconds": 1, "best": {"name": "\\u001b[31m", "value": 1e400, "mode": "max"}}',
        '{"job": 3}',
    ]
    + ['{"overrides": ["\\u001b[2J"], "error": "\\n\\n"}', '{"overrides": [], "seconds": NaN}'],
)
def test_a_sweep_with_somebodys_results_has_its_table(tmp_path, content, capsys):
    for job in ("0", "1", "2\x1b[31m"):
        (tmp_path / job).mkdir()
    (tmp_path / "0" / "result.json").write_text(content, encoding="utf-8")
    good = {
        "overrides": ["a=1"],
        "best": {"name": "val/acc", "value": 0.5, "mode": "max"},
        "seconds": 1.0,
        "test/acc": 0.5,
    }
    (tmp_path / "1" / "result.json").write_text(json.dumps(good), encoding="utf-8")
    (tmp_path / "2\x1b[31m" / "result.json").symlink_to("/dev/zero")
    (tmp_path / "sweep.json").write_text(
        content, encoding="utf-8"
    )  # by which the folder is a sweep's
    lines = table.lines(table.Sweep(tmp_path))
    assert len(lines) == 4 and lines[1].split() == ["1", "0.5000", "0.5000", "1.0", "a=1"]
    redraw([str(tmp_path)])
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


# Secrets.


MINE = """
from stoker.trainer.callbacks import Callback

class Mine(Callback):
    def __init__(self, key, keys):
        assert key.startswith("geheim") and keys == [key]
"""


@pytest.mark.slow
def test_nothing_from_the_environment_is_left_anywhere(tmp_path):
    """In keys of all kinds, typed as ${oc.env:...}: neither on the disk nor on the screen, mistakes
    included.
    """
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    mine = [
        "+callbacks.mine._target_=mine.Mine",
        "+callbacks.mine.key=${oc.env:S}",
        "+callbacks.mine.keys=['${oc.env:S}']",
    ]
    typed = [*GOOD, *mine, "ema='${oc.decode:${oc.env:NUMBER}}'", "callbacks=tensorboard"]
    secret = {"S": "geheim-wort", "NUMBER": "0.98765432123", "PYTHONPATH": str(tmp_path)}
    commands = [typed, [*typed, "epochs=2", "patience=${oc.env:S}"], [*typed, "resume=${oc.env:S}"]]
    first, *wrong = forked(tmp_path, commands, "hydra", "torch", **secret)
    assert first.code == 0, first.err
    assert all(done.code == 2 and "${oc.env:S}" in done.err for done in wrong)
    left = {path: path.read_bytes() for path in (tmp_path / "0").rglob("*") if path.is_file()}
    assert len(left) > 6 and b"${oc.env:S}" in left[tmp_path / "0" / "run" / "config.yaml"]
    for word in (secret["NUMBER"], secret["S"]):
        assert not any(word in done.out + done.err for done in (first, *wrong))
        assert [str(path) for path, content in left.items() if word.encode() in content] == []


def test_a_run_takes_its_data_from_where_it_lies_here(good):
    """What our own configs look up in the environment is looked up here, and nothing else is."""
    config = saved_config.load_config("run", good / "run")
    config["dataset"] = {"root": "${oc.env:DATA_ROOT,datasets}"}
    assert saved_config.resolved(config)["dataset"]["root"] == "${oc.env:DATA_ROOT,datasets}"
    config["half"] = "$"
    refused = [
        ("root", "${oc.env:HOME}"),
        ("path", "${oc.env:DATA_ROOT,datasets}"),
        (
            "path",
            "${half}{oc.env:HOME}",
        ),  # put together, it would be looked up by who reads it next
    ]
    for key, text in refused:
        config["dataset"] = {key: text}
        with pytest.raises(UserError, match=rf"(?s)dataset\.{key} .*Type dataset\.{key}="):
            saved_config.resolved(dict(config))


def test_what_the_files_of_this_project_look_up_for_its_data_is_looked_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "dataset").mkdir(parents=True)
    (tmp_path / "configs" / "experiment").mkdir()
    own = tmp_path / "configs" / "dataset" / "own.yaml"
    own.write_text("_target_: own.data\nroot: ${oc.env:PHOTOS}/a\n")
    (tmp_path / "configs" / "experiment" / "e.yaml").write_text(
        "# @package _global_\ndataset:\n  path: ${oc.env:PHOTOS}/b\nmodel:\n  c: ${oc.env:PHOTOS}\n"
    )
    (tmp_path / "configs" / "dataset" / "damaged.yaml").write_text("- ${oc.env:A}\n: [")
    config = {"dataset": {"root": "${oc.env:PHOTOS}/a", "path": "${oc.env:PHOTOS}/b"}}
    assert saved_config.resolved(config) == config
    for other in (
        {"dataset": {"path": "${oc.env:PHOTOS}/a"}},
        {"dataset": {"root": "${oc.env:PHOTOS}"}},
        {"model": {"c": "${oc.env:PHOTOS}"}},
    ):
        with pytest.raises(UserError, match="which is not resolved here"):
            saved_config.resolved(other)
    own.unlink()
    with pytest.raises(UserError, match="dataset.root in its config.yaml is "):
        saved_config.resolved(config)


def test_a_text_is_counted_before_it_is_put_together():
    config = {"b": "x" * 60_000, "a": "${b}" * 4_500}
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="which is not resolved here"):
            saved_config.resolved(config)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_model_of_another_size_is_refused_before_it_takes_memory():
    weights = torch.nn.Linear(3, 2).state_dict()
    node = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}
    build.check_shapes(node, weights)
    for size in (4, 10**12):
        message = rf"bias: \({size},\) in the model, \(2,\) in the checkpoint"
        with pytest.raises(UserError, match=message):
            build.check_shapes(node | {"out_features": size}, weights)


def test_a_constructor_that_loads_weights_causes_no_warnings(monkeypatch, recwarn):
    monkeypatch.setattr(build, "build", lambda *_: Loaded())
    build.check_shapes({}, Loaded.weights)
    assert not recwarn.list  # torch warns of each tensor that it copies to the meta device


class Loaded(torch.nn.Linear):
    weights = torch.nn.Linear(3, 2).state_dict()

    def __init__(self):
        super().__init__(3, 2)
        self.load_state_dict(self.weights)
