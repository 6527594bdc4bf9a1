"""All studies at one glance: where Anon is better than AdamW and SGDM, where it is level, and where worse."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from anon_lab.files import write_bytes, write_text
from anon_lab.studies import NAMES, folder, load, trained
from anon_lab.studies._across import Across, Method, across, section
from anon_lab.studies._plots import style
from anon_lab.studies._report import Line, against, as_markdown, lines, reported
from anon_lab.studies._spec import Section, Study
from anon_lab.tables._words import as_rich

REFERENCES = ("AdamW", "Adam", "SGDM")
"""Whom Anon is compared with; the first of them that took part gives a panel its line."""
COLUMNS = 4
COMMAND = "anon results"

Panels = Mapping[str, Sequence[Line]]
"""By name, the contenders that were reported on."""


class Report(NamedTuple):
    """What a study that has been begun reports on, by ground."""

    name: str
    study: Study
    grounds: dict[str, list[Line]]
    cut_off: Sequence[Path] = ()
    """Files of which the last line was left out."""


def read(results: Path) -> list[Report]:
    found = []
    for name in NAMES:
        if (folder(name, results, tiny=False) / "runs.jsonl").exists():
            study = load(name)
            runs = trained(name, study, results)
            found.append(Report(name, study, lines(study.stages, runs), runs.cut_off))
    return found


def collected(reports: Sequence[Report]) -> tuple[dict[str, list[Line]], list[Section]]:
    """The grounds on which Anon met a reference, as panels and as tables, in their order; a ground of several studies
    is one, to which each adds the contenders that those before it have not."""
    met: dict[str, tuple[str, Study, dict[str, Line]]] = {}
    for name, study, grounds, _ in reports:
        for ground, contenders in () if study.sweeps_gamma else grounds.items():
            *_, merged = met.setdefault(ground, (ground if name == "guards" else f"{name}, {ground}", study, {}))
            for line in contenders:
                merged.setdefault(line.label, line)
    panels: dict[str, list[Line]] = {}
    sections: list[Section] = []
    for name, study, merged in met.values():
        contenders = list(merged.values())
        if _references(contenders) and _ours(contenders):
            panels[name] = contenders
            sections += reported(study, {name: contenders})
    return panels, sections


def by_default(panels: Panels) -> Panels:
    """Anon with its own refresh times, memory and guards, once at each gamma, and who met it. Of one that was tuned in
    several ways the first counts, as in the sums over all tasks: a second search would be a second chance."""
    shown = {}
    for name, contenders in panels.items():
        ours: dict[Method, Line] = {}
        for line in _ours(contenders):
            ours.setdefault(Method.of(line.settings), line)
        defaults = [line for method, line in ours.items() if method.is_default]
        shown[name] = [line for line in contenders if line in defaults or line not in _ours(contenders)]
    return shown


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


def summed_up(found: Sequence[Across], panels: Panels) -> str:
    """Each gamma of the panels against what it stands closest to: SGDM near 0, AdamW near 1 and above."""
    shown = {Method.of(line.settings) for contenders in panels.values() for line in _ours(contenders)}
    kin = [each for each in found if (each.reference == "SGDM") == (each.method.gamma <= 0.5) and each.method in shown]
    said = "; ".join(each.sentence() for each in sorted(kin, key=lambda each: each.method))
    return f"Over all studies {said}" if said else ""


def draw(panels: Panels, title: str) -> Figure:
    """A panel for each ground, in which right is better: every seed, their mean, and the reference's as a line."""
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(11.5, 0.7 + 2.25 * rows), layout="constrained")
    unbroken = title.replace("p = ", "p\u00a0=\u00a0")
    figure.suptitle(f"{fill(unbroken, 110)}\nfurther right is better", fontsize=11)
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
    axis.set_yticks(range(len(order)), [line.label.replace(", ", ",\n") for line in order], fontsize=8)
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.locator_params(axis="x", nbins=4)
    metric = order[0].ground.metric
    if not metric.higher_is_better:
        axis.invert_xaxis()
    axis.set_xlabel(f"{metric.name} {metric.unit}".strip(), fontsize=8)


def save(results: Path, console: Console) -> list[Path]:
    """Print the tables; write README.md and overview.svg."""
    reports = read(results)
    panels, sections = collected(reports)
    if not panels:
        raise ValueError(f"there is no report in {results} yet: anon study writes them")
    grounds = [contenders for report in reports for contenders in report.grounds.values()]
    found = across(grounds, REFERENCES)
    shown = by_default(panels)
    summary = summed_up(found, shown)
    gpts = across([each for each in grounds if each[0].ground.task == "gpt"], REFERENCES)
    sums = (section("Over all tasks", found), section("Over the GPTs", gpts))
    sections = [*(each for each in sums if len(each.lines) > 1), *sections]
    for each in sections:
        console.print(as_rich(each))
    torn = dict.fromkeys(path for report in reports for path in report.cut_off)
    missing = [f"The last line of {path} was cut off and is left out" for path in torn]
    for sentence in filter(None, (headline(shown), summary, *missing)):
        console.print(f"{sentence}.", markup=False, highlight=False)
    picture = io.BytesIO()
    with rc_context({"svg.hashsalt": COMMAND}):  # the same results make the same file
        draw(shown, summary or headline(shown)).savefig(picture, format="svg", metadata={"Date": None})
    parts = [
        "# What the studies found",
        f"    {COMMAND}",
        f"{headline(shown)}. Every gamma of every report below counts, by Welch's test at 5 %; other refresh times, "
        "memories and guards than the default's and second searches have rows below, but no part in that or in the "
        "picture.",
        *([f"{summary}."] if summary else []),
        "![All reports at once](overview.svg)",
        *map(as_markdown, sections),
    ]
    return [
        write_text(results / "README.md", "\n\n".join(parts) + "\n"),
        write_bytes(results / "overview.svg", picture.getvalue()),
    ]
