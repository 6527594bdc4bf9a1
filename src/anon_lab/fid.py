"""The Fréchet inception distance between two sets of images (arXiv:1706.08500); run as a module to check it."""

import argparse
import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from anon_lab import files
from anon_lab.models import inception
from anon_lab.models.inception import Inception
from anon_lab.tasks import DataMissing, _cifar10
from anon_lab.text import cache_folder

BATCH = 250
"""Images that Inception sees at once, at 299 x 299."""


@dataclass(frozen=True)
class Statistics:
    """Count, mean (d,) and unbiased covariance (d, d) of features, in float64."""

    count: int
    mean: np.ndarray
    covariance: np.ndarray

    @cached_property
    def root(self) -> np.ndarray:
        """Of the covariance, which may be singular."""
        values, vectors = np.linalg.eigh(self.covariance)
        return (vectors * np.sqrt(values.clip(min=0))) @ vectors.T


class Running:
    """Statistics of features that arrive in batches, merged so that large means cost no digits (Chan et al., 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._scatter = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """A batch (n, d)."""
        # Apple's GPUs know no float64.
        x = (features.cpu() if features.device.type == "mps" else features).double()
        mean = x.mean(0)
        centred = x - mean
        scatter = centred.T @ centred
        if self.count:
            # S = S1 + S2 + n1 n2 / (n1 + n2) d d^T, with d the means' difference
            gap = mean - self._mean
            share = len(x) / (self.count + len(x))
            scatter += self._scatter + self.count * share * torch.outer(gap, gap)
            mean = self._mean + share * gap
        self.count += len(x)
        self._mean, self._scatter = mean, scatter

    def result(self) -> Statistics:
        if self.count < 2:
            raise ValueError(f"statistics need at least 2 images, but there are {self.count}")
        return Statistics(self.count, self._mean.cpu().numpy(), (self._scatter / (self.count - 1)).cpu().numpy())


def distance(a: Statistics, b: Statistics) -> float:
    """FID = |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)).

    S1 S2 is not symmetric, but has the eigenvalues of S2^(1/2) S1 S2^(1/2), which is: their roots sum to the trace
    without complex numbers, also where the covariances are singular.
    """
    shared = np.linalg.eigvalsh(b.root @ a.covariance @ b.root).clip(min=0)
    gap = a.mean - b.mean
    return float(gap @ gap + np.trace(a.covariance) + np.trace(b.covariance) - 2 * np.sqrt(shared).sum())


@torch.no_grad()
def statistics(
    net: Inception, images: Iterable[Tensor], device: torch.device, progress: Progress | None = None, total: int = 0
) -> Statistics:
    """Of the features of uint8 images, given in batches (n, 3, h, w) of any size."""
    net = net.to(device)
    running = Running()
    bar = progress.add_task("Inception", total=total or None) if progress else None
    for batch in images:
        for part in batch.split(BATCH):
            with torch.autocast(device.type, enabled=False):  # the images may be made in less precision, not judged
                features = net(part.to(device))
            running.add(features)
            if progress is not None and bar is not None:
                progress.advance(bar, len(part))
    return running.result()


def find_weights(path: Path | None = None) -> Path:
    """The given file, else the one file in the folder inception of $ANON_DATA."""
    if path is not None:
        return path
    folder = Path(os.environ.get("ANON_DATA") or "data") / "inception"
    found = sorted([*folder.glob("*.npz"), *folder.glob("*.safetensors")])
    if len(found) != 1:
        raise DataMissing(
            f"FID needs the weights of its Inception-v3 as one .npz or .safetensors file in {folder}, but there are "
            f"{len(found)}: convert pt_inception-2015-12-05 of https://github.com/mseitzer/pytorch-fid, whose names "
            "it takes"
        )
    return found[0]


def reference(pixels: Tensor, weights: Path, device: torch.device, progress: Progress | None = None) -> Statistics:
    """The statistics of a fixed set of images, kept in the cache folder for the next time."""
    digest = hashlib.sha256(pixels.numpy().tobytes())
    digest.update(weights.read_bytes())
    path = cache_folder() / "fid" / f"{digest.hexdigest()[:16]}.npz"
    if path.exists():
        return _load(path)
    made = statistics(inception.load(weights), [pixels], device, progress, len(pixels))
    content = io.BytesIO()
    np.savez(content, count=made.count, mean=made.mean, covariance=made.covariance)
    files.write_bytes(path, content.getvalue())
    return made


@cache
def _load(path: Path) -> Statistics:
    """Kept with its root, for which every distance from it asks."""
    with np.load(path, allow_pickle=False) as saved:
        return Statistics(int(saved["count"]), saved["mean"], saved["covariance"])


def check(data: Path | None, weights: Path | None, device: torch.device, images: int | None = None) -> float:
    """FID of CIFAR-10's training images against its test images: about 3.2 when network and weights are right."""
    path = find_weights(weights)
    train, test = _cifar10.load(data)
    with Progress() as progress:
        both = [reference(split.pixels[:images], path, device, progress) for split in (train, test)]
    return distance(*both)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m anon_lab.fid", description=check.__doc__)
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--weights", type=Path, help="weights of Inception-v3, .npz or .safetensors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="of each split, for a quick look; FID grows as they get fewer")
    given = parser.parse_args()
    try:
        result = check(given.data, given.weights, torch.device(given.device), given.images)
    except DataMissing as error:
        raise SystemExit(f"fid: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"FID of CIFAR-10's training against its test images: {result:.3f}")


if __name__ == "__main__":
    main()
