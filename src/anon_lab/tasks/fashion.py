"""The Fashion-MNIST task: a small CNN on 70,000 grey images of clothes (Xiao et al., 2017, arXiv:1708.07747)."""

import gzip
import hashlib
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from anon_lab.tasks import DataMissing, Recipe, _images
from anon_lab.tasks._images import Images

NORMAL = _images.Normal((0.2860,), (0.3530,))
N_VALIDATION = 5_000
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
# MD5 of the unpacked files: Debian packs them anew, so that those of the packed ones differ from one source to another.
CHECKSUMS = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def model() -> nn.Sequential:
    """Two convolutions, each normalised and pooled, and two linear layers: 0.42 M parameters."""
    return nn.Sequential(
        *_stage(1, 32),
        *_stage(32, 64),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> _images.InMemory:
    """The task, from the four IDX files, packed by gzip or not, in a folder or in torchvision's layout below it."""
    _images.read_options("fashion", options)
    train, test = read(find(data))
    validation = None
    if hold_out:
        train, validation = _images.hold_out(train, N_VALIDATION)
    return _images.InMemory(
        name="fashion",
        recipe=Recipe(batch_size=128, epochs=30, warmup=0.05, weight_decay=5e-4),
        build=model,
        normal=NORMAL,
        train=train,
        validation=validation,
        test=test,
        pad=2,
        flip=True,
    )


def find(data: Path | None) -> Path:
    """The folder that holds the files."""
    places = _images.places("fashion", data)
    usual = [] if data is not None else [DEBIAN]
    for folder in (*(place / below for place in places for below in ("", "FashionMNIST/raw")), *usual):
        if any(folder.glob("train-images-idx3-ubyte*")):
            return folder
    raise DataMissing(
        f"Fashion-MNIST was not found in {' or '.join(map(str, (*places, *usual)))}: put the four files of "
        "https://github.com/zalandoresearch/fashion-mnist there, or install Debian's dataset-fashion-mnist"
    )


def read(folder: Path) -> tuple[Images, Images]:
    """Training and test images, if the files are the published ones."""
    arrays = [read_idx(folder, name) for name in CHECKSUMS]
    tensors = [torch.from_numpy(array) for array in arrays]
    return Images(tensors[0][:, None], tensors[1].long()), Images(tensors[2][:, None], tensors[3].long())


def read_idx(folder: Path, name: str) -> np.ndarray:
    """A file of bytes in the IDX format: 0, 0, 8, the number of axes, each axis's length (big-endian), the bytes."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise DataMissing(f"{folder} holds neither {name} nor {name}.gz")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise DataMissing(f"{path} cannot be unpacked: {error}") from None
    axes = content[3] if len(content) > 3 and content[:3] == b"\0\0\x08" else 0
    if not axes or len(content) < 4 + 4 * axes:
        raise DataMissing(f"{path} is no IDX file of bytes")
    shape = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    promised, held = math.prod(shape), len(content) - 4 - 4 * axes
    if held != promised:
        raise DataMissing(f"{path} holds {held} bytes after its header, but should hold {promised}")
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != CHECKSUMS[name]:
        raise DataMissing(f"{path} is not the published file: its MD5 is not {CHECKSUMS[name]}")
    return np.frombuffer(bytearray(content), np.uint8, offset=4 + 4 * axes).reshape(shape)
