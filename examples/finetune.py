"""Fine-tune a torchvision model: first only a new head, then the body too, at a lower rate.

python train.py dataset=image_folder dataset.root=DIR dataset.size=224 epochs=5 optimizer.lr=1e-3 \
    'dataset.mean=[0.485,0.456,0.406]' 'dataset.std=[0.229,0.224,0.225]' \
    model._target_=examples.finetune.FineTuned \
    +model.body._target_=torchvision.models.resnet18 +model.body.weights=DEFAULT \
    trainer._target_=examples.finetune.FineTuner +trainer.body_rate=0.1 \
    +callbacks.thaw._target_=examples.finetune.Thaw +callbacks.thaw.epochs=1
torchvision downloads the weights (45 MB) on first use; +model.body.weights=null uses random ones.
"""

from torch import nn

from stoker import Trainer
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError, check_number


class FineTuned(nn.Module):
    """(N, C, H, W) -> (N, num_classes): `body` without its last linear layer `fc`, and a new head.

    Images of one channel become grey images of three. While the body is `frozen`, its BatchNorms
    keep their statistics too.
    """

    frozen = False

    def __init__(self, body, num_classes):
        super().__init__()
        if not isinstance(getattr(body, "fc", None), nn.Linear):
            raise UserError(
                f"model.body: {type(body).__name__} does not end in a linear layer fc. Type a resnet."
            )
        self.head = nn.Linear(body.fc.in_features, num_classes)
        self.body = body
        self.body.fc = nn.Identity()

    def forward(self, inputs):
        return self.head(self.body(inputs.expand(-1, 3, -1, -1)))

    def train(self, mode=True):
        super().train(mode)
        self.body.train(mode and not self.frozen)
        return self


class FineTuner(Trainer):
    """Trains the body with `body_rate` times the learning rate of the head."""

    def __init__(self, model, *, body_rate=0.1, **settings):
        super().__init__(model, **settings)
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if group["part"] == "body":
                group["lr"] *= check_number("trainer.body_rate", body_rate, above=0)

    def parameter_groups(self, decay_all):
        head = {id(parameter) for parameter in self.module.head.parameters()}
        groups = []
        for group in super().parameter_groups(decay_all):
            parts = {"head": [], "body": []}
            for parameter in group["params"]:
                parts["head" if id(parameter) in head else "body"].append(parameter)
            groups += [{**group, "params": params, "part": part} for part, params in parts.items()]
        return groups


class Thaw(Callback):
    """Freezes the body of a `FineTuned` model for the first `epochs`."""

    def __init__(self, epochs=1):
        self.epochs = check_number("callbacks.thaw.epochs", epochs, whole=True, least=0)

    def on_fit_start(self, trainer):
        self.on_step_end(trainer)

    def on_step_end(self, trainer):
        frozen = trainer.step < self.epochs * trainer.steps_per_epoch
        if frozen != trainer.module.frozen:
            trainer.module.frozen = frozen
            trainer.module.body.requires_grad_(not frozen)
