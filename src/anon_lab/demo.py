"""The demo: SGDM, AdamW and Anon at five gammas on the digits task, tuned alike and reported on fresh seeds."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from scipy.stats import t as student
from torch.optim import SGD, AdamW, Optimizer

from anon_lab.files import finite
from anon_lab.settings import versions
from anon_lab.tasks import digits
from anon_optim import Anon

BATCH = 100
MOMENTUM = 0.9
# SGD's 0, Adam's 1, the point between them, and one step as long beyond each end.
GAMMAS = (-0.5, 0.0, 0.5, 1.0, 1.5)

PACKAGES = ("torch", "numpy", "scikit-learn")  # that the numbers depend on


@dataclass(frozen=True)
class Plan:
    """How much is run: the size of every optimizer's learning-rate grid, and how often and how long each trains."""

    epochs: int = 25
    """Passes over the training images in each run."""
    rates: tuple[float, ...] = tuple(10 ** (k / 2) for k in range(-2, 3))
    """Learning rates tried, as multiples of the middle of the optimizer's own grid."""
    tuning_seeds: int = 4
    """Runs at each learning rate, to choose one by validation accuracy."""
    seeds: int = 10
    """Runs at the chosen learning rate, on seeds never used before: these are reported."""


FULL = Plan()
QUICK = Plan(epochs=3, rates=FULL.rates[1:4], tuning_seeds=1, seeds=3)


@dataclass(frozen=True)
class Entrant:
    """One optimizer setting, with the middle of the learning rates to try."""

    name: str
    gamma: float | None
    middle: float
    build: Callable[[list[torch.nn.Parameter], float], Optimizer]


def entrants() -> list[Entrant]:
    """The two baselines, then Anon in the order of gamma; nobody decays weights."""
    # Gradients of this task are around 0.01 a coordinate, so that lr = 0.01^gamma gives every gamma steps of the
    # same size: at 1 Adam's usual 0.01; at 0 it is 1, which torch's SGD, whose momentum sums and does not average,
    # calls 0.1.
    sgdm = Entrant("SGDM", None, 0.1, lambda params, lr: SGD(params, lr=lr, momentum=MOMENTUM))
    adamw = Entrant("AdamW", None, 0.01, lambda params, lr: AdamW(params, lr=lr, weight_decay=0.0))
    return [sgdm, adamw, *(_anon(gamma) for gamma in GAMMAS)]


def _anon(gamma: float) -> Entrant:
    name = f"Anon γ = {gamma:g}".replace("-", "−")
    return Entrant(name, gamma, 0.01**gamma, lambda params, lr: Anon(params, lr=lr, gamma=gamma))


@dataclass(frozen=True)
class Outcome:
    """What one optimizer setting did."""

    name: str
    gamma: float | None
    rates: list[float]
    """Learning rates tried."""
    tuning: list[list[float]]
    """Validation accuracy [learning rate][tuning seed]."""
    lr: float
    """The learning rate with the best mean of these, used from here on."""
    test: list[float]
    """Test accuracy [reported seed]."""
    loss: list[list[float]]
    """Loss on all training images, in nats [reported seed][epoch], from before the first epoch on."""

    @property
    def validation(self) -> float:
        return max(mean(accuracies) for accuracies in self.tuning)

    @property
    def at_edge(self) -> bool:
        """The chosen learning rate is the smallest or largest tried, so a better one may lie outside."""
        return self.lr in (min(self.rates), max(self.rates))

    @property
    def final_loss(self) -> float:
        return mean(losses[-1] for losses in self.loss)


@dataclass(frozen=True)
class Results:
    plan: Plan
    outcomes: list[Outcome]
    wall_s: float

    @property
    def baselines(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.gamma is None]

    @property
    def anons(self) -> list[tuple[float, Outcome]]:
        """Anon's outcomes, each after its gamma."""
        return [(outcome.gamma, outcome) for outcome in self.outcomes if outcome.gamma is not None]


def run(plan: Plan, console: Console) -> Results:
    """Tune and train every entrant, with a progress bar on the console."""
    start = time.perf_counter()
    todo = entrants()
    runs = len(todo) * (len(plan.rates) * plan.tuning_seeds + plan.seeds)
    console.print(
        f"{runs} networks: {len(todo)} optimizers × "
        f"({len(plan.rates)} learning rates × {plan.tuning_seeds} + {plan.seeds} fresh seeds)"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with one_thread(), Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=runs * plan.epochs, loss=math.nan)

        def report(description: str, loss: float) -> None:
            progress.update(bar, advance=1, description=f"{description:<14}", loss=loss)

        outcomes = [outcome_of(entrant, plan, report) for entrant in todo]
    return Results(plan, outcomes, time.perf_counter() - start)


def outcome_of(entrant: Entrant, plan: Plan, report: Callable[[str, float], None]) -> Outcome:
    data = digits.data()
    rates = [entrant.middle * factor for factor in plan.rates]

    def trained(lr: float, seed: int) -> tuple[torch.nn.Module, list[float]]:
        return _train(entrant, lr, seed, plan.epochs, lambda loss: report(entrant.name, loss))

    tuning = [
        [digits.accuracy(trained(lr, seed)[0], data.validation) for seed in range(plan.tuning_seeds)] for lr in rates
    ]
    lr = rates[max(range(len(rates)), key=lambda i: mean(tuning[i]))]
    finals = [trained(lr, plan.tuning_seeds + seed) for seed in range(plan.seeds)]
    test = [digits.accuracy(net, data.test) for net, _ in finals]
    return Outcome(entrant.name, entrant.gamma, rates, tuning, lr, test, [losses for _, losses in finals])


def _train(
    entrant: Entrant, lr: float, seed: int, epochs: int, report: Callable[[float], None]
) -> tuple[torch.nn.Module, list[float]]:
    """One network, and its loss on all training images before the first epoch and after each.

    The seed fixes the initial weights and the order of the batches, the same for every entrant.
    """
    images = digits.data().train
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = digits.model()
        orders = [torch.randperm(len(images.digits)) for _ in range(epochs)]
    optimizer = entrant.build(list(net.parameters()), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(orders[0]) / BATCH))
    losses = [_loss(net, images)]
    for order in orders:
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            digits.loss(net, digits.Images(images.pixels[batch], images.digits[batch])).backward()
            optimizer.step()
            schedule.step()
        losses.append(_loss(net, images))
        report(losses[-1])
    return net, losses


@torch.no_grad()
def _loss(net: torch.nn.Module, images: digits.Images) -> float:
    return digits.loss(net, images).item()


@contextmanager
def one_thread() -> Iterator[None]:
    """These matrices are so small that a second thread only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chosen(results: Results) -> Outcome:
    """Anon at the gamma with the best validation accuracy: gamma is tuned without a look at the test images."""
    return max((outcome for _, outcome in results.anons), key=lambda outcome: outcome.validation)


def compare(ours: Outcome, other: Outcome) -> str:
    """Whether test accuracies differ, by the 95 % interval of the mean difference over seeds run in pairs."""
    differences = [a - b for a, b in zip(ours.test, other.test, strict=True)]
    n = len(differences)
    margin = float(student.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)
    if abs(mean(differences)) <= margin:
        return "level with"
    return "ahead of" if mean(differences) > 0 else "behind"


def finding(results: Results) -> str:
    """The result in a sentence, whoever wins."""
    best = chosen(results)
    verdicts: dict[str, list[str]] = {}
    for other in results.baselines:
        verdicts.setdefault(compare(best, other), []).append(f"{other.name} ({100 * mean(other.test):.1f} %)")
    against = " and ".join(f"{verdict} {' and '.join(names)}" for verdict, names in verdicts.items())
    sentence = f"{best.name} reaches {100 * mean(best.test):.1f} % on unseen digits, {against}, seed by seed"
    if results.plan.epochs < FULL.epochs:
        sentence += f"; {results.plan.epochs} epochs are too few to judge by"
    return sentence


def loss_finding(results: Results) -> str:
    """Who fits the training images best, in a sentence; an entrant that diverged is last."""
    order = sorted(results.outcomes, key=lambda o: math.inf if math.isnan(o.final_loss) else o.final_loss)
    first, last = order[0], order[-1]
    return (
        f"{first.name} ends with the lowest training loss ({first.final_loss:.2g}), "
        f"{last.name} with the highest ({last.final_loss:.2g})"
    )


COLUMNS = ("optimizer", "γ", "lr chosen", "validation %", "test % ± sd", "training loss")
EDGE = "; * the smallest or largest learning rate tried"


def rows(results: Results) -> list[tuple[str, ...]]:
    """The table's cells, one row for each optimizer; * marks a learning rate at the edge of its grid."""
    return [
        (
            outcome.name if outcome.gamma is None else "Anon",
            "" if outcome.gamma is None else f"{outcome.gamma:g}".replace("-", "−"),
            f"{outcome.lr:.3g}" + ("*" if outcome.at_edge else ""),
            f"{100 * outcome.validation:.1f}",
            f"{100 * mean(outcome.test):.1f} ± {100 * stdev(outcome.test):.1f}",
            f"{outcome.final_loss:.2g}",
        )
        for outcome in results.outcomes
    ]


def table(results: Results) -> Table:
    """The results for the terminal."""
    caption = f"test accuracy over {results.plan.seeds} fresh seeds" + EDGE * any(o.at_edge for o in results.outcomes)
    drawn = Table(title=finding(results), caption=caption)
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column == "optimizer" else "right")
    for row in rows(results):
        drawn.add_row(*row)
    return drawn


def record(results: Results) -> dict[str, Any]:
    """Every number shown, ready for JSON; null where a run diverged."""
    summaries = [
        {
            **asdict(outcome),
            "at_edge": outcome.at_edge,
            "validation": outcome.validation,
            "test_mean": mean(outcome.test),
            "test_sd": stdev(outcome.test),
            "final_loss": outcome.final_loss,
        }
        for outcome in results.outcomes
    ]
    return finite(
        {
            "finding": finding(results),
            "loss_finding": loss_finding(results),
            "chosen": chosen(results).name,
            "against": {other.name: compare(chosen(results), other) for other in results.baselines},
            "plan": asdict(results.plan) | {"batch": BATCH},
            "images": {part: len(images.digits) for part, images in digits.data()._asdict().items()},
            "outcomes": summaries,
            "wall_s": round(results.wall_s, 1),
            "versions": versions(*PACKAGES),
        }
    )
