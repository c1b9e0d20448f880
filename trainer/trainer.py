"""The Trainer: fit, train_step, compute_loss, evaluate, predict, close. Nothing else."""

import contextlib
import sys
import time

import torch
from stoker.trainer import batch as batches
from stoker.trainer import (
    checkpoint,
    graph,
    launch,
    misuse,
    optimizers,
    parallel,
    process,
    schedules,
    settings,
    spans,
    summary,
)
from stoker.trainer import device as devices
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import Seekable, dealt, resident_bytes, seekable
from stoker.trainer.metrics import Mean, check_over_ranks
from stoker.trainer.micro_batch import MicroBatch
from stoker.trainer.state import check, refuse
from stoker.trainer.stopping import Interrupted, StopReason

# 65,536, where the fp16 scaler begins, halved so often is 6e-5: no gradient overflows because of such a scale.
MOST_SKIPPED = 30
EXPLAINED = (RuntimeError, ValueError, MemoryError, TypeError, AttributeError)


class Trainer:
    """Trains, evaluates and applies a model.

    To change what happens inside a step, override `compute_loss`, `update_metrics`, `train_step` or `fit`; for what
    happens between steps, add a callback. `optimizer` is a factory: it is called with parameter groups once the
    model is on its device. So is `scheduler`, called with (optimizer, total_steps=...); it steps once a step. A
    batch from the loader is one step, worked through in `grad_accum_steps` micro-batches, or in those of at most
    `micro_batch` samples, "auto" being as many as the memory holds. `epochs` gives the length of the training, or
    `max_steps` instead of it. A row is logged every `log_every` steps and at each epoch's end;
    an evaluation comes every `eval_every` steps, None being once an epoch. Biases and norms have no weight decay
    unless `decay_all`. The run is a function of the model, the data, these settings and the `seed`.
    """

    def __init__(
        self, model, loss=None, optimizer=None, scheduler=schedules.constant, metrics=None, callbacks=(), *,
        epochs=1, max_steps=None, device="auto", strategy="auto", precision="auto", compile=False,
        channels_last="auto", tune=settings.TUNINGS, grad_accum_steps=1, micro_batch=None, max_grad_norm=None,
        log_every=50, eval_every=None, decay_all=False, seed=0, deterministic=False,
    ):  # fmt: skip
        misuse.check_parts(model, loss, optimizer, scheduler, metrics, callbacks)
        self.epochs = settings.check("epochs", epochs, optional=max_steps is not None)
        self.max_steps = settings.check("max_steps", max_steps)
        self.grad_accum_steps = settings.check("grad_accum_steps", grad_accum_steps)
        self.max_grad_norm = settings.check("max_grad_norm", max_grad_norm)
        self.log_every = settings.check("log_every", log_every)
        self.eval_every = settings.check("eval_every", eval_every)
        self.seed = settings.check("seed", seed)

        self.device = devices.choose(device)
        self.strategy = strategy = parallel.start(strategy, self.device)
        self.dtype, self.precision_reason = devices.choose_precision(precision, self.device)
        self.autocast = devices.autocast(self.device, self.dtype)
        self.scaler = devices.grad_scaler(self.device, self.dtype)
        devices.choose_kernels(self.device, deterministic)
        devices.reset_peak_memory(self.device)
        self.micro_batch = MicroBatch(self.device, micro_batch, self.grad_accum_steps)
        if self.micro_batch.adapts and parallel.ranks() > 1:
            raise UserError(
                "micro_batch=auto: several processes have to cut a batch alike. Type micro_batch=N."
            )
        own = "auto" if self.micro_batch.adapts else None
        self.eval_micro_batch = MicroBatch(
            self.device, own, what="evaluation", key="eval_batch_size"
        )

        # The model itself: its state dict has the names that the user gave.
        self.module = devices.place(model, self.device, channels_last)
        self.layout_is_open = channels_last == "auto" and not compile
        settings.check("tune", tune)
        if self.device.type == "cpu" and "allocator" in tune:
            process.keep_pages()
        self.fits_threads = self.device.type == "cpu" and "threads" in tune
        if settings.check("compile", compile) == "graph":
            graph.check(type(self), Trainer, self.device, self.dtype, strategy, micro_batch)
        elif compile:
            devices.check_compiler(self.device)
            self.module.compile()  # in place, so the names stay as they are
        self.model = parallel.wrap(self.module, strategy, self.device)  # what is called in a step
        if any(map(parallel.is_shard, self.module.parameters())):
            if channels_last is True:
                raise UserError(
                    "channels_last=true: shards have no such order. Type channels_last=auto, or strategy=ddp."
                )
            self.layout_is_open = False
        self.replicas = parallel.replicas(self.model)
        self.stream = (
            (launch.rank(),) if launch.rank() else ()
        )  # which random numbers are this process's own
        self.loss = loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss
        self.metrics = dict(metrics or {})
        check_over_ranks(self.metrics, self.loss)
        self.callbacks = [
            callback for callback in callbacks if launch.is_first() or not callback.first_rank_only
        ]
        groups = self.parameter_groups(decay_all)
        self.optimizer = None
        if optimizer is not None:
            self.optimizer = optimizers.build(
                optimizer, groups, self.device, self.module, compiled=compile is True
            )
        self.execute = (
            graph.Captured(self.optimizer, self.device) if compile == "graph" else graph.eagerly
        )
        self.make_scheduler = scheduler or schedules.constant
        self.scheduler = None  # it needs total_steps, which fit knows

        self.spans = spans.silent_spans()
        self.lr = None  # of the last step
        self.step = 0  # the one clock: optimizer steps done
        self.total_steps = self.steps_per_epoch = None
        self.should_stop, self.stop_reason = False, None
        self.agreement = parallel.Agreement()
        self.asked, self.interrupted = (
            None,
            False,
        )  # to stop, from outside: here, and as far as all processes know
        self.outer_error = None  # in whose `except` a fit is called
        # The most and the fewest samples of a batch that a process has, and the weight of this one's mean in that over
        # all: a train_step of one's own multiplies its losses by it.
        self.shares, self.weight = None, 1.0
        self.evaluation_due = (
            False  # the step is done, but for its evaluation and what comes after it
        )
        self.train_loss, self.grad_norm, self.window_start = (
            Mean(),
            Mean(),
            0.0,
        )  # since the last logged row
        self.skipped = 0  # steps in a row, by the fp16 scaler
        self.train_loader = self.val_loader = None
        self.batch_layout, self.data_bytes = "nothing yet", 0

    def fit(self, train_loader, val_loader=None, resume=None):
        """Trains until `epochs` or `max_steps` are done or a callback stops it.

        It begins at step 0 with the weights, and the optimizer's moments, as they are, or goes on from `resume`: a
        checkpoint file, its contents, or a folder of them, of which it takes the newest good one.
        """
        self.prepare(train_loader, val_loader, resume)
        eval_every = self.eval_every or self.steps_per_epoch
        batch = None
        try:
            self.call("on_fit_start")
            parallel.same_weights(self.model)
            self.window_start = time.perf_counter()
            if self.evaluation_due:  # in the middle of it the run was stopped
                self.end_step(val_loader is not None)
            while self.step < self.total_steps and not self.should_stop:
                epoch, position = divmod(self.step, self.steps_per_epoch)
                self.train_loader.seek(epoch, position)
                self.model.train()
                for batch in self.train_loader:
                    with self.spans["transfer"]:
                        batch = devices.move(batch, self.device)
                    self.begin_step()
                    self.shares, self.weight = parallel.shares(batch, self.train_loader)
                    loss = self.train_step(batch)
                    self.step += 1
                    self.train_loss.update(loss, batches.size(batch))

                    evaluates = val_loader is not None and self.is_time(eval_every)
                    if (
                        evaluates
                        or self.is_time(self.log_every)
                        or self.is_time(self.steps_per_epoch)
                    ):
                        self.log_training(batch)
                    self.end_step(evaluates)
                    if self.should_stop or self.step == self.total_steps:
                        break
                else:  # the loader ended by itself
                    self.check_whole_epoch(given=self.step - epoch * self.steps_per_epoch)
        except (
            Interrupted
        ):  # by `interrupt`, in an evaluation, which is done anew when the run goes on
            pass
        except EXPLAINED as error:
            self.explain(error, batch, self.micro_batch)
            raise
        finally:
            try:
                self.call("on_fit_end")
            finally:
                self.train_loader = self.val_loader = batch = None
                self.should_stop, self.asked, self.interrupted = False, None, False
                self.outer_error = None
                self.release()

    def train_step(self, batch):
        """One optimizer step on one batch, and one of the schedule; gives the mean loss."""
        scale = self.scaler.get_scale()
        loss, norm = self.execute(self.optimize, batch)
        if (
            self.scaler.get_scale() < scale
        ):  # a step that the fp16 scaler skipped does not advance the schedule
            self.note_skipped(scale)
            return loss
        self.skipped = 0
        self.scheduler.step()
        if norm is not None and launch.is_first():  # it is that of all processes
            self.grad_norm.update(norm)
        return loss

    def optimize(self, batch):
        """What a graph holds of a step; gives the mean loss, and the norm of the gradient where that is clipped."""
        loss, norm = (
            self.micro_batch.work(self.accumulate, batch, self.module, self.undo_step, self.shares),
            None,
        )
        with self.spans["optimizer"]:
            if self.max_grad_norm is not None:
                self.scaler.unscale_(self.optimizer)
                norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
                norm = parallel.whole(norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss, norm

    def accumulate(self, micro_batches):
        """The gradient of the mean loss, which it gives; each (micro_batch, share) is weighted by its share.

        Of several processes each gives its own mean, and the gradients become those of the mean over all samples.
        """
        losses = []
        for i, (micro_batch, share) in enumerate(micro_batches, 1):
            with parallel.gradient_sync(self.model, enabled=i == len(micro_batches)):
                with self.spans["forward"], self.autocast:
                    loss, _ = self.compute_loss(micro_batch)
                loss = loss if share == 1 else loss * share
                with self.spans["backward"]:
                    self.scaler.scale(loss if self.weight == 1 else loss * self.weight).backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def compute_loss(self, batch):
        """(the mean loss over the batch, the outputs that the metrics get); called in training and in evaluation."""
        inputs, targets = batch
        outputs = self.model(inputs)
        return self.loss(outputs, targets), outputs

    def update_metrics(self, outputs, batch):
        """Gives the outputs of one evaluation batch to the metrics."""
        for metric in self.metrics.values():
            _, targets = batch
            metric.update(outputs, targets)

    def evaluate(self, loader, split="val"):
        """{"val/loss": ..., "val/acc": ...} over all samples of the loader; changes nothing in the training."""
        misuse.check_loader(self, loader, "evaluate")
        batch, loss_mean, loader = None, Mean(), dealt(loader, self.seed)
        # What is random in an evaluation is a function of the step too: one that is done anew gives the same.
        seed = devices.mix_seed(self.seed, split, self.step, *self.stream)
        for metric in self.metrics.values():
            metric.reset()
            if hasattr(metric, "to"):  # torchmetrics keep their sums on a device of their own
                metric.to(self.device)
        try:
            # Not inference_mode: sharded parameters cannot be copied in place under it.
            with self.spans["evaluation"], self.evaluating(), torch.no_grad():
                devices.seed_generators(self.device, seed, self.replicas)
                for batch in loader:
                    if self.evaluation_due and self.agreement.is_asked(
                        self.asked
                    ):  # none that a callback asks for
                        self.heed()
                        raise Interrupted
                    batch = devices.move(batch, self.device)
                    for part, (loss, outputs) in self.eval_micro_batch.work(
                        self.evaluate_parts, batch
                    ):
                        if parallel.counts(loader):
                            loss_mean.update(loss, batches.size(part))
                            self.update_metrics(outputs, part)
        except EXPLAINED as error:
            self.explain(error, batch, self.eval_micro_batch)
            raise
        loss_mean = loss_mean.over_ranks()
        if not loss_mean.samples:
            raise UserError(f"The {split} loader gives no samples.")
        results = {"loss": loss_mean.compute()} | {
            name: metric.compute() for name, metric in self.metrics.items()
        }
        return {
            f"{split}/{name}": misuse.number(f"{split}/{name}", value)
            for name, value in results.items()
        }

    def evaluate_parts(self, parts):
        """[(part, (loss, outputs))] of the parts of an evaluation batch."""
        with self.autocast:
            return [(part, self.compute_loss(part)) for part, _ in parts]

    def predict(self, loader):
        """The outputs for all samples, (N, ...) on the CPU, float32 also under autocast.

        The batches are inputs, or (inputs, targets) as for evaluation; for others override `predict_batch`.
        """
        misuse.check_loader(self, loader, "predict")
        batch, outputs, sizes, loader = None, [], [], dealt(loader, self.seed)
        try:
            # Not inference_mode here either: what it leaves in sharded parameters cannot be trained.
            with self.spans["evaluation"], self.evaluating(), torch.no_grad():
                for batch in loader:
                    sizes.append(getattr(loader, "global_size", None))
                    batch = devices.move(batch, self.device)
                    parts = self.eval_micro_batch.work(self.predict_parts, batch)
                    outputs += parts if parallel.counts(loader) else [part[:0] for part in parts]
        except EXPLAINED as error:
            self.explain(error, batch, self.eval_micro_batch)
            raise
        outputs = parallel.gather(misuse.joined(outputs), sizes)
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs

    def predict_parts(self, parts):
        """The outputs for each part of a batch, on the CPU."""
        with self.autocast:
            return [misuse.as_tensor(self.predict_batch(part)) for part, _ in parts]

    def predict_batch(self, batch):
        """The outputs for a batch, one tensor (N, ...)."""
        return self.model(misuse.inputs_of(batch))

    def close(self):
        """Drops the model, the optimizer and all that hangs on them, and gives their memory back."""
        if self.module is not None:
            parallel.unwrap(self.module)
        self.module = self.model = self.optimizer = self.scheduler = self.loss = self.execute = None
        self.metrics, self.callbacks = {}, []
        self.train_loader = self.val_loader = None
        self.train_loss.reset()
        devices.release(self.device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def stop(self, reason, kind="asked"):
        """Ends the training after this step; the reason is shown.

        Of several processes all have to call it in the same step. Where only one knows, `interrupt` is for it.
        """
        self.should_stop, self.stop_reason = True, StopReason(kind, reason)

    @property
    def failed(self):
        """Whether it is an error that ends the fit, for `on_fit_end`."""
        return sys.exc_info()[1] is not self.outer_error

    def interrupt(self, reason):
        """Ends the training after this step, or in the middle of its evaluation; from a signal or another thread.

        Of several processes all end after the same step, a little later: whoever is asked tells the others.
        """
        self.asked = reason

    def heed(self):
        """Ends the training where this process was asked to, or another one."""
        self.interrupted = True
        self.stop(self.asked or "another process was asked to stop", "interrupted")

    def is_time(self, every):
        """Whether what comes every so many steps comes after this one; the last step has all of it."""
        return self.step % every == 0 or self.step == self.total_steps

    def end_step(self, evaluates):
        """What comes after a step and its row: the evaluation, where it has one, and the callbacks."""
        self.evaluation_due = evaluates
        if evaluates:
            with self.spans["evaluation"]:
                self.agreement.soon()
                results = self.evaluate(self.val_loader, "val")
                self.agreement.soon()
                self.evaluation_due = False
                self.log(results)
        if self.step % self.steps_per_epoch == 0:
            self.call("on_epoch_end")
        self.call("on_step_end")
        if self.agreement.is_asked(self.asked):
            self.heed()

    def begin_step(self):
        """Notes the rate of the step, and seeds it: what is random in it is a function of (seed, step)."""
        self.lr = self.scheduler.get_last_lr()[0]
        seed = devices.mix_seed(self.seed, "step", self.step, *self.stream)
        devices.seed_generators(self.device, seed, self.replicas)

    def undo_step(self):
        """Where a step has to be done again: no gradient, and the random numbers that it had."""
        self.optimizer.zero_grad()
        self.begin_step()

    def note_skipped(self, scale):
        """TrainingError where the fp16 scaler has skipped MOST_SKIPPED steps in a row."""
        self.skipped += 1
        if self.skipped == MOST_SKIPPED:
            rate = float(self.optimizer.param_groups[0]["lr"])
            raise TrainingError(
                f"fp16: the gradients of {self.skipped} steps in a row, up to step {self.step + 1}, are not finite, "
                f"also at a scale of {scale:.3g} (learning rate {rate:.3g}).\n"
                "Type precision=bf16 or fp32, or a lower optimizer.lr."
            )

    def check_whole_epoch(self, given):
        """UserError where the training loader gave more or fewer batches than it said."""
        if given != self.steps_per_epoch:
            raise UserError(
                f"The training loader's len() is {self.steps_per_epoch}, and it gave {given} batches."
            )

    def call(self, hook, *args):
        """Calls one hook of every callback, in the order of the list."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def log(self, numbers):
        """Gives a row of numbers to the callbacks."""
        row = {"step": self.step, "epoch": self.step / self.steps_per_epoch, **numbers}
        tensors = {
            name: misuse.number(name, value)
            for name, value in row.items()
            if isinstance(value, torch.Tensor)
        }
        self.call("on_log", row | tensors)

    def log_training(self, batch):
        """Logs the window since the last row: the mean loss and how fast it went."""
        parallel.check_same_weights(self.model)
        window = self.train_loss.over_ranks()
        loss = (
            window.compute().item()
        )  # the one transfer; it waits for the device, so the clock is right
        norms = self.grad_norm.over_ranks()
        norm = {"train/grad_norm": norms.compute().item()} if norms.samples else {}
        samples, seconds = window.samples, time.perf_counter() - self.window_start
        self.batch_layout = summary.layout(tensor for _, tensor in batches.entries(batch))
        self.train_loss.reset()
        self.grad_norm.reset()
        row = {
            "train/loss": loss,
            "train/lr": float(self.lr),
            "train/samples": samples,
            "train/seconds": seconds,
        }
        self.log({**row, **norm})
        self.window_start = time.perf_counter()

    @contextlib.contextmanager
    def evaluating(self):
        """The model in evaluation mode, between on_eval_start and on_eval_end; all as before after it, or an error."""
        modes, started = (
            [(module, module.training) for module in self.model.modules()],
            time.perf_counter(),
        )
        within_fit = self.train_loader is not None
        outside = [] if within_fit else devices.random_states(self.device)
        self.model.eval()
        try:
            self.call("on_eval_start")
            yield
        finally:
            self.call("on_eval_end")
            for module, training in modes:
                module.training = training
            self.window_start += time.perf_counter() - started  # no part of the training's time
            if not within_fit:  # which gives memory back at its own end, and seeds the next step
                devices.set_random_states(outside)
                devices.release(self.device)

    def prepare(self, train_loader, val_loader, resume):
        """Checks what fit needs, builds the scheduler, and goes to where the checkpoint `resume` stands."""
        for loader in (train_loader, val_loader):
            if loader is not None:
                misuse.check_loader(self, loader, "fit")
        if self.optimizer is None:
            raise UserError(
                "fit needs an optimizer: Trainer(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))."
            )
        if self.loss is None and type(self).compute_loss is Trainer.compute_loss:
            raise UserError(
                "fit needs a loss: give Trainer(loss=torch.nn.CrossEntropyLoss()), or override compute_loss."
            )
        loader = seekable(train_loader, self.seed)
        self.data_bytes = resident_bytes(train_loader, val_loader)
        self.steps_per_epoch = len(train_loader)
        if not self.steps_per_epoch:
            raise UserError(
                "The training loader gives no batch: it has fewer samples than one batch, or none."
            )
        self.total_steps = self.max_steps or self.epochs * self.steps_per_epoch
        self.scheduler = schedules.build(self.make_scheduler, self.optimizer, self.total_steps)
        self.step, self.stop_reason, self.evaluation_due = 0, None, False
        self.train_loss.reset()
        self.grad_norm.reset()
        self.skipped = 0
        if self.layout_is_open and hasattr(train_loader, "in_shape"):
            devices.settle_layout(self.module, train_loader.in_shape, self.device)
        if resume is not None:
            self.load_state_dict(checkpoint.to_resume(resume))
        if self.execute is not graph.eagerly:
            optimizers.make_capturable(
                self.optimizer, self.device
            )  # the rates that were loaded are numbers
            # Anew: the optimizer's tensors may be others now.
            self.execute = graph.Captured(self.optimizer, self.device)
        misuse.warn_of_untrained(self)
        self.lr = self.scheduler.get_last_lr()[0]
        if isinstance(loader, Seekable):
            loader.spans = self.spans
        self.train_loader, self.val_loader, self.outer_error = loader, val_loader, sys.exc_info()[1]
        self.hold()
        if self.fits_threads and process.is_small(self.module, loader.batch_size):
            torch.set_num_threads(1)

    def parameter_groups(self, decay_all):
        """The trainable parameters for the optimizer; biases and the weights of norms (one dimension) without decay."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        if decay_all:
            return [{"params": parameters}]
        decayed, others = (
            [p for p in parameters if p.ndim > 1],
            [p for p in parameters if p.ndim <= 1],
        )
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def stateful(self):
        """{name: object with a state_dict} of what a checkpoint holds; a second optimizer goes here."""
        parts = {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        parts |= {"scaler": self.scaler, "train_loss": self.train_loss, "grad_norm": self.grad_norm}
        parts |= {"micro_batch": self.micro_batch}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self):
        """All that the training depends on, beside the settings, for a checkpoint; the tensors are the live ones."""
        states = {name: part.state_dict() for name, part in self.stateful().items()}
        callbacks = {
            name: callback.state_dict() for name, callback in self.named_callbacks().items()
        }
        return {
            "step": self.step,
            "evaluation_due": self.evaluation_due,
            **states,
            "callbacks": callbacks,
        }

    def load(self, path):
        """Loads a checkpoint file, or the best one of a folder: weights, step, callbacks, and the other parts."""
        self.load_state_dict(checkpoint.to_load(path))

    def load_state_dict(self, state):
        """Takes what `state_dict` gave.

        Before anything is changed, UserError for another model's, TrainingError for another Trainer's.
        """
        self.check_state(state)
        for name, part in self.stateful().items():
            try:
                checkpoint.restore(part, state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                reason = str(error).splitlines()[-1].strip()
                raise UserError(f"The checkpoint does not fit this {name}: {reason}") from None
        for name, callback in self.named_callbacks().items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
        self.step, self.evaluation_due = state["step"], state["evaluation_due"]

    def check_state(self, state):
        """Looks at all of a state before any of it is loaded."""
        kinds = {
            "step": int,
            "evaluation_due": bool,
            "callbacks": dict,
            **dict.fromkeys(self.stateful(), object),
        }
        for name, kind in kinds.items():
            if not isinstance(state, dict) or name not in state:
                raise TrainingError(
                    f"The checkpoint has no {name!r}: it was written by another Trainer."
                )
            if not isinstance(state[name], kind):
                refuse(state[name], f"of type {kind.__name__}", name)
        if not 0 <= state["step"] < 2**63 or isinstance(state["step"], bool):
            refuse(state["step"], "a number of steps", "step")
        for name, part in self.stateful().items():
            check(part, state[name], name)
        for name, callback in self.named_callbacks().items():
            if name in state["callbacks"]:
                callback.check_state(self, state["callbacks"][name], f"callbacks.{name}")
            elif callback.state_dict():
                raise UserError(
                    f"The checkpoint has nothing of {name}: its run had no such callback. Leave it out."
                )

    def named_callbacks(self):
        """{class name: callback}, the second of a class being "Name.1"."""
        named = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            count = sum(key.split(".")[0] == name for key in named)
            named[f"{name}.{count}" if count else name] = callback
        return named

    def where(self, batch=None):
        """Prints the devices, types and MiB of the model, the optimizer's state and the last (or the given) batch."""
        print("\n".join(summary.where(self, batch)))

    def memory_report(self):
        """MiB of parameters, gradients, optimizer state, buffers and data, and the peak."""
        return summary.memory_report(self)

    def explain(self, error, batch, micro_batch):
        """Raises the error as the user should see it where it is a wrong device or too little memory; else returns."""
        if devices.is_out_of_memory(error):
            raise micro_batch.explain(batch) from error
        if explained := misuse.explain(error):
            raise explained from error
        if explained := devices.explain(error, self.module, batch, self.device) or parallel.explain(
            error
        ):
            raise explained from error

    def hold(self):
        """Drops gradients that somebody has left, and notes what `release` puts back."""
        self.optimizer.zero_grad()
        self.outside, self.threads = devices.random_states(self.device), torch.get_num_threads()

    def release(self):
        """Drops gradients, gives memory back, and has the threads and the random numbers of before."""
        torch.set_num_threads(self.threads)
        devices.set_random_states(self.outside)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        devices.release(self.device)
