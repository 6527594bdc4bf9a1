"""A meter for adaptivity during training, on a sample of the coordinates."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from anon_optim._adaptivity import FINE, slope
from anon_optim._replay import MakeOptimizer, Twin, seeded


class Writer(Protocol):
    """What is used of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


@dataclass(frozen=True)
class AdaptivityReading:
    """Adaptivity of the sampled coordinates' update at one step."""

    step: int
    """Steps of the optimizer since the monitor was attached."""
    A: float | None
    """Of the norm of the whole sample's update; None where there was no update, as at lr = 0."""
    parameters: dict[str, float | None]
    """The same for each parameter by itself."""


class AdaptivityMonitor:
    r"""Shows the adaptivity A of an optimizer while it trains.

    Two twins of the optimizer run along on a sample of the coordinates, one on the gradients times `factor`, the
    other on the gradients divided by it. Every `every` steps their updates u+ and u- give::

        A = 1 - ln(||u+|| / ||u-||) / (2 ln factor)

    Example::

        with AdaptivityMonitor(optimizer, every=100, path="adaptivity.jsonl"):
            train(model, optimizer)

    The cost of a step is that of two optimizer steps on the sample, whatever the size of the model; nothing waits for
    the device except a reading. Training is not disturbed: the twins have their own parameters (kept at zero, so that
    weight decay does not show), state and random numbers, and nothing enters the optimizer's state dict.

    The sample is a block with the parameter's number of dimensions: random indices in each. So matrix methods (Muon,
    Shampoo) see matrices; what they say is true of the block, as is what per-tensor statistics say. The gradients are
    those in `p.grad` when `step()` returns: after clipping, and unscaled if `scaler.unscale_` was called. A sampled
    gradient that is not finite counts as zero.

    The twins begin without a history. To go on after a checkpoint, save `state_dict()` beside the optimizer's.

    Args:
        optimizer: to be watched; attach before its first step. Param groups that are added later are
            watched from then on.
        every: steps between readings.
        coordinates: the largest sample of one parameter.
        path: append each reading to this file, as a line of JSON.
        writer: a SummaryWriter, which gets the scalars `adaptivity/all` and `adaptivity/<parameter>`.
        log_dir: make a SummaryWriter for this folder (needs the package tensorboard).
        factor: 2 for methods that compute in a short format, such as Muon; see :func:`measure_adaptivity`.
        make_optimizer: makes a twin from its parameters. By default the optimizer's class is called on param groups
            with its options, which fails for classes that want more.
        seed: chooses the sample.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 100,
        coordinates: int = 64,
        *,
        path: str | Path | None = None,
        writer: Writer | None = None,
        log_dir: str | Path | None = None,
        factor: float = FINE,
        make_optimizer: MakeOptimizer | None = None,
        seed: int = 0,
    ) -> None:
        if every < 1:
            raise ValueError(f"Invalid every: {every}, expected at least 1")
        if coordinates < 1:
            raise ValueError(f"Invalid coordinates: {coordinates}, expected at least 1")
        self.latest: AdaptivityReading | None = None
        self._optimizer, self._every, self._most = optimizer, every, coordinates
        self._factor, self._seed = factor, seed
        self._random = torch.Generator().manual_seed(seed)
        self._step = 0
        self._places = [self._choose(p) for group in optimizer.param_groups for p in group["params"]]
        self._twins = {k: self._twin(make_optimizer) for k in (factor, 1 / factor)}
        self._options = [_options(group) for group in optimizer.param_groups]
        self._updates: dict[float, list[Tensor]] = {}
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._own_writer = None if log_dir is None else _summary_writer(log_dir)
        self._writer = writer or self._own_writer
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    def _choose(self, p: Tensor) -> Tensor:
        return _block(p.shape, self._most, self._random).to(p.device)

    def _twin(self, make_optimizer: MakeOptimizer | None) -> Twin:
        twin = Twin(make_optimizer or self._same_class, [_zeros(places) for places in self._places])
        groups, own = len(self._optimizer.param_groups), len(twin.optimizer.param_groups)
        if own != groups:
            raise ValueError(f"make_optimizer must make as many param groups as the optimizer has, {groups}, not {own}")
        return twin

    def _same_class(self, params: Sequence[Tensor]) -> Optimizer:
        rest = iter(params)
        groups = [{**_options(g), "params": [next(rest) for _ in g["params"]]} for g in self._optimizer.param_groups]
        try:
            return type(self._optimizer)(groups)  # pyright: ignore[reportCallIssue]
        except Exception as error:
            name = type(self._optimizer).__name__
            raise TypeError(f"{name} cannot be made from param groups alone ({error}); pass make_optimizer") from error

    def _before(self) -> None:
        """Hand on what was changed since the last step, by a schedule or by hand, and not by the optimizer itself."""
        groups = self._optimizer.param_groups
        for group in groups[len(self._options) :]:
            places = [self._choose(p) for p in group["params"]]
            for twin in self._twins.values():
                twin.add_param_group(_options(group), [_zeros(i) for i in places])
            self._places += places
            self._options.append(_options(group))
        for index, (group, before) in enumerate(zip(groups, self._options, strict=True)):
            changed = {k: v for k, v in _options(group).items() if k not in before or _differs(v, before[k])}
            for twin in self._twins.values():
                twin.optimizer.param_groups[index].update(changed)

    @torch.no_grad()
    def _after(self) -> None:
        self._step += 1
        self._options = [_options(group) for group in self._optimizer.param_groups]
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        sample = [_sampled(p.grad, places) for p, places in zip(params, self._places, strict=True)]
        for k, twin in self._twins.items():
            with seeded(self._seed + self._step, params[0].device):
                self._updates[k] = twin.step([None if g is None else k * g for g in sample])
        if self._step % self._every == 0:
            self._write(self.read())

    @torch.no_grad()
    def read(self) -> AdaptivityReading:
        """The adaptivity of the last step's update."""
        if not self._updates:
            raise RuntimeError(
                "AdaptivityMonitor.read(): the optimizer has made no step since the monitor was attached"
            )

        def log_norms(k: float) -> Tensor:
            norms = torch.stack([u.norm() for u in self._updates[k]])
            return torch.cat([norms, norms.norm()[None]]).log()

        slopes, _ = slope(log_norms, self._factor)
        *parameters, a = [1 - x if math.isfinite(x) else None for x in slopes.tolist()]
        self.latest = AdaptivityReading(self._step, a, dict(zip(self._names(), parameters, strict=True)))
        return self.latest

    def _names(self) -> list[str]:
        groups = enumerate(self._optimizer.param_groups)
        return [n for i, g in groups for n in g.get("param_names", [f"{i}.{j}" for j in range(len(g["params"]))])]

    def _write(self, reading: AdaptivityReading) -> None:
        if self._path is not None:
            # Opened for each line, and written in one go: whoever reads along, or after a crash, finds whole lines.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(reading)) + "\n")
        if self._writer is not None:
            for name, a in {"all": reading.A, **reading.parameters}.items():
                if a is not None:
                    self._writer.add_scalar(f"adaptivity/{name}", a, reading.step)

    def state_dict(self) -> dict[str, Any]:
        """The twins' state and the sample, to go on with after a restart."""
        twins = [twin.optimizer.state_dict() for twin in self._twins.values()]
        return {"step": self._step, "places": list(self._places), "twins": twins}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        places = state_dict["places"]
        if [i.shape for i in places] != [i.shape for i in self._places]:
            raise ValueError("Invalid state_dict: its sample has other shapes; was it made for another model?")
        self._step = state_dict["step"]
        self._places = [new.to(old.device) for new, old in zip(places, self._places, strict=True)]
        for twin, state in zip(self._twins.values(), state_dict["twins"], strict=True):
            twin.optimizer.load_state_dict(state)

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        if self._own_writer is not None:
            self._own_writer.close()

    def __enter__(self) -> "AdaptivityMonitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _differs(new: Any, old: Any) -> bool:
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        return new is not old  # the twins hold the same tensor, so that its value needs no handing on
    return bool(new != old)


def _zeros(places: Tensor) -> Tensor:
    """Where the twins stand: in float64, where the device has it."""
    dtype = torch.float32 if places.device.type == "mps" else torch.float64
    return torch.zeros(places.shape, dtype=dtype, device=places.device)


def _block(shape: torch.Size, most: int, random: torch.Generator) -> Tensor:
    """Flat indices of a block: in each dimension a random choice of indices, at most `most` coordinates in all."""
    sides, left = [0] * len(shape), most
    # The narrow dimensions first: what they cannot use is left to the wide ones.
    for done, axis in enumerate(sorted(range(len(shape)), key=lambda axis: shape[axis])):
        sides[axis] = min(shape[axis], max(1, int(left ** (1 / (len(shape) - done)) + 1e-9)))
        left //= max(1, sides[axis])
    places = torch.zeros([], dtype=torch.int64)
    for side, size in zip(sides, shape, strict=True):
        chosen = torch.randperm(size, generator=random)[:side].sort().values
        places = places[..., None] * size + chosen
    return places


def _sampled(gradient: Tensor | None, places: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.detach().reshape(-1)[places].to(_zeros(places)).nan_to_num(0.0, 0.0, 0.0)


def _summary_writer(log_dir: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # not needed otherwise, and slow to import
    except ImportError:
        raise ImportError("log_dir needs TensorBoard: pip install tensorboard") from None
    return SummaryWriter(str(log_dir))
