"""Whether numbers from a few seeds differ: mean and interval, Welch's test, the verdict in a word, and over tasks."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

from scipy import stats

from anon_lab.tasks import Metric

SUREST = 7.0
"""Standard deviations, p = 3e-12: no single task is surer than this where several are added up."""


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % interval, by Student's t; None for a single value, which has none."""
    n = len(values)
    if n < 2:
        return mean(values), None
    return mean(values), float(stats.t.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)


def p_value(ours: Sequence[float], other: Sequence[float]) -> float | None:
    """Of Welch's two-sided test for equal means; None where a side has fewer than two values."""
    if len(ours) < 2 or len(other) < 2:
        return None
    if stdev(ours) == stdev(other) == 0:  # in the limit of no spread any difference is a sure one
        return 1.0 if mean(ours) == mean(other) else 0.0
    a, b = ((mean(values), stdev(values), len(values)) for values in (ours, other))
    return float(stats.ttest_ind_from_stats(*a, *b, equal_var=False)[1])


def verdict(ours: Sequence[float], other: Sequence[float], metric: Metric) -> str:
    """ "better", "worse" or "tie": whether the means differ at 5 %."""
    p = p_value(ours, other)
    if p is None or p >= 0.05:
        return "tie"
    return "better" if is_better(ours, other, metric) else "worse"


def is_better(ours: Sequence[float], other: Sequence[float], metric: Metric) -> bool:
    """Whether the mean is, whatever the spread."""
    difference = mean(ours) - mean(other)
    return difference > 0 if metric.higher_is_better else difference < 0


def combined(tests: Sequence[tuple[float, bool]]) -> tuple[float, bool]:
    """Stouffer's test, which adds up what several tasks say: its two-sided p, and whether ours are better in sum. Small
    effects of one direction add up, those of opposite directions cancel.

    **Arguments:**
    - `tests`: of each task Welch's two-sided p, and whether ours are the better ones.
    """
    z = sum((1 if better else -1) * min(float(stats.norm.isf(p / 2)), SUREST) for p, better in tests)
    return 2 * float(stats.norm.sf(abs(z) / math.sqrt(len(tests)))), z > 0
