"""What a study has found, as README.md, NAME.json and pictures; from its results alone, so at any moment."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console

from anon_lab.files import write_bytes, write_json, write_text
from anon_lab.significance import is_better, p_value, verdict
from anon_lab.studies import _plots
from anon_lab.studies._results import Record, Results, value
from anon_lab.studies._spec import Ground, Job, Section, Stage, Study, anon_defaults
from anon_lab.studies._training import missing
from anon_lab.tables import _pictures
from anon_lab.tables._words import NONE, as_rich, spread

CURVES = 9
"""The most that one picture can hold."""
PROTOCOL = (
    "Settings are chosen on validation examples, one axis after another with {trials}, "
    "from one seed (with a last check of the learning rate where there is a table of it), and reported on the test set "
    "from fresh seeds, trained on all training examples. Numbers are mean ± standard deviation over seeds; better, "
    "worse and tie are Welch's test at 5 %, among runs on the same data. Anon's defaults, betas 0.9, 0.999 among them, "
    "are not shown."
)


@dataclass(frozen=True)
class Line:
    """A contender on one ground: its runs from fresh seeds."""

    label: str
    ground: Ground
    settings: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def values(self) -> list[float]:
        numbers = (value(record, self.ground.metric) for record in self.records)
        return [number for number in numbers if number is not None]

    @property
    def by_seed(self) -> dict[int, float]:
        """Values of the runs that did not diverge."""
        numbers = ((record["settings"]["seed"], value(record, self.ground.metric)) for record in self.records)
        return {seed: number for seed, number in numbers if number is not None}

    @property
    def lost(self) -> int:
        """Runs that diverged."""
        return len(self.records) - len(self.values)

    @property
    def has_failed(self) -> bool:
        """Whether so many runs diverged that there is no mean, or no spread."""
        return len(self.values) < min(2, len(self.records))

    def measured(self) -> str:
        if not self.values:
            return "diverged"
        return spread(self.values) + (f" ({self.lost} of {len(self.records)} diverged)" if self.lost else "")


def lines(stages: Sequence[Stage], results: Results) -> dict[str, list[Line]]:
    """By ground, the contenders that were reported on, in the order of the stages."""

    def line(label: str, over: Sequence[tuple[Job, Record]]) -> Line:
        first = over[0][0]
        return Line(label, first.ground, first.values, [record for _, record in over])

    jobs = [job for stage in stages for job in stage.jobs(results) if job.report]
    return {ground: [line(*each) for each in found.items()] for ground, found in _over(jobs, results).items()}


def _over(jobs: Sequence[Job], results: Results) -> dict[str, dict[str, list[tuple[Job, Record]]]]:
    """The jobs that are done, each once, by ground and contender. A ground that was trained on several data is several,
    since runs on different data do not compare; runs that do not tell theirs are taken to be alike."""
    unique = {job.key(): job for job in jobs}.values()
    done = [(job, record) for job in unique if (record := results.of(job)) is not None]
    data: dict[str, set[str]] = {}
    for job, record in done:
        data.setdefault(job.ground.name, set()).update({record["data"]} if "data" in record else ())
    grouped: dict[str, dict[str, list[tuple[Job, Record]]]] = {}
    for job, record in done:
        ground = job.ground.name
        if "data" in record and len(data[ground]) > 1:
            ground += f" (data: {record['data']})"
        grouped.setdefault(ground, {}).setdefault(job.label, []).append((job, record))
    return grouped


def against(line: Line, other: Line | None) -> str:
    """The verdict on the line in a word. Of runs that diverged nothing is left to compare, so whoever lost more of them
    is not called better for those that are left."""
    if other is None or other is line or not (line.values or other.values):
        return NONE
    if line.has_failed != other.has_failed:
        return "better" if other.has_failed else "worse"
    if min(len(line.records), len(other.records)) < 2:
        return "one seed"
    return "tie" if flatters(line, other) else verdict(line.values, other.values, line.ground.metric)


def flatters(line: Line, other: Line) -> bool:
    """Whether the better mean is that of whoever lost more runs."""
    ours_is = is_better(line.values, other.values, line.ground.metric)
    return line.lost != other.lost and ours_is == (line.lost > other.lost)


def reported(study: Study, found: Mapping[str, list[Line]]) -> Iterator[Section]:
    """A table for each ground, the best first."""
    for ground, contenders in found.items():
        metric = contenders[0].ground.metric
        by_label = {line.label: line for line in contenders}
        references = [label for label in study.references if label in by_label]
        sign = -1 if metric.higher_is_better else 1
        order = sorted(contenders, key=lambda line: (not line.values, sign * mean(line.values or [0.0])))
        alone = contenders[0].ground.together == 1
        head = ["", f"{metric.name} {metric.unit}".strip(), "seeds", *(f"against {each}" for each in references)]
        body = [
            [
                line.label,
                line.measured(),
                str(len(line.records)),
                *(against(line, by_label[each]) for each in references),
                *([f"{1000 * mean(record['seconds_a_step'] for record in line.records):.3g}"] if alone else []),
                f"{sum(record['device_seconds'] for record in line.records) / 60:.2f}",
                in_words(unusual(line.settings)),
            ]
            for line in order
        ]
        judged = f"by {metric.name}" if contenders[0].ground.measure else "on the test set"
        yield Section(
            f"{ground}: fresh seeds, judged {judged}",
            [[*head, *(["ms a step"] if alone else []), "device minutes", "settings"], *body],
        )


def _of_stages(study: Study, results: Results, kind: str) -> list[Job]:
    """The jobs of all stages whose names begin so."""
    return [job for stage in study.stages if stage.name.startswith(kind) for job in stage.jobs(results)]


def searched(study: Study, results: Results) -> Iterator[Section]:
    """What the choice was made from: every contender's best trial of each ground."""
    for ground, contenders in _over(_of_stages(study, results, "tune"), results).items():
        body = []
        for label, over in contenders.items():
            metric = over[0][0].ground.metric
            sign = 1 if metric.higher_is_better else -1
            alive = [(sign * number, job) for job, record in over if (number := value(record, metric)) is not None]
            lost = len(over) - len(alive)
            shown = ["diverged", ""]
            if alive:
                number, job = max(alive, key=lambda each: each[0])
                shown = [f"{sign * number:.4g}", in_words(unusual(job.values))]
            body.append([label, str(len(over)) + (f", {lost} diverged" if lost else ""), *shown])
        yield Section(f"{ground}: the search", [["", "trials", "best on validation", "settings"], *body])


def checked(study: Study, results: Results) -> Iterator[Section]:
    """Of each ground whose searches end with a check, the learning rates of every contender."""
    for name, contenders in _over(_of_stages(study, results, "check"), results).items():
        ground = next(job.ground for over in contenders.values() for job, _ in over)
        body = []
        for label, over in contenders.items():
            for lr in dict.fromkeys(job.values["lr"] for job, _ in over):
                line = Line(label, ground, {}, [record for job, record in over if job.values["lr"] == lr])
                body.append([label, f"{lr:g}", line.measured(), f"{len(line.records)} of {ground.checks}"])
        metric = f"{ground.metric.name} {ground.metric.unit}".strip()
        text = (
            "Validation examples; the setting that was found, and the same at the learning rates beside it. The one "
            "with the best mean is reported on."
        )
        yield Section(f"{name}: the search's last check", [["", "lr", metric, "seeds"], *body], text)


def unusual(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is Anon's default."""
    defaults = anon_defaults()

    def is_usual(name: str, each: Any) -> bool:
        return name in defaults and (tuple(each) if isinstance(each, list) else each) == defaults[name]

    left = {name: each for name, each in settings.items() if not is_usual(name, each)}
    if isinstance(left.get("guard"), Mapping):
        left["guard"] = {name: each for name, each in left["guard"].items() if each != defaults["guard"].get(name)}
    return left


def in_words(settings: Mapping[str, Any]) -> str:
    """As "lr 0.001, clip 3"; a guard's fields stand by themselves."""
    said = []
    for name, each in settings.items():
        if name == "guard":
            said.append("as printed" if each is None else in_words(each))
        elif isinstance(each, Mapping):
            said.append(f"{name} ({in_words(each)})")
        elif isinstance(each, tuple | list):
            said.append(f"{name} {', '.join(f'{part:g}' for part in each)}")
        else:
            said.append(f"{name} {each:g}" if isinstance(each, float) else f"{name} {each}")
    return ", ".join(said)


def left_in_words(study: Study, results: Results) -> str:
    """What is still to be trained, as far as it is known."""
    seen: set[str] = set()
    left: list[tuple[str, int]] = []
    for stage in study.stages:  # a run that two stages ask for is the first one's
        new = {job.key() for job in missing(stage, results)} - seen
        left.append((stage.name, len(new)))
        seen |= new
    unknown = [stage.name for stage in study.stages if not stage.jobs(results)]
    said = [f"{count} runs of “{name}”" for name, count in left if count]
    if unknown:
        said.append(f"all of {', '.join(f'“{name}”' for name in unknown)}")
    return f"Left to train: {'; '.join(said)}." if said else "All runs are done."


def borrowed_in_words(study: Study, results: Results) -> str:
    """What this study needed and others had trained."""
    keys = {job.key() for stage in study.stages for job in stage.jobs(results)}
    count = len(keys & (results.borrowed.keys() - results.records.keys()))
    return f"{count} more are those of {' and '.join(f'`{name}`' for name in study.builds_on)}. " if count else ""


def findings(study: Study, found: Mapping[str, list[Line]]) -> list[str]:
    """How every Anon stands against the references; all of them, since the best would be chosen on the test set."""
    if study.sweeps_gamma:
        return [f"{_plots.finding(ground, contenders)}." for ground, contenders in found.items()]
    said = []
    for ground, contenders in found.items():
        others = [line for line in contenders if line.label in study.references]
        for line in contenders:
            compared = [
                f"{each.label} ({each.measured()}) {against(line, each)}" for each in others if each is not line
            ]
            if line.label.startswith("Anon") and compared:
                said.append(f"{ground}: {line.label} ({line.measured()}) against {', against '.join(compared)}.")
    return said


def costs(results: Results) -> Section:
    """Runs and minutes of each stage on each device."""
    stages: dict[tuple[str, str], list[float]] = {}
    for record in results.records.values():
        stages.setdefault((record["stage"], record["device"]), []).append(record["device_seconds"])
    body = [[*name, str(len(times)), f"{sum(times) / 60:.2f}"] for name, times in stages.items()]
    return Section("Device time", [["stage", "device", "runs", "minutes"], *body])


def save(name: str, study: Study, results: Results, command: str, place: Path, console: Console) -> list[Path]:
    """Print the tables; write README.md, NAME.json and a picture for each ground and matrix."""
    found = lines(study.stages, results)
    sections = [
        *reported(study, found),
        *study.sections(results),
        *searched(study, results),
        *checked(study, results),
        costs(results),
    ]
    for section in sections:
        console.print(as_rich(section))
    pictures: dict[str, bytes] = {}
    for ground, contenders in found.items():
        if study.sweeps_gamma:
            pictures[f"{_plots.slug(ground)}.png"] = _png(_plots.over_gamma(ground, contenders))
        elif len(contenders) <= CURVES:
            pictures[f"{_plots.slug(ground)}.png"] = _png(
                (_plots.curves if _plots.have_curves(contenders) else _plots.ends)(ground, contenders)
            )
    for label, heat in study.heats(results).items():
        pictures[f"{label}.png"] = _png(_pictures.draw([heat], heat.title))
    text = _readme(study, results, command, sections, findings(study, found), list(pictures))
    return [
        write_text(place / "README.md", text),
        write_json(place / f"{name}.json", _json(name, study, results, command, found, sections)),
        *(write_bytes(place / file, content) for file, content in pictures.items()),
    ]


def _readme(
    study: Study,
    results: Results,
    command: str,
    sections: Sequence[Section],
    said: Sequence[str],
    pictures: Sequence[str],
) -> str:
    records = results.records.values()
    spent = ", ".join(f"{minutes:.1f} minutes of {device}" for device, minutes in results.minutes().items()) or NONE
    torches = ", ".join(sorted({record["versions"]["torch"] for record in records}))
    parts = [
        f"# {study.title}",
        study.asks,
        f"    {command}",
        f"{len(records)} runs, {spent} (torch {torches or NONE}). {borrowed_in_words(study, results)}"
        "The command goes on where it stopped; every run is a line of `runs.jsonl`. " + left_in_words(study, results),
        PROTOCOL.format(trials=study.trials),
        "\n".join(f"- {sentence}" for sentence in said),
        *(f"![{picture}]({picture})" for picture in pictures),
    ]
    return "\n\n".join([*filter(None, parts), *map(as_markdown, sections)]) + "\n"


def as_markdown(section: Section) -> str:
    head, *body = section.lines
    table = "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))
    return "\n\n".join(part for part in (f"## {section.title}", section.text, table) if part)


def _json(
    name: str,
    study: Study,
    results: Results,
    command: str,
    found: Mapping[str, list[Line]],
    sections: Sequence[Section],
) -> dict[str, Any]:
    grounds = {}
    for ground, contenders in found.items():
        by_label = {line.label: line for line in contenders}
        grounds[ground] = {
            "metric": vars(contenders[0].ground.metric),
            "contenders": {
                line.label: {
                    "settings": dict(line.settings),
                    "values": line.values,
                    "mean": mean(line.values) if line.values else None,
                    "standard_deviation": stdev(line.values) if len(line.values) > 1 else None,
                    "diverged": len(line.records) - len(line.values),
                    "device_seconds": [record["device_seconds"] for record in line.records],
                    "against": {
                        each: {"verdict": against(line, other), "p": p_value(line.values, other.values)}
                        for each in study.references
                        if (other := by_label.get(each)) is not None and other is not line
                    },
                }
                for line in contenders
            },
        }
    return {
        "study": name,
        "command": command,
        "runs": len(results.records),
        "device_minutes": results.minutes(),
        "left": left_in_words(study, results),
        "grounds": grounds,
        "sections": [vars(section) for section in sections],
    }


def _png(figure: _plots.Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
