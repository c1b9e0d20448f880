"""The text of `--help`: examples, the groups, and the keys of configs/train.yaml."""

from stoker import configs
from stoker.command import invocation

EXAMPLES = {
    "": "the default: an MLP on handwritten digits, in seconds",
    "model=cnn device=cuda epochs=3": "set any key",
    "-m model=linear,mlp seed=0,1,2": "a sweep: every combination, and a table of the results",
    "-m sweep=optuna": "a search: each trial follows from the results before it",
    "run_dir=runs/mine": "a named run; type it again to resume",
    "task=lr_find model=cnn": "find a learning rate",
    "model=cnn --cfg job": "show the whole config and train nothing",
}


def help_text() -> str:
    """Return the help text."""
    command = " ".join(invocation.program())
    lines = [f"Train a model:  {command} [key=value ...] [group=option ...]", ""]
    width = len(command) + 1 + max(map(len, EXAMPLES))
    for typed, meaning in EXAMPLES.items():
        lines.append(f"  {f'{command} {typed}':<{width}}    {meaning}")
    lines.append("")
    lines.append("Groups (group=option; the keys of an option are in its file in configs/):")
    for group in groups():
        options = ", ".join(path.stem for path in configs.options(group))
        lines.append(f"  {group:<16}{options}")
    text = (configs.FOLDER / "train.yaml").read_text(encoding="utf-8")
    keys = text[text.index("\ntask:") : text.index("\nhydra:")]
    lines += ["", "Keys (key=value), with their defaults:"]
    lines += [f"  {line}" if line else "" for line in keys.splitlines()[1:]]
    return "\n".join(lines)


def groups() -> list[str]:
    """Return the names of the groups, sorted."""
    names = set()
    for folder in configs.folders():
        for path in folder.rglob("*/*.yaml"):
            names.add(path.parent.relative_to(folder).as_posix())
    return sorted(names)
