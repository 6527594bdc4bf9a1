"""Growths for Anon that depend on the step: refreshes that are closer at first, or that come to a given step."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rising:
    """growth(t) = start (end / start)^x with x = ln t / ln by up to step `by`, and `end` from there on.

    Gradients change most in the first steps, where refreshes are cheap; late, rare refreshes leave s idle for longer.
    Frozen, so that Anon can keep the refresh times of equal ones.
    """

    start: float
    end: float
    by: int

    def __call__(self, t: int) -> float:
        if t >= self.by:
            return self.end
        return self.start * (self.end / self.start) ** (math.log(t) / math.log(self.by))


@dataclass(frozen=True)
class Through:
    """A constant growth, except that step `at` is a refresh time too, such as the end of a warm-up."""

    growth: float
    at: int

    def __call__(self, t: int) -> float:
        # Half a step before it, because the next refresh time is rounded up.
        return min(self.growth, (self.at - 0.5) / t) if t < self.at else self.growth


def from_plain(**values: Any) -> Rising | Through:
    """The growth that these plain values, of JSON or a command line, stand for."""
    return Through(**values) if "at" in values else Rising(**values)
