"""All studies at one glance: where Anon is better than AdamW and SGDM, where it is level, and where worse."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from anon_lab.files import write_bytes, write_text
from anon_lab.palette import COLOUR, viridis
from anon_lab.studies import NAMES
from anon_lab.studies._plots import OTHERS
from anon_lab.studies._report import as_markdown
from anon_lab.studies._spec import Section
from anon_lab.tables._words import NONE, as_rich, spread

REFERENCES = ("AdamW", "Adam", "SGDM")
"""Whom Anon is compared with; the first of them that took part gives a panel its line."""
COLUMNS = 4
COMMAND = "anon results"


@dataclass(frozen=True)
class Panel:
    """One ground's report, as a study's JSON has it."""

    name: str
    metric: dict[str, Any]
    judged_on: str
    contenders: dict[str, dict[str, Any]]

    @property
    def references(self) -> list[str]:
        return [each for each in REFERENCES if each in self.contenders]

    def ours(self) -> list[str]:
        """By gamma."""
        gammas = {label: gamma for label, each in self.contenders.items() if (gamma := _gamma(each)) is not None}
        return sorted(gammas, key=lambda label: gammas[label])

    def order(self) -> list[str]:
        """References first, then the other baselines, then Anon by gamma."""
        others = [each for each in self.contenders if each not in (*self.references, *self.ours())]
        return [*reversed(self.references), *others, *self.ours()]

    def verdict(self, label: str, reference: str) -> str:
        """The study's, or "worse" where all runs of this one diverged, but not the reference's."""
        found = self.contenders[label]["against"].get(reference)
        if found is None:
            return NONE
        lost = not self.contenders[label]["values"] and self.contenders[reference]["values"]
        return "worse" if lost else found["verdict"]


def _gamma(contender: dict[str, Any]) -> float | None:
    return contender["settings"].get("gamma")


def panels(results: Path) -> list[Panel]:
    """Of every study that has reported on something, in their order; without those that compare Anon with Anon."""
    found = []
    for study in NAMES:
        path = results / study / f"{study}.json"
        if not path.exists():
            continue
        for ground, report in json.loads(path.read_text())["grounds"].items():
            name = ground if study == "guards" else f"{study}, {ground}"
            panel = Panel(name, report["metric"], report["judged_on"], report["contenders"])
            if panel.references and panel.ours():
                found.append(panel)
    return found


def counts(found: Sequence[Panel]) -> dict[str, Counter[str]]:
    """How often every Anon of every panel is better, worse and level, for each reference."""
    return {
        reference: Counter(panel.verdict(label, reference) for panel in having for label in panel.ours())
        for reference in REFERENCES
        if (having := [panel for panel in found if reference in panel.contenders])
    }


def headline(found: Sequence[Panel]) -> str:
    """Such as "Anon against AdamW: 1 better, 13 level, 2 worse"."""
    said = []
    for reference, each in counts(found).items():
        judged = f"{each['better']} better, {each['tie']} level, {each['worse']} worse"
        rest = each.total() - sum(each[verdict] for verdict in ("better", "tie", "worse"))
        said.append(f"against {reference}: {judged}" + (f", {rest} not comparable" if rest else ""))
    return f"Anon {'; '.join(said)}"


def sections(found: Sequence[Panel]) -> list[Section]:
    made = []
    for panel in found:
        unit = f"{panel.metric['name']} {panel.metric['unit']}".strip()
        head = ["", unit, "seeds", *(f"against {each}" for each in panel.references)]
        body = []
        for label in panel.order():
            contender = panel.contenders[label]
            seeds = len(contender["values"]) + contender["diverged"]
            lost = f" ({contender['diverged']} of {seeds} diverged)" if contender["diverged"] else ""
            against = [NONE if label == each else panel.verdict(label, each) for each in panel.references]
            body.append([label, spread(contender["values"]) + lost, str(seeds), *against])
        better = "more" if panel.metric["higher_is_better"] else "less"
        made.append(Section(panel.name, [head, *body], f"Judged {panel.judged_on}; {better} is better."))
    return made


def draw(found: Sequence[Panel]) -> Figure:
    """A panel for each ground, in which right is better: every seed, their mean, and the reference's as a line."""
    rows = -(-len(found) // COLUMNS)
    figure = Figure(figsize=(11.5, 0.7 + 2.25 * rows), layout="constrained")
    figure.suptitle(f"{headline(found)}\nfurther right is better", fontsize=11)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis, panel in zip(axes, found, strict=False):
        _draw(axis, panel)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    return figure


def _draw(axis: Axes, panel: Panel) -> None:
    order = panel.order()
    others = [label for label in order if label not in COLOUR and _gamma(panel.contenders[label]) is None]
    for place, label in enumerate(order):
        contender = panel.contenders[label]
        gamma, values = _gamma(contender), contender["values"]
        if gamma is not None:
            colour = colormaps["viridis"](viridis(gamma))
        else:
            colour = COLOUR[label][0] if label in COLOUR else OTHERS[others.index(label) % len(OTHERS)]
        axis.plot(values, [place] * len(values), ".", color=colour, markersize=5, alpha=0.5)
        if values:
            axis.plot(contender["mean"], place, "D" if gamma is not None else "s", color=colour, markersize=6)
    line = panel.contenders[panel.references[0]]["mean"]
    if line is not None:
        axis.axvline(line, color=COLOUR[panel.references[0]][0], linewidth=0.8, linestyle=":")
    axis.set_yticks(range(len(order)), order, fontsize=8)
    axis.set_ylim(len(order) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=8)
    axis.locator_params(axis="x", nbins=4)
    if not panel.metric["higher_is_better"]:
        axis.invert_xaxis()
    axis.set_title(panel.name, fontsize=9)
    axis.set_xlabel(f"{panel.metric['name']} {panel.metric['unit']}".strip(), fontsize=8)


def save(results: Path, console: Console) -> list[Path]:
    """Print the tables; write README.md and overview.svg."""
    found = panels(results)
    if not found:
        raise ValueError(f"there is no report in {results} yet: anon study writes them")
    made = sections(found)
    for section in made:
        console.print(as_rich(section))
    console.print(headline(found), markup=False, highlight=False)
    picture = io.BytesIO()
    with rc_context({"svg.hashsalt": COMMAND}):  # the same results make the same file
        draw(found).savefig(picture, format="svg", metadata={"Date": None})
    parts = [
        "# What the studies found",
        f"    {COMMAND}",
        f"{headline(found)}. Every gamma that took part on every task counts, by Welch's test at 5 %.",
        "![All reports at once](overview.svg)",
        *(as_markdown(section) for section in made),
    ]
    return [
        write_text(results / "README.md", "\n\n".join(parts) + "\n"),
        write_bytes(results / "overview.svg", picture.getvalue()),
    ]
