"""Whether a cheaper second moment changes how training ends: s of every r-th gradient only, and s in bfloat16.

`python -m benchmarks.second_moment [--quick] [--out DIR]` trains three small problems with Anon at the best learning
rate (chosen at r = 1 on seeds of its own) and at three times that, and compares every variant with r = 1 seed by seed.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from scipy.stats import t as student
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from anon_lab.tasks import digits
from anon_optim import Anon, _anon, _idu
from anon_optim._rounding import copy_stochastic_
from anon_optim._step import Clock

VARIANTS = {"r = 1": 1, "r = 2": 2, "r = 4": 4, "r = 8": 8, "bf16 s": 1}
CHEAPER = list(VARIANTS)[1:]
GAMMAS, LR_FACTORS, TUNING_SEEDS = (1.0, 1.1), (1, 3), (1000, 1001)
Scored = Callable[[int], tuple[Tensor, Tensor]]  # logits and labels of the t-th minibatch; of held-out data at t = 0


def digits_mlp(rng: Generator) -> tuple[nn.Module, Scored]:
    """Blank pixels and dead units have no gradient for long."""
    model, (train, *held_out) = digits.model(), digits.data()
    pixels, labels = map(torch.cat, zip(*held_out, strict=True))

    def scored(t: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(digits.N_TRAIN, (64,), generator=rng)
        return (model(train.pixels[rows]), train.digits[rows]) if t else (model(pixels), labels)

    return model, scored


def zipf_bags(rng: Generator) -> tuple[nn.Module, Scored]:
    """Classify bags of words by hidden votes; words fall as 1/rank, so most rows are seen a few times in all."""
    votes, frequencies = torch.randn(1000, 4, generator=rng), 1 / torch.arange(1, 1001)
    model = nn.Sequential(nn.EmbeddingBag(1000, 16, mode="sum", _weight=0.1 * torch.randn(1000, 16)), nn.Linear(16, 4))

    def scored(t: int) -> tuple[Tensor, Tensor]:
        count = 32 if t else 8000
        bags = torch.multinomial(frequencies, count * 5, replacement=True, generator=rng).view(count, 5)
        return model(bags), votes[bags].sum(1).argmax(1)

    return model, scored


@cache
def text(words: int, classes: int = 16, lines: int = 512, length: int = 400) -> tuple[Tensor, Tensor]:
    """4-grams to validate and to train on: a Markov chain of word classes, Zipfian words within each class."""
    rng = Generator().manual_seed(0)
    moves = torch.randn(classes, classes, generator=rng).mul(2).exp()
    states = [torch.randint(classes, (lines,), generator=rng)]
    for _ in range(length - 1):
        states.append(torch.multinomial(moves[states[-1]], 1, generator=rng).squeeze(1))
    by_rank = (torch.arange(words // classes) + 1.0) ** -1.4
    ranks = torch.multinomial(by_rank, lines * length, replacement=True, generator=rng).view(lines, length)
    grams = (torch.stack(states, 1) + classes * ranks).unfold(1, 4, 1)
    return grams[:16].reshape(-1, 4), grams[16:].reshape(-1, 4)


def tied_language_model(rng: Generator) -> tuple[nn.Module, Scored]:
    """A 4-gram MLP: rare rows mostly see the softmax's faint pull, and 250 steps end just before a refresh (256)."""
    embed = nn.Embedding(3008, 32, _weight=torch.randn(3008, 32) * 32**-0.5)
    model = nn.Sequential(embed, nn.Flatten(), nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 32))
    valid, train = text(3008)

    def scored(t: int) -> tuple[Tensor, Tensor]:
        grams = train[torch.randint(len(train), (256,), generator=rng)] if t else valid
        return model(grams[:, :3]) @ embed.weight.T, grams[:, 3]

    return model, scored


class Problem(NamedTuple):
    name: str
    make: Callable[[Generator], tuple[nn.Module, Scored]]
    steps: int
    seeds: int
    lrs: tuple[float, ...]
    cosine: bool = True
    max_norm: float = math.inf
    weight_decay: float = 0.0


PROBLEMS = (
    Problem("digits", digits_mlp, 300, 16, (3e-3, 1e-2, 3e-2, 1e-1)),
    Problem("zipf", zipf_bags, 1500, 10, (1e-2, 3e-2, 1e-1)),
    Problem("tied lm", tied_language_model, 250, 8, (4e-3, 8e-3, 1.6e-2, 3.2e-2), False, 1.0, 0.1),
)


@contextmanager
def bfloat16_s() -> Iterator[None]:
    """Round s stochastically to bfloat16 after each update, as if it were stored so."""
    exact = _anon.accumulate_  # where the step looks it up; the name in _step is not read again

    def rounded(clock: Clock, s: Tensor, w: Tensor, sample: Tensor, beta2: float) -> None:
        exact(clock, s, w, sample, beta2)
        if clock.accumulate is True:
            copy_stochastic_(kept := torch.empty_like(s, dtype=torch.bfloat16), s)
            s.copy_(kept)

    _anon.accumulate_ = rounded
    try:
        yield
    finally:
        _anon.accumulate_ = exact


@contextmanager
def every(r: int) -> Iterator[None]:
    """Make s of every r-th gradient, counted back from the refresh, each weighing as much as the ones left out."""
    accumulates, step_options = _idu.accumulates, _anon.step_options

    def sparser(t: int, growth: _idu.Growth, lazy: _idu.Lazy) -> bool:
        return accumulates(t, growth, lazy) and _idu.steps_until_used(t, growth) % r == 0

    def heavier(group: dict[str, Any]) -> Any:
        options = step_options(group)
        beta2 = options.beta2**r
        return options._replace(beta2=beta2, rule=options.rule._replace(beta2=beta2))

    _idu.accumulates, _anon.step_options = sparser, heavier
    try:
        yield
    finally:
        _idu.accumulates, _anon.step_options = accumulates, step_options


def train(problem: Problem, seed: int, gamma: float, lr: float, variant: str) -> dict[str, float]:
    """How one training ends: held-out loss in nats and error in percent."""
    torch.manual_seed(seed)
    # Data has its own generator: rounding draws from the global one and must not change what is learnt from.
    model, scored = problem.make(Generator().manual_seed(seed))
    how: dict[str, Any] = {"foreach": False, "fused": False}
    optimizer = Anon(model.parameters(), lr, gamma, weight_decay=problem.weight_decay, **how)
    with bfloat16_s() if variant == "bf16 s" else every(VARIANTS[variant]):
        for t in range(1, problem.steps + 1):
            if problem.cosine:
                optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (t - 1) / problem.steps))
            optimizer.zero_grad()
            cross_entropy(*scored(t)).backward()
            if problem.max_norm < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), problem.max_norm)
            optimizer.step()
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    if (variant == "bf16 s") != all(torch.equal(s, s.bfloat16().float()) for s in moments):
        raise RuntimeError(f"{variant}: s was not kept as the variant says")
    with torch.no_grad():
        logits, labels = scored(0)
    wrong = (logits.argmax(1) != labels).double()
    return {"loss": cross_entropy(logits, labels).item(), "error": 100 * wrong.mean().item()}


def best_lr(problem: Problem, gamma: float) -> float:
    return min(problem.lrs, key=lambda lr: sum(train(problem, s, gamma, lr, "r = 1")["loss"] for s in TUNING_SEEDS))


def difference(ends: Tensor, base: Tensor) -> tuple[float, float]:
    """Mean difference over the seeds and the half-width of its 95 % interval (Student's t)."""
    d, n = ends - base, len(base)
    return d.mean().item(), student.ppf(0.975, n - 1).item() * d.std().item() / math.sqrt(n)


def table(settings: list[dict[str, Any]], metric: str, unit: str) -> str:
    """A line for each setting, and one for each problem in which a seed's settings are averaged first."""
    lines = [f"{metric + ', ' + unit:33}{'seeds':>6}{'r = 1':>9}" + "".join(f"{v + ' - r = 1':>20}" for v in CHEAPER)]
    for name in dict.fromkeys(setting["problem"] for setting in settings):
        chosen = [setting for setting in settings if setting["problem"] == name]
        for part in [*([setting] for setting in chosen), chosen]:
            label = f"gamma {part[0]['gamma']}, {part[0]['factor']} x best lr" if len(part) == 1 else "mean of these"
            ends = {v: torch.tensor([setting[metric][v] for setting in part]).mean(0) for v in VARIANTS}
            line = f"{name:9}{label:24}{len(ends['r = 1']):6}{ends['r = 1'].mean():9.4f}"
            for mean, half in (difference(ends[v], ends["r = 1"]) for v in CHEAPER):
                line += f"{mean:+10.4f} ±{half:7.4f}{'*' if abs(mean) > half else ' '}"
            lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, 2 seeds: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for second_moment.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, settings = perf_counter(), []
    for problem in (p._replace(steps=p.steps // 10, seeds=2) if options.quick else p for p in PROBLEMS):
        for gamma in GAMMAS:
            best = best_lr(problem, gamma)
            for factor in LR_FACTORS:
                where = f"{problem.name}, gamma {gamma}, lr {factor} x {best:g}"
                print(f"{perf_counter() - begin:4.0f} s  {where}", flush=True)
                runs = {v: [train(problem, s, gamma, factor * best, v) for s in range(problem.seeds)] for v in VARIANTS}
                ends = {key: {v: [run[key] for run in runs[v]] for v in VARIANTS} for key in ("loss", "error")}
                settings.append({"problem": problem.name, "gamma": gamma, "best_lr": best, "factor": factor} | ends)
    about = {"date": date.today().isoformat(), "torch": torch.__version__, "quick": options.quick}
    print(f"\n{about['date']}, torch {torch.__version__}: mean ± 95 % interval over seeds, * where it leaves out 0\n")
    print(table(settings, "loss", "nats, held out"), table(settings, "error", "%, held out"), sep="\n\n")
    options.out.mkdir(parents=True, exist_ok=True)
    partial = options.out / "second_moment.json.partial"
    partial.write_text(json.dumps(about | {"settings": settings}) + "\n", encoding="utf-8")
    partial.replace(options.out / "second_moment.json")


if __name__ == "__main__":
    main()
