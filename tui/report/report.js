// Reading values: the pointer over a plot shows the values there, in all plots over the same axis.
const plots = [...document.querySelectorAll("figure[data-x]")].map((figure) => ({
  figure,
  svg: figure.querySelector("svg"),
  outputs: figure.querySelectorAll("output"),
  points: JSON.parse(figure.querySelector("script").textContent),
}));

function nearest(values, place) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < place) low = middle;
    else high = middle;
  }
  return place - values[low] < values[high] - place ? low : high;
}

function said(line, at) {
  if (line.y[at] === null) return "no value";
  const range = line.low && line.low[at] < line.high[at] ? ` (median; ${line.low[at]} to ${line.high[at]})` : "";
  return line.y[at] + range;
}

function show(x, place) {
  for (const { figure, svg, outputs, points } of plots) {
    if (figure.dataset.x !== x) continue;
    svg.querySelector(".pointer")?.remove();
    const [first, last] = points.seen;
    const found = points.lines.map((line) => (place === null || !line.x.length ? -1 : nearest(line.x, place)));
    const places = points.lines.map((line, number) => line.x[found[number]]?.toLocaleString("en"));
    figure.querySelector(".at").textContent = place === null || !places[0] ? "" : `at ${points.x} ${places[0]}`;
    points.lines.forEach((line, number) => {
      const elsewhere = places[number] === places[0] ? "" : ` at ${places[number]}`;
      outputs[number].textContent = found[number] < 0 ? line.last : said(line, found[number]) + elsewhere;
    });
    if (place === null || place < first || place > last) continue;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const left = points.left + ((place - first) / (last - first)) * points.width;
    line.setAttribute("class", "pointer");
    line.setAttribute("d", `M${left.toFixed(1)} 8V184`);
    svg.append(line);
  }
}

for (const { figure, svg, points } of plots) {
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    const [first, last] = points.seen;
    const place = first + ((share - points.left) / points.width) * (last - first);
    show(figure.dataset.x, Math.min(last, Math.max(first, place)));
  });
  svg.addEventListener("pointerleave", () => show(figure.dataset.x, null));
}
