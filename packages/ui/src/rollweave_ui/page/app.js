// The page: views of runs by the address's part after #, polled while the page is seen.
"use strict";

const POLL_MS = 2000;
const main = document.getElementById("main");
const CAUSES = {
  busy: "--green", environment: "--orange", stragglers: "--olive", reward: "--pink", window: "--blue", weights: "--purple",
  starting: "--gray", training: "--cyan", prompts: "--cyan", batch: "--orange", publishing: "--purple", saving: "--gray", measuring: "--cyan", evaluation: "--blue",
};
const MEANING = {
  engines: {
    busy: "sampling", environment: "waiting for environments", stragglers: "waiting for the last turns elsewhere", reward: "waiting for rewards",
    window: "waiting for the trainer", weights: "taking new weights", starting: "starting", training: "memory lent to the trainer", prompts: "waiting for prompts",
  },
  trainer: { busy: "training", batch: "waiting for a batch", publishing: "publishing weights", saving: "saving", starting: "starting", measuring: "measuring ratios", evaluation: "waiting for the evaluation" },
};
const KINDS = { train: "--green", publish: "--purple", load: "--purple", save: "--gray", start: "--gray", measure: "--cyan", suspend: "--orange", stage: "--cyan", fetch: "--cyan" };
const state = { theme: localStorage.getItem("theme") || "auto", picked: new Set(), axis: "step", paint: {}, timer: 0, asked: 0, pass: 0, range: "all", zoom: null, tint: "logprob" };

// The theme.

function applyTheme() {
  const dark = state.theme === "dark" || (state.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = `theme: ${state.theme}`;
}
document.getElementById("theme").addEventListener("click", () => {
  state.theme = { auto: "light", light: "dark", dark: "auto" }[state.theme];
  localStorage.setItem("theme", state.theme);
  applyTheme();
  if (state.redraw) state.redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); if (state.redraw) state.redraw(); });
applyTheme();

// Requests.

async function ask(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const response = await fetch(`${path}?${query}`, { cache: "no-store" });
  const text = await response.text();
  let value = null;
  try { value = JSON.parse(text); } catch { /* one line of text */ }
  if (!response.ok) throw Object.assign(new Error((value && value.error) || text.trim() || `status ${response.status}`), { status: response.status });
  return value;
}

function route() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query || "") };
}
const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

// Set the content of an element only where it changed, so that focus and scrolling stay.
function paint(id, html) {
  const element = document.getElementById(id);
  if (element && state.paint[id] !== html) { element.innerHTML = html; state.paint[id] = html; }
}

function layout(html) { state.paint = {}; main.innerHTML = html; }

function crumbs(...parts) {
  document.getElementById("crumbs").innerHTML = parts.map(([text, href]) => (href ? `<span aria-hidden="true">/</span><a href="${href}">${esc(text)}</a>` : `<span aria-hidden="true">/</span><b>${esc(text)}</b>`)).join("");
  document.title = [...parts.map(([text]) => text).reverse(), "Rollweave"].join(" · ");
}

// Every view has a function that draws its frame once, and returns one that asks and paints.
async function show() {
  clearTimeout(state.timer);
  const turn = ++state.asked, { parts, query } = route();
  state.redraw = null;
  const view = parts[0] === "run" && parts[1] ? runView(parts[1], parts[2] || "overview", parts.slice(3)) : parts[0] === "compare" ? compareView(query.getAll("run")) : listView();
  const loop = async () => {
    const pass = ++state.pass, over = () => turn !== state.asked || pass !== state.pass;
    let wait = POLL_MS;
    try {
      const more = await view();
      if (over()) return;
      live("");
      if (more) wait = 30;
    } catch (error) {
      if (over()) return;
      if (error.status) { live(""); failed(error.message); wait = 5000; } else live("server not reached");
    }
    state.timer = setTimeout(document.hidden ? idle : loop, wait);
  };
  const idle = () => { state.timer = setTimeout(document.hidden ? idle : loop, 1000); };
  state.poke = loop;
  await loop();
}

function live(problem) {
  const element = document.getElementById("live");
  element.classList.toggle("lost", Boolean(problem));
  const text = problem || `updated ${new Date().toLocaleTimeString()}`;
  if (element.textContent !== text) element.textContent = text;
}

function failed(message) {
  if (!document.getElementById("failure")) main.insertAdjacentHTML("afterbegin", '<div id="failure" class="note bad" role="alert"></div>');
  document.getElementById("failure").textContent = message;
}
const recovered = () => { const note = document.getElementById("failure"); if (note) note.remove(); };

const badge = (run) => `<span class="badge ${run.state}">${esc(run.state)}</span>`;
const notes = (problems) => (problems || []).map((line) => `<div class="note bad" role="alert">${esc(line)}</div>`).join("");
function measureText(measures) {
  const rows = Object.entries(measures || {});
  if (!rows.length) return '<span class="quiet">no score yet</span>';
  return rows.map(([task, m]) => `<b>${number(m.value)}</b> <span class="dim">${esc(m.kind)}${rows.length > 1 ? ` on ${esc(task)}` : ""}</span>`).join("<br>");
}
const waitTarget = (wait) => `${wait.count > 1 || wait.waiter !== "the run" ? `${wait.count > 1 ? `${wait.count} ` : ""}${wait.waiter}` : "the run"}`;
const isLong = (wait) => wait.seconds > Math.max(10, 2 * wait.usual_s) && !(wait.limit_s && wait.seconds < wait.limit_s / 4);
const isLate = (wait) => (wait.limit_s > 0 && wait.seconds > wait.limit_s / 2) || wait.seconds > Math.max(wait.limit_s ? 120 : 60, 5 * wait.usual_s);

// The list of runs.

function listView() {
  crumbs();
  document.title = "Runs · Rollweave";
  layout('<div class="title"><h1>Runs</h1><span class="quiet" id="count"></span><span style="flex:1"></span><button id="compare" type="button" disabled>Compare selected</button></div><p class="sub" id="where"></p><div class="card" style="margin-top:16px" id="runs"><p class="quiet">Reading the runs…</p></div>');
  document.getElementById("compare").addEventListener("click", () => { location.hash = `#/compare?${[...state.picked].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`; });
  main.onchange = (event) => {
    if (!event.target.dataset.pick) return;
    state.picked[event.target.checked ? "add" : "delete"](event.target.dataset.pick);
    picked();
  };
  const picked = () => { const button = document.getElementById("compare"); button.disabled = state.picked.size < 2; button.textContent = state.picked.size > 1 ? `Compare ${state.picked.size} runs` : "Compare selected"; };
  return async () => {
    const { directory, runs } = await ask("/api/runs");
    recovered();
    paint("where", `in <span class="mono">${esc(directory)}</span>`);
    const active = runs.filter((run) => run.state === "running").length, bad = runs.filter((run) => ["failed", "killed", "silent", "damaged"].includes(run.state)).length;
    paint("count", runs.length ? `${active} running${bad ? ` · ${bad} need${bad > 1 ? "" : "s"} a look` : ""}` : "");
    paint("runs", runs.length ? runTable(runs) : `<div class="empty">No run has been started in this directory yet. A run appears here as soon as it begins:<br><code>rollweave train examples/frozenlake.toml</code></div>`);
    main.querySelectorAll("[data-pick]").forEach((box) => { box.checked = state.picked.has(box.dataset.pick); });
    picked();
    return runs.some((run) => run.complete === false);
  };
}

function runTable(runs) {
  const rows = runs.map((run) => {
    if (run.state === "damaged") return `<tr><td></td><td><b>${esc(run.name)}</b></td><td>${badge(run)}</td><td colspan="5" class="poor">${esc(run.text)}</td></tr>`;
    const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
    const about = [run.mode, (run.tasks || []).join(", "), run.model].filter(Boolean).join(" · ");
    const wait = (run.waits || [])[0];
    return `<tr class="link"><td><input type="checkbox" data-pick="${esc(run.name)}" aria-label="Select ${esc(run.name)} for comparison"></td>
      <td><a class="name" href="${link("run", run.name)}">${esc(run.name)}</a><div class="dim small">${esc(about)}</div></td>
      <td>${badge(run)}<div class="dim small">${esc(run.state === "running" ? run.text : run.text.slice(0, 60))}</div></td>
      <td style="min-width:120px">${run.steps ? `${run.step} <span class="dim">of ${run.steps} steps</span><div class="progress"><i style="width:${share * 100}%"></i></div>` : `<span class="dim">${run.step ? `${run.step} steps` : "–"}</span>`}</td>
      <td class="nowrap">${measureText(run.measures)}</td><td class="hide">${spark(run.spark || [])}</td>
      <td class="nowrap hide">${seconds(run.at)}<div class="dim small">${run.eta_s ? `${seconds(run.eta_s)} left` : run.tokens_per_s ? `${number(run.tokens_per_s)} tokens/s` : ""}</div></td>
      <td class="small">${wait ? `<span style="color:var(--orange)">${seconds(wait.seconds)} for ${esc(wait.target)}</span>` : run.warnings ? `<span class="dim">${run.warnings} warning${run.warnings > 1 ? "s" : ""}</span>` : ""}</td></tr>`;
  });
  return `<table><thead><tr><th></th><th>run</th><th>state</th><th>progress</th><th>score</th><th class="hide">training</th><th class="hide">time</th><th>attention</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

// One run.

const TABS = [["overview", "Overview"], ["timeline", "Timeline"], ["trajectories", "Trajectories"], ["settings", "Settings"]];

function runView(name, tab, rest) {
  main.onchange = null;
  if (tab === "trajectories" && rest.length) return readerView(name, rest[0], rest[1]);
  crumbs(["runs", "#/"], [name]);
  const tabs = TABS.map(([key, title]) => `<a href="${link("run", name, key)}"${key === tab ? ' aria-current="page"' : ""}>${title}</a>`).join("");
  layout(`<div id="head"><h1>${esc(name)}</h1></div><nav class="tabs" aria-label="Parts of the run">${tabs}</nav><div id="body"></div>`);
  const head = (run) => {
    recovered();
    paint("head", `<div class="title"><h1>${esc(run.name)}</h1>${badge(run)}<span class="dim">${esc(run.text)}</span></div><p class="sub">${[run.mode && `mode ${esc(run.mode)}`, esc((run.tasks || []).join(", ")), esc(run.model), run.lives > 1 && `${run.lives} lives`, run.simulated && "simulated", `<span class="mono">${esc(run.path)}</span>`].filter(Boolean).join(" · ")}</p>`);
  };
  if (tab === "timeline") return timelineView(name, head);
  if (tab === "trajectories") return attemptsView(name, head);
  if (tab === "settings") return settingsView(name, head);
  return overviewView(name, head);
}

function overviewView(name, head) {
  document.getElementById("body").innerHTML = '<div id="problems"></div><div id="waits"></div><div id="tiles"></div><section class="card" aria-label="Learning"><div class="controls" style="margin:0 0 6px"><h2 style="margin:0">Learning</h2><span class="gap"></span><button type="button" data-axis="step">by step</button><button type="button" data-axis="time">by time</button></div><div id="learning"></div></section><div class="grid"><section class="card" id="time"></section><section class="card" id="stale"></section></div><section class="card" id="signals"></section><section class="card" id="log"></section>';
  let last = null;
  const draw = () => {
    const run = last;
    main.querySelectorAll("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis)));
    head(run);
    paint("problems", notes(run.problems));
    paint("waits", waitsCard(run));
    paint("tiles", tiles(run));
    paint("learning", learning(run));
    paint("time", timeCard(run));
    paint("stale", staleCard(run));
    paint("signals", `<h2>Training signals</h2>${signals(run)}`);
    paint("log", logCard(run));
  };
  main.onclick = (event) => { const axis = event.target.dataset && event.target.dataset.axis; if (axis && last) { state.axis = axis; state.paint = {}; draw(); } };
  return async () => { last = await ask("/api/run", { run: name }); draw(); return !last.complete; };
}

function tiles(run) {
  const status = run.status, parts = [];
  for (const [task, m] of Object.entries(run.measures)) parts.push([`${task}: ${m.kind}`, number(m.value), esc(m.where)]);
  parts.push(["training step", `${run.step}${run.steps ? ` <small>of ${run.steps}</small>` : ""}`, run.steps ? `<div class="progress"><i style="width:${Math.min(100, (run.step / run.steps) * 100)}%"></i></div>` : ""]);
  parts.push(["run time", seconds(run.at), run.eta_s ? `about ${seconds(run.eta_s)} left` : run.best !== null && run.best !== undefined ? `best checkpoint: step ${esc(run.best)}` : ""]);
  if (run.tokens_per_s) parts.push(["sampled", `${number(run.tokens_per_s)} <small>tokens/s</small>`, "over the last 10 steps"]);
  if (status && !status.ended) {
    const flying = ["starting", "ready", "running", "rolled out", "in evaluation"].reduce((sum, key) => sum + (status.attempts[key] || 0), 0);
    parts.push(["in flight", `${flying} <small>attempts</small>`, `${status.attempts.queued || 0} queued · ${status.buffered}${status.wanted ? ` of ${status.wanted}` : ""} groups ready`]);
  } else if (run.summary) parts.push(["trajectories", number(run.summary.trajectories), `${number(run.summary.tokens)} sampled tokens`]);
  const lent = status && !status.ended ? status.engines.filter((engine) => engine.lent) : [];
  if (lent.length) parts.push(["lent engines", `${lent.length} <small>of ${status.engines.length}</small>`, lent.map((engine) => `${esc(engine.id)}: ${engine.busy} of ${engine.slots} turns`).join(" · ")]);
  const ahead = status && !status.ended ? status.engines.filter((engine) => engine.phase === "prefill") : [];
  if (ahead.length) parts.push(["prefill engines", `${ahead.length} <small>of ${status.engines.length}</small>`, ahead.map((engine) => `${esc(engine.id)}: ${engine.busy} prompts`).join(" · ")]);
  return `<div class="tiles">${parts.map(([k, v, n]) => `<div class="tile"><div class="k">${esc(k)}</div><div class="v">${v}</div><div class="n">${n}</div></div>`).join("")}</div>`;
}

function waitsCard(run) {
  const status = run.status;
  if (!status || run.state === "finished" || status.ended) return "";
  const stale = run.state === "silent" || run.state === "killed";
  const waits = [...status.waits].sort((a, b) => isLate(b) - isLate(a) || isLong(b) - isLong(a) || b.seconds - a.seconds);
  if (!waits.length) return `<section class="card"><h2>What waits for what</h2><p class="quiet" style="margin:0">Nothing waits: ${esc(status.phase)}.</p></section>`;
  const shown = waits.slice(0, 8), rows = shown.map((wait) => {
    const full = wait.limit_s || Math.max(60, 5 * wait.usual_s), level = stale ? "" : isLate(wait) ? " long late" : isLong(wait) ? " long" : "";
    const limit = wait.limit_s ? `of ${seconds(wait.limit_s)}` : wait.usual_s ? `usually ${seconds(wait.usual_s)}` : "";
    const oldest = wait.waiter === "attempts" && wait.oldest ? `, longest <span class="mono">${esc(wait.oldest)}</span>` : "";
    return `<div class="wait${level}"><div>${esc(waitTarget(wait))}</div><div><span class="arrow" aria-label="for">→</span><b>${esc(wait.target)}</b> <span class="why">${esc(wait.what)}${oldest}</span></div><div class="time"><b>${wait.seconds ? seconds(wait.seconds) : ""}</b> <span class="dim">${limit}</span>${wait.seconds ? `<div class="meter"><i style="width:${Math.min(100, (wait.seconds / full) * 100)}%"></i></div>` : ""}</div></div>`;
  });
  const note = stale ? '<small>as last heard; the run has not written since</small>' : "<small>now; the longest first</small>";
  return `<section class="card"><h2>What waits for what ${note}</h2>${rows.join("")}${waits.length > shown.length ? `<p class="quiet small" style="margin:8px 0 0">${waits.length - shown.length} shorter waits are not shown.</p>` : ""}</section>`;
}

const along = (points) => points.map((p) => [state.axis === "time" ? p[1] : p[0], p[2], p[3], p[4]]);
const axisName = () => (state.axis === "time" ? { xName: "at", xText: seconds, xTicks: timeTicks } : { xName: "step", xText: number });

function learning(run) {
  if (run.simulated) return '<p class="quiet">This run is simulated: its rewards are drawn, and nothing is learned.</p>';
  const kind = run.success.length ? "success" : "reward", names = run[kind].map((one) => one.name);
  const series = run[kind].map((one, index) => ({ name: `${one.name}, training`, color: color(index), points: along(one.points) }));
  const held = {};
  for (const line of run.evaluations) for (const [task, value] of Object.entries(line[kind] || {})) (held[task] ||= []).push([state.axis === "time" ? line.at : line.step, value]);
  for (const [task, points] of Object.entries(held)) series.push({ name: `${task}, held out`, color: color(names.includes(task) ? names.indexOf(task) : names.length), points, marks: true });
  const chart = lineChart(series, { width: 1160, height: 270, fixed: kind === "success" ? [0, 1] : null, ...axisName(), empty: "The first point comes with the first training step.", label: `${kind} over ${state.axis}` });
  return `${series.length ? `<h3>${kind === "success" ? "success rate" : "mean reward"}</h3>` : ""}${chart}${series.length ? legend(series) : ""}`;
}

function timeCard(run) {
  const part = (name, seconds_) => {
    const shares = Object.entries(seconds_).filter(([, value]) => value > 0).sort((a, b) => (b[0] === "busy") - (a[0] === "busy") || b[1] - a[1]);
    const colors = Object.fromEntries(shares.map(([cause]) => [MEANING[name][cause] || cause, `var(${CAUSES[cause] || "--gray"})`]));
    const total = shares.reduce((sum, one) => sum + one[1], 0);
    const named = shares.map(([cause, value]) => [MEANING[name][cause] || cause, value]);
    return stackBar(named, colors) + `<ul class="legend">${named.filter(([, value]) => value / total > 0.005).map(([text, value]) => `<li><i style="background:${colors[text]}"></i>${esc(text)} ${Math.round((value / total) * 100)} %</li>`).join("")}</ul>`;
  };
  const recent = run.state === "running" && Object.keys(run.recent.engines).length;
  const source = recent ? run.recent : run.idle;
  return `<h2>Where the time goes <small>${recent ? "last 10 steps" : "whole run"}</small></h2><h3>engines</h3>${part("engines", source.engines)}<h3 style="margin-top:18px">trainer</h3>${part("trainer", source.trainer)}`;
}

function staleCard(run) {
  const ages = Object.entries(run.staleness), stops = Object.entries(run.stops).sort((a, b) => b[1] - a[1]).slice(0, 6);
  return `<h2>Staleness <small>steps between the weights that began a trajectory and its training</small></h2>${ages.length ? hbars(ages.map(([age, n]) => [`${age} step${age === "1" ? "" : "s"}`, n]), "var(--blue)") : '<p class="quiet small">No trajectory was trained on yet.</p>'}<h2 style="margin-top:20px">How attempts ended</h2>${stops.length ? hbars(stops.map(([reason, n]) => [reason.replaceAll("_", " "), n]), "var(--gray)") : '<p class="quiet small">No attempt has ended yet.</p>'}`;
}

function signals(run) {
  if (!run.signals.length) return '<p class="quiet small">They come with the first training step.</p>';
  return `<div class="thirds">${run.signals.map((one) => `<div><h3>${esc(one.name)} <small>${number(one.points[one.points.length - 1][2])}</small></h3>${lineChart([{ name: one.name, points: along(one.points) }], { width: 320, height: 110, ...axisName() })}</div>`).join("")}</div>`;
}

function logCard(run) {
  const lines = [...run.warnings.map((w) => [w.at, `${w.component}: ${w.message}`, "warning"]), ...run.waited.map((w) => [w.at, w.message, "long wait"])].sort((a, b) => b[0] - a[0]);
  const summary = run.summary && run.summary.error ? `<div class="note bad">${esc(run.summary.error)}</div>` : "";
  return `<h2>Warnings and long waits${run.warning_count ? ` <small>${run.warning_count} warning${run.warning_count > 1 ? "s" : ""}, the newest first</small>` : ""}</h2>${summary}${lines.length ? `<div class="log" tabindex="0">${lines.map(([at, text, kind]) => `<div><b>${seconds(at)}</b><span class="dim">${kind}</span> ${esc(text)}</div>`).join("")}</div>` : '<p class="quiet small" style="margin:0">None.</p>'}`;
}

function settingsView(name, head) {
  document.getElementById("body").innerHTML = '<div id="problems"></div><section class="card" id="settings"></section>';
  return async () => {
    const run = await ask("/api/run", { run: name });
    head(run);
    paint("problems", notes(run.problems));
    const rows = flat(run.settings);
    paint("settings", rows.length ? `<h2>config.toml <small>as the run resolved it</small></h2><table><tbody>${rows.map(([key, value]) => `<tr><td class="mono dim">${esc(key)}</td><td class="mono">${esc(value)}</td></tr>`).join("")}</tbody></table>` : '<div class="empty">The run has no readable config.toml.</div>');
    return !run.complete;
  };
}

function flat(value, prefix = "") {
  if (value !== null && typeof value === "object") return Object.entries(value).flatMap(([key, inner]) => flat(inner, Array.isArray(value) ? `${prefix}[${key}]` : prefix ? `${prefix}.${key}` : key));
  return [[prefix, String(value)]];
}

// The timeline.

function timelineView(name, head) {
  document.getElementById("body").innerHTML = '<div id="problems"></div><section class="card"><div class="controls"><h2 style="margin:0">Hosts, engines and trainer</h2><span class="gap"></span><span class="quiet small" id="window"></span><span id="ranges"></span></div><canvas id="lanes" tabindex="0" role="img" aria-label="Timeline of engines, attempts and the trainer. Plus and minus zoom, arrow keys move."></canvas><p id="none" class="quiet"></p><ul class="legend" id="key"></ul></section>';
  const canvas = document.getElementById("lanes"), ranges = [["60", "last min"], ["300", "5 min"], ["1800", "30 min"], ["all", "all"]];
  let data = null, drag = null, rows = [];
  const ask_ = async () => {
    let from = null, to = null;
    if (state.zoom) [from, to] = state.zoom;
    else if (state.range !== "all" && data) { to = data.last; from = Math.max(0, to - Number(state.range)); }
    data = await ask("/api/lanes", { run: name, from, to, bins: 400 });
    draw();
    return !data.complete;
  };
  const draw = () => {
    paint("problems", notes(data.problems));
    paint("ranges", ranges.map(([key, title]) => ` <button type="button" data-range="${key}" aria-pressed="${!state.zoom && state.range === key}">${title}</button>`).join(""));
    paint("window", data.lanes.length ? `${seconds(data.start)} to ${seconds(data.end)}${data.complete ? "" : " · reading the trace…"}` : "");
    paint("none", data.lanes.length ? "" : data.complete ? "The run has written no trace yet. Lanes appear with its first turns." : "Reading the trace…");
    const used = [["turns on an engine", "--blue"], ["training", "--green"], ["weights", "--purple"], ["environments", "--orange"], ["checkpoint, start", "--gray"]];
    paint("key", data.lanes.length ? used.map(([text, ink]) => `<li><i style="background:var(${ink})"></i>${text}</li>`).join("") + '<li class="dim">drag to zoom, double-click for all</li>' : "");
    rows = laneRows(data);
    drawLanes(canvas, data, rows);
  };
  state.redraw = () => data && drawLanes(canvas, data, rows);
  const timeAt = (event) => { const box = canvas.getBoundingClientRect(); return data.start + Math.max(0, Math.min(1, (event.clientX - box.left - LABEL) / (box.width - LABEL))) * (data.end - data.start); };
  const zoomTo = (a, b) => { state.zoom = b - a > 0.02 ? [Math.max(0, a), b] : null; ask_(); };
  canvas.onmousedown = (event) => { if (data) drag = timeAt(event); };
  canvas.onmouseup = (event) => { if (drag !== null) { const end = timeAt(event); if (Math.abs(end - drag) > (data.end - data.start) / 100) zoomTo(Math.min(drag, end), Math.max(drag, end)); drag = null; drawLanes(canvas, data, rows); } };
  canvas.ondblclick = () => { state.zoom = null; ask_(); };
  canvas.onmousemove = (event) => {
    if (!data) return;
    if (drag !== null) drawLanes(canvas, data, rows, [drag, timeAt(event)]);
    showTip(laneTip(canvas, rows, data, event, timeAt(event)), event);
  };
  canvas.onmouseleave = (event) => { drag = null; showTip("", event); };
  canvas.onkeydown = (event) => {
    const width = data.end - data.start, middle = (data.end + data.start) / 2;
    const moves = { "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4], "-": [middle - width, middle + width], ArrowLeft: [data.start - width / 4, data.end - width / 4], ArrowRight: [data.start + width / 4, data.end + width / 4] };
    if (!moves[event.key]) return;
    event.preventDefault();
    const [a, b] = moves[event.key];
    zoomTo(Math.max(0, a), Math.min(data.last, b) > Math.max(0, a) ? Math.min(data.last, b) : b);
  };
  main.onclick = (event) => { const range = event.target.dataset && event.target.dataset.range; if (range) { state.range = range; state.zoom = null; state.paint.ranges = null; ask_(); } };
  return async () => {
    const [run, more] = [await ask("/api/run", { run: name }), await ask_()];
    head(run);
    return more;
  };
}

const LABEL = 150, ROW = 30;

function laneRows(data) {
  const byHost = {}, rows = [];
  const order = (a, b) => a.name.length - b.name.length || (a.name < b.name ? -1 : 1);
  for (const lane of data.lanes.filter((one) => one.kind === "trainer").sort(order)) rows.push({ lane, label: lane.name });
  for (const lane of data.lanes.filter((one) => one.kind === "engine").sort(order)) (byHost[data.hosts[lane.name] || ""] ||= []).push(lane);
  for (const [host, lanes] of Object.entries(byHost)) {
    if (host) rows.push({ title: `host ${host}` });
    const most = Math.max(1, ...lanes.flatMap((lane) => lane.load || []));
    for (const lane of lanes) rows.push({ lane, label: `engine ${lane.name}`, most });
  }
  for (const lane of data.lanes.filter((one) => one.kind === "attempts")) rows.push({ lane, label: lane.name, most: Math.max(1, ...lane.load) });
  for (const lane of data.lanes.filter((one) => ["relay", "worker"].includes(one.kind)).sort(order)) rows.push({ lane, label: `${lane.kind} ${lane.name}` });
  let y = 4;
  for (const row of rows) { row.y = y; y += row.title ? 22 : ROW; }
  rows.height = y + 24;
  return rows;
}

function drawLanes(canvas, data, rows, marked = null) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, style = getComputedStyle(document.documentElement), ink = (name) => style.getPropertyValue(name).trim();
  canvas.style.height = `${rows.length ? rows.height : 0}px`;
  canvas.width = width * ratio; canvas.height = rows.height * ratio;
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.clearRect(0, 0, width, rows.height);
  if (!rows.length || data.end <= data.start) return;
  const px = (t) => LABEL + ((t - data.start) / (data.end - data.start)) * (width - LABEL), font = "12px ui-sans-serif, system-ui, sans-serif";
  for (const row of rows) {
    c.font = row.title ? `600 ${font}` : font; c.fillStyle = ink(row.title ? "--dim" : "--ink"); c.textBaseline = "middle";
    if (row.title) { c.fillText(row.title, 0, row.y + 12); continue; }
    c.fillText(row.label.length > 21 ? `${row.label.slice(0, 20)}…` : row.label, 0, row.y + ROW / 2);
    c.fillStyle = ink("--sunk"); c.fillRect(LABEL, row.y + 3, width - LABEL, ROW - 6);
    if (row.lane.load) {
      c.fillStyle = ink(row.lane.kind === "engine" ? "--blue" : row.lane.name === "rewards" ? "--pink" : "--orange"); c.globalAlpha = 0.75; c.beginPath(); c.moveTo(LABEL, row.y + ROW - 3);
      const step = (width - LABEL) / row.lane.load.length;
      row.lane.load.forEach((value, index) => { const h = Math.min(1, value / row.most) * (ROW - 8); c.lineTo(LABEL + index * step, row.y + ROW - 3 - h); c.lineTo(LABEL + (index + 1) * step, row.y + ROW - 3 - h); });
      c.lineTo(width, row.y + ROW - 3); c.fill(); c.globalAlpha = 1;
    }
    for (const [a, b, name] of row.lane.boxes || []) {
      const x = Math.max(LABEL, px(a)), w = Math.max(1, Math.min(width, px(b)) - x);
      c.fillStyle = ink(KINDS[name.split(" ")[0]] || (row.label.endsWith("weights") ? "--purple" : "--gray"));
      if (row.lane.load) c.fillRect(x, row.y + 3, w, 7); else c.fillRect(x, row.y + 5, w, ROW - 10);
    }
  }
  c.font = font; c.fillStyle = ink("--dim"); c.textAlign = "center";
  for (const t of timeTicks(data.start, data.end, 8)) if (px(t) > LABEL + 10 && px(t) < width - 20) { c.fillText(seconds(t), px(t), rows.height - 9); c.globalAlpha = 0.35; c.fillRect(px(t), 0, 1, rows.height - 22); c.globalAlpha = 1; }
  if (marked) { c.fillStyle = ink("--blue"); c.globalAlpha = 0.2; c.fillRect(px(Math.min(...marked)), 0, px(Math.max(...marked)) - px(Math.min(...marked)), rows.height - 22); c.globalAlpha = 1; }
}

function laneTip(canvas, rows, data, event, time) {
  const y = event.clientY - canvas.getBoundingClientRect().top, row = rows.find((one) => !one.title && y >= one.y && y < one.y + ROW);
  if (!row) return "";
  const lines = [`${row.label}, ${seconds(time)}`], slack = (data.end - data.start) / 400;
  const box = (row.lane.boxes || []).find(([a, b]) => time >= a - slack && time <= b + slack);
  if (box) lines.push(`${box[2]}: ${seconds(box[1] - box[0])}`);
  if (row.lane.load) { const at = Math.min(row.lane.load.length - 1, Math.floor(((time - data.start) / (data.end - data.start)) * row.lane.load.length)); lines.push(`${number(row.lane.load[at])} ${row.lane.kind === "engine" ? "turns at once" : "at once"}`); }
  return lines.join("\n");
}

// The trajectories.

const COLUMNS = [["trajectory", ""], ["task", ""], ["ended", "r"], ["weights", "r"], ["turns", "r"], ["tokens", "r"], ["reward", "r"], ["ended by", ""]];
const STOPS = ["finished", "max_turns", "max_tokens", "time_budget", "env_error", "env_hang", "reward_error", "reward_hang", "reward_unavailable", "teacher_error", "engine_failure", "engines_lost", "stale", "surplus", "world_lost", "worker_lost", "image_error", "cancelled"];

function attemptsView(name, head) {
  const choose = (key, title, options) => `<label>${title} <select data-filter="${key}"><option value="">all</option>${options.map((o) => `<option>${o}</option>`).join("")}</select></label>`;
  document.getElementById("body").innerHTML = `<div id="problems"></div><section class="card"><form class="controls" id="filters">${choose("domain", "task", [])}${choose("purpose", "purpose", ["train", "eval", "serve"])}${choose("stop", "ended by", STOPS)}<label>reward from <input data-filter="least" size="3" inputmode="decimal"></label><label>to <input data-filter="most" size="3" inputmode="decimal"></label><label>order <select data-filter="order"><option>newest</option><option>oldest</option><option>longest</option><option>turns</option><option>best</option><option>worst</option></select></label><label>find <input data-filter="text" size="12" placeholder="id or task"></label></form><div id="rows"></div><div class="controls" style="margin:12px 0 0"><span class="quiet small" id="range"></span><span class="gap"></span><button type="button" id="back">Newer</button><button type="button" id="more">Further</button></div></section>`;
  const filters = state.filters && state.filters.run === name ? state.filters : { run: name, offset: 0 };
  state.filters = filters;
  main.querySelectorAll("[data-filter]").forEach((input) => { if (filters[input.dataset.filter]) input.value = filters[input.dataset.filter]; });
  const changed = (event) => { if (event.target.dataset.filter) { filters[event.target.dataset.filter] = event.target.value.trim(); filters.offset = 0; clearTimeout(state.timer); state.poke(); } };
  const form = document.getElementById("filters");
  form.oninput = changed; form.onsubmit = (event) => event.preventDefault();
  document.getElementById("back").onclick = () => { filters.offset = Math.max(0, filters.offset - 100); clearTimeout(state.timer); state.poke(); };
  document.getElementById("more").onclick = () => { filters.offset += 100; clearTimeout(state.timer); state.poke(); };
  let headed = 0;
  return async () => {
    if (Date.now() - headed > 5000) { head(await ask("/api/run", { run: name })); headed = Date.now(); }
    const page = await ask("/api/attempts", { ...filters, limit: 100 });
    recovered();
    paint("problems", notes(page.problems));
    const tasks = main.querySelector('[data-filter="domain"]');
    if (tasks && tasks.options.length - 1 !== page.domains.length) { tasks.innerHTML = `<option value="">all</option>${page.domains.map((d) => `<option>${esc(d)}</option>`).join("")}`; tasks.value = filters.domain || ""; }
    paint("rows", page.rows.length ? attemptTable(name, page.rows) : `<div class="empty">${page.total ? "No trajectory meets these conditions." : page.complete ? "No attempt has ended yet. They appear here as they do." : "Reading the trajectories…"}</div>`);
    const last = filters.offset + page.rows.length;
    paint("range", `${page.matching ? `${filters.offset + 1}–${last} of ${page.matching.toLocaleString()}` : "0"}${page.matching < page.total ? ` · ${page.total.toLocaleString()} attempts in all` : " attempts"}${page.complete ? "" : " · still reading…"}`);
    document.getElementById("back").disabled = filters.offset === 0;
    document.getElementById("more").disabled = last >= page.matching;
    return !page.complete;
  };
}

const rewardText = (row) => (row.reward === null ? '<span class="dim">–</span>' : `<b class="${row.success === true ? "good" : row.success === false ? "poor" : ""}">${number(row.reward)}</b>`);
const weightsText = (row) => (row.versions[0] < 0 ? "–" : row.versions[0] === row.versions[1] ? String(row.versions[0]) : `${row.versions[0]}–${row.versions[1]}`);
const attemptLink = (run, row) => link("run", run, "trajectories", row.id, row.attempt);

function attemptTable(run, rows) {
  return `<table><thead><tr>${COLUMNS.map(([text, kind]) => `<th class="${kind}">${text}</th>`).join("")}</tr></thead><tbody>${rows.map((row) => `<tr class="link"><td class="nowrap"><a class="name mono" href="${attemptLink(run, row)}">${esc(row.id)}${row.attempt ? `/${row.attempt}` : ""}</a></td><td>${esc(row.domain)}${row.purpose === "train" ? "" : ` <span class="dim">${row.purpose}</span>`} <span class="dim small">${esc(row.task)}</span></td><td class="r nowrap">${seconds(row.at)}</td><td class="r">${weightsText(row)}</td><td class="r">${row.turns}</td><td class="r">${row.tokens.toLocaleString()}</td><td class="r">${rewardText(row)}</td><td class="${row.stop === "finished" ? "dim" : ""}">${esc(row.stop.replaceAll("_", " "))}</td></tr>`).join("")}</tbody></table>`;
}

// The reader of one trajectory.

function readerView(name, id, attempt) {
  crumbs(["runs", "#/"], [name, link("run", name)], ["trajectories", link("run", name, "trajectories")], [id]);
  layout('<div id="reader"><p class="quiet">Reading the trajectory…</p></div>');
  let read = null;
  const draw = () => { paint("reader", readerHtml(name, read)); };
  main.onclick = (event) => { const tint = event.target.dataset && event.target.dataset.tint; if (tint && read) { state.tint = tint; draw(); } };
  return async () => { if (!read) { read = await ask("/api/attempt", { run: name, id, attempt }); recovered(); draw(); } return false; };
}

function readerHtml(run, read) {
  const a = read.attempt, t = a.timing;
  const phases = [["queued", t.queue_s, "--gray"], ["environment start", t.init_s, "--purple"], ["generating", t.generate_s, "--blue"], ["environment", t.env_s, "--orange"], ["reward", t.eval_s, "--pink"]].filter((p) => p[1] > 0);
  const sampled = a.sampled_versions.length ? (a.sampled_versions[0] === a.sampled_versions[1] ? `version ${a.sampled_versions[0]}` : `versions ${a.sampled_versions.join(" to ")}`) : "no weights";
  const facts = [["task", `${a.task.domain} ${a.task.id}`], ["purpose", a.purpose], ["weights", `launched at version ${a.initiated_version}, sampled by ${sampled}`], ["engine", a.engine || "–"], ["ended", `${seconds(a.ended_s)} into the run`], ["size", `${a.turns} turns, ${a.tokens.toLocaleString()} tokens${a.cut_turns ? `, ${a.cut_turns} turns cut at a limit` : ""}`]];
  if (Object.keys(read.template_arguments).length) facts.push(["template", JSON.stringify(read.template_arguments)]);
  for (const one of a.ignored) facts.push(["not read", one.text]);
  const components = Object.entries(a.rewards);
  if (components.length) facts.push(["rewards", components.map(([k, v]) => `${k} ${number(v)}`).join(", ")]);
  const payload = a.task.payload && Object.keys(a.task.payload).length ? `<details class="small" style="margin-top:8px"><summary class="quiet">task payload</summary><pre class="json">${esc(JSON.stringify(a.task.payload, null, 2))}</pre></details>` : "";
  const result = a.result === null ? "" : `<section class="card"><h2>Final result</h2><pre class="json">${esc(typeof a.result === "string" ? a.result : JSON.stringify(a.result, null, 2))}</pre></section>`;
  const tints = [["logprob", "log-probs"], ["version", "weight versions"], ["none", "plain"]];
  const sequences = a.sequences.map((spans, index) => `${a.sequences.length > 1 ? `<h2>Sequence ${index + 1} of ${a.sequences.length}${a.origins[index] ? ` <span class="quiet small">${esc(a.origins[index].text)}</span>` : ""}</h2>` : ""}${spans.map(spanHtml).join("")}`).join("") || '<p class="quiet">Nothing was sampled.</p>';
  return `<div class="title"><h1 class="mono" style="font-size:22px">${esc(a.id)}${a.attempt ? `/${a.attempt}` : ""}</h1><span class="badge ${a.success === true ? "running" : a.error ? "failed" : ""}">${esc(a.stop_reason.replaceAll("_", " "))}</span><span>reward <b style="font-size:18px">${a.reward === null ? "none" : number(a.reward)}</b></span>${a.success === null ? "" : `<span class="${a.success ? "good" : "poor"}">${a.success ? "success" : "no success"}</span>`}${a.blame === "none" ? "" : `<span class="dim">blame: ${esc(a.blame)}</span>`}</div>
    ${a.error ? `<div class="note bad" style="margin-top:12px">${esc(a.error)}</div>` : ""}${read.note ? `<div class="note" style="margin-top:12px">${esc(read.note)}: tokens are shown as numbers</div>` : ""}
    <div class="reader" style="margin-top:18px"><div>
      <section class="card"><dl class="facts">${facts.map(([k, v]) => `<dt>${k}</dt><dd>${esc(v)}</dd>`).join("")}</dl>${payload}${phases.length ? `<div style="margin-top:12px">${stackBar(phases.map((p) => [p[0], p[1]]), Object.fromEntries(phases.map((p) => [p[0], `var(${p[2]})`])))}<ul class="legend">${phases.map((p) => `<li><i style="background:var(${p[2]})"></i>${p[0]} ${seconds(p[1])}</li>`).join("")}</ul></div>` : ""}</section>
      ${result}
      <section class="card"><div class="controls"><h2 style="margin:0">Turns</h2><span class="gap"></span><span class="quiet small">color tokens by</span>${tints.map(([key, text]) => `<button type="button" data-tint="${key}" aria-pressed="${state.tint === key}">${text}</button>`).join("")}</div>${sequences}</section>
    </div><aside class="side">${taskCard(run, read)}${groupCard(run, read)}</aside></div>`;
}

function tokenHtml(span, index) {
  const logprob = span.logprobs[index], part = span.versions.find(([a, b]) => span.start + index >= a && span.start + index < b), version = part ? part[2] : -1;
  const text = span.pieces ? span.pieces[index] : `${span.tokens[index]} `;
  let style = "";
  if (state.tint === "logprob" && logprob !== null) { const doubt = Math.min(1, -logprob / 4); if (doubt > 0.02) style = ` style="background:color-mix(in srgb, var(--orange) ${Math.round(doubt * 70)}%, transparent)"`; }
  if (state.tint === "version") style = ` style="background:color-mix(in srgb, var(${COLORS[version % COLORS.length]}) 26%, transparent)"`;
  return `<span class="tok"${style} data-tip="${esc(`token ${span.tokens[index]}, position ${span.start + index}\nlog-prob ${logprob === null ? "–" : logprob.toFixed(4)} (${logprob === null ? "–" : `${(Math.exp(logprob) * 100).toFixed(1)} %`})\nweights version ${version}`)}">${esc(text)}</span>`;
}

function spanHtml(span) {
  const count = span.end - span.start;
  if (span.kind !== "output") return `<div class="span ${span.kind}"><header><b>${span.kind === "prompt" ? "Prompt" : "Observation, tool output"}</b><span>${count} token${count === 1 ? "" : "s"}</span></header><pre tabindex="0">${esc(span.text === null ? span.tokens.join(" ") : span.text)}</pre></div>`;
  const versions = [...new Set(span.versions.map((v) => v[2]))], total = span.logprobs.reduce((sum, v) => sum + (v || 0), 0);
  return `<div class="span output"><header><b>Turn ${span.turn}</b><span>${count} token${count === 1 ? "" : "s"}</span><span>weights ${versions.join(" → ")}</span><span>log-prob ${number(total)}, ${number(total / count)} each</span>${span.reward ? `<span>step reward ${number(span.reward)}</span>` : ""}${span.cut ? '<span style="color:var(--orange)">cut at its limit</span>' : ""}</header><pre>${span.tokens.map((_, index) => tokenHtml(span, index)).join("")}</pre></div>`;
}

function taskCard(run, read) {
  const rows = read.task, scored = rows.filter((row) => row.reward !== null);
  const byVersion = {};
  for (const row of scored) (byVersion[row.initiated] ||= []).push(row.reward);
  const points = Object.entries(byVersion).map(([version, rewards]) => [Number(version), rewards.reduce((s, r) => s + r, 0) / rewards.length, Math.min(...rewards), Math.max(...rewards)]).sort((a, b) => a[0] - b[0]);
  const chart = points.length > 1 ? lineChart([{ name: "mean reward", points }], { width: 260, height: 110, xName: "version" }) : "";
  return `<section class="card"><h2>The same task <small>${rows.length} attempt${rows.length > 1 ? "s" : ""}</small></h2>${chart || '<p class="quiet small" style="margin:0 0 6px">Attempted under one version so far.</p>'}<ol>${rows.map((row) => `<li><a href="${attemptLink(run, row)}"${row.id === read.attempt.id && row.attempt === read.attempt.attempt ? ' aria-current="true"' : ""}><span>version ${row.initiated} <span class="dim">${esc(row.id)}</span></span>${rewardText(row)}</a></li>`).join("")}</ol></section>`;
}

function groupCard(run, read) {
  if (read.group.length < 2) return "";
  return `<section class="card"><h2>Its group <small>${esc(read.attempt.group)}</small></h2><ol>${read.group.map((row) => `<li><a href="${attemptLink(run, row)}"${row.id === read.attempt.id && row.attempt === read.attempt.attempt ? ' aria-current="true"' : ""}><span>${esc(row.id)}${row.attempt ? `/${row.attempt}` : ""} <span class="dim">${row.turns} turns</span></span>${rewardText(row)}</a></li>`).join("")}</ol></section>`;
}

// The comparison of runs.

function compareView(names) {
  crumbs(["runs", "#/"], ["comparison"]);
  layout(`<div class="title"><h1>Comparison</h1><span class="quiet">${names.length} runs</span><span style="flex:1"></span><button type="button" data-axis="step">by step</button> <button type="button" data-axis="time">by time</button></div><div id="table" style="margin-top:16px"></div><div id="curves"></div><div id="differences"></div>`);
  let runs = [];
  const draw = () => {
    main.querySelectorAll("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis)));
    if (!runs.length) { paint("table", '<div class="card empty">Select two or more runs in <a href="#/">the list</a> to compare them.</div>'); return; }
    paint("table", `<section class="card"><table><thead><tr><th>run</th><th>state</th><th class="r">steps</th><th>score</th><th class="r">time</th><th class="r">tokens/s</th><th class="r">mean staleness</th><th>engines</th></tr></thead><tbody>${runs.map((run, i) => run.missing ? `<tr><td>${esc(run.name)}</td><td colspan="7" class="poor">${esc(run.missing)}</td></tr>` : `<tr><td><i style="display:inline-block;width:10px;height:10px;border-radius:3px;background:${color(i)};margin-right:8px"></i><a class="name" href="${link("run", run.name)}">${esc(run.name)}</a></td><td>${badge(run)}</td><td class="r">${run.step}</td><td>${measureText(run.measures)}</td><td class="r nowrap">${seconds(run.at)}</td><td class="r">${number(run.tokens_per_s)}</td><td class="r">${number(meanAge(run.staleness))}</td><td>${busyText(run)}</td></tr>`).join("")}</tbody></table></section>`);
    paint("curves", comparedCurves(runs.filter((run) => !run.missing)));
    paint("differences", differences(runs.filter((run) => !run.missing)));
  };
  main.onclick = (event) => { const axis = event.target.dataset && event.target.dataset.axis; if (axis) { state.axis = axis; state.paint = {}; draw(); } };
  return async () => {
    runs = await Promise.all(names.map((name) => ask("/api/run", { run: name }).catch((error) => { if (!error.status) throw error; return { name, missing: error.message }; })));
    recovered();
    draw();
    return runs.some((run) => run.complete === false);
  };
}

function meanAge(ages) { const rows = Object.entries(ages), count = rows.reduce((s, r) => s + r[1], 0); return count ? rows.reduce((s, r) => s + r[0] * r[1], 0) / count : null; }
function busyText(run) { const total = Object.values(run.idle.engines).reduce((s, v) => s + v, 0); return total ? `busy ${Math.round(((run.idle.engines.busy || 0) / total) * 100)} %` : "–"; }

function comparedCurves(runs) {
  const charts = [], add = (title, series, fixed) => { const found = series.filter((one) => one.points.length); if (found.length) charts.push(`<section class="card"><h2>${esc(title)}</h2>${lineChart(found, { width: 560, height: 220, fixed, ...axisName() })}${legend(found)}</section>`); };
  for (const kind of ["success", "reward"]) {
    const tasks = [...new Set(runs.flatMap((run) => run[kind].map((one) => one.name)))];
    for (const task of tasks) {
      add(`${task}: ${kind} in training`, runs.map((run, i) => ({ name: run.name, color: color(i), points: along((run[kind].find((one) => one.name === task) || { points: [] }).points) })), kind === "success" ? [0, 1] : null);
      if (kind === "success" || !runs.some((run) => run.success.some((one) => one.name === task)))
        add(`${task}: ${kind}, held out`, runs.map((run, i) => ({ name: run.name, color: color(i), marks: true, points: run.evaluations.filter((e) => (e[kind] || {})[task] !== undefined).map((e) => [state.axis === "time" ? e.at : e.step, e[kind][task]]) })), kind === "success" ? [0, 1] : null);
    }
  }
  for (const name of [...new Set(runs.flatMap((run) => run.signals.map((one) => one.name)))]) add(name, runs.map((run, i) => ({ name: run.name, color: color(i), points: along((run.signals.find((one) => one.name === name) || { points: [] }).points) })), null);
  return `<div class="grid">${charts.join("")}</div>`;
}

function differences(runs) {
  if (runs.length < 2) return "";
  const maps = runs.map((run) => new Map(flat(run.settings))), keys = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((key) => key !== "run.name" && key !== "run.dir" && new Set(maps.map((map) => map.get(key))).size > 1);
  return `<section class="card"><h2>Settings that differ</h2>${keys.length ? `<table><thead><tr><th>setting</th>${runs.map((run) => `<th>${esc(run.name)}</th>`).join("")}</tr></thead><tbody>${keys.map((key) => `<tr><td class="mono dim">${esc(key)}</td>${maps.map((map) => `<td class="mono">${map.has(key) ? esc(map.get(key)) : '<span class="dim">–</span>'}</td>`).join("")}</tr>`).join("")}</tbody></table>` : '<p class="quiet" style="margin:0">None.</p>'}</section>`;
}

addEventListener("hashchange", () => { main.onclick = null; show(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
addEventListener("resize", () => state.redraw && state.redraw());
document.addEventListener("visibilitychange", () => { if (!document.hidden && state.poke) { clearTimeout(state.timer); state.poke(); } });
show();
