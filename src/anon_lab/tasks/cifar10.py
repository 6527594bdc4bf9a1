"""The CIFAR-10 task: ResNet-20 or a small ViT on 60,000 colour images of 32 x 32 pixels (Krizhevsky, 2009)."""

from pathlib import Path
from typing import Any

from anon_lab.models.resnet import resnet20
from anon_lab.models.vit import ViT
from anon_lab.tasks import Recipe, _cifar10, _images

N_VALIDATION = 5_000

MODELS = {"resnet20": resnet20, "vit": ViT}
RECIPES = {
    # As SGD with lr 0.1 and momentum 0.9 is usually given this network.
    "resnet20": Recipe(batch_size=128, epochs=200, warmup=0.005, weight_decay=5e-4),
    # As AdamW with lr 1e-3 is usually given a transformer on little data.
    "vit": Recipe(batch_size=128, epochs=200, warmup=0.05, clip=1.0, weight_decay=0.05, decay_all=False),
}


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> _images.InMemory:
    """The task, from any of the formats that `anon_lab.tasks._cifar10` reads.

    **Arguments:**
    - `options`: `model`, "resnet20" or "vit", which also decides the recipe.
    """
    model = _images.read_options("cifar10", options, model="resnet20")["model"]
    _images.check_choice("model", model, MODELS)
    train, test = _cifar10.load(data)
    validation = None
    if hold_out:
        train, validation = _images.hold_out(train, N_VALIDATION)
    return _images.InMemory(
        name="cifar10",
        recipe=RECIPES[model],
        build=MODELS[model],
        normal=_cifar10.NORMAL,
        train=train,
        validation=validation,
        test=test,
        pad=4,
        flip=True,
    )
