"""What the report looks like and how it moves: its style sheet and its script.

The script adds to a page that can be read without it: it draws the length curves, sorts the
leaderboards, and opens what a link points into. It fetches nothing.
"""

STYLE = """
:root { color-scheme: light; --ink: #1b1b1b; --soft: #5c5c5c; --line: #dcdcd8; --tint: #e4eef6;
        --blue: #00598c; --paper: #f6f6f3; }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
       color: var(--ink); background: #fff; max-width: 74rem; margin: 0 auto;
       padding: 2rem 1.5rem 5rem; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; font-weight: 650; margin: 0 0 .4rem; }
h2 { font-size: 1.4rem; line-height: 1.25; font-weight: 650; margin: 0 0 .5rem; }
h3 { font-size: 1.02rem; font-weight: 650; margin: 2.2rem 0 .5rem; }
img { max-width: 100%; height: auto; }
p { margin: .4rem 0; } p, ul, summary { max-width: 48rem; }
a { color: var(--blue); text-decoration-thickness: 1px; text-underline-offset: .15em; }
section { border-top: 2px solid var(--ink); margin-top: 4rem; padding-top: 1.1rem; }
.soft { color: var(--soft); font-size: .88rem; }
.note { background: var(--paper); border-left: 3px solid #0072B2; padding: .5rem .9rem; }
.warning { border-left-color: #D55E00; }
.rows { font-size: .8rem; font-weight: 400; margin-left: .5rem; }
.wide { overflow-x: auto; margin: .4rem 0 1rem; max-width: 100%; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem; line-height: 1.35;
        font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .7rem; text-align: right; white-space: nowrap; vertical-align: top;
         border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { border-bottom: 1.5px solid var(--ink); vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; z-index: 1;
                                 background: #fff; padding-left: 0; }
tfoot td, tfoot th { color: var(--soft); border-bottom: 0; }
.text { text-align: left; } td small { display: block; color: var(--soft); font-size: .9em; }
td a { color: inherit; text-decoration-color: #b9b9b4; }
td[style] { background: linear-gradient(to right, var(--tint) var(--part), transparent 0)
                        0 3px / 100% calc(100% - 6px) no-repeat; }
tr:target > * { background: #fff4cf; } tr:hover > * { border-bottom-color: #8a8a85; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
            text-align: inherit; }
th button::after { content: "\\2195"; color: #b5b5b0; font-weight: 400; margin-left: .25rem; }
th[aria-sort=descending] button::after { content: "\\2193"; color: var(--ink); }
th[aria-sort=ascending] button::after { content: "\\2191"; color: var(--ink); }
th small { display: block; font-weight: 400; color: var(--soft); font-size: .9em; }
:focus-visible { outline: 2px solid #0072B2; outline-offset: 2px; }
details { margin: .2rem 0; max-width: 100%; }
summary { cursor: pointer; font-size: .92rem; padding: .18rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.4rem; font-size: .86rem;
     margin: .4rem 0 1rem; font-variant-numeric: tabular-nums; }
dt { color: var(--soft); } dd { margin: 0; }
figure { margin: .4rem 0 1rem; }
.curves { display: grid; grid-template-columns: minmax(0, 1fr) minmax(14rem, 19rem);
          gap: .3rem 1.6rem; align-items: start; }
.curves[hidden] { display: none; }
.controls { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: .4rem 1.2rem;
            font-size: .86rem; }
.controls label { display: flex; gap: .4rem; align-items: center; max-width: 100%;
                  white-space: nowrap; }
.to { white-space: nowrap; }
select, .pick button { font: inherit; font-size: .86rem; color: inherit; background: #fff;
  border: 1px solid #a9a9a4; border-radius: 3px; padding: .12rem .4rem; max-width: 100%;
  min-width: 0; }
.pick button { cursor: pointer; margin-right: .3rem; }
.plot { position: relative; min-width: 0; } .plot svg { display: block; width: 100%; }
.plot text { font-size: 12px; fill: var(--soft); }
.plot .grid { stroke: #e8e8e5; } .plot .axis { stroke: #8a8a85; }
.plot .train { fill: #f1f1ed; } .plot .chance { stroke: #555; stroke-dasharray: 1.5 3; }
.plot .guide { stroke: #8a8a85; }
.plot .series { transition: opacity .12s; } .dim .series:not(.on) { opacity: .13; }
.plot output { position: absolute; top: 0; pointer-events: none; background: #fff; color: #1b1b1b;
  border: 1px solid #8a8a85; border-radius: 3px; padding: .1rem .45rem; font-size: .8rem;
  line-height: 1.35; max-width: 17rem; }
.plot output:empty { display: none; }
.legend { list-style: none; margin: 0; padding: 0; max-height: 27rem; overflow-y: auto; }
.legend button { display: grid; grid-template-columns: 34px minmax(0, 1fr) auto; gap: .45rem;
  align-items: center; width: 100%; font: inherit; font-size: .82rem; line-height: 1.25;
  text-align: left; color: inherit; background: none; border: 0; border-radius: 3px;
  padding: .19rem .25rem; cursor: pointer; font-variant-numeric: tabular-nums; }
.legend button:hover, .legend button:focus-visible { background: var(--paper); }
.legend button[aria-pressed=false] { color: #767676; text-decoration: line-through; }
.legend button[aria-pressed=false] svg { opacity: .25; }
.legend :focus-visible { outline-offset: -2px; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17.5rem), 1fr));
        gap: .9rem 1.4rem; margin: .5rem 0 1rem; }
.maps figure { margin: 0; } .maps figcaption { font-size: .82rem; }
.maps svg { display: block; width: 100%; max-width: 290px; height: auto; }
.maps text { font-size: 9.5px; fill: var(--soft); } .maps text.on { fill: #fff; }
.maps text.in { fill: #1b1b1b; }
.scale { display: flex; gap: .5rem; align-items: center; }
.scale svg { width: 126px; height: 12px; }
@media (max-width: 48rem) {
  body { padding: 1.2rem .9rem 4rem; } h1 { font-size: 1.4rem; } h2 { font-size: 1.22rem; }
  .curves { grid-template-columns: minmax(0, 1fr); } .legend { max-height: none; }
  dl { grid-template-columns: minmax(0, 1fr); } dd { margin-bottom: .35rem; }
  th, td { padding: .32rem .5rem; }
  th:first-child, td:first-child { min-width: 8.5rem; white-space: normal;
                                   border-right: 1px solid var(--line); }
  .legend button { padding: .4rem .25rem; } summary { padding: .35rem 0; }
}
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  html { font-size: 10pt; } body { max-width: none; padding: 0; font-size: 1rem; }
  .controls, .pick, .rows, th button::after, .plot output, .plot .guide { display: none; }
  .wide, .legend { overflow: visible; max-height: none; }
  table { font-size: 7.6pt; } th, td { white-space: normal; padding: .15rem .3rem; }
  th:first-child, td:first-child { position: static; }
  thead { display: table-header-group; } tfoot { display: table-row-group; }
  tr, figure, dl { break-inside: avoid; } h2, h3, summary { break-after: avoid; }
  section { break-before: page; margin-top: 0; }
  td a { text-decoration: none; }
  details.print::details-content { content-visibility: visible; height: auto; }
}
"""

SCRIPT = r"""
"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];

function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.hash === location.hash) reveal();  // no hashchange where it stays the same
});

function sortable(table) {
  const heads = all("thead th", table), body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const first = head.dataset.first, now = head.getAttribute("aria-sort");
    const way = now !== first ? first : first === "ascending" ? "descending" : "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", way);
    const sign = way === "ascending" ? 1 : -1;
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (column ? a - b : a.localeCompare(b));
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power, found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
  return found;
}

function logTicks(low, high) {
  const every = high / low < 80 ? [1, 2, 5] : [1], found = [];
  const decades = Math.ceil(Math.log10(high / low) / 7);
  for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k += decades)
    for (const one of every) found.push(one * 10 ** k);
  return found.filter((y) => y >= low * 0.999 && y <= high * 1.001);
}

function curves(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector(".plot svg"), said = figure.querySelector("output");
  const [metricPick, lengthPick] = all("select", figure), legend = all(".legend button", figure);
  const shown = (i) => legend[i].getAttribute("aria-pressed") === "true";
  let spots = [], place = null, plotted = null;

  const add = (parent, name, attributes, text) => {
    const node = document.createElementNS(svg.namespaceURI, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };
  const words = (metric, value) => {
    if (!value) return "—";
    const [mean, low, high] = value.map((x) => (x * metric.factor).toFixed(metric.digits));
    return low === undefined ? mean : `${mean} (${low} … ${high})`;
  };

  function draw() {
    const metric = data.metrics[metricPick.value], log = metric.log, factor = metric.factor;
    const width = svg.clientWidth || 720, height = Math.min(430, Math.max(280, width * 0.55));
    const left = 46, right = width - 18, top = 20, bottom = height - 40;
    const values = data.series.filter((_, i) => shown(i))
      .flatMap((one) => one.values[metricPick.value]).filter((v) => v && (!log || v[0] > 0))
      .flatMap((v) => log ? [v[0]] : v).map((y) => y * factor);
    let low = Math.min(...values, Infinity), high = Math.max(...values, -Infinity);
    if (!values.length) [low, high] = log ? [0.1, 1] : [0, 1];
    if (log) [low, high] = [low / 1.4, high * 1.2];
    else if (factor === 100) [low, high] = [Math.min(low, 0), Math.max(high, 100)];
    else {
      low = low >= 0 && low < high / 2 ? 0 : low - (high - low || 1) * 0.06;
      high += (high - low || 1) * 0.05;
    }
    const lengths = data.lengths, log2 = Math.log2;
    const first = log2(Math.min(lengths[0], data.train[1]) / 1.35);
    const span = log2(lengths.at(-1) * 1.08) - first, within = (p) => Math.min(1, Math.max(0, p));
    const x = (n) => left + (right - left) * within((log2(n) - first) / span);
    const part = (y) => log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low);
    const y = (value) => bottom - (bottom - top) * within(part(value));

    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
    add(svg, "rect", {class: "train", x: left, y: top, width: x(data.train[1]) - left,
                      height: bottom - top});
    const trained = [...new Set(data.train)].join(" to "), wide = width > 560;
    const title = metric.title + (wide ? ` (grey: n of training, ${trained})` : "");
    add(svg, "text", {x: left, y: top - 7}, title);
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 5)) {
      add(svg, "line", {class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick)});
      add(svg, "text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, +tick.toPrecision(4));
    }
    add(svg, "line", {class: "axis", x1: left, x2: right, y1: bottom, y2: bottom});
    let free = -Infinity;
    for (const n of lengths) {
      const half = String(n).length * 3.6 + 3;
      add(svg, "line", {class: "axis", x1: x(n), x2: x(n), y1: bottom, y2: bottom + 4});
      if (x(n) - half < free || x(n) + half > width + 3) continue;
      free = x(n) + half;
      add(svg, "text", {x: x(n), y: bottom + 17, "text-anchor": "middle"}, n);
    }
    add(svg, "text", {x: (left + right) / 2, y: height - 6, "text-anchor": "middle"},
        "length n (log scale)");
    spots = [];
    const crowd = legend.filter((_, i) => shown(i)).length;
    data.series.forEach((one, i) => {
      if (!shown(i)) return;
      const found = one.values[metricPick.value].map((v, k) => v && (!log || v[0] > 0)
        && {i, k, v, x: x(lengths[k]), y: y(v[0] * factor)}).filter(Boolean);
      const group = add(svg, "g", {class: "series", "data-series": i});
      const banded = found.filter((p) => p.v.length > 1);
      const edge = (e) => banded.map((p) => `${p.x},${y(p.v[e] * factor)}`);
      const band = [...edge(1), ...edge(2).reverse()].join(" ");
      const opacity = crowd > 6 ? 0.08 : 0.15;
      if (banded.length > 1) add(group, "polygon", {fill: one.colour, opacity, points: band});
      add(group, "polyline", {points: found.map((p) => `${p.x},${p.y}`).join(" "), fill: "none",
        stroke: one.colour, "stroke-width": one.wide ? 2.4 : 1.6, "stroke-dasharray": one.dash});
      for (const p of found) add(group, "path", {d: one.marker, fill: one.colour, stroke: "#fff",
        "stroke-width": 0.8, transform: `translate(${p.x} ${p.y})`});
      spots.push(...found);
    });
    const chance = metric.chance === null ? NaN : part(metric.chance * factor);
    if (chance >= 0 && chance <= 1) {  // it may be far from all that was measured
      const at = y(metric.chance * factor), above = at < top + 18 ? 14 : -5;
      add(svg, "line", {class: "chance", x1: left, x2: right, y1: at, y2: at});
      add(svg, "text", {x: right, y: at + above, "text-anchor": "end"}, "chance");
    }
    plotted = {metric, x, top, bottom, width};
    place = null;
    point(null);
  }

  function point(spot) {
    const {metric, x, top, bottom, width} = plotted, n = data.lengths[lengthPick.value];
    all(".guide", svg).forEach((node) => node.remove());
    add(svg, "line", {class: "guide", x1: x(n), x2: x(n), y1: bottom, y2: spot ? top : bottom + 8});
    legend.forEach((button, i) => {
      const value = data.series[i].values[metricPick.value][lengthPick.value];
      button.lastElementChild.textContent = value ? words(metric, [value[0]]) : "—";
    });
    place = spot;
    light(spot ? spot.i : null);
    said.textContent = "";
    if (!spot) return;
    said.textContent = `${data.series[spot.i].name}, n = ${n}: ${words(metric, spot.v)}`;
    const share = spot.x / width, below = spot.y < 60;
    said.style.left = `${100 * share}%`;
    said.style.top = `${spot.y + (below ? 12 : -12)}px`;
    said.style.transform = `translate(${-100 * share}%, ${below ? 0 : -100}%)`;
  }

  function light(i) {
    svg.classList.toggle("dim", i !== null && shown(i));
    all(".series", svg).forEach((g) => g.classList.toggle("on", +g.dataset.series === i));
  }

  function go(spot) {
    if (!spot) return;
    lengthPick.value = spot.k;
    point(spot);
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const far = (p) => Math.hypot(p.x - event.clientX + box.x, p.y - event.clientY + box.y);
    go(spots.reduce((best, p) => (!best || far(p) < far(best) ? p : best), null));
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("blur", () => point(null));
  svg.addEventListener("focus", () => go(place || spots.find((p) => p.k === +lengthPick.value)));
  svg.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!step || !place) return;
    event.preventDefault();
    const along = /Left|Right/.test(event.key);
    const line = spots.filter((p) => (along ? p.i === place.i : p.k === place.k));
    if (!along) line.sort((a, b) => a.y - b.y);
    go(line[line.indexOf(place) + step]);
  });
  legend.forEach((button, i) => {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(!shown(i)));
      draw();
    });
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => light(i));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => light(null));
  });
  all(".pick button", figure).forEach((button) => button.addEventListener("click", () => {
    legend.forEach((one) => one.setAttribute("aria-pressed", button.dataset.all));
    draw();
  }));
  metricPick.addEventListener("change", draw);
  lengthPick.addEventListener("change", () => point(null));
  figure.hidden = false;
  draw();
  return draw;
}

all("table.sortable").forEach(sortable);
const draws = all(".curves").map(curves);
let seen = innerWidth;
addEventListener("resize", () => {
  if (seen !== (seen = innerWidth)) draws.forEach((draw) => draw());
});
let opened = [];
addEventListener("beforeprint", () => {
  opened = all("details.print:not([open])");
  opened.forEach((one) => { one.open = true; });
});
addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
reveal();
"""
