"""Whether optimizers find different networks: cosines of their weights, their ensembles, and how sharp they end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anon_lab.launch import Place
from anon_lab.sharpness import largest_eigenvalue
from anon_lab.significance import verdict
from anon_lab.tables import _printed_similarity, gpt2
from anon_lab.tables._spec import Heat, Outcome, Row, Sheet, Size, Table
from anon_lab.tables._training import kept, network
from anon_lab.tables._words import NONE, as_list, over_seeds, spread
from anon_lab.tasks import Metric, Task
from anon_lab.tasks._images import Classification, evaluating
from anon_lab.tasks.gpt import POSITIONS, Gpt, Reader
from anon_lab.tasks.gpt import spread as block_starts

SHARPNESS = Metric("sharpness", "", higher_is_better=False)
ITERATIONS = 20
SAMPLE = {"full": 8, "small": 2000, "tiny": 100}
"""Training examples of the loss whose Hessian is looked at."""

SIZES = {
    "full": replace(gpt2.SIZES["full"], says=gpt2.SIZES["full"].says.replace("GPT2-small and -medium", "GPT2-small")),
    "small": Size(
        runs="similarity",
        task="cifar10",
        says="ResNet-20 on CIFAR-10 in the place of GPT2-small, 15 epochs; decay is decoupled and lr x decay is 5e-4 "
        "for all, so that weights shrink alike.",
        recipe={"epochs": 15, "warmup": 1 / 15},
        together=8,
    ),
    "tiny": Size(
        runs="similarity",
        task="digits",
        says="A small MLP on digits in the place of GPT2-small, 20 steps.",
        recipe={"steps": 20},
        seeds=2,
        evaluations=1,
    ),
}
SHRINKAGE = 5e-4
"""lr x decay, as SGD with lr 0.1, momentum 0.9 and decay 5e-4 has it."""
# lr falls from SGD's unit to Adam's as gamma rises.
GAMMAS = {-0.1: 1.0, 0.0: 1.0, 0.5: 0.03, 1.0: 1e-3, 1.1: 5e-4, 1.15: 3.5e-4}


def rows(size: str) -> list[Row]:
    if size == "full":
        return [row for row in gpt2.rows("full") if row.name in _printed_similarity.NAMES]

    def row(name: str, optimizer: str, lr: float, **hyper: Any) -> Row:
        return Row(name, optimizer, (lr,), {"weight_decay": SHRINKAGE / lr, **hyper})

    anon = [row(f"Anon γ {gamma:g}".replace("-", "−"), "Anon", lr, gamma=gamma) for gamma, lr in GAMMAS.items()]
    return [*anon, row("AdamW", "AdamW", 1e-3), row("Lion", "Lion", 1e-4), row("Muon", "Muon", 0.02)]


@dataclass(frozen=True)
class Ended:
    """What is compared of a run."""

    everything: Tensor
    """All parameters in one vector."""
    weights: Tensor
    """Those of two or more axes: no norms, no biases."""
    answers: Tensor
    """Of each test example, the probability of every class; of each test token, that of the right one."""


def measure(outcome: Outcome, task: Task, where: Place, console: Console) -> Outcome:
    """Cosines and ensembles of every two rows, seed by seed, and every run's sharpness, kept as sharpness.json."""
    examples = SAMPLE[outcome.size]
    how = {"examples": examples, "iterations": ITERATIONS}
    ended: dict[str, list[Ended]] = {}
    sharp: dict[str, list[float]] = {}
    scaled: dict[str, list[float]] = {}

    def sharpness_of(folder: Path) -> float:
        return sharpness(task, network(task, folder, where.device), where.device, examples)

    for trial in track(outcome.trials, "looking at the minima", console=console, transient=True):
        name = trial.row.name
        if len(trial.alive) < len(trial.folders):
            continue  # a pair needs the same seed on both sides
        ended[name] = [_ended(task, folder, where.device) for folder in trial.alive]
        sharp[name] = [kept(f / "sharpness.json", how, partial(sharpness_of, f)) for f in trial.alive]
        scaled[name] = [s * float(e.weights.square().sum()) for s, e in zip(sharp[name], ended[name], strict=True)]
    more = {
        "cosine_all": _matrix(ended, lambda a, b: _cosine(a.everything, b.everything)),
        "cosine_weights": _matrix(ended, lambda a, b: _cosine(a.weights, b.weights)),
        "ensemble": _matrix(
            ended, lambda a, b: quality(task, torch.stack([a.answers, b.answers]).mean(0), where.device)
        ),
        "own_cosine": {n: [_cosine(a.weights, b.weights) for a, b in combinations(e, 2)] for n, e in ended.items()},
        "own_ensemble": {
            n: [quality(task, (a.answers + b.answers) / 2, where.device) for a, b in combinations(e, 2)]
            for n, e in ended.items()
        },
        "sharpness": sharp,
        "sharpness_scaled": scaled,
        "sample": how,
    }
    return replace(outcome, more=more)


def _matrix(ended: dict[str, list[Ended]], between: Any) -> dict[str, dict[str, list[float]]]:
    """Of every two different rows, a number for each seed that they share."""
    table: dict[str, dict[str, list[float]]] = {name: {} for name in ended}
    for a, b in combinations(ended, 2):
        table[a][b] = table[b][a] = [between(x, y) for x, y in zip(ended[a], ended[b], strict=True)]
    return table


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


def _ended(task: Task, folder: Path, device: torch.device) -> Ended:
    net = network(task, folder, device)
    params = [p.detach().flatten().cpu() for p in net.parameters()]
    matrices = [p.detach().flatten().cpu() for p in net.parameters() if p.ndim >= 2]
    with torch.no_grad(), evaluating(net):
        answers = torch.cat(list(_answers(task, net, device)))
    return Ended(torch.cat(params), torch.cat(matrices), answers.cpu())


def _answers(task: Task, net: nn.Module, device: torch.device) -> Iterator[Tensor]:
    if isinstance(task, Classification):
        for pixels, _ in task.batches("test", device):
            yield task.logits(net, pixels).float().softmax(1)
        return
    assert isinstance(task, Gpt)
    reader = Reader(task.test, task.shape.block, device, resident=False)
    starts = block_starts(len(task.test), task.shape.block, task.evaluated)
    per_call = max(1, POSITIONS // task.shape.block // 4)
    for first in range(0, len(starts), per_call):
        inputs, targets = reader.batch(starts[first : first + per_call])
        logits = net(inputs).float().flatten(0, 1)
        yield logits.log_softmax(1).gather(1, targets.flatten()[:, None]).flatten().exp()


def quality(task: Task, answers: Tensor, device: torch.device) -> float:
    """The task's metric of (averaged) answers: accuracy in percent, or loss in nats per token."""
    if isinstance(task, Classification):
        labels = torch.cat([labels for _, labels in task.batches("test", device)]).cpu()
        return 100 * (answers.argmax(1) == labels).double().mean().item()
    return -answers.double().log().mean().item()


def sharpness(task: Task, net: nn.Module, device: torch.device, examples: int) -> float:
    """The largest eigenvalue of the training loss's Hessian, in eval mode, on examples that are always the same."""
    batch = next(task.stream(min(examples, task.examples()), 0, 0, device))
    # The fast kernels of attention can be differentiated once only.
    with evaluating(net), sdpa_kernel(SDPBackend.MATH):
        return largest_eigenvalue(lambda: task.loss(net, batch), list(net.parameters()), ITERATIONS)


def sheets(outcome: Outcome) -> list[Sheet]:
    metric = outcome.metric
    better = "higher" if metric.higher_is_better else "lower"
    ensembles = f"{metric.name} {metric.unit} of two networks' averaged outputs, same seed ({better} is better)"
    return [
        as_list(over_seeds("each optimizer", outcome), outcome),
        _minima(outcome),
        _pairs("cosine of all parameters, same seed", outcome, "cosine_all", _printed_similarity.ALL),
        _pairs("cosine of the weights only, same seed", outcome, "cosine_weights", _printed_similarity.WEIGHTS),
        _pairs(ensembles, outcome, "ensemble"),
    ]


def _minima(outcome: Outcome) -> Sheet:
    """What is measured of each optimizer by itself."""
    shown = {
        "sharpness λ": "sharpness",
        "λ |w|²": "sharpness_scaled",
        "cosine of two seeds": "own_cosine",
        f"{outcome.metric.name} of two seeds' ensemble": "own_ensemble",
    }
    lines = [["", *shown]]
    for row in outcome.rows:
        lines.append([row.name, *(spread(outcome.more[key].get(row.name, ())) for key in shown.values())])
    return Sheet(over_seeds("where each optimizer ends", outcome), lines)


def _pairs(title: str, outcome: Outcome, key: str, paper: _printed_similarity.Matrix | None = None) -> Sheet:
    names = [row.name for row in outcome.rows]
    short = [name.removeprefix("Anon ") for name in names]
    lines = [["", *short]]
    for a in names:
        found = outcome.more[key].get(a, {})
        lines.append([a, *(_short(key, found[b]) if b in found else NONE for b in names)])
        if paper and a in paper:
            lines.append(["  paper", *(_printed_similarity.both(paper, a, b) or NONE for b in names)])
    return Sheet(title, lines)


def _short(key: str, values: Sequence[float]) -> str:
    return f"{mean(values):#.4g}" if key == "ensemble" else f"{mean(values):.3f}"


def heats(outcome: Outcome) -> list[Heat]:
    unit = f"{outcome.metric.name} {outcome.metric.unit}"
    return [
        _heat("cosine of all parameters", outcome, "cosine_all", "cosine"),
        _heat("cosine of the weights only", outcome, "cosine_weights", "cosine"),
        _heat("ensemble of two", outcome, "ensemble", unit, outcome.metric.higher_is_better),
    ]


def _heat(title: str, outcome: Outcome, key: str, unit: str, higher_is_better: bool = True) -> Heat:
    names = [row.name for row in outcome.rows]
    found = [[outcome.more[key].get(a, {}).get(b) for b in names] for a in names]
    values = [[mean(v) if v else float("nan") for v in line] for line in found]
    words = [[_short(key, v) if v else "" for v in line] for line in found]
    short = [name.removeprefix("Anon ") for name in names]
    return Heat(title, "", "", names, short, values, words, unit, higher_is_better)


def _gamma(row: Row) -> float | None:
    return row.hyper.get("gamma")


def _others(outcome: Outcome, key: str, name: str) -> list[float]:
    """A row's numbers with the optimizers that are not Anon, averaged over them for each seed."""
    found = [values for other, values in outcome.more[key].get(name, {}).items() if not other.startswith("Anon")]
    return [mean(each) for each in zip(*found, strict=True)]


def headline(outcome: Outcome) -> str:
    anon = _anon(outcome)
    if not anon:
        return "No two networks to compare"
    least = min(anon, key=lambda row: mean(_others(outcome, "cosine_weights", row.name) or [2.0]))
    cosines = _others(outcome, "cosine_weights", least.name)
    return f"{least.name} ends least like the other optimizers' networks, at a cosine of {spread(cosines)}"


def _anon(outcome: Outcome) -> list[Row]:
    """Anon's rows that can be compared, from the lowest gamma to the highest."""
    found = [row for row in outcome.rows if _gamma(row) is not None and row.name in outcome.more["sharpness"]]
    return sorted(found, key=lambda row: _gamma(row) or 0.0)


def remarks(outcome: Outcome) -> list[str]:
    anon = _anon(outcome)
    if len(anon) < 2:
        return ["Too few of Anon's runs ended to compare their minima."]
    return [
        f"In the paper the highest γ, 1.15, is the least similar to Adam, Lion and Muon; here {headline(outcome)}.",
        _flatness(outcome, anon, "sharpness", "λ, the largest eigenvalue of the training loss's Hessian"),
        _flatness(
            outcome, anon, "sharpness_scaled", "λ |w|², which does not change when normalised layers are rescaled"
        ),
        *_gain(outcome),
        "Weights only means parameters of two or more axes. The paper prints 0.335 in one half of its matrix and 0.355 "
        "in the other for γ 1.15 with γ 1 and with Adam; both stand here.",
    ]


def _flatness(outcome: Outcome, anon: Sequence[Row], key: str, what: str) -> str:
    low, high = anon[0], anon[-1]
    a, b = (outcome.more[key][row.name] for row in (low, high))
    found = verdict(a, b, SHARPNESS) if len(a) > 1 else "tie"
    claim = {"better": "holds", "worse": "is reversed", "tie": "is a tie"}[found]
    if len(a) < 2:
        claim = "cannot be judged by one seed"
    return (
        f"The paper says that low γ leads to flatter minima. By {what}, {low.name} has {spread(a)} and {high.name} "
        f"{spread(b)}: the claim {claim} here."
    )


def _gain(outcome: Outcome) -> list[str]:
    """Whether two optimizers complement each other better than two seeds of one do."""
    own = outcome.more["own_ensemble"]
    if not all(own.values()):
        return ["With one seed there is no ensemble of two seeds to compare the ensembles of two optimizers with."]
    pairs = [(a, b) for a, b in combinations(own, 2)]
    sign = 1 if outcome.metric.higher_is_better else -1
    ahead = sum(
        sign * mean(outcome.more["ensemble"][a][b]) > max(sign * mean(own[a]), sign * mean(own[b])) for a, b in pairs
    )
    return [
        f"Of {len(pairs)} pairs of optimizers, {ahead} make a better ensemble, by their means, than two seeds of "
        "either one do: where none does, another optimizer adds no more than another seed."
    ]


TABLE = Table("How similar the optimizers' networks are", SIZES, rows, sheets, remarks, heats, headline, measure)
