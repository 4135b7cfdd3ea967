/* The weights of one query as functions of its logits, in plain JavaScript, for the page "explore".
 *
 * Each formula is that of attnzoo/variants/NAME.py. `weights(z, params)` returns
 *   w: the weights of the n keys, a Float64Array
 *   slope: the derivative of the weight of key 0 by its logit
 * tests/test_explorer.py compares both with attnzoo.probabilities and its gradient.
 *
 * Browsers load this file as a script, and Node.js loads it as a module.
 */
"use strict";

const AttnzooFormulas = (() => {
  // ---- the model of the page --------------------------------------------------------------------

  const MOST_KEYS = 16384;

  /* Numbers from N(0, 1) by the method of Box and Muller, from the generator "mulberry32" with a
   * fixed seed. Key j has the same noise for every n. */
  const NOISE = (() => {
    let state = 1;
    const uniform = () => {
      state = (state + 0x6d2b79f5) | 0;
      let x = Math.imul(state ^ (state >>> 15), state | 1);
      x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
      return (((x ^ (x >>> 14)) >>> 0) + 0.5) / 2 ** 32;
    };
    const draw = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
    return Float64Array.from({ length: MOST_KEYS }, draw);
  })();

  /* z_0 = scale · gap, and z_j = scale · noise · ε_j for the other keys. */
  function logits({ n, gap, scale, noise }) {
    const z = NOISE.slice(0, n).map((e) => scale * noise * e);
    z[0] = scale * gap;
    return z;
  }

  // ---- parts of the formulas --------------------------------------------------------------------

  const sum = (x) => x.reduce((total, value) => total + value, 0);
  const largest = (x) => x.reduce((most, value) => Math.max(most, value), -Infinity);
  const sigmoid = (x) => (x >= 0 ? 1 / (1 + Math.exp(-x)) : 1 - 1 / (1 + Math.exp(x)));
  const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));

  /* softmax(gain · z) over the keys that `takesPart` accepts. One more key has the score `sink`. */
  function softmax(z, gain = 1, { takesPart = () => true, sink = -Infinity } = {}) {
    const s = z.map((value, j) => (takesPart(j) ? gain * value : -Infinity));
    const most = Math.max(largest(s), sink);
    const w = s.map((value) => Math.exp(value - most));
    const total = sum(w) + Math.exp(sink - most);
    w.forEach((value, j) => (w[j] = value / total));
    return { w, slope: gain * w[0] * (1 - w[0]) };
  }

  /* The keys by (score descending, index ascending). */
  const ordered = (z) => Uint32Array.from(z.keys()).sort((a, b) => z[b] - z[a] || a - b);

  function softmaxOver(z, keys) {
    const chosen = new Set(keys);
    return softmax(z, 1, { takesPart: (j) => chosen.has(j) });
  }

  /* φ(g·z − τ) with sum 1, φ(x) = [1 + (α−1) x]_+^{1/(α−1)}.
   *
   * The sum is convex in τ and falls, and at τ = max it is at least 1. Newton's method from there
   * never passes the root. */
  function entmax(z, alpha, gain = 1) {
    const most = largest(z.map((value) => gain * value));
    const s = z.map((value) => gain * value - most);
    const power = alpha === 1.5 ? (x) => x * x : (x) => x ** (1 / (alpha - 1));
    const phi = (x) => power(Math.max(0, 1 + (alpha - 1) * x));
    const derivative = (value) => (value > 0 ? value ** (2 - alpha) : 0);
    let tau = 0;
    for (let step = 0; step < 100; step++) {
      let total = -1;
      let fall = 0;
      for (const value of s) {
        const weight = phi(value - tau);
        total += weight;
        fall += derivative(weight);
      }
      const next = tau + total / fall;
      if (!(next > tau)) break;
      tau = next;
    }
    const w = s.map((value) => phi(value - tau));
    const ofTop = derivative(w[0]);
    return { w, slope: gain * ofTop * (1 - ofTop / sum(w.map(derivative))) };
  }

  /* f(z_j) / (Σ f(z_l) + eps); `slope` is f'. */
  function shares(z, f, slope, eps = 0) {
    const values = z.map(f);
    const total = sum(values) + eps || 1;
    const w = values.map((value) => value / total);
    return { w, slope: (slope(z[0]) * (1 - w[0])) / total };
  }

  const elementwise = (z, f, slope) => ({ w: z.map((value) => f(value)), slope: slope(z[0]) });

  // ---- the normal distribution ------------------------------------------------------------------

  const density = (x) => Math.exp(-0.5 * x * x) / Math.sqrt(2 * Math.PI);

  /* Φ(x): the continued fraction of its tail, and near 0 a series. */
  function normalCdf(x) {
    if (x > 2) return 1 - normalCdf(-x);
    if (x < -2) {
      let fraction = -x;
      for (let k = 200; k > 0; k--) fraction = k / fraction - x;
      return density(x) / fraction;
    }
    let term = x;
    let total = 0;
    for (let k = 1; Math.abs(term) > 1e-18; k++) {
      total += term;
      term *= (x * x) / (2 * k + 1);
    }
    return 0.5 + density(x) * total;
  }

  const LOWEST = -9.5;
  const HIGHEST = 9;
  const PER_UNIT = 128;
  let table = null;

  /* log Φ(x) by cubic interpolation in a table; its error is below 1e-11. */
  function logCdf(x) {
    if (x > HIGHEST) return 0;
    if (table === null) {
      const length = (HIGHEST - LOWEST) * PER_UNIT + 2;
      const at = Array.from({ length }, (_, i) => LOWEST + i / PER_UNIT);
      const exact = (y) => (y > 2 ? Math.log1p(-normalCdf(-y)) : Math.log(normalCdf(y)));
      table = {
        value: Float64Array.from(at, exact),
        slope: Float64Array.from(at, (y) => density(y) / normalCdf(y) / PER_UNIT),
      };
    }
    const position = (x - LOWEST) * PER_UNIT;
    const i = Math.floor(position);
    const t = position - i;
    const rise = table.value[i + 1] - table.value[i];
    const start = table.slope[i] - rise;
    const end = rise - table.slope[i + 1];
    return table.value[i] + t * (rise + (1 - t) * (start * (1 - t) + end * t));
  }

  /* P(z_j + std·ε_j is the largest) for normal ε: an integral over the largest value, by the
   * trapezoidal rule between the points outside of which Π Φ · φ is negligible. */
  function perturbed(z, std) {
    const POINTS = 96;
    const LAST = 8.5;
    const most = largest(z);
    const x = z.map((value) => Math.max(-100, (value - most) / std));
    const logProduct = (t) => x.reduce((total, value) => total + logCdf(t - value), 0);
    let first = -9;
    let high = LAST;
    for (let step = 0; step < 8; step++) {
      const middle = (first + high) / 2;
      if (logProduct(middle) < -40) first = middle;
      else high = middle;
    }
    const width = (LAST - first) / (POINTS - 1);
    const w = new Float64Array(z.length);
    const below = new Float64Array(z.length);
    let slope = 0;
    for (let point = 0; point < POINTS; point++) {
      const t = first + point * width;
      let product = 0;
      for (let j = 0; j < x.length; j++) product += below[j] = logCdf(t - x[j]);
      for (let j = 0; j < x.length; j++) {
        const part = width * density(t - x[j]) * Math.exp(product - below[j]);
        w[j] += part;
        if (j === 0) slope += ((t - x[0]) * part) / std;
      }
    }
    return { w, slope };
  }

  // ---- adaptive temperature ---------------------------------------------------------------------

  const POLYNOMIAL = [-0.037, 0.481, -2.3, 4.917, -1.791];

  function adaptive(z, differentiable) {
    const { w: p } = softmax(z);
    const most = largest(z);
    const x = z.map((value) => value - most);
    const mean = (shares, values) => sum(shares.map((share, j) => share * values[j]));
    const entropy = Math.log(sum(x.map(Math.exp))) - mean(p, x);
    let value = 0;
    let derivative = 0;
    for (const coefficient of POLYNOMIAL) {
      derivative = derivative * entropy + value;
      value = value * entropy + coefficient;
    }
    const raised = entropy > 0.5 && value > 1;
    const result = softmax(z, raised ? value : 1);
    if (raised && differentiable) {
      const slopeOfEntropy = -p[0] * (x[0] - mean(p, x));
      const slopeOfTop = result.w[0] * (x[0] - mean(result.w, x));
      result.slope += slopeOfTop * derivative * slopeOfEntropy;
    }
    return result;
  }

  // ---- the variants -----------------------------------------------------------------------------

  /* A number: its default, and the ends of its slider. Options: `log`, the slider is logarithmic;
   * `least`, `most` and `above`, the allowed values; `int`, `even`; `absent`, what the formula uses
   * if the value is null. */
  const number = (value, low, high, options = {}) =>
    ({ kind: "number", value, low, high, ...options });
  const flag = (value) => ({ kind: "flag", value });
  const choice = (value, options) => ({ kind: "choice", value, options });

  /* Why a value of a number is not allowed, in words that follow "must be"; null if it is. */
  function problem({ least = -Infinity, most = Infinity, above = -Infinity, ...param }, value) {
    if (value === null && param.absent) return null;
    if (value === null || !Number.isFinite(value)) return "a number";
    if (param.int && !Number.isInteger(value)) return "an integer";
    if (param.even && value % 2) return "even";
    if (value <= above) return `above ${above}`;
    if (value < least) return `at least ${least}`;
    return value > most ? `at most ${most}` : null;
  }

  const VARIANTS = {
    softmax: { params: {}, weights: (z) => softmax(z) },
    ssmax: {
      params: { s: number(0.168, 0, 1), b: number(0, -1, 3) },
      weights: (z, { s, b }) => softmax(z, s * Math.log(z.length) + b),
    },
    log_n: {
      params: {
        train_length: number(512, 2, 16384, { log: true, above: 1 }),
        clip: flag(false),
      },
      weights: (z, { train_length, clip }) => {
        const gain = Math.log(z.length) / Math.log(train_length);
        return softmax(z, clip ? Math.max(1, gain) : gain);
      },
    },
    adaptive_temperature: {
      params: { differentiable: flag(false) },
      weights: (z, { differentiable }) => adaptive(z, differentiable),
    },
    entmax: {
      params: { alpha: number(1.5, 1.01, 2, { least: 1.000001, most: 2 }) },
      weights: (z, { alpha }) => entmax(z, alpha),
    },
    asentmax: {
      params: {
        beta: number(Math.log(2), 0, 2),
        gamma: number(0, -2, 2),
        delta: number(1, 0, 3),
        extra: number(0, 0, 10, { int: true, least: 0 }),
        scaled: number(1, 0, 1),
      },
      weights: (z, { beta, gamma, delta, extra, scaled }) => {
        const grown = delta + beta * Math.log(z.length + extra) ** gamma;
        return entmax(z, 1.5, scaled * grown + 1 - scaled);
      },
    },
    sparsemax: { params: {}, weights: (z) => entmax(z, 2) },
    topk: {
      params: { top_k: number(8, 1, 1024, { log: true, int: true, least: 1 }) },
      weights: (z, { top_k }) => softmaxOver(z, ordered(z).subarray(0, top_k)),
    },
    top_p: {
      params: { p: number(0.9, 0.01, 1, { above: 0, most: 1 }) },
      weights: (z, { p }) => {
        if (p === 1) return softmax(z);
        const { w } = softmax(z);
        const order = ordered(z);
        let size = 0;
        let before = 0;
        for (; size < order.length && before < p; size++) before += w[order[size]];
        return softmaxOver(z, order.subarray(0, size));
      },
    },
    sink: { params: { b: number(0, -10, 10) }, weights: (z, { b }) => softmax(z, 1, { sink: b }) },
    softpick: {
      params: { eps: number(1e-8, 1e-8, 1, { log: true, least: 0 }) },
      weights: (z, { eps }) => {
        // Relative to e^M, M = max(0, max z), so that nothing overflows.
        const most = Math.max(0, largest(z));
        const part = (x) =>
          x > 0 ? Math.exp(x - most) * -Math.expm1(-x) : Math.exp(-most) * Math.expm1(x);
        const total = sum(z.map((x) => Math.abs(part(x)))) + eps * Math.exp(-most) || 1;
        const w = z.map((x) => Math.max(0, part(x)) / total);
        return { w, slope: z[0] > 0 ? (Math.exp(z[0] - most) * (1 - w[0])) / total : 0 };
      },
    },
    lssa: {
      params: { eps: number(1e-30, 1e-30, 1, { log: true, least: 0 }) },
      weights: (z, { eps }) => {
        const gain = Math.log(z.length);
        return shares(z, (x) => softplus(gain * x), (x) => gain * sigmoid(gain * x), eps);
      },
    },
    relu2: {
      params: {},
      weights: (z) => shares(z, (x) => Math.max(0, x) ** 2, (x) => 2 * Math.max(0, x)),
    },
    taylor: {
      params: { order: number(2, 2, 12, { int: true, even: true, least: 2, most: 170 }) },
      weights: (z, { order }) => {
        const series = (x, powers) => {
          let total = 1;
          for (let p = powers; p > 0; p--) total = 1 + (x / p) * total;
          return total;
        };
        return shares(z, (x) => series(x, order), (x) => series(x, order - 1));
      },
    },
    perturb_max: {
      params: {
        noise: choice("normal", ["normal", "gumbel"]),
        std: number(1, 0.1, 10, { log: true, least: 1e-6 }),
      },
      weights: (z, { noise, std }) =>
        noise === "gumbel" ? softmax(z, 1 / std) : perturbed(z, std),
    },
    sigmoid: {
      params: { bias: number(null, -12, 4, { absent: "−log n" }) },
      weights: (z, { bias }) => {
        const added = bias ?? -Math.log(z.length);
        const weight = (x) => sigmoid(x + added);
        return elementwise(z, weight, (x) => weight(x) * sigmoid(-x - added));
      },
    },
    relu: {
      params: { power: number(1, 0.25, 4, { above: 0, most: 16 }) },
      weights: (z, { power }) =>
        elementwise(
          z,
          (x) => (x > 0 ? x ** power / z.length : 0),
          (x) => (x > 0 ? (power * x ** (power - 1)) / z.length : 0),
        ),
    },
    silu: {
      params: { length: number(null, 1, 16384, { log: true, absent: "n", least: 1 }) },
      weights: (z, { length }) => {
        const divisor = length ?? z.length;
        return elementwise(
          z,
          (x) => (x * sigmoid(x)) / divisor,
          (x) => (sigmoid(x) * (1 + x * sigmoid(-x))) / divisor,
        );
      },
    },
    screening: {
      params: { r: number(2, 1, 20, { log: true, least: 1 }) },
      weights: (z, { r }) => {
        const part = (x) => Math.max(0, 1 - r * (1 - x));
        return elementwise(z, (x) => part(x) ** 2, (x) => 2 * r * part(x));
      },
    },
  };

  /* What the reader chooses for the logits. */
  const MODEL = {
    n: number(1024, 2, MOST_KEYS, { log: true, int: true, least: 2, most: MOST_KEYS,
      label: "number of keys n" }),
    gap: number(3, 0, 10, { label: "gap of the top key" }),
    scale: number(1, 0, 4, { label: "scale" }),
    noise: number(0.5, 0, 2, { least: 0, label: "noise of the other keys (std)" }),
  };

  /* All other variants of the library, with the reason. */
  const LEFT_OUT = {
    cosformer: "its weights need q and k themselves and the distance to the key",
    elu: "its weights need q and k themselves",
    forgetting: "its weights depend on the gates of all tokens between query and key",
    hedgehog: "its weights need q and k themselves",
    noisy: "its weights are random; in evaluation mode it is softmax",
    position_temperature: "its gain depends on the position of the query",
    scale_invariant: "its weights depend on the distance to the key",
    stick_breaking: "its weights depend on the keys between key and query",
  };

  /* The default parameters of a variant. */
  const defaults = (name) => {
    const params = Object.entries(VARIANTS[name].params);
    return Object.fromEntries(params.map(([key, param]) => [key, param.value]));
  };

  /* The weights and the slope of a variant; parameters that are not in `params` have defaults. */
  const weights = (name, z, params = {}) =>
    VARIANTS[name].weights(z, { ...defaults(name), ...params });

  /* What the table of the page shows. Weights that are negative have no entropy. */
  function measures({ w, slope }) {
    const total = sum(w);
    const support = w.filter((value) => value > 0).length;
    const part = (share) => (share > 0 ? -share * Math.log(share) : 0);
    const defined = total > 0 && w.every((value) => value >= 0);
    const entropy = defined ? sum(w.map((value) => part(value / total))) : null;
    return { top: w[0], largest: largest(w), total, entropy, support, slope };
  }

  return { VARIANTS, LEFT_OUT, MODEL, logits, weights, defaults, measures, problem };
})();

if (typeof module !== "undefined") module.exports = AttnzooFormulas;
