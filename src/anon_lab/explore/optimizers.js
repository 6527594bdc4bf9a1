// Anon, SGDM, Adam and AMSGrad in plain doubles, step for step as anon_optim and torch.optim compute them.
//
// Each holds its point `theta` and has one method, step(gradient, lr). Symbols as in anon_optim/_idu.py: v is 1/psi (0
// marks a coordinate that has not seen a gradient yet), s and w the running second moment and its weight.

const TINY = 2 ** -1022;
const clampedLog = (x) => Math.log(Math.min(Math.max(x, TINY), Number.MAX_VALUE));
const clampedExp = (x) => Math.min(Math.max(Math.exp(x), TINY), Number.MAX_VALUE);

// a_1 = 1, a_{n+1} = max(a_n + 1, ceil(growth a_n)), in exact integers: growth is a decimal string, and "1.1" means
// eleven tenths, not the double next to it.
function* refreshTimes(growth) {
  const [whole, decimals = ""] = growth.split(".");
  const numerator = BigInt(whole + decimals);
  const denominator = 10n ** BigInt(decimals.length);
  for (let a = 1n; ; ) {
    yield Number(a);
    const grown = (numerator * a + denominator - 1n) / denominator;
    a = grown > a ? grown : a + 1n;
  }
}

class Anon {
  constructor(theta, { gamma, beta1, beta2, beta3, growth, eps, clip, floor, touch, windowTol }) {
    Object.assign(this, { theta, gamma, beta1, beta2, beta3, eps, clip, floor, touch });
    const zeros = () => new Float64Array(theta.length);
    [this.m, this.s, this.v] = [zeros(), zeros(), zeros()];
    this.w = this.level = this.t = 0;
    this.power1 = 1; // beta1^t
    this.times = refreshTimes(growth);
    this.due = this.times.next().value; // the first refresh time that is not before t
    // What lies further back weighs less than windowTol in all, and is left out.
    this.window = windowTol > 0 ? Math.max(1, Math.ceil(Math.log(windowTol) / Math.log(beta2))) : Infinity;
  }

  step(g, lr) {
    const { theta, m, s, v, gamma } = this;
    this.t += 1;
    this.power1 *= this.beta1;
    if (this.due < this.t) this.due = this.times.next().value;
    const counts = this.due - this.t < this.window;
    for (let i = 0; i < theta.length; i++) {
      m[i] += (1 - this.beta1) * (g[i] - m[i]);
      if (counts) s[i] = this.beta2 * s[i] + (1 - this.beta2) * g[i] * g[i];
    }
    if (counts) this.w = this.beta2 * this.w + (1 - this.beta2);
    if (this.due === this.t) this.refresh();
    else if (this.touch && gamma !== 0) this.touchUnseen(g);

    const correction = 1 - this.power1;
    if (this.clip < Infinity && gamma > 0) this.clipSticky(correction);
    for (let i = 0; i < theta.length; i++) theta[i] -= v[i] * m[i] * (lr / correction);
  }

  // psi^2 <- sigma^gamma at the first refresh, beta3 psi^2 + (1 - beta3) sigma^gamma later; sigma = s/w + eps.
  refresh() {
    const { s, v, w, eps, gamma } = this;
    const taught = (i) => s[i] > 0 && s[i] < Infinity;
    let [sum, count] = [0, 0];
    for (let i = 0; i < s.length; i++) {
      if (!taught(i)) continue;
      sum += s[i] / w + eps;
      count += 1;
    }
    const mean = count ? sum / count : 0;
    if (mean > 0) this.level = this.level > 0 ? this.beta3 * this.level + (1 - this.beta3) * mean : mean;
    for (let i = 0; i < s.length; i++) {
      if (gamma === 0) v[i] = 1;
      else if (!this.touch || taught(i)) {
        // A coordinate first seen on this very step has one sample in s; the steps before taught nothing.
        let sigma = (v[i] === 0 ? s[i] / (1 - this.beta2) : s[i] / w) + eps;
        if (this.floor > 0) sigma = Math.max(sigma, this.floor * mean);
        v[i] = clampedExp(-this.mixed(-2 * clampedLog(v[i]), gamma * clampedLog(sigma), v[i] === 0) / 2);
      }
    }
    s.fill(0);
    this.w = 0;
  }

  // The logarithm of beta3 old + (1 - beta3) new, from theirs.
  mixed(logOld, logNew, first) {
    if (this.beta3 === 0 || first) return logNew;
    const [a, b] = [logOld + Math.log(this.beta3), logNew + Math.log1p(-this.beta3)];
    return Math.max(a, b) + Math.log1p(Math.exp(-Math.abs(a - b)));
  }

  touchUnseen(g) {
    const { v, gamma, eps } = this;
    for (let i = 0; i < v.length; i++) {
      if (v[i] !== 0 || g[i] === 0) continue;
      const sigma = Math.max(g[i] * g[i] + eps, this.floor * this.level);
      v[i] = clampedExp((-gamma / 2) * clampedLog(sigma));
    }
  }

  // v <- min(v, (clip / |m_hat|)^gamma): psi itself rises, and stays risen until the next refresh.
  clipSticky(correction) {
    const { m, v, gamma } = this;
    const bound = this.clip * correction;
    for (let i = 0; i < v.length; i++) {
      v[i] = Math.min(v[i], Math.max((bound / Math.max(Math.abs(m[i]), TINY)) ** gamma, TINY));
    }
  }
}

class SGDM {
  constructor(theta, { beta1 }) {
    Object.assign(this, { theta, beta1, buffer: new Float64Array(theta.length) });
  }

  step(g, lr) {
    const { theta, buffer, beta1 } = this;
    for (let i = 0; i < theta.length; i++) {
      buffer[i] = beta1 * buffer[i] + g[i];
      theta[i] -= lr * buffer[i];
    }
  }
}

class Adam {
  constructor(theta, { beta1, beta2 }, keepsLargest = false) {
    Object.assign(this, { theta, beta1, beta2, keepsLargest, power1: 1, power2: 1 });
    const zeros = () => new Float64Array(theta.length);
    [this.m, this.s, this.largest] = [zeros(), zeros(), zeros()];
  }

  step(g, lr) {
    const { theta, m, s, largest, beta1, beta2 } = this;
    this.power1 *= beta1;
    this.power2 *= beta2;
    const size = lr / (1 - this.power1);
    const root = Math.sqrt(1 - this.power2);
    for (let i = 0; i < theta.length; i++) {
      m[i] += (1 - beta1) * (g[i] - m[i]);
      s[i] = beta2 * s[i] + (1 - beta2) * g[i] * g[i];
      largest[i] = this.keepsLargest ? Math.max(largest[i], s[i]) : s[i];
      theta[i] -= (size * m[i]) / (Math.sqrt(largest[i]) / root + 1e-8);
    }
  }
}

const OPTIMIZERS = {
  Anon: (theta, options) => new Anon(theta, options),
  SGDM: (theta, options) => new SGDM(theta, options),
  Adam: (theta, options) => new Adam(theta, options),
  AMSGrad: (theta, options) => new Adam(theta, options, true),
};
const NAMES = Object.keys(OPTIMIZERS);
