"use strict";
// The other two kinds of figure (categories, lanes), legends, and drawing on sight and on resize.

function canvas(chart, plot, height) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${plot.clientWidth} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", chart.title);
  plot.replaceChildren(svg);
  return svg;
}

/** One row a category, one dot with whiskers a stage. */
function drawCategories(chart, plot) {
  const { names, stages } = chart.data;
  const row = 16 + 9 * stages.length, top = 4, width = plot.clientWidth, height = top + names.length * row + 24;
  const svg = canvas(chart, plot, height);
  const left = Math.min(width * 0.38, 12 + 7 * Math.max(...names.map((name) => name.length)));
  const X = (value) => left + value * (width - left - 14);
  for (const mark of [0, 0.25, 0.5, 0.75, 1]) {
    shape(svg, "line", { class: "gridline", x1: X(mark), x2: X(mark), y1: top, y2: height - 20 });
    shape(svg, "text", { x: X(mark), y: height - 4, "text-anchor": "middle" }, formatted(mark, "percent"));
  }
  names.forEach((name, i) => {
    const middle = top + (i + 0.5) * row;
    shape(svg, "text", { class: "name", x: left - 10, y: middle + 4, "text-anchor": "end" }, name);
    stages.forEach((stage, j) => {
      const score = stage.values[i];
      if (!score) return;
      const y = middle + (j - (stages.length - 1) / 2) * 9, style = `--c: var(--s${j})`;
      if (score.low !== null && score.high !== null) {
        shape(svg, "line", { class: "whisker", style, x1: X(score.low), x2: X(score.high), y1: y, y2: y });
      }
      const dot = shape(svg, "circle", { class: "dot", style, cx: X(score.value), cy: y, r: 4.5 });
      shape(dot, "title", {}, `${name}, ${stage.name}: ${formatted(score.value, "percent")}`);
    });
  });
}

/** One lane a component: how many of its spans were open in each slice of the run. */
function drawLanes(chart, plot) {
  const { lanes, seconds } = chart.data;
  const row = 22, width = plot.clientWidth, height = lanes.length * row + 22;
  const svg = canvas(chart, plot, height);
  const left = Math.min(width * 0.36, 12 + 7 * Math.max(...lanes.map((lane) => lane.name.length)));
  lanes.forEach((lane, i) => {
    const cell = (width - left) / lane.busy.length, most = Math.max(1, ...lane.busy);
    shape(svg, "text", { class: "name", x: left - 10, y: i * row + 15, "text-anchor": "end" }, lane.name);
    shape(svg, "line", { class: "gridline", x1: left, x2: width, y1: i * row + 21, y2: i * row + 21 });
    lane.busy.forEach((busy, j) => {
      if (busy <= 0) return;
      const opacity = (0.15 + (0.85 * busy) / most).toFixed(3);
      const rect = shape(svg, "rect", { class: "cell", x: left + j * cell, y: i * row + 4, width: cell, height: 14, opacity });
      shape(rect, "title", {}, `${lane.name}: ${compact(busy)} open on average`);
    });
  });
  for (const mark of ticks(0, seconds, Math.max(2, Math.floor(width / 140)))) {
    const x = left + (mark / seconds) * (width - left);
    if (x < width - 12) shape(svg, "text", { x, y: height - 3, "text-anchor": "middle" }, formatted(mark, "seconds"));
  }
}

const KINDS = { lines: drawLines, categories: drawCategories, lanes: drawLanes };

function legend(chart) {
  const names = chart.kind === "categories" ? chart.data.stages.map((s) => s.name) : chart.series.map((s) => s.name);
  if (names.length < 2) return [];
  return names.map((name, i) => node("span", { style: `--c: var(--s${i % 6})` }, name));
}

(function drawAll() {
  const charts = JSON.parse(document.getElementById("charts-data").textContent);
  const widths = new WeakMap();
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (widths.get(target) === target.clientWidth || !target.clientWidth) continue;
      widths.set(target, target.clientWidth);
      const chart = charts[Number(target.parentElement.dataset.chart)];
      requestAnimationFrame(() => KINDS[chart.kind](chart, target));
    }
  });
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    figure.querySelector(".legend").append(...legend(charts[Number(figure.dataset.chart)]));
    watcher.observe(figure.querySelector(".plot"));
  }
})();
