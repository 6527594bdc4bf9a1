"""Images on disk, one folder for each class: which there are, and how one of them becomes pixels."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from anon_lab.tasks import DataMissing

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm")
# Images in train and val of the sets whose classes are named by WordNet, by how many classes they have.
COMPLETE = {1000: (1_281_167, 50_000), 200: (100_000, 10_000)}
SCALE = (0.08, 1.0)
"""Share of the image's area that a random crop takes."""
RATIO = (3 / 4, 4 / 3)
"""Width over height of a random crop."""

Key = tuple[int, tuple[int, ...] | None]
"""Which image, and the seed of its augmentation; None for evaluation."""


@dataclass(frozen=True)
class Reader:
    """An image file to (size, size, 3) bytes."""

    size: int
    resize: int
    """Shorter side before the centre is cut out for evaluation."""
    rotation: float = 0.0
    """Largest angle of the augmentation, in degrees."""

    def read(self, path: str, seed: tuple[int, ...] | None) -> np.ndarray:
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: Pillow's, of a broken PNG
            raise DataMissing(f"{path} cannot be read as an image: {error}") from None
        image = self.centre(image) if seed is None else self.augmented(image, np.random.default_rng(seed))
        return np.asarray(image)

    def centre(self, image: Image.Image) -> Image.Image:
        """The middle of the image, once its shorter side has `resize` pixels."""
        width, height = image.size
        short = min(width, height)
        if short != self.resize:
            width, height = (self.resize * side // short for side in (width, height))
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))

    def augmented(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        """A random part of the image, brought to size, mirrored half of the time, and turned."""
        image = image.crop(random_box(*image.size, rng)).resize((self.size, self.size), Image.Resampling.BILINEAR)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.rotation:
            image = image.rotate(rng.uniform(-self.rotation, self.rotation))
        return image


def random_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a crop of random area and shape; after ten that do not fit, as much of the middle
    as the allowed shapes take."""
    for _ in range(10):
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class Files(NamedTuple):
    """Images with the number of each one's class.

    Arrays, not lists: to read a list in a worker process counts references, and so copies the memory that it shares.
    """

    paths: np.ndarray  # (n,) bytes
    labels: np.ndarray  # (n,) int64

    def pick(self, places: np.ndarray) -> "Files":
        return Files(self.paths[places], self.labels[places])


class Pixels(Dataset[tuple[np.ndarray, int] | DataMissing]):
    """Files as the pixels that a reader makes of them."""

    def __init__(self, files: Files, reader: Reader) -> None:
        self._files = files
        self._reader = reader

    def __getitem__(self, key: Key) -> tuple[np.ndarray, int] | DataMissing:
        index, seed = key
        try:
            return self._reader.read(os.fsdecode(self._files.paths[index]), seed), int(self._files.labels[index])
        except DataMissing as error:
            return error


def read_folder(root: Path, partial: bool) -> tuple[list[str], Files, Files]:
    """The classes in the order of their names, and the files of `train` and `val`.

    **Arguments:**
    - `partial`: whether less than all of ImageNet or Tiny ImageNet is accepted.
    """
    train = _by_class(root / "train")
    classes = sorted({name for name, _ in train})
    if len(classes) < 2:
        raise DataMissing(
            f"{root / 'train'} must have a folder for each of two or more classes, but has {len(classes)}"
        )
    annotations = root / "val" / "val_annotations.txt"
    test = _annotated(annotations) if annotations.is_file() else _by_class(root / "val")
    _check(root, classes, train, test, partial)
    number = {name: i for i, name in enumerate(classes)}
    train, test = (
        Files(np.array([os.fsencode(path) for _, path in part]), np.array([number[name] for name, _ in part]))
        for part in (train, test)
    )
    return classes, train, test


def _check(root: Path, classes: list[str], train: list, test: list, partial: bool) -> None:
    if not test:
        raise DataMissing(f"{root / 'val'} holds no images")
    for name in sorted({name for name, _ in test}.symmetric_difference(classes)):
        has, lacks = ("train", "val") if name in classes else ("val", "train")
        raise DataMissing(f"class {name} has images in {root / has}, but none in {root / lacks}")
    named_by_wordnet = all(re.fullmatch(r"n\d{8}", name) for name in classes)
    expected, found = COMPLETE.get(len(classes)), (len(train), len(test))
    if named_by_wordnet and expected and found != expected and not partial:
        raise DataMissing(
            f"{root} holds {found[0]} training and {found[1]} validation images, but should hold {expected[0]} and "
            f"{expected[1]}; the option partial accepts what is there"
        )


def _by_class(folder: Path) -> list[tuple[str, str]]:
    """The class and path of each image in the class's folder or below, in the order of their names."""
    if not folder.is_dir():
        raise DataMissing(f"{folder} is missing")
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            below = [os.path.join(at, name) for at, _, names in os.walk(entry.path) for name in names]
            images = sorted(path for path in below if path.lower().endswith(SUFFIXES))
            if not images:
                raise DataMissing(f"{entry.path} holds no images")
            found += [(entry.name, path) for path in images]
    return found


def _annotated(path: Path) -> list[tuple[str, str]]:
    """The same from Tiny ImageNet's list: a line for each file in `images`, its name and class first."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    if any(len(line) < 2 for line in lines):
        raise DataMissing(f"{path} must have a file's name and its class, separated by a tab, on every line")
    return [(line[1], str(path.parent / "images" / line[0])) for line in lines]
