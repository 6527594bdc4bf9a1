"""The ImageNet task: ResNet-18 or ResNet-50 on any folder of images, one folder for each class."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from anon_lab.models.resnet import resnet18, resnet50
from anon_lab.tasks import Batch, DataMissing, Recipe, Split, _images
from anon_lab.tasks._image_folder import Files, Key, Pixels, Reader, read_folder

NORMAL = _images.Normal((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
EVALUATED = 256
"""Images evaluated at once."""

MODELS = {"resnet18": resnet18, "resnet50": resnet50}
RECIPES = {
    # github.com/juntang-zhuang/Adabelief-Optimizer, where SGD has lr 0.1; AdaBelief itself drops lr after 70 and 80.
    "adabelief": Recipe(batch_size=256, epochs=90, schedule="step", milestones=(30 / 90, 60 / 90), weight_decay=1e-4),
    # github.com/Ardcy/Lookaround, where SGD has lr 0.1. Its script also shows every batch three times an epoch, with
    # AutoAugment and RandAugment the second and third time; here it is seen once, flipped and rotated.
    "lookaround": Recipe(
        batch_size=256,
        epochs=90,
        warmup=1 / 90,
        schedule="step",
        milestones=(30 / 90, 60 / 90),
        weight_decay=5e-4,
    ),
}
ROTATION = {"adabelief": 0.0, "lookaround": 15.0}
"""Largest angle by which a recipe turns training images, in degrees."""


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> "Folder":
    """The task, from a folder with `train/CLASS/` and `val/CLASS/`, or with Tiny ImageNet's `val_annotations.txt`.

    **Arguments:**
    - `hold_out`: keep as many training images as `val` has, but at most a tenth, for validation; `val` is the test.
    - `options`:
        - `model`: "resnet18" or "resnet50";
        - `recipe`: "adabelief", as ResNet-18's, or "lookaround", as ResNet-50's;
        - `image_size`: side of what the network sees, in pixels;
        - `resize`: shorter side to which an image is brought before its centre is evaluated, 8/7 of `image_size` unless
          given (for images already of that size give `image_size` itself: they are then not enlarged);
        - `zero_init`: whether blocks begin as their shortcuts;
        - `workers`: processes that decode images;
        - `partial`: whether a part of ImageNet or of Tiny ImageNet will do.
    """
    given = _images.read_options(
        "imagenet",
        options,
        model="resnet18",
        recipe=None,
        image_size=224,
        resize=None,
        zero_init=False,
        workers=min(16, os.cpu_count() or 1),
        partial=False,
    )
    _images.check_choice("model", given["model"], MODELS)
    recipe = given["recipe"] or {"resnet18": "adabelief", "resnet50": "lookaround"}[given["model"]]
    _images.check_choice("recipe", recipe, RECIPES)
    size = given["image_size"]
    resize = round(size * 8 / 7) if given["resize"] is None else given["resize"]
    if not 1 <= size <= resize:
        raise ValueError(f"image_size must lie between 1 and resize, {resize}, but is {size}")

    classes, train, test = read_folder(_find(data), given["partial"])
    validation = None
    if hold_out:
        kept, held = _images.cut(len(train.labels), min(len(test.labels), len(train.labels) // 10))
        train, validation = train.pick(kept), train.pick(held)

    def build() -> nn.Module:
        return MODELS[given["model"]](len(classes), given["zero_init"])

    reader = Reader(size, resize, ROTATION[recipe])
    return Folder(RECIPES[recipe], build, reader, train, validation, test, given["workers"])


def _find(data: Path | None) -> Path:
    places = _images.places("imagenet", data)
    for place in places:
        if (place / "train").is_dir():
            return place
    raise DataMissing(
        f"no image folder was found in {' or '.join(map(str, places))}: put ImageNet from https://image-net.org there, "
        "or any images, as train/CLASS/ and val/CLASS/"
    )


class Folder(_images.Classification):
    """Images too many to hold: worker processes read, decode and augment them while the device trains."""

    def __init__(
        self,
        recipe: Recipe,
        build: Callable[[], nn.Module],
        reader: Reader,
        train: Files,
        validation: Files | None,
        test: Files,
        workers: int,
    ) -> None:
        super().__init__("imagenet", recipe, build, NORMAL)
        self._reader = reader
        self._train = train
        self._evaluated = {"validation": validation, "test": test}
        self._workers = workers

    def examples(self) -> int:
        return len(self._train.labels)

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        places = _images.parts(self.examples(), batch_size, start, rank, world)
        return self._decoded(self._train, self._keys(places, seed), device)

    def _keys(self, places: Iterator[tuple[int, slice]], seed: int) -> Iterator[list[Key]]:
        """Of each batch, which images it holds, with the seed of each one's augmentation."""
        current, order = -1, np.empty(0, int)
        for epoch, place in places:
            if epoch != current:
                current, order = epoch, np.random.default_rng((seed, epoch)).permutation(self.examples())
            yield [(index, (seed, epoch, index)) for index in order[place].tolist()]

    def batches(self, split: Split, device: torch.device) -> Iterable[Batch]:
        files = self._evaluated[split]
        if files is None:
            raise ValueError("imagenet has no validation images unless they are held out: load it with hold_out")
        whole: list[Key] = [(index, None) for index in range(len(files.labels))]
        keys = (whole[first : first + EVALUATED] for first in range(0, len(whole), EVALUATED))
        return self._decoded(files, keys, device)

    def _decoded(self, files: Files, keys: Iterator[list[Key]], device: torch.device) -> Iterator[Batch]:
        loader = DataLoader(
            Pixels(files, self._reader),
            batch_sampler=keys,
            collate_fn=_collate,
            num_workers=self._workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else the loader would draw from the global one
        )
        for batch in loader:
            if isinstance(batch, DataMissing):
                raise batch
            pixels, labels = batch
            # Channels-last in memory, as decoded.
            yield pixels.to(device, non_blocking=True).permute(0, 3, 1, 2), labels.to(device, non_blocking=True)


def _collate(samples: list[tuple[np.ndarray, int] | DataMissing]) -> Batch | DataMissing:
    """Pixels (n, height, width, 3) and labels; or the first error, to be raised as it is, outside the worker."""
    good = []
    for sample in samples:
        if isinstance(sample, DataMissing):
            return sample
        good.append(sample)
    return torch.from_numpy(np.stack([pixels for pixels, _ in good])), torch.tensor([label for _, label in good])
