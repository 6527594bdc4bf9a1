"""Small diffusion models of CIFAR-10: FID of Adam, AMSGrad, SGDM, AdaBound and Anon at gamma 1 and 1.01."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from anon_lab import fid
from anon_lab.studies._grounds import HYBRID
from anon_lab.studies._results import always, report, search
from anon_lab.studies._spec import Contender, Ground, Stage, Study, anon_defaults
from anon_lab.tasks import Metric
from anon_lab.tasks.diffusion import PRESETS, DiffusionTask

if TYPE_CHECKING:
    from anon_lab.run import Run

FID = Metric("FID", "", higher_is_better=False)
DDIM_STEPS = 25


@dataclass(frozen=True)
class Length:
    """Of training."""

    steps: int
    ema: float
    """The average of weights that is sampled from reaches back a sixth of the run or less."""


@dataclass(frozen=True)
class Size:
    """A model, the lengths to tune it on and to report on, and the learning rates of Adam's kind and of SGD."""

    name: str
    model: str
    seconds: float
    tuned: Length
    reported: Length
    samples: int
    """That FID is taken of."""
    adam: tuple[float, ...]
    sgd: tuple[float, ...]
    against: int | None = None
    """Training images that samples are compared with; None: all."""
    evaluations: int = 1
    batch_size: int = 64
    ddim_steps: int = DDIM_STEPS
    compile: bool = True


ADAM_LRS = (2e-4, 5e-4, 1e-3, 2e-3)
SGD_LRS = (0.01, 0.03, 0.1, 0.3)
# The first is for a CPU, on which Inception's features take most of the time.
SIZES = (
    Size(
        "16 x 16 pixels",
        "16px",
        0.004,
        Length(300, 0.98),
        Length(1_000, 0.99),
        1_000,
        (1e-3, 2e-3, 4e-3, 8e-3),
        (0.03, 0.1, 0.3, 1.0),
        against=5_000,
        compile=False,
    ),
    Size(
        "32 x 32 pixels",
        "small",
        0.01,
        Length(500, 0.98),
        Length(2_000, 0.995),
        5_000,
        ADAM_LRS,
        SGD_LRS,
        evaluations=4,
    ),
)
TINY = Size(
    "32 x 32 pixels",
    "tiny",
    0.01,
    Length(2, 0.98),
    Length(3, 0.995),
    8,
    ADAM_LRS,
    SGD_LRS,
    batch_size=4,
    ddim_steps=2,
)


def contenders(size: Size) -> list[Contender]:
    """Each with 6 trials."""
    betas = ("betas", ((0.9, 0.99), (0.9, 0.95)))
    anon = anon_defaults()
    return [
        Contender("Adam", "Adam", (("lr", size.adam), betas)),
        Contender("Anon γ 1", "Anon", (("lr", size.adam), betas), {**anon, "gamma": 1.0}),
        Contender("Anon γ 1.01", "Anon", (("lr", size.adam), betas), {**anon, "gamma": 1.01}),
        Contender("AMSGrad", "AMSGrad", (("lr", size.adam), betas)),
        Contender("AdaBound", "AdaBound", (("lr", size.adam), ("final_lr", (0.01, 1.0)))),
        Contender("SGDM", "SGDM", (("lr", size.sgd), ("momentum", (0.8, 0.95)))),
    ]


def measure(run: "Run", count: int, steps: int, against: int | None) -> dict[str, float]:
    """FID of samples by DDIM; it is larger than that of 50,000 samples would be, and compares only with its like."""
    assert isinstance(run.task, DiffusionTask)
    net = run.net if run.average is None else run.average.module
    with run.autocast():
        return {FID.name: run.task.fid(net, run.device, count, steps, "ddim", against=against)}


def grounds(size: Size) -> tuple[Ground, Ground]:
    """To tune on, by the validation loss since FID has no validation part, and to report on."""
    recipe = PRESETS[size.model].recipe.changed(clip=1.0, batch_size=size.batch_size)
    short, long = (
        Ground(
            f"{size.name}, {length.steps:,} steps",
            "diffusion",
            recipe.changed(steps=length.steps, ema=length.ema),
            HYBRID,
            size.seconds,
            {"model": size.model},
            together=6,
            compile=size.compile,
            evaluations=size.evaluations,
        )
        for length in (size.tuned, size.reported)
    )
    judge = partial(measure, count=size.samples, steps=size.ddim_steps, against=size.against)
    return short, replace(long, metric=FID, measure=judge, tuned_on=short)


def stages(size: Size) -> list[Stage]:
    short, long = grounds(size)
    field = always(contenders(size))
    return [*search(field, short, rounds=2), report(field, long)]


def study(tiny: bool = False) -> Study:
    return Study(
        "Diffusion on CIFAR-10, models of 1.2 and 9.9 M parameters",
        "Does Anon reach a lower FID than Adam, AMSGrad, SGDM and AdaBound at these sizes and lengths?",
        [stage for size in ((TINY,) if tiny else SIZES) for stage in stages(size)],
        references=("Adam", "AMSGrad", "SGDM", "AdaBound"),
        check=fid.find_weights,
    )
