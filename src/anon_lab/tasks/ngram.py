"""The ngram task: a 4-gram language model with tied embeddings, small enough for a CPU, on a made or a given text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab.tasks import Batch, Metric, Recipe, Split, gpt
from anon_lab.tasks._images import evaluating, read_options, share_of

CONTEXT = 3
WORDS, CHAINS, LENGTH, CLASSES, EXPONENT = 3000, 2048, 400, 16, 1.4
GIVEN_VOCABULARY = 8192
"""Tokens into which a given text is cut."""
AHEAD = 64
"""Batches that are drawn at once, so that a step is a slice."""
AT_ONCE = 4096
"""4-grams that the network sees at once in an evaluation."""


class Tied(nn.Module):
    """An MLP from the vectors of three words to a vector, whose product with each word's own is that word's logit.

    Rows of rare words first see only the faint pull of the softmax, which is what makes this a trial for optimizers.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.hidden = nn.Linear(CONTEXT * width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        for layer in (self.hidden, self.out):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, context: Tensor) -> Tensor:
        vector = self.out(F.relu(self.hidden(self.embedding(context).flatten(1))))
        return vector @ self.embedding.weight.T


@dataclass(frozen=True)
class Options:
    """What `load` takes beside the data."""

    width: int = 32
    """Of the words' vectors."""
    evaluated: int = 16_384
    """The most 4-grams of a split that are evaluated, spread evenly over it."""


class Ngram:
    """To tell the next word from the last three."""

    name = "ngram"
    unit = "tokens"
    metric = Metric("loss", "nats per token", higher_is_better=False)
    recipe = Recipe(batch_size=256, steps=1000, warmup=0.05, clip=1.0, weight_decay=0.1, decay_all=False, final_lr=0.1)

    def __init__(self, train: Tensor, validation: Tensor | None, test: Tensor, words: int, options: Options) -> None:
        """**Arguments:**
        - `train`, `validation`, `test`: 4-grams, (n, 4); validation is None where nothing was held out.
        """
        self._train, self._validation, self._test = train, validation, test
        self._words, self._options = words, options

    def model(self) -> Tied:
        return Tied(self._words, self._options.width)

    def examples(self) -> int:
        return len(self._train)

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """4-grams at random places, drawn anew each step."""
        share = share_of(batch_size, rank, world)
        first, skipped = divmod(start, AHEAD)
        for chunk in count(first):
            rows = np.random.default_rng((seed, chunk)).integers(0, len(self._train), (AHEAD, batch_size))
            grams = self._train[torch.from_numpy(rows[:, share])].long().to(device)
            for step in range(skipped, AHEAD):
                yield (grams[step],)
            skipped = 0

    def units(self, batch: Batch) -> int:
        return len(batch[0])

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the fourth word, in nats."""
        grams = batch[0]
        return F.cross_entropy(net(grams[:, :CONTEXT]).float(), grams[:, CONTEXT])

    @torch.no_grad()
    def evaluate(self, net: nn.Module, split: Split, device: torch.device) -> dict[str, float]:
        """Nats per token over 4-grams at fixed places, spread over the split."""
        grams = self._validation if split == "validation" else self._test
        if grams is None:
            raise ValueError("ngram has no validation text unless it is held out: load it with hold_out")
        number = min(len(grams), self._options.evaluated)
        grams = grams[torch.arange(number) * len(grams) // number].long().to(device)
        with evaluating(net):
            total = torch.stack([self.loss(net, (part,)).double() * len(part) for part in grams.split(AT_ONCE)]).sum()
        return {"loss": total.item() / number}


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> Ngram:
    """The task.

    **Arguments:**
    - `data`: a text, as for gpt; None: one made by chance, of Zipfian words in classes that follow each other.
    - `hold_out`: whether a stretch of the training text is kept from training, for validation.
    - `options`: see `Options`.
    """
    chosen = Options(**read_options("ngram", options, **asdict(Options())))
    if data is not None:
        given = gpt.load(data, hold_out, vocabulary=GIVEN_VOCABULARY)
        parts = [None if part is None else _grams(_as_tensor(part)[None]) for part in _stretches(given)]
        return Ngram(*parts, words=given.shape.vocabulary, options=chosen)  # pyright: ignore[reportArgumentType]
    test, validation, train = made_text().split([CHAINS // 32, CHAINS // 32, CHAINS - CHAINS // 16])
    if not hold_out:
        train = torch.cat([train, validation])
    return Ngram(_grams(train), _grams(validation) if hold_out else None, _grams(test), WORDS, chosen)


def _stretches(given: gpt.Gpt) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    return given.train, given.validation, given.test


def _as_tensor(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int32))


def _grams(text: Tensor) -> Tensor:
    """Every 4-gram that lies within a line of (lines, length); a view where there is one line."""
    return text.unfold(1, CONTEXT + 1, 1).reshape(-1, CONTEXT + 1)


@lru_cache(maxsize=1)
def made_text() -> Tensor:
    """CHAINS lines of LENGTH words: a Markov chain of word classes, and Zipfian words within each; always the same."""
    rng = np.random.default_rng(0)
    frequency = (np.arange(WORDS) + 2.7) ** -EXPONENT
    member = rng.integers(0, CLASSES, WORDS)
    share = np.where(member == np.arange(CLASSES)[:, None], frequency, 0.0)
    moves = np.exp(2 * rng.standard_normal((CLASSES, CLASSES))) * share.sum(1)

    def draw(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # One sorted table for all rows: row k fills (k, k + 1], so that one search replaces a loop over rows.
        table = (weights / weights.sum(1, keepdims=True)).cumsum(1) + np.arange(len(weights))[:, None]
        found = np.searchsorted(table.ravel(), rows + rng.random(rows.shape))
        return found.clip(max=table.size - 1) % weights.shape[1]

    states = [rng.integers(0, CLASSES, CHAINS)]
    for _ in range(LENGTH - 1):
        states.append(draw(moves, states[-1]))
    return torch.from_numpy(draw(share, np.stack(states, 1)).astype(np.int32))
