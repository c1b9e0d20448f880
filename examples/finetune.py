"""Fine-tune a torchvision model: first the new head alone, then the body too, at a lower rate.

python train.py dataset=image_folder dataset.root=DIR dataset.size=224 epochs=5 optimizer.lr=1e-3 \
    'dataset.mean=[0.485,0.456,0.406]' 'dataset.std=[0.229,0.224,0.225]' \
    model._target_=examples.finetune.FineTuned \
    +model.body._target_=torchvision.models.resnet18 +model.body.weights=DEFAULT \
    'groups=[{match: "body.*", lr: 1e-4}]' 'freeze=["body.*"]' callbacks.freeze.thaw_at=100
torchvision downloads the weights (45 MB) on first use; +model.body.weights=null uses random ones.
"""

from torch import nn

from stoker.trainer.errors import UserError


class FineTuned(nn.Module):
    """(N, C, H, W) -> (N, num_classes): `body` with its last layer, `fc`, replaced by a new head.

    One-channel images are repeated to three channels.
    """

    def __init__(self, body, num_classes):
        super().__init__()
        if not isinstance(getattr(body, "fc", None), nn.Linear):
            raise UserError(
                f"model.body: {type(body).__name__} has no linear layer named fc. Use a ResNet."
            )
        self.head = nn.Linear(body.fc.in_features, num_classes)
        self.body = body
        self.body.fc = nn.Identity()

    def forward(self, inputs):
        return self.head(self.body(inputs.expand(-1, 3, -1, -1)))
