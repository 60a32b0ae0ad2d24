// The numbers under the pointer, at one step in all charts. The page sets LEFT, RIGHT and WIDTH.
const shown = {
  number: v => String(Number(v.toPrecision(5))),
  rate: v => Math.round(v).toLocaleString("en-US") + " /s",
  ms: v => Number(v.toPrecision(4)) + " ms",
  percent: v => Number((100 * v).toPrecision(4)) + "%",
  bytes: v => v >= 1e9 ? (v / 1e9).toFixed(3) + " GB" : (v / 1e6).toFixed(1) + " MB",
};
const charts = [...document.querySelectorAll("figure.chart")].map(figure => ({
  figure, last: Number(figure.dataset.last), show: shown[figure.dataset.unit],
  svg: figure.querySelector("svg"), cursor: figure.querySelector(".cursor"),
  curves: JSON.parse(figure.querySelector("script").textContent),
}));
const tip = document.createElement("div");
tip.className = "tip";

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function ticked(curve) {
  const box = document.getElementById("run" + curve.run);
  return curve.steps.length > 0 && (!box || box.checked);
}

function point(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * WIDTH;
  const share = Math.min(1, Math.max(0, (x - LEFT) / (WIDTH - LEFT - RIGHT)));
  const curves = chart.curves.filter(ticked);
  if (!curves.length) return leave();
  const first = curves[0].steps;
  const step = first[nearest(first, share * chart.last)];
  const at = LEFT + step / chart.last * (WIDTH - LEFT - RIGHT);
  for (const each of charts) {
    each.cursor.setAttribute("x1", at);
    each.cursor.setAttribute("x2", at);
    each.cursor.style.visibility = "visible";
  }
  tip.replaceChildren("step " + step.toLocaleString("en-US"));
  for (const curve of curves) {
    const index = nearest(curve.steps, step), line = document.createElement("div");
    const color = document.createElement("i");
    color.className = curve.color;
    const away = curve.steps[index] === step ? "" :
      " (step " + curve.steps[index].toLocaleString("en-US") + ")";
    line.append(color, curve.name + ": " + chart.show(curve.values[index]) + away);
    tip.append(line);
  }
  chart.figure.append(tip);
  const left = at / WIDTH * box.width;
  const right = left > box.width / 2;
  tip.style.left = right ? "auto" : left + 12 + "px";
  tip.style.right = right ? box.width - left + 12 + "px" : "auto";
  tip.style.top = "26px";
}

function leave() {
  tip.remove();
  for (const each of charts) each.cursor.style.visibility = "hidden";
}

for (const chart of charts) {
  chart.svg.addEventListener("pointermove", event => point(chart, event));
  chart.svg.addEventListener("pointerdown", event => point(chart, event));
  chart.svg.addEventListener("pointerleave", leave);
}
