"""The end of a run: test the best weights, and write the results and the model."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runs import directory
from stoker.runs.provenance import Code, versions
from stoker.runs.result import RunResult, of_fit
from stoker.tasks.job import sweep_name
from stoker.tasks.parts import Parts
from stoker.trainer import launch

if TYPE_CHECKING:
    from stoker.trainer.callbacks import Checkpoint


def finish(
    folder: Path,
    code: Code,
    saver: "Checkpoint",
    parts: Parts,
    started: float,
    draws: bool,
    script: str | None = None,
) -> RunResult | None:
    """Test the best weights and write the files; return the result, or None on ranks above 0.

    Without a test part, a report (`draws`) shows the validation part.
    """
    from stoker.data.description import samples_in
    from stoker.diagnostics import doctor, timing
    from stoker.runs import card, examine
    from stoker.trainer.loading import resident_bytes
    from stoker.trainer.metrics import default_metrics

    trainer = parts.trainer
    data = parts.data
    loaders = parts.by_split()
    trainer.data_bytes = resident_bytes(*loaders.values())  # also the test part
    result = of_fit(trainer, saver)
    result = dataclasses.replace(result, **timing.result_of(trainer), **doctor.result_of(trainer))
    result.git = code.revision()
    result.versions = versions()
    result.script = script
    counts = {name: samples_in(loader) for name, loader in loaders.items()}
    result.samples = {name: count for name, count in counts.items() if count is not None}
    if not load_best(parts, saver):
        result.best = None
    is_known = data.kind != "other"
    tested: dict[str, Any] = {}
    evaluation = None
    examined = True
    if "test" in loaders:
        tested, evaluation = examine.evaluate(trainer, loaders["test"], "test", data)
    elif "val" in loaders and draws and is_known:
        _, evaluation = examine.evaluate(trainer, loaders["val"], "val", data)
    else:
        examined = False
    weights = card.weights(trainer)
    if not launch.is_first():
        return None
    result.add_rows(folder / directory.METRICS)
    result.numbers.update(tested)
    result.seconds = round(time.perf_counter() - started, 3)
    result = result.evaluated_again(RunResult.read(folder))
    has_usual = is_known and default_metrics(data.kind).keys() <= trainer.metrics.keys()
    understood = evaluation is not None or not examined
    usual = understood and has_usual
    card.write(folder, weights, trainer.module, data, result, usual, evaluation)
    if evaluation is not None:
        examine.write(folder / directory.EVALUATION, evaluation, data)
    result.write(folder)
    return result


def load_best(parts: Parts, saver: "Checkpoint") -> bool:
    """Load the best weights, or the newest if that file is damaged; return whether it is intact."""
    from stoker.trainer import checkpoint

    trainer = parts.trainer
    if not saver.best or saver.best["step"] == trainer.step:
        return True
    best = checkpoint.together("best", lambda: checkpoint.best(saver.folder))
    assert best is not None
    _, state = best
    trainer.load_state_dict(state)
    return bool(trainer.step == saver.best["step"])


def efficiency(parts: Parts, result: RunResult) -> dict[str, Any]:
    """Return the FLOPs for result.json; {} in a sweep, since it takes 0.2 s."""
    if sweep_name() or result.peak_flops is not None or parts.data.kind == "other":
        return {}
    from stoker.diagnostics import flops

    data = parts.data
    return flops.efficiency(
        parts.trainer, data.in_shape, result.samples_per_second, data.tokens is not None
    )
