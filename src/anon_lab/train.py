"""One loop for every task: it takes steps, logs, evaluates and keeps checkpoints until the runs are over."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save as safetensors_bytes

from anon_lab.files import write_bytes
from anon_lab.run import Run
from anon_lab.run_folder import RunFolder
from anon_lab.steps import Steps
from anon_optim import state_bytes

Watch = Callable[[Run, dict[str, Any]], None]


@dataclass(frozen=True)
class Every:
    """After how many steps the loop looks up; 0 means never."""

    log: int = 50
    checkpoint: int = 1000


def drive(
    runs: Sequence[Run],
    folders: Sequence[RunFolder] | None = None,
    every: Every = Every(),  # noqa: B008 (it is frozen)
    watch: Watch = lambda run, record: None,
) -> list[dict[str, Any]]:
    """Train runs of equal length in lockstep to their end and return their results, in order.

    A run whose loss is no longer a number is over, and its result says so, as that of one that ends with no number.

    **Arguments:**
    - `folders`: where each run writes; the first also holds the checkpoint of all. None: nothing is written.
    - `watch`: called with each record as it is logged; what it raises ends the runs.
    """
    lengths = sorted({run.total for run in runs})
    if len(lengths) != 1:
        raise ValueError(f"runs must have the same number of steps, but have {lengths}")
    loop = _Loop(runs, folders or [], every, watch)
    with _interruption() as interrupted:
        loop.go(interrupted)
    return loop.results()


class _Loop:
    def __init__(self, runs: Sequence[Run], folders: Sequence[RunFolder], every: Every, watch: Watch) -> None:
        self.runs, self.every, self.watch = runs, every, watch
        self.total, self.rank = runs[0].total, runs[0].rank
        self.folders = folders if self.rank == 0 else []
        evaluations = min(runs[0].settings.evaluations, self.total)
        self.evaluate_at = {math.ceil(self.total * i / evaluations) for i in range(1, evaluations + 1)}
        # What a checkpoint keeps beside the runs themselves.
        self.seconds = 0.0  # of training alone, without evaluations and checkpoints
        self.lost = [False for _ in runs]
        self.last: list[dict[str, Any]] = [{} for _ in runs]
        if folders and (state := folders[0].load()) is not None:
            self._restore(state)
        for folder in self.folders:
            folder.rewind(self.runs[0].step)

    def go(self, interrupted: Callable[[], bool]) -> None:
        steps = Steps(self.runs)
        started = time.perf_counter()
        while self.runs[0].step < self.total and not all(self.lost):
            steps.take()
            step = self.runs[0].step
            look = step in self.evaluate_at or _is_due(step, self.every.log)
            save = _is_due(step, self.every.checkpoint) and step < self.total
            stop = self._agreed(interrupted(), ask=look or save)
            if not (look or save or stop):
                continue
            losses = [run.mean_loss() for run in self.runs] if look else []
            if self.runs[0].device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - started
            if look:
                self._look(step, losses)
            if save or stop:
                self._save()
            if stop:
                raise KeyboardInterrupt
            started = time.perf_counter()

    def _agreed(self, interrupted: bool, ask: bool) -> bool:
        """Whether to stop now: of several processes, where one was interrupted, at the next step at which all ask."""
        if self.runs[0].world == 1:
            return interrupted
        if not ask:
            return False
        flag = torch.tensor(float(interrupted), device=self.runs[0].device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    def _look(self, step: int, losses: list[float]) -> None:
        """Log where every run stands, and evaluate it where it is time."""
        for index, (run, loss) in enumerate(zip(self.runs, losses, strict=True)):
            self.lost[index] = self.lost[index] or not math.isfinite(loss)
            seconds = self.seconds - self.last[index].get("seconds", 0.0)
            record = {
                "step": step,
                "loss": loss,
                "lr": run.lr(),
                "grad_norm": run.grad_norm(),
                "seconds": self.seconds,
                f"{run.task.unit}_a_second": run.counted_units() / max(seconds, 1e-9),
            }
            if step in self.evaluate_at and not self.lost[index]:
                record["evaluation"] = self._evaluation(run)
            self.last[index] = record
            if self.folders:
                self.folders[index].log(record)
            self.watch(run, record)

    def _evaluation(self, run: Run) -> dict[str, float] | None:
        """By the first process; the others wait, so that none runs into a time limit of the next step."""
        evaluation = run.evaluate() if self.rank == 0 else None
        if run.world > 1:
            torch.distributed.barrier()
        return evaluation

    def _save(self) -> None:
        if self.folders:
            kept = {name: getattr(self, name) for name in ("seconds", "lost", "last")}
            self.folders[0].save({**kept, "runs": [run.state() for run in self.runs]})

    def _restore(self, state: dict[str, Any]) -> None:
        if len(state["runs"]) != len(self.runs):
            raise ValueError(f"the checkpoint is of {len(state['runs'])} runs together, not of {len(self.runs)}")
        for name in ("seconds", "lost", "last"):
            setattr(self, name, state[name])
        for run, saved in zip(self.runs, state["runs"], strict=True):
            run.restore(saved)

    def results(self) -> list[dict[str, Any]]:
        results = [_result(run, last, lost) for run, last, lost in zip(self.runs, self.last, self.lost, strict=True)]
        for run, folder in zip(self.runs, self.folders, strict=bool(self.folders)):
            write_bytes(folder.path / "weights.safetensors", safetensors_bytes(run.weights()))
        for folder, result in zip(self.folders, results, strict=bool(self.folders)):
            folder.finish(result)
        return results


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _result(run: Run, last: dict[str, Any], lost: bool) -> dict[str, Any]:
    """What is left to say of a run that is over. The loss of the last step is from before its update, so that it may
    still be a number where what was evaluated no longer is."""
    evaluation = None if lost else last["evaluation"]
    lost = lost or not all(map(math.isfinite, (evaluation or {}).values()))
    memory = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else None
    return {
        **run.settings.as_json(),
        "steps": run.step,
        "diverged": lost,
        "loss": last["loss"],
        "evaluation": None if lost else evaluation,
        "seconds": last["seconds"],
        "seconds_a_step": last["seconds"] / run.step,
        "parameters": sum(p.numel() for p in run.net.parameters()),
        "state_bytes": state_bytes(run.optimizer),
        "peak_memory_bytes": memory,
    }


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a question that the loop asks between steps; the second acts at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where nobody can interrupt
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
