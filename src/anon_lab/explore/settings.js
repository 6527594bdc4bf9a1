// The settings: what the controls hold, how they are kept in the address, and what the optimizers take from them.

const BETA2 = [0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999];
const NOISE = [0, 1, 10, 100, 1000];
const MODES = ["pace", "search", "hand"];
const PACE_RANGE = [-3, 0]; // powers of ten
const GUARDS_OFF = { clip: Infinity, floor: 0, touch: false };

const beginning = (f) => ({
  f,
  gamma: -0.5,
  growth: String(GIVEN.anon.growth),
  beta3: GIVEN.anon.beta3,
  lr: Object.fromEntries(NAMES.map((name) => [name, 0.01])),
  shown: [...NAMES],
  ...PROBLEMS[f].begin,
  ...(f === "online" ? { gamma: 1 } : {}),
});

// Another function brings its own start, length, betas and pace; what is Anon's own stays as it was set.
function changeFunction(s, f) {
  const { gamma, growth, beta3, lr, shown } = s;
  return { ...beginning(f), gamma, growth, beta3, lr, shown };
}

const optionsOf = (s) => ({
  gamma: s.gamma,
  beta1: s.beta1,
  beta2: s.beta2,
  beta3: s.beta3,
  growth: s.growth,
  eps: GIVEN.anon.eps,
  windowTol: GIVEN.anon.window_tol,
  ...(s.guards ? { clip: GIVEN.anon.clip, floor: GIVEN.anon.floor, touch: GIVEN.anon.touch } : GUARDS_OFF),
});

// What of the settings an optimizer's run depends on, so that the others need not be run again.
function signature(name, s) {
  const { f, x, y, beta1, beta2, steps, noise, mode, pace } = s;
  const own = name === "Anon" ? [s.gamma, s.growth, s.beta3, s.guards] : [];
  return JSON.stringify([name, f, x, y, beta1, beta2, steps, noise, mode, mode === "hand" ? s.lr[name] : pace, ...own]);
}

function toHash(s) {
  const parts = {
    f: s.f,
    start: s.f === "online" ? s.x : `${s.x},${s.y}`,
    gamma: s.gamma,
    growth: s.growth,
    beta3: s.beta3,
    betas: `${s.beta1},${s.beta2}`,
    guards: s.guards ? "on" : "off",
    steps: s.steps,
    lr: { pace: `pace,${s.pace}`, search: "search", hand: `hand,${NAMES.map((name) => s.lr[name])}` }[s.mode],
  };
  if (s.f === "online") parts.noise = s.noise;
  if (s.shown.length < NAMES.length) parts.show = s.shown.join();
  return `#${Object.entries(parts).map((pair) => pair.join("=")).join("&")}`;
}

// A link may be old, cut short or mistyped: what cannot be read keeps its usual value.
function fromHash(hash) {
  const parts = Object.fromEntries(hash.replace(/^#/, "").split("&").map((part) => part.split("=")));
  const s = beginning(Object.hasOwn(PROBLEMS, parts.f ?? "") ? parts.f : "beale");
  const numbers = (key) => (parts[key] ?? "").split(",").map((text) => (text === "" ? NaN : Number(text)));
  const set = (key, value, low, high) => {
    if (value >= low && value <= high) s[key] = value;
  };
  const choose = (key, value, choices) => {
    if (choices.includes(value)) s[key] = value;
  };
  const [x, y] = numbers("start");
  set("x", x, ...(s.f === "online" ? [-1, 1] : [-100, 100]));
  if (s.f !== "online") set("y", y, -100, 100);
  set("gamma", numbers("gamma")[0], -2, 2);
  if (/^[1-4](\.\d{1,2})?$/.test(parts.growth ?? "") && parts.growth > 1 && parts.growth <= 4) s.growth = parts.growth;
  set("beta3", numbers("beta3")[0], 0, 0.95);
  const [beta1, beta2] = numbers("betas");
  set("beta1", beta1, 0, 0.99);
  choose("beta2", beta2, BETA2);
  choose("steps", numbers("steps")[0], stepsOf(s.f));
  choose("noise", numbers("noise")[0], NOISE);
  if (parts.guards === "on" || parts.guards === "off") s.guards = parts.guards === "on";
  const [mode, ...values] = (parts.lr ?? "").split(",");
  choose("mode", mode, MODES);
  if (mode === "pace") set("pace", Number(values[0]), 10 ** PACE_RANGE[0], 10 ** PACE_RANGE[1]);
  if (mode === "hand") NAMES.forEach((name, i) => Number(values[i]) > 0 && (s.lr[name] = Number(values[i])));
  if (parts.show !== undefined) s.shown = NAMES.filter((name) => parts.show.split(",").includes(name));
  return s;
}
