// The index of runs, built from the JSON in the page. The contents of the JSON are shown only as text.
const runs = [];
for (const line of document.getElementById("runs").textContent.split("\n")) {
  try {
    const [[name], run] = JSON.parse(line);
    runs.push({...run, name, curves: {__proto__: null, ...run.curves}, text: JSON.stringify([name, run.status, run.data, run.model, pairs(run.settings)]).toLowerCase()});
  } catch { /* skip the empty first and last lines, and any malformed line */ }
}
const list = document.getElementById("list"), filter = document.getElementById("filter");
const bar = document.getElementById("ticked");
const ticked = []; // the selected runs; a run's index here is also the index of its color

function pairs(settings) {
  return Object.entries(settings).map(([key, value]) => `${key}=${value}`).join(" ");
}

// Return the settings that the columns for data and model do not show. Paths come last, where the cell may cut them off.
function more(run) {
  const isShown = ([key, value]) => (["dataset", "model"].includes(key) && !value.includes(",")) || value.split("/").pop() === run.data;
  const isPath = ([key]) => key === "dataset.root" || key === "dataset.path";
  return Object.fromEntries(Object.entries(run.settings).filter(pair => !isShown(pair)).sort((a, b) => isPath(a) - isPath(b)));
}

function put(parent, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// Format numbers and times as the report does.
function number(value) {
  if (typeof value !== "number") return "";
  const size = Math.abs(value), digits = Math.max(0, 4 - Math.floor(Math.log10(size)));
  if (size && (size < 0.001 || size >= 1e15)) return String(+value.toPrecision(4)).replace("e+", "e");
  return size < 100 ? value.toFixed(4) : value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

function duration(seconds) {
  if (typeof seconds !== "number") return "";
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  const rounded = Math.round(seconds), minutes = Math.floor(rounded / 60);
  return minutes < 60 ? `${minutes} min ${rounded % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function secondsOf(run) { // for a run in progress, the time so far
  return run.since ? Math.max(0, Date.now() / 1000 - run.since) : run.seconds;
}

function date(seconds) {
  const shifted = new Date(1000 * (seconds - 60 * new Date(1000 * seconds).getTimezoneOffset()));
  return shifted.toISOString().slice(0, 16).replace("T", " ");
}

function address(run) {
  return run.report && ["./" + run.name, run.report].join("/").split("/").map(encodeURIComponent).join("/");
}

// Whether any run has been evaluated. If so, the list shows no curves of the training loss.
const evaluated = runs.some(run => Object.keys(run.curves).some(name => name !== "train/loss"));

function curveOf(run) { // the name of the curve of the best metric, or of a loss
  return [run.best?.[0], "val/loss", evaluated || "train/loss"].find(name => run.curves[name]);
}

// Return the points of a curve, scaled to a box.
function placed([steps, values], width, height, across = scale(steps, 1), up = scale(values, 1)) {
  return steps.map((step, i) => [width * across.at(step), height * (1 - up.at(values[i]))]);
}

function showMetric(cell, [name, value], jobs) {
  put(cell, "span", "metric", `${name.replace(/^(val|test)\//, "")} `);
  cell.append(number(value));
  if (jobs?.length) put(cell, "span", "metric job", jobs.length > 1 ? ` (mean of ${jobs.length} jobs)` : ` (job ${jobs[0]})`);
}

const columns = [ // [name, function that fills a cell, sort key, whether a first click sorts in descending order]
  ["name", (cell, run) => {
    const link = address(run);
    const name = put(cell, link ? "a" : "span", "", run.name);
    if (link) name.href = link;
    if (run.sweep) put(cell, "span", "soft", ` sweep, ${run.note}`);
  }, run => run.name],
  ["status", (cell, run) => {
    put(cell, "span", run.status, run.status);
    if (run.note) cell.title = run.note;
  }, run => run.status],
  ["started", (cell, run) => cell.append(date(run.time)), run => run.time, true],
  ["time", (cell, run) => {
    cell.append(duration(secondsOf(run)));
    if (run.sweep && run.seconds) put(cell, "span", "metric", " (sum)").title = "the times of its finished jobs together";
  }, secondsOf, true],
  ["data", (cell, run) => cell.append(run.data), run => run.data],
  ["model", (cell, run) => cell.append(run.model), run => run.model],
  ["best", (cell, run) => run.best && showMetric(cell, run.best, run.jobs), run => run.best?.[1], true],
  ["test", (cell, run) => run.test && showMetric(cell, run.test), run => run.test?.[1], true],
  ["curve", (cell, run) => {
    const name = curveOf(run);
    if (!name) return;
    const svg = shape(cell, "svg", {width: 84, height: 22, viewBox: "0 0 84 22", "aria-hidden": true});
    shape(svg, "path", {d: path(placed(run.curves[name], 84, 22))});
    if (name !== run.best?.[0]) put(cell, "span", "metric", " loss");
  }],
  ["settings", (cell, run) => {
    put(cell, "div", "", pairs(more(run)));
    cell.title = pairs(run.settings);
  }, run => pairs(more(run))],
];
const classes = {started: "time", time: "seconds"};

function addRow(run) {
  run.row = put(list.tBodies[0], "tr");
  const box = put(put(run.row, "td", "tick"), "input");
  box.type = "checkbox";
  box.ariaLabel = `Compare ${run.name}`;
  box.onchange = () => tick(run, box.checked);
  run.box = box;
  for (const [name, fill] of columns) fill(put(run.row, "td", classes[name] ?? name), run);
}

function sort(head, key, down) {
  for (const part of list.querySelectorAll("th")) part.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)], missing = [x, y].map(value => value === undefined || value === null || value === "");
    if (missing[0] || missing[1]) return missing[0] - missing[1];
    const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, {numeric: true});
    return down ? -order : order;
  };
  list.tBodies[0].append(...runs.sort(compare).map(run => run.row));
}

function addHead() {
  const row = put(list.createTHead(), "tr");
  put(row, "th");
  for (const [name, , key, down] of columns) {
    const head = put(row, "th", classes[name] ?? name, key ? undefined : name);
    if (!key) continue;
    head.append(button("sort", name, () => {
      const now = head.ariaSort;
      sort(head, key, now ? now === "ascending" : Boolean(down));
    }));
  }
}

function counted(count, name) {
  return count ? `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}` : "";
}

function show() {
  const words = filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  let count = 0;
  for (const run of runs) {
    run.row.hidden = !words.every(word => run.text.includes(word));
    count += !run.row.hidden;
  }
  document.getElementById("shown").textContent = words.length ? `${count.toLocaleString("en")} of ${runs.length.toLocaleString("en")}` : "";
  document.getElementById("none").hidden = count > 0;
}

function tick(run, on) {
  const at = on ? ticked.findIndex(other => !other) : ticked.indexOf(run);
  ticked[at < 0 ? ticked.length : at] = on ? run : undefined;
  run.row.classList.toggle("ticked", on);
  run.box.checked = on;
  run.row.style.setProperty("--colour", colour(ticked.indexOf(run)));
  compare();
}

function colour(i) {
  return `var(--c${i % 8})`;
}

function compare() {
  const chosen = ticked.filter(Boolean);
  document.getElementById("compared").hidden = bar.hidden = !chosen.length;
  document.getElementById("hint").hidden = !bar.hidden;
  bar.firstChild.textContent = `Comparison of ${counted(chosen.length, "run")} ↓`;
  const legend = document.getElementById("legend");
  legend.replaceChildren();
  for (const run of chosen) addKey(legend, run);
  const names = new Set(chosen.flatMap(run => Object.keys(run.curves)));
  const place = document.getElementById("overlays");
  place.replaceChildren();
  const rank = name => 2 * name.startsWith("train") + name.endsWith("/loss"); // metrics come first
  for (const name of [...names].sort((a, b) => rank(a) - rank(b))) {
    const figure = put(place, "figure");
    put(put(figure, "figcaption"), "b", "", name);
    drawOverlay(put(figure, "div"), name, chosen.filter(run => run.curves[name]));
  }
  tabulate(chosen);
}

function drawOverlay(place, name, shown) {
  const width = place.clientWidth, height = 240, left = 52, top = 6, wide = width - left - 14, high = height - top - 42;
  const across = scale(shown.flatMap(run => run.curves[name][0]), 5, {least: 1});
  const up = scale(shown.flatMap(run => run.curves[name][1]), 5);
  const svg = canvas(place, width, height, `${name} of ${shown.length} runs`);
  drawAxes(svg, left, top, wide, high, across.ticks, up.ticks, "step");
  const lines = shown.map(run => {
    const points = placed(run.curves[name], wide, high, across, up).map(([x, y]) => [left + x, top + y]);
    const at = ticked.indexOf(run), [x, y] = points[0];
    const line = points.length > 1 ? shape(svg, "path", {class: "run", d: path(points)}) : shape(svg, "circle", {class: "run", cx: x, cy: y, r: 3});
    line.style.setProperty("--colour", colour(at));
    if (at > 7) line.style.strokeDasharray = `${8 - at / 8} 3`;
    return [run, points];
  });
  svg.onpointermove = event => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    const texts = lines.map(([run, points]) => {
      const gaps = points.map(point => Math.abs(point[0] - x)), i = gaps.indexOf(Math.min(...gaps));
      const [steps, values] = run.curves[name];
      return `${number(values[i])} at step ${steps[i]}: ${short(run.name, 40)}`;
    });
    showTip(event, texts.join("\n"));
  };
  svg.onpointerleave = () => { tip.style.display = "none"; };
}

function addKey(parent, run) {
  put(parent, "span", "key", run.name).style.setProperty("--colour", colour(ticked.indexOf(run)));
}

function tabulate(chosen) {
  const table = document.getElementById("differences");
  table.replaceChildren();
  const head = put(table, "tr");
  put(head, "th");
  for (const run of chosen) addKey(put(head, "th"), run);
  const values = {best: run => run.best ? `${run.best[0]} ${number(run.best[1])}` : "", data: run => run.data, model: run => run.model};
  for (const key of new Set(chosen.flatMap(run => Object.keys(run.settings)))) values[key] ??= run => run.settings[key] ?? "(default)";
  for (const key in values) {
    const texts = chosen.map(values[key]);
    const different = new Set(texts.map(text => text && isFinite(text) ? +text : text)); // 2e-3 equals 0.002
    if (different.size < 2 && key !== "best") continue;
    const row = put(table, "tr");
    for (const text of [key, ...texts]) put(row, "td", "", text);
  }
}

const counts = {};
for (const run of runs) counts[run.status] = (counts[run.status] ?? 0) + 1;
const sweeps = runs.filter(run => run.sweep).length, kinds = [counted(runs.length - sweeps, "run"), counted(sweeps, "sweep")].filter(Boolean);
const statuses = Object.entries(counts).map(([status, count]) => `${count.toLocaleString("en")} ${status}`);
document.getElementById("counts").textContent = `${kinds.join(" and ")}: ${statuses.join(", ")}`;
addHead();
list.createTBody();
runs.forEach(addRow);
sort(list.querySelector("th.time"), run => run.time, true);
filter.oninput = show;
bar.lastChild.onclick = () => { for (const run of ticked.filter(Boolean)) tick(run, false); };
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; compare(); } });
