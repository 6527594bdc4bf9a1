"""CIFAR-10 from disk: the official batches for Python or C, or sheets of images; checked before they are used."""

import hashlib
import pickletools
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from anon_lab.tasks import DataMissing, _images
from anon_lab.tasks._images import Images

PIXELS = 3 * 32 * 32
NORMAL = _images.Normal((0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159))
PER_CLASS = {"train": 5_000, "test": 1_000}
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
# MD5 of the official batches for Python.
CHECKSUMS = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def load(data: Path | None = None) -> tuple[Images, Images]:
    """Training and test images, from the given folder or the usual places."""
    places = _images.places("cifar10", data)
    for place in places:
        for folder in (place, place / "cifar-10-batches-py", place / "cifar-10-batches-bin"):
            if any((folder / name).is_file() for name in ("data_batch_1", "data_batch_1.bin", "train_labels.npy")):
                return _load(folder.absolute())
    raise DataMissing(
        f"CIFAR-10 was not found in {' or '.join(map(str, places))}: put cifar-10-batches-py or cifar-10-batches-bin "
        "from https://www.cs.toronto.edu/~kriz/cifar.html there"
    )


@lru_cache(maxsize=1)  # a study loads the task for each of its runs, and unpacking the sheets takes seconds
def _load(folder: Path) -> tuple[Images, Images]:
    train, test = read(folder, "train"), read(folder, "test")
    for split, images in (("train", train), ("test", test)):
        found = torch.bincount(images.labels, minlength=10).tolist()
        if found != [PER_CLASS[split]] * 10:
            raise DataMissing(
                f"{folder} is not CIFAR-10: its {split} classes have {', '.join(map(str, found))} images, "
                f"but should have {PER_CLASS[split]} each"
            )
    for kind, values, expected in zip(("mean", "std"), moments(train), NORMAL, strict=True):
        if not np.allclose(values, expected, atol=1e-3, rtol=0):
            shown = ", ".join(f"{value:.4f}" for value in values)
            raise DataMissing(f"{folder} is not CIFAR-10: the {kind} of its training pixels is {shown}, not {expected}")
    return train, test


def read(folder: Path, split: str) -> Images:
    """One split in whichever format the folder has."""
    if (folder / "data_batch_1").is_file():
        arrays = [read_python(folder / name) for name in BATCHES[split]]
    elif (folder / "data_batch_1.bin").is_file():
        arrays = [read_binary(folder / f"{name}.bin") for name in BATCHES[split]]
    else:
        arrays = [read_sheets(folder, split)]
    pixels, labels = (np.concatenate(each) for each in zip(*arrays, strict=True))
    return Images(torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels).long())


def read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A batch for Python, (n, 3072) pixels and (n,) labels, without unpickling it.

    A pickle is a program. This one's instructions are listed, none is run: the pixels are the one string after the key
    "data" that is long enough to hold an image, and the labels are the integers after the key "labels".
    """
    content = _bytes(path)
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != CHECKSUMS[path.name]:
        raise DataMissing(f"{path} is not the official file: its MD5 is not {CHECKSUMS[path.name]}")
    key, pixels, labels = "", b"", []
    for operation, argument, _ in pickletools.genops(content):
        if isinstance(argument, str) and "STRING" in operation.name:
            if argument in ("data", "labels", "filenames", "batch_label"):
                key = argument
            elif key == "data" and len(argument) >= PIXELS:
                pixels = argument.encode("latin-1")
        elif key == "labels" and operation.name in ("BININT1", "BININT2", "BININT"):
            labels.append(argument)
    if not labels or len(pixels) != PIXELS * len(labels):
        raise DataMissing(f"{path} holds {len(pixels)} bytes of pixels for {len(labels)} labels, not {PIXELS} for each")
    return np.frombuffer(pixels, np.uint8).reshape(-1, PIXELS), np.array(labels, np.uint8)


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A batch for C, (n, 3072) pixels and (n,) labels: a byte of label and the red, green and blue pixels, n times."""
    content = np.frombuffer(_bytes(path), np.uint8)
    if not content.size or content.size % (1 + PIXELS):
        raise DataMissing(f"{path} holds {content.size} bytes, which is no multiple of the {1 + PIXELS} of an image")
    records = content.reshape(-1, 1 + PIXELS)
    return records[:, 1:], records[:, 0]


def read_sheets(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """A split of sheets, (n, 3072) pixels and (n,) labels.

    Each lossless `SPLIT_*.webp` or `.png` is a square grid of images, read row by row; `SPLIT_labels.npy` names all.
    """
    path = folder / f"{split}_labels.npy"
    try:
        labels = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing") from None
    except (ValueError, EOFError, OSError) as error:
        raise DataMissing(f"{path} cannot be read: {error}") from None
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataMissing(f"{path} must hold a row of integers, but holds {labels.dtype} of shape {labels.shape}")
    sheets = sorted(path for path in folder.glob(f"{split}_*") if path.suffix in (".webp", ".png"))
    pixels = np.concatenate([np.empty((0, PIXELS), np.uint8), *map(_read_sheet, sheets)])
    if len(pixels) != len(labels):
        raise DataMissing(f"{folder} has {len(pixels)} {split} images in {len(sheets)} sheets for {len(labels)} labels")
    return pixels, labels


def _read_sheet(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            sheet = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataMissing(f"{path} cannot be read as an image: {error}") from None
    rows, columns = sheet.shape[0] // 32, sheet.shape[1] // 32
    if sheet.shape[:2] != (32 * rows, 32 * columns) or rows != columns:
        raise DataMissing(f"{path} must be a square grid of 32 x 32 images, but has {sheet.shape[:2]} pixels")
    # (row, y, column, x, channel) to (row, column, channel, y, x)
    return sheet.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, PIXELS)


def moments(images: Images) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, in [0, 1], counted exactly."""
    values = np.arange(256) / 255
    counts = [torch.bincount(channel.flatten(), minlength=256).numpy() for channel in images.pixels.unbind(1)]
    shares = [count / count.sum() for count in counts]
    mean = np.array([share @ values for share in shares])
    square = np.array([share @ values**2 for share in shares])
    return mean, np.sqrt(square - mean**2)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataMissing(f"{path} is missing") from None
