"""Diffusion on CIFAR-10: FID of Anon at several gammas, Adam, AMSGrad, SGDM and AdaBound over learning rates."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from anon_lab import fid
from anon_lab.gaussian_diffusion import Sampler
from anon_lab.launch import Place
from anon_lab.run_folder import RunFolder
from anon_lab.significance import verdict
from anon_lab.tables._spec import Outcome, Row, Sheet, Size, Table, Trial
from anon_lab.tables._training import kept, network
from anon_lab.tables._words import as_list, by_lr, judged, spread
from anon_lab.tasks import Metric, Task
from anon_lab.tasks.diffusion import DiffusionTask

FID = Metric("FID", "", higher_is_better=False)
LOSS = Metric("loss", "L_hybrid", higher_is_better=False)
GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
EARLY = 0.1
"""The share of a run that its early stage takes."""


@dataclass(frozen=True)
class Judging:
    """How the images are made that FID looks at."""

    count: int
    steps: int
    sampler: Sampler


JUDGING = {"full": Judging(50_000, 4_000, "ddpm"), "small": Judging(2_000, 25, "ddim"), "tiny": Judging(8, 2, "ddim")}
SIZES = {
    "full": Size(
        runs="diffusion",
        task="diffusion",
        says="Improved DDPM's unconditional model of CIFAR-10, 500,000 steps; FID of 50,000 samples by all 4,000 steps "
        "against the training images. (The paper gives neither the number of steps nor of samples.)",
        options={"model": "paper"},
        seeds=1,
        evaluations=50,
    ),
    "small": Size(
        runs="diffusion",
        task="diffusion",
        says="A model a sixth as large, 1,000 steps of 64 images; FID of 2,000 samples by 25 steps of DDIM against "
        "the training images, which is larger than that of 50,000 would be; the paper's best learning rate each.",
        options={"model": "small"},
        recipe={"steps": 1_000, "batch_size": 64, "ema": 0.99},  # the task's 0.999 would still remember the start
        seeds=1,
        together=4,
        evaluations=3,
    ),
    "tiny": Size(
        runs="diffusion",
        task="diffusion",
        says="A network of two resolutions, 2 steps of 4 images; FID of 8 samples.",
        options={"model": "tiny"},
        recipe={"steps": 2, "batch_size": 4},
        seeds=1,
        evaluations=1,
    ),
}


def rows(size: str) -> list[Row]:
    adaptive = GRID if size == "full" else GRID[3:4]
    sgd = GRID if size == "full" else GRID[:1]
    return [
        Row("Adam", "Adam", adaptive, printed=(9.11,)),
        Row("AMSGrad", "AMSGrad", adaptive, printed=(8.12,)),
        Row("SGDM", "SGDM", sgd, printed=(12.84,)),
        Row("AdaBound", "AdaBound", adaptive, printed=(12.13,)),
        Row("Anon γ 1", lrs=adaptive, hyper={"gamma": 1.0}, printed=(8.03,)),
        Row("Anon γ 1.01", lrs=adaptive, hyper={"gamma": 1.01}, printed=(7.75,)),
        Row("Anon γ 1.1", lrs=adaptive, hyper={"gamma": 1.1}),
        # Outside of the paper's grid; its section on limitations speaks of them.
        Row("Anon γ 1.02", lrs=(1e-4,), hyper={"gamma": 1.02}),
        Row("Anon γ 1.15", lrs=(1e-5,), hyper={"gamma": 1.15}),
    ]


def measure(outcome: Outcome, task: Task, where: Place, console: Console) -> Outcome:
    """FID in the place of the loss; kept as fid.json in each run's folder."""
    assert isinstance(task, DiffusionTask)
    how = JUDGING[outcome.size]
    with Progress(console=console, transient=True) as progress:

        def fid_of(folder: Path) -> float:
            net = network(task, folder, where.device)
            return task.fid(net, where.device, how.count, how.steps, how.sampler, progress=progress)

        trials = [
            replace(
                trial, values=[kept(folder / "fid.json", vars(how), partial(fid_of, folder)) for folder in trial.alive]
            )
            for trial in outcome.trials
        ]
    return replace(outcome, metric=FID, trials=trials)


def sheets(outcome: Outcome) -> list[Sheet]:
    return [as_list("FID at each one's best lr", outcome), *by_lr("FID at every lr", outcome)]


def remarks(outcome: Outcome) -> list[str]:
    ours = "Anon γ 1.01"
    others = ("Adam", "AMSGrad", "SGDM", "AdaBound", "Anon γ 1")
    best = outcome.best(ours)
    return [
        *(judged(outcome, ours, name) for name in others),
        judged(outcome, "Anon γ 1", "Adam") + " In this pair IDU is meant to be the only difference.",
        f"In the paper the best lr of γ 1.01 is 1e-4; here it is {best.lr:g}." if best else "γ 1.01 diverged.",
        *_early(outcome),
        "The best lr is chosen by the FID that is shown, as in the paper.",
    ]


def _early(outcome: Outcome) -> list[str]:
    """What the paper says of training losses outside of its grid."""
    hindered, usual = (_early_losses(outcome.at(name, 1e-4)) for name in ("Anon γ 1.02", "Anon γ 1.01"))
    said = []
    if hindered and usual:
        found = verdict(hindered, usual, LOSS) if len(hindered) > 1 else "not told apart from it by one seed"
        said.append(
            f"The paper saw γ 1.02 at lr 1e-4 hinder the early training loss. Here, after {EARLY:.0%} of the run, it "
            f"is {spread(hindered)} against γ 1.01's {spread(usual)}: {found}."
        )
    low = outcome.at("Anon γ 1.15", 1e-5)
    if low and (losses := _early_losses(low)):
        final = [result["loss"] for result in low.results if not result["diverged"]]
        said.append(
            f"The paper found γ 1.15 possible at lr 1e-5. Here its training loss is {spread(losses)} after {EARLY:.0%} "
            f"of the run and {spread(final)} at its end."
        )
    return said


def _early_losses(trial: Trial | None) -> list[float]:
    """The training loss logged at the end of the early stage, of each seed that did not diverge."""
    found = []
    for folder in trial.alive if trial else ():
        records = list(RunFolder(folder).records())
        found.append(next(record["loss"] for record in records if record["step"] >= EARLY * records[-1]["step"]))
    return found


TABLE = Table("Diffusion on CIFAR-10", SIZES, rows, sheets, remarks, measure=measure, check=fid.find_weights)
