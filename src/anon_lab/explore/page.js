// The page itself: settings in, runs and pictures out. `window.anon`, at the end, is for tests and other scripts.

let s = fromHash(location.hash);
const runs = new Runs();
const map = new MapView(element("map"));
const curve = new CurveView(element("curve"));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const view = { frame: Infinity, playing: false, hovered: null, stale: true, redraw: true, settled: [] };
const PLAY_SECONDS = 8;
const START_STEP = 1 / 100; // of the window, for an arrow key

const lastFrame = () => (s.f === "online" ? runs.entries.Anon.run.t.length - 1 : s.steps);
const shownFrame = () => Math.min(view.frame, lastFrame());
const timeOf = (frame) => (s.f === "online" ? runs.entries.Anon.run.t[frame] : frame);

function change(edit) {
  edit();
  showSettings(s);
  view.stale = true;
}

function moveStart(x, y) {
  const places = (value) => Number(value.toFixed(3));
  if (s.f === "online") s.x = places(Math.min(Math.max(y, -1), 1));
  else [s.x, s.y] = [places(x), places(y)];
}

// One frame: compute if something changed, then draw if something is to be seen.
function tick(now) {
  if (view.stale) {
    runs.update(s);
    keepInAddress();
    view.stale = false;
    view.redraw = true;
  }
  if (runs.busy) {
    runs.work();
    view.redraw = true;
  }
  if (view.playing) advance(now);
  if (view.redraw) draw();
  view.redraw = false;
  if (!runs.busy) for (const resolve of view.settled.splice(0)) resolve();
  requestAnimationFrame(tick);
}

function draw() {
  const frame = shownFrame();
  document.documentElement.style.setProperty("--anon", anonColour(s.gamma));
  map.draw(s, runs.all, frame, document.activeElement === element("map"));
  curve.draw(s, runs.all, frame, view.hovered);
  showNumbers(frame);
  showFinding();
}

function showNumbers(frame) {
  const online = s.f === "online";
  const t = timeOf(frame);
  const time = element("time");
  time.max = lastFrame();
  time.value = frame;
  const text = `step ${count(t)} of ${count(s.steps)}`;
  element("time-text").value = text;
  time.setAttribute("aria-valuetext", text);
  element("value-head").textContent = online ? "x" : "f";
  element("end-head").textContent = online ? "regret / t" : "arrives";
  for (const name of NAMES) {
    const run = runs.entries[name].run;
    const lr = runs.lr(name);
    const at = online ? Math.min(frame, run.known - 1) : frame;
    element(`lr-text-${name}`).value = Number.isNaN(lr) ? "…" : powerText(lr);
    if (!Number.isNaN(lr)) element(`lr-${name}`).value = Math.log10(lr);
    element(`lr-${name}`).setAttribute("aria-valuetext", powerText(lr));
    element(`value-${name}`).textContent = online ? fixed(run.x[at], 3) : small(run.loss[at]);
    element(`end-${name}`).textContent = online ? small(run.regret[at]) : arrivalText(run);
    const { colour, dash, width } = styleOf(name, s);
    const line = element(`row-${name}`).querySelector("line");
    line.style.cssText = `stroke: ${colour}; stroke-width: ${width}; stroke-dasharray: ${dash.map((d) => d * width)}`;
  }
}

const arrivalText = (run) => (arrival(run) < Infinity ? `step ${count(arrival(run))}` : "no");

let speaking = 0;
function showFinding() {
  const online = s.f === "online";
  const text = runs.busy ? `Running to step ${count(s.steps)} …` : finding(s, runs.all);
  if (element("finding").textContent === text) return;
  element("finding").textContent = document.title = text;
  element("lede").textContent = online ? regretSentence(s, runs.all) : direction(s, runs.all);
  clearTimeout(speaking);
  speaking = setTimeout(() => (element("spoken").textContent = text), 800);
}

let keeping = 0;
function keepInAddress() {
  clearTimeout(keeping);
  keeping = setTimeout(() => history.replaceState(null, "", toHash(s)), 150);
}

// Playing: the whole run in PLAY_SECONDS, or in twenty still pictures where motion is unwelcome.
let playedFrom = null;
function advance(now) {
  playedFrom ??= now - (shownFrame() / lastFrame()) * PLAY_SECONDS * 1000;
  let share = Math.min((now - playedFrom) / (PLAY_SECONDS * 1000), 1);
  if (calm.matches) share = Math.floor(share * 20) / 20;
  const frame = Math.round(share * lastFrame());
  view.redraw ||= frame !== view.frame;
  view.frame = share === 1 ? Infinity : frame;
  if (share === 1) play(false);
}

function play(on) {
  if (on && shownFrame() === lastFrame()) view.frame = 0;
  view.playing = on;
  playedFrom = null;
  view.redraw = true;
  element("play").setAttribute("aria-label", on ? "Pause" : "Play the steps");
  element("play-icon").setAttribute("d", on ? "M3 2h3.5v12H3zM9.5 2H13v12H9.5z" : "M4 1.5v13l10-6.5z");
}

// Pointers.

const placeOn = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

function dragStart(event) {
  const [px, py] = placeOn(element("map"), event);
  change(() => moveStart(map.plot.x.from(px), map.plot.y.from(py)));
  element("map-tip").hidden = true;
}

function nearStart(event) {
  const [px, py] = placeOn(element("map"), event);
  const [x, y] = s.f === "online" ? [1, s.x] : [s.x, s.y];
  return Math.hypot(map.plot.x.to(x) - px, map.plot.y.to(y) - py) < 2 * map.plot.em;
}

function showTip(id, text, px, py) {
  const tip = element(id);
  tip.hidden = text === null;
  if (text === null) return;
  tip.textContent = text;
  const { clientWidth: width } = tip.parentElement;
  tip.style.left = `${Math.min(Math.max(px + 14, 0), Math.max(width - tip.offsetWidth, 0))}px`;
  tip.style.top = `${Math.max(py - tip.offsetHeight - 12, 0)}px`;
}

function describePoint(px, py) {
  const found = map.nearest(s, runs.all, shownFrame(), px, py);
  if (found !== null) {
    const run = runs.entries[found.name].run;
    const head = `${found.name}, step ${count(timeOf(found.frame))}`;
    const [x, y] = [run.x[found.frame], run.y?.[found.frame]];
    if (s.f === "online") return `${head}\nx = ${fixed(x, 4)}`;
    return `${head}\n(${fixed(x, 3)}, ${fixed(y, 3)})   f = ${small(run.loss[found.frame], 3)}`;
  }
  if (s.f === "online") return null;
  const [x, y] = [map.plot.x.from(px), map.plot.y.from(py)];
  return `(${fixed(x, 2)}, ${fixed(y, 2)})   f = ${small(PROBLEMS[s.f].f(x, y), 3)}`;
}

function describeStep(frame) {
  const values = s.shown.map((name) => {
    const run = runs.entries[name].run;
    return `${name}  ${small((run.loss ?? run.regret)[frame], 3)}`;
  });
  return [`step ${count(timeOf(frame))}`, ...values].join("\n");
}

// What it says may take another line, and the map would move under the hand that drags the start.
function holdHeader(held) {
  const header = document.querySelector("header");
  header.style.height = held ? `${header.getBoundingClientRect().height}px` : "";
  header.style.overflow = held ? "hidden" : "";
}

function listenToPointers() {
  const canvas = element("map");
  let dragging = false;
  canvas.addEventListener("pointerdown", (event) => {
    // A finger scrolls the page unless it takes hold of the start; a tap moves it all the same.
    if (event.pointerType === "touch" && !nearStart(event)) return;
    dragging = true;
    holdHeader(true);
    canvas.setPointerCapture(event.pointerId);
    dragStart(event);
  });
  const holdStart = (event) => nearStart(event.touches[0]) && event.preventDefault();
  canvas.addEventListener("touchstart", holdStart, { passive: false });
  canvas.addEventListener("click", (event) => event.pointerType === "touch" && dragStart(event));
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOn(canvas, event);
    if (dragging) dragStart(event);
    else if (event.pointerType !== "touch") showTip("map-tip", describePoint(...place), ...place);
  });
  const letGo = () => {
    dragging = false;
    holdHeader(false);
  };
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, letGo);
  canvas.addEventListener("pointerleave", () => showTip("map-tip", null));
  const curves = element("curve");
  curves.addEventListener("pointermove", (event) => {
    const place = placeOn(curves, event);
    view.hovered = Math.min(curve.frameAt(s, runs.all, place[0]), shownFrame());
    view.redraw = true;
    showTip("curve-tip", describeStep(view.hovered), ...place);
  });
  curves.addEventListener("pointerleave", () => {
    view.hovered = null;
    view.redraw = true;
    showTip("curve-tip", null);
  });
}

// Keys: the arrows move the start while the map has the focus, Space plays wherever it has no other meaning.

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

function listenToKeys() {
  element("map").addEventListener("keydown", (event) => {
    const arrow = ARROWS[event.key];
    if (!arrow || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [[low, high]] = PROBLEMS[s.f].window ?? [[-1, 1]];
    const step = (high - low) * START_STEP * (event.shiftKey ? 10 : 1);
    const [x, y] = s.f === "online" ? [0, s.x] : [s.x, s.y];
    change(() => moveStart(x + arrow[0] * step, y + arrow[1] * step));
  });
  document.addEventListener("keydown", (event) => {
    const spaceIsTaken = event.target.matches?.("button, input:not([type=range])");
    if (event.key !== " " || spaceIsTaken) return;
    event.preventDefault();
    play(!view.playing);
  });
}

function listenToControls() {
  for (const [id, slider] of Object.entries(SLIDERS)) {
    makeSlider(id, slider, (write, position) => change(() => write(s, position)));
  }
  const labels = ["beale", "rosenbrock", "rastrigin", "quadratic", "online"].map((f) => [f, PROBLEMS[f].label]);
  makeChips("functions", labels, (f) => {
    view.frame = Infinity;
    change(() => (s = changeFunction(s, f)));
    describeMap();
  });
  makeChips("modes", Object.entries(MODE_LABELS), (mode) => change(() => setMode(mode)));
  for (const name of NAMES) {
    const show = (on) => (s.shown = NAMES.filter((other) => (other === name ? on : s.shown.includes(other))));
    const setRate = (lr) => {
      setMode("hand");
      s.lr[name] = lr;
    };
    makeRow(name, (on) => change(() => show(on)), (lr) => change(() => setRate(lr)));
  }
  element("guards").addEventListener("change", (event) => change(() => (s.guards = event.target.checked)));
  element("reset").addEventListener("click", () => {
    view.frame = Infinity;
    change(() => (s = beginning(s.f)));
  });
  element("play").addEventListener("click", () => play(!view.playing));
  element("time").addEventListener("input", (event) => {
    play(false);
    view.frame = Number(event.target.value);
  });
}

// By hand one goes on from the learning rates that were in use.
function setMode(mode) {
  if (mode === "hand" && s.mode !== "hand") {
    for (const name of NAMES) if (!Number.isNaN(runs.lr(name))) s.lr[name] = Number(runs.lr(name).toPrecision(3));
  }
  s.mode = mode;
}

function describeMap() {
  const online = s.f === "online";
  const label = online ? "x over the steps" : `Paths on the contours of ${PROBLEMS[s.f].label}`;
  element("map").setAttribute("aria-label", label);
  element("map-help").textContent = online
    ? "Click a height to start from another x, or use the arrow keys on the picture. Space plays."
    : "Click or drag to start elsewhere, or use the arrow keys on the picture. Space plays.";
}

function redraw() {
  const input = element("gamma");
  input.style.setProperty("--track", `linear-gradient(to right, ${GIVEN.gamma_colours[dark.matches ? 1 : 0]})`);
  view.redraw = true;
}

listenToControls();
listenToPointers();
listenToKeys();
for (const type of ["focus", "blur"]) element("map").addEventListener(type, redraw);
dark.addEventListener("change", redraw);
new ResizeObserver(redraw).observe(document.body);
for (const picture of document.querySelectorAll(".picture")) new ResizeObserver(redraw).observe(picture);
window.addEventListener("hashchange", () => {
  view.frame = Infinity;
  change(() => (s = fromHash(location.hash)));
  describeMap();
});
showSettings(s);
describeMap();
redraw();
play(false);
requestAnimationFrame(tick);

// anon.settled()           resolves when the runs of the present settings are complete and drawn
// anon.settings()          the settings
// anon.rate(name)          the learning rate in use
// anon.trajectory(name)    {t, x, y, loss} of every step from 0; online {t, x, regret} at the steps drawn
window.anon = Object.freeze({
  settled: () => new Promise((resolve) => view.settled.push(resolve)),
  settings: () => structuredClone(s),
  rate: (name) => runs.lr(name),
  trajectory(name) {
    const { t = countingUp(s.steps), x, y, loss, regret } = runs.entries[name].run;
    const plain = Object.entries({ t, x, y, loss, regret }).filter(([, values]) => values);
    return Object.fromEntries(plain.map(([key, values]) => [key, Array.from(values)]));
  },
});
