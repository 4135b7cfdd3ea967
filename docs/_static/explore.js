/* The page "explore": controls, a table and two figures, drawn into the element #explorer-app.
 * The formulas are in explore-formulas.js. The state of the page is in the part of its address
 * behind #, such as #n=4096&gap=2&v=softmax,ssmax&ssmax.s=0.3 */
"use strict";

(() => {
  const { VARIANTS, LEFT_OUT, MODEL, logits, weights, defaults, measures, problem } =
    AttnzooFormulas;
  const BASELINE = "softmax";
  const SHOWN_FIRST = ["softmax", "ssmax", "entmax", "topk"];
  // As in evals/reporting/curves.py: a contrast of at least 3 to a white and to a dark page
  const COLOURS = ["#1b7fc4", "#d55e00", "#00966c", "#b75a9c", "#a67c00", "#7a6fd0", "#c8453b",
    "#7f7f7f"];
  const STEPS = 200; // of a slider
  const LENGTHS = Array.from({ length: 14 }, (_, i) => 2 ** (i + 1));
  const LEAST = 1e-6; // the lower end of both weight axes
  const QUANTITIES = [
    ["top", "top key"], ["largest", "largest"], ["total", "sum"], ["entropy", "entropy"],
    ["support", "support"], ["slope", "gradient"],
  ];
  const root = document.getElementById("explorer-app");

  const modelDefaults = () =>
    Object.fromEntries(Object.entries(MODEL).map(([key, { value }]) => [key, value]));
  const state = { model: modelDefaults(), chosen: [...SHOWN_FIRST], params: {} };

  // ---- elements ---------------------------------------------------------------------------------

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function svg(tag, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  }

  function shown(x) {
    if (x === null || !Number.isFinite(x)) return "–";
    if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x).replace("-", "−");
    const [digits, power] = Number(x).toExponential(2).split("e");
    if (power >= -3 && power < 6) return String(Number(x.toPrecision(3))).replace("-", "−");
    return `${Number(digits)}e${Number(power)}`.replaceAll("-", "−");
  }

  // ---- controls ---------------------------------------------------------------------------------

  const valueAt = (param, step) => {
    const { low, high, log, int, even } = param;
    const share = step / STEPS;
    const value = log ? low * (high / low) ** share : low + (high - low) * share;
    if (even) return 2 * Math.round(value / 2);
    return int ? Math.round(value) : Number(value.toPrecision(3));
  };

  const stepOf = ({ low, high, log }, value) =>
    Math.round(STEPS * (log ? Math.log(value / low) / Math.log(high / low)
      : (value - low) / (high - low)));

  /* A slider and a field for the exact value of a number. */
  function numberControl(id, label, param, value, change) {
    const slider = element("input", { type: "range", id, min: 0, max: STEPS });
    const field = element("input", {
      type: "number", step: "any", "aria-label": `${label}, exact value`,
      placeholder: param.absent ?? "",
    });
    const describe = (x) => slider.setAttribute("aria-valuetext", x ?? param.absent);
    slider.value = stepOf(param, value ?? param.low);
    field.value = value ?? "";
    describe(value);
    slider.addEventListener("input", () => {
      const moved = valueAt(param, Number(slider.value));
      field.value = moved;
      field.setCustomValidity("");
      describe(moved);
      change(moved);
    });
    field.addEventListener("input", () => {
      const entered = field.value === "" && !field.validity.badInput ? null : field.valueAsNumber;
      const error = problem(param, entered);
      field.setCustomValidity(error === null ? "" : `${label} must be ${error}`);
      field.reportValidity();
      if (error !== null) return;
      slider.value = stepOf(param, entered ?? param.low);
      describe(entered);
      change(entered);
    });
    return element("div", { class: "explorer-control" }, element("label", { for: id }, label),
      slider, field);
  }

  function control(id, label, param, value, change) {
    if (param.kind === "number") return numberControl(id, label, param, value, change);
    let input;
    if (param.kind === "flag") {
      input = element("input", { type: "checkbox", id });
      input.checked = value;
      input.addEventListener("change", () => change(input.checked));
    } else {
      input = element("select", { id }, ...param.options.map((x) => element("option", {}, x)));
      input.value = value;
      input.addEventListener("change", () => change(input.value));
    }
    return element("div", { class: "explorer-control" }, element("label", { for: id }, label),
      input);
  }

  const modelControls = element("div", { class: "explorer-controls" });
  const checkboxes = element("fieldset", { class: "explorer-variants" },
    element("legend", {}, "Variants"));
  const paramControls = element("div", { class: "explorer-params" });
  const status = element("p", { role: "status", class: "explorer-status" });
  const tableBox = element("div", { class: "short" });
  const figures = element("div", { class: "explorer-figures" });

  const paramsOf = (name) => ({ ...defaults(name), ...state.params[name] });

  function changed() {
    writeAddress();
    requestDraw();
  }

  function buildControls() {
    modelControls.replaceChildren(...Object.entries(MODEL).map(([key, param]) =>
      control(`explorer-${key}`, param.label, param, state.model[key], (value) => {
        state.model[key] = value;
        changed();
      })));
    checkboxes.replaceChildren(checkboxes.firstChild, ...Object.keys(VARIANTS).map((name) => {
      const box = element("input", { type: "checkbox", value: name });
      box.checked = state.chosen.includes(name);
      box.addEventListener("change", () => {
        state.chosen = Object.keys(VARIANTS).filter((x) =>
          x === name ? box.checked : state.chosen.includes(x));
        buildParams();
        changed();
      });
      return element("label", {}, box, element("code", {}, name));
    }));
    buildParams();
  }

  function buildParams() {
    const withParams = state.chosen.filter((name) => Object.keys(VARIANTS[name].params).length);
    paramControls.replaceChildren(...withParams.map((name) =>
      element("fieldset", {}, element("legend", {}, element("code", {}, name)),
        ...Object.entries(VARIANTS[name].params).map(([key, param]) =>
          control(`explorer-${name}-${key}`, key, param, paramsOf(name)[key], (value) => {
            state.params[name] = { ...state.params[name], [key]: value };
            changed();
          })))));
  }

  // ---- the address ------------------------------------------------------------------------------

  function address() {
    const parts = Object.entries(state.model).map(([key, value]) => `${key}=${value}`);
    parts.push(`v=${state.chosen.join(",")}`);
    for (const name of state.chosen)
      for (const [key, value] of Object.entries(paramsOf(name)))
        if (value !== defaults(name)[key]) parts.push(`${name}.${key}=${value}`);
    return `#${parts.join("&")}`;
  }

  const writeAddress = () => history.replaceState(null, "", address());

  function parsed(param, text) {
    if (param.kind === "flag") return { true: true, false: false }[text];
    if (param.kind === "choice") return param.options.find((x) => x === text);
    const value = text === "" ? NaN : Number(text);
    return problem(param, value) === null ? value : undefined;
  }

  const entry = (table, key) => (Object.hasOwn(table, key) ? table[key] : undefined);

  /* Set the state to what the address says, and return what it says wrongly. */
  function readAddress() {
    const problems = [];
    Object.assign(state, { model: modelDefaults(), chosen: [...SHOWN_FIRST], params: {} });
    for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
      const [name, ofVariant] = key.split(".");
      if (key === "v") {
        const names = text.split(",").filter((x) => x !== "");
        state.chosen = Object.keys(VARIANTS).filter((x) => names.includes(x));
        for (const x of names)
          if (Object.hasOwn(LEFT_OUT, x)) problems.push(`${x} is not shown: ${LEFT_OUT[x]}`);
          else if (!Object.hasOwn(VARIANTS, x)) problems.push(`there is no variant “${x}”`);
        continue;
      }
      const table = ofVariant === undefined ? MODEL : entry(VARIANTS, name)?.params ?? {};
      const param = entry(table, ofVariant ?? key);
      const value = param && parsed(param, text);
      if (value === undefined) problems.push(`“${key}=${text}” is not valid`);
      else if (ofVariant === undefined) state.model[key] = value;
      else state.params[name] = { ...state.params[name], [ofVariant]: value };
    }
    return problems;
  }

  // ---- figures ----------------------------------------------------------------------------------

  const [WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP] = [480, 300, 52, 448, 256, 8];

  function lookOf(name, rank) {
    if (name === BASELINE) return { stroke: "currentColor", "stroke-width": 2.5 };
    const dashes = Math.floor(rank / COLOURS.length) % 2 ? { "stroke-dasharray": "5 3" } : {};
    return { stroke: COLOURS[rank % COLOURS.length], "stroke-width": 1.5, ...dashes };
  }

  /* A figure with two logarithmic axes. `lines`: { name, rank, points: [[x, y], …] } */
  function figure({ label, xLabel, xs, ticks, mark, lines }) {
    const most = Math.max(1, ...lines.flatMap(({ points }) => points.map(([, y]) => y)));
    const decades = Math.ceil(Math.log10(most / LEAST) - 1e-9);
    const [low, high] = [xs[0], xs[1]].map(Math.log);
    const atX = (x) => LEFT + ((RIGHT - LEFT) * (Math.log(x) - low)) / (high - low || 1);
    const atY = (y) => BOTTOM + ((TOP - BOTTOM) * Math.log10(y / LEAST)) / decades;
    const view = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, fill: "none", role: "img",
      "aria-label": label });
    const line = (x1, y1, x2, y2, look) =>
      view.append(svg("line", { x1, y1, x2, y2, stroke: "currentColor", ...look }));
    const text = (x, y, content, look = {}) =>
      view.append(svg("text", { x, y, fill: "currentColor", ...look }, content));
    for (let k = 0; k <= decades; k += Math.ceil(decades / 8)) {
      const y = atY(LEAST * 10 ** k);
      line(LEFT, y, RIGHT, y, { opacity: 0.2 });
      text(LEFT - 6, y + 4, shown(Number((LEAST * 10 ** k).toPrecision(1))),
        { "text-anchor": "end" });
    }
    for (const x of ticks) text(atX(x), BOTTOM + 18, x, { "text-anchor": "middle" });
    text((LEFT + RIGHT) / 2, HEIGHT - 6, xLabel, { "text-anchor": "middle" });
    if (mark) line(atX(mark), TOP, atX(mark), BOTTOM, { "stroke-dasharray": "2 3", opacity: 0.7 });
    const taken = [];
    for (const { name, rank, points } of lines) {
      const visible = points.filter(([, y]) => y >= LEAST).map(([x, y]) => [atX(x), atY(y)]);
      if (visible.length === 0) continue;
      const look = lookOf(name, rank);
      const drawn = svg("polyline", { points: visible.map((p) => p.map((v) => v.toFixed(1)))
        .join(" "), ...look });
      drawn.append(svg("title", {}, `${rank + 1}. ${name}`));
      const [x, end] = visible.at(-1);
      let y = end + 4;
      // A number that would touch others moves up, or down at the upper end.
      const touches = (at) => taken.some((t) => Math.abs(t.x - x) < 18 && Math.abs(t.y - at) < 13);
      for (let shift = 0; touches(y); shift++)
        y = end + 4 + (shift % 2 ? -1 : 1) * 13 * Math.ceil((shift + 1) / 2);
      taken.push({ x, y });
      view.append(drawn, svg("circle", { cx: x, cy: end, r: 3, fill: look.stroke }));
      text(x + 6, y, String(rank + 1), { fill: look.stroke });
    }
    return element("figure", { class: "curves" }, view, element("figcaption", {}, label));
  }

  /* At most 200 of the sorted weights, at ranks with equal ratios, with the last positive one. */
  function sortedPoints(w) {
    const positive = w.filter((value) => value > 0).sort().reverse();
    const ranks = new Set();
    for (let i = 0; i <= 200; i++) ranks.add(Math.round(positive.length ** (i / 200)));
    return positive.length ? [...ranks].map((rank) => [rank, positive[rank - 1]]) : [];
  }

  /* The top key's weight for each of `LENGTHS`, computed again only after a change. */
  const curves = new Map();
  function curveOf(name) {
    const key = JSON.stringify([{ ...state.model, n: 0 }, paramsOf(name)]);
    if (curves.get(name)?.key !== key) {
      const points = LENGTHS.map((n) =>
        [n, weights(name, logits({ ...state.model, n }), paramsOf(name)).w[0]]);
      curves.set(name, { key, points });
    }
    return curves.get(name).points;
  }

  // ---- the table --------------------------------------------------------------------------------

  function table(rows) {
    const titles = QUANTITIES.map(([, title]) =>
      element("th", { scope: "col", class: "text-right" }, title));
    const head = element("tr", {}, element("th", { scope: "col" }, "variant"), ...titles);
    const body = rows.map(({ name, rank, result }) => {
      const values = measures(result);
      const label = element("th", { scope: "row" },
        element("span", { "aria-hidden": "true", style: `color: ${lookOf(name, rank).stroke}` },
          "● "), `${rank + 1}. `, element("code", {}, name));
      return element("tr", { "data-variant": name }, label, ...QUANTITIES.map(([key]) =>
        element("td", { class: "text-right", "data-quantity": key }, shown(values[key]))));
    });
    const made = element("table", { class: "table" }, element("thead", {}, head),
      element("tbody", {}, ...body));
    return element("div", { class: "pst-scrollable-table-container", tabindex: 0, role: "region",
      "aria-label": "Measures of each variant" }, made);
  }

  // ---- drawing ----------------------------------------------------------------------------------

  let problems = [];

  function draw() {
    const { n } = state.model;
    const z = logits(state.model);
    const rows = state.chosen.map((name, rank) =>
      ({ name, rank, result: weights(name, z, paramsOf(name)) }));
    const overtaken = z.filter((value) => value > z[0]).length;
    const notes = problems.map((text) => `In the address: ${text}.`);
    if (overtaken) notes.push(`The noise puts ${overtaken} of the other keys above the top key.`);
    if (!rows.length) notes.push("Choose at least one variant.");
    status.textContent = notes.join(" ");
    tableBox.replaceChildren(table(rows));
    figures.replaceChildren(
      figure({
        label: `Weights of the ${n} keys, sorted. A line ends where weights are 0 or below 1e−6.`,
        xLabel: "rank of the key", xs: [1, n], mark: null,
        ticks: [1, 4, 16, 64, 256, 1024, 4096, 16384].filter((x) => x <= n),
        lines: rows.map((row) => ({ ...row, points: sortedPoints(row.result.w) })),
      }),
      figure({
        label: "Weight of the top key against n. The dotted line is the chosen n.",
        xLabel: "number of keys n", xs: [LENGTHS[0], LENGTHS.at(-1)], mark: n,
        ticks: [4, 16, 64, 256, 1024, 4096, 16384],
        lines: rows.map((row) => ({ ...row, points: curveOf(row.name) })),
      }),
    );
  }

  // Events come faster than the screen shows them.
  let requested = false;
  function requestDraw() {
    if (requested) return;
    requested = true;
    requestAnimationFrame(() => {
      requested = false;
      draw();
    });
  }

  function load() {
    problems = readAddress();
    buildControls();
    draw();
  }

  function leftOut() {
    const items = Object.entries(LEFT_OUT).map(([name, reason]) =>
      element("li", {}, element("code", {}, name), `: ${reason}`));
    return element("ul", {}, ...items);
  }

  root.replaceChildren(modelControls, status, figures, tableBox, checkboxes, paramControls);
  document.getElementById("explorer-left-out").replaceChildren(leftOut());
  window.addEventListener("hashchange", load);
  load();
})();
