"""What the image tasks share: classification as a task, a whole epoch shuffled and augmented at once, and options."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from anon_lab.tasks import Batch, Metric, Recipe, Split

ACCURACY = Metric("accuracy", "%", higher_is_better=True)
CHUNK = 8192
"""Images augmented at once: bounds the memory that an epoch takes beside its result."""


class Images(NamedTuple):
    """Pixels, uint8 (n, channels, height, width) unless a task says otherwise, and the class of each image."""

    pixels: Tensor
    labels: Tensor  # (n,) int64


class Normal(NamedTuple):
    """Mean and standard deviation of each channel over the training images, in units of the largest pixel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IDENTITY = Normal((), ())
"""For pixels that reach the network as they are."""


def read_options(task: str, given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The defaults, overruled by what was given."""
    unknown = sorted(given.keys() - defaults.keys())
    if unknown:
        takes = f"the options {', '.join(defaults)}" if defaults else "no options"
        raise ValueError(f"{task} takes {takes}, but was given {', '.join(unknown)}")
    return defaults | given


def check_choice(option: str, value: Any, choices: Iterable[Any]) -> None:
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(map(str, choices))}, but is {value!r}")


def places(task: str, data: Path | None) -> list[Path]:
    """Where a task's files may lie: in the given folder, else under $ANON_DATA and ./data."""
    if data is not None:
        return [Path(data)]
    roots = [Path(os.environ["ANON_DATA"])] if os.environ.get("ANON_DATA") else []
    return [place for root in (*roots, Path("data")) for place in (root / task, root)]


def cut(count: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of the training and of the validation images: the last of a random order, the same in every run."""
    order = np.random.default_rng(0).permutation(count)
    # Sorted: the cut decides which images are held out, and only a run's seed decides their order.
    return np.sort(order[: count - held_out]), np.sort(order[count - held_out :])


def hold_out(images: Images, count: int) -> tuple[Images, Images]:
    """The images to train on and the `count` to validate with."""
    train, validation = (torch.from_numpy(part) for part in cut(len(images.labels), count))
    return (
        Images(images.pixels[train], images.labels[train]),
        Images(images.pixels[validation], images.labels[validation]),
    )


def share_of(batch_size: int, rank: int, world: int) -> slice:
    """The rank's part of a batch."""
    if batch_size % world:
        raise ValueError(f"batch_size must be a multiple of the {world} processes, but is {batch_size}")
    return slice(rank * batch_size // world, (rank + 1) * batch_size // world)


def parts(examples: int, batch_size: int, start: int, rank: int, world: int) -> Iterator[tuple[int, slice]]:
    """For each step from `start` on, without end: its epoch, and the rank's part of its batch in that epoch's order."""
    if not 1 <= batch_size <= examples:
        raise ValueError(f"batch_size must lie between 1 and the {examples} training images, but is {batch_size}")
    share = share_of(batch_size, rank, world)

    def generate() -> Iterator[tuple[int, slice]]:
        step = start
        while True:
            epoch, batch = divmod(step, examples // batch_size)
            yield epoch, slice(batch * batch_size + share.start, batch * batch_size + share.stop)
            step += 1

    return generate()


def augment(pixels: Tensor, order: np.ndarray, rng: np.random.Generator, pad: int, flip: bool) -> Tensor:
    """The images in the given order, each moved by up to `pad` pixels each way over black and, if `flip`, mirrored
    half of the time.

    The random numbers are drawn on the host, so that every device sees the same epoch. The result is channels-last in
    memory: so the gather leaves it, and so the tensor cores of a GPU want it.
    """
    count, (height, width) = len(order), pixels.shape[-2:]
    device = pixels.device
    picked = torch.from_numpy(order).to(device)
    moves = torch.from_numpy(rng.integers(0, 2 * pad + 1, (2, count, 1))).to(device)
    mirrored = torch.from_numpy(rng.integers(0, 2 if flip else 1, (count, 1)) == 1).to(device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    rows = row + moves[0]
    columns = torch.where(mirrored, column.flip(0), column) + moves[1]

    shape = (count, *pixels.shape[1:])
    result = torch.empty(shape, dtype=pixels.dtype, device=device, memory_format=torch.channels_last)
    for first in range(0, count, CHUNK):
        chunk = slice(first, first + CHUNK)
        padded = functional.pad(pixels[picked[chunk]], (pad,) * 4)
        image = torch.arange(len(padded), device=device)[:, None, None]
        gathered = padded[image, :, rows[chunk, :, None], columns[chunk, None, :]]  # (n, height, width, channels)
        result[chunk] = gathered.permute(0, 3, 1, 2)
    return result


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Eval mode, and afterwards the mode that each module had."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Classification(ABC):
    """A task of naming the class of an image; where the images come from is the subclass's business."""

    unit = "images"
    metric = ACCURACY

    def __init__(self, name: str, recipe: Recipe, build: Callable[[], nn.Module], normal: Normal) -> None:
        self.name = name
        self.recipe = recipe
        self._build = build
        self._normal = normal
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def examples(self) -> int: ...

    @abstractmethod
    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]: ...

    @abstractmethod
    def batches(self, split: Split, device: torch.device) -> Iterable[Batch]:
        """The split once, in its own order and unaugmented."""
        ...

    def model(self) -> nn.Module:
        return self._build()

    def units(self, batch: Batch) -> int:
        return len(batch[1])

    def logits(self, net: nn.Module, pixels: Tensor) -> Tensor:
        """What the network says of pixels as the stream gives them."""
        if not self._normal.mean:
            return net(pixels)
        mean, inverse = self._normal_on(pixels.device)
        return net((pixels - mean) * inverse)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy, in nats."""
        pixels, labels = batch
        return functional.cross_entropy(self.logits(net, pixels), labels)

    def sampled_loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of each image with a label drawn from the network's own distribution."""
        logits = self.logits(net, batch[0])
        # argmax_k (logit_k - ln E_k), with E_k ~ Exp(1), is a draw from the softmax; torch.multinomial would make the
        # host wait for the device.
        waiting = torch.empty_like(logits, dtype=torch.float32).exponential_()
        labels = (logits.detach().float() - waiting.log()).argmax(1)
        return functional.cross_entropy(logits, labels, reduction="none")

    @torch.no_grad()
    def evaluate(self, net: nn.Module, split: Split, device: torch.device) -> dict[str, float]:
        """Mean cross-entropy, in nats, and accuracy, in percent."""
        count = 0
        loss = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        with evaluating(net):
            for pixels, labels in self.batches(split, device):
                logits = self.logits(net, pixels)
                loss += functional.cross_entropy(logits.float(), labels, reduction="sum")
                right += (logits.argmax(1) == labels).sum()
                count += len(labels)
        return {"loss": loss.item() / count, "accuracy": 100 * right.item() / count}

    def _normal_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """255 mean and 1 / (255 std), copied to a device once: a CUDA graph cannot hold a copy from the host."""
        if device not in self._constants:
            mean, std = (
                torch.tensor(each, dtype=torch.float32, device=device).view(-1, 1, 1) * 255 for each in self._normal
            )
            self._constants[device] = mean, 1 / std
        return self._constants[device]


class InMemory(Classification):
    """Images few enough to lie on the device whole, as they are on disk; a batch is a slice of an epoch."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        build: Callable[[], nn.Module],
        normal: Normal,
        train: Images,
        validation: Images | None,
        test: Images,
        pad: int = 0,
        flip: bool = False,
    ) -> None:
        """**Arguments:**
        - `validation`: None where nothing was held out of training.
        - `pad`, `flip`: how training images are augmented.
        """
        super().__init__(name, recipe, build, normal)
        self._splits = {"train": train, "validation": validation, "test": test}
        self._pad, self._flip = pad, flip
        self._copies: dict[tuple[str, torch.device], Images] = {}

    def examples(self) -> int:
        return len(self._images("train").labels)

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        return self._slices(parts(self.examples(), batch_size, start, rank, world), seed, device)

    def _slices(self, places: Iterator[tuple[int, slice]], seed: int, device: torch.device) -> Iterator[Batch]:
        current, images = -1, None
        for epoch, place in places:
            if images is None or epoch != current:
                current, images = epoch, self.epoch(seed, epoch, device)
            yield images.pixels[place], images.labels[place]

    def epoch(self, seed: int, epoch: int, device: torch.device) -> Images:
        """All training images, shuffled and augmented."""
        pixels, labels = self._on("train", device)
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(labels))
        shuffled = torch.from_numpy(order).to(device)
        if self._pad or self._flip:
            return Images(augment(pixels, order, rng, self._pad, self._flip), labels[shuffled])
        return Images(pixels[shuffled], labels[shuffled])

    def stack(self, nets: Sequence[nn.Module], dtype: torch.dtype) -> Callable[[Sequence[Batch]], Tensor]:
        """What leaves the gradients of many networks, each by its own batch, and returns the losses.

        **Arguments:**
        - `nets`: residual networks for small images, of one shape.
        - `dtype`: of activations.
        """
        from anon_lab.models.stacked import Stacked

        stacked = Stacked(nets, self._images("train").pixels.shape[-1], dtype)

        def gradients(batches: Sequence[Batch]) -> Tensor:
            pixels, labels = (torch.stack(each) for each in zip(*batches, strict=True))
            if self._normal.mean:
                mean, inverse = self._normal_on(pixels.device)
                pixels = (pixels - mean) * inverse
            return stacked.gradient(pixels, labels)

        return gradients

    def batches(self, split: Split, device: torch.device) -> Iterable[Batch]:
        pixels, labels = self._on(split, device)
        return zip(pixels.split(1000), labels.split(1000), strict=True)

    def _images(self, split: str) -> Images:
        images = self._splits[split]
        if images is None:
            raise ValueError(f"{self.name} has no validation images unless they are held out: load it with hold_out")
        return images

    def _on(self, split: str, device: torch.device) -> Images:
        """The split on the device, copied once."""
        images = self._images(split)
        if (split, device) not in self._copies:
            self._copies[split, device] = Images(images.pixels.to(device), images.labels.to(device))
        return self._copies[split, device]
