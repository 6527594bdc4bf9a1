"""The digits task: a small MLP on the 1,797 handwritten digits that come with scikit-learn."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from anon_lab.tasks import Recipe, _images

N_TRAIN = 800
N_VALIDATION = 497
N_TEST = 500


class Images(NamedTuple):
    """Images of 8 x 8 pixels in [0, 1], flattened, with their digits."""

    pixels: Tensor  # (n, 64) float32
    digits: Tensor  # (n,) int64


class Data(NamedTuple):
    """The three parts: to train on, to choose with, to report."""

    train: Images
    validation: Images
    test: Images


@cache
def data() -> Data:
    """The images in a random order, cut in three; the same cut in every run."""
    pixels, digits = load_digits(return_X_y=True)
    # The cut never depends on a run's seed: an image that helped to choose must not be reported on.
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(pixels / 16, dtype=torch.float32)[order]
    digits = torch.tensor(digits)[order]
    sizes = [N_TRAIN, N_VALIDATION, N_TEST]
    return Data(*map(Images, pixels.split(sizes), digits.split(sizes)))


def model() -> nn.Sequential:
    """64-64-32-10 with ReLU, initialised from torch's global generator."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss(net: nn.Module, images: Images) -> Tensor:
    """Mean cross-entropy, in nats."""
    return nn.functional.cross_entropy(net(images.pixels), images.digits)


@torch.no_grad()
def accuracy(net: nn.Module, images: Images) -> float:
    """Share of images whose largest output is the right digit."""
    return (net(images.pixels).argmax(1) == images.digits).float().mean().item()


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> _images.InMemory:
    """The task, trained as in the demo; without `hold_out` the validation digits are trained on too."""
    del data  # scikit-learn has the images
    _images.read_options("digits", options)
    return _task(hold_out)


def _task(hold_out: bool) -> _images.InMemory:
    train, validation, test = (_images.Images(*part) for part in data())
    if not hold_out:
        train = _images.Images(*map(torch.cat, zip(train, validation, strict=True)))
    return _images.InMemory(
        name="digits",
        recipe=Recipe(batch_size=100, epochs=25, schedule="constant"),
        build=model,
        normal=_images.IDENTITY,
        train=train,
        validation=validation if hold_out else None,
        test=test,
    )
