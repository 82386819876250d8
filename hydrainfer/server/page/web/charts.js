// TTFT and TPOT of the latest requests over time, and the mean of their intervals.

import { $, draw, INTERVALS, quantile, seconds, showIntervals } from "./dom.js";

const SPANS_S = [60, 120, 300]; // the shortest that holds all
const FAR = 4; // what takes so many times the 90th percentile is drawn at the upper edge, hollow
const HEIGHT = 170, LEFT = 52, BOTTOM = 20, TOP = 8;

function ticks(most) {
  const step = [1, 2, 5, 10].map((k) => k * 10 ** Math.floor(Math.log10(most / 3))).find((k) => most / k <= 4);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

const spanOf = (points) => SPANS_S.find((s) => points.every((p) => p.ago <= s)) ?? SPANS_S.at(-1);

function chart(svg, label, points, name) {
  const width = svg.clientWidth || 500;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const values = points.map((p) => p.value).sort((a, b) => a - b);
  const p50 = quantile(values, 0.5), p90 = quantile(values, 0.9), top = values.at(-1) ?? 1;
  const most = (top > FAR * p90 ? FAR * p90 : top * 1.08) || 1, span = spanOf(points);
  label.textContent = values.length ? `p50 ${seconds(p50)} · p90 ${seconds(p90)} · ${values.length} request${values.length > 1 ? "s" : ""}` : "none yet";
  svg.setAttribute("aria-label", `${name}: ${label.textContent}`);
  const x = (ago) => LEFT + (width - LEFT - 8) * (1 - ago / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value / most, 1));
  const parts = [];
  for (const tick of values.length ? ticks(most) : [0]) {
    parts.push(draw("line", { class: "grid", x1: LEFT, x2: width - 8, y1: y(tick), y2: y(tick) }));
    parts.push(draw("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, tick ? seconds(tick) : "0"));
  }
  for (const ago of [0, 1, 2, 3, 4].map((i) => (span * i) / 4)) {
    const words = span > 120 ? `−${ago / 60} min` : `−${ago} s`;
    parts.push(draw("text", { x: x(ago), y: HEIGHT - 5, "text-anchor": ago ? "middle" : "end" }, ago ? words : "now"));
  }
  for (const { ago, value } of points) {
    parts.push(draw("circle", { class: value > most ? "dot over" : "dot", cx: x(ago), cy: y(value), r: 3 }));
  }
  for (const [kind, value] of [["median", p50], ["most", p90]]) {
    if (value != null) parts.push(draw("line", { class: kind, x1: LEFT, x2: width - 8, y1: y(value), y2: y(value) }));
  }
  svg.replaceChildren(...parts);
}

// `ended`: requests with `at_ms`, when they ended on this page's clock.
export function showCharts(ended) {
  const now = performance.now();
  const recent = ended.map((r) => ({ ...r, ago: (now - r.at_ms) / 1000 })).filter((r) => r.ago <= SPANS_S.at(-1));
  for (const [key, name] of [["ttft", "time to first token"], ["tpot", "time per output token"]]) {
    const points = recent.filter((r) => r[`${key}_s`] != null).map((r) => ({ ago: r.ago, value: r[`${key}_s`] }));
    chart($(key), $(`${key}-now`), points, name);
  }
  const means = {};
  for (const name of Object.keys(INTERVALS)) {
    means[name] = recent.reduce((sum, r) => sum + r.intervals_s[name], 0) / (recent.length || 1);
  }
  const total = Object.values(means).reduce((a, b) => a + b, 0);
  $("where-now").textContent = recent.length ? `${seconds(total)} per request, mean` : "none yet";
  showIntervals($("where"), $("where-legend"), means);
}
