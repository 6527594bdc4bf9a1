"""GPT-2: a decoder-only transformer, with the details of nanoGPT and of Sophia's experiments."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Logits held at once, in float32 4 GiB: beyond them the loss takes the positions in pieces and computes the logits of
# a piece again on the way back, which trades one more product with the output layer for their memory.
LOGITS = 1 << 30


@dataclass(frozen=True)
class Shape:
    """How large the network is, and its few choices."""

    layers: int
    heads: int
    width: int
    block: int
    """The longest context, in tokens."""
    vocabulary: int
    """Rows of the embedding: the tokens, and padding up to a multiple of 64."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    bias: bool = False
    depth_scaled: bool = False
    """Whether layer l divides its attention scores by l, as Sophia's experiments do."""


class GPT(nn.Module):
    """Pre-norm blocks between learned embeddings and an output layer without bias."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(1, shape.layers + 1))
        self.norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialise)
        # 2 L layers write into the residual stream; this keeps its variance from growing with depth.
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits, (n, length, vocabulary); with targets, (n, length), the mean cross-entropy in nats instead."""
        length = tokens.shape[1]
        if length > self.shape.block:
            raise ValueError(f"tokens must be at most {self.shape.block} long, but are {length}")
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if targets is None else self._loss(x.flatten(0, 1), targets.flatten())

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        rows = max(1, LOGITS // self.shape.vocabulary)
        if len(x) <= rows:
            return self._summed(x, targets) / len(x)
        pieces = zip(x.split(rows), targets.split(rows), strict=True)
        # Nothing random is computed twice, so that no generator's state is kept, which a CUDA graph could not.
        sums = [checkpoint(self._summed, *p, use_reentrant=False, preserve_rng_state=False) for p in pieces]
        return torch.stack(sums).sum() / len(x)

    def _summed(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


class Block(nn.Module):
    """Attention, then an MLP four times as wide, each added to the stream."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attention = Attention(shape, layer)
        self.norm2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.widen = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.out = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.out(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Attention(nn.Module):
    """softmax(q k / (sqrt(d) s)) v over the past, with s the layer's number or 1."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.heads = shape.heads
        self.scale = 1 / (math.sqrt(shape.width / shape.heads) * (layer if shape.depth_scaled else 1))
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
