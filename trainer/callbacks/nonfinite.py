"""Stop training when a number is not finite, and replay steps to find the first bad step.

A step depends only on the seed and the state before it, so it can be replayed from a checkpoint.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batches, checkpoint, launch, parallel, transfer
from stoker.trainer.callback import Callback, Row, State
from stoker.trainer.callbacks.monitoring import Monitor, TimeLimit
from stoker.trainer.callbacks.saving import Checkpoint, advice
from stoker.trainer.errors import NotFinite, cause, log
from stoker.trainer.loading import by_name
from stoker.trainer.number_format import brief

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


class NaNGuard(Callback):
    """Raise NotFinite at the first logged loss or gradient norm that is not finite.

    `fit` then replays the steps since the last good state to find the first bad step, and
    whether its batch, loss or gradients were not finite. It saves the batch of this step in
    `folder`, with a checkpoint of the state before the step. Until a Checkpoint callback has saved
    a state, a copy of the initial state is kept in CPU memory, unless the weights are sharded.
    """

    finite_until: int  # the step of the last row with finite training numbers
    first_step: int  # the step at which the fit started
    first_state: State | None = None  # the Trainer's state at the first step, on the CPU

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def on_fit_start(self, trainer: "Trainer") -> None:
        self.finite_until = trainer.step
        self.first_step = trainer.step
        # A sharded state may be too large to gather.
        if not any(map(parallel.is_shard, trainer.module.parameters())):
            self.first_state = checkpoint.copy(trainer.state_dict(), everywhere=True)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self.first_state = None

    def on_log(self, trainer: "Trainer", row: Row) -> None:
        for name, value in row.items():
            is_watched = name.endswith("/loss") or name == "train/grad_norm"
            if not is_watched or math.isfinite(value):
                continue
            symptom = f"{name} is {value} at step {trainer.step:,}"
            split = name.removesuffix("/loss")
            is_trained = checkpoint.first_nonfinite(trainer.module) is None
            if split in by_name(trainer.val_loader) and is_trained:
                raise NotFinite(
                    f"{symptom}, but all weights are finite.\n"
                    f"Check the inputs and targets in the {split} data."
                )
            raise NotFinite(f"{symptom}{rates(trainer)}.\n{advice(trainer)}", symptom)
        if "train/loss" in row:
            self.finite_until = trainer.step
            if any(saver.saved > self.first_step for saver in savers(trainer)):
                self.first_state = None


SILENT = (Monitor, NaNGuard, TimeLimit)  # callbacks that only stop training or write files


def savers(trainer: "Trainer") -> list[Checkpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]


def explained(trainer: "Trainer", error: NotFinite) -> NotFinite:
    """Replay the steps to find the first bad one; return an error that explains it.

    Return the given error if the replay does not find the cause. Otherwise, the Trainer is left in
    the state before the bad step, and a checkpoint of this state and the batch are saved in
    NaNGuard's folder.
    """
    guard = next((one for one in trainer.callbacks if isinstance(one, NaNGuard)), None)
    if guard is None or not error.symptom:
        return error
    try:
        first = find(trainer, guard)
        if first is None:
            return error
        text, batch, state = first
        trainer.resume_from(state)
        text = f"{error.symptom}. First non-finite value: {text}"
        if guard.folder is None:
            return NotFinite(text)
        path = keep(trainer, batch, state, guard.folder)
    except Exception as failure:
        log.warning("The replay to find the cause failed: %s.", cause(failure))
        return error
    where = f"The batch was saved in {guard.folder}."
    again = f"{where} To replay the step, call fit(..., resume={str(path)!r})."
    return NotFinite(f"{text}\n{again}", replay=path)


def find(trainer: "Trainer", guard: NaNGuard) -> tuple[str, Any, State] | None:
    """Replay the steps since a good state; return (text, batch, state) of the first bad step.

    The state is the one before the step. Return None if there is no good state, or if all numbers
    are finite in the replay. To callbacks, the replay looks like a new fit: their `on_fit_end` is
    called, and then `on_fit_start`.
    """
    last = trainer.step
    # Skip callbacks that run only on the first rank: they only print or write files.
    active = [c for c in trainer.callbacks if not (c.first_rank_only or isinstance(c, SILENT))]
    name = f"replay/{trainer.epochs_before}/{trainer.step}"
    saved = checkpoint.together(name, lambda: good_checkpoint(trainer, guard.first_step))
    good = guard.first_state if saved is None else saved[1]
    if good is None:
        return None

    def call(hook: str) -> None:
        for callback in active:
            getattr(callback, hook)(trainer)

    call("on_fit_end")
    trainer.resume_from(good)
    launch.warn(
        f"Replaying training from step {trainer.step + 1} to find the first non-finite value."
    )
    call("on_fit_start")
    trainer.model.train()
    for batch in replayed(trainer, last):
        # The last good row shows that the loss of its last step was finite, but not that the
        # gradient was.
        is_suspect = trainer.step + 1 >= guard.finite_until
        if is_suspect:
            trainer.window.clear()
            state = checkpoint.copy(trainer.state_dict(), everywhere=True)
        norms, loss = norms_and_loss(trainer, batch)
        if trainer.step % trainer.steps_per_epoch == 0:
            call("on_epoch_end")
        call("on_step_end")
        text = examine(trainer, batch, norms, loss) if is_suspect else None
        if text is not None:
            return text, batch, state
        if trainer.interruption is not None:
            return None
    return None


def good_checkpoint(trainer: "Trainer", first_step: int) -> tuple[Path, State] | None:
    """Return (path, state) of the newest checkpoint after `first_step` with only finite numbers.

    The weights in a checkpoint are always finite, but the losses since the last row may not be.
    """
    for saver in savers(trainer):
        saver.wait()
        for step, path in checkpoint.files(saver.folder).items():
            if step > first_step:
                state = checkpoint.load_whole(path)
                if math.isfinite(state["train_loss"]["total"] + state["grad_norm"]["total"]):
                    return path, state
    return None


def replayed(trainer: "Trainer", last: int) -> Iterator[Any]:
    """Yield the batches of the steps up to `last`. The caller must take a step with each one."""
    while trainer.step < last:
        epoch, position = divmod(trainer.step, trainer.steps_per_epoch)
        trainer.train_loader.seek(trainer.epochs_before + epoch, position)
        for batch in trainer.train_loader:
            yield transfer.move(batch, trainer.device)
            if trainer.step == last:
                return


def examine(
    trainer: "Trainer", batch: Any, norms: dict[str, torch.Tensor], loss: torch.Tensor
) -> str | None:
    """Describe the first non-finite value in a step and what to do; return None if there is none.

    A batch may contain non-finite values on purpose, for example in a mask, so it is reported only
    if the loss, a gradient or a weight is also non-finite.
    """
    gradient = next((name for name, norm in norms.items() if not norm.isfinite()), None)
    weight = checkpoint.first_nonfinite(trainer.module)
    problem = None  # (position in the step, text)
    if not loss.isfinite():
        problem = (1, f"the loss is {float(loss)}")
    elif gradient and not trainer.scaler.is_enabled():  # a scaler skips such steps
        problem = (2, f"the gradient of {gradient} has norm {norms[gradient]}")
    elif weight:
        problem = (3, f"{weight} is not finite after the update")
    entry = strange_entry(batch)
    if problem and entry:
        problem = (0, f"{problem[1]}{rates(trainer)}, and {entry}")
    reports = [(*one, rank) for rank, one in enumerate(parallel.from_all(problem)) if one]
    if not reports:
        return None
    position, text, rank = min(reports)
    place = f"in step {trainer.step:,}"
    if parallel.process_count > 1:
        place += f" on rank {rank}"
    if position == 0:
        samples = "Check these samples. If they are as intended, u"
        return f"{place}, {text}.\n{samples}{advice(trainer)[1:]}"
    return f"{place}, {text}{rates(trainer)}.\n{advice(trainer)}"


def rates(trainer: "Trainer") -> str:
    """Return " (learning rate 0.1)", with the rates of all groups if they differ."""
    return f" (learning rate {', '.join(dict.fromkeys(map(brief, trainer.rates)))})"


def norms_and_loss(trainer: "Trainer", batch: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Take a step as `fit` does, but do not log or evaluate; return (gradient norms, loss).

    The norms are in the order in which the backward pass computes the gradients.
    """
    norms: dict[str, torch.Tensor] = {}

    def note(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            (gradient,) = parallel.local([parameter.grad])
            norms[name] = torch.linalg.vector_norm(gradient)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(note, name))
        for name, parameter in trainer.module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        trainer.begin_step(batch)
        loss = trainer.train_step(batch)
    finally:
        for hook in hooks:
            hook.remove()
    trainer.step += 1
    return norms, loss


def strange_entry(batch: Any) -> str | None:
    """Describe the first tensor in a batch that contains non-finite values, or return None."""
    for name, tensor in batches.entries(batch):
        rows = ~torch.atleast_1d(tensor).isfinite()
        rows = rows.reshape(len(rows), -1).any(1)
        if rows.any():
            count = f"{rows.sum()} of {len(rows)} rows (the first is row {rows.int().argmax()})"
            return f"{name} has non-finite values in {count}"
    return None


def keep(trainer: "Trainer", batch: Any, state: State, folder: Path) -> Path:
    """Write the state before a step and the batch of the step; return the path of the state."""
    rank = "" if launch.is_first() else f".rank{launch.rank()}"
    tensors = checkpoint.copy(dict(batches.entries(batch)), everywhere=True)
    checkpoint.write_tensors(
        folder / f"batch_{state['step'] + 1:08d}{rank}.safetensors", tensors, {}
    )
    path = checkpoint.path_of(folder, state["step"])
    if launch.is_first():
        about = next((saver.about for saver in savers(trainer)), {})
        checkpoint.save(path, {**state, "about": about})
    return path
