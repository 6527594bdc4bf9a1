// Drawing on a canvas: axes, lines, and the contours of a function, in the page's own fonts and colours.

const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rootSize = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

class Plot {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  // Call first in each drawing: takes the element's size, and empties it.
  begin() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) [this.canvas.width, this.canvas.height] = size;
    this.em = rootSize();
    const em = this.em;
    Object.assign(this, { width, height, ratio });
    this.area = { left: 3.4 * em, top: 0.7 * em, right: width - 1.3 * em, bottom: height - 2.9 * em };
    this.colours = { ink: css("--ink"), soft: css("--soft"), line: css("--line"), back: css("--plot") };
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  // Each axis is {range: [low, high], log, label}.
  setAxes(x, y) {
    const { left, right, top, bottom } = this.area;
    this.axes = { x, y };
    this.x = scale(x, left, right);
    this.y = scale(y, bottom, top);
  }

  frame(grid = true) {
    const { context: c, area, colours, em, axes } = this;
    c.font = `${0.8 * em}px ${css("--font")}`;
    c.lineWidth = 1;
    c.strokeStyle = colours.line;
    c.fillStyle = colours.soft;
    c.textAlign = "center";
    c.textBaseline = "top";
    for (const { value, text } of ticks(axes.x, (area.right - area.left) / (3.4 * em))) {
      const at = Math.round(this.x.to(value)) + 0.5;
      if (grid) this.segment(at, area.top, at, area.bottom);
      c.fillText(text, at, area.bottom + 0.4 * em);
    }
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (const { value, text } of ticks(axes.y, (area.bottom - area.top) / (3 * em))) {
      const at = Math.round(this.y.to(value)) + 0.5;
      if (grid) this.segment(area.left, at, area.right, at);
      c.fillText(text, area.left - 0.5 * em, at);
    }
    c.textAlign = "center";
    c.textBaseline = "bottom";
    c.fillText(axes.x.label, (area.left + area.right) / 2, this.height - 0.1 * em);
    c.save();
    c.translate(0.1 * em, (area.top + area.bottom) / 2);
    c.rotate(-Math.PI / 2);
    c.textBaseline = "top";
    c.fillText(axes.y.label, 0, 0);
    c.restore();
  }

  segment(x0, y0, x1, y1) {
    const c = this.context;
    c.beginPath();
    c.moveTo(x0, y0);
    c.lineTo(x1, y1);
    c.stroke();
  }

  clipped(draw) {
    const { context: c, area } = this;
    c.save();
    c.beginPath();
    c.rect(area.left, area.top, area.right - area.left, area.bottom - area.top);
    c.clip();
    draw(c);
    c.restore();
  }

  // A line through the first `length` points, over a halo that keeps crossing lines apart. What has no place on the
  // axes leaves a gap.
  line(xs, ys, length, { colour, dash, width }) {
    this.clipped((c) => {
      // The canvas gives up far outside; an infinite pixel is a logarithm of 0 or less.
      const held = (pixel) => (Number.isFinite(pixel) ? Math.min(Math.max(pixel, -1e5), 1e5) : NaN);
      const path = new Path2D();
      let last = null;
      for (let i = 0; i < length; i++) {
        const [px, py] = [held(this.x.to(xs[i])), held(this.y.to(ys[i]))];
        if (Number.isNaN(px) || Number.isNaN(py)) last = null;
        else if (last === null) path.moveTo(...(last = [px, py]));
        // Points that cannot be told apart would only cost time.
        else if (i === length - 1 || Math.hypot(px - last[0], py - last[1]) > 0.4) path.lineTo(...(last = [px, py]));
      }
      c.lineJoin = c.lineCap = "round";
      c.globalAlpha = 0.6;
      c.strokeStyle = this.colours.back;
      c.lineWidth = width + 2;
      c.stroke(path);
      c.globalAlpha = 1;
      c.strokeStyle = colour;
      c.lineWidth = width;
      if (dash.length) c.lineCap = "butt";
      c.setLineDash(dash.map((part) => part * width));
      c.stroke(path);
    });
  }

  dot(x, y, radius, colour, ring = 0) {
    const [px, py] = [this.x.to(x), this.y.to(y)];
    const { context: c, area } = this;
    // Whole at the border, gone beyond it.
    if (!(px >= area.left - 1 && px <= area.right + 1 && py >= area.top - 1 && py <= area.bottom + 1)) return;
    c.beginPath();
    c.arc(px, py, radius, 0, 2 * Math.PI);
    c.fillStyle = colour;
    c.fill();
    if (!ring) return;
    c.lineWidth = ring;
    c.strokeStyle = this.colours.back;
    c.stroke();
  }
}

function scale({ range: [low, high], log }, from, to) {
  const inner = log ? Math.log10 : (v) => v;
  const [a, b] = [inner(low), inner(high)];
  return {
    to: (v) => from + ((inner(v) - a) / (b - a)) * (to - from),
    from: (p) => {
      const v = a + ((p - from) / (to - from)) * (b - a);
      return log ? 10 ** v : v;
    },
  };
}

function ticks({ range: [low, high], log }, most) {
  if (log) {
    const [a, b] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.max(1, Math.ceil((b - a + 1) / Math.max(most, 2)));
    const found = [];
    const text = (k) => ({ 0: "1", 1: "10" })[k] ?? `10${superscript(k)}`;
    for (let k = b; k >= a; k -= every) found.push({ value: 10 ** k, text: text(k) });
    return found;
  }
  const rough = (high - low) / Math.max(most, 3);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * unit >= rough) * unit;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) {
    found.push({ value: k * step, text: minus(Number((k * step).toPrecision(6))) });
  }
  return found;
}

// The window with as much beside it as gives both axes the same unit on this area, so that angles are true.
function fitted([[x0, x1], [y0, y1]], { left, right, top, bottom }) {
  const unit = Math.max((x1 - x0) / (right - left), (y1 - y0) / (bottom - top));
  const widened = (low, high, length) => {
    const extra = (unit * length - (high - low)) / 2;
    return [low - extra, high + extra];
  };
  return [widened(x0, x1, right - left), widened(y0, y1, bottom - top)];
}

// The function as a picture, shaded and with contour lines at heights of equal ratio; made once for a size and look.
function contourPicture(plot, f) {
  const { area, ratio } = plot;
  const [width, height] = [area.right - area.left, area.bottom - area.top];
  const cells = 150;
  const [columns, rows] = [cells, Math.max(2, Math.round((cells * height) / width))];
  const heights = new Float64Array((columns + 1) * (rows + 1));
  for (let j = 0; j <= rows; j++) {
    for (let i = 0; i <= columns; i++) {
      const x = plot.x.from(area.left + (i / columns) * width);
      heights[j * (columns + 1) + i] = f(x, plot.y.from(area.top + (j / rows) * height));
    }
  }
  const sorted = Float64Array.from(heights).sort();
  const [low, high] = [Math.log(sorted[Math.floor(sorted.length * 0.002)] + 1e-9), Math.log(sorted.at(-1))];
  const picture = new OffscreenCanvas(Math.ceil(width * ratio), Math.ceil(height * ratio));
  const c = picture.getContext("2d");
  c.scale((width * ratio) / columns, (height * ratio) / rows);
  c.drawImage(shading(heights, columns, rows, low, high), 0, 0, columns, rows);
  c.strokeStyle = css("--contour");
  c.lineWidth = (0.9 * columns) / width;
  const levels = 15;
  for (let k = 1; k < levels; k++) {
    c.stroke(contour(heights, columns, rows, Math.exp(low + ((high - low) * k) / levels)));
  }
  return picture;
}

function shading(heights, columns, rows, low, high) {
  const image = new ImageData(columns + 1, rows + 1);
  const [r, g, b] = css("--shade").split(" ").map(Number);
  heights.forEach((h, k) => {
    const place = Math.min(Math.max((Math.log(h + 1e-9) - low) / (high - low), 0), 1);
    image.data.set([r, g, b, 255 * 0.45 * (1 - place)], 4 * k);
  });
  const canvas = new OffscreenCanvas(columns + 1, rows + 1);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Marching squares: in each cell the level crosses two of the edges, or all four at a saddle.
function contour(heights, columns, rows, level) {
  const path = new Path2D();
  const at = (i, j) => heights[j * (columns + 1) + i] - level;
  for (let j = 0; j < rows; j++) {
    for (let i = 0; i < columns; i++) {
      const [a, b, c, d] = [at(i, j), at(i + 1, j), at(i + 1, j + 1), at(i, j + 1)];
      if (a > 0 === b > 0 && b > 0 === c > 0 && c > 0 === d > 0) continue;
      const points = [];
      if (a > 0 !== b > 0) points.push([i + a / (a - b), j]);
      if (b > 0 !== c > 0) points.push([i + 1, j + b / (b - c)]);
      if (c > 0 !== d > 0) points.push([i + d / (d - c), j + 1]);
      if (d > 0 !== a > 0) points.push([i, j + a / (a - d)]);
      for (let k = 0; k + 1 < points.length; k += 2) {
        path.moveTo(...points[k]);
        path.lineTo(...points[k + 1]);
      }
    }
  }
  return path;
}
