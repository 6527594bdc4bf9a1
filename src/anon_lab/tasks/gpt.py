"""The language-model task: GPT-2 in the paper's sizes, or one that trains in minutes, on any text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anon_lab import text
from anon_lab.models.gpt import GPT, Shape
from anon_lab.tasks import Batch, DataMissing, Metric, Recipe, Split
from anon_lab.tasks._images import check_choice, evaluating, places, read_options, share_of

# Tokens that fit on a device as a whole, in bytes; a larger corpus stays on the disk.
RESIDENT = 1 << 30
# Positions the network sees at once in an evaluation.
POSITIONS = 1 << 14


@dataclass(frozen=True)
class Preset:
    """A network's size with the text it is meant for and how it is trained."""

    layers: int
    heads: int
    width: int
    block: int
    vocabulary: str
    depth_scaled: bool
    recipe: Recipe


# The paper trains as Sophia's code does, after nanoGPT: 480 x 1,024 tokens a step, 100,000 steps, of which 2,000 warm
# up, bfloat16, no dropout. AdamW has betas (0.9, 0.95), and small peaks at 6e-4 and ends at 3e-5. For medium that code
# gives AdamW 3e-4 to 6e-5, but the paper found Sophia's 7e-4 to 1e-5 better for AdamW and Anon too. Sophia-G: betas
# (0.965, 0.99), decay 0.2, rho 0.05 (small) and 0.08 (medium), labels sampled every 10 steps. There embeddings did not
# decay; in nanoGPT and here they do, as matrices.
_PAPER = {"batch_size": 480, "steps": 100_000, "warmup": 0.02, "clip": 1.0, "weight_decay": 0.1, "decay_all": False}
_SHORT = {"clip": 1.0, "weight_decay": 0.1, "decay_all": False, "final_lr": 0.1, "warmup": 0.05}
PRESETS = {
    "small": Preset(12, 12, 768, 1024, "gpt2", True, Recipe(**_PAPER, final_lr=3e-5 / 6e-4)),
    "medium": Preset(24, 16, 1024, 1024, "gpt2", True, Recipe(**_PAPER, final_lr=1e-5 / 7e-4)),
    "20m": Preset(6, 8, 512, 512, "8192", False, Recipe(**_SHORT, batch_size=64, steps=1_500)),
    "1m": Preset(4, 4, 128, 128, "2048", False, Recipe(**_SHORT, batch_size=16, steps=600)),
    "tiny": Preset(2, 2, 32, 32, "bytes", False, Recipe(**_SHORT, batch_size=8, steps=200)),
}


@dataclass(frozen=True)
class Options:
    """What `load` takes beside the data."""

    model: str = "20m"
    """One of PRESETS; it sets what is None below."""
    block: int | None = None
    """Context, in tokens."""
    vocabulary: str | int | None = None
    """"gpt2", "bytes", or the number of tokens that GPT-2's first merges make."""
    tied: bool = True
    bias: bool = False
    ranks: Path | None = None
    """File of GPT-2's ranks; None: gpt2.tiktoken beside the text, else tiktoken downloads them."""
    evaluated: int = 1_000_000
    """The most tokens of a split that are evaluated, in blocks spread evenly over it; also the most held out."""


@dataclass(frozen=True)
class Gpt:
    """The task on three stretches of tokens."""

    name = "gpt"
    unit = "tokens"
    metric = Metric("loss", "nats per token", higher_is_better=False)

    shape: Shape
    recipe: Recipe
    train: np.ndarray
    validation: np.ndarray | None
    """None where nothing was held out of training."""
    test: np.ndarray
    evaluated: int

    def model(self) -> GPT:
        return GPT(self.shape)

    def examples(self) -> int:
        return (len(self.train) - 1) // self.shape.block

    def stream(
        self, batch_size: int, seed: int, start: int, device: torch.device, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Blocks at random places, drawn anew each step; every `world` shares out the same ones."""
        share = share_of(batch_size, rank, world)
        reader = Reader(self.train, self.shape.block, device, resident=True)
        end = len(self.train) - self.shape.block
        starts = (np.random.default_rng((seed, step)).integers(0, end, batch_size) for step in count(start))
        return (reader.batch(each[share]) for each in starts)

    def units(self, batch: Batch) -> int:
        return batch[0].numel()

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        inputs, targets = batch
        return net(inputs, targets)

    def sampled_loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of each token, with targets drawn from the network's own distribution."""
        logits = net(batch[0]).flatten(0, 1).float()
        # argmax_k (logit_k - ln E_k), with E_k ~ Exp(1), is a draw from the softmax.
        targets = (logits.detach() - torch.empty_like(logits).exponential_().log_()).argmax(1)
        return F.cross_entropy(logits, targets, reduction="none")

    @torch.no_grad()
    def evaluate(self, net: nn.Module, split: Split, device: torch.device) -> dict[str, float]:
        """Nats per token over blocks at fixed places, and their exponential."""
        tokens = self.validation if split == "validation" else self.test
        if tokens is None:
            raise ValueError("gpt has no validation text unless it is held out: load it with hold_out")
        reader = Reader(tokens, self.shape.block, device, resident=False)
        starts = spread(len(tokens), self.shape.block, self.evaluated)
        per_call = max(1, POSITIONS // self.shape.block)
        total = torch.zeros((), dtype=torch.float64, device=device)
        with evaluating(net):
            for first in range(0, len(starts), per_call):
                inputs, targets = reader.batch(starts[first : first + per_call])
                total += net(inputs, targets) * len(inputs)
        mean = total.cpu() / len(starts)
        return {"loss": mean.item(), "perplexity": mean.exp().item()}


def spread(length: int, block: int, limit: int) -> np.ndarray:
    """Where blocks start that do not overlap and lie evenly over the tokens: as many as fit, or as `limit` tokens."""
    count = max(1, min((length - 1) // block, limit // block))
    return np.linspace(0, length - 1 - block, count).astype(np.int64)


class Reader:
    """Blocks of tokens on a device: from its own memory when the corpus fits there, else from the disk."""

    def __init__(self, tokens: np.ndarray, block: int, device: torch.device, resident: bool):
        self.tokens, self.block, self.device = tokens, block, device
        self.copy = None
        if resident and tokens.nbytes < RESIDENT:
            # As int16, since torch indexes no uint16 on a GPU; the mask below takes the sign away.
            self.copy = torch.from_numpy(np.array(tokens).view(np.int16)).to(device)
            self.window = torch.arange(block + 1, device=device)

    def batch(self, starts: np.ndarray) -> Batch:
        """Inputs and targets, (n, block) int64 each: the targets are the tokens one further."""
        if self.copy is not None:
            places = torch.from_numpy(starts).to(self.device, non_blocking=True)[:, None] + self.window
            rows = self.copy[places].long() & 0xFFFF
        else:
            places = starts[:, None] + np.arange(self.block + 1)
            rows = torch.from_numpy(self.tokens[places].astype(np.int64)).to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load(data: Path | None = None, hold_out: bool = False, **options: Any) -> Gpt:
    """The task on a text.

    **Arguments:**
    - `data`: a text file (.txt, .txt.xz, .txt.gz) whose documents a line `<|endoftext|>` separates; a folder with
      train.txt and perhaps val.txt, packed or not; or hf:NAME, a dataset on the Hugging Face hub. None: such a
      folder, gpt or wikipedia, under $ANON_DATA or ./data.
    - `hold_out`: whether the end of the training text is kept from training, for validation.
    - `options`: see `Options`.

    The test split is val.txt; without one, the last stretch of the training text, which is then never trained on.
    """
    chosen = Options(**read_options("gpt", options, **asdict(Options())))
    check_choice("model", chosen.model, PRESETS)
    preset = PRESETS[chosen.model]
    block = int(preset.block if chosen.block is None else chosen.block)
    if block < 1:
        raise ValueError(f"block must be at least 1, but is {block}")
    source, test_source, folder = _find(data)
    vocabulary = _vocabulary(chosen.vocabulary or preset.vocabulary, chosen.ranks, folder)
    shape = Shape(
        layers=preset.layers,
        heads=preset.heads,
        width=preset.width,
        block=block,
        vocabulary=-(-vocabulary.size // 64) * 64,  # GPT-2's 50,257 become 50,304: whole tiles for the GPU
        tied=chosen.tied,
        bias=chosen.bias,
        depth_scaled=preset.depth_scaled,
    )
    train = text.tokens(source, vocabulary)
    test = None if test_source is None else text.tokens(test_source, vocabulary)
    train, validation, test = _cut(train, test, hold_out, chosen.evaluated)
    for name, part in (("training", train), ("validation", validation), ("test", test)):
        if part is not None and len(part) <= block:
            raise DataMissing(
                f"the {name} split of {source.name} must have more tokens than block = {block}, but has {len(part)}"
            )
    return Gpt(shape, preset.recipe, train, validation, test, chosen.evaluated)


def _cut(
    train: np.ndarray, test: np.ndarray | None, hold_out: bool, limit: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Training, validation and test tokens; a stretch cut from the training text is at most a twentieth of it."""
    held = min(limit, len(train) // 20)
    if test is None:
        train, test = train[: len(train) - held], train[len(train) - held :]
    if not hold_out:
        return train, None, test
    return train[: len(train) - held], train[len(train) - held :], test


def _find(data: Path | None) -> tuple[text.Source, text.Source | None, Path | None]:
    """The training text, the test text, and the folder in which ranks may lie."""
    if data is None:
        usual = [*places("gpt", None), *places("wikipedia", None)]
        data = next((folder for folder in usual if _member(folder, "train")), None)
        if data is None:
            raise DataMissing("gpt needs a text: give data, a text file or a folder with train.txt, or set $ANON_DATA")
    if str(data).startswith("hf:"):
        return text.HubDataset(str(data).removeprefix("hf:")), None, None
    data = Path(data)
    if data.is_dir():
        train, test = _member(data, "train"), _member(data, "val")
        if train is None:
            raise DataMissing(f"{data} must hold train.txt, train.txt.xz or train.txt.gz, but does not")
        return text.TextFile(train), None if test is None else text.TextFile(test), data
    if not data.exists():
        raise DataMissing(f"data {data} is not there")
    if not data.name.endswith(text.SUFFIXES):
        raise DataMissing(f"data must end in {', '.join(text.SUFFIXES)} or be a folder, but is {data}")
    return text.TextFile(data), None, data.parent


def _member(folder: Path, stem: str) -> Path | None:
    return next((path for suffix in text.SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()), None)


def _vocabulary(wanted: str | int, ranks: Path | None, folder: Path | None) -> text.Vocabulary:
    if wanted == "bytes":
        return text.Bytes()
    if wanted != "gpt2" and not str(wanted).isdecimal():
        raise ValueError(f"vocabulary must be 'gpt2', 'bytes' or a number of tokens, but is {wanted!r}")
    if ranks is None and folder is not None and (folder / text.RANKS).is_file():
        ranks = folder / text.RANKS
    return text.BytePairs(None if ranks is None else Path(ranks), None if wanted == "gpt2" else int(wanted))
