// Charts as SVG text, and the tooltip that they share.
"use strict";

const COLORS = ["--blue", "--orange", "--green", "--purple", "--cyan", "--pink", "--olive", "--red", "--gray"];
const CHARTS = new Map();
let chartCount = 0;

const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const color = (index) => `var(${COLORS[index % COLORS.length]})`;

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  if (size >= 1e6) return `${(value / 1e6).toFixed(size < 1e7 ? 1 : 0)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)}k`;
  return String(Number(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)));
}

function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`.replace(" 0 s", "");
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

function timeTicks(low, high, most) {
  const step = TIME_STEPS.find((one) => (high - low) / one <= most) || Math.ceil((high - low) / most / 86400) * 86400;
  if (high - low < most) return ticks(low, high, most);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

// series: [{name, color, points: [[x, y, low, high]], marks}], low and high of y are optional.
function lineChart(series, options = {}) {
  const { height = 230, width = 560, unit = "", xName = "step", fixed = null, xText = number, xTicks = ticks } = options;
  const all = series.flatMap((one) => one.points);
  if (!all.length) return `<p class="quiet small">${esc(options.empty || "Nothing to draw yet.")}</p>`;
  const left = 44, right = 12, top = 8, bottom = 24;
  let x0 = Math.min(...all.map((p) => p[0])), x1 = Math.max(...all.map((p) => p[0]));
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const lows = all.map((p) => p[1]), span = fixed || [Math.min(...lows), Math.max(...lows)];
  let [y0, y1] = [Math.min(span[0], ...lows), Math.max(span[1], ...lows)];
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const pad = fixed ? 0 : (y1 - y0) * 0.06;
  y0 -= pad; y1 += pad;
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => top + ((y1 - Math.min(y1, Math.max(y0, y))) / (y1 - y0)) * (height - top - bottom);
  const parts = [];
  for (const t of ticks(y0, y1, height > 150 ? 5 : 3)) parts.push(`<line class="gridline" x1="${left}" x2="${width - right}" y1="${py(t).toFixed(1)}" y2="${py(t).toFixed(1)}"/><text x="${left - 7}" y="${(py(t) + 4).toFixed(1)}" text-anchor="end">${number(t)}</text>`);
  for (const t of xTicks(x0, x1, width > 400 ? 7 : 3)) parts.push(`<text x="${px(t).toFixed(1)}" y="${height - 5}" text-anchor="middle">${esc(xText(t))}</text>`);
  series.forEach((one, index) => {
    const ink = one.color || color(index);
    const path = one.points.map((p) => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join(" ");
    if (!one.marks && one.points.some((p) => p.length > 3 && p[3] > p[2])) {
      const upper = one.points.map((p) => `${px(p[0]).toFixed(1)},${py(p[3] ?? p[1]).toFixed(1)}`);
      const lower = one.points.map((p) => `${px(p[0]).toFixed(1)},${py(p[2] ?? p[1]).toFixed(1)}`).reverse();
      parts.push(`<polygon points="${[...upper, ...lower].join(" ")}" fill="${ink}" opacity=".13"/>`);
    }
    parts.push(`<polyline points="${path}" fill="none" stroke="${ink}" stroke-width="${one.marks ? 1.2 : 1.8}" stroke-linejoin="round"${one.marks ? ' stroke-dasharray="4 3"' : ""}/>`);
    if (one.marks || one.points.length === 1) one.points.forEach((p) => parts.push(`<circle cx="${px(p[0]).toFixed(1)}" cy="${py(p[1]).toFixed(1)}" r="3" fill="${ink}"/>`));
  });
  const id = `chart${chartCount++ % 400}`;
  CHARTS.set(id, { series, x0, x1, left, right, width, height, top, bottom, unit, xName, xText, px });
  return `<svg viewBox="0 0 ${width} ${height}" data-chart="${id}" role="img" aria-label="${esc(options.label || series.map((s) => s.name).join(", "))}">${parts.join("")}<line class="cross" y1="${top}" y2="${height - bottom}" stroke="var(--dim)" stroke-width="1" visibility="hidden"/></svg>`;
}

function legend(series) {
  return `<ul class="legend">${series.map((one, index) => `<li>${one.marks ? `<svg viewBox="0 0 18 10" class="dash" aria-hidden="true"><line x1="0" x2="18" y1="5" y2="5" stroke="${one.color || color(index)}" stroke-width="1.4" stroke-dasharray="4 3"/><circle cx="9" cy="5" r="3" fill="${one.color || color(index)}"/></svg>` : `<i style="background:${one.color || color(index)}"></i>`}${esc(one.name)}</li>`).join("")}</ul>`;
}

function spark(values, width = 110, height = 26) {
  if (values.length < 2) return "";
  const low = Math.min(0, ...values), high = Math.max(low + 1e-9, ...values, Math.max(...values) <= 1 && low >= 0 ? 1 : -Infinity);
  const points = values.map((v, i) => `${((i / (values.length - 1)) * width).toFixed(1)},${(height - 2 - ((v - low) / (high - low)) * (height - 4)).toFixed(1)}`).join(" ");
  return `<svg viewBox="0 0 ${width} ${height}" style="width:${width}px" aria-hidden="true"><polyline points="${points}" fill="none" stroke="var(--blue)" stroke-width="1.6"/></svg>`;
}

function stackBar(shares, colors) {
  const total = shares.reduce((sum, one) => sum + one[1], 0);
  if (!total) return '<p class="quiet small">No time was counted yet.</p>';
  return `<div class="stack" role="img" aria-label="${esc(shares.map(([name, value]) => `${name} ${Math.round((value / total) * 100)} %`).join(", "))}">${shares.map(([name, value]) => `<i style="width:${(value / total) * 100}%;background:${colors[name] || "var(--gray)"}" data-tip="${esc(`${name}: ${((value / total) * 100).toFixed(1)} %, ${seconds(value)}`)}"></i>`).join("")}</div>`;
}

function hbars(rows, ink) {
  const most = Math.max(1e-9, ...rows.map((row) => row[1]));
  const total = rows.reduce((sum, row) => sum + row[1], 0);
  return rows.map(([name, value]) => `<div class="hbar"><span title="${esc(name)}">${esc(name)}</span><span class="track"><i style="width:${(value / most) * 100}%;background:${ink}"></i></span><span>${number(value)} · ${Math.round((value / total) * 100)} %</span></div>`).join("");
}

// The tooltip: of any element with data-tip, and of the nearest points of a chart.
function showTip(text, event) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = !text;
  if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - box.width - 8, event.clientX + 14))}px`;
  tip.style.top = `${Math.max(6, event.clientY - box.height - 10)}px`;
}

function chartTip(svg, event) {
  const chart = CHARTS.get(svg.dataset.chart);
  if (!chart) return "";
  const box = svg.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * chart.width;
  const x = chart.x0 + ((at - chart.left) / (chart.width - chart.left - chart.right)) * (chart.x1 - chart.x0);
  const lines = [];
  let cross = null;
  for (const one of chart.series) {
    let best = null;
    for (const p of one.points) if (best === null || Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p;
    if (!best) continue;
    if (cross === null || Math.abs(best[0] - x) < Math.abs(cross - x)) cross = best[0];
    lines.push(`${one.name}: ${number(best[1])}${chart.unit}${chart.series.length > 1 && best[0] !== cross ? ` (${chart.xText(best[0])})` : ""}`);
  }
  if (cross === null) return "";
  const line = svg.querySelector(".cross");
  line.setAttribute("x1", chart.px(cross)); line.setAttribute("x2", chart.px(cross)); line.setAttribute("visibility", "visible");
  return `${chart.xName} ${chart.xText(cross)}\n${lines.join("\n")}`;
}

document.addEventListener("mousemove", (event) => {
  document.querySelectorAll('.cross[visibility="visible"]').forEach((line) => line.setAttribute("visibility", "hidden"));
  const svg = event.target.closest && event.target.closest("svg[data-chart]");
  if (svg) return showTip(chartTip(svg, event), event);
  const tipped = event.target.closest && event.target.closest("[data-tip]");
  if (tipped) return showTip(tipped.dataset.tip, event);
  if (!(event.target.closest && event.target.closest("canvas"))) showTip("", event);
});
