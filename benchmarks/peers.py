"""Other popular frameworks, each with its defaults, on the same work."""

import os
import warnings

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import by_hand, work
from benchmarks.work import NotOffered


def only_fp32(job):
    if job.precision != "fp32":
        raise NotOffered(f"no {job.precision} on the {job.device}")


def lightning(job, clock):
    """Trainer with its progress bar, logger and checkpoints, and the accuracy from torchmetrics, as in its guide."""
    import lightning as pl
    import torchmetrics

    warnings.filterwarnings("ignore")  # such as advice to use more workers

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = work.model(job)
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

        def configure_optimizers(self):
            return clock.watch(work.optimizer(job)(self.model.parameters()))

        def training_step(self, batch, _):
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs), targets)
            self.log("loss", loss, prog_bar=True)
            return loss

        def on_validation_epoch_start(self):
            clock.evaluating()

        def validation_step(self, batch, _):
            inputs, targets = batch
            self.accuracy(self.model(inputs), targets)
            self.log("accuracy", self.accuracy, prog_bar=True)

        def on_validation_end(self):
            clock.evaluated(self.trainer.callback_metrics["accuracy"])

    clock.begin()
    train, test = work.loaders(job)
    clock.steps = len(train)
    trainer = pl.Trainer(
        max_epochs=job.epochs,
        accelerator=job.device,
        precision="32-true" if job.precision == "fp32" else "bf16-mixed",
        num_sanity_val_steps=0,  # otherwise, the clock would count the sanity check as an evaluation
        default_root_dir=job.scratch,
    )
    trainer.fit(Module(), train, test)


def accelerate(job, clock):
    """The bare loop, with a prepared model, optimizer and loaders, and with `accelerator.backward`."""
    from accelerate import Accelerator

    clock.begin()
    accelerator = Accelerator(
        cpu=job.device == "cpu", mixed_precision="no" if job.precision == "fp32" else job.precision
    )
    train, test = work.loaders(job)
    clock.steps = len(train)
    model = work.model(job)
    optimizer = clock.watch(work.optimizer(job)(model.parameters()))
    model, optimizer = accelerator.prepare(model, optimizer)
    if train.batch_size is not None:  # Accelerate rejects loaders of ready-made batches
        train, test = accelerator.prepare(train, test)
    by_hand.fit(job, clock, model, optimizer, train, test, backward=accelerator.backward)


def hf(job, clock):
    """The Trainer of transformers, with its progress bar, logging and checkpoints, and a constant learning rate."""
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = work.model(job)

        def forward(self, inputs, labels=None):
            outputs = self.model(inputs)
            return {"loss": F.cross_entropy(outputs, labels), "logits": outputs}

    class Timed(Trainer):
        def get_train_dataloader(self):
            return self.prepared(train)

        def get_eval_dataloader(self, *_):
            return self.prepared(test)

        def prepared(self, loader):  # as the Trainer does with its own loader
            return loader if loader.batch_size is None else self.accelerator.prepare(loader)

        def evaluate(self, *arguments, **settings):
            clock.evaluating()
            metrics = super().evaluate(*arguments, **settings)
            clock.evaluated(metrics["eval_accuracy"])
            return metrics

    clock.begin()
    train, test = work.loaders(job)
    clock.steps = len(train)
    for loader in (train, test):
        loader.collate_fn = as_dict(loader.collate_fn)
    net = Net()
    optimizer = clock.watch(work.optimizer(job)(net.parameters()))
    arguments = TrainingArguments(
        job.scratch,
        num_train_epochs=job.epochs,
        per_device_train_batch_size=job.batch_size,
        per_device_eval_batch_size=work.EVAL_BATCH,
        eval_strategy="epoch",
        max_grad_norm=0.0,  # no clipping, as in all other contestants
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bf16",
    )
    Timed(
        net,
        arguments,
        train_dataset=train.dataset,
        eval_dataset=test.dataset,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        compute_metrics=lambda found: {
            "accuracy": (found.predictions.argmax(1) == found.label_ids).mean().item()
        },
    ).train()


def as_dict(collate):
    return lambda samples: dict(zip(("inputs", "labels"), collate(samples), strict=True))


def ignite(job, clock):
    """create_supervised_trainer and its evaluator, with a progress bar and a running mean of the loss, as in its examples."""
    only_fp32(job)
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers.tqdm_logger import ProgressBar
    from ignite.metrics import Accuracy, RunningAverage

    clock.begin()
    train, test = work.loaders(job)
    clock.steps = len(train)
    model = work.model(job).to(job.device)
    optimizer = clock.watch(work.optimizer(job)(model.parameters()))
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy, device=job.device)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=job.device)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    ProgressBar().attach(trainer, ["loss"])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        clock.evaluating()
        evaluator.run(test)
        clock.evaluated(evaluator.state.metrics["accuracy"])

    trainer.run(train, max_epochs=job.epochs)


def skorch(job, clock):
    """NeuralNetClassifier with its default callbacks: the printed table, epoch times, and accuracy."""
    only_fp32(job)
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback
    from skorch.helper import predefined_split

    class Timed(NeuralNetClassifier):
        def run_single_epoch(self, iterator, training, prefix, step_fn, **settings):
            if not training:
                clock.evaluating()
            super().run_single_epoch(iterator, training, prefix, step_fn, **settings)

    class Watch(Callback):
        def on_train_begin(self, net, **_):
            clock.watch(net.optimizer_)

        def on_epoch_end(self, net, **_):
            clock.evaluated(net.history[-1]["valid_acc"])

    clock.begin()
    train, test = work.loaders(job)
    clock.steps = len(train)
    factory = work.optimizer(job)
    # skorch would treat a list of batches as the columns of a table. The data itself comes from the iterators.
    train_set, test_set = (
        torch.utils.data.Subset(part.dataset, range(len(part.dataset))) for part in (train, test)
    )
    net = Timed(
        work.model(job),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=factory.func,
        **{
            name if name == "lr" else f"optimizer__{name}": value
            for name, value in factory.keywords.items()
        },
        max_epochs=job.epochs,
        iterator_train=lambda *_, **__: train,
        iterator_valid=lambda *_, **__: test,
        train_split=predefined_split(test_set),
        classes=list(range(10)),
        callbacks=[("watch", Watch())],
        device=job.device,
    )
    net.fit(train_set, None)


def keras(job, clock):
    """Keras 3 on torch, with its own layers. MNIST is passed as arrays in memory, which is idiomatic in Keras."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from keras import layers

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.step()

        def on_test_begin(self, logs=None):
            clock.evaluating()

        def on_test_end(self, logs=None):
            clock.evaluated(logs["accuracy"])

    def dense(width):
        return layers.Dense(width, activation="relu")

    def block(width):
        return [layers.Conv2D(width, 3, padding="same", activation="relu"), layers.MaxPooling2D(2)]

    clock.begin()
    keras.config.set_image_data_format("channels_first")
    keras.utils.set_random_seed(job.seed)
    if job.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    bodies = {
        "linear": [layers.Flatten()],
        "mlp": [layers.Flatten(), dense(256), dense(256)],
        "cnn": [*block(32), *block(64), layers.Flatten(), dense(128)],
        "cifar": [*block(32), *block(64), *block(128), layers.Flatten()],
    }
    shape = (3, 32, 32) if job.work in work.PHOTOGRAPHS else (1, 28, 28)
    body = bodies["cifar" if job.work in work.PHOTOGRAPHS else job.work]
    model = keras.Sequential([keras.Input(shape), *body, layers.Dense(10)])
    adam, sgd = keras.optimizers.Adam(1e-3), keras.optimizers.SGD(0.05, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam if job.work == "cnn" else sgd, loss, metrics=["accuracy"])
    if job.work in work.PHOTOGRAPHS or {"ready", "one"} & set(job.variants):
        train, test = work.loaders(job)
        clock.steps = len(train)
        model.fit(train, validation_data=test, epochs=job.epochs, callbacks=[Watch()])
        return
    (inputs, targets), (test_inputs, test_targets), *scale = work.arrays(job)
    inputs, test_inputs = (
        work.normalize(images, *scale).numpy() for images in (inputs, test_inputs)
    )
    clock.steps = -(-len(inputs) // job.batch_size)
    model.fit(
        inputs,
        targets.numpy(),
        batch_size=job.batch_size,
        validation_data=(test_inputs, test_targets.numpy()),
        validation_batch_size=work.EVAL_BATCH,
        epochs=job.epochs,
        callbacks=[Watch()],
    )


def fastai(job, clock):
    """A Learner with the same loaders as the bare loop."""
    if job.device == "cpu":
        only_fp32(job)
    from fastai.callback.core import Callback
    from fastai.callback.fp16 import MixedPrecision
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    from fastai.optimizer import OptimWrapper

    class Watch(Callback):
        def after_step(self):
            clock.step()

        def before_validate(self):
            clock.evaluating()

        def after_validate(self):
            clock.evaluated(self.learn.recorder.metrics[0].value)

    clock.begin()
    train, test = work.loaders(job)
    clock.steps = len(train)
    model = work.model(job)
    learner = Learner(
        DataLoaders(train, test, device=torch.device(job.device)),
        model,
        loss_func=F.cross_entropy,
        opt_func=lambda *_, **__: OptimWrapper(opt=work.optimizer(job)(model.parameters())),
        lr=work.optimizer(job).keywords["lr"],
        metrics=accuracy,
        cbs=[Watch(), *([MixedPrecision(amp_mode="bf16")] if job.precision == "bf16" else [])],
    )
    learner.fit(job.epochs)
