"use strict";
// Shared by all pages: copying commands, reading values from plots, and following a run in progress.

const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

function button(name, label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = name;
  made.textContent = label;
  made.onclick = event => { event.stopPropagation(); act(made); };
  return made;
}

// Commands: <pre class="copy">.
for (const block of document.querySelectorAll("pre.copy")) {
  const text = block.textContent;
  block.append(button("copy", "copy", self => {
    copy(text);
    self.textContent = "copied";
    setTimeout(() => { self.textContent = "copy"; }, 1500);
  }));
}

function copy(text) { // this also works on pages served without HTTPS
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function download(name, text) {
  const link = document.createElement("a");
  link.download = name;
  link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(text)}`;
  link.click();
}

{ // Plots: <svg class="plot">, whose curves have their values in `data-points`.
function curvesOf(plot) {
  return [...plot.querySelectorAll(".curve[data-name]")].map(curve => ({
    name: curve.dataset.name,
    colour: curve.style.stroke,
    points: curve.dataset.points.split(" ").map(point => point.split(",").map(Number)),
  }));
}

function scaleOf(text) {
  const [low, high, start, end] = text.split(",").map(Number);
  return value => start + (value - low) / (high - low) * (end - start);
}

const short = value => {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3).replace("e+", "e") : String(+value.toPrecision(5));
};

function hide() {
  document.querySelectorAll(".guide").forEach(guide => guide.remove());
  tip.style.display = "none";
}

document.addEventListener("pointermove", event => {
  hide();
  const plot = event.target.closest?.("svg.plot");
  const curves = plot ? curvesOf(plot) : [];
  if (!curves.length) return;
  const box = plot.getBoundingClientRect(), {width, height} = plot.viewBox.baseVal;
  const place = (event.clientX - box.left) / box.width * width;
  const x = scaleOf(plot.dataset.x), [bottom, top] = plot.dataset.y.split(",");
  const near = (a, b) => Math.abs(x(a[0]) - place) <= Math.abs(x(b[0]) - place) ? a : b;
  const nearest = curves.map(curve => curve.points.reduce(near));
  const at = nearest.reduce(near)[0];
  const guide = plot.querySelector(".grid").cloneNode();
  guide.setAttribute("class", "guide");
  guide.setAttribute("d", `M${x(at)} ${bottom}V${top}`);
  plot.append(guide);
  const {xname, epochs} = plot.dataset;
  const lines = [`${xname} ${xname === "step" ? at.toLocaleString("en") : short(at)}`];
  if (+epochs) lines[0] += `, epoch ${+(at * epochs).toPrecision(3)}`;
  curves.forEach((curve, i) => {
    const [place, value] = nearest[i];
    if (Math.abs(x(place) - x(at)) < width / 40) lines.push(`${curve.name} ${short(value)}`);
  });
  tip.textContent = lines.join("\n");
  tip.style.display = "block";
  const left = event.clientX + 14, fits = left + tip.offsetWidth < innerWidth - 4;
  tip.style.left = `${fits ? left : Math.max(4, event.clientX - 14 - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
});

function csv(curves, xname) { // as CSV, one row per x
  const rows = new Map();
  curves.forEach((curve, i) => curve.points.forEach(([x, y]) => {
    if (!rows.has(x)) rows.set(x, curves.map(() => ""));
    rows.get(x)[i] = y;
  }));
  const quoted = text => `"${text.replaceAll('"', '""')}"`;
  const lines = [...rows].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, ...values].join());
  return [[xname || "x", ...curves.map(curve => curve.name)].map(quoted).join(), ...lines, ""].join("\n");
}

for (const figure of document.querySelectorAll("figure")) {
  const plot = figure.querySelector("svg.plot");
  if (!plot) continue;
  const caption = figure.querySelector("figcaption"), curves = curvesOf(plot);
  if (curves.length)
    caption.append(button("csv", "csv", () =>
      download(`${caption.querySelector("b").textContent}.csv`, csv(curves, plot.dataset.xname))));
  plot.onclick = () => enlarge(figure);
}

function enlarge(figure) {
  hide();
  const dialog = document.createElement("dialog");
  const larger = figure.cloneNode(true);
  larger.querySelectorAll("button").forEach(one => one.remove());
  dialog.append(larger);
  dialog.onclick = () => dialog.close();
  dialog.onclose = () => { tip.style.display = "none"; document.body.append(tip); dialog.remove(); };
  document.body.append(dialog);
  dialog.append(tip);
  dialog.showModal();
}
}

{ // A page that is redrawn during training: <main data-reload="seconds" data-drawn="time">.
const {reload, drawn} = document.querySelector("main").dataset;
const key = `scroll ${location.pathname}`;
try {
  const kept = JSON.parse(sessionStorage.getItem(key));
  sessionStorage.removeItem(key);
  if (kept) {
    document.querySelectorAll("details").forEach((part, i) => { part.open = kept.open[i]; });
    scrollTo(0, kept.y);
  }
} catch { /* without session storage, the page starts at the top */ }

function warn() {
  const minutes = Math.round((Date.now() / 1000 - drawn) / 60), late = document.querySelector(".late");
  if (late && minutes >= 3) late.textContent = `not updated for ${minutes} min: the run may have been killed`;
}

function follow() {
  warn();
  if (document.hidden || document.querySelector("dialog") || !getSelection().isCollapsed) return;
  const open = [...document.querySelectorAll("details")].map(part => part.open);
  try { sessionStorage.setItem(key, JSON.stringify({y: scrollY, open})); } catch { /* as above */ }
  location.reload();
}
if (reload) {
  warn(); // each reload removes the warning
  setInterval(follow, 1000 * reload);
}
}
