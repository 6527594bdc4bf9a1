"""A small diffusion model of CIFAR-10: FID of Adam, AMSGrad, SGDM, AdaBound and Anon at gamma 1 and 1.01."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from anon_lab import fid
from anon_lab.studies._results import always, report, search
from anon_lab.studies._spec import Contender, Ground, Study, anon_defaults
from anon_lab.tasks import Metric
from anon_lab.tasks.diffusion import PRESETS, DiffusionTask

if TYPE_CHECKING:
    from anon_lab.run import Run

FID = Metric("FID", "", higher_is_better=False)
SECONDS = 0.01
ADAM_LRS = (2e-4, 5e-4, 1e-3, 2e-3)


def contenders() -> list[Contender]:
    """Each with 6 trials."""
    betas = ("betas", ((0.9, 0.99), (0.9, 0.95)))
    anon = anon_defaults()
    return [
        Contender("Adam", "Adam", (("lr", ADAM_LRS), betas)),
        Contender("Anon γ 1", "Anon", (("lr", ADAM_LRS), betas), {**anon, "gamma": 1.0}),
        Contender("Anon γ 1.01", "Anon", (("lr", ADAM_LRS), betas), {**anon, "gamma": 1.01}),
        Contender("AMSGrad", "AMSGrad", (("lr", ADAM_LRS), betas)),
        Contender("AdaBound", "AdaBound", (("lr", ADAM_LRS), ("final_lr", (0.01, 1.0)))),
        Contender("SGDM", "SGDM", (("lr", (0.01, 0.03, 0.1, 0.3)), ("momentum", (0.8, 0.95)))),
    ]


def measure(run: "Run", count: int, steps: int) -> dict[str, float]:
    """FID of samples by DDIM; it is larger than that of 50,000 samples would be, and compares only with its like."""
    assert isinstance(run.task, DiffusionTask)
    net = run.net if run.average is None else run.average.module
    with run.autocast():
        return {FID.name: run.task.fid(net, run.device, count, steps, "ddim")}


def grounds(tiny: bool) -> tuple[Ground, Ground]:
    """To tune on, and to report on; the average of weights reaches back a tenth of the run or less."""
    model = "tiny" if tiny else "small"
    recipe = PRESETS[model].recipe.changed(clip=1.0, batch_size=4 if tiny else 64)
    counts = (8, 8) if tiny else (1_000, 5_000)
    lengths = (2, 3) if tiny else (500, 2_000)
    short, long = (
        Ground(
            f"{steps} steps",
            "diffusion",
            recipe.changed(steps=steps, ema=ema),
            FID,
            SECONDS,
            {"model": model},
            together=4,
            compile=True,
            evaluations=1 if tiny else 4,
            measure=partial(measure, count=count, steps=2 if tiny else 25),
        )
        for steps, ema, count in zip(lengths, (0.98, 0.995), counts, strict=True)
    )
    return short, replace(long, tuned_on=short)


def study(tiny: bool = False) -> Study:
    short, long = grounds(tiny)

    field = always(contenders())
    return Study(
        "Diffusion on CIFAR-10, a model of 9.9 M parameters",
        "Does Anon reach a lower FID than Adam, AMSGrad, SGDM and AdaBound at this size and length?",
        [*search(field, short, rounds=2), report(field, long)],
        references=("Adam", "AMSGrad", "SGDM"),
        check=fid.find_weights,
    )
