"""The diffusion task: an unconditional model of CIFAR-10, as in Improved DDPM (Nichol and Dhariwal, 2021)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab import fid
from anon_lab.gaussian_diffusion import Diffusion, Losses, Sampler, cosine_betas
from anon_lab.models import inception
from anon_lab.models.unet import UNet
from anon_lab.tasks import Batch, Metric, Recipe, Split, _cifar10
from anon_lab.tasks._images import CHUNK, IDENTITY, Images, InMemory, check_choice, evaluating, read_options
from anon_lab.tasks._images import hold_out as _hold_out
from anon_lab.tasks.cifar10 import N_VALIDATION

SIZE = 32
"""Pixels on a side of CIFAR-10's images."""
EVALUATED = 250
"""Images that are evaluated at once."""


@dataclass(frozen=True)
class Preset:
    """A network, the length of its noising process, and how it is trained."""

    build: Callable[[], UNet]
    steps: int
    flip: bool
    """Whether half of the training images are mirrored."""
    recipe: Recipe
    pool: int = 1
    """Each pixel is the mean of a square of so many on a side."""


# The paper trains as OpenAI's improved-diffusion does for CIFAR-10 with L_hybrid: Adam with lr 1e-4, which stays, no
# decay, no flips, and the averaged weights are sampled from. Its published weights had 500,000 steps.
PRESETS = {
    "paper": Preset(UNet, 4_000, False, Recipe(batch_size=128, steps=500_000, schedule="constant", ema=0.9999)),
    # A smaller one for comparisons on one GPU: 9.9 M parameters against 52.5 M, a quarter of the steps of noise.
    "small": Preset(
        lambda: UNet(channels=64, blocks=2, dropout=0.1),
        1_000,
        True,
        Recipe(batch_size=128, steps=20_000, warmup=0.02, schedule="constant", ema=0.999),
    ),
    # One that a CPU trains in minutes: 1.2 M parameters, images of a quarter as many pixels.
    "16px": Preset(
        lambda: UNet(channels=32, multipliers=(1, 2, 2), blocks=1, attention=(8,), dropout=0.0, size=16),
        1_000,
        True,
        Recipe(batch_size=64, steps=1_000, warmup=0.02, schedule="constant", ema=0.99),
        pool=2,
    ),
    "tiny": Preset(
        lambda: UNet(channels=32, multipliers=(1, 1), blocks=1, attention=(), heads=1, dropout=0.0),
        50,
        True,
        Recipe(batch_size=8, steps=20, schedule="constant", ema=0.9),
    ),
}


class DiffusionTask:
    """To tell the noise from the image, at every strength of noise."""

    name = "diffusion"
    unit = "images"
    metric = Metric("loss", "L_hybrid", higher_is_better=False)

    def __init__(self, preset: Preset, images: InMemory, reference: Tensor):
        """**Arguments:**
        - `images`: the source of batches.
        - `reference`: uint8 pixels that samples are compared with.
        """
        self.recipe = preset.recipe
        self.diffusion = Diffusion(cosine_betas(preset.steps))
        self._build = preset.build
        self._size = SIZE // preset.pool
        self._images = images
        self._reference = reference

    def model(self) -> UNet:
        return self._build()

    def examples(self) -> int:
        return self._images.examples()

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        batches = self._images.stream(batch_size, seed, start, device, rank, world)
        return ((pixels,) for pixels, _ in batches)

    def units(self, batch: Batch) -> int:
        return len(batch[0])

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Mean L_hybrid at a random t of each image."""
        x0 = scaled(batch[0])
        t = torch.randint(self.diffusion.steps, (len(x0),), device=x0.device)
        return self.diffusion.hybrid(self.diffusion.losses(net, x0, t, torch.randn_like(x0))).mean()

    @torch.no_grad()
    def evaluate(self, net: nn.Module, split: Split, device: torch.device) -> dict[str, float]:
        """L_hybrid and its parts, each image at one t; the ts lie evenly over the process.

        The bound on the negative log-likelihood, in bits per dimension, is an estimate: T times the mean term at these
        ts, and the prior's.
        """
        images = [part for pixels, _ in self._images.batches(split, device) for part in pixels.split(EVALUATED)]
        count = sum(map(len, images))
        # On the host, so that every device sees the same noise.
        order = np.random.default_rng(0).permutation(count)
        ts = torch.from_numpy((order + 0.5) * self.diffusion.steps // count).long().to(device)
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros(3, dtype=torch.float64, device=device)
        with evaluating(net):
            for pixels, t in zip(images, ts.split(EVALUATED), strict=True):
                x0 = scaled(pixels)
                noise = torch.randn(x0.shape, generator=generator).to(device)
                mse, vlb = self.diffusion.losses(net, x0, t, noise)
                total += torch.stack([mse.sum(), vlb.sum(), self.diffusion.prior(x0).sum()])
        mse, vlb, prior = total / count
        loss = self.diffusion.hybrid(Losses(mse, vlb))
        return {
            "loss": loss.item(),
            "mse": mse.item(),
            "bits per dimension": (self.diffusion.steps * vlb + prior).item(),
        }

    def samples(
        self,
        net: nn.Module,
        count: int,
        device: torch.device,
        steps: int = 250,
        sampler: Sampler = "ddpm",
        batch: int = 500,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Iterator[Tensor]:
        """Images that the network makes, uint8 (n, 3, size, size), in batches; in eval mode.

        **Arguments:**
        - `steps`: how many of the process's steps are taken, evenly apart.
        """
        process = self.diffusion.respaced(min(steps, self.diffusion.steps))
        generator = torch.Generator(device).manual_seed(seed)
        bar = progress.add_task("sampling", total=count) if progress else None
        with evaluating(net):
            for first in range(0, count, batch):
                shape = (min(batch, count - first), 3, self._size, self._size)
                noise = torch.randn(shape, generator=generator, device=device)
                x = process.sample(net, noise, sampler, generator)
                yield ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
                if progress is not None and bar is not None:
                    progress.advance(bar, shape[0])

    def fid(
        self,
        net: nn.Module,
        device: torch.device,
        count: int = 10_000,
        steps: int = 250,
        sampler: Sampler = "ddpm",
        weights: Path | None = None,
        progress: Progress | None = None,
        against: int | None = None,
    ) -> float:
        """FID of `count` samples against all training images, or the first `against` of them.

        It falls as images get more on either side, so that only numbers of equally many compare; the literature's have
        50,000 and 50,000.

        **Arguments:**
        - `weights`: of FID's Inception-v3; None: those in $ANON_DATA/inception.
        """
        path = fid.find_weights(weights)
        reference = fid.reference(self._reference[:against], path, device, progress)
        samples = self.samples(net, count, device, steps, sampler, progress=progress)
        return fid.distance(fid.statistics(inception.load(path), samples, device), reference)


def scaled(pixels: Tensor) -> Tensor:
    """From 0..255 to [-1, 1]."""
    return pixels.float() / 127.5 - 1


def pooled(images: Images, pool: int) -> Images:
    """Each pixel the mean of a square of `pool` x `pool`."""
    if pool == 1:
        return images
    parts = [F.avg_pool2d(part.float(), pool) for part in images.pixels.split(CHUNK)]
    return Images(torch.cat(parts).round().to(torch.uint8), images.labels)


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> DiffusionTask:
    """The task, on CIFAR-10 in any of the formats that `anon_lab.tasks._cifar10` reads.

    **Arguments:**
    - `options`: `model`, "paper", "small", "16px" or "tiny", which also decides the process, the recipe and the images'
      size; `flip`, whether half of the training images are mirrored, if not as the model's preset says.
    """
    chosen = read_options("diffusion", options, model="small", flip=None)
    check_choice("model", chosen["model"], PRESETS)
    preset = PRESETS[chosen["model"]]
    train, test = (pooled(images, preset.pool) for images in _cifar10.load(data))
    reference, validation = train.pixels, None
    if hold_out:
        train, validation = _hold_out(train, N_VALIDATION)
    images = InMemory(
        name="diffusion",
        recipe=preset.recipe,
        build=preset.build,
        normal=IDENTITY,
        train=train,
        validation=validation,
        test=test,
        flip=preset.flip if chosen["flip"] is None else chosen["flip"],
    )
    return DiffusionTask(preset, images, reference)
