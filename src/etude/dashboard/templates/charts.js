"use strict";
// Small SVG line charts. Every text enters the page through textContent; nothing is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: node("div", {class: "x"}, "text" or children). Attribute "text" is never markup. */
function node(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function shape(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function compact(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e").replaceAll("-", "−");
  return `${+value.toPrecision(3)}`;
}

function formatted(value, unit) {
  if (unit === "percent") {
    const percent = value * 100;
    return `${Math.abs(percent) >= 0.1 || percent === 0 ? +percent.toFixed(1) : percent.toPrecision(2)}%`;
  }
  return unit === "seconds" ? `${compact(value)} s` : compact(value);
}

/** About `count` round values that cover low..high. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function logTicks(low, high) {
  const found = [];
  const every = Math.ceil((Math.log10(high) - Math.log10(low)) / 5) || 1;
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every) found.push(10 ** power);
  return found;
}

/** Centred running mean over about a twentieth of the series. */
function smoothed(values) {
  const half = Math.max(1, Math.round(values.length / 40));
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list || []) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** Range and ticks of the y axis; a percentage never leaves more room above 100% than it needs. */
function yAxis(chart) {
  let [low, high] = extent(chart.series.flatMap((s) => [s.y, s.low, s.high]));
  if (chart.log) {
    const positive = chart.series.flatMap((s) => s.y).filter((v) => v > 0);
    [low, high] = positive.length ? extent([positive]) : [0.1, 1];
    const marks = logTicks(low, high);
    return { low: Math.min(low, marks[0]), high: Math.max(high, marks[marks.length - 1]), marks };
  }
  if (chart.zero) { low = Math.min(0, low); high = Math.max(0, high); }
  if (high - low < 1e-12) { const room = Math.abs(high) * 0.1 || 1; low -= chart.zero && low >= 0 ? 0 : room; high += room; }
  const marks = ticks(low, high, 4);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  const top = Math.ceil(high / step - 1e-6) * step, bottom = Math.floor(low / step + 1e-6) * step;
  const capped = chart.unit === "percent" && high <= 1 && top > 1 ? 1 : top;
  return { low: bottom, high: capped, marks: ticks(bottom, capped, Math.round((capped - bottom) / step) || 1) };
}

function path(xs, ys) {
  return xs.map((x, i) => `${i ? "L" : "M"}${x.toFixed(1)} ${ys[i].toFixed(1)}`).join("");
}

function drawLines(chart, plot) {
  const width = plot.clientWidth, height = 210;
  const axis = yAxis(chart);
  const labels = axis.marks.map((mark) => formatted(mark, chart.unit));
  const box = { left: 10 + 6.6 * Math.max(...labels.map((l) => l.length)), right: width - 8, top: 8, bottom: height - 34 };
  let [first, last] = extent(chart.series.map((s) => s.x));
  if (first === last) { first -= 0.5; last += 0.5; }
  const scale = chart.log ? (v) => Math.log10(Math.max(v, axis.low)) : (v) => v;
  const X = (v) => box.left + ((v - first) / (last - first)) * (box.right - box.left);
  const Y = (v) => box.bottom - ((scale(v) - scale(axis.low)) / (scale(axis.high) - scale(axis.low))) * (box.bottom - box.top);

  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${chart.title} over ${chart.x_label}`);
  axis.marks.forEach((mark, i) => {
    shape(svg, "line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(mark), y2: Y(mark) });
    shape(svg, "text", { x: box.left - 6, y: Y(mark) + 4, "text-anchor": "end" }, labels[i]);
  });
  for (const mark of ticks(first, last, Math.max(2, Math.floor(width / 64))).filter(Number.isInteger)) {
    shape(svg, "text", { x: X(mark), y: box.bottom + 16, "text-anchor": "middle" }, compact(mark));
  }
  shape(svg, "text", { x: box.right, y: height - 4, "text-anchor": "end" }, chart.x_label);
  chart.series.forEach((s, i) => drawSeries(svg, s, `--c: var(--s${i % 6})`, X, Y));
  plot.replaceChildren(svg);
  hover(chart, plot, svg, X, box);
}

function drawSeries(svg, s, style, X, Y) {
  const xs = s.x.map(X), ys = s.y.map(Y);
  if (s.low && s.high) {
    const down = [...s.low].reverse().map(Y), back = [...xs].reverse();
    shape(svg, "path", { class: "band", style, d: `${path(xs, s.high.map(Y))}L${path(back, down).slice(1)}Z` });
    if (xs.length === 1) shape(svg, "line", { class: "whisker", style, x1: xs[0], x2: xs[0], y1: Y(s.low[0]), y2: Y(s.high[0]) });
  }
  if (s.smooth) shape(svg, "path", { class: "line thin", style, d: path(xs, ys) });
  shape(svg, "path", { class: "line", style, d: path(xs, s.smooth ? smoothed(s.y).map(Y) : ys) });
  if (s.points && xs.length <= 80) xs.forEach((x, i) => shape(svg, "circle", { class: "dot", style, cx: x, cy: ys[i], r: 3.5 }));
}

/** A cross-hair that names the nearest point of every series. */
function hover(chart, plot, svg, X, box) {
  const cross = shape(svg, "line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const tip = node("div", { class: "tip", hidden: "" });
  plot.append(tip);
  const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const nearest = (s) => s.x.reduce((best, x, i) => (Math.abs(X(x) - at) < Math.abs(X(s.x[best]) - at) ? i : best), 0);
    const picks = chart.series.map((s) => [s, nearest(s)]);
    const x = picks.map(([s, i]) => s.x[i]).reduce((a, b) => (Math.abs(X(b) - at) < Math.abs(X(a) - at) ? b : a));
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", X(x));
    cross.setAttribute("x2", X(x));
    const lines = picks.map(([s, i], j) => {
      const band = s.low && s.high ? ` (${formatted(s.low[i], chart.unit)} to ${formatted(s.high[i], chart.unit)})` : "";
      const where = s.x[i] === x ? "" : ` at ${s.x[i]}`;
      return node("span", { style: `--c: var(--s${j % 6})` }, `${s.name} ${formatted(s.y[i], chart.unit)}${band}${where}`);
    });
    tip.replaceChildren(node("b", {}, `${chart.x_label} ${x.toLocaleString("en")}`), ...lines);
    tip.hidden = false;
    const room = plot.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(room, X(x) > plot.clientWidth / 2 ? X(x) - tip.offsetWidth - 12 : X(x) + 12))}px`;
    tip.style.top = `${box.top}px`;
  });
}
