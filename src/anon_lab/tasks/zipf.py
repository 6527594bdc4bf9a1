"""The zipf task: bags of words by Zipf's law, so that most rows of an embedding see a gradient a few times in a run."""

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anon_lab.tasks import Batch, Recipe, Split
from anon_lab.tasks._images import IDENTITY, Classification, read_options, share_of

WORDS, CLASSES, LENGTH, WIDTH = 1000, 4, 5, 16
EVALUATED = 4000
STEPS = 1500
AHEAD = 256
"""Batches that are drawn at once, so that a step is a slice."""


class Bags(nn.Module):
    """A linear reading of the sum of the words' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=WIDTH**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).sum(1))


class Zipf(Classification):
    """To find the class for which most of a bag's words vote; the votes are hidden, the frequency of a word 1/rank."""

    unit = "bags"

    def __init__(self) -> None:
        super().__init__("zipf", Recipe(batch_size=32, steps=STEPS, schedule="constant"), Bags, IDENTITY)
        self._votes = np.random.default_rng(0).standard_normal((WORDS, CLASSES))
        self._cumulative = np.cumsum(1 / np.arange(1, WORDS + 1))

    def examples(self) -> int:
        """There is no epoch, as every bag is new; this is the usual run's."""
        return STEPS * self.recipe.batch_size

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        share = share_of(batch_size, rank, world)
        first, skipped = divmod(start, AHEAD)
        for chunk in count(first):
            words, labels = (part.to(device) for part in self.bags(batch_size * AHEAD, "train", seed, chunk))
            for step in range(skipped, AHEAD):
                place = slice(step * batch_size, (step + 1) * batch_size)
                yield words[place][share], labels[place][share]
            skipped = 0

    def batches(self, split: Split, device: torch.device) -> Iterable[Batch]:
        return [tuple(part.to(device) for part in self.bags(EVALUATED, split))]

    def bags(self, number: int, split: str, *seeds: int) -> tuple[Tensor, Tensor]:
        """Words (number, LENGTH) and classes (number,), another draw for each split and seeds."""
        rng = np.random.default_rng((("train", "validation", "test").index(split), *seeds))
        words = np.searchsorted(self._cumulative, rng.random((number, LENGTH)) * self._cumulative[-1])
        labels = self._votes[words].sum(1).argmax(1)
        return torch.from_numpy(words), torch.from_numpy(labels)


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> Zipf:
    """The task; training bags are drawn anew each time, so that nothing has to be held out."""
    del data, hold_out
    read_options("zipf", options)
    return Zipf()
