"""Whether a cheaper second moment changes how training ends: `Storage(sample_every=r)`, and s rounded to bfloat16.

`python -m benchmarks.second_moment [--quick] [--out DIR]` trains three small problems with Anon at the best learning
rate (chosen at r = 1 on seeds of its own) and at three times that, and compares every variant with r = 1 seed by seed.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab.tasks import digits
from anon_optim import Anon, Storage, _anon
from anon_optim._rounding import copy_stochastic_
from anon_optim._step import Clock

VARIANTS = {"r = 1": 1, "r = 2": 2, "r = 4": 4, "r = 8": 8, "bf16 s": 1}
GAMMAS = (1.0, 1.1)
LR_FACTORS = (1, 3)
TUNING_SEEDS = (1000, 1001)


class Problem:
    """A model, the loss of its t-th minibatch (t from 1), and held-out data. The seed fixes all of it."""

    name: str
    steps: int
    lrs: tuple[float, ...]
    cosine = True
    max_norm = math.inf
    weight_decay = 0.0
    model: nn.Module

    def __init__(self, seed: int):
        # Data has its own generator: rounding draws from the global one and must not change what is learnt from.
        self.rng = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)

    def loss(self, t: int) -> Tensor:
        raise NotImplementedError

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Logits and labels."""
        raise NotImplementedError


class Digits(Problem):
    """An MLP on digits: blank pixels and dead units have no gradient for long."""

    name, steps, lrs = "digits", 300, (3e-3, 1e-2, 3e-2)
    batch = 64

    def __init__(self, seed: int):
        super().__init__(seed)
        self.model = digits.model()
        self.per_epoch = digits.N_TRAIN // self.batch

    def loss(self, t: int) -> Tensor:
        at = (t - 1) % self.per_epoch
        if at == 0:
            self.order = torch.randperm(digits.N_TRAIN, generator=self.rng)
        rows = self.order[at * self.batch : (at + 1) * self.batch]
        return digits.loss(self.model, digits.Images(*(part[rows] for part in digits.data().train)))

    def held_out(self) -> tuple[Tensor, Tensor]:
        pixels, labels = map(torch.cat, zip(*digits.data()[1:], strict=True))
        return self.model(pixels), labels


class ZipfBags(Problem):
    """Classify bags of words by hidden votes; words fall as 1/rank, so most rows are seen a few times in all."""

    name, steps, lrs = "zipf", 1500, (3e-3, 1e-2, 3e-2)
    words, classes, length, width, batch = 1000, 4, 5, 16, 32

    def __init__(self, seed: int):
        super().__init__(seed)
        self.votes = torch.randn(self.words, self.classes, generator=self.rng)
        self.frequencies = 1 / torch.arange(1, self.words + 1)
        embed = nn.EmbeddingBag(self.words, self.width, mode="sum")
        nn.init.normal_(embed.weight, std=0.1)
        self.model = nn.Sequential(embed, nn.Linear(self.width, self.classes))

    def scored(self, count: int) -> tuple[Tensor, Tensor]:
        drawn = torch.multinomial(self.frequencies, count * self.length, replacement=True, generator=self.rng)
        bags = drawn.view(count, self.length)
        return self.model(bags), self.votes[bags].sum(1).argmax(1)

    def loss(self, t: int) -> Tensor:
        return F.cross_entropy(*self.scored(self.batch))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.scored(8000)


class TiedLanguageModel(Problem):
    """A 4-gram MLP with tied embeddings, stopped at 250 steps, just before a refresh (256)."""

    name, steps, lrs = "tied lm", 250, (4e-3, 8e-3, 1.6e-2)
    cosine, max_norm, weight_decay = False, 1.0, 0.1
    words, width, batch = 3008, 32, 256

    def __init__(self, seed: int):
        super().__init__(seed)
        self.valid, self.train = text(self.words)
        embed = nn.Embedding(self.words, self.width)
        nn.init.normal_(embed.weight, std=self.width**-0.5)
        hidden, out = nn.Linear(3 * self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)
        self.model = nn.Sequential(embed, nn.Flatten(), hidden, nn.ReLU(), out)

    def scored(self, grams: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(grams[:, :3]) @ self.model[0].weight.T, grams[:, 3]

    def loss(self, t: int) -> Tensor:
        rows = torch.randint(len(self.train), (self.batch,), generator=self.rng)
        return F.cross_entropy(*self.scored(self.train[rows]))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.scored(self.valid)


PROBLEMS: tuple[type[Problem], ...] = (Digits, ZipfBags, TiedLanguageModel)


@cache
def text(words: int, classes: int = 16, lines: int = 512, length: int = 400) -> tuple[Tensor, Tensor]:
    """4-grams to validate and to train on: a Markov chain of word classes, Zipfian words within each class."""
    rng = torch.Generator().manual_seed(0)
    moves = torch.randn(classes, classes, generator=rng).mul(2).exp()
    states = [torch.randint(classes, (lines,), generator=rng)]
    for _ in range(length - 1):
        states.append(torch.multinomial(moves[states[-1]], 1, generator=rng).squeeze(1))
    by_rank = (torch.arange(words // classes) + 1.0) ** -1.4
    ranks = torch.multinomial(by_rank, lines * length, replacement=True, generator=rng).view(lines, length)
    grams = (torch.stack(states, 1) + classes * ranks).unfold(1, 4, 1)
    return grams[:16].reshape(-1, 4), grams[16:].reshape(-1, 4)


@contextmanager
def bfloat16_s() -> Iterator[None]:
    """Round s stochastically to bfloat16 after each update, as if it were stored so."""
    exact = _anon.accumulate_  # where the step looks it up; the name in _step is not read again

    def rounded(clock: Clock, s: Tensor, w: Tensor, sample: Tensor, beta2: float) -> None:
        exact(clock, s, w, sample, beta2)
        if clock.accumulate is True:
            kept = torch.empty_like(s, dtype=torch.bfloat16)
            copy_stochastic_(kept, s)
            s.copy_(kept)

    _anon.accumulate_ = rounded
    try:
        yield
    finally:
        _anon.accumulate_ = exact


def train(kind: type[Problem], steps: int, seed: int, gamma: float, lr: float, every: int) -> tuple[Problem, Anon]:
    problem = kind(seed)
    optimizer = Anon(
        problem.model.parameters(),
        lr=lr,
        gamma=gamma,
        weight_decay=problem.weight_decay,
        storage=Storage(sample_every=every),
        foreach=False,
        fused=False,
    )
    for t in range(1, steps + 1):
        if problem.cosine:
            optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (t - 1) / steps))
        optimizer.zero_grad()
        problem.loss(t).backward()
        if problem.max_norm < math.inf:
            nn.utils.clip_grad_norm_(problem.model.parameters(), problem.max_norm)
        optimizer.step()
    return problem, optimizer
