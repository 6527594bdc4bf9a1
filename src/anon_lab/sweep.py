"""Fair tuning, as `anon sweep` does it: every contender gets as many trials, judged on validation examples."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from anon_lab.contenders import Contender
from anon_lab.launch import Place, labelled_bar
from anon_lab.run import Run
from anon_lab.run_folder import RunFolder
from anon_lab.settings import Settings, provenance
from anon_lab.study import ENDED, Plan, Tried, best, is_full, open_study, running, sampler, tried
from anon_lab.tasks import Metric, Task
from anon_lab.train import Every, drive

SEED = 0
"""Of every trial; the report uses others."""
UNJUDGED = 0.2
"""Share of a run in which it is not given up, however far behind."""

Report = Callable[[float, Sequence[Tried]], None]
"""Told how many trials are done, begun ones in part, and those that are over."""


@dataclass(frozen=True)
class _Claim:
    """A trial that this process, and no other, trains."""

    number: int
    folder: RunFolder
    lock: FileLock


class _AllOver(Exception):
    """No run of a lockstep has anything left to show."""


class Tuning:
    """One contender's search, as far as this process takes part in it.

    A trial belongs to the process that holds the lock in the trial's folder. The system takes the lock from a process
    that dies, however it dies, so that the next one here goes on with its trial. A trial that has no folder here is
    another machine's.
    """

    def __init__(self, task: Task, base: Settings, contender: Contender, plan: Plan, where: Place) -> None:
        self.task, self.contender, self.plan, self.where = task, contender, plan, where
        self.base = replace(base, hold_out=True, seed=SEED)
        self.study = open_study(plan, contender, base, task.metric)

    def go(self, report: Report = lambda done, trials: None) -> None:
        """Train until every trial is over or at another process."""
        report(len(self.tried()), self.tried())
        while claims := self._claim():
            try:
                self._train(claims, report)
            finally:
                for claim in claims:
                    claim.lock.release()
            report(len(self.tried()), self.tried())

    def tried(self) -> list[Tried]:
        return tried(self.study, self.contender)

    def _claim(self) -> list[_Claim]:
        """Trials for this process alone: those that were interrupted together, else as many as train at once."""
        begun = running(self.study)
        local = [number for number in begun if self._folder(number).path.exists()]
        for number in local:
            group = (self._folder(number).config() or {"group": []})["group"]
            if claims := self._hold([each for each in group if each in begun]):
                return claims
        # Begun, but killed before a word of it was written; or another machine's, if it is to be taken over.
        mine = self.plan.storage is None or self.plan.take_over
        lost = [each for each in begun if (each in local or mine) and self._folder(each).config() is None]
        claims: list[_Claim] = []
        while len(claims) < self.plan.together:
            if lost:
                claims += self._hold([lost.pop(0)])
            elif is_full(self.study, self.plan.trials):
                break
            else:
                claims += self._hold([self.study.ask().number])
        return claims

    def _hold(self, numbers: list[int]) -> list[_Claim]:
        """Take these trials, all or none; none where another process here has them or they are over."""
        with ExitStack() as stack:
            claims = []
            for number in numbers:
                folder = self._folder(number)
                folder.path.mkdir(parents=True, exist_ok=True)
                claim = _Claim(number, folder, FileLock(folder.path / "lock", timeout=0))
                try:
                    claim.lock.acquire()
                except Timeout:
                    return []
                stack.callback(claim.lock.release)
                # Machines that ask at the same moment may together ask for too many. Numbers are unique and in order,
                # so that all agree on which trials are the surplus; each withdraws its own.
                if is_full(self.study, self.plan.trials, before=number):
                    self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
                if number not in running(self.study):
                    return []
                claims.append(claim)
            stack.pop_all()
            return claims

    def _stored(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _folder(self, number: int) -> RunFolder:
        return RunFolder(self.plan.out / "trials" / self.contender.folder / str(number))

    def _train(self, claims: Sequence[_Claim], report: Report) -> None:
        """Train trials in lockstep and tell the study what came out."""
        runs: list[Run] = []
        folders: list[RunFolder] = []
        trials: list[Trial] = []
        for claim in claims:
            trial, settings = self._suggested(claim, [each.number for each in claims])
            if (result := claim.folder.result()) is not None:  # killed between the last step and here
                self._tell(trial, claim.folder, result)
                continue
            try:
                runs.append(Run(settings, self.task, self.where.device))
            except ValueError as error:  # such as a decay of more than everything: a setting that cannot work is bad
                _end(trial, f"refused: {error}")
                self._tell(trial, claim.folder, None)
                continue
            folders.append(claim.folder)
            trials.append(trial)
        if not runs:
            return
        if len(runs) < len(folders[0].config()["group"]):  # pyright: ignore[reportOptionalSubscript]
            # One of a lockstep is over already, so its checkpoint, which is of all, is of no use.
            (folders[0].path / "checkpoint.pt").unlink(missing_ok=True)
        every = Every(log=max(1, runs[0].total // 50), checkpoint=self.plan.checkpoint_every)
        try:
            results: Sequence[dict[str, Any] | None] = drive(runs, folders, every, self._watch(runs, trials, report))
        except _AllOver:
            results = [None for _ in runs]
        for trial, folder, result in zip(trials, folders, results, strict=True):
            self._tell(trial, folder, result)

    def _suggested(self, claim: _Claim, group: list[int]) -> tuple[Trial, Settings]:
        """The trial with its settings chosen, or as they were chosen before an interruption."""
        self.study.sampler = sampler(claim.number)
        trial = Trial(self.study, self._stored(claim.number)._trial_id)
        self.contender.suggest(trial)
        settings = self.contender.settings(self.base, trial.params)
        if claim.folder.config() is None:
            claim.folder.open({"settings": settings.as_json(), "group": group, **provenance(self.where.device)})
        return trial, settings

    def _watch(self, runs: Sequence[Run], trials: Sequence[Trial], report: Report) -> Callable[[Run, dict], None]:
        """Hand evaluations to the study, ask whom to give up, and end the lockstep when that is all of them.

        One that is given up beside others trains on with them, but no longer counts: else the number that train at
        once would decide about it.
        """
        by_run = {id(run): trial for run, trial in zip(runs, trials, strict=True)}
        # After an interruption, evaluations are repeated that the study has already.
        reported = {trial.number: set(self._stored(trial.number).intermediate_values) for trial in trials}
        over = {trial.number for trial in trials if ENDED in trial.user_attrs}
        before = self.tried()

        def watch(run: Run, record: dict[str, Any]) -> None:
            trial, step = by_run[id(run)], record["step"]
            value = (record.get("evaluation") or {}).get(self.task.metric.name)
            if trial.number not in over:
                if not math.isfinite(record["loss"]) or (value is not None and not math.isfinite(value)):
                    _end(trial, "diverged")
                    over.add(trial.number)
                elif value is not None and step not in reported[trial.number] and _is_behind(trial, value, step, run):
                    _end(trial, "given up")
                    over.add(trial.number)
            if len(over) == len(trials):
                raise _AllOver
            report(len(before) + len(runs) * step / run.total, before)

        return watch

    def _tell(self, trial: Trial, folder: RunFolder, result: dict[str, Any] | None) -> None:
        """Close the trial in the study; of its folder the log stays, as the best setting is trained anew."""
        value = None if result is None or result["diverged"] else result["evaluation"][self.task.metric.name]
        if value is None and ENDED not in trial.user_attrs:
            _end(trial, "diverged")
        # Another machine may have taken the trial over and have been faster: the first answer counts.
        if value is None or ENDED in trial.user_attrs:
            self.study.tell(trial.number, state=TrialState.PRUNED, skip_if_finished=True)
        else:
            self.study.tell(trial.number, value, skip_if_finished=True)
        for name in ("checkpoint.pt", "weights.safetensors"):
            (folder.path / name).unlink(missing_ok=True)


def _is_behind(trial: Trial, value: float, step: int, run: Run) -> bool:
    """Report an evaluation to the study and ask whether the trial is to be given up."""
    try:
        trial.report(value, step)
    except UpdateFinishedTrialError:  # by another machine, which took it over
        return True
    return UNJUDGED * run.total <= step < run.total and trial.should_prune()


def _end(trial: Trial, reason: str) -> None:
    with suppress(UpdateFinishedTrialError):
        trial.set_user_attr(ENDED, reason)


def tune_all(
    task: Task, base: Settings, contenders: Sequence[Contender], plan: Plan, where: Place, console: Console
) -> list[list[Tried]]:
    """Tune one contender after another, with a bar for each; return the trials of each that are over."""
    trials: list[list[Tried]] = []
    for contender in contenders:
        tuning = Tuning(task, base, contender, plan, where)
        with _progress(console, contender.label, plan.trials, task.metric) as report:
            tuning.go(report)
        trials.append(tuning.tried())
    return trials


@contextmanager
def _progress(console: Console, label: str, total: int, metric: Metric) -> Iterator[Report]:
    columns = (TextColumn("{task.fields[state]}"), TimeElapsedColumn(table_column=Column(no_wrap=True)))
    with labelled_bar(console, label, *columns) as bar:
        line = bar.add_task("", total=total, state="")

        def report(done: float, over: Sequence[Tried]) -> None:
            state = f"{len(over)} of {total} trials"
            if (leader := best(over, metric)) is not None:
                state += f", best {metric.name} {leader.value:.4g} {metric.unit}".rstrip()
            bar.update(line, completed=done, state=state)

        yield report


def table(contenders: Sequence[Contender], trials: Sequence[Sequence[Tried]], metric: Metric) -> Table:
    """What each contender's trials came to."""
    shown = Table(title=f"validation {metric.name} {metric.unit}".rstrip())
    for column in ("optimizer", "trials", "given up", "diverged", "best"):
        shown.add_column(column, justify="left" if column == "optimizer" else "right")
    shown.add_column("at")
    for contender, over in zip(contenders, trials, strict=True):
        given_up = sum(each.ended == "given up" for each in over)
        diverged = sum(each.value is None for each in over) - given_up
        leader = best(over, metric)
        found = ("none", "") if leader is None else (f"{leader.value:.4g}", in_words(leader.settings))
        shown.add_row(contender.label, str(len(over)), str(given_up), str(diverged), *found)
    return shown


def in_words(settings: dict[str, Any]) -> str:
    """Settings as "lr 0.001, betas (0.9, 0.99)"."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
