"""A contender's trials, as Optuna keeps them: one study for each contender, which any number of machines can share."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from anon_lab.contenders import Contender
from anon_lab.settings import Settings, difference
from anon_lab.tasks import Metric

RANDOM_TRIALS = 8
"""Before the sampler learns from what was found."""
JUDGED_TRIALS = 4
"""That have to be complete before any is given up."""
ENDED = "ended"
"""The name under which a trial says why it has no value."""

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclass(frozen=True)
class Plan:
    """How a sweep is carried out, the same for every contender."""

    trials: int
    out: Path
    name: str = "sweep"
    """Of the sweep in a storage that holds several."""
    storage: str | None = None
    """Any Optuna storage address; machines that share one share the work. None: a file in `out`."""
    together: int = 1
    """Trials that train at once, in one process."""
    prune: bool = True
    """Whether a trial that is behind the median of the others at the same step is given up."""
    checkpoint_every: int = 500
    take_over: bool = False
    """Whether to start trials again that other machines began and have not finished."""


@dataclass(frozen=True)
class Tried:
    """A trial that is over."""

    number: int
    settings: dict[str, Any]
    """All of the optimizer's, lr and what was fixed included."""
    value: float | None
    """The validation metric after the last step; None where the trial did not get there."""
    ended: str | None
    """Why it has no value: "given up", "diverged" or "refused: ..."."""
    found: dict[str, Any]
    """What Optuna chose, before gamma's unit."""


def open_study(plan: Plan, contender: Contender, base: Settings, metric: Metric) -> optuna.Study:
    """The contender's study, created or continued; a ValueError where it was begun by other rules."""
    median = optuna.pruners.MedianPruner(n_startup_trials=JUDGED_TRIALS)
    study = optuna.create_study(
        storage=open_storage(plan),
        study_name=f"{plan.name}: {contender.label}",
        sampler=optuna.samplers.RandomSampler(),  # replaced as soon as a trial has its number
        pruner=median if plan.prune else optuna.pruners.NopPruner(),
        direction="maximize" if metric.higher_is_better else "minimize",
        load_if_exists=True,
    )
    rules = {"base": base.as_json(), "contender": contender.as_json(), "prune": plan.prune}
    if (before := study.user_attrs.get("rules")) is None:
        study.set_user_attr("rules", rules)
    elif changed := difference(rules, {**before, "base": Settings.from_json(before["base"]).as_json()}):
        raise ValueError(f"the storage holds another sweep called {plan.name!r}, in which {changed}: choose a --name")
    return study


def sampler(number: int) -> optuna.samplers.BaseSampler:
    """What chooses the settings of the trial of this number.

    Seeded by the number alone: every contender begins with the same random points of its own ranges, a sweep that was
    interrupted goes on as if it had not been, and machines that work side by side never draw the same numbers.
    """
    # Mixed, because generators with small seeds begin alike: 0 and 3 differ by 0.01 in their first two numbers.
    seed = int(np.random.SeedSequence(number).generate_state(1)[0])
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)


def tried(study: optuna.Study, contender: Contender) -> list[Tried]:
    """The trials that are over, given up and diverged ones included."""
    return [
        Tried(
            number=trial.number,
            settings=contender.numbers(trial.params),
            value=trial.value if trial.state == TrialState.COMPLETE else None,
            ended=trial.user_attrs.get(ENDED),
            found=trial.params,
        )
        for trial in _counted(study)
        if trial.state != TrialState.RUNNING
    ]


def running(study: optuna.Study) -> dict[int, FrozenTrial]:
    """The trials that are begun and not over, here or elsewhere, by number."""
    return {trial.number: trial for trial in _counted(study) if trial.state == TrialState.RUNNING}


def is_full(study: optuna.Study, trials: int, before: int | None = None) -> bool:
    """Whether the study has its trials; given a number, whether it has them before the trial of that number."""
    return sum(before is None or trial.number < before for trial in _counted(study)) >= trials


def best(trials: Sequence[Tried], metric: Metric) -> Tried | None:
    """The one to report on, the earliest of equals; None where none has a value."""
    sign = 1 if metric.higher_is_better else -1
    return max(
        (each for each in trials if each.value is not None), key=lambda each: sign * (each.value or 0), default=None
    )


def without_password(storage: str | None) -> str | None:
    """The address as it may be written into a file."""
    return None if storage is None else re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", storage)


def _counted(study: optuna.Study) -> list[FrozenTrial]:
    """All but those that were one too many; see `Tuning._claim`."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]


def open_storage(plan: Plan) -> RDBStorage:
    here = URL.create("sqlite", database=str(plan.out.absolute() / "sweep.db"))
    try:
        address = here if plan.storage is None else make_url(plan.storage)
        kwargs = {}
        if address.get_backend_name() == "sqlite":
            plan.out.mkdir(parents=True, exist_ok=True)  # where the file may lie
            # One process at a time writes to it; the others wait for so many seconds.
            kwargs["connect_args"] = {"timeout": 120}
        return _patiently_opened(address.render_as_string(hide_password=False), kwargs)
    except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
        sentence = str(error).splitlines()[0]
        raise ValueError(f"--storage {without_password(plan.storage) or here} cannot be opened: {sentence}") from None


def _patiently_opened(address: str, kwargs: dict[str, Any]) -> RDBStorage:
    """Open a storage that others may be creating at this moment, table by table."""
    for pause in (0.1, 0.3, 1.0):
        try:
            return RDBStorage(address, engine_kwargs=kwargs)
        except SQLAlchemyError:
            time.sleep(pause)
    return RDBStorage(address, engine_kwargs=kwargs)
