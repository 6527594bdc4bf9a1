"""The U-Net of improved diffusion: residual blocks at each resolution, told the time, with attention at some."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """From an image and a time in [0, 1000) to `out` channels of the same size; initially 0.

    **Arguments:**
    - `channels`: at the finest resolution; a multiple of 32, the groups of each norm.
    - `multipliers`: of the channels at each resolution; each resolution is half the one before.
    - `blocks`: residual blocks at each resolution on the way down; one more on the way up.
    - `attention`: resolutions, in pixels, at which positions attend to each other, beside the coarsest.
    - `size`: of the image, in pixels.
    """

    def __init__(
        self,
        channels: int = 128,
        multipliers: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 3,
        attention: Sequence[int] = (16, 8),
        heads: int = 4,
        dropout: float = 0.3,
        size: int = 32,
        out: int = 6,
    ):
        super().__init__()
        self.channels = channels
        time = 4 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)

        wide, skips = channels, [channels]
        last = len(multipliers) - 1
        levels = [(level, size >> level, channels * multiplier) for level, multiplier in enumerate(multipliers)]
        self.down = nn.ModuleList()
        for level, resolution, width in levels:
            stages = nn.ModuleList()
            for _ in range(blocks):
                stages.append(Stage(wide, width, time, dropout, heads if resolution in attention else 0))
                wide = width
                skips.append(wide)
            if level != last:
                skips.append(wide)
            self.down.append(Down(stages, None if level == last else nn.Conv2d(wide, wide, 3, stride=2, padding=1)))

        self.middle = nn.ModuleList(Stage(wide, wide, time, dropout, each) for each in (heads, 0))
        self.up = nn.ModuleList()
        for level, resolution, width in reversed(levels):
            stages = nn.ModuleList()
            for _ in range(blocks + 1):
                stages.append(Stage(wide + skips.pop(), width, time, dropout, heads if resolution in attention else 0))
                wide = width
            self.up.append(Up(stages, Enlarge(wide) if level else None))
        self.leave = nn.Sequential(nn.GroupNorm(32, wide), nn.SiLU(), zeroed(nn.Conv2d(wide, out, 3, padding=1)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        emb = F.silu(self.time(waves(time, self.channels)))
        skips = [self.enter(x)]
        for level in self.down:
            skips += level(skips[-1], emb)
        x = skips[-1]
        for stage in self.middle:
            x = stage(x, emb)
        for level in self.up:
            x = level(x, emb, skips)
        return self.leave(x)


class Down(nn.Module):
    """The stages at one resolution and what leads to the coarser one."""

    def __init__(self, stages: nn.ModuleList, resize: nn.Module | None):
        super().__init__()
        self.stages = stages
        self.resize = resize

    def forward(self, x: Tensor, emb: Tensor) -> list[Tensor]:
        """What each of them makes; the way up takes it back in the opposite order."""
        made = []
        for stage in self.stages:
            x = stage(x, emb)
            made.append(x)
        if self.resize is not None:
            made.append(self.resize(x))
        return made


class Up(nn.Module):
    """The stages at one resolution, each with one output of the way down, and what leads to the finer one."""

    def __init__(self, stages: nn.ModuleList, resize: nn.Module | None):
        super().__init__()
        self.stages = stages
        self.resize = resize

    def forward(self, x: Tensor, emb: Tensor, skips: list[Tensor]) -> Tensor:
        for stage in self.stages:
            x = stage(torch.cat([x, skips.pop()], 1), emb)
        return x if self.resize is None else self.resize(x)


class Stage(nn.Module):
    """A residual block whose second norm is scaled and shifted by the time, then perhaps attention."""

    def __init__(self, wide: int, width: int, time: int, dropout: float, heads: int):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, wide), nn.SiLU(), nn.Conv2d(wide, width, 3, padding=1))
        self.time = nn.Linear(time, 2 * width)
        self.norm = nn.GroupNorm(32, width)
        self.second = nn.Sequential(nn.SiLU(), nn.Dropout(dropout), zeroed(nn.Conv2d(width, width, 3, padding=1)))
        self.skip = nn.Identity() if wide == width else nn.Conv2d(wide, width, 1)
        self.attention = Attention(width, heads) if heads else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.time(emb)[:, :, None, None].chunk(2, 1)
        h = self.norm(self.first(x)) * (1 + scale) + shift
        return self.attention(self.skip(x) + self.second(h))


class Attention(nn.Module):
    """Every position attends to every other; added to the input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = zeroed(nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, width, height, breadth = x.shape
        qkv = self.qkv(self.norm(x)).view(n, 3, self.heads, width // self.heads, height * breadth)
        q, k, v = qkv.transpose(3, 4).unbind(1)  # (n, heads, positions, width / heads) each
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(2, 3).reshape(n, width, height, breadth))


class Enlarge(nn.Module):
    """Twice the resolution: each pixel four times, then a convolution."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


def waves(time: Tensor, width: int) -> Tensor:
    """cos and sin of time / 10000^(k / (width / 2)), k = 0, 1, ...: (n, width)."""
    half = width // 2
    rates = torch.exp(-math.log(10_000) / half * torch.arange(half, device=time.device))
    angles = time.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1)


def zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with all its weights 0, so that a residual branch starts as nothing."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
