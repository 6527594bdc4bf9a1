"""The paper's theorems as code: their schedules, and their bounds with the constants derived anew in docs/theory.md."""

from anon_lab.theory.bounds import VRange, convex_regret_bound, nonconvex_bound, refresh_times, v_range
from anon_lab.theory.schedule import TheoremSchedule

__all__ = ["TheoremSchedule", "VRange", "convex_regret_bound", "nonconvex_bound", "refresh_times", "v_range"]
