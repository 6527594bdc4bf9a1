"""Refresh times that come closer to each other at first: a growth for Anon that rises with the step."""

import math
from dataclasses import dataclass


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
