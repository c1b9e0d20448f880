"""Decide whether a run resumes, from which checkpoint, and check that its settings allow it.

Which settings may differ is the `resume` column of SETTINGS in stoker/command/settings.py.
"""

from pathlib import Path
from typing import Any

from stoker.command import dotted, settings
from stoker.runs.directory import CONFIG, RESULT, WRITTEN
from stoker.runs.json_files import parsed
from stoker.runs.lock import LOCK
from stoker.runs.result import RunResult
from stoker.runs.saved_config import SCRIPT, for_reading, load_config
from stoker.trainer import files
from stoker.trainer.errors import TrainingError, UserError, as_typed, first_few

MOST_SHOWN = 5  # differences in one message


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
            "overwrite=true applies only to a run that starts over. Type resume=never as well."
        )
    if resume == "never":
        check_replaceable(folder, overwrite)
        return None
    remove_partial(folder)
    newest = checkpoint.newest(folder / "checkpoints")
    if resume != "auto":
        settings.check_resume(resume)
        given = Path(resume).resolve()
        origin = sha256_of(given)
        if newest is None or about(newest[1]).get("origin") != origin:
            if newest is not None and given.parent != (folder / "checkpoints").resolve():
                raise UserError(
                    f"run_dir={folder} has checkpoints of a run that did not start with {resume}.\n"
                    "Type resume=auto to continue it, or choose a different run_dir."
                )
            try:
                state = checkpoint.load_whole(given)
            except checkpoint.DamagedCheckpoint as error:
                raise UserError(f"resume={resume}: {error}") from None
            check_same(f"resume={resume}", about(state).get("config"), cfg, longer=True)
            return given, state, origin
    if newest is None:
        check_beginning(folder, cfg)
        return None
    path, state = newest
    check_same(f"run_dir={folder}", about(state).get("config"), cfg)
    return path, state, about(state).get("origin")


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raise UserError if a run that starts over would replace files without `overwrite`."""
    names = sorted({path.name for path in folder.iterdir()} - {LOCK, "job.json"})
    if names and not overwrite:
        raise UserError(
            f"run_dir={folder}: resume=never starts over, but {names[0]} exists."
            " Choose a different run_dir, or overwrite=true to replace it."
        )


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    if (folder / CONFIG).exists():  # this is a run directory
        files.remove_partial(folder, WRITTEN)


def check_beginning(folder: Path, cfg: Any) -> None:
    """Check a run directory without checkpoints: the run stopped too early, or there is none."""
    result = RunResult.read(folder) or RunResult()
    if (folder / CONFIG).exists():
        check_same(f"run_dir={folder}", load_config("run_dir", folder), cfg)
        if result.steps is not None:
            raise TrainingError(
                f"run_dir={folder}: the run has ended, but its checkpoints are missing.\n"
                "Restore them, or choose a different run_dir."
            )
        print(f"starts at step 0: the run in {folder} has no checkpoint")
        return
    for name in WRITTEN:
        is_failure = name == RESULT and result.has_failed
        if (folder / name).exists() and not is_failure:
            raise UserError(
                f"run_dir={folder}: a run would overwrite {name}, which was not written by a run. "
                "Choose a different run_dir."
            )


def about(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores about its run; {} if that is missing or malformed."""
    entry = state.get("about")
    if isinstance(entry, dict) and isinstance(entry.get("config"), dict):
        return entry
    return {}


def check_data(state: dict[str, Any], fingerprint: str) -> None:
    """Raise UserError if a checkpoint comes from a run on other data."""
    before = about(state).get("data")
    if before not in (None, fingerprint):
        raise UserError(
            f"dataset: the run used different data (fingerprint {before}, now {fingerprint}).\n"
            "To continue it, type its dataset.root. For a new run, choose a different run_dir."
        )


def check_same(name: str, before: Any, now: Any, *, longer: bool = False) -> None:
    """Raise UserError if two configs differ in settings that a resumed run may not change.

    An unknown config is not compared.
    """
    before = dotted.flat(before or now)
    now = dotted.flat(now)
    if (SCRIPT in before) != (SCRIPT in now):
        raise UserError(
            f"{name} holds a run that was started differently: by a script, or by the command. "
            "Choose a different run_dir."
        )
    followed = [for_reading(before), for_reading(now)]
    on = callbacks_on(followed[0]) | callbacks_on(followed[1])
    differences = []
    for key in sorted({*before, *now}):
        is_off = key.startswith("callbacks.") and key.split(".")[1] not in on
        if (
            before.get(key) == now.get(key)
            or followed[0].get(key) == followed[1].get(key)
            or settings.may_differ(key, longer=longer)
            or is_off
            or key == SCRIPT
        ):
            continue
        differences.append(f"{key}={as_typed(now.get(key))} (was {as_typed(before.get(key))})")
    if differences:
        raise UserError(
            f"{name} holds a run with different settings: {first_few(differences, MOST_SHOWN)}.\n"
            "To continue it, use its settings. For a new run, choose a different run_dir.\n"
            "To train it longer, start a run in a different run_dir with resume=FILE, one of its "
            "checkpoints."
        )


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

    Once the contents are verified, it identifies them.
    """
    from stoker.trainer import checkpoint

    try:
        with files.open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = parsed(file.read(min(length, checkpoint.MAX_HEADER))) or {}
        sha256: str = header["__metadata__"]["sha256"]
        return sha256
    except (OSError, KeyError, TypeError):
        return None
