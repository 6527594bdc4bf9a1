// What one sees, in words: the sentences are made from the numbers of the runs.

const minus = (text) => String(text).replace(/-/g, "−");
const fixed = (x, digits) => minus(x.toFixed(digits).replace(/^-(0\.0*)$/, "$1"));
const gammaText = (gamma) => `γ\u00a0=\u00a0${minus(gamma)}`;
const list = (items) => (items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`);
const count = (n) => n.toLocaleString("en").replace(/,/g, "\u202f");

function small(x, digits = 2) {
  if (Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(x)));
  if (power >= -3 && power < 5) return minus(Number(x.toPrecision(digits)));
  const [head, tail] = x.toExponential(digits - 1).split("e");
  return `${minus(Number(head))}·10${superscript(Number(tail))}`;
}

const superscript = (n) => [...String(n)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");

function finding(s, runs) {
  return s.f === "online" ? onlineFinding(s, runs) : curveFinding(s, runs);
}

const rivals = NAMES.filter((name) => name !== "Anon");

function curveFinding(s, runs) {
  const arrivals = Object.fromEntries(NAMES.map((name) => [name, arrival(runs[name])]));
  const there = rivals.filter((name) => arrivals[name] < Infinity).sort((a, b) => arrivals[a] - arrivals[b]);
  const away = rivals.filter((name) => !there.includes(name));
  const anon = `Anon at ${gammaText(s.gamma)}`;
  if (arrivals.Anon < Infinity) {
    const others = there.map((name) => `${name}: ${count(arrivals[name])}`).join(", ");
    const rest = away.length ? `; ${list(away)} ${away.length > 1 ? "do" : "does"} not within ${count(s.steps)}` : "";
    return `${anon} reaches the minimum in ${count(arrivals.Anon)} steps${others && ` (${others})`}${rest}`;
  }
  const last = Object.fromEntries(NAMES.map((name) => [name, runs[name].loss.at(-1)]));
  if (Number.isNaN(last.Anon)) return `${anon} diverges at this learning rate`;
  if (there.length) {
    const are = there.length > 1 ? "are" : "is";
    return `${anon} is not at the minimum after ${count(s.steps)} steps; ${list(there)} ${are}`;
  }
  const order = NAMES.filter((name) => !Number.isNaN(last[name])).sort((a, b) => last[a] - last[b]);
  const named = (name) => (name === "Anon" ? anon : name);
  // Less than a percent apart is not worth a rank.
  const level = order.filter((name) => last[name] < 1.01 * last[order[0]] + 1e-9);
  if (level.length === order.length) {
    return `After ${count(s.steps)} steps all are at the same height, f = ${small(last.Anon)}: none at the minimum`;
  }
  const lowest = `${list(level.map(named))} ${level.length > 1 ? "are" : "is"} lowest after ${count(s.steps)} steps`;
  const tail = level.includes("Anon") ? "" : ` (Anon at ${gammaText(s.gamma)}: ${small(last.Anon)})`;
  return `${lowest}, at f = ${small(last[order[0]])}${tail}; nobody reaches the minimum`;
}

// Where the first step points, as an angle from the steeper axis: tan = (flat slope / steep slope)^(1 - gamma) without
// guards, which may turn it back.
function direction(s, runs) {
  const [gx, gy] = gradientAt(s).map(Math.abs);
  const { x, y } = runs.Anon;
  const [dx, dy] = [Math.abs(x[1] - x[0]), Math.abs(y[1] - y[0])];
  const [steep, flat] = gx >= gy ? ["x", "y"] : ["y", "x"];
  const angle = (a, b) => (Math.atan2(...(gx >= gy ? [b, a] : [a, b])) * 180) / Math.PI;
  const [own, gradient] = [angle(dx, dy), angle(gx, gy)].map(Math.round);
  if (!(gx > 0 && gy > 0) || Number.isNaN(own)) return "";
  let kind = "prefers the flat direction";
  if (own < gradient) kind = "takes the steep direction even more than the gradient does";
  else if (own === gradient) kind = "follows the gradient";
  else if (own < 45) kind = "lies between the gradient and Adam’s 45°";
  else if (own === 45) kind = "goes equally far along both axes";
  return (
    `Anon’s first step ${kind}: ${own}° off the ${steep} axis, the gradient ${gradient}° ` +
    `(slope along ${steep} ${small(Math.max(gx, gy))}, along ${flat} ${small(Math.min(gx, gy))}).`
  );
}

function onlineFinding(s, runs) {
  const at = Object.fromEntries(NAMES.map((name) => [name, runs[name].x[runs[name].known - 1]]));
  const order = [...NAMES].sort((a, b) => at[a] - at[b]);
  const named = (name) => (name === "Anon" ? `Anon at ${gammaText(s.gamma)}` : name);
  const spot = (name) => `${name === "Anon" ? "Anon" : name} at ${fixed(at[name], 2)}`;
  const rest = order.slice(1);
  return (
    `After ${count(s.steps)} steps ${named(order[0])} is nearest to the best point −1, at x = ` +
    `${fixed(at[order[0]], 2)}; ${list(rest.map(spot))}`
  );
}

function regretSentence(s, runs) {
  const last = (name) => runs[name].regret[runs[name].known - 1];
  const order = [...NAMES].sort((a, b) => last(a) - last(b));
  const guards = s.guards ? "with its guards" : "as printed, without guards";
  const regrets = list(order.map((name) => `${name} ${small(last(name))}`));
  return `Regret a step, lowest first: ${regrets}. Anon runs ${guards}.`;
}
