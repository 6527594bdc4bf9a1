"""Steps of several runs in lockstep: one after another, or as one CUDA graph with a stream for each run."""

from collections.abc import Sequence

import torch

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
        for run, batch in zip(self._runs, batches, strict=True):
            run.prepare()
            run.gradient(batch)
            run.optimizer.step()

    def _on_side_streams(self, batches: Sequence[Batch]) -> None:
        """Every run on its own stream, so that small kernels of different runs share the device."""
        if not self._streams:
            self._streams = [torch.cuda.Stream() for _ in self._runs]
        main = torch.cuda.current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        for run, batch, side in zip(self._runs, batches, self._streams, strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                run.gradient(batch)
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
