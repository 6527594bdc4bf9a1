"""All studies at one glance: where Anon is better than AdamW and SGDM, where it is level, and where worse."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from textwrap import fill

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from anon_lab.files import write_bytes, write_text
from anon_lab.significance import combined, is_better, p_value
from anon_lab.studies import NAMES, folder, load, trained
from anon_lab.studies._plots import style
from anon_lab.studies._report import Line, against, as_markdown, lines, reported
from anon_lab.studies._spec import Section
from anon_lab.tables._words import as_rich

REFERENCES = ("AdamW", "Adam", "SGDM")
"""Whom Anon is compared with; the first of them that took part gives a panel its line."""
COLUMNS = 4
COMMAND = "anon results"

Panels = Mapping[str, Sequence[Line]]
"""By name, the contenders that were reported on."""


def collected(results: Path) -> tuple[dict[str, Sequence[Line]], list[Section]]:
    """Of every study the grounds on which Anon met a reference, as panels and as tables, in their order."""
    panels: dict[str, Sequence[Line]] = {}
    sections: list[Section] = []
    for name in NAMES:
        if not (folder(name, results, tiny=False) / "runs.jsonl").exists():
            continue
        study = load(name)
        if study.sweeps_gamma:
            continue
        found = {
            ground if name == "guards" else f"{name}, {ground}": contenders
            for ground, contenders in lines(study, trained(name, study, results)).items()
            if _references(contenders) and _ours(contenders)
        }
        panels |= found
        sections += reported(study, found)
    return panels, sections


def _references(contenders: Sequence[Line]) -> list[Line]:
    named = {line.label: line for line in contenders}
    return [named[each] for each in REFERENCES if each in named]


def _ours(contenders: Sequence[Line]) -> list[Line]:
    """By gamma."""
    return sorted((line for line in contenders if "gamma" in line.settings), key=lambda line: line.settings["gamma"])


def counts(panels: Panels) -> dict[str, Counter[str]]:
    """How often every Anon of every panel is better, worse and level, for each reference that took part."""
    found: dict[str, Counter[str]] = {}
    for contenders in panels.values():
        for reference in _references(contenders):
            verdicts = (against(line, reference) for line in _ours(contenders))
            found.setdefault(reference.label, Counter()).update(verdicts)
    return found


def headline(panels: Panels) -> str:
    """Such as "Anon against AdamW: 1 better, 13 level, 2 worse"."""
    said = []
    for reference, each in counts(panels).items():
        judged = f"{each['better']} better, {each['tie']} level, {each['worse']} worse"
        rest = each.total() - sum(each[verdict] for verdict in ("better", "tie", "worse"))
        said.append(f"against {reference}: {judged}" + (f", {rest} not comparable" if rest else ""))
    return f"Anon {'; '.join(said)}"


@dataclass(frozen=True)
class Across:
    """A gamma against a reference over all grounds on which both have several seeds."""

    line: Line
    """Of any of the grounds."""
    reference: str
    tests: Sequence[tuple[float, bool]]
    """Of each ground Welch's p, and whether Anon's mean is the better one."""
    verdicts: Counter[str]

    @property
    def gamma(self) -> float:
        return self.line.settings["gamma"]

    @property
    def ahead(self) -> int:
        return sum(better for _, better in self.tests)

    @property
    def p(self) -> str:
        return f"{combined(self.tests):.2g}"


def across(panels: Panels) -> list[Across]:
    """By reference, then by gamma; only where there are several grounds."""
    found: dict[tuple[str, str], list[tuple[Line, float, bool, str]]] = {}
    for contenders in panels.values():
        for reference, line in product(_references(contenders), _ours(contenders)):
            p = p_value(line.values, reference.values)
            if p is not None:
                better = is_better(line.values, reference.values, line.ground.metric)
                test = (line, p, better, against(line, reference))
                found.setdefault((reference.label, line.label), []).append(test)
    made = [
        Across(each[0][0], reference, [(p, better) for _, p, better, _ in each], Counter(said for *_, said in each))
        for (reference, _), each in found.items()
        if len(each) > 1
    ]
    return sorted(made, key=lambda each: (REFERENCES.index(each.reference), each.gamma))


def summed_up(found: Sequence[Across]) -> str:
    """Each gamma against what it stands closest to: SGDM near 0, AdamW near 1 and above."""
    kin = [each for each in found if (each.reference == "SGDM") == (each.gamma <= 0.5)]
    said = [
        f"γ {each.gamma:g} is ahead of {each.reference} on {each.ahead} of {len(each.tests)} (p = {each.p})"
        for each in sorted(kin, key=lambda each: each.gamma)
    ]
    return f"Over all tasks {'; '.join(said)}" if said else ""


def as_section(found: Sequence[Across]) -> Section:
    body = [
        [
            each.line.label,
            each.reference,
            str(len(each.tests)),
            str(each.ahead),
            " / ".join(str(each.verdicts[verdict]) for verdict in ("better", "tie", "worse")),
            each.p,
        ]
        for each in found
    ]
    text = (
        "How often the mean is the better one, how often that is told apart, and Stouffer's p over all of them: do "
        "small differences of one direction add up? Tasks that contradict each other cancel there."
    )
    return Section("Over all tasks", [["", "against", "tasks", "ahead", "better / level / worse", "p"], *body], text)


def draw(panels: Panels) -> Figure:
    """A panel for each ground, in which right is better: every seed, their mean, and the reference's as a line."""
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(11.5, 0.7 + 2.25 * rows), layout="constrained")
    title = fill(summed_up(across(panels)) or headline(panels), 110)
    figure.suptitle(f"{title}\nfurther right is better", fontsize=11)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis, (name, contenders) in zip(axes, panels.items(), strict=False):
        _draw(axis, contenders)
        axis.set_title(name, fontsize=9)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return figure


def _draw(axis: Axes, contenders: Sequence[Line]) -> None:
    references, ours = _references(contenders), _ours(contenders)
    order = [*reversed(references), *(line for line in contenders if line not in (*references, *ours)), *ours]
    for place, line in enumerate(order):
        colour = style(line, order)["color"]
        axis.plot(line.values, [place] * len(line.values), ".", color=colour, markersize=5, alpha=0.5)
        if line.values:
            axis.plot(mean(line.values), place, "D" if line in ours else "s", color=colour, markersize=6)
    if references[0].values:
        axis.axvline(
            mean(references[0].values), color=style(references[0], order)["color"], linewidth=0.8, linestyle=":"
        )
    axis.set_yticks(range(len(order)), [line.label for line in order], fontsize=8)
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.locator_params(axis="x", nbins=4)
    metric = order[0].ground.metric
    if not metric.higher_is_better:
        axis.invert_xaxis()
    axis.set_xlabel(f"{metric.name} {metric.unit}".strip(), fontsize=8)


def save(results: Path, console: Console) -> list[Path]:
    """Print the tables; write README.md and overview.svg."""
    panels, sections = collected(results)
    if not panels:
        raise ValueError(f"there is no report in {results} yet: anon study writes them")
    found = across(panels)
    sections = [*([as_section(found)] if found else []), *sections]
    for section in sections:
        console.print(as_rich(section))
    said = [f"{each}." for each in (headline(panels), summed_up(found)) if each]
    console.print(*said, sep="\n", markup=False, highlight=False)
    picture = io.BytesIO()
    with rc_context({"svg.hashsalt": COMMAND}):  # the same results make the same file
        draw(panels).savefig(picture, format="svg", metadata={"Date": None})
    parts = [
        "# What the studies found",
        f"    {COMMAND}",
        f"{' '.join(said)} Every gamma that took part on every task counts, by Welch's test at 5 %.",
        "![All reports at once](overview.svg)",
        *map(as_markdown, sections),
    ]
    return [
        write_text(results / "README.md", "\n\n".join(parts) + "\n"),
        write_bytes(results / "overview.svg", picture.getvalue()),
    ]
