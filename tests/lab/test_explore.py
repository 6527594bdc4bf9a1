"""`anon explore`, driven in a real browser: its optimizers are the library's, and everything can be reached."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import REQUIRED, chromium, until
from typer.testing import CliRunner

from anon_lab import cli, explore, problems
from anon_optim import Anon, Box

NAMES = ("Anon", "SGDM", "Adam", "AMSGrad")
GUARDS = {True: {}, False: {"guard": None}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("explore") / "made" / "here"
    result = CliRunner().invoke(cli.app, ["explore", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out / 'explore.html'}\n"
    return out / "explore.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any, written: Path) -> Iterator[Callable[..., Any]]:
    """Open the page with a hash, in a context of its own; afterwards no request and no complaint may be on record."""
    contexts, complaints = [], []

    def open_page(hash: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda request: complaints.append(request.url) if "explore.html" not in request.url else None
        )
        page.goto(written.as_uri() + hash)
        settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def settle(page: Any) -> None:
    page.evaluate("anon.settled()")


def settings(page: Any) -> dict[str, Any]:
    return page.evaluate("anon.settings()")


def slide(page: Any, label: str, value: float) -> None:
    """Move a slider to a value with the arrow keys, from the end that is nearer."""
    slider = page.get_by_role("slider", name=label, exact=True)
    low, high, step = (float(slider.get_attribute(key)) for key in ("min", "max", "step"))
    up = round((value - low) / step)
    down = round((high - low) / step) - up
    slider.focus()
    slider.press("Home" if up <= down else "End")
    for _ in range(min(up, down)):
        slider.press("ArrowRight" if up <= down else "ArrowLeft")
    assert float(slider.input_value()) == pytest.approx(value, abs=1e-9)


def make(name: str, params: list[torch.Tensor], lr: float, s: dict[str, Any], **more: Any) -> torch.optim.Optimizer:
    betas = s["beta1"], s["beta2"]
    if name == "Anon":
        gamma, growth, beta3 = s["gamma"], float(s["growth"]), s["beta3"]
        return Anon(params, lr, gamma, betas, beta3=beta3, growth=growth, **GUARDS[s["guards"]], **more)
    if name == "SGDM":
        return torch.optim.SGD(params, lr, momentum=s["beta1"])
    return torch.optim.Adam(params, lr, betas, amsgrad=name == "AMSGrad")


def descend(name: str, lr: float, s: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The points and losses of steps 0, 1, 2, ... by the library, torch and autograd, in float64."""
    theta = torch.tensor([s["x"], s["y"]], dtype=torch.float64, requires_grad=True)
    optimizer = make(name, [theta], lr, s)
    points, losses = [], []
    for _ in range(s["steps"] + 1):
        loss = problems.PROBLEMS[s["f"]].f(theta)
        points.append(theta.detach().clone())
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(points), torch.stack(losses)


def play_online(name: str, lr: float, s: dict[str, Any]) -> tuple[list[float], list[float]]:
    """x and regret / t after steps 0, 1, 2, ... of the online problem."""
    theta = torch.tensor([s["x"]], dtype=torch.float64, requires_grad=True)
    optimizer = make(name, [theta], lr, s, **({"project": Box(-1, 1)} if name == "Anon" else {}))
    xs, regrets, regret = [s["x"]], [math.nan], 0.0
    for t in range(1, s["steps"] + 1):
        slope = problems.online_gradient(t)
        regret += slope * (theta.item() + 1)
        theta.grad = torch.tensor([slope + problems.online_noise(t, s["noise"])], dtype=torch.float64)
        optimizer.param_groups[0]["lr"] = lr / math.sqrt(t)
        optimizer.step()
        with torch.no_grad():
            theta.clamp_(-1, 1)
        xs.append(theta.item())
        regrets.append(regret / t)
    return xs, regrets


def compare(page: Any, name: str) -> None:
    """The page's run is the library's, to 1e-6 at every step."""
    s, lr, run = settings(page), page.evaluate(f"anon.rate('{name}')"), page.evaluate(f"anon.trajectory('{name}')")
    if s["f"] == "online":
        xs, regrets = play_online(name, lr, s)
        assert run["x"] == pytest.approx([xs[t] for t in run["t"]], rel=0, abs=1e-6)
        assert run["regret"][1:] == pytest.approx([regrets[t] for t in run["t"][1:]], rel=1e-6, abs=1e-6)
        assert run["t"][-1] == s["steps"]
        return
    points, losses = descend(name, lr, s)
    assert run["t"] == list(range(s["steps"] + 1))
    here = torch.tensor([run["x"], run["y"]], dtype=torch.float64).T
    torch.testing.assert_close(here, points, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.tensor(run["loss"], dtype=torch.float64), losses, rtol=1e-6, atol=1e-6)
    travelled = (points[1:] - points[:-1]).norm(dim=-1).sum()
    assert travelled > 0.5, "a run that stands still would compare nothing"


# The paces are such that no run is unstable: there rounding would grow to any size.
USUAL = ""
NO_SLOPE_ALONG_Y = "&start=0,-1"
CASES = [
    ("beale", -0.5, "2", 0.5, "on", 0.02, USUAL),
    ("beale", 1.5, "1.1", 0.3, "on", 0.02, USUAL),
    ("beale", 1.5, "1.1", 0.3, "off", 0.01, USUAL),
    ("beale", 1, "2", 0.5, "on", 0.02, NO_SLOPE_ALONG_Y),
    ("beale", 0.5, "3", 0.5, "on", 0.02, NO_SLOPE_ALONG_Y),
    ("rosenbrock", 1, "1.15", 0.9, "on", 0.02, USUAL),
    ("rosenbrock", 0.5, "3", 0, "off", 0.02, USUAL),
    ("rastrigin", -1, "2", 0.5, "on", 0.02, USUAL),
    ("rastrigin", 2, "1.3", 0.5, "off", 0.02, USUAL),
    ("quadratic", 0, "2", 0.5, "on", 0.02, USUAL),
    ("quadratic", -2, "1.05", 0.95, "off", 0.02, USUAL),
    ("quadratic", 0.7, "4", 0.25, "on", 0.02, USUAL),
]


@pytest.mark.parametrize(("f", "gamma", "growth", "beta3", "guards", "pace", "start"), CASES)
def test_runs_are_the_librarys(
    visit: Callable[..., Any], f: str, gamma: float, growth: str, beta3: float, guards: str, pace: float, start: str
) -> None:
    page = visit(f"#f={f}&gamma={gamma}&growth={growth}&beta3={beta3}&guards={guards}&steps=500&lr=pace,{pace}{start}")
    assert settings(page)["growth"] == growth
    compare(page, "Anon")
    # The others know nothing of gamma, growth, beta3 and guards: one case of each function is enough.
    for name in NAMES[1:] if (growth, start) == ("2", USUAL) or (f, guards) == ("rosenbrock", "on") else ():
        compare(page, name)


@pytest.mark.parametrize(("gamma", "growth", "guards"), [(1, "2", False), (1, "1.1", True), (-0.5, "1.7", True)])
def test_online_runs_are_the_librarys(visit: Callable[..., Any], gamma: float, growth: str, guards: bool) -> None:
    on, steps = ("on", 1010) if guards else ("off", 10100)
    page = visit(f"#f=online&start=0.3&gamma={gamma}&growth={growth}&guards={on}&steps={steps}&noise=10")
    for name in NAMES if guards and gamma == 1 else ("Anon",):
        compare(page, name)


def test_settings_made_with_keys_and_mouse(visit: Callable[..., Any]) -> None:
    page = visit()
    page.get_by_role("radio", name="Quadratic").click()
    slide(page, "Adaptivity γ", 1.5)
    slide(page, "Growth of refresh times", 1.1)
    slide(page, "β₃, kept at a refresh", 0.25)
    settle(page)
    paces = {name: page.evaluate(f"anon.rate('{name}')") for name in NAMES}
    for name, key in (("Anon", "ArrowLeft"), ("SGDM", "ArrowRight")):
        for _ in range(3):
            page.get_by_role("slider", name=f"Learning rate of {name}").press(key)
    page.get_by_label("Anon’s guards").uncheck()
    box = page.locator("#map").bounding_box()
    page.mouse.click(box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"])
    settle(page)
    s = settings(page)
    assert (s["f"], s["gamma"], s["growth"], s["beta3"]) == ("quadratic", 1.5, "1.1", 0.25)
    assert (s["guards"], s["mode"]) == (False, "hand")
    # The first press moves from between two rungs, of which there are ten a decade.
    assert -0.35 < math.log10(page.evaluate("anon.rate('Anon')") / paces["Anon"]) < -0.2
    assert 0.2 < math.log10(page.evaluate("anon.rate('SGDM')") / paces["SGDM"]) < 0.35
    assert page.evaluate("anon.rate('Adam')") == pytest.approx(paces["Adam"], rel=5e-3), "the others keep theirs"
    for name in ("Anon", "SGDM"):
        compare(page, name)


def test_click_and_drag_move_the_start(visit: Callable[..., Any]) -> None:
    page = visit()
    box = page.locator("#map").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    tip = page.locator("#map-tip").text_content()
    x, y = (float(part.replace("−", "-")) for part in re.findall(r"[−\d.]+", tip)[:2])
    page.mouse.down()
    settle(page)
    s = settings(page)
    assert (s["x"], s["y"]) == pytest.approx((x, y), abs=0.006), "the click lands where the read-out says"
    page.mouse.move(middle[0] + 90, middle[1] - 60)
    settle(page)
    assert page.locator("#map").bounding_box() == box, "the map stays where it is, whatever the page says above it"
    page.mouse.up()
    settle(page)
    moved = settings(page)
    assert moved["x"] > s["x"] + 0.5
    assert moved["y"] > s["y"] + 0.3
    assert moved["x"] - s["x"] == pytest.approx(1.5 * (moved["y"] - s["y"]), rel=0.02), "both axes have one unit"
    run = page.evaluate("anon.trajectory('Adam')")
    assert (run["x"][0], run["y"][0]) == (moved["x"], moved["y"])
    page.mouse.move(middle[0] + 200, middle[1])
    settle(page)
    assert settings(page)["x"] == moved["x"], "moving without a button leaves it there"


def test_everything_by_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()
    rows = [f"{what}-{name}" for name in NAMES for what in ("show", "lr")]
    more = ["growth", "beta3", "beta1", "beta2", "steps", "guards", "reset"]
    expected = ["functions", "gamma", "map", "play", "time", "modes", "pace", *rows, *more]
    order = []
    for _ in expected:
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        ring = "e => getComputedStyle(e.matches('.chips input') ? e.nextElementSibling : e).outlineStyle"
        assert page.locator(":focus").evaluate(ring) == "solid", "the focus can be seen"
    assert order == expected

    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Shift+ArrowDown")
    settle(page)
    s = settings(page)
    assert (s["x"], s["y"]) == pytest.approx((-1.8 + 0.09, 0.09 - 0.9))

    page.locator("input[name=functions]:checked").focus()
    page.keyboard.press("ArrowRight")
    settle(page)
    assert settings(page)["f"] == "rosenbrock"
    page.locator("input[name=modes]:checked").focus()
    page.keyboard.press("ArrowRight")
    settle(page)
    assert settings(page)["mode"] == "search"
    page.locator("#reset").focus()
    page.keyboard.press("Enter")
    settle(page)
    assert settings(page)["mode"] == "pace"


def test_space_plays_and_the_bar_scrubs(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("#time-text").text_content() == "step 500 of 500"
    page.locator("#map").focus()
    page.keyboard.press("Space")
    # Until the next picture the bar still says 500, and a second Space would stop the play at 0.
    until(page, "3 < document.getElementById('time').value && document.getElementById('time').value < 500")
    page.keyboard.press("Space")
    stopped = page.locator("#time").input_value()
    assert 0 < int(stopped) < 500
    page.locator("#time").focus()
    page.keyboard.press("ArrowRight")
    until(page, f"document.getElementById('time').value === '{int(stopped) + 1}'")
    loss = page.evaluate("anon.trajectory('SGDM').loss[Number(document.getElementById('time').value)]")
    assert float(page.locator("#value-SGDM").text_content()) == pytest.approx(loss, rel=0.05)


def test_search_finds_the_best_of_its_ladder(visit: Callable[..., Any]) -> None:
    page = visit("#f=quadratic&gamma=1&steps=100&lr=search")
    found = {name: page.evaluate(f"anon.rate('{name}')") for name in NAMES}
    s = settings(page)
    for name in ("SGDM", "Anon"):

        def quality(lr: float) -> tuple[float, float]:
            points, losses = descend(name, lr, s)  # noqa: B023 - called within the loop
            steps = (points[1:] - points[:-1]).norm(dim=-1)
            pace = steps[0] / (0.1 if name == "SGDM" else 1)  # noqa: B023
            if max(pace, steps.max()) > 3 / 20:
                return math.inf, math.inf
            above = (losses >= 1e-6).nonzero()
            last = above[-1].item() + 1 if len(above) else 0
            return (last if last <= 100 else math.inf), losses[-1].item()

        around = [float(f"{10 ** (round(10 * math.log10(found[name]) + k) / 10):.3g}") for k in (-3, -1, 1, 3)]
        assert all(quality(found[name]) <= quality(lr) for lr in around)


def test_finding_is_that_of_the_numbers(visit: Callable[..., Any]) -> None:
    page = visit("#f=quadratic&gamma=1&steps=500")
    title = page.locator("h1").text_content().replace("\N{NO-BREAK SPACE}", " ")
    losses = {name: page.evaluate(f"anon.trajectory('{name}').loss") for name in NAMES}
    arrived = {name: 1 + max(t for t, loss in enumerate(losses[name]) if loss >= 1e-6) for name in NAMES}
    assert title.startswith(f"Anon at γ = 1 reaches the minimum in {arrived['Anon']} steps")
    for name in ("Adam", "AMSGrad"):
        assert f"{name}: {arrived[name]}" in title
    assert arrived["SGDM"] > 500
    assert title.endswith("; SGDM does not within 500")
    until(page, "document.getElementById('spoken').textContent === document.title")


def test_address_holds_the_settings(visit: Callable[..., Any]) -> None:
    page = visit("#f=rastrigin&start=1.5,-0.25&gamma=1.25&growth=1.35&beta3=0.1&betas=0.5,0.99&guards=off&steps=100"
                 "&lr=hand,0.5,0.002,0.1,0.2&show=Anon,Adam")  # fmt: skip
    first = settings(page)
    assert (first["x"], first["y"], first["beta2"], first["shown"]) == (1.5, -0.25, 0.99, ["Anon", "Adam"])
    assert first["lr"] == {"Anon": 0.5, "SGDM": 0.002, "Adam": 0.1, "AMSGrad": 0.2}
    slide(page, "Adaptivity γ", -0.3)
    until(page, "location.hash.includes('gamma=-0.3&')")
    again = visit(page.evaluate("location.hash"))
    assert settings(again) == first | {"gamma": -0.3}


def test_bad_address_keeps_the_usual(visit: Callable[..., Any]) -> None:
    usual = settings(visit())
    for hash in ("#f=constructor", "#f=beale&gamma=9&growth=0.5&steps=7&lr=pace,x&betas=2", "#%00&&=="):
        assert settings(visit(hash)) == usual


@pytest.mark.parametrize("f", ["beale", "online"])
def test_fits_a_phone(visit: Callable[..., Any], f: str) -> None:
    page = visit(f"#f={f}", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    box = page.locator("#map").bounding_box()
    before = settings(page)["x"]
    page.touchscreen.tap(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"])
    settle(page)
    assert settings(page)["x"] != before


def test_dark_page_and_a_diverged_run(visit: Callable[..., Any]) -> None:
    page = visit("#f=rosenbrock&gamma=0&lr=hand,100,100,0.1,0.1", color_scheme="dark", reduced_motion="reduce")
    assert (
        page.locator("h1").text_content()
        == "Anon at γ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}0 diverges at this learning rate"
    )
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


def test_page_is_small_and_names_no_address(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert len(text.encode()) < 150_000
    assert set(re.findall(r"https?://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}, "a name space, not an address"
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|<img|<iframe|@import|url\(|\bsrc\s*=", text)
    assert "default-src 'none'" in text


def test_page_takes_the_librarys_defaults() -> None:
    anon = explore.given()["anon"]
    theirs = Anon([torch.zeros(1)]).defaults
    assert {key: theirs[key] for key in anon if key != "growth"} == {key: anon[key] for key in anon if key != "growth"}
    assert float(anon["growth"]) == theirs["growth"]
    assert json.loads(json.dumps(explore.given()), parse_constant=pytest.fail)


def test_missing_browser_is_a_reason_to_skip_or_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser found"), chromium():
        pass
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no browser found"), chromium():
        pass


def test_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = CliRunner().invoke(cli.app, ["explore", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 2
    assert result.stderr == f"anon: --out must be a folder, but {tmp_path / 'taken'} is a file\n"
