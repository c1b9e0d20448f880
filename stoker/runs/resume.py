"""Decide whether a run resumes, from which checkpoint, and check that its settings allow it.

Which settings may differ is the `resume` column of SETTINGS in stoker/command/settings.py.
"""

import json
from pathlib import Path
from typing import Any

from stoker.command import dotted, settings
from stoker.runs.directory import CONFIG, RESULT, WRITTEN
from stoker.runs.lock import LOCK
from stoker.runs.result import RunResult
from stoker.runs.saved_config import SCRIPT, for_reading, load_config, script_of
from stoker.trainer import files
from stoker.trainer.errors import TrainingError, UserError, as_typed, log

MOST_DIFFERENCES = 5  # differences in one message
START_OVER = "resume=never overwrite=true"


def to_resume(
    folder: Path, resume: str, overwrite: bool, cfg: Any
) -> tuple[Path, dict[str, Any], str | None] | None:
    """Return the checkpoint to resume from, (file, state, origin), or None to start at step 0.

    The origin is the SHA-256 of the file that `resume=FILE` started the run with: the same command
    then resumes that run instead of starting over. UserError if the settings differ.
    """
    from stoker.trainer import checkpoint

    if overwrite and resume != "never":
        raise UserError(
            "overwrite=true only applies to a run that starts over. Type resume=never as well."
        )
    if resume == "never":
        check_replaceable(folder, overwrite)
        return None
    newest = checkpoint.newest(folder / "checkpoints")
    if resume != "auto":
        settings.check_resume(resume)
        given = Path(resume).resolve()
        origin = sha256_of(given)
        if newest is None or about(newest[1]).get("origin") != origin:
            check_own(folder, newest, given, resume)
            try:
                state = checkpoint.load_whole(given)
            except checkpoint.DamagedCheckpoint as error:
                raise UserError(f"resume={resume}: {error}") from None
            check_settings(f"resume={resume}", state, cfg, longer=True)
            remove_partial(folder)
            return given, state, origin
    if newest is None:
        check_beginning(folder, cfg)
        remove_partial(folder)
        return None
    path, state = newest
    check_settings(f"run_dir={folder}", state, cfg)
    try:
        load_config("run_dir", folder)
    except UserError as error:
        log.warning("%s It will be written again from the settings in its checkpoint.", error)
    remove_partial(folder)
    return path, state, about(state).get("origin")


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raise UserError if a run that starts over would replace files without `overwrite`."""
    names = sorted({path.name for path in folder.iterdir()} - {LOCK, "job.json"})
    if names and not overwrite:
        raise UserError(
            f"run_dir={folder}: resume=never starts over, but {names[0]} exists."
            " Choose a different run_dir, or overwrite=true to replace it."
        )


def check_own(folder: Path, newest: Any, given: Path, resume: str) -> None:
    """Raise UserError if the directory has checkpoints of a run that did not start with `given`."""
    if newest is not None and given.parent != (folder / "checkpoints").resolve():
        raise UserError(
            f"run_dir={folder} has checkpoints of a run that did not start with {resume}.\n"
            "Type resume=auto to continue it, or another run_dir."
        )


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    if (folder / CONFIG).exists():  # this is a run directory
        files.remove_partial(folder, WRITTEN)


def check_beginning(folder: Path, cfg: Any) -> None:
    """Check a run directory without checkpoints: the run stopped too early, or there is none."""
    result = RunResult.read(folder)
    start_over = f"type {START_OVER}"
    if script_of(dotted.flat(cfg)) is not None:
        start_over = "remove the folder"
    if (folder / CONFIG).exists():
        check_same(f"run_dir={folder}", load_config("run_dir", folder), cfg)
        if result is not None and result.steps is not None:
            raise TrainingError(
                f"run_dir={folder}: the run has ended, but its checkpoints are missing.\n"
                f"Restore them, or {start_over} to start over."
            )
        print(f"starts at step 0: the run in {folder} has no checkpoint")
        return
    in_the_way = [name for name in WRITTEN if (folder / name).exists()]
    if RESULT in in_the_way and result is not None and result.has_failed:
        in_the_way.remove(RESULT)
    if in_the_way:
        raise UserError(
            f"run_dir={folder}: a run would overwrite {in_the_way[0]}, which was not written by a "
            "run."
            f" Choose a different run_dir, or {start_over}."
        )


def about(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores about its run; {} if that is missing or malformed."""
    entry = state.get("about")
    if isinstance(entry, dict) and isinstance(entry.get("config"), dict):
        return entry
    return {}


def check_classes(state: dict[str, Any], data: Any) -> None:
    """Raise UserError if this data has other classes than the checkpoint's run."""
    before = about(state).get("classes")
    if before is None or data.classes is None or before == list(data.classes):
        return
    new = [str(name) for name in data.classes if name not in before]
    example = f", {new[0]!r} among them" if new else ""
    raise UserError(
        f"dataset: the run had {len(before)} classes, but this data has"
        f" {len(data.classes)}{example}. Type dataset.root=DIR."
    )


def check_data(state: dict[str, Any], fingerprint: str) -> None:
    """Raise UserError if a checkpoint comes from a run on other data."""
    before = about(state).get("data")
    if before not in (None, fingerprint):
        raise UserError(
            f"dataset: the run used different data (fingerprint {before}, now {fingerprint}).\n"
            "To continue it, type its dataset.root. For a new run, choose a different run_dir and "
            "remove resume."
        )


def check_settings(name: str, state: dict[str, Any], cfg: Any, *, longer: bool = False) -> None:
    """Raise UserError if a checkpoint's run had other settings."""
    config = about(state).get("config")
    if config is not None:
        check_same(name, config, cfg, longer=longer)


def check_same(name: str, before: Any, now: Any, *, longer: bool = False) -> None:
    """Raise UserError if two configs differ in settings that a resumed run may not change."""
    before = dotted.flat(before)
    now = dotted.flat(now)
    scripts = [script_of(before), script_of(now)]
    if scripts.count(None) == 1:
        raise UserError(
            f"{name} holds a run started by {scripts[0] or 'the command'}. "
            "Choose a different run_dir."
        )
    followed = [for_reading(before), for_reading(now)]
    on = {name for values in followed for name in callbacks_on(values)}
    changed = [
        key
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
        and followed[0].get(key) != followed[1].get(key)
        and not settings.may_differ(key, longer=longer)
        and key != SCRIPT
        and (not key.startswith("callbacks.") or key.split(".")[1] in on)
    ]
    if not changed:
        return
    # If a part's class differs, its arguments do not matter.
    replaced = tuple(key.removesuffix("_target_") for key in changed if key.endswith("._target_"))
    shown = [key for key in changed if not key.startswith(replaced) or key.endswith("._target_")]
    differences = ", ".join(
        f"{key}={as_typed(now.get(key))} (was {as_typed(before.get(key))})"
        for key in shown[:MOST_DIFFERENCES]
    )
    advice = (
        "To continue it, type its settings. For a new run, choose a different run_dir and remove "
        "resume."
    )
    if scripts != [None, None]:
        advice = "To continue it, pass its settings. Otherwise, pass a different run_dir."
    elif all(settings.may_differ(key, longer=True) for key in changed):
        advice = (
            "To train it longer, choose a different run_dir, and type resume=FILE with one of its "
            f"checkpoints. To start over in the same folder, type {START_OVER}."
        )
    raise UserError(f"{name} holds a run with different settings: {differences}.\n{advice}")


def callbacks_on(values: dict[str, Any]) -> set[str]:
    """Return the names of the callbacks that are on, by a run's settings {dotted key: value}.

    One that is off changes nothing: an earlier version may not have had it.
    """
    paths = {key: key.split(".") for key in values if key.startswith("callbacks.")}
    names = {path[1] for path in paths.values()}
    off = {path[1] for key, path in paths.items() if values[key] is None and len(path) <= 3}
    return names - off


def sha256_of(path: str | Path) -> str | None:
    """Return the SHA-256 that the file states, None if it does not.

    Once the contents are verified, it is a name for them.
    """
    from stoker.trainer import checkpoint

    try:
        with files.open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, checkpoint.MAX_HEADER)))
        sha256: str = header["__metadata__"]["sha256"]
        return sha256
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
