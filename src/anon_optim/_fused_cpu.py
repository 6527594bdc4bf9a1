"""The fused step on the CPU: `_fused_cpu.c`, compiled once on this machine and run on torch's own threads.

The library is built by the system's C compiler on first use and kept in a cache folder under a name that says what it
was made from and what it holds, so that neither an old nor a damaged one is ever loaded. All that changes from step to
step is an argument; nothing is compiled twice.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from anon_optim import _idu
from anon_optim._fused import Batch, Launch, Numbers

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
TUNINGS = (("-march=native",), ("-mcpu=native",), ())
"""Tried in this order: not every compiler knows every spelling."""

BLOCK = 2048
"""How many elements the C source sums at a time."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NoLibrary(Exception):
    """The kernels cannot be had here; the message says why."""


class Arguments(ctypes.Structure):
    """The mirror of `Step` in the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("table", "numels", "first_block", "levels", "brakes")),
        *((name, ctypes.c_void_p) for name in ("weights", "beta3s")),
        *((name, ctypes.c_void_p) for name in ("clock", "sums", "means", "powers", "parallel")),
        *((name, ctypes.c_int64) for name in ("n_tensors", "n_elements", "grain", "next", "braked")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("lr", "gamma", "new_gamma", "bias_correction1", "weight_decay")),
        *((name, ctypes.c_double) for name in ("factor", "beta1", "beta2", "eps", "clip", "floor", "tail")),
        ("bias_correction2", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("threads", "param_dtype", "grad_dtype", "preconditioner_dtype")),
        *((name, ctypes.c_int32) for name in ("due", "accumulate", "changed", "decoupled", "coupled", "belief")),
        *((name, ctypes.c_int32) for name in ("masked", "touch", "lr_scale", "stochastic", "brake", "follow")),
    )


# Building.


def _cache_folder() -> Path:
    if folder := os.environ.get("ANON_OPTIM_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anon_optim"
    except RuntimeError:  # no home
        return Path(os.devnull) / "nowhere"


def _compilers() -> Iterator[list[str]]:
    """The commands that may be a C compiler here, the user's own choice first."""
    for command in (os.environ.get("CC"), os.environ.get("CXX"), *COMPILERS):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            yield words


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = [platform.processor().encode()]
    names = (b"model name", b"flags", b"Features", b"CPU part")
    return b"\n".join(
        [f"{sys.platform} {platform.machine()}".encode(), *sorted({x for x in lines if x.startswith(names)})]
    )


def _version(compiler: list[str]) -> bytes:
    return subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=False).stdout


def _compile(compiler: list[str], target: Path) -> None:
    said = b""
    for tuning in TUNINGS:
        command = [*compiler, "-x", "c", *FLAGS, *tuning, "-o", str(target), "-", "-lm"]
        done = subprocess.run(command, input=SOURCE.read_bytes(), capture_output=True, timeout=600, check=False)
        if done.returncode == 0:
            return
        said = said or done.stderr
    message = said.decode(errors="replace").strip().splitlines() or ["no message"]
    raise NoLibrary(f"{shlex.join(compiler)} failed: {message[0]}")


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.anon_step_size.restype = ctypes.c_int64
    library.anon_step.argtypes = [ctypes.POINTER(Arguments)]
    library.anon_step.restype = None
    if library.anon_step_size() != ctypes.sizeof(Arguments):
        raise NoLibrary(f"{path} has another layout of its arguments")
    return library


def _cached(folder: Path, made_from: str, made_by: str) -> ctypes.CDLL | None:
    """A library from the cache. Its name ends in its digest, because to load half a file can crash the process."""
    for path in sorted(folder.glob(f"{made_from}-{made_by}-*.so")):
        try:
            if path.stem.endswith(_digest(path.read_bytes())):
                return _load(path)
        except (OSError, AttributeError, NoLibrary):
            continue
    return None


def _workshop(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A private folder in the cache, or elsewhere if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        return tempfile.TemporaryDirectory(prefix="anon_optim-", ignore_cleanup_errors=True)


def _built(folder: Path, made_from: str, compiler: list[str], made_by: str) -> ctypes.CDLL:
    """A new library, moved into the cache in one piece: another process may be about to load the same."""
    with _workshop(folder) as workshop:
        path = Path(workshop) / "draft.so"
        _compile(compiler, path)
        with contextlib.suppress(OSError):  # then it is loaded from where it is
            path = path.replace(folder / f"{made_from}-{made_by}-{_digest(path.read_bytes())}.so")
        return _load(path)


def library() -> ctypes.CDLL:
    folder = _cache_folder()
    made_from = _digest(SOURCE.read_bytes(), repr((FLAGS, TUNINGS)).encode(), _processor())
    reasons = []
    for compiler in _compilers():
        try:
            made_by = _digest(shlex.join(compiler).encode(), _version(compiler))
            return _cached(folder, made_from, made_by) or _built(folder, made_from, compiler, made_by)
        except (NoLibrary, OSError, AttributeError, subprocess.SubprocessError) as reason:
            reasons.append(str(reason))
    if (library := _cached(folder, made_from, "*")) is not None:  # made when there was a compiler
        return library
    raise NoLibrary("; ".join(reasons) or "none was found")


# Running.


@functools.cache
def _parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch runs on: two libraries would be two pools of
    threads, each spinning while the other works. Intel's and LLVM's have the function too."""
    for name in (torch._C.__file__, "libgomp.so.1", "libomp.so"):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


class _Prepared:
    """What stays the same while a batch lives."""

    def __init__(self, batch: Batch) -> None:
        kind = batch.kind
        blocks = (batch.numels + BLOCK - 1) // BLOCK
        self.first_block = torch.cat([blocks.new_zeros(1), blocks.cumsum(0)])
        self.n_blocks = int(self.first_block[-1])
        self.powers = torch.empty(self.n_blocks, dtype=torch.float64, device="cpu")
        self.arguments = Arguments(
            table=batch.table.data_ptr(),
            numels=batch.numels.data_ptr(),
            first_block=self.first_block.data_ptr(),
            levels=batch.levels.data_ptr(),
            brakes=batch.brakes.data_ptr(),
            weights=batch.weights.data_ptr(),
            powers=self.powers.data_ptr(),
            parallel=_parallel(),
            n_tensors=len(batch.params),
            n_elements=int(batch.numels.sum()),
            braked=_idu.BRAKED,
            tail=_idu.TAIL,
            param_dtype=_DTYPES[kind.param_dtype],
            grad_dtype=_DTYPES[kind.grad_dtype],
            preconditioner_dtype=_DTYPES[kind.preconditioner_dtype],
        )


def _set_numbers(a: Arguments, x: Numbers) -> None:
    rule = x.rule
    a.lr, a.gamma, a.new_gamma, a.bias_correction1 = x.lr, x.gamma, rule.gamma, x.bias_correction1
    a.bias_correction2 = x.bias_correction2
    a.weight_decay, a.beta1, a.beta2 = x.weight_decay, x.beta1, x.beta2
    a.eps, a.clip, a.floor, a.touch, a.follow = rule.eps, rule.clip, rule.floor, rule.touch, rule.follow
    a.beta3s = None if x.beta3s is None else x.beta3s.data_ptr()
    factor = 1.0 if x.factor is None else x.factor.item()
    a.factor = -factor if x.maximize else factor
    a.accumulate, a.changed, a.belief, a.masked, a.lr_scale = x.accumulate, x.changed, x.belief, x.masked, x.lr_scale
    a.decoupled, a.coupled = x.weight_decay != 0 and x.decoupled, x.weight_decay != 0 and not x.decoupled
    a.stochastic = x.stochastic_round and a.param_dtype == _DTYPES[torch.bfloat16]
    if a.stochastic:
        a.seed = int(torch.randint(2**63 - 1, (), device="cpu").item())
    a.threads = torch.get_num_threads()


def compiled_launch() -> Launch | None:
    """The CPU backend, or None with a warning that says why there is none."""
    try:
        step = library().anon_step
    except NoLibrary as reason:
        warnings.warn(
            f"fused=True on the CPU needs a C compiler: {reason}. torch's own operations are used instead, with the "
            "same results, more slowly. Install gcc or clang, or name one in the environment variable CC, or pass "
            "fused=False",
            stacklevel=2,
        )
        return None

    def launch(batch: Batch, x: Numbers, *, due: bool, clock: Tensor | None) -> None:
        prepared = batch.kernels.get(_Prepared)
        if prepared is None:
            prepared = batch.kernels[_Prepared] = _Prepared(batch)
        a = prepared.arguments
        _set_numbers(a, x)
        a.clock = None if clock is None else clock.data_ptr()
        a.due, a.brake = due, x.has_brake(due, clock is not None)
        if due:
            sums = torch.empty(2 * prepared.n_blocks + len(batch.params), dtype=torch.float64, device="cpu")
            a.sums = sums.data_ptr()
            a.means = sums.data_ptr() + 2 * prepared.n_blocks * sums.element_size()
        step(a)

    return launch
