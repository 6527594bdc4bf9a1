"""Every gamma against every reference over all tasks: whether small differences of one direction add up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from anon_lab.significance import combined, is_better, p_value
from anon_lab.studies._grounds import CHOICE
from anon_lab.studies._report import Line, against, flatters
from anon_lab.studies._spec import Section, anon_defaults

SCALED = " with lr_scale"


class Test(NamedTuple):
    """On one task."""

    p: float
    """Welch's; 0 where so many runs of one side diverged that it has no mean, 1 where the better mean is that of
    whoever lost more runs."""
    better: bool
    """Whether Anon's mean is the better one."""
    verdict: str


class Method(NamedTuple):
    """What adds up: the same gamma with and without `lr_scale` are two, except at 1, where that changes nothing, and so
    it is with other refresh times than the default's, with Adam's memory, and with a psi that follows."""

    gamma: float
    scaled: bool
    growth: float = anon_defaults()["growth"]
    adams_memory: bool = False
    follows: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Method":
        gamma = settings["gamma"]
        scaled = gamma != 1 and settings.get("lr_scale") is not None
        settings = {**anon_defaults(), **settings}
        follows = (settings["guard"] or {}).get("follow", False)
        return cls(gamma, scaled, settings["growth"], settings["beta3"] is None, follows)

    @property
    def is_default(self) -> bool:
        """Apart from gamma and `lr_scale`."""
        return self == Method(self.gamma, self.scaled)

    @property
    def label(self) -> str:
        growth = "" if self.growth == anon_defaults()["growth"] else f", growth {self.growth:g}"
        memory = ", Adam's memory" if self.adams_memory else ""
        follows = ", follow" if self.follows else ""
        return f"γ {self.gamma:g}{growth}{memory}{follows}{SCALED if self.scaled else ''}"

    @property
    def found_on(self) -> tuple[str, ...]:
        """Tasks on which it was singled out, and so have no say in what it adds up to."""
        return FOUND_ON.get(self.label.removesuffix(SCALED), ())


@dataclass(frozen=True)
class Across:
    """A gamma against a reference."""

    method: Method
    reference: str
    tests: Sequence[Test]

    @property
    def ahead(self) -> int:
        return sum(test.better for test in self.tests)

    def summed(self) -> tuple[float, bool]:
        return combined([test[:2] for test in self.tests])

    def sentence(self) -> str:
        met = f"{self.method.label} is ahead of {self.reference} on {self.ahead} of {len(self.tests)} tasks"
        return f"{met} (in sum {self.judged()})"

    def judged(self) -> str:
        p, better = self.summed()
        return f"{'level' if p >= 0.05 else 'better' if better else 'worse'}, p = {p:.2g}"

    def row(self) -> list[str]:
        told = [sum(test.verdict == each for test in self.tests) for each in ("better", "tie", "worse")]
        counts = [str(len(self.tests)), str(self.ahead), " / ".join(map(str, told))]
        return [f"Anon {self.method.label}", self.reference, *counts, self.judged()]


Weight = tuple[float, int, int]
"""Length in epochs and in steps (on one network all are in the same), then seeds of the side that has fewer."""
FOUND_ON = {
    "γ 1.5": ("zipf", "gpt 1m"),
    "γ 1, growth 1.25": ("diffusion 16px",),
    "γ 1, follow": ("zipf", "gpt 1m"),
    "γ 1.5, follow": ("zipf", "gpt 1m"),
    "γ 1, Adam's memory": ("diffusion 16px", "gpt 1m", "gpt 1m, untied"),
    "γ 1, growth 1.25, Adam's memory": ("diffusion 16px", "gpt 1m", "gpt 1m, untied"),
}
"""Tasks on which a method was singled out, and so have no say in what it adds up to."""


def across(grounds: Iterable[Sequence[Line]], references: Sequence[str]) -> list[Across]:
    """By reference, then by gamma, where there are several tasks with several seeds of both. A network that was trained
    several times is one task: its longest runs count, of equally long ones those with most seeds, of these the first.
    The ground that ended the choice of the guards has no say, and where a study reports one method several times on
    a task, tuned in other ways, the first counts."""
    found: dict[tuple[str, Method], dict[str, tuple[Weight, Test]]] = {}
    for contenders in grounds:
        ground = contenders[0].ground
        named = {line.label: line for line in contenders if line.label in references}
        ours: dict[Method, Line] = {}
        for line in contenders:
            if "gamma" in line.settings:
                ours.setdefault(Method.of(line.settings), line)
        for reference, (method, line) in product(named.values(), ours.items()):
            test = _test(line, reference)
            if test is None or ground.name in (CHOICE, *method.found_on):
                continue
            seeds = min(len(line.records), len(reference.records))
            weight = (ground.recipe.epochs or 0, ground.recipe.steps or 0, seeds)
            tests = found.setdefault((reference.label, method), {})
            tests[ground.network] = max(tests.get(ground.network, (weight, test)), (weight, test), key=itemgetter(0))
    made = [
        Across(method, name, [test for _, test in tests.values()])
        for (name, method), tests in found.items()
        if len(tests) > 1
    ]
    return sorted(made, key=lambda each: (references.index(each.reference), each.method))


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
    apart = "; ".join(f"{method} without {' and '.join(tasks)}" for method, tasks in FOUND_ON.items())
    text = (
        "How often Anon's mean is the better one, how often that is told apart, and Stouffer's test over all of them: "
        "do small differences of one direction add up? Tasks that contradict each other cancel there. A network that "
        "was trained several times counts once, with its longest runs, of equally long ones those with most seeds. The "
        "test takes tasks to be independent; those that share a text are less so, which makes p too small. Of so many "
        "rows one in twenty is below 0.05 by chance. The task that ended the choice of the guards is left out, and "
        f"those on which a method was found: {apart}. On digits, zipf and ngram, which count, the guards were screened "
        "at γ 1, which flatters it."
    )
    head = ["", "against", "tasks", "ahead", "better / level / worse", "in sum"]
    return Section(title, [head, *(each.row() for each in found)], text)
