"""A vision transformer (Dosovitskiy et al., 2021, arXiv:2010.11929) small enough for CIFAR-10."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Every patch looks at every patch, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of the {heads} heads, but is {width}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, patches, width = x.shape
        q, k, v = self.qkv(x).view(n, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)  # (n, heads, patches, width / heads)
        return self.out(y.transpose(1, 2).reshape(n, patches, width))


class Block(nn.Module):
    """Attention and a two-layer network, each added to its normalised input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, embedded with their places; blocks; the mean over patches; a linear layer.

    The mean stands in for the class token of the original, which small data sets do not need.
    """

    def __init__(
        self,
        classes: int = 10,
        image_size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 9,
        heads: int = 3,
        hidden: int = 384,
    ) -> None:
        """**Arguments:**
        - `patch`: side of a patch, in pixels; divides `image_size`.
        - `hidden`: width of the two-layer networks between their layers.
        """
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch must divide the image's {image_size} pixels, but is {patch}")
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.place = nn.Parameter(torch.zeros(1, (image_size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.place, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))
