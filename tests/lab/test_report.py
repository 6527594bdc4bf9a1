"""The page of a comparison: the finding, every number in compare.json, and a look at it in a real browser."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import chromium, until

from anon_lab import report
from anon_lab.compare import Outcome, ranked, rows
from anon_lab.settings import Settings
from anon_lab.study import Plan, Tried
from anon_lab.sweep_folder import Sweep
from anon_lab.tasks import Metric, Recipe

ACCURACY = Metric("accuracy", "%", higher_is_better=True)
SWEEP = Sweep(Settings("digits", "", 0.0, Recipe(batch_size=40, steps=20)), [], Plan(3, Path("unused")))


def outcome(label: str, finals: list[float | None], settings: dict | None = None, gpu: bool = False) -> Outcome:
    """A contender whose seeds end at these values, None for one that diverged."""
    settings = settings or {"lr": 1e-3}
    trials = [
        Tried(0, settings, 90.0, None, {}),
        Tried(1, {**settings, "lr": 1e-2}, None, "given up", {}),
        Tried(2, {**settings, "lr": 1.0}, None, "refused: lr must be small & <finite>", {}),
    ]
    results = [
        {
            "seed": 1000 + index,
            "diverged": final is None,
            "evaluation": None if final is None else {"accuracy": final},
            "seconds_a_step": 0.002,
            "parameters": 100,
            "state_bytes": 800,
            "peak_memory_bytes": 3 * 2**30 if gpu else None,
        }
        for index, final in enumerate(finals)
    ]
    curves = [
        [
            {"step": 10, "loss": 1.0, "evaluation": {"accuracy": 50.0 + index}},
            {"step": 20, "loss": 0.5 if final is not None else None, "evaluation": final and {"accuracy": final}},
        ]
        for index, final in enumerate(finals)
    ]
    name = label.partition(" (")[0]
    return Outcome(label, name, {}, trials, trials[0] if finals else None, results, curves)


FOUR = [
    outcome("SGDM", [85.0, 85.1, 84.9], gpu=True),
    outcome("Anon (gamma 1.1)", [97.0, 97.1, 96.9], {"gamma": 1.1, "lr": 1e-3}, gpu=True),
    outcome("AdamW", [96.9, None, 97.3], gpu=True),
    outcome("Lion", []),
]


class TestFinding:
    def test_ties_are_named(self):
        """AdamW's mean is the highest, but one of its seeds diverged, and who fails is not the best."""
        assert report.finding(FOUR, ACCURACY) == "Anon (gamma 1.1) ends at accuracy 97.00 ± 0.25 %; AdamW ties with it"

    def test_all_behind(self):
        others = [outcome("SGDM", [95.0, 95.1, 94.9]), outcome("AdamW", [97.0, 97.1, 96.9])]
        assert report.finding(others, ACCURACY) == "AdamW ends at accuracy 97.00 ± 0.25 %; SGDM ends worse"

    def test_lower_can_be_better(self):
        loss = replace(ACCURACY, unit="", higher_is_better=False)
        others = [outcome("SGDM", [95.0, 95.1, 94.9]), outcome("AdamW", [97.0, 97.1, 96.9])]
        assert report.finding(others, loss) == "SGDM ends at accuracy 95.00 ± 0.25; AdamW ends worse"

    def test_nothing_left(self):
        assert report.finding([outcome("Lion", []), outcome("SGD", [None, None, None])], ACCURACY) == (
            "Every contender diverged"
        )


def test_table_says_what_was_lost():
    lines = {line[0]: line[1:4] for line in rows(FOUR, ACCURACY)}
    assert lines["AdamW"] == ["97.1 ± 2.5", "tie", "1 of 3 diverged"]
    assert lines["Anon (gamma 1.1)"] == ["97.00 ± 0.25", "best", "3"]
    assert lines["SGDM"] == ["85.00 ± 0.25", "worse", "3"]
    assert lines["Lion"] == ["diverged", "", "no trial came to its end"]
    assert [each.label for each in ranked(FOUR, ACCURACY)][-1] == "Lion"


@pytest.fixture
def page(tmp_path) -> Path:
    return report.save(replace(SWEEP, plan=Plan(3, tmp_path)), FOUR, ACCURACY)


def test_numbers_beside_the_page(page):
    record = json.loads((page.parent / "compare.json").read_text(), parse_constant=pytest.fail)
    first, *_, lossy, last = record["outcomes"]
    assert first["label"] == "Anon (gamma 1.1)"
    assert (lossy["label"], lossy["diverged"]) == ("AdamW", 1)
    assert last["against_the_best"] is None
    assert first["milliseconds_a_step"] == pytest.approx(2)
    assert first["state_bytes_a_parameter"] == 8
    assert first["peak_memory_gib"] == 3
    assert [trial["ended"] for trial in first["trials"]][:2] == [None, "given up"]
    assert last["interval"] is None
    assert last["peak_memory_gib"] is None


def test_page_is_whole(page):
    text = page.read_text()
    figures = re.search(r"const figures = (.*);\n", text)
    assert figures is not None
    json.loads(figures[1].replace("<\\/", "</"), parse_constant=pytest.fail)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert "&lt;finite&gt;" not in text.split("<script>")[0]  # the reason of a refusal is compare.json's


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser(page, scheme):
    with chromium() as browser:
        view = browser.new_page(color_scheme=scheme, viewport={"width": 1200, "height": 900})
        complaints = []
        view.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        view.on("pageerror", lambda error: complaints.append(str(error)))
        view.goto(page.as_uri())
        until(view, "document.querySelectorAll('.plot .main-svg').length >= 5")
        assert complaints == []
        assert view.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "NaN" not in view.inner_text("body")
        legend = view.evaluate("[...document.querySelectorAll('#curves .legendtext')].map(each => each.textContent)")
        assert legend == ["Anon (gamma 1.1)", "SGDM", "AdamW"]  # Lion has nothing to draw
        drawn = "[...document.querySelectorAll('#cost .infolayer text')].map(each => each.textContent)"
        assert view.evaluate(drawn) == ["milliseconds a step", "state, bytes a parameter", "peak GPU memory, GiB"]
