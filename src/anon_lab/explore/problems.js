// What is minimized: four functions of the plane, with their gradients, and the noisy online problem of the paper.
//
// Start, minimum (where f = 0), window and formula come from anon_lab/problems.py, by way of GIVEN; what stands here is
// what JavaScript has to compute itself, and the settings that each begins with.

const USUAL = { beta1: GIVEN.anon.betas[0], beta2: GIVEN.anon.betas[1], mode: "pace", noise: 1, guards: true };

const FUNCTIONS = {
  beale: {
    label: "Beale",
    begin: { ...USUAL, pace: 0.05, steps: 500 },
    f(x, y) {
      return Math.log1p((1.5 - x + x * y) ** 2 + (2.25 - x + x * y ** 2) ** 2 + (2.625 - x + x * y ** 3) ** 2) / 10;
    },
    gradient([x, y], g) {
      const [a, b, c] = [1.5 - x + x * y, 2.25 - x + x * y * y, 2.625 - x + x * y * y * y];
      const outer = 1 / (10 * (1 + a * a + b * b + c * c));
      g[0] = 2 * (a * (y - 1) + b * (y * y - 1) + c * (y * y * y - 1)) * outer;
      g[1] = 2 * (a * x + b * 2 * x * y + c * 3 * x * y * y) * outer;
    },
  },
  rosenbrock: {
    label: "Rosenbrock",
    begin: { ...USUAL, pace: 0.1, steps: 2000 },
    f(x, y) {
      return (1 - x) ** 2 + 100 * (y - x * x) ** 2;
    },
    gradient([x, y], g) {
      g[0] = 2 * (x - 1) - 400 * x * (y - x * x);
      g[1] = 200 * (y - x * x);
    },
  },
  rastrigin: {
    label: "Rastrigin",
    begin: { ...USUAL, pace: 0.1, steps: 200 },
    f(x, y) {
      const wave = (u) => u * u + 10 * (1 - Math.cos(2 * Math.PI * u));
      return wave(x) + wave(y);
    },
    gradient([x, y], g) {
      g[0] = 2 * x + 20 * Math.PI * Math.sin(2 * Math.PI * x);
      g[1] = 2 * y + 20 * Math.PI * Math.sin(2 * Math.PI * y);
    },
  },
  quadratic: {
    label: "Quadratic",
    begin: { ...USUAL, pace: 0.05, steps: 200 },
    f(x, y) {
      return (100 * x * x + y * y) / 2;
    },
    gradient([x, y], g) {
      g[0] = 100 * x;
      g[1] = y;
    },
  },
};

// The paper's own setting: its algorithm as printed, and learning rates 0.1 for everyone at gamma = 1.
const ONLINE = {
  label: "Online, noisy",
  title: "fₜ = 1010 x once in 101 steps, else −10 x",
  begin: { ...USUAL, beta1: 0.5, beta2: 0.75, pace: 0.1, guards: false, x: 0, y: 0, steps: 1_010_000 },
};

const PROBLEMS = { online: ONLINE };
for (const [name, { start, ...given }] of Object.entries(GIVEN.problems)) {
  const own = FUNCTIONS[name];
  PROBLEMS[name] = { ...own, ...given, begin: { ...own.begin, x: start[0], y: start[1] } };
}

const CURVE_STEPS = [50, 100, 200, 500, 1000, 2000, 5000];
const ONLINE_STEPS = [1010, 10_100, 101_000, 1_010_000, 10_100_000]; // whole periods
const stepsOf = (f) => (f === "online" ? ONLINE_STEPS : CURVE_STEPS);

const PERIOD = 101;
const onlineGradient = (t) => (t % PERIOD === 1 ? 1010 : -10);
const onlineNoise = (t) => (t % 2 === 1 ? 500 : -500) * Math.exp(1 - t);

// A run on a function: the points x, y and the losses of steps 0 to `steps`, or up to the first step longer than
// `longest`. Beyond 10^12 nothing can be drawn and the run counts as diverged: NaN from there.
function descend(problem, optimizer, lr, steps, longest = Infinity) {
  const run = { x: new Float64Array(steps + 1), y: new Float64Array(steps + 1), done: true };
  run.loss = new Float64Array(steps + 1);
  const { theta } = optimizer;
  const g = new Float64Array(2);
  for (let t = 0; ; t++) {
    [run.x[t], run.y[t]] = theta;
    run.loss[t] = problem.f(theta[0], theta[1]);
    if (t === steps) return run;
    problem.gradient(theta, g);
    optimizer.step(g, lr);
    const step = Math.hypot(theta[0] - run.x[t], theta[1] - run.y[t]);
    if (step > longest) return null;
    if (!(Math.abs(theta[0]) < 1e12 && Math.abs(theta[1]) < 1e12)) {
      for (const values of [run.x, run.y, run.loss]) values.fill(NaN, t + 1);
      return run;
    }
  }
}

// The steps an online run is drawn at: all of the first period, then ends of periods, lest the curves be saws.
function onlineTimes(steps) {
  const times = Array.from({ length: PERIOD }, (_, t) => t);
  for (let k = 1; k * PERIOD <= steps; k = Math.max(k + 1, Math.floor(k * 1.01))) times.push(k * PERIOD);
  if (times.at(-1) < steps) times.push(steps);
  return times;
}

// A run on the online problem, in slices: at each yield `run` holds what is known. The step size falls as lr / sqrt(t),
// x is held in [-1, 1], and the regret, of the functions without noise, is against -1, the best point in hindsight.
function* playOnline(run, optimizer, lr, noise) {
  const { theta } = optimizer;
  const g = new Float64Array(1);
  const steps = run.t[run.t.length - 1];
  let regret = 0;
  run.x[0] = theta[0];
  for (let t = 1, next = 1; t <= steps; t++) {
    const slope = onlineGradient(t);
    regret += slope * (theta[0] + 1);
    g[0] = t < 800 ? slope + noise * onlineNoise(t) : slope; // e^-799 is 0 in doubles
    optimizer.step(g, lr / Math.sqrt(t));
    theta[0] = Math.min(Math.max(theta[0], -1), 1);
    if (t === run.t[next]) {
      run.x[next] = theta[0];
      run.regret[next] = regret / t;
      run.known = ++next;
    }
    if (t % 20_000 === 0) yield;
  }
  run.done = true;
}

function emptyOnlineRun(steps) {
  const t = onlineTimes(steps);
  const [x, regret] = [new Float64Array(t.length).fill(NaN), new Float64Array(t.length).fill(NaN)];
  return { t, x, regret, known: 1, done: false };
}
