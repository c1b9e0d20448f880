// The plots of a sweep, drawn from the JSON in the page. The contents of the JSON are shown only as text.
const pen = document.createElement("canvas").getContext("2d"); // measures text
const sweep = JSON.parse(document.getElementById("sweep").textContent);
const rows = [...document.querySelectorAll("#jobs tbody tr")];
const brushes = new Map(); // {axis: [low, high]}, the selected range as fractions of the axis
const order = sweep.jobs.map((_, i) => i).reverse(); // so that the best job is drawn last, on top
const drawn = sweep.jobs.map(() => []); // the shapes of each job
const results = sweep.jobs.filter(job => job.status === "done" && job.value !== null).map(job => job.value);
const ranks = [...new Set(results)].sort((a, b) => sweep.high ? a - b : b - a); // equal values share a rank
const shades = sweep.jobs.map(job => ranks.length > 1 ? ranks.indexOf(job.value) / (ranks.length - 1) : 1); // 1 for the best value, 0 for the worst

// Return a scale whose ticks include the smallest and the largest number if no tick is near them.
function withEnds(numbers, steps) {
  const {at, ticks} = scale(numbers, steps), shares = ticks.map(([share]) => share);
  for (const number of [Math.min(...numbers), Math.max(...numbers)]) {
    const share = at(number);
    if (share < Math.min(...shares) - 0.06 || share > Math.max(...shares) + 0.06) ticks.push([share, String(+number.toPrecision(3))]);
  }
  return {at, ticks};
}

function axisOf(key, i) {
  if (key.numbers && key.numbers.length > 6) {
    const {at, ticks} = withEnds(key.numbers, 5);
    return {name: key.name, ticks, rises: true, at: job => at(key.numbers[job.settings[i]])};
  }
  // Choices are listed from top to bottom; if there are few numbers, they rise from bottom to top.
  const sorted = key.values.map((_, j) => j), count = sorted.length, every = Math.ceil(count / 12);
  if (key.numbers) sorted.sort((a, b) => key.numbers[b] - key.numbers[a]);
  const place = sorted.map((_, j) => 1 - (sorted.indexOf(j) + 0.5) / count);
  const jobs = sweep.jobs.length, room = jobs > 30 ? Math.min(0.5, jobs / 200) / count : 0; // many jobs with the same value are spread out, so that fewer overlap
  const spread = job => (sweep.jobs.indexOf(job) * 7 % 17 / 16 - 0.5) * room;
  const ticks = key.values.map((value, j) => [place[j], value]).filter((_, j) => j % every === 0);
  return {name: key.name, ticks, rises: key.numbers !== null, at: job => place[job.settings[i]] + spread(job), value: job => place[job.settings[i]], reach: room / 2};
}

const values = sweep.jobs.map(job => job.value).filter(value => value !== null);
const metric = withEnds(values.length ? values : [0], 6);
const axes = sweep.keys.map(axisOf);
const last = {name: sweep.metric, ticks: metric.ticks, at: job => job.value === null ? null : metric.at(job.value)};

function widthOf(text, font) {
  pen.font = font;
  return pen.measureText(text).width;
}

function isIn(job) {
  return [...brushes].every(([axis, [low, high]]) => {
    const share = (axis.value ?? axis.at)(job), reach = axis.reach ?? 0; // select all jobs with the same value, or none of them
    return share !== null && share >= low - reach && share <= high + reach;
  });
}

function colour(i) {
  if (sweep.jobs[i].status !== "done") return sweep.jobs[i].status === "pruned" ? "var(--soft)" : "var(--bad)";
  return `color-mix(in oklab, var(--val) ${Math.round(100 * shades[i])}%, var(--c3))`;
}

function isBest(i) {
  return sweep.jobs[i].row === 0 && sweep.jobs[i].status === "done";
}

function add(i, made) {
  made.style.setProperty("--colour", colour(i));
  made.classList.add("job", sweep.jobs[i].status);
  if (isBest(i)) made.classList.add("best");
  drawn[i].push(made);
}

// Label a value on an axis: a choice in a box, in which the lines of its jobs meet, or a number beside the axis.
function addLabel(svg, kind, x, y, height, label) {
  const text = shape(svg, "text", {y: y + 4, "text-anchor": "middle", class: kind}, label);
  const half = text.getComputedTextLength() / 2 + (kind === "choice" ? 7 : 3), middle = kind === "choice" ? Math.max(half + 1, x) : x + half + 2;
  text.setAttribute("x", middle);
  if (kind === "choice") text.before(shape(svg, "rect", {class: kind, x: middle - half, y: y - height / 2, width: 2 * half, height, rx: 4}));
}

// Return the distance from a point to a polyline.
function distance(points, x, y) {
  let least = Infinity;
  for (let i = 0; i < points.length; i++) {
    const [ax, ay] = points[Math.max(0, i - 1)], [bx, by] = points[i];
    const dx = bx - ax, dy = by - ay;
    const share = Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
    least = Math.min(least, Math.hypot(ax + share * dx - x, ay + share * dy - y));
  }
  return least;
}

// Highlight the job under the pointer in every plot, and open its report on a click.
function watch(svg, lines) {
  const near = event => {
    const box = svg.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let least = 14, nearest = null;
    for (const [i, points] of lines) {
      const far = isIn(sweep.jobs[i]) ? distance(points, x, y) : Infinity;
      if (far < least) [least, nearest] = [far, i];
    }
    return nearest;
  };
  svg.onpointermove = event => {
    const i = near(event);
    svg.style.cursor = i !== null && sweep.jobs[i].link ? "pointer" : "";
    light(i === null ? [] : [i]);
    if (i !== null) say(sweep.jobs[i], event);
  };
  svg.onpointerleave = () => light([]);
  svg.onclick = event => {
    const i = near(event), link = i !== null && sweep.jobs[i].link;
    if (link && event.pointerType !== "touch") location.href = link;
  };
}

function light(chosen) {
  for (const part of document.querySelectorAll(".on")) part.classList.remove("on");
  for (const i of chosen) {
    rows[sweep.jobs[i].row]?.classList.add("on");
    for (const part of drawn[i]) {
      part.classList.add("on");
      if (chosen.length === 1) part.parentNode.append(part);
    }
  }
  tip.style.display = "none";
}

function say(job, event) {
  const settings = sweep.keys.map((key, i) => `${key.name}=${key.values[job.settings[i]]}`);
  const value = job.value === null ? job.status : `${sweep.metric} ${job.shown}${job.status === "pruned" ? ", pruned" : ""}`;
  showTip(event, [`job ${job.name}: ${value}`, ...settings.map(text => short(text, 48))].join("\n"));
}

const LETTERS = 24; // in the names and values on an axis

// Return the name of an axis in two lines: its group and its last part.
function nameOf(axis) {
  const names = axis.name.split("."), name = names.pop();
  return [names.join("."), name].map(text => short(text, LETTERS));
}

// Return the room that the labels of an axis need: `before` and `right` of it for its values, `after` it for its name.
function roomFor(axis) {
  const [group, name] = nameOf(axis), font = "12px system-ui, sans-serif";
  const values = Math.max(...axis.ticks.map(([, label]) => widthOf(short(label, LETTERS), font)));
  const half = axis.value ? values / 2 + 10 : 0;
  return {before: half, right: axis.value ? half : values + 12, after: 10 + Math.max(widthOf(group, font), widthOf(name, "600 13px system-ui, sans-serif"))};
}

function drawParallel(place) {
  const all = values.length ? [...axes, last] : axes;
  const rooms = all.map(roomFor), first = Math.max(30, rooms[0].before), height = 330, top = 48, bottom = height - 14;
  const gaps = rooms.map((room, i) => Math.max(room.after, room.right + (rooms[i + 1]?.before ?? 0)));
  const least = first + gaps.reduce((a, b) => a + b), width = Math.max(place.clientWidth, Math.ceil(least));
  const more = (width - least) / Math.max(1, all.length - 1);
  const lefts = [first];
  for (const gap of gaps.slice(0, -1)) lefts.push(lefts.at(-1) + gap + more);
  const left = i => lefts[i];
  const y = share => bottom - (bottom - top) * share;
  const svg = canvas(place, width, height, "the settings and the result of each job");
  const plot = shape(svg, "g", {}), lines = [];
  order.forEach(i => {
    const job = sweep.jobs[i];
    const points = all.map((axis, j) => [left(j), axis.at(job)]).filter(([, share]) => share !== null).map(([x, share]) => [x, y(share)]);
    add(i, shape(plot, "path", {d: path(points)}));
    lines.push([i, points]);
  });
  all.forEach((axis, i) => {
    const x = left(i), [group, name] = nameOf(axis), title = shape(svg, "g", {class: "name"});
    shape(title, "title", {}, axis.name);
    shape(title, "text", {x, y: 14}, group);
    shape(title, "text", {x, y: 30, class: "strong"}, name);
    shape(svg, "path", {class: "axis", d: `M${x} ${top}V${bottom}`});
    for (const [share, label] of axis.ticks) {
      if (axis.value) addLabel(svg, "choice", x, y(share), Math.max(20, 2 * axis.reach * (bottom - top) + 8), short(label, LETTERS));
      else addLabel(svg, "number", x, y(share), 16, label);
    }
    const brush = shape(svg, "rect", {class: "brush", x: x - 7, width: 14, rx: 3});
    const show = () => {
      const [low, high] = brushes.get(axis) || [0, 0];
      brush.setAttribute("y", y(high));
      brush.setAttribute("height", y(low) - y(high));
    };
    const grip = shape(svg, "rect", {class: "grip", x: x - 14, y: top - 6, width: 28, height: bottom - top + 12});
    grip.onpointerdown = event => {
      event.preventDefault();
      grip.setPointerCapture(event.pointerId);
      const share = now => Math.max(0, Math.min(1, (bottom - (now.clientY - svg.getBoundingClientRect().top)) / (bottom - top)));
      const start = share(event);
      brushes.delete(axis);
      grip.onpointermove = now => {
        now.stopPropagation();
        const [low, high] = [start, share(now)].sort((a, b) => a - b);
        if (high - low > 0.01) brushes.set(axis, [low, high]);
        show();
        filter();
      };
      grip.onpointerup = () => { grip.onpointermove = null; show(); filter(); };
    };
    grip.onclick = event => event.stopPropagation();
    show();
  });
  watch(svg, lines);
}

function drawScatter(place) {
  const width = place.clientWidth, height = 280, left = 58, top = 8, wide = width - left - 14, high = height - top - 46;
  const axis = axes[+document.getElementById("setting").value];
  const svg = canvas(place, width, height, `${sweep.metric} against ${axis.name}`);
  const across = axis.rises ? share => share : share => 1 - share; // choices are listed from left to right
  drawAxes(svg, left, top, wide, high, axis.ticks.map(([share, label]) => [across(share), label]), metric.ticks, axis.name);
  const plot = shape(svg, "g", {}), lines = [], places = [];
  for (const job of sweep.jobs) { // best first
    const share = last.at(job), y = share === null ? top + high + 3 : top + high * (1 - share);
    let x = left + wide * across(axis.at(job));
    // Jobs with the same choice and about the same result are drawn side by side.
    const isTaken = at => axis.value && !axis.reach && places.some(place => Math.hypot(place[0] - at, place[1] - y) < 10);
    for (let n = 1; isTaken(x); n++) x += n % 2 ? 12 * n : -12 * n;
    places.push([x, y]);
  }
  const isSpread = axis.reach || sweep.jobs.some((job, i) => axis.value && places[i][0] !== left + wide * across(axis.at(job)));
  document.getElementById("spread").textContent = isSpread ? "Jobs with the same value are spread out sideways." : "";
  order.forEach(i => {
    const [x, y] = places[i];
    add(i, sweep.jobs[i].value === null || sweep.jobs[i].status === "pruned" ? shape(plot, "path", {class: "cross", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`}) : shape(plot, "circle", {cx: x, cy: y, r: isBest(i) ? 6 : 4}));
    lines.push([i, [[x, y]]]);
  });
  watch(svg, lines);
}

function drawCurves(place) {
  const curves = order.map(i => [i, sweep.jobs[i].curve]).filter(([, curve]) => curve.length > 0);
  const width = place.clientWidth, height = 280, left = 58, top = 8, wide = width - left - 14, high = height - top - 46;
  const across = scale(curves.flatMap(([, curve]) => curve.map(([x]) => x)), width < 500 ? 5 : 10, {least: 1});
  const up = scale(curves.flatMap(([, curve]) => curve.map(([, y]) => y)), 6);
  const svg = canvas(place, width, height, `${sweep.metric} of each job over the epochs`);
  drawAxes(svg, left, top, wide, high, across.ticks, up.ticks, "epoch");
  const plot = shape(svg, "g", {}), lines = [];
  for (const [i, curve] of curves) {
    const points = curve.map(([x, y]) => [left + wide * across.at(x), top + high * (1 - up.at(y))]);
    add(i, points.length > 1 ? shape(plot, "path", {d: path(points)}) : shape(plot, "circle", {cx: points[0][0], cy: points[0][1], r: 3}));
    lines.push([i, points]);
  }
  watch(svg, lines);
}

function filter() {
  const chosen = sweep.jobs.map(isIn), shown = new Set(sweep.jobs.filter((_, i) => chosen[i]).map(job => job.row));
  drawn.forEach((parts, i) => parts.forEach(part => part.classList.toggle("off", !chosen[i])));
  rows.forEach((row, i) => { row.hidden = brushes.size > 0 && !shown.has(i); });
  const count = document.getElementById("count");
  count.textContent = brushes.size ? `${chosen.filter(Boolean).length} of ${chosen.length} jobs selected ` : "";
  if (brushes.size) count.append(button("clear", "clear", () => { brushes.clear(); draw(); }));
}

function draw() {
  for (const parts of drawn) parts.length = 0;
  for (const [id, paint] of [["curves", drawCurves], ["parallel", drawParallel], ["scatter", drawScatter]]) {
    const place = document.getElementById(id);
    if (place) paint(place);
  }
  if (document.getElementById("count")) filter();
}

document.querySelectorAll("#jobs th").forEach((head, column) => {
  const sorter = button("sort", "", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const part of document.querySelectorAll("#jobs th")) part.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!x || !y) return !x - !y; // empty cells last
      return (x.localeCompare(y, undefined, {numeric: true}) && (isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y)) * (up ? 1 : -1);
    };
    rows[0].parentNode.append(...[...rows].sort(compare));
  });
  sorter.replaceChildren(...head.childNodes); // with the places where a name may break
  head.append(sorter);
});
rows.forEach((row, i) => {
  const inRow = sweep.jobs.map((job, j) => job.row === i ? j : -1).filter(j => j >= 0);
  row.onpointerenter = () => light(inRow);
  row.onpointerleave = () => light([]);
});
document.getElementById("setting")?.addEventListener("change", draw);
let drawnWidth = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawnWidth) { drawnWidth = innerWidth; draw(); } });
draw();
