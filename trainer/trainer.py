"""The Trainer: fit, train_step, compute_loss, evaluate, close."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from stoker.trainer import device as devices
from stoker.trainer import (
    evaluation,
    fitting,
    launch,
    losses,
    memory,
    misuse,
    optimizers,
    parallel,
    schedules,
    seeding,
    settings,
    step_errors,
    steps,
    transfer,
)
from stoker.trainer.callback import Callback
from stoker.trainer.groups import Rule, parameter_groups
from stoker.trainer.history import History
from stoker.trainer.metrics import check_over_ranks
from stoker.trainer.prediction import Predicting
from stoker.trainer.reporting import Reporting
from stoker.trainer.spans import silent_spans
from stoker.trainer.splitter import Splitter
from stoker.trainer.stopping import EvaluationInterrupted, Stoppable
from stoker.trainer.window import Window


class Trainer(Predicting, Stoppable, Reporting):
    """Trains and evaluates a model, and makes predictions with it.

    To change what happens inside a step, override `compute_loss`, `update_metrics`, `train_step` or
    `fit`, in this order of preference. For what happens between steps, add a callback. One batch of
    the loader is one optimizer step. The result depends only on the model, the data, these
    arguments and the seed. Override `sample_dim` if the samples of a batch are not along its first
    dimension, and `loss_weight` if your loss does not divide by the number of samples.

    Args:
        model: The module to train. It is moved to the device, in place.
        loss: Function of (outputs, targets) that returns the mean loss; not needed if you override
            `compute_loss`.
        optimizer: Optimizer of the model's parameters, or a factory that is called with parameter
            groups, such as `functools.partial(torch.optim.AdamW, lr=1e-3)`. Only `fit` needs one.
        scheduler: Factory of the learning rate schedule, called with (optimizer, total_steps=...).
        metrics: {name: metric} for evaluations; a metric has `update`, `compute` and `reset`.
        callbacks: List of `Callback`; their hooks are called in this order.
        epochs: Length of the run, in passes over the training loader.
        max_steps: Length of the run in steps; if given, `epochs` is ignored.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is the machine's accelerator, or else the CPU.
        strategy: "single", "dp" (threads), "ddp" or "fsdp" (processes); "auto" is "single" in one
            process and "ddp" in several.
        precision: "fp32", "bf16" or "fp16" autocast; "auto" is the GPU's native dtype, or fp32.
        compile: True compiles the model; "graph" captures whole steps as CUDA graphs.
        channels_last: Memory format of 2-D convolutions; "auto" is True, except on mps or for a
            model whose code calls `.view()`.
        grad_accum_steps: Split each batch into this many micro-batches, to save memory.
        micro_batch: Instead, limit micro-batches to this many samples; "auto" starts with whole
            batches and halves the size when memory runs out.
        max_grad_norm: Clip gradients to this norm; None disables clipping.
        log_every: Number of steps between logged rows; each epoch also ends with a row.
        eval_every: Number of steps between evaluations; None evaluates once per epoch.
        groups: Rules for parameters by name, such as {"match": "backbone.*", "lr": 1e-4}.
        seed: Seed for all random numbers in the run.

    Raises:
        UserError: An argument has the wrong type or is out of range, or two arguments conflict.
    """

    # From the base classes:
    # - Predicting: predict. Its base Batching: split_with_fractions (into micro-batches), and
    #   step_samples, step_weight and process_weight (a factor of the loss) of a process's part
    # - Stoppable: stop, interrupt, poll_interruption, stop_reason, failed (an error ended the fit)
    # - Reporting: call (a hook), log, check_and_log, history. Its base Stateful: is_due (every n
    #   steps and at the last), epochs_before (of earlier fits), carried (state kept from batch to
    #   batch, as in an RNN), unoptimized (parameters without an optimizer)
    # `fitting.prepare` sets what belongs to one fit: step, train_loader (wrapped, to have `seek`),
    # val_loader, steps_per_epoch, total_steps, scheduler, history and evaluation_due.

    def __init__(
        self, model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: optimizers.Given | None = None, scheduler: Callable[..., Any] | None = None,
        metrics: Mapping[str, Any] | None = None, callbacks: Sequence[Callback] = (), *,
        epochs: int | None = 1, max_steps: int | None = None, device: str | torch.device = "auto",
        strategy: str = "auto", precision: str = "auto", compile: bool | str = False,
        channels_last: bool | str = "auto", grad_accum_steps: int = 1,
        micro_batch: int | str | None = None, max_grad_norm: float | None = None,
        log_every: int = 50, eval_every: int | None = None, groups: Sequence[Rule] = (),
        seed: int = 0,
    ) -> None:  # fmt: skip
        misuse.check_parts(self, model, loss, optimizer, metrics, callbacks, groups)
        self.epochs = settings.check("epochs", epochs, optional=max_steps is not None)
        self.max_steps = settings.check("max_steps", max_steps)
        self.max_grad_norm = settings.check("max_grad_norm", max_grad_norm)
        self.log_every = settings.check("log_every", log_every)
        self.eval_every = settings.check("eval_every", eval_every)
        self.seed = settings.check("seed", seed)
        settings.check("compile", compile)  # the other arguments are checked where they are used

        self.device = devices.choose(device)
        memory.reset_peak_memory(self.device)
        self.strategy = parallel.start(strategy, self.device)
        self.precision = precision
        self.dtype = devices.choose_precision(precision, self.device)
        self.autocast = devices.autocast(self.device, self.dtype)
        self.scaler: Any = torch.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.splitter = Splitter(self.device, self.sample_dims, micro_batch, grad_accum_steps)
        self.eval_splitter = self.splitter.for_evaluation()  # needs less memory: adapts separately
        self.agreement = parallel.Agreement()  # of all processes, on interruptions and the time

        # `module` keeps the user's parameter names; `model` is what a step calls.
        self.module = devices.place(model, self.device, channels_last)
        if compile is True:
            self.module.compile()
        self.model = parallel.wrap(self.module, self.strategy, self.device)
        self.replica_indices = parallel.replica_indices(self.model)  # of DataParallel
        misuse.check_layout(self.module, channels_last)
        self.loss = loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss
        self.metrics = dict(metrics or {})
        check_over_ranks(self.metrics)
        is_first = launch.is_first()
        self.seed_suffix: tuple[int, ...] = () if is_first else (launch.rank(),)
        self.callbacks = [c for c in callbacks if is_first or not c.first_rank_only]
        if optimizer is not None:
            self.optimizer = optimizers.build(
                optimizer, self.parameter_groups(groups), self.device, self.module
            )
            self.optimizer_step = optimizers.lean_step(self.optimizer, compiled=compile is True)
        self.special_step = steps.choose(self, compile)
        self.make_scheduler = schedules.by_group(scheduler or schedules.constant, groups)

        self.step = 0
        self.rates = (0.0,)  # the learning rates of the current step
        self.window = Window()  # the loss, gradient norm and time since the last logged row
        self.spans = silent_spans()  # Timing replaces them; keep this last, for `check_built`

    def fit(self, train_loader: Any, val_loader: Any = None, resume: Any = None) -> History:
        """Train to the last step, or until a callback stops the run; return the logged rows.

        Args:
            train_loader: Iterable of batches. If it has no length, set `max_steps`.
            val_loader: Iterable of batches to evaluate on, or several as {name: iterable}, whose
                results are named "name/loss" and so on.
            resume: Checkpoint to resume from: a file, its contents, or a folder (its newest
                checkpoint is used). None starts at step 0 with the current weights.
        """
        fitting.prepare(self, train_loader, val_loader, resume)
        eval_every = self.eval_every or self.steps_per_epoch
        batch = None  # the last batch, for error messages
        with fitting.setup_and_cleanup(self):  # gradients, random states, loaders and memory
            try:
                self.call("on_fit_start")
                parallel.broadcast_weights(self.model)  # in case a callback changed only rank 0's
                self.window.start_clock()
                if self.evaluation_due:  # resumed from an interrupted evaluation: end its step
                    self.end_step(self.val_loader is not None)
                while self.step < self.total_steps and self.stop_reason is None:
                    epoch, position = divmod(self.step, self.steps_per_epoch)
                    self.train_loader.seek(self.epochs_before + epoch, position)
                    self.model.train()
                    for batch in self.train_loader:
                        with self.spans["transfer"]:
                            batch = transfer.move(batch, self.device)
                        self.begin_step(batch)
                        loss = self.train_step(batch)
                        self.step += 1
                        self.window.loss.update(loss, self.step_samples, self.step_weight)

                        evaluates = self.val_loader is not None and self.is_due(eval_every)
                        epoch_ends = self.step % self.steps_per_epoch == 0
                        if evaluates or epoch_ends or self.is_due(self.log_every):
                            self.check_and_log()  # logs the loss; its checks may raise an error
                        self.end_step(evaluates)
                        if self.stop_reason is not None or self.step == self.total_steps:
                            break
                    else:  # the loader ended: raise if its length was wrong
                        yielded = self.step - epoch * self.steps_per_epoch
                        misuse.check_epoch(self.steps_per_epoch, yielded)
            except EvaluationInterrupted:  # the evaluation is repeated when the run resumes
                pass
            except BaseException as error:
                self.failed = True
                step_errors.raise_if_explained(self, error, batch, self.splitter)
                raise
            finally:
                batch = None  # frees its memory for the callbacks
                self.call("on_fit_end")  # `Checkpoint` saves after a signal or a loader's error
        return self.history

    def train_step(self, batch: Any) -> torch.Tensor:
        """Take one step of the optimizer and the schedule; return the mean loss of the batch."""
        if self.special_step is not None:  # for fp16, micro_batch=auto, graphs or closures
            return self.special_step(self, batch)
        terms = []  # steps.py repeats this loop, to keep this path short: change both
        micro_batches = self.split_with_fractions(batch)
        for i, (micro_batch, fraction) in enumerate(micro_batches, 1):
            # Processes exchange gradients only on the last micro-batch.
            with parallel.gradient_sync(self.model, enabled=i == len(micro_batches)):
                with self.spans["forward"], self.autocast:
                    loss, outputs = self.compute_loss(micro_batch)
                if fraction is not None:  # None for a whole batch; at 0, outputs get no gradient
                    loss = losses.scaled(loss, fraction, outputs)
                terms.append(loss.detach())
                if parallel.process_count > 1:  # because processes average their gradients
                    loss = losses.scaled(loss, self.process_weight, outputs)
                with self.spans["backward"]:
                    loss.backward()
        with self.spans["optimizer"]:
            if self.max_grad_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
                self.window.add_norm(norm)
            self.optimizer_step()
            optimizers.zero_grad(self.optimizer, self.unoptimized)
        self.scheduler.step()
        return sum(terms[1:], terms[0])  # sum(terms) would add a 0 on the device

    def begin_step(self, batch: Any) -> None:
        """Record the learning rates, measure the batch, and seed the step's random numbers."""
        self.in_step = True  # until the end of `end_step`
        self.rates = self.scheduler.get_last_lr()
        self.measure_batch(batch)  # sets step_samples, step_weight and process_weight
        self.seed_generators("step")

    def seed_generators(self, use: str) -> None:
        """Seed the generators for this step and `use`, differently in each fit and process."""
        earlier_fits = ("after", self.epochs_before) if self.epochs_before else ()
        parts = (self.seed, use, self.step, *earlier_fits, *self.seed_suffix)
        seeding.seed_generators(self.device, seeding.mix_seed(*parts), self.replica_indices)

    def end_step(self, evaluates: bool) -> None:
        """Evaluate if `evaluates`, call the callbacks, and stop if the run was interrupted."""
        self.evaluation_due = evaluates  # if an interruption ends it, the resumed fit repeats it
        if evaluates:
            with self.spans["evaluation"]:  # also covers `log`, unlike the span in `evaluate`
                # This may be slow, so the next polls (in its batches, and below) exchange values.
                self.agreement.exchange_at_next_poll()
                results = evaluation.validate(self)
                self.agreement.exchange_at_next_poll()
                self.evaluation_due = False  # before `log`, whose callbacks may evaluate too
                self.log(results)
        if self.step % self.steps_per_epoch == 0:
            self.call("on_epoch_end")
        self.call("on_step_end")
        self.poll_interruption()  # sets stop_reason if a process was interrupted
        self.in_step = False

    def compute_loss(self, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of the batch, and the outputs for `update_metrics`."""
        inputs, targets = batch
        outputs = self.model(inputs)
        return self.loss(outputs, targets), outputs

    def update_metrics(self, outputs: Any, batch: Any) -> None:
        """Update the metrics with the outputs of one evaluation batch."""
        for name, metric in self.metrics.items():
            _, targets = batch
            with step_errors.naming_metric(name, outputs=outputs, targets=targets):
                metric.update(outputs, targets)

    def parameter_groups(self, rules: Sequence[Rule]) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, as defined by `rules`. You can override this."""
        return parameter_groups(self.module, rules)

    def evaluate(self, loader: Any, split: str = "val") -> dict[str, Any]:
        """Return {"val/loss": ..., "val/acc": ...} over all samples of the loader."""
        with self.spans["evaluation"]:
            return evaluation.run(self, loader, split)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context with the model in evaluation mode, and with EMA's averaged weights."""
        return evaluation.eval_mode(self)

    def close(self) -> None:
        """Drop the model, the optimizer and the data, and free their memory."""
        if self.module is not None:
            parallel.unwrap(self.module)
        for name in (
            "module", "model", "optimizer", "optimizer_step", "scheduler", "loss", "scaler",
            "special_step", "train_loader", "val_loader",
        ):  # fmt: skip
            setattr(self, name, None)
        self.metrics = {}
        self.carried = {}
        self.callbacks = []
        self.window.clear()
        memory.release(self.device)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
