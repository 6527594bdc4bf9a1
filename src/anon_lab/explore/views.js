// The two pictures: the map (paths over contours, or x over time) and the curves (loss or regret over time).

const FLOOR = 1e-8; // lower losses are not told apart

function styleOf(name, s) {
  const look = dark.matches ? 1 : 0;
  if (name === "Anon") {
    return { colour: anonColour(s.gamma), dash: [], width: 3.5 };
  }
  const dashes = { solid: [], dash: [4, 2], dot: [1, 2], dashdot: [5, 2, 1, 2], longdash: [7, 3] };
  return { colour: GIVEN.colours[name][look], dash: dashes[GIVEN.dashes[name]], width: 2 };
}

function anonColour(gamma) {
  const colours = GIVEN.gamma_colours[dark.matches ? 1 : 0];
  return colours[Math.round(((gamma + 2) / 4) * (colours.length - 1))];
}

// Anon is drawn last, on top.
const drawingOrder = (s) => NAMES.filter((name) => s.shown.includes(name)).reverse();

class MapView {
  constructor(canvas) {
    this.plot = new Plot(canvas);
    this.made = null;
  }

  draw(s, runs, frame, focused) {
    const { plot } = this;
    plot.begin();
    if (s.f === "online") this.drawOnline(s, runs, frame);
    else this.drawPlane(s, runs, frame);
    const { x, y } = s.f === "online" ? { x: 1, y: s.x } : s;
    this.drawStart(x, y, focused);
  }

  drawPlane(s, runs, frame) {
    const { plot } = this;
    const [x, y] = fitted(PROBLEMS[s.f].window, plot.area);
    plot.setAxes({ range: x, label: "x" }, { range: y, label: "y" });
    const { area } = plot;
    plot.context.drawImage(this.picture(s.f), area.left, area.top, area.right - area.left, area.bottom - area.top);
    plot.frame(false);
    this.drawMinimum(PROBLEMS[s.f].optimum);
    for (const name of drawingOrder(s)) {
      const style = styleOf(name, s);
      const run = runs[name];
      plot.line(run.x, run.y, frame + 1, style);
      this.drawStepDots(run, frame, style);
    }
    for (const name of drawingOrder(s)) this.drawHead(runs[name].x, runs[name].y, frame, styleOf(name, s));
    this.label("minimum", ...this.beside(PROBLEMS[s.f].optimum), "left", "bottom");
  }

  picture(f) {
    const { plot } = this;
    const key = [f, plot.width, plot.height, plot.ratio, plot.em, dark.matches].join();
    if (this.made?.key !== key) this.made = { key, picture: contourPicture(plot, PROBLEMS[f].f) };
    return this.made.picture;
  }

  // A dot for each step where there is room for one.
  drawStepDots(run, frame, { colour, width }) {
    const { plot } = this;
    let [lastX, lastY] = [Infinity, Infinity];
    for (let t = 0; t <= frame; t++) {
      const [px, py] = [plot.x.to(run.x[t]), plot.y.to(run.y[t])];
      if (Math.hypot(px - lastX, py - lastY) < 3.5 * width) continue;
      plot.dot(run.x[t], run.y[t], width * 0.95, colour);
      [lastX, lastY] = [px, py];
    }
  }

  drawHead(xs, ys, frame, { colour, width }) {
    this.plot.dot(xs[frame], ys[frame], 3 + width, colour, 2);
  }

  drawOnline(s, runs, frame) {
    const { plot } = this;
    plot.setAxes({ range: [1, s.steps], log: true, label: "step t" }, { range: [-1.08, 1.08], label: "x" });
    plot.frame();
    for (const name of drawingOrder(s)) {
      const run = runs[name];
      plot.line(run.t, run.x, Math.min(frame + 1, run.known), styleOf(name, s));
    }
    for (const name of drawingOrder(s)) {
      const at = Math.min(frame, runs[name].known - 1);
      if (at > 0) this.drawHead(runs[name].t, runs[name].x, at, styleOf(name, s));
    }
    this.label("best point", plot.area.right - 0.4 * plot.em, plot.y.to(-1) - 0.2 * plot.em, "right", "bottom");
  }

  drawMinimum([x, y]) {
    const { plot } = this;
    const { context: c, em } = plot;
    const [px, py, r] = [plot.x.to(x), plot.y.to(y), 0.45 * em];
    c.strokeStyle = plot.colours.ink;
    c.lineWidth = 2;
    plot.segment(px - r, py - r, px + r, py + r);
    plot.segment(px - r, py + r, px + r, py - r);
  }

  beside([x, y]) {
    return [this.plot.x.to(x) + 0.7 * this.plot.em, this.plot.y.to(y) - 0.5 * this.plot.em];
  }

  drawStart(x, y, focused) {
    const { plot } = this;
    const { context: c, em } = plot;
    const [px, py] = [plot.x.to(x), plot.y.to(y)];
    c.beginPath();
    c.arc(px, py, 0.55 * em, 0, 2 * Math.PI);
    c.lineWidth = 5;
    c.strokeStyle = plot.colours.back;
    c.stroke();
    c.lineWidth = focused ? 3.5 : 2;
    c.strokeStyle = focused ? css("--focus") : plot.colours.ink;
    c.stroke();
    const left = px > plot.area.left + 4 * em;
    this.label("start", px + (left ? -0.8 : 0.8) * em, py, left ? "right" : "left", "middle");
  }

  label(text, x, y, align, baseline) {
    const { context: c, colours, em } = this.plot;
    c.font = `600 ${0.8 * em}px ${css("--font")}`;
    c.textAlign = align;
    c.textBaseline = baseline;
    c.lineJoin = "round";
    c.lineWidth = 4;
    c.strokeStyle = colours.back;
    c.strokeText(text, x, y);
    c.fillStyle = colours.ink;
    c.fillText(text, x, y);
  }

  // The point of a shown path that is nearest to a place on the canvas, or null if none is near.
  nearest(s, runs, frame, px, py) {
    let found = null;
    let least = 1.2 * this.plot.em;
    for (const name of drawingOrder(s)) {
      const run = runs[name];
      const xs = s.f === "online" ? run.t : run.x;
      const ys = s.f === "online" ? run.x : run.y;
      for (let k = 0; k <= Math.min(frame, (run.known ?? Infinity) - 1); k++) {
        const distance = Math.hypot(this.plot.x.to(xs[k]) - px, this.plot.y.to(ys[k]) - py);
        if (distance < least) [found, least] = [{ name, frame: k }, distance];
      }
    }
    return found;
  }
}

class CurveView {
  constructor(canvas) {
    this.plot = new Plot(canvas);
  }

  draw(s, runs, frame, hovered) {
    const { plot } = this;
    const online = s.f === "online";
    plot.begin();
    plot.setAxes(
      online ? { range: [1, s.steps], log: true, label: "step t" } : { range: [0, s.steps], label: "step t" },
      { range: this.range(s, runs), log: true, label: online ? "regret / t" : "f" },
    );
    plot.frame();
    for (const name of drawingOrder(s)) {
      const run = runs[name];
      const known = online ? Math.min(frame + 1, run.known) : frame + 1;
      plot.line(online ? run.t : countingUp(s.steps), online ? run.regret : run.loss, known, styleOf(name, s));
    }
    this.drawCursor(s, runs, hovered ?? frame, hovered !== null);
  }

  drawCursor(s, runs, at, hovered) {
    const { plot } = this;
    const online = s.f === "online";
    if (hovered) {
      const px = Math.round(plot.x.to(online ? runs.Anon.t[at] : at)) + 0.5;
      plot.context.strokeStyle = plot.colours.soft;
      plot.context.lineWidth = 1;
      plot.segment(px, plot.area.top, px, plot.area.bottom);
    }
    for (const name of drawingOrder(s)) {
      const run = runs[name];
      const k = online ? Math.min(at, run.known - 1) : at;
      const { colour, width } = styleOf(name, s);
      plot.dot(online ? run.t[k] : k, online ? run.regret[k] : run.loss[k], 2.5 + width, colour, 2);
    }
  }

  // Whole decades around what is shown.
  range(s, runs) {
    let [low, high] = [Infinity, 0];
    for (const name of drawingOrder(s)) {
      for (const value of runs[name].loss ?? runs[name].regret) {
        if (value > 0 && value < Infinity) [low, high] = [Math.min(low, value), Math.max(high, value)];
      }
    }
    if (!(high > 0)) return [0.1, 10];
    const decade = (value, round) => 10 ** round(Math.log10(value));
    low = decade(Math.max(low, FLOOR), Math.floor);
    return [low, Math.max(decade(Math.min(high, 1e12), Math.ceil), 10 * low)];
  }

  // The frame under a place on the canvas.
  frameAt(s, runs, px) {
    const t = this.plot.x.from(px);
    if (s.f !== "online") return Math.round(Math.min(Math.max(t, 0), s.steps));
    const after = runs.Anon.t.findIndex((time) => time >= t);
    return Math.max(1, after < 0 ? runs.Anon.t.length - 1 : after);
  }
}

const counting = {};
const countingUp = (n) => (counting[n] ??= Float64Array.from({ length: n + 1 }, (_, t) => t));
