"""The profile: which steps are in it, what the table says of them, and that it changes none."""

import gzip
import json

import pytest
from conftest import assert_same, make_data, make_model, make_trainer

from stoker.data.loader import DeviceLoader
from stoker.diagnostics.profiling import ACTIVE, BEFORE, WARMUP, Profile
from stoker.trainer.callbacks import Callback


def fitted(*callbacks, **settings):
    trainer = make_trainer(
        make_model(dropout=0.3), callbacks=callbacks, epochs=None, **{"max_steps": 30, **settings}
    )
    trainer.fit(DeviceLoader(make_data(), "train", 8, shuffle=True))
    return trainer


def trace_of(folder):
    [path] = folder.glob("*.json.gz")
    return path, json.loads(gzip.decompress(path.read_bytes()))


def steps_in(trace):
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    return {name for name in names if name.startswith("ProfilerStep")}


def test_the_trace_has_the_steps_after_the_first_ones(tmp_path, capsys):
    fitted(Profile(tmp_path / "profile"))
    path, trace = trace_of(tmp_path / "profile")
    last = BEFORE + WARMUP + ACTIVE
    assert path.name == f"step_{last}.pt.trace.json.gz"  # a name that TensorBoard knows
    assert len(steps_in(trace)) == ACTIVE
    forwards = [event for event in trace["traceEvents"] if event.get("name") == "aten::addmm"]
    assert len(forwards) == 2 * ACTIVE  # two linear layers a step
    assert "aten::addmm" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "profile").iterdir()] == [path.name]


class Stop(Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, trainer):
        if trainer.step == self.at:
            trainer.stop("enough")


def test_a_run_that_stops_before_it_leaves_nothing(tmp_path):
    for at in (1, BEFORE + WARMUP - 1):
        fitted(Profile(tmp_path / "profile"), Stop(at))
        assert not (tmp_path / "profile").exists()


def test_a_run_that_stops_within_it_has_the_steps_so_far(tmp_path):
    last = BEFORE + WARMUP + 2
    fitted(Profile(tmp_path), Stop(last))
    path, trace = trace_of(tmp_path)
    assert path.name == f"step_{last}.pt.trace.json.gz" and len(steps_in(trace)) >= 2


@pytest.mark.parametrize("settings", [{}, {"grad_accum_steps": 2}, {"max_grad_norm": 0.5}])
def test_it_changes_nothing(tmp_path, settings):
    with_it, without = fitted(Profile(tmp_path), **settings), fitted(**settings)
    assert_same(
        with_it.state_dict() | {"callbacks": None}, without.state_dict() | {"callbacks": None}
    )
