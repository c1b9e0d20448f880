"""Settings with a mistake in them, made at random: each is answered in three lines that name the
key.
"""

import random
import string
from pathlib import Path

import pytest
import yaml
from test_cli import forked, no_torch  # noqa: F401 (a fixture)

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GROUPS = {
    folder.name: {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.yaml"))
    }
    for folder in sorted(CONFIGS.iterdir())
    if any(folder.glob("*.yaml"))
    and folder.name not in ("trainer", "experiment", "callbacks", "hydra")
}
TOP = yaml.safe_load((CONFIGS / "train.yaml").read_text(encoding="utf-8"))
KEYS = [key for key in TOP if key not in ("defaults", "hydra", "checkpoint", "metrics")]
KEYS += ["checkpoint.every", "checkpoint.keep"]
DEFAULT = {
    "dataset": "digits",
    "model": "mlp",
    "loss": "cross_entropy",
    "optimizer": "adamw",
    "scheduler": "cosine",
}
NESTED = [
    f"{group}.{key}"
    for group, option in DEFAULT.items()
    for key in GROUPS[group][option]
    if key[0] != "_"
]
CHOICES = {
    "precision": ["auto", "fp32", "bf16", "fp16"],
    "monitor_mode": ["auto", "min", "max"],
    "strategy": ["single"],
    "device": ["auto", "cpu", "cuda"],
    "task": ["train", "evaluate", "lr_find", "plan"],
}
WHOLE = [
    "epochs",
    "batch_size",
    "eval_batch_size",
    "grad_accum_steps",
    "log_every",
    "seed",
    "checkpoint.keep",
]
WHOLE += ["max_steps", "eval_every", "patience", "checkpoint.every"]
NUMBERS = [
    "optimizer.lr",
    "optimizer.eps",
    "model.dropout",
    "scheduler.warmup",
    "loss.label_smoothing",
    "max_grad_norm",
]
FLAGS = ["drop_last", "deterministic"]
LISTS = ["model.hidden", "groups", "tune", "dataset.augment", "dataset.mean", "optimizer.betas"]
TINY = ["epochs=1", "device=cpu"]


def slip(rng, word, taken=()):
    """The word with one letter doubled, dropped, replaced, or swapped with the next; none of
    `taken`.
    """
    while True:
        i, letters = rng.randrange(len(word)), list(word)
        kind = rng.choice(["swap", "drop", "double", "replace"])
        if kind == "swap" and i + 1 < len(word):
            letters[i : i + 2] = letters[i + 1], letters[i]
        elif kind == "drop":
            del letters[i]
        elif kind == "double":
            letters.insert(i, letters[i])
        elif kind == "replace":
            letters[i] = rng.choice(string.ascii_lowercase)
        other = "".join(letters)
        if other != word and other and other not in taken and other[0] not in "_0123456789":
            return other


# Each gives (what is typed, what the answer names, what it suggests or None). Those of EARLY need
# no torch.


def key_typo(rng):
    key = rng.choice(KEYS + NESTED)
    group, _, last = key.rpartition(".")
    names = [*KEYS, *GROUPS] if not group else [name.rpartition(".")[2] for name in NESTED + KEYS]
    typed = ".".join(filter(None, [group, slip(rng, last, names)]))
    return [f"{typed}=1"], typed, f"Did you mean '{key}'?"


def group_typo(rng):
    group = rng.choice(sorted(GROUPS))
    typed = slip(rng, group, [*KEYS, *GROUPS])
    return [f"{typed}={rng.choice(sorted(GROUPS[group]))}"], typed, f"Did you mean '{group}'?"


def option_typo(rng):
    group = rng.choice(sorted(GROUPS))
    option = rng.choice(sorted(GROUPS[group]))
    typed = slip(rng, option, GROUPS[group])
    return [f"{group}={typed}"], f"{group}={typed}", f"Did you mean '{option}'?"


def choice_typo(rng):
    key = rng.choice(sorted(CHOICES))
    choice = rng.choice(CHOICES[key])
    typed = slip(rng, choice, [*CHOICES[key], "dp", "xpu", "mps", "npu", "hpu"])
    return [f"{key}={typed}"], f"{key}={typed}", f"Did you mean '{choice}'?"


def wrong_type(rng):
    wrong = [(key, "abc") for key in WHOLE + FLAGS + LISTS + NUMBERS] + [
        (key, "[1,2]") for key in WHOLE + FLAGS
    ]
    wrong += [(key, "1.5") for key in WHOLE + FLAGS + LISTS[:3]] + [
        (key, "{a:1}") for key in WHOLE + FLAGS + NUMBERS
    ]
    wrong += [(key, "true") for key in WHOLE + ["optimizer.lr", "model.dropout", "device"]]
    wrong += [
        ("model", "[mlp]"),
        ("model", "{a:1}"),
        ("checkpoint", "3"),
        ("callbacks.ema", "x"),
        ("metrics", "[1]"),
    ]
    wrong += [
        ("run_dir", "[a]"),
        ("resume", "{a:1}"),
        ("trusted", "3"),
        ("precision", "[fp32]"),
        ("compile", "{a:1}"),
    ]
    key, value = rng.choice(wrong)
    return [f"{key}={value}"], key, None


def wrong_range(rng):
    wrong = [
        (key, value)
        for key in WHOLE
        if key != "seed"
        for value in ("0", "-1", "-99999999999999999999")
    ]
    wrong += [
        ("seed", "-1"),
        ("seed", str(10 ** rng.randrange(20, 400))),
        ("ema", "2"),
        ("ema", "-0.1"),
        ("ema", "nan"),
    ]
    wrong += [
        ("max_grad_norm", "-1"),
        ("max_grad_norm", "nan"),
        ("max_minutes", "0"),
        ("max_minutes", "-inf"),
    ]
    key, value = rng.choice(wrong)
    return [f"{key}={value}"], key, None


def null_or_empty(rng):
    key = rng.choice([*WHOLE[1:7], *FLAGS, "optimizer.lr", "model.hidden", "model.activation"])
    return (
        [f"{key}={rng.choice(['null', ''])}" if key != "model.activation" else f"{key}=null"],
        key,
        None,
    )


def missing_or_unknown(rng):
    word = "".join(rng.choices(string.ascii_lowercase, k=9))
    group, key = rng.choice(sorted(GROUPS)), rng.choice(KEYS)
    return rng.choice(
        [
            ([f"~{group}"], group, None),
            ([f"~{key.partition('.')[0]}"], key.partition(".")[0], None),
            ([f"{group}=null"], group, None),
            ([f"{group}={word}"], f"{group}={word}", None),
            ([f"{word}={word}"], word, None),
            ([f"+{word}=1"], word, None),
            ([f"++{word}=1"], word, None),
            ([f"~{word}"], word, None),
            ([f"+{group}/{word}=1"], word, None),
            ([f"{key}.{word}=1"], word, None),
            (["dataset=csv"], "dataset.", None),
        ]
    )


def not_understood(rng):
    key = rng.choice(KEYS)
    return rng.choice(
        [
            ([key], key, None),
            ([f"{key}=[1"], key, None),
            ([f"{key}={{a:"], key, None),
            ([f"{key}='abc"], key, None),
            ([f"{key}=a'b"], key, None),
            ([f"={key}"], key, None),
            ([f"{key}=a=b:c,d"], key, None),
            ([f"{key}=\x1b[31mred\x07"], key, None),
            ([f"{key}=a\nb\nc\nd"], key, None),
            ([f"--{key}=1"], f"--{key}", None),
            ([f"--{key.replace('_', '-')}"], key.replace("_", "-"), None),
            ([f"-{key}=1"], key.partition("=")[0][:1], None),
            ([f"{key}=!!python/object/apply:os.system"], key, None),
            ([f"epochs={'9' * rng.randrange(5000, 50000)}"], "epochs", None),
            ([f"epochs={'[' * 400}{']' * 400}"], "epochs", None),
            ([f"{'x' * 20000}=1"], "x", None),
            ([f"epochs={'x' * 100000}"], "epochs", None),
            (["épochs=1"], "pochs", None),
            (["epochs=drei\u202e"], "epochs", None),
            (["epochs=٣٣x"], "epochs", None),
        ]
    )


def interpolation(rng):
    word = "".join(rng.choices(string.ascii_lowercase, k=7))
    key = rng.choice(["epochs", "seed", "optimizer.lr", "log_every", "monitor", "model.hidden"])
    return rng.choice(
        [
            ([f"{key}=${{{word}}}"], key, None),
            ([f"{key}=${{{key}}}"], key, None),
            (["epochs=${seed}", "seed=${epochs}"], "epochs", None),
            ([f"{key}=${{oc.env:{word}}}"], key, None),
            ([f"{key}=${{{word}:1}}"], key, None),
            ([f"{key}=${{model}}"], key, None),
            (["checkpoint=${tune}"], "checkpoint", None),
            (["optimizer.lr=${tune}"], "optimizer.lr", None),
            ([f"{key}=${{"], key, None),
            ([f"{key}=${{model.{word}}}"], key, None),
            ([f"{key}=${{oc.decode:'['}}"], key, None),
        ]
    )


def torch_has_to_know(rng):
    word = "".join(rng.choices(string.ascii_lowercase, k=7))
    wrong = [
        ("optimizer.lr", "-1"),
        ("optimizer.betas", "[2,3]"),
        ("optimizer.betas", "[a]"),
        ("optimizer.eps", "-1"),
    ]
    wrong += [
        ("model.hidden", "[a]"),
        ("model.hidden", "[-1]"),
        ("model.hidden", "[[1]]"),
        ("model.hidden", "[1.5]"),
    ]
    wrong += [
        ("model.dropout", "2"),
        ("model.dropout", "nan"),
        ("model.norm", "3"),
        ("model.activation", word),
    ]
    wrong += [
        ("dataset.val_fraction", "2"),
        ("dataset.mean", "[a]"),
        ("dataset.std", "[0]"),
        ("dataset.mean", "[]"),
    ]
    wrong += [
        ("dataset.augment", "[3]"),
        ("dataset.augment", f"[{word}]"),
        ("dataset.augment", "[{flip:3}]"),
    ]
    wrong += [
        ("dataset.augment", "[{shift:a}]"),
        ("dataset.augment", "[null]"),
        ("dataset.workers", "-1"),
    ]
    wrong += [
        ("scheduler.warmup", "-1"),
        ("scheduler.final", "-1"),
        ("scheduler.warmup", "nan"),
        ("monitor", word),
    ]
    wrong += [
        ("loss.label_smoothing", "2"),
        ("loss", "mse"),
        ("model", "cnn dataset=synthetic"),
        ("batch_size", "5000"),
    ]
    wrong += [
        ("model._target_", slip(rng, "stoker.models.mlp.MLP")),
        ("optimizer._target_", "torch.optim.nope.Nope"),
    ]
    wrong += [
        ("+model._recursive_", "false"),
        ("+model._convert_", "all"),
        ("+model._partial_", "true"),
        ("model._target_", "3"),
    ]
    wrong += [
        ("+model._execution_whitelist_", "[os]"),
        ("dataset.split_seed", word),
        ("device", "cuda:7"),
        ("strategy", "dp:7"),
    ]
    wrong += [
        ("model._target_", "builtins.dict"),
        ("+metrics.a._target_", "os.system"),
        ("+callbacks.a._target_", "print"),
    ]
    wrong += [
        ("loss._target_", "os"),
        ("dataset", "synthetic dataset.n=0"),
        ("dataset", "synthetic dataset.in_shape=[]"),
    ]
    wrong += [
        ("dataset", "synthetic dataset.n=1000000000000"),
        ("dataset", "synthetic dataset.in_shape=[a]"),
    ]
    wrong += [
        ("dataset", f"csv dataset.path={word} dataset.target=y"),
        ("dataset", f"mnist dataset.root={word}"),
    ]
    wrong += [
        ("trainer._target_", "stoker.models.mlp.MLP"),
        ("run_dir", "/dev/null/x"),
        ("run_dir", "x" * 300),
        ("resume", word),
    ]
    key, value = rng.choice(wrong)
    return f"{key}={value}".split(" "), key.lstrip("+").split(".")[0], None


def maybe_right(rng):
    """What may be a setting after all; then it is a job."""
    right = [
        ("epochs", "1"),
        ("seed", "٣"),
        ("seed", "0x10"),
        ("optimizer.lr", "1e-3"),
        ("model.hidden", "[]"),
        ("ema", "0.9"),
    ]
    right += [
        ("++seed", "3"),
        ("++model.dropout", "0.1"),
        ("patience", "3"),
        ("log_every", "1_000"),
        ("seed", '"3"'),
    ]
    right += [
        ("optimizer.lr", "inf"),
        ("optimizer.lr", "1e400"),
        ("optimizer.lr", "0"),
        ("run_dir", "tä st"),
        ("run_dir", "3"),
    ]
    right += [
        ("run_dir", "'\x1b[31m'"),
        ("monitor", "null"),
        ("tune", "[]"),
        ("compile", "1"),
        ("channels_last", "1"),
    ]
    right += [
        ("log_every", "9223372036854775807"),
        ("eval_batch_size", "9223372036854775807"),
        ("seed", "9" * 18),
    ]
    right += [
        ("max_grad_norm", "1e300"),
        ("optimizer.eps", "0"),
        ("model.dropout", "0.95"),
        ("dataset.augment", "[{shift:1}]"),
    ]
    right += [
        ("grad_accum_steps", "99999999"),
        ("dataset.val_fraction", "0"),
        ("callbacks.ema", "null"),
        ("metrics", "{}"),
    ]
    right += [
        ("model.norm", "null"),
        ("run", "x"),
        ("trusted", "[a,b]"),
        ("epochs", "null"),
        ("epochs", "null max_steps=3"),
    ]
    right += [
        ("dataset.mean", "null"),
        ("dataset.std", "[1e-30]"),
        ("optimizer.betas", "[0,0]"),
        ("optimizer.weight_decay", "1e30"),
    ]
    right += [
        ("dataset.split_seed", "1.5"),
        ("dataset.split_seed", "-1"),
        ("scheduler.warmup", "1e9"),
        ("device", "CPU"),
    ]
    right += [
        ("optimizer.lr", "1e30"),
        ("loss.label_smoothing", "1"),
        ("hydra.run.dir", "x"),
        ("hydra.verbose", "true"),
    ]
    right += [
        ("callbacks.lookahead.every", "3"),
        ("callbacks.jsonl", "null"),
        ("callbacks", "{}"),
        ("~callbacks.jsonl", ""),
    ]
    right += [
        ("dataset.workers", "3"),
        ("dataset.workers", "1.5"),
        ("dataset.resident", "null"),
        ("dataset.augment", "null"),
    ]
    key, value = rng.choice(right)
    return (
        f"{key}={value}".split(" max")[0:1]
        + ([f"max{value.split(' max')[1]}"] if " max" in value else []),
        "",
        None,
    )


EARLY = (
    [key_typo] * 8
    + [group_typo] * 3
    + [option_typo] * 4
    + [choice_typo] * 3
    + [wrong_type] * 5
    + [wrong_range] * 3
)
EARLY += [null_or_empty] * 2 + [missing_or_unknown] * 3 + [not_understood] * 3 + [interpolation] * 2
LATE = [torch_has_to_know] * 3 + [maybe_right] * 2


def table(kinds, count):
    """So many different mutations of these kinds, always the same ones: (kind, typed, names,
    suggestion).
    """
    rng, found = random.Random(0), {}
    for i in range(20 * count):
        kind = kinds[i % len(kinds)]
        typed, names, suggestion = kind(rng)
        found.setdefault(tuple(typed), (kind.__name__, typed, names, suggestion))
        if len(found) == count:
            break
    return list(found.values())


def wrongs(rows, answers):
    """What is wrong with the answers, in words."""
    for (kind, typed, names, _), done in zip(rows, answers, strict=True):
        lines, shown = done.err.splitlines(), " ".join(typed)[:100]
        if "Traceback" in done.err or done.code not in (0, 2, 3):
            yield f"{kind}: {shown}: code {done.code}: {done.err[-300:]}"
        elif done.code == 0 and kind != "maybe_right":
            yield f"{kind}: {shown}: was taken"
        elif done.code and (
            not 1 <= len(lines) <= 3 or not lines[0].startswith("error: ") or names not in done.err
        ):
            yield f"{kind}: {shown}: {len(lines)} lines: {done.err[:300]}"
        elif done.code and any(not c.isprintable() for line in lines for c in line):
            yield f"{kind}: {shown}: control characters: {done.err!r}"
        elif done.code == 2 and done.files:
            yield f"{kind}: {shown}: left {done.files[:3]}"


def test_mistakes_are_answered_without_torch(tmp_path, no_torch, large):  # noqa: F811 (the fixture)
    rows = table(EARLY, 1850 if large else 45)
    answers = forked(tmp_path, [typed for _, typed, _, _ in rows], "hydra", PYTHONPATH=no_torch)
    assert list(wrongs(rows, answers)) == []
    assert {done.code for done in answers} == {2}
    hinted = [(row, done) for row, done in zip(rows, answers, strict=True) if row[3]]
    missed = [f"{' '.join(row[1])}: {done.err}" for row, done in hinted if row[3] not in done.err]
    print(f"{len(rows)} mutations, {len(hinted)} typos, {len(missed)} without the right suggestion")
    assert len(missed) <= 0.05 * len(hinted), missed


@pytest.mark.slow
def test_mistakes_that_only_torch_knows_are_answered_too(tmp_path, large):
    rows = table(LATE, 150 if large else 12)
    answers = forked(tmp_path, [TINY + typed for _, typed, _, _ in rows], "hydra", "torch")
    print(
        f"{len(rows)} mutations, {sum(done.code == 0 for done in answers)} of them valid settings"
    )
    assert list(wrongs(rows, answers)) == []
