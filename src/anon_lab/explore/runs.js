// The runs of the four optimizers under the present settings: each is made anew only when something it depends on
// changed. On a function that takes milliseconds and happens at once; the online problem goes in slices between frames.

const SLICE_MS = 10;

class Runs {
  constructor() {
    this.entries = {}; // by name: {signature, lr, run, job}
  }

  update(s) {
    for (const name of NAMES) {
      const key = signature(name, s);
      if (this.entries[name]?.signature === key) continue;
      const entry = { signature: key, lr: NaN, run: s.f === "online" ? emptyOnlineRun(s.steps) : null };
      entry.job = runJob(entry, name, { ...s, lr: { ...s.lr } });
      this.entries[name] = entry;
      if (s.f !== "online") while (!entry.job.next().done);
    }
  }

  get busy() {
    return NAMES.some((name) => !this.entries[name]?.run?.done);
  }

  // Work on the unfinished ones, in turn, for about SLICE_MS.
  work() {
    const end = performance.now() + SLICE_MS;
    while (this.busy && performance.now() < end) {
      for (const name of NAMES) if (!this.entries[name].run.done) this.entries[name].job.next();
    }
  }

  get all() {
    return Object.fromEntries(NAMES.map((name) => [name, this.entries[name].run]));
  }

  lr(name) {
    return this.entries[name].lr;
  }
}

function* runJob(entry, name, s) {
  entry.lr = yield* lrOf(name, s);
  const optimizer = optimizerOf(name, s);
  if (s.f === "online") yield* playOnline(entry.run, optimizer, entry.lr, s.noise);
  else entry.run = descend(PROBLEMS[s.f], optimizer, entry.lr, s.steps);
}
