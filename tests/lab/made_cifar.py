"""A CIFAR-10 of noise for tests."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anon_lab.tasks import _cifar10, _images


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sheets of noise, and the facts that CIFAR-10 is checked by, for them."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pixels = rng.integers(0, 256, (10, 10, 32, 32, 3), np.uint8)
        np.save(folder / f"{split}_labels.npy", (np.arange(100) % 10).astype(np.uint8))
        Image.fromarray(pixels.transpose(0, 2, 1, 3, 4).reshape(320, 320, 3)).save(folder / f"{split}_0.png")
        if split == "train":
            share = pixels.reshape(-1, 3) / 255
            monkeypatch.setattr(_cifar10, "NORMAL", _images.Normal(tuple(share.mean(0)), tuple(share.std(0))))
    monkeypatch.setattr(_cifar10, "PER_CLASS", {"train": 10, "test": 10})
    return folder
