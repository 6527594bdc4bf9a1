"""`anon bench`: what a step costs in time and memory, as ratios to torch's fused AdamW in the same run."""

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import anon_optim
from anon_lab.files import unfit, write_json
from anon_lab.workloads import FOR_CPU, FOR_CUDA, WORKLOADS, Turns, Workload
from anon_optim import Anon, Guard, Storage, _idu, state_bytes

BASELINE = "AdamW fused"
RUN = 100_000  # steps of the run whose mean is reported
MID_INTERVAL = 1025.0  # a step right after a refresh (growth 2), with hundreds of plain steps ahead
PREPARED = 64  # steps before anything is timed: psi has seen enough gradients, and the clip has found its first ones
EVERY_STEP = 1 + 1e-9  # a growth that makes every step a refresh
BF16 = Storage(preconditioner=torch.bfloat16)
FOLLOW = Guard(clip=3.0, touch=False, brake=False, follow=True)


@dataclass(frozen=True)
class Contender:
    name: str
    build: Callable[[list[torch.nn.Parameter]], Optimizer]
    moved: int | None = None
    """Bytes a float32 parameter costs in one step: each tensor read once, each changed one written once."""
    mid_interval: bool = False
    """Whether to start right after a refresh, so that no other comes while it is timed."""
    last_interval: bool = False
    """Whether no refresh is to come at all, so that s is not needed any more."""


def _anon(name: str, moved: int, gamma: float = 1.0, **options: Any) -> Contender:
    """By its name between refreshes: "with s" or "without s"."""
    return Contender(
        name,
        lambda ps: Anon(ps, lr=1e-6, gamma=gamma, **options),
        moved,
        mid_interval="with s" in name,
        last_interval="without s" in name,
    )


def contenders() -> list[Contender]:
    listed = [
        Contender(BASELINE, lambda ps: AdamW(ps, lr=1e-6, fused=True), 28),
        Contender("AdamW foreach", lambda ps: AdamW(ps, lr=1e-6, foreach=True)),
        Contender("AdamW single", lambda ps: AdamW(ps, lr=1e-6, foreach=False)),
        Contender("SGD momentum fused", lambda ps: SGD(ps, lr=1e-6, momentum=0.9, fused=True), 20),
        _anon("Anon fused, with s", 32, fused=True),
        _anon("Anon fused, without s", 24, fused=True),
        _anon("Anon fused, with s, v bf16", 30, fused=True, storage=BF16),
        _anon("Anon fused, without s, v bf16", 22, fused=True, storage=BF16),
        _anon("Anon fused, no brake, with s", 32, fused=True, guard=Guard(brake=False)),
        _anon("Anon fused, no brake, without s", 24, fused=True, guard=Guard(brake=False)),
        _anon("Anon fused, printed, without s", 24, fused=True, guard=None),
        _anon("Anon fused, gamma 1.5, with s", 32, fused=True, gamma=1.5),
        _anon("Anon fused, gamma 1.5, without s", 24, fused=True, gamma=1.5),
        _anon("Anon fused, follow, with s", 32, fused=True, guard=FOLLOW),
        _anon("Anon fused, follow, gamma 1.5, with s", 32, fused=True, gamma=1.5, guard=FOLLOW),
        _anon("Anon fused, refresh", 56, fused=True, growth=EVERY_STEP),
        _anon("Anon foreach, with s", 32, foreach=True),
        _anon("Anon single, with s", 32, foreach=False),
    ]
    return listed + list(_optional())


def _optional() -> Iterator[Contender]:
    """Other packages' optimizers, where they are installed."""
    try:
        import bitsandbytes

        yield Contender("bitsandbytes AdamW8bit", lambda ps: bitsandbytes.optim.AdamW8bit(ps, lr=1e-6), 18)
    except ImportError:
        pass
    try:
        from torchao.optim import AdamW8bit

        yield Contender("torchao AdamW8bit", lambda ps: AdamW8bit(ps, lr=1e-6), 18)
    except ImportError:
        pass
    try:
        from apex.optimizers import FusedAdam

        yield Contender("apex FusedAdam", lambda ps: FusedAdam(ps, lr=1e-6), 28)
    except ImportError:
        pass


@dataclass
class Row:
    """One contender's figures on one workload; times in microseconds."""

    name: str
    time: float
    ratio: float
    host: float
    host_ratio: float
    bytes_moved: int | None
    bandwidth: float | None
    """Share of the measured copy bandwidth."""
    state_bytes: float
    """Bytes of state a parameter."""
    peak_bytes: float | None
    """Bytes a parameter allocated during a step beyond parameters, gradients and state."""


@dataclass
class Report:
    device: str
    versions: dict[str, str]
    day: str
    copy_bandwidth: float
    """Bytes a second, read and written, of a large copy on this device."""
    rows: dict[str, list[Row]] = field(default_factory=dict)
    clipping: dict[str, dict[str, float]] = field(default_factory=dict)
    long_run: dict[str, dict[str, float]] = field(default_factory=dict)


class Clock:
    """Times calls on one device: by events on CUDA, by the wall elsewhere."""

    def __init__(self, device: str, repeats: int) -> None:
        self.cuda = device == "cuda"
        self.repeats = repeats

    def __call__(self, *calls: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> list[float]:
        """Median microseconds of each call, its device work included. The calls take turns, so that a machine that
        slows down slows all of them; `before` each comes another that is not timed."""
        for call in calls * 3:
            before()
            call()
        if not self.cuda:
            rounds = [[self._wall(call, before) for call in calls] for _ in range(self.repeats)]
            return [statistics.median(times) for times in zip(*rounds, strict=True)]
        torch.cuda.synchronize()
        events = [[self._events(call, before) for call in calls] for _ in range(self.repeats)]
        torch.cuda.synchronize()
        return [
            statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
            for pairs in zip(*events, strict=True)
        ]

    def host(self, *calls: Callable[[], Any], before: Callable[[], Any]) -> list[float]:
        """Median microseconds until each call returns, the device being idle when it comes."""
        rounds = [[self._wall(call, before) for call in calls] for _ in range(self.repeats)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _wall(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        before()
        if self.cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def _events(self, call: Callable[[], Any], before: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        return begin, end


def copy_bandwidth(device: str, clock: Clock) -> float:
    source = torch.randn(2**29 if device == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    # multiplying by 1 is a copy that uses every core
    return 2 * source.numel() * 4 / (clock(lambda: torch.mul(source, 1.0, out=target))[0] * 1e-6)


def _prepared(contender: Contender, parameters: list[torch.nn.Parameter], turns: Turns) -> Optimizer:
    optimizer = contender.build(parameters)
    for _ in range(PREPARED if "fused" in contender.name else 8):
        turns()
        optimizer.step()
    if contender.mid_interval:
        for p in parameters:
            optimizer.state[p]["step"].fill_(MID_INTERVAL)
        optimizer.step()
    if contender.last_interval:
        for group in optimizer.param_groups:
            group["growth"] = math.inf
        optimizer.step()
    return optimizer


def _peak(optimizer: Optimizer) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(workload: Workload, device: str, clock: Clock, bandwidth: float, log: Callable[[str], None]) -> list[Row]:
    parameters = workload.parameters(device)
    turns = Turns(parameters)
    elements = sum(p.numel() for p in parameters)
    saved = 4 - parameters[0].element_size()  # a narrower parameter is read and written, its gradient read
    rows: list[Row] = []
    listed = contenders()
    baseline = _prepared(listed[0], parameters, turns)
    for contender in listed:
        if len(parameters) > 1000 and "fused" not in contender.name:
            continue  # seconds a step, and nobody's choice
        try:
            optimizer = _prepared(contender, parameters, turns)
        except (RuntimeError, ValueError, AssertionError) as error:
            log(f"  {contender.name}: left out, {str(error).splitlines()[0]}")
            continue
        against, took = clock(baseline.step, optimizer.step, before=turns)
        host_against, host = clock.host(baseline.step, optimizer.step, before=turns)
        moved = None if contender.moved is None else contender.moved - 3 * saved
        row = Row(
            name=contender.name,
            time=took,
            ratio=took / against,
            host=host,
            host_ratio=host / host_against,
            bytes_moved=moved,
            bandwidth=None if moved is None else moved * elements / (took * 1e-6) / bandwidth,
            state_bytes=state_bytes(optimizer) / elements,
            peak_bytes=_peak(optimizer) / elements if clock.cuda else None,
        )
        rows.append(row)
        log(_line(row))
        del optimizer
    return rows


def measure_clipping(workload: Workload, device: str, clock: Clock) -> dict[str, float]:
    """Anon with max_grad_norm, as ratios to clip_grad_norm_ and AdamW fused."""
    parameters = workload.parameters(device)
    turns = Turns(parameters)
    adamw = AdamW(parameters, lr=1e-6, fused=True)

    def clip_and_step() -> None:
        clip_grad_norm_(parameters, 1.0)
        adamw.step()

    ratios = {}
    for name in ("with s", "without s"):
        contender = _anon(f"Anon fused, {name}", 0, fused=True, max_grad_norm=1.0)
        against, took = clock(clip_and_step, _prepared(contender, parameters, turns).step, before=turns)
        ratios[name] = took / against
    return ratios


def shares(steps: int, growth: float = 2.0, beta2: float = 0.999, tol: float = 2**-24) -> dict[str, float]:
    """How the steps of a run divide into refreshes, steps that accumulate s, and steps that do not."""
    lazy = _idu.Lazy(_idu.window(beta2, tol), None)
    refreshes = sum(_idu.is_refresh(t, growth) for t in range(1, steps + 1))
    accumulating = sum(_idu.accumulates(t, growth, lazy) for t in range(1, steps + 1)) - refreshes
    return {
        "refresh": refreshes / steps,
        "with s": accumulating / steps,
        "without s": 1 - (refreshes + accumulating) / steps,
    }


def long_run(workload: Workload, device: str, rows: list[Row], measured_steps: int, clock: Clock) -> dict[str, float]:
    """The mean step of a long run: from the parts measured above, from the paper's equation, and really run.

    The paper's mean is t + C log2(T) / T: a plain step and C for each of the log2(T) refreshes. Its t is fitted to a
    run of 1,000 steps, its C to the refresh."""
    ratio_of = {row.name: row.ratio for row in rows}
    parts = {part: ratio_of[f"Anon fused, {part}"] for part in ("refresh", "with s", "without s")}
    share = shares(RUN)
    figures = {
        "parts": sum(share[part] * ratio for part, ratio in parts.items()),
        "paper's equation": parts["with s"] + (parts["refresh"] - parts["with s"]) * math.log2(RUN) / RUN,
    }
    if measured_steps:
        optimizer = Anon(workload.parameters(device), lr=1e-6, gamma=1.0, fused=True)
        optimizer.step()
        if clock.cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(measured_steps):
            optimizer.step()
        if clock.cuda:
            torch.cuda.synchronize()
        figures[f"measured, {measured_steps:,} steps"] = (
            (time.perf_counter() - begin) / measured_steps * 1e6 / rows[0].time
        )
    return figures


def _line(row: Row) -> str:
    bandwidth = "" if row.bandwidth is None else f"{100 * row.bandwidth:5.0f} %"
    moved = "" if row.bytes_moved is None else f"{row.bytes_moved:4d}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes:6.2f}"
    return (
        f"  {row.name:32s}{row.time:10.0f}{row.ratio:8.3f}{row.host:9.0f}{row.host_ratio:11.2f}"
        f"{moved:>6s}{bandwidth:>9s}{row.state_bytes:8.2f}{peak:>8s}"
    )


_WIDTHS = {"us": 10, "ratio": 8, "host us": 9, "host ratio": 11, "B/par": 6, "copy bw": 9, "state B": 8, "peak B": 8}
HEADER = " " * 34 + "".join(f"{name:>{width}s}" for name, width in _WIDTHS.items())


def run(names: list[str], device: str, repeats: int, measured_steps: int, log: Callable[[str], None]) -> Report:
    clock = Clock(device, repeats)
    bandwidth = copy_bandwidth(device, clock)
    report = Report(
        device=torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        versions=_versions(),
        day=date.today().isoformat(),
        copy_bandwidth=bandwidth,
    )
    log(f"{report.device}; {', '.join(f'{k} {v}' for k, v in report.versions.items())}; {report.day}")
    log(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s; all ratios are to {BASELINE} in this run, medians of {repeats}")
    for name in names:
        workload = WORKLOADS[name]
        sizes = [math.prod(shape) for shape in workload.shapes()]
        log(f"\n{name}: {sum(sizes) / 1e6:.1f} M parameters in {len(sizes)} tensors, {workload.dtype}")
        log(HEADER)
        rows = report.rows[name] = measure(workload, device, clock, bandwidth, log)
        report.clipping[name] = measure_clipping(workload, device, clock)
        for label, ratio in report.clipping[name].items():
            log(f"  max_grad_norm against clip_grad_norm_ + {BASELINE}, {label}: ratio {ratio:.3f}")
        report.long_run[name] = long_run(workload, device, rows, measured_steps if name == names[0] else 0, clock)
        for label, ratio in report.long_run[name].items():
            log(f"  mean of a {RUN:,}-step run, {label}: ratio {ratio:.3f}")
        if device == "cuda":
            torch.cuda.empty_cache()
    return report


def _versions() -> dict[str, str]:
    versions = {"torch": torch.__version__, "anon-optim": anon_optim.__version__, "Python": platform.python_version()}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    return versions


def save(report: Report, out: Path) -> list[Path]:
    """bench.json, and bench.png where matplotlib is installed."""
    path = write_json(out / "bench.json", asdict(report))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return [path]
    from anon_lab.bench_chart import draw

    return [path, draw(report, out / "bench.png")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="anon bench", description=__doc__)
    parser.add_argument(
        "workloads", nargs="*", metavar="workload", help=f"of {', '.join(WORKLOADS)}; default: all that fit"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30, help="calls timed for each median")
    parser.add_argument("--long-run", type=int, default=0, help="steps of a real long run on the first workload")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    if options.repeats < 3 or options.long_run < 0:
        parser.error("--repeats must be at least 3 and --long-run at least 0")
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no CUDA device")
    if (wanted := unfit(options.out)) is not None:
        parser.error(f"--out must be {wanted}")
    names: list[str] = options.workloads or list(FOR_CUDA if options.device == "cuda" else FOR_CPU)
    report = run(names, options.device, options.repeats, options.long_run, lambda line: print(line, flush=True))
    for path in save(report, options.out):
        print(path)
