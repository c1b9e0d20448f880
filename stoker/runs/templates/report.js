// The plots of a report, drawn from the JSON in `data-plot`. The names in it are shown only as text.
const WIDTH = 360, HEIGHT = 220; // about the size of a plot on a phone; larger plots are scaled
const LEFT = 70, RIGHT = 346, TOP = 8, FOOT = 179; // the ends of the axes
const MOST_MARKED = 30; // curves with at most this many points have dots

function shown(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3).replace("e+", "e") : String(+value.toPrecision(5));
}

// Return the numbers that the axes of a plot have to cover.
function extents({lines, dots, bars, end, unit}) {
  if (bars) return bars.map(values => [0, ...values]);
  if (unit || dots) return Array(2).fill(unit ? [0, 1] : dots.flat());
  const points = lines.flatMap(line => line.points);
  return [[0, end, ...points.map(([x]) => x)], points.map(([, y]) => y)];
}

// Return the scales of a plot: two functions from numbers to places in the drawing, and the ticks.
function scales(plot) {
  const [xs, ys] = extents(plot), isOverSteps = plot.end !== undefined, end = Math.max(...xs);
  const across = scale(xs, isOverSteps ? 5 : 4, {least: isOverSteps ? 1 : 0, margin: 0, log: false});
  const up = scale(ys, 4, {margin: 0, log: plot.log ?? false});
  const whole = isOverSteps ? across.at(end) || 1 : 1; // an axis of steps ends at the last step, not at a tick
  return {
    x: value => LEFT + (RIGHT - LEFT) * across.at(value) / whole,
    y: value => FOOT + (TOP - FOOT) * up.at(value),
    horizontal: across.ticks.map(([share, label]) => [share / whole, label]).filter(([share]) => share < 1 + 1e-9),
    vertical: up.ticks,
  };
}

function draw(place) {
  const plot = JSON.parse(place.dataset.plot), {x, y, horizontal, vertical} = scales(plot);
  const svg = canvas(place, WIDTH, HEIGHT, plot.title), at = ([a, b]) => [x(a), y(b)];
  const box = (name, start, end, top) => shape(svg, "path", {class: name, d: `M${x(start)} ${FOOT}V${top}H${x(end)}V${FOOT}z`});
  const rule = (name, value) => shape(svg, "path", {class: name, d: `M${x(value)} ${FOOT}V${TOP}`});
  const mark = (name, points, colour) => {
    const d = name === "curve" ? path(points.map(at)) : points.map(point => `${path([at(point)])}h0`).join("");
    shape(svg, "path", {class: name, d}).style.stroke = `var(--${colour})`;
  };
  svg.classList.add("plot");
  drawAxes(svg, LEFT, TOP, RIGHT - LEFT, FOOT - TOP, horizontal, vertical, plot.x);
  if (plot.y) shape(svg, "text", {transform: `translate(11 ${(FOOT + TOP) / 2}) rotate(-90)`, "text-anchor": "middle"}, plot.y);
  if (plot.warmup) box("warmup", 0, Math.min(plot.warmup, Math.max(...extents(plot)[0])), TOP);
  if (plot.bars) {
    const [edges, counts] = plot.bars;
    counts.forEach((count, i) => { if (count) box("histogram", edges[i], edges[i + 1], y(count)); });
    rule("rule", 0);
  }
  if (plot.ideal) shape(svg, "path", {class: "rule", d: `M${LEFT} ${FOOT}L${RIGHT} ${TOP}`});
  for (const {points, colour} of plot.lines) {
    mark("curve", points, colour);
    if (points.length <= MOST_MARKED) mark("dots", points, colour);
  }
  if (plot.dots) mark("dots some", plot.dots, "val");
  if (plot.best) {
    rule("rule", plot.best[0]);
    mark("dots best", [plot.best], "val");
  }
  if (plot.lines.length) svg.onpointermove = event => readOff(event, svg, plot, x, rule);
  svg.onpointerleave = hide;
}

function hide() {
  document.querySelectorAll(".guide").forEach(guide => guide.remove());
  tip.style.display = "none";
}

// Show the values of the curves at the step nearest to the pointer.
function readOff(event, svg, plot, x, rule) {
  hide();
  const {left, width} = svg.getBoundingClientRect(), place = (event.clientX - left) / width * WIDTH;
  const near = (a, b) => Math.abs(x(a[0]) - place) <= Math.abs(x(b[0]) - place) ? a : b;
  const nearest = plot.lines.map(line => line.points.reduce(near)), [at] = nearest.reduce(near);
  rule("guide", at);
  const texts = [`${plot.x} ${plot.x === "step" ? at.toLocaleString("en") : shown(at)}`];
  if (plot.epochs) texts[0] += `, epoch ${+(at * plot.epochs).toPrecision(3)}`;
  plot.lines.forEach(({name}, i) => {
    const [step, value] = nearest[i];
    if (Math.abs(x(step) - x(at)) < WIDTH / 40) texts.push(`${name} ${shown(value)}`);
  });
  showTip(event, texts.join("\n"));
}

function csv({x, lines}) { // as CSV, one row per x
  const rows = new Map();
  lines.forEach(({points}, i) => points.forEach(([x, y]) => {
    if (!rows.has(x)) rows.set(x, lines.map(() => ""));
    rows.get(x)[i] = y;
  }));
  const quoted = text => `"${text.replaceAll('"', '""')}"`;
  const table = [...rows].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, ...values].join());
  return [[x, ...lines.map(line => line.name)].map(quoted).join(), ...table, ""].join("\n");
}

function enlarge(figure) {
  hide();
  const dialog = document.createElement("dialog"), larger = figure.cloneNode(true);
  larger.querySelectorAll("button").forEach(one => one.remove());
  draw(larger.querySelector("[data-plot]"));
  dialog.append(larger);
  dialog.onclick = () => dialog.close();
  dialog.onclose = () => { tip.style.display = "none"; document.body.append(tip); dialog.remove(); };
  document.body.append(dialog);
  dialog.append(tip);
  dialog.showModal();
}

for (const place of document.querySelectorAll("[data-plot]")) {
  const figure = place.closest("figure"), plot = JSON.parse(place.dataset.plot);
  draw(place);
  place.onclick = () => enlarge(figure);
  if (plot.lines.length)
    figure.querySelector("figcaption").append(button("csv", "csv", () => download(`${plot.title}.csv`, csv(plot))));
}
