// The controls: every slider is a native range input, described by one entry here.

const powerText = (x) => small(x, 3);
const indexed = (values, key, text) => ({
  min: 0,
  max: (s) => values(s).length - 1,
  step: 1,
  read: (s) => values(s).indexOf(s[key]),
  write: (s, position) => (s[key] = values(s)[Number(position)]),
  text: (s) => text(s[key]),
});

function refreshText(s) {
  const times = refreshTimes(s.growth);
  return `ψ changes at ${Array.from({ length: 6 }, () => count(times.next().value)).join(", ")}, …`;
}

const SLIDERS = {
  gamma: {
    place: "gamma-control",
    label: "Adaptivity γ",
    min: -2,
    max: 2,
    step: 0.05,
    read: (s) => s.gamma,
    write: (s, position) => (s.gamma = Number(position)),
    text: (s) => fixed(s.gamma, 2),
    marks: { "-2": "−2", 0: "0: SGD", 1: "1: Adam", 2: "2" },
  },
  growth: {
    label: "Growth of refresh times",
    about: refreshText,
    min: 1.05,
    max: 4,
    step: 0.05,
    read: (s) => s.growth,
    write: (s, position) => (s.growth = position), // as text: 1.1 means eleven tenths
    text: (s) => s.growth,
  },
  beta3: {
    label: "β₃, kept at a refresh",
    min: 0,
    max: 0.95,
    step: 0.05,
    read: (s) => s.beta3,
    write: (s, position) => (s.beta3 = Number(position)),
    text: (s) => s.beta3,
  },
  beta1: {
    label: "β₁, momentum",
    min: 0,
    max: 0.99,
    step: 0.01,
    read: (s) => s.beta1,
    write: (s, position) => (s.beta1 = Number(position)),
    text: (s) => s.beta1,
  },
  beta2: { label: "β₂", ...indexed(() => BETA2, "beta2", String) },
  noise: { label: "Noise, times the paper’s", ...indexed(() => NOISE, "noise", String) },
  steps: { label: "Steps", ...indexed((s) => stepsOf(s.f), "steps", count) },
  pace: {
    place: "pace-control",
    label: "Length of a step",
    min: PACE_RANGE[0],
    max: PACE_RANGE[1],
    step: 1 / LADDER,
    read: (s) => Math.log10(s.pace),
    write: (s, position) => (s.pace = lrAt(position)),
    text: (s) => powerText(s.pace),
  },
};

const element = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function makeSlider(id, { place = "more", label, about, min, step, marks }, onInput) {
  const input = make("input", { id, type: "range", min, step });
  const name = make("label", { htmlFor: id, className: "name" }, label);
  const box = make("div", { className: "slider", id: `${id}-box` }, name, make("output", { id: `${id}-text` }), input);
  if (about) box.append(make("div", { className: "about", id: `${id}-about` }));
  if (marks) box.append(makeMarks(marks, min, -min));
  input.addEventListener("input", () => onInput(SLIDERS[id].write, input.value));
  element(place).append(box);
}

function makeMarks(marks, min, max) {
  const row = make("div", { className: "marks", ariaHidden: "true" });
  for (const place of Object.keys(marks).sort((a, b) => a - b)) {
    const mark = make("span", {}, marks[place]);
    // The thumb's middle runs from half its width (0.8rem) to as much before the end.
    const share = (place - min) / (max - min);
    mark.style.left = `calc(${100 * share}% + ${0.8 * (1 - 2 * share)}rem)`;
    if (share === 0 || share === 1) mark.style.left = `${100 * share}%`;
    row.append(mark);
  }
  return row;
}

function makeChips(id, entries, onChoose) {
  for (const [value, label] of entries) {
    const input = make("input", { type: "radio", name: id, value });
    input.addEventListener("change", () => onChoose(value));
    element(id).append(make("label", {}, input, make("span", {}, label)));
  }
}

// One row for each optimizer: whether it is shown, its learning rate, and its numbers at the step shown.
function makeRow(name, onShow, onRate) {
  const shown = make("input", { type: "checkbox", id: `show-${name}`, ariaLabel: `Show ${name}` });
  shown.addEventListener("change", () => onShow(shown.checked));
  const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  swatch.setAttribute("viewBox", "0 0 38 12");
  swatch.innerHTML = '<line x1="2" x2="36" y1="6" y2="6"/>';
  const label = make("label", {}, shown, swatch, make("span", { id: `name-${name}` }, name));
  const rate = make("input", { type: "range", id: `lr-${name}`, ariaLabel: `Learning rate of ${name}` });
  Object.assign(rate, { min: LR_RANGE[0], max: LR_RANGE[1], step: 1 / LADDER });
  rate.addEventListener("input", () => onRate(lrAt(rate.value)));
  const cell = make("div", {}, rate, make("output", { id: `lr-text-${name}` }));
  const row = make("tr", { id: `row-${name}` }, make("th", { scope: "row" }, label));
  row.append(make("td", { className: "lr" }, cell));
  row.append(make("td", { id: `value-${name}` }), make("td", { id: `end-${name}` }));
  element("rows").append(row);
}

const MODE_LABELS = { pace: "Same pace", search: "Found by search", hand: "By hand" };
const MODE_HELP = {
  pace:
    "All would take steps of this length if the gradient stayed as it is at the start. " +
    "Anon’s lr itself has another unit at every γ.",
  search:
    "Each gets the best of 50 lrs over five decades: first at the minimum (f\u00a0<\u00a010⁻⁶), " +
    "or else lowest at the end, with no step longer than a twentieth of the picture.",
  searchOnline: "Each gets the best of 25 lrs over five decades: lowest regret, after a million steps at most.",
  hand: "Each has its own slider. Anon’s lr has another unit at every γ, so turn both.",
};

// Put every control where the settings are.
function showSettings(s) {
  for (const [id, slider] of Object.entries(SLIDERS)) {
    const input = element(id);
    input.max = typeof slider.max === "function" ? slider.max(s) : slider.max;
    const position = String(slider.read(s));
    if (input.value !== position) input.value = position;
    const text = String(slider.text(s));
    element(`${id}-text`).value = text;
    input.setAttribute("aria-valuetext", text);
    if (slider.about) element(`${id}-about`).textContent = slider.about(s);
  }
  for (const [group, value] of [["functions", s.f], ["modes", s.mode]]) {
    for (const input of element(group).querySelectorAll("input")) input.checked = input.value === value;
  }
  element("guards").checked = s.guards;
  element("noise-box").hidden = s.f !== "online";
  element("pace-box").hidden = s.mode !== "pace";
  element("mode-help").textContent = MODE_HELP[s.mode === "search" && s.f === "online" ? "searchOnline" : s.mode];
  element("formula").textContent = s.f === "online" ? PROBLEMS.online.title : `f = ${PROBLEMS[s.f].title}`;
  for (const name of NAMES) {
    element(`show-${name}`).checked = s.shown.includes(name);
    element(`row-${name}`).classList.toggle("off", !s.shown.includes(name));
  }
}
