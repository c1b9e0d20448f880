// Charts that the pages draw as SVG, from numbers in the page.

function shape(parent, tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function canvas(place, width, height, label) {
  place.replaceChildren();
  return shape(place, "svg", {class: "chart", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
}

function exponent(value) {
  return Math.floor(Math.log10(value) + 1e-9);
}

// Return a scale for numbers. `at` maps a number to a fraction of the axis, from 0 to 1; `ticks` are [fraction, label] pairs, at least `least` apart.
// If the range is wide, `log` sets whether the scale is logarithmic. By default, it is if most numbers are small.
// `margin` is the part of the axis before the smallest and after the largest number. Without it, the axis ends at ticks.
function scale(numbers, steps, {least = 0, log, margin = 0.04} = {}) {
  let low = Math.min(...numbers), high = Math.max(...numbers);
  const middle = [...numbers].sort((a, b) => a - b)[numbers.length >> 1];
  log = low > 1e-100 && high > 30 * low && (log ?? middle < (low + high) / 4);
  const turn = log ? Math.log10 : value => value;
  if (!margin && high - low <= 1e-9 * Math.abs(high)) high = low + (Math.abs(low) / 10 || 1);
  low = turn(low); high = turn(high);
  let size = high - low || Math.abs(high) || 1;
  const at = value => high > low ? margin + (1 - 2 * margin) * (turn(value) - low) / size : 0.5;
  let step = 10 ** exponent(size / steps);
  step *= [1, 2, 5, 10].find(times => size / (step * times) <= steps * 1.001);
  if (log) step = Math.max(1, Math.round(step));
  else if (size >= least) step = Math.max(least, step);
  if ((!log || !margin) && high > low && steps > 1) { // both ends have a tick
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    size = high - low;
  }
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * size && values.length < 50; i++) values.push(log ? 10 ** (i * step) : i * step);
  const labels = labelsOf(values, log ? values[0] : step, log);
  return {at, ticks: values.map((value, i) => [at(value), labels[i]])};
}

// Return the labels of ticks, all in one notation, such as 0.05, 20,000 or 1e-5. Linear ticks are `step` apart.
function labelsOf(values, step, log) {
  const most = Math.max(...values.map(Math.abs)), isFar = step < 1e-4 || most >= 1e6;
  return values.map(value => {
    const last = exponent(log ? value : step);
    if (!value) return "0";
    if (isFar) return value.toExponential(log ? 0 : Math.max(0, exponent(most) - last)).replace("e+", "e");
    return last < 0 ? value.toFixed(-last) : value.toFixed().replace(/\B(?=(\d{3})+$)/g, ",");
  });
}

function short(text, letters) { // keep the end, because names differ there
  return text.length > letters ? `…${text.slice(1 - letters)}` : text;
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// Draw grid lines, and labels where they do not touch. `horizontal` and `vertical` are [fraction of the axis, label] pairs.
function drawAxes(svg, left, top, width, height, horizontal, vertical, title) {
  for (const [share, label] of vertical) {
    const y = top + height * (1 - share);
    shape(svg, "path", {class: "grid", d: `M${left} ${y}h${width}`});
    shape(svg, "text", {x: left - 6, y: y + 4, "text-anchor": "end"}, label);
  }
  const labels = [...horizontal].sort((a, b) => a[0] - b[0]).map(([share, label]) => {
    const text = short(label, 16), x = left + width * share, half = 3.4 * text.length;
    shape(svg, "path", {class: "grid", d: `M${x} ${top}v${height}`});
    return {text, half, x: Math.max(half, Math.min(x, left + width + 14 - half))};
  });
  let every = 1; // grid lines per label; raised until no labels overlap
  const touches = (label, i) => i % every === 0 && i && label.x - label.half < labels[i - every].x + labels[i - every].half + 6;
  while (labels.some(touches)) every++;
  labels.forEach(({text, x}, i) => { if (i % every === 0) shape(svg, "text", {x, y: top + height + 18, "text-anchor": "middle"}, text); });
  shape(svg, "text", {x: left + width / 2, y: top + height + 36, "text-anchor": "middle"}, title);
}

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 14 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 14}px`;
}
