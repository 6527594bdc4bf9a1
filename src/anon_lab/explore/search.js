// Learning rates. Anon's has another unit at every gamma, so two ways of setting them treat all optimizers alike: a
// search, and the same pace for everyone, which is the length that steps would have if the gradient stayed as it is at
// the start.

const ARRIVED = 1e-6;
const LADDER = 10; // learning rates a decade, on the sliders and in the search
const DECADES = 5; // how far down the search goes from the fastest pace it allows
const STRIDE = { curve: 1, online: 2 }; // every rung, or every second one of the problem whose runs are long
const SEARCH_STEPS = 1_010_000; // at most, of the online problem
const LR_RANGE = [-12, 8]; // powers of ten

const lrAt = (position) => Number((10 ** position).toPrecision(3));

function gradientAt(s) {
  if (s.f === "online") return [onlineGradient(1) + s.noise * onlineNoise(1)];
  const g = [0, 0];
  PROBLEMS[s.f].gradient([s.x, s.y], g);
  return g;
}

const pointOf = (s) => Float64Array.from(s.f === "online" ? [s.x] : [s.x, s.y]);
const optimizerOf = (name, s) => OPTIMIZERS[name](pointOf(s), optionsOf(s));

// Every step is proportional to the learning rate. All but SGDM average gradients and reach their pace at once; SGDM
// adds them up and reaches it as 1 + beta1 + beta1^2 + ... does.
function lrOfPace(name, s, pace) {
  const optimizer = OPTIMIZERS[name](new Float64Array(pointOf(s).length), optionsOf(s));
  optimizer.step(gradientAt(s), 1);
  const unit = Math.hypot(...optimizer.theta) / (name === "SGDM" ? 1 - s.beta1 : 1);
  return unit > 0 && unit < Infinity ? pace / unit : 1;
}

// The first step from which on the loss stays below ARRIVED; Infinity if there is none.
function arrival(run) {
  let t = run.loss.length;
  while (t > 0 && run.loss[t - 1] < ARRIVED) t -= 1;
  return t === run.loss.length ? Infinity : t;
}

// The longest step that the search allows: what leaps through the picture arrives by luck. The online set has width 2.
const longestStep = (s) => (s.f === "online" ? 2 : PROBLEMS[s.f].window[0][1] - PROBLEMS[s.f].window[0][0]) / 20;

// How good a learning rate is, lower being better: the arrival, and between those that do not arrive the last loss. For
// the online problem, the regret.
function* score(name, s, lr) {
  if (s.f === "online") {
    const run = emptyOnlineRun(Math.min(s.steps, SEARCH_STEPS));
    yield* playOnline(run, optimizerOf(name, s), lr, s.noise);
    return [0, run.regret.at(-1)];
  }
  const run = descend(PROBLEMS[s.f], optimizerOf(name, s), lr, s.steps, longestStep(s));
  return run === null ? [Infinity, Infinity] : [arrival(run), run.loss.at(-1)];
}

function* searchedLr(name, s) {
  const top = Math.floor(Math.log10(lrOfPace(name, s, longestStep(s))) * LADDER);
  let best = { lr: lrAt(top / LADDER), steps: Infinity, loss: Infinity };
  for (let rung = 0; rung < DECADES * LADDER; rung += s.f === "online" ? STRIDE.online : STRIDE.curve) {
    const lr = lrAt((top - rung) / LADDER);
    const [steps, loss] = yield* score(name, s, lr);
    if (steps < best.steps || (steps === best.steps && loss < best.loss)) best = { lr, steps, loss };
  }
  return best.lr;
}

function* lrOf(name, s) {
  if (s.mode === "search") return yield* searchedLr(name, s);
  return s.mode === "pace" ? lrOfPace(name, s, s.pace) : s.lr[name];
}
