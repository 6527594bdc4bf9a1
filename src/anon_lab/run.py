"""One training run in memory: a network, its optimizer and its data, and how they take a step."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, update_bn

from anon_lab import optimizers
from anon_lab.schedule import lr_share
from anon_lab.settings import Settings
from anon_lab.tasks import Batch, Task
from anon_optim import decay_groups

# How each optimizer is told to keep its step counts and learning rate on the device, so that a CUDA graph can hold its
# step. The others step outside of the graph.
IN_GRAPH: dict[str, dict[str, Any]] = {
    "SGD": {"fused": True},
    "SGDM": {"fused": True},
    "Adam": {"fused": True, "capturable": True},
    "AdamW": {"fused": True, "capturable": True},
    "AMSGrad": {"fused": True, "capturable": True},
    "AMSGradW": {"fused": True, "capturable": True},
    "Anon": {"capturable": True},
    "Anon (variant)": {"capturable": True},
}

STATISTICS_BATCHES = 100  # of training data, from which BatchNorm's statistics for averaged weights are estimated


def check(settings: Settings, task: Task, device: torch.device, world: int = 1) -> None:
    """Refuse what could not be trained, whatever the optimizer's numbers are, before anything is."""
    entry = optimizers.get(settings.optimizer)
    if settings.graph and device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a CUDA device, but this is {device}")
    if settings.graph and world > 1:
        raise ValueError("a CUDA graph holds the steps of one process, but there are several")
    if settings.stacked:
        _check_stacked(settings, task, device, world)
    if entry.needs in ("create_graph", "sampled_loss") and world > 1:
        raise ValueError(f"{entry.name} differentiates in a way that several processes do not share: train it in one")
    if entry.needs == "sampled_loss" and not hasattr(task, "sampled_loss"):
        raise ValueError(f"{entry.name} needs labels drawn from the network, which {task.name} has none of")
    if "lr" in settings.hyper:
        raise ValueError("lr is a setting of its own, not one of the optimizer's others")


def _check_stacked(settings: Settings, task: Task, device: torch.device, world: int) -> None:
    try:
        from anon_lab.models import stacked
    except ImportError as error:
        raise ValueError(f"stacked needs Triton, which cannot be imported ({error})") from None
    if not hasattr(task, "stack") or not stacked.fits(task.model()):
        raise ValueError(f"stacked needs residual networks for small images, which {task.name} has none of here")
    if optimizers.get(settings.optimizer).needs != "gradient":
        raise ValueError(f"{settings.optimizer} needs more than a gradient, so that it cannot be stacked")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("stacked networks need a GPU")
    if device.type != "cpu" and settings.precision != "bf16":
        raise ValueError("stacked networks need bf16 on a GPU: in float32 a layer does not fit its shared memory")
    if torch.are_deterministic_algorithms_enabled():
        raise ValueError("stacked networks add up in any order, which deterministic rules out")
    if settings.compile or settings.micro_batch or world > 1:
        raise ValueError("stacked networks go without compile, micro_batch and several processes")


class Run:
    """A run between two steps; `step` counts those taken."""

    def __init__(self, settings: Settings, task: Task, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.settings, self.task, self.device = settings, task, device
        self.rank, self.world = rank, world
        self.total = settings.steps(task)
        self.step = 0
        check(settings, task, device, world)
        torch.manual_seed(settings.seed)
        self.net = task.model().to(device)
        self.entry = optimizers.get(settings.optimizer)
        # What else an optimizer needs is not the same at every step, as a graph's work must be.
        self.graph = settings.graph and self.entry.needs in ("gradient", "views")
        self.in_graph = self.graph and self.entry.name in IN_GRAPH
        self.optimizer = self._make_optimizer()
        self._peaks = [float(group["lr"]) for group in self.optimizer.param_groups]
        ema = settings.recipe.ema
        self.average = MovingAverage(self.net, ema) if ema is not None else None
        self._forward = self._wrapped()
        self._stream: Iterator[Batch] | None = None
        self._units = 0
        self._losses = 0
        self._loss_sum = torch.zeros((), device=device)
        self._grad_norm = torch.zeros((), device=device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        hyper = dict(self.settings.hyper)
        decay = hyper.pop("weight_decay", self.settings.recipe.weight_decay)
        lr: Any = self.settings.lr
        if self.in_graph:
            hyper |= IN_GRAPH[self.entry.name]
            lr = torch.tensor(lr, device=self.device)
        if self.entry.averages and "total_steps" in self.entry.settings:
            hyper.setdefault("total_steps", self.total)  # SWA's average begins late in the run
        if decay and not self.settings.recipe.decay_all:
            return optimizers.make(self.entry.name, decay_groups(self.net, decay), lr=lr, **hyper)
        if decay or "weight_decay" in self.entry.settings:  # also 0: a class's own default may be another number
            hyper["weight_decay"] = decay
        return optimizers.make(self.entry.name, self.net.named_parameters(), lr=lr, **hyper)

    def _wrapped(self) -> nn.Module:
        """The network as it is trained. To evaluate, at other sizes, it would be compiled anew, so it is not."""
        net = self.net
        if self.settings.compile:
            net = cast(nn.Module, torch.compile(net, dynamic=False))
        if self.world == 1:
            return net
        return DistributedDataParallel(net, [self.device] if self.device.type == "cuda" else None)

    def _batches(self) -> Iterator[Batch]:
        """From the next step on."""
        size, seed = self.settings.recipe.batch_size, self.settings.seed
        return self.task.stream(size, seed, self.step, self.device, self.rank, self.world)

    def check_batch(self) -> None:
        """Refuse sizes that the data cannot be brought to."""
        self._parts(next(self._batches()))

    def batch(self) -> Batch:
        """The data of the next step."""
        if self._stream is None:
            self._stream = self._batches()
        batch = next(self._stream)
        self._units += self.task.units(batch) * self.world
        return batch

    def prepare(self) -> None:
        """Set what depends on the number of the step alone: the random numbers and the learning rate."""
        torch.manual_seed(_mix(self.settings.seed, self.step, self.rank))
        share = lr_share(self.step, self.total, self.settings.recipe)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * share)
            else:
                group["lr"] = peak * share

    def gradient(self, batch: Batch) -> None:
        """Leave the clipped gradient of the batch's loss in the parameters. A CUDA graph can hold this."""
        loss = optimizers.differentiate(
            self.optimizer,
            [partial(self._loss, self.task.loss, part) for part in self._parts(batch)],
            lambda: self._loss(self.task.sampled_loss, self._parts(batch)[0]),  # pyright: ignore[reportAttributeAccessIssue]
        )
        self.settle(loss)

    def settle(self, loss: Tensor) -> None:
        """Count the loss whose gradient lies in the parameters, and clip that."""
        self._loss_sum += loss
        if self.settings.recipe.clip is not None:
            self._grad_norm.copy_(clip_grad_norm_(self.net.parameters(), self.settings.recipe.clip, foreach=True))

    def _parts(self, batch: Batch) -> list[Batch]:
        """The batch in equal parts that fit through the network at once."""
        size = self.settings.micro_batch or len(batch[0])
        if len(batch[0]) % size:
            raise ValueError(f"micro_batch must divide the {len(batch[0])} examples of a batch, but is {size}")
        return list(zip(*(part.split(size) for part in batch), strict=True))

    def _loss(self, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> Tensor:
        # The fast attention kernels cannot be differentiated twice.
        twice = sdpa_kernel(SDPBackend.MATH) if self.entry.needs == "create_graph" else nullcontext()
        with twice, self.autocast():
            return loss(self._forward, batch)

    def finish(self) -> None:
        """Count the step that was taken."""
        if self.average is not None:
            self.average.update_parameters(self.net)
        self._losses += 1
        self.step += 1

    def mean_loss(self) -> float:
        """The training loss over the steps since it was last asked for."""
        if self.world > 1:
            torch.distributed.all_reduce(self._loss_sum)
        mean = self._loss_sum.item() / (self._losses * self.world)
        self._loss_sum.zero_()
        self._losses = 0
        return mean

    def counted_units(self) -> int:
        """Images or tokens since it was last asked for."""
        units, self._units = self._units, 0
        return units

    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def grad_norm(self) -> float | None:
        """Of the last step, before clipping; None where nothing is clipped."""
        return None if self.settings.recipe.clip is None else self._grad_norm.item()

    def evaluate(self) -> dict[str, float]:
        with self._as_evaluated() as net, self.autocast(), torch.no_grad():
            return self.task.evaluate(net, "validation" if self.settings.hold_out else "test", self.device)

    def weights(self) -> dict[str, Tensor]:
        """Of the network as it is evaluated, by name; tied weights once."""
        with self._as_evaluated() as net:
            named = (*net.named_parameters(), *net.named_buffers())
            return {name: value.detach().cpu().clone().contiguous() for name, value in named}

    @contextmanager
    def _as_evaluated(self) -> Iterator[nn.Module]:
        """The network to judge by: the recipe's or the optimizer's average of weights where there is one."""
        if self.average is not None:
            yield self.average.module
        elif self.entry.averages:
            kept = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
            try:
                with optimizers.averaged(self.optimizer):
                    self._estimate_statistics()
                    yield self.net
            finally:
                for name, buffer in self.net.named_buffers():
                    buffer.copy_(kept[name])
        else:
            yield self.net

    def _estimate_statistics(self) -> None:
        """Give BatchNorm the statistics of the averaged weights, which no step has seen."""
        stream = self.task.stream(self.settings.recipe.batch_size, self.settings.seed, 0, self.device)
        was_training = self.net.training
        with self.autocast():
            update_bn(([batch] for batch in islice(stream, STATISTICS_BATCHES)), _LossAsModule(self.net, self.task))
        self.net.train(was_training)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def state(self) -> dict[str, Any]:
        """All that the next step depends on; the data and the random numbers follow from the step alone."""
        return {
            "step": self.step,
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "loss_sum": self._loss_sum,
            "counts": (self._losses, self._units),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.net.load_state_dict(state["model"])
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr  # on the device, where a graph looks for it; `prepare` sets its value
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self._loss_sum.copy_(state["loss_sum"])
        self._losses, self._units = state["counts"]
        self._stream = None


class MovingAverage(AveragedModel):
    """torch's exponential average of weights; but torch's own update waits for the device at every step."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__(net)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(model.parameters())
        if self.n_averaged == 0:  # a number on the host
            torch._foreach_copy_(ours, theirs)
        else:
            torch._foreach_lerp_(ours, theirs, 1 - self.decay)
        for mine, its in zip(self.module.buffers(), model.buffers(), strict=True):
            mine.copy_(its)
        self.n_averaged += 1


class _LossAsModule(nn.Module):
    """Takes a whole batch, as a task's loss does; torch's update_bn would hand on its first part alone."""

    def __init__(self, net: nn.Module, task: Task) -> None:
        super().__init__()
        self.net, self.task = net, task

    def forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.net, batch)


def _mix(*numbers: int) -> int:
    """One seed from several, so that neighbours have nothing in common (splitmix64's finisher)."""
    mask = 2**64 - 1
    x = 0
    for number in numbers:
        x = (x ^ number) + 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        x ^= x >> 31
    return x >> 1
