"""Unusual models, optimizers and uses of the Trainer on several processes: the same numbers, or a
plain word.
"""

import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
from corners import ALIKE, REFUSED, SAME
from test_parallel import assert_close

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not on this platform")
SCRIPT = Path(__file__).with_name("corners.py")
FEW = [(2, "ddp"), (2, "fsdp")]
MANY = [*FEW, (3, "fsdp"), (4, "ddp")]
BYPASSED = (
    "A step must call self.model (not self.module) once per backward(). "
    "If it calls parts of the model, call stoker.trainer.parallel.average_gradients(part) after "
    "each backward()."
)
GROUPS = {"same": SAME, "alike": [*ALIKE, "memory"], "refused": REFUSED}
SHARDS = "Type strategy=ddp, or, if the optimizer causes the error, choose a different one. A step must call self.model as a whole, not parts of it."


@pytest.fixture(scope="module")
def given(forks, tmp_path_factory):
    """What each rank gives in each corner, {corner: [that of rank 0, ...]}: a function of (world,
    strategy, group of corners).
    """

    @functools.cache
    def by(world, strategy, group):
        folder = tmp_path_factory.mktemp("corners")
        names = GROUPS[group]
        done = forks.ranks(folder, world, strategy, str(folder), *names, script=SCRIPT)
        assert done.codes == [0] * world, (done.codes, done.late, done.errs)
        return {
            name: [
                torch.load(folder / f"{name}.{rank}", weights_only=False) for rank in range(world)
            ]
            for name in names
        }

    return by


@pytest.fixture(scope="module")
def worlds(large):
    return MANY if large else FEW


@pytest.mark.slow
def test_its_numbers_are_those_of_one_process_also_after_a_resume(given, worlds):
    """All corners in one test, so that one worker of the tests trains them."""
    for corner, (world, strategy) in itertools.product(SAME, worlds):
        (one,) = given(1, "single", "same")[corner]
        if corner == "a GAN" and strategy == "fsdp":
            continue  # refused, see below
        several = given(world, strategy, "same")[corner][0]
        for state, results in several:
            for group, own in zip(
                state["optimizer"]["param_groups"],
                one[0][0]["optimizer"]["param_groups"],
                strict=True,
            ):
                group |= {way: own[way] for way in ("foreach", "fused") if way in own}
            assert_close([state, results], one[0], f"{corner}: {world} {strategy}", 1e-9)


@pytest.mark.slow
def test_it_is_the_same_on_all_ranks(given, worlds):
    for corner, (world, strategy) in itertools.product(ALIKE, worlds):
        first, *others = given(world, strategy, "alike")[corner]
        assert not isinstance(first, str), first
        for other in others:
            assert_close(other, first, f"{corner}: {world} {strategy}", 0)


@pytest.mark.slow
def test_in_fp16_a_step_is_skipped_by_all_where_one_shard_is_not_finite(given, worlds):
    counted = [rate for _, rate in given(1, "single", "alike")["skipped steps"][0]]
    for world, strategy in worlds:
        seen = given(world, strategy, "alike")["skipped steps"][0]
        scales = [scale for scale, _ in seen]
        rates = [rate for _, rate in seen]
        assert scales[0] == 2**15 and scales[-1] <= 2**8
        assert rates == counted, "the schedule counts skipped steps too"


@pytest.mark.slow
def test_what_is_predicted_and_evaluated_before_a_fit_is_that_of_one_process(given, worlds):
    for name in ("predicted first", "twice"):
        (one,) = given(1, "single", "alike")[name]
        for world, strategy in worlds:
            assert_close(given(world, strategy, "alike")[name][0], one, f"{world} {strategy}", 1e-9)


@pytest.mark.slow
def test_fsdp_has_its_part_of_parameters_gradients_and_optimizer_state(given, worlds):
    """4 MiB of weights (and 8 KiB of biases), as many of gradients, and twice as many of AdamW's
    means.
    """
    (one,) = given(1, "single", "alike")["memory"]
    assert one == pytest.approx([4.008, 4.008, 8.016], abs=0.001)
    for world, strategy in worlds:
        parts = world if strategy == "fsdp" else 1
        for rank in given(world, strategy, "alike")["memory"]:
            assert rank == pytest.approx([mib / parts for mib in one], rel=0.01)


REASONS = {
    (
        "bypassing",
        "ddp",
    ): f"differs between processes, because its gradients were not synchronized.\n{BYPASSED}",
    ("bypassing", "fsdp"): SHARDS,
    ("gan", "fsdp"): SHARDS,
    (
        "diverging",
        "ddp",
    ): "at step 3. First non-finite value: in step 3 on rank 0, the loss is inf (",
    ("diverging", "fsdp"): "at step 3 (learning rate",
    ("two types", "fsdp"): SHARDS,
    ("0-dim", "fsdp"): "doesn't support scalar parameters",
    ("Adafactor", "fsdp"): "Adafactor needs whole matrices",
    ("fused SGD", "fsdp"): SHARDS,
    ("channels_last", "fsdp"): "channels_last=true: sharded parameters have no memory format",
    ("unfrozen", "ddp"): "that were frozen when the Trainer was created: 0.weight.",
    ("unfrozen", "fsdp"): "that were frozen when the Trainer was created: 0.weight.",
    ("again", "fsdp"): "this model was already sharded by an earlier Trainer",
}


@pytest.mark.slow
def test_what_cannot_be_done_is_said_on_all_ranks_and_done_where_it_can(given, worlds):
    for corner, (world, strategy) in itertools.product(REFUSED, worlds):
        reason = REASONS.get((corner, strategy))
        for said in given(world, strategy, "refused")[corner]:
            assert said is None if reason is None else reason in said, (corner, strategy, said)
