"""Anon: an optimizer for PyTorch whose adaptivity is a number you choose."""

from anon_optim._adaptivity import Adaptivity, measure_adaptivity, relative_adaptivity
from anon_optim._adaptivity_monitor import AdaptivityMonitor, AdaptivityReading
from anon_optim._anon import Anon
from anon_optim._decay import decay_groups
from anon_optim._diagnostics import Diagnostics
from anon_optim._options import Guard, Storage
from anon_optim._projections import Box, HalfSpace, L2Ball, Simplex
from anon_optim._state import state_bytes

__version__ = "0.1.0"

__all__ = [
    "Adaptivity",
    "AdaptivityMonitor",
    "AdaptivityReading",
    "Anon",
    "Box",
    "Diagnostics",
    "Guard",
    "HalfSpace",
    "L2Ball",
    "Simplex",
    "Storage",
    "decay_groups",
    "measure_adaptivity",
    "relative_adaptivity",
    "state_bytes",
]
