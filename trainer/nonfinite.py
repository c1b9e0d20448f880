"""Find the first step with a number that is not finite, by replaying it.

A step depends only on the state before it and on the seed, so nothing is recorded in the meantime.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors.torch import save_file

from stoker.trainer import batch as batches
from stoker.trainer import checkpoint, copies, launch, parallel
from stoker.trainer.callback import Callback, Row, State
from stoker.trainer.errors import NotFinite, cause, log
from stoker.trainer.loading import by_name
from stoker.trainer.monitoring import Monitor, TimeLimit
from stoker.trainer.readable import brief, number
from stoker.trainer.saving import Checkpoint

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


class NaNGuard(Callback):
    """Raise NotFinite at the first logged loss or gradient norm that is not finite.

    `fit` then replays the steps since the last good row or checkpoint, to find the first bad step
    and whether its batch, its loss or its gradients were not finite. That batch is saved in
    `folder`, with a checkpoint of the state before the step. Until a Checkpoint has saved a state
    of the fit, a copy of its first state is kept in CPU memory, unless the weights are sharded.
    """

    finite_until: int  # the step of the last row with finite training numbers
    first_step: int  # when the fit began
    first_state: State | None = None  # the Trainer's state at that step, on the CPU

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.finite_until = trainer.step
        self.first_step = trainer.step
        if not any(map(parallel.is_shard, trainer.module.parameters())):  # too large to gather
            self.first_state = checkpoint.copy(trainer.state_dict(), everywhere=True)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self.first_state = None

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        for name, value in row.items():
            is_watched = name.endswith("/loss") or name == "train/grad_norm"
            if is_watched and not math.isfinite(value):
                self.fail(trainer, name, value)
        if "train/loss" in row:
            self.finite_until = trainer.step
            if self.is_saved(trainer):
                self.first_state = None

    def fail(self, trainer: "Trainer", name: str, value: float) -> NoReturn:
        """Raise NotFinite for this number."""
        symptom = f"{name} is {value} {self.where(trainer, name)}"
        broken = checkpoint.first_nonfinite(trainer.module)
        split, _, _ = name.partition("/")
        if broken is not None:
            reason = f"the weights of {broken} are not finite"
        elif split in by_name(trainer.val_loader):
            raise NotFinite(
                f"{symptom}, and all weights are finite.\n"
                f"Check the data and the targets of {split}."
            )
        else:
            reason = "all weights are finite, so check the inputs, the targets and the loss"
        is_explained = split == "train" or broken is not None
        raise NotFinite(
            f"{symptom} (learning rate {brief(trainer.lr)}); {reason}.\n"
            f"Type {self.advice(trainer)}.",
            symptom if is_explained else "",
        )

    def is_saved(self, trainer: "Trainer") -> bool:
        """Return whether a Checkpoint has saved a state of this fit, where a replay can start."""
        savers = [one for one in trainer.callbacks if isinstance(one, Checkpoint)]
        return any(saver.saved > self.first_step for saver in savers)

    def where(self, trainer: "Trainer", name: str) -> str:
        """Return the steps that the number covers: a training loss is a mean over several steps."""
        first = self.finite_until + 1
        if name.startswith("train/") and first < trainer.step:
            return f"in steps {first:,} to {trainer.step:,}"
        return f"at step {trainer.step:,}"

    @staticmethod
    def advice(trainer: "Trainer") -> str:
        advice = ["a lower optimizer.lr"]
        if trainer.max_grad_norm is None:
            advice.append("max_grad_norm=1")
        if trainer.scaler.is_enabled():
            advice.append("precision=bf16")
        return " or ".join(advice)


SILENT = (Monitor, NaNGuard, TimeLimit)  # these only stop training or write files


@dataclass
class FirstStep:
    """The first step with a number that is not finite, and the state before it."""

    step: int
    text: str  # describes the first value that was not finite
    advice: str
    batch: Any
    state: State


def explained(trainer: "Trainer", error: NotFinite) -> NotFinite:
    """Return the error with the step and the cause, if a replay finds them; else the error itself.

    The Trainer is left in the state before that step. The NaNGuard's folder gets this state, as a
    checkpoint, and the batch.
    """
    guards = [one for one in trainer.callbacks if isinstance(one, NaNGuard)]
    if not guards or not error.symptom:
        return error
    try:
        return replayed_error(trainer, error, guards[0])
    except Exception as failure:
        log.warning("The replay to find the cause failed: %s.", cause(failure))
        return error


def replayed_error(trainer: "Trainer", error: NotFinite, guard: NaNGuard) -> NotFinite:
    """Replay the run; return the error with the step and the cause, as `explained` does."""
    first = find(trainer, guard)
    if first is None:
        return error
    trainer.go_on_from(first.state)
    text = f"{error.symptom}: {first.text}.\n{first.advice}"
    if guard.folder is None:
        return NotFinite(f"{text}\nNaNGuard(folder=DIR) keeps its batch, and the state before it.")
    replay = keep(trainer, first, guard.folder)
    again = f"Its batch is in {guard.folder}; fit(..., resume={str(replay)!r}) replays it."
    return NotFinite(f"{text}\n{again}", explanation=text, replay=replay)


def find(trainer: "Trainer", guard: NaNGuard) -> FirstStep | None:
    """Replay the steps since a good state; None if there is none, or all numbers are finite now.

    For the callbacks it is another fit: each ends the first one before.
    """
    last = trainer.step
    state = good_state(trainer, guard)
    if state is None:
        return None
    for callback in replaying_callbacks(trainer):
        callback.on_fit_end(trainer)
    trainer.go_on_from(state)
    launch.warn(
        f"Replaying training from step {trainer.step + 1} to find the first number that is "
        "not finite."
    )
    special_step = trainer.special_step
    if special_step is not None and special_step.captures:
        trainer.special_step = None  # the same numbers, with gradients that can be inspected
    for callback in replaying_callbacks(trainer):
        callback.on_fit_start(trainer)
    trainer.model.train()
    harmless: set[str] = set()
    try:
        for batch in replayed(trainer, last):
            first = None
            # The loss of that step was finite, but its gradient may not have been.
            if trainer.step + 1 < guard.finite_until:
                take_step(trainer, batch)
            else:
                first = examine(trainer, batch, harmless)
            if first is not None or trainer.interruption is not None:
                return first
            call_back(trainer)
        return None
    finally:
        trainer.special_step = special_step


def good_state(trainer: "Trainer", guard: NaNGuard) -> State | None:
    """Return the newest checkpoint of this fit that is good, or the state that the fit began with.

    None if it has no checkpoint, and that state is no longer in memory.
    """
    name = f"replay/{trainer.epochs_before}/{trainer.step}"
    saved = checkpoint.together(name, lambda: good_checkpoint(trainer, guard.first_step))
    return guard.first_state if saved is None else saved[1]


def good_checkpoint(trainer: "Trainer", first_step: int) -> tuple[Path, State] | None:
    """Return the newest checkpoint after `first_step` before which all numbers were finite.

    Its weights are; its steps since the last row may not have been.
    """
    for saver in trainer.callbacks:
        if not isinstance(saver, Checkpoint):
            continue
        saver.wait()
        for step, path in checkpoint.files(saver.folder).items():
            if step <= first_step:
                break
            state = checkpoint.load_whole(path, step)
            total = state["train_loss"]["total"] + state["grad_norm"]["total"]
            if math.isfinite(total):
                return path, state
    return None


def replayed(trainer: "Trainer", last: int) -> Iterator[Any]:
    """Yield the batches of the steps up to `last`, each of which is taken before the next."""
    while trainer.step < last:
        epoch, position = divmod(trainer.step, trainer.steps_per_epoch)
        trainer.train_loader.seek(trainer.epochs_before + epoch, position)
        for batch in trainer.train_loader:
            yield copies.move(batch, trainer.device)
            if trainer.step == last:
                return


def take_step(trainer: "Trainer", batch: Any) -> torch.Tensor:
    """Take a step as `fit` does, without a row or an evaluation; return the loss."""
    trainer.begin_step(batch)
    loss = trainer.train_step(batch)
    trainer.step += 1
    return loss


def replaying_callbacks(trainer: "Trainer") -> list[Callback]:
    """Return the callbacks that may change a weight; those of one rank only print or write."""
    callbacks = []
    for callback in trainer.callbacks:
        if not callback.first_rank_only and not isinstance(callback, SILENT):
            callbacks.append(callback)
    return callbacks


def call_back(trainer: "Trainer") -> None:
    """Call what callbacks do at the end of a step."""
    callbacks = replaying_callbacks(trainer)
    if trainer.step % trainer.steps_per_epoch == 0:
        for callback in callbacks:
            callback.on_epoch_end(trainer)
    for callback in callbacks:
        callback.on_step_end(trainer)


def examine(trainer: "Trainer", batch: Any, harmless: set[str]) -> FirstStep | None:
    """Take a step; return the first thing in it that was not finite, or None.

    Entries of a batch that were not finite in a good step, such as masks, are `harmless`.
    """
    trainer.window.clear()
    state = checkpoint.copy(trainer.state_dict(), everywhere=True)
    first = partial(FirstStep, trainer.step + 1, batch=batch, state=state)
    place = f"in step {trainer.step + 1:,}"
    name = checkpoint.first_nonfinite(trainer.module)
    if name is not None:
        return first(
            f"{name} is not finite before step {trainer.step + 1:,}, but no step caused it",
            "Check your callbacks and the initial weights.",
        )
    norms, loss = norms_and_loss(trainer, batch)
    overflows = [name for name, norm in norms.items() if not norm.isfinite()]
    if trainer.scaler.is_enabled():  # the scaler skips such a step
        overflows = []
    broken = checkpoint.first_nonfinite(trainer.module)
    strange = strange_entries(batch)
    in_backward = bool(overflows) or not loss.isfinite()
    in_backward_anywhere = parallel.add_up(int(in_backward)) > 0
    if broken is None and not in_backward_anywhere:
        harmless.update(strange)
        return None
    texts = [text for entry, text in strange.items() if entry not in harmless]
    if parallel.add_up(int(bool(texts))):
        text = "the batch of another process has values that are not finite"
        text = texts[0] if texts else text
        return first(f"{place}, {text}", "Check these samples, or remove them.")
    text = f"the update of {broken} is not finite"
    if in_backward_anywhere and not in_backward:
        text = "another process has a loss or a gradient that is not finite"
    elif not loss.isfinite():
        text = f"the loss is {float(loss)} with a finite batch"
    elif overflows:
        norm = float(norms[overflows[0]])
        text = (
            f"the gradient of {overflows[0]} has the norm {norm}, "
            f"with a loss of {number(float(loss))}"
        )
    rate = f"(learning rate {brief(trainer.lr)})"
    return first(f"{place}, {text} {rate}", f"Type {NaNGuard.advice(trainer)}.")


def norms_and_loss(trainer: "Trainer", batch: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Take a step; return the norm of each gradient, the first computed first, and the loss."""
    norms: dict[str, torch.Tensor] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            (gradient,) = parallel.local([parameter.grad])
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()
            norms[name] = torch.linalg.vector_norm(gradient)

    hooks = []
    for name, parameter in trainer.module.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(note, name)))
    try:
        return norms, take_step(trainer, batch)
    finally:
        for hook in hooks:
            hook.remove()


def strange_entries(batch: Any) -> dict[str, str]:
    """Return {name: description} of the tensors of a batch with values that are not finite."""
    texts = {}
    for name, tensor in batches.entries(batch):
        if not tensor.is_floating_point() or tensor.isfinite().all():
            continue
        texts[name] = f"{name} has values that are not finite"
        if tensor.ndim:
            is_wrong = ~tensor.isfinite()
            rows = is_wrong.reshape(len(tensor), -1).any(1)
            numbers = rows.nonzero().flatten().tolist()
            texts[name] += f", in {len(numbers)} of {len(rows)} rows, the first being {numbers[0]}"
    return texts


def keep(trainer: "Trainer", first: FirstStep, folder: Path) -> Path:
    """Write the state before the step and its batch, {name: tensor}; return the state's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint.path_of(folder, first.step - 1)
    tensors = {}
    for name, tensor in batches.entries(first.batch):
        # files cannot hold shared tensors
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    rank = "" if launch.is_first() else f".rank{launch.rank()}"
    save_file(tensors, folder / f"batch_{first.step:08d}{rank}.safetensors")
    if launch.is_first():
        savers = [one for one in trainer.callbacks if isinstance(one, Checkpoint)]
        about = savers[0].about if savers else {}
        checkpoint.save(path, {**first.state, "about": about})
    return path
