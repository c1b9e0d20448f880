"""Decide whether a run resumes and from which checkpoint, and check that its settings allow it.

The `resume` column of SETTINGS in stoker/command/settings.py says which settings may differ.
"""

from pathlib import Path
from typing import Any

from stoker.command import dotted, settings
from stoker.runs.directory import CONFIG, JOB, RESULT, WRITTEN
from stoker.runs.lock import LOCK
from stoker.runs.result import RunResult
from stoker.runs.saved_config import SCRIPT, for_reading, load_config
from stoker.trainer import files
from stoker.trainer.errors import TrainingError, UserError, as_typed, first_few, log

MOST_SHOWN = 5  # maximum differences in one message


def to_resume(
    folder: Path, resume: str, overwrite: bool, cfg: Any
) -> tuple[Path, dict[str, Any], str | None] | None:
    """Return the checkpoint to resume from as (file, state, origin), or None to start at step 0.

    If `resume=FILE` started the run, the origin is the SHA-256 of FILE. If it matches the FILE of
    this command, the run resumes instead of starting over from FILE. Raises UserError if the
    settings differ.
    """
    from stoker.trainer import checkpoint

    if overwrite and resume != "never":
        raise UserError(
            "overwrite=true applies only to a run that starts over. Also type resume=never."
        )
    if resume == "never":
        check_replaceable(folder, overwrite)
        return None
    remove_partial(folder)
    newest = checkpoint.newest(folder / "checkpoints")
    if resume != "auto":
        settings.check_resume(resume)
        given = Path(resume).resolve()
        try:
            origin = checkpoint.read_tensors(given)[0].get("sha256")
            if newest is None or about(newest[1]).get("origin") != origin:
                if newest is not None and given.parent != (folder / "checkpoints").resolve():
                    raise UserError(
                        f"run_dir={folder} contains checkpoints from a run that did not start "
                        f"from {resume}.\n"
                        "Type resume=auto to continue that run, or choose a different run_dir."
                    )
                state = checkpoint.load_whole(given)
                check_same(f"resume={resume}", about(state).get("config"), cfg, longer=True)
                return given, state, origin
        except checkpoint.DamagedCheckpoint as error:
            raise UserError(f"resume={resume}: {error}") from None
    if newest is None:
        check_beginning(folder, cfg)
        return None
    path, state = newest
    check_same(f"run_dir={folder}", about(state).get("config"), cfg)
    return path, state, about(state).get("origin")


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raise UserError if starting over would replace files, unless `overwrite` is set."""
    names = sorted({path.name for path in folder.iterdir()} - {LOCK, JOB})
    if names and not overwrite:
        raise UserError(
            f"run_dir={folder}: resume=never starts over, but {names[0]} exists."
            " Choose a different run_dir, or type overwrite=true to replace the run."
        )


def remove_partial(folder: Path) -> None:
    """Remove the half-written files of a killed run."""
    if (folder / CONFIG).exists():  # this is a run directory
        files.remove_partial(folder, WRITTEN)


def check_beginning(folder: Path, cfg: Any) -> None:
    """Check a folder without checkpoints, which may hold a run that stopped very early."""
    result = RunResult.read(folder)
    if (folder / CONFIG).exists():
        check_same(f"run_dir={folder}", load_config("run_dir", folder), cfg)
        if result.steps is not None:
            raise TrainingError(
                f"run_dir={folder}: the run has ended, but its checkpoints are missing.\n"
                "Restore them, or choose a different run_dir."
            )
        print(f"starting at step 0: the run in {folder} has no checkpoint")
        return
    for name in WRITTEN:
        is_failure = name == RESULT and result.has_failed
        if (folder / name).exists() and not is_failure:
            raise UserError(
                f"run_dir={folder}: this is not a run directory, but it contains {name}, which a "
                "run would overwrite. Choose a different run_dir."
            )


def about(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores about its run, or {} if the entry is missing or malformed."""
    entry = state.get("about")
    if isinstance(entry, dict) and isinstance(entry.get("config"), dict):
        return entry
    return {}


def check_data(state: dict[str, Any], fingerprint: str) -> None:
    """Raise UserError if a checkpoint comes from a run on different data."""
    before = about(state).get("data")
    if before not in (None, fingerprint):
        raise UserError(
            f"dataset: the run used different data (fingerprint {before}, now {fingerprint}).\n"
            "To continue the run, use the original data. For a new run, choose a different run_dir."
        )


def is_of_own_callback(key: str, *configs: dict[str, Any]) -> bool:
    """Return whether a dotted key belongs to a callback whose class is not one of Stoker's."""
    group, _, rest = key.partition(".")
    target = f"callbacks.{rest.partition('.')[0]}._target_"
    targets = [str(config[target]) for config in configs if target in config]
    is_builtin = any(one.startswith("stoker.") for one in targets)
    return group == "callbacks" and bool(targets) and not is_builtin


def check_same(name: str, before: Any, now: Any, *, longer: bool = False) -> None:
    """Raise UserError if two configs differ in settings that must not change on resume.

    If the earlier config is unknown, nothing is compared.
    """
    before = dotted.flat(before or now)
    now = dotted.flat(now)
    if (SCRIPT in before) != (SCRIPT in now):
        raise UserError(
            f"{name} holds a run that was started differently: a script started one of the two "
            "runs, and the command started the other. Choose a different run_dir."
        )
    followed_before = for_reading(before)
    followed_now = for_reading(now)
    differences: list[str] = []
    of_callbacks: list[str] = []
    for key in sorted({*before, *now} - {SCRIPT}):
        value = now.get(key)
        was = before.get(key)
        is_same = value == was or followed_now.get(key) == followed_before.get(key)
        if not (is_same or settings.may_differ(key, longer=longer)):
            listed = of_callbacks if is_of_own_callback(key, before, now) else differences
            listed.append(f"{key}={as_typed(value)} (was {as_typed(was)})")
    if of_callbacks and not differences:
        log.warning(
            "Settings of your own callbacks have changed: %s. If these callbacks affect the "
            "training, the results will differ.",
            first_few(of_callbacks, MOST_SHOWN),
        )
    if differences:
        raise UserError(
            f"{name} holds a run with different settings: {first_few(differences, MOST_SHOWN)}.\n"
            "To continue that run, use its settings. For a new run, choose a different run_dir.\n"
            "To train that run for longer, choose a different run_dir and set resume=FILE to one "
            "of its checkpoints."
        )
