"""Steps of several runs in lockstep: one after another, or as one CUDA graph with a stream for each run; gradients by
each run itself, or, where networks are stacked, of all at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anon_lab.run import Run
from anon_lab.tasks import Batch

WARMUP = 3  # steps before a capture, in which libraries choose their kernels and optimizers create their state


class Steps:
    """Takes the next step of every run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._inputs: list[Batch] = []
        self._taken = 0
        self._stack = _stack(runs)

    def take(self) -> None:
        batches = [run.batch() for run in self._runs]
        if all(run.graph for run in self._runs):
            for run in reversed(self._runs):  # runs in one graph draw from one generator, with the first one's seed
                run.prepare()
            if self._taken < WARMUP:
                self._on_side_streams(batches)
            else:
                self._replay(batches)
        else:
            self._eager(batches)
        for run in self._runs:
            run.finish()
        self._taken += 1

    def _eager(self, batches: Sequence[Batch]) -> None:
        losses = self._stack(batches)
        for run, batch, loss in zip(self._runs, batches, losses, strict=True):
            run.prepare()
            _differentiate(run, batch, loss)
            run.optimizer.step()

    def _on_side_streams(self, batches: Sequence[Batch]) -> None:
        """Every run on its own stream, so that small kernels of different runs share the device."""
        if not self._streams:
            self._streams = [torch.cuda.Stream() for _ in self._runs]
        main = torch.cuda.current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        losses = self._stack(batches)
        for run, batch, loss, side in zip(self._runs, batches, losses, self._streams, strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                _differentiate(run, batch, loss)
                if run.in_graph or not capturing:
                    run.optimizer.step()
        for side in self._streams:
            main.wait_stream(side)

    def _replay(self, batches: Sequence[Batch]) -> None:
        if self._graph is None:
            self._inputs = [tuple(torch.empty_like(part) for part in batch) for batch in batches]
            self._graph = torch.cuda.CUDAGraph()
            # Only this thread's calls may break a capture: a loader's thread pins memory at any time.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._on_side_streams(self._inputs)
        into = [part for batch in self._inputs for part in batch]
        torch._foreach_copy_(into, [part for batch in batches for part in batch])
        self._graph.replay()
        for run in self._runs:
            if not run.in_graph:
                run.optimizer.step()


def _stack(runs: Sequence[Run]) -> Callable[[Sequence[Batch]], Sequence[Tensor | None]]:
    """What takes all gradients at once and returns the losses; where runs are not stacked, it leaves that to each."""
    if len({run.settings.stacked for run in runs}) > 1:
        raise ValueError("of runs that train together all are stacked, or none is")
    if not runs[0].settings.stacked:
        return lambda batches: [None] * len(batches)
    dtype = torch.bfloat16 if runs[0].settings.precision == "bf16" else torch.float32
    gradients = runs[0].task.stack([run.net for run in runs], dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return lambda batches: gradients(batches).unbind()


def _differentiate(run: Run, batch: Batch, loss: Tensor | None) -> None:
    """Leave the run's gradient in its parameters, unless that was done for all, with this loss."""
    if loss is None:
        run.gradient(batch)
    else:
        run.settle(loss)
