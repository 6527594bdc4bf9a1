"""Every gamma against every reference over all tasks: whether small differences of one direction add up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from anon_lab.significance import combined, is_better, p_value
from anon_lab.studies._report import Line, against, flatters
from anon_lab.studies._spec import Section


class Test(NamedTuple):
    """On one task."""

    p: float
    """Welch's; 0 where so many runs of one side diverged that it has no mean, 1 where the better mean is that of
    whoever lost more runs."""
    better: bool
    """Whether Anon's mean is the better one."""
    verdict: str


@dataclass(frozen=True)
class Across:
    """A gamma against a reference."""

    gamma: float
    reference: str
    tests: Sequence[Test]

    @property
    def ahead(self) -> int:
        return sum(test.better for test in self.tests)

    def summed(self) -> tuple[float, bool]:
        return combined([test[:2] for test in self.tests])

    def sentence(self) -> str:
        met = f"γ {self.gamma:g} is ahead of {self.reference} on {self.ahead} of {len(self.tests)} tasks"
        return f"{met} (in sum {self.judged()})"

    def judged(self) -> str:
        p, better = self.summed()
        return f"{'level' if p >= 0.05 else 'better' if better else 'worse'}, p = {p:.2g}"

    def row(self) -> list[str]:
        told = [sum(test.verdict == each for test in self.tests) for each in ("better", "tie", "worse")]
        counts = [str(len(self.tests)), str(self.ahead), " / ".join(map(str, told))]
        return [f"Anon γ {self.gamma:g}", self.reference, *counts, self.judged()]


Length = tuple[float, int]
"""In epochs or in steps: on one network all are in the same."""
FOUND_ON = {1.5: ("zipf", "gpt 1m")}
"""Tasks on which a gamma was singled out, and so have no say in what it adds up to."""


def across(grounds: Iterable[Sequence[Line]], references: Sequence[str]) -> list[Across]:
    """By reference, then by gamma, where there are several tasks with several seeds of both. A network that was trained
    for several lengths is one task, and its longest runs count; of equally long ones the first that had this gamma."""
    found: dict[tuple[str, float], dict[str, tuple[Length, Test]]] = {}
    for contenders in grounds:
        ground = contenders[0].ground
        network, length = ground.network, (ground.recipe.epochs or 0, ground.recipe.steps or 0)
        named = {line.label: line for line in contenders if line.label in references}
        ours = (line for line in contenders if "gamma" in line.settings)
        for reference, line in product(named.values(), ours):
            test = _test(line, reference)
            if test is not None and ground.name not in FOUND_ON.get(line.settings["gamma"], ()):
                tests = found.setdefault((reference.label, line.settings["gamma"]), {})
                tests[network] = max(tests.get(network, (length, test)), (length, test), key=itemgetter(0))
    made = [
        Across(gamma, name, [test for _, test in tests.values()])
        for (name, gamma), tests in found.items()
        if len(tests) > 1
    ]
    return sorted(made, key=lambda each: (references.index(each.reference), each.gamma))


def _test(line: Line, reference: Line) -> Test | None:
    """None where there are too few seeds to tell."""
    verdict = against(line, reference)
    if min(len(line.records), len(reference.records)) < 2 or (line.has_failed and reference.has_failed):
        return None
    if line.has_failed or reference.has_failed:
        return Test(0.0, verdict == "better", verdict)
    p = 1.0 if flatters(line, reference) else p_value(line.values, reference.values)
    return None if p is None else Test(p, is_better(line.values, reference.values, line.ground.metric), verdict)


def section(title: str, found: Sequence[Across]) -> Section:
    apart = "; ".join(f"γ {gamma:g} without {' and '.join(tasks)}" for gamma, tasks in FOUND_ON.items())
    text = (
        "How often Anon's mean is the better one, how often that is told apart, and Stouffer's test over all of them: "
        "do small differences of one direction add up? Tasks that contradict each other cancel there. A network that "
        "was trained for several lengths counts once, with its longest runs. The test takes tasks to be independent; "
        "those that share a text are less so, which makes p too small. Of so many rows one in twenty is below 0.05 by "
        f"chance. Tasks on which a gamma was found are left out: {apart}."
    )
    head = ["", "against", "tasks", "ahead", "better / level / worse", "in sum"]
    return Section(title, [head, *(each.row() for each in found)], text)
