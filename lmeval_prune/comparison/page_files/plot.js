// ---- means against a cost; one unit is one pixel, so that the text size does not depend on the width
function drawPlot() {
  const row = (v) => v.rows[state.task], plot = $("plot"), names = data.fronts[state.task]?.[state.cost];
  const points = data.variants.filter((v) => row(v) && !missing(v.costs[state.cost])).sort((a, b) => a.costs[state.cost] - b.costs[state.cost]);
  $("costs-part").hidden = document.querySelectorAll("nav a")[2].hidden = !data.costs.length;
  $("front").textContent = "";
  if (!points.length) { plot.replaceChildren(make("p", { class: "soft" }, "No costs were measured.")); return; }
  const cost = data.costs.find((one) => one.key === state.cost), unit = row(points[0]).unit;
  $("front").textContent = (names ? "Blue: the Pareto front, no other variant is at least as good in cost and mean and better in one" : cost.timed && cost.varies ?
    "Measured without a range, or on several devices, so that no variant counts as faster" : "The same for all variants") + "; red: the baseline; lines: 95% intervals" +
    (cost.timed ? ", and the slowest and the fastest run" : "") + ". A point opens its questions; arrow keys go from point to point.";

  const width = Math.max(plot.clientWidth, 280), height = Math.min(380, Math.max(300, width * 0.6));
  const left = 54, right = 12, top = 16, bottom = 46, steps = Math.max(1, Math.min(4, Math.floor((width - left) / 130)));
  const span = (values) => { const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) || 1) * 0.06; return [low - pad, high + pad]; };
  const [x0, x1] = span(points.flatMap((v) => ends(v, state.cost))), [y0, y1] = span(points.flatMap((v) => [row(v).low, row(v).high]));
  const x = (value) => left + (value - x0) / (x1 - x0) * (width - left - right), y = (value) => height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom);
  const at = (v) => [x(v.costs[state.cost]), y(row(v).mean)];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "accuracy against cost" });
  for (let i = 0; i <= 4; i++) {
    const value = y0 + (y1 - y0) * i / 4;
    svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }), draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, level(value, unit)));
  }
  for (let i = 0; i <= steps; i++) {
    const value = x0 + (x1 - x0) * i / steps, anchor = i === steps ? "end" : i ? "middle" : "start";
    svg.append(draw("text", { x: x(value), y: height - bottom + 18, "text-anchor": anchor }, big(value)));
  }
  const middle = (top + height - bottom) / 2;
  svg.append(draw("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, cost.label + (cost.less ? " (less is better)" : " (more is better)")),
    draw("text", { x: 12, y: middle, transform: `rotate(-90 12 ${middle})`, "text-anchor": "middle" }, unit === "points" ? "mean, points" : "mean"));
  const front = points.filter((v) => names?.includes(v.name)), named = new Set([...front, byName[data.baseline]].filter((v) => points.includes(v)));
  svg.append(draw("polyline", { class: "front", points: front.map((v) => at(v).join(",")).join(" ") }));

  const dots = points.map((v) => {
    const about = `${v.name}: ${level(row(v).mean, unit)} at ${big(v.costs[state.cost])}`, [cx, cy] = at(v);
    const dot = draw("circle", { cx, cy, r: 5.5, class: v.name === data.baseline ? "base" : front.includes(v) ? "on" : "", "data-variant": v.name, "data-key": `point:${v.name}`,
      tabindex: -1, role: "button", "aria-label": about }, draw("title", {}, about));
    dot.addEventListener("click", () => go({ b: v.name, page: "1", question: "" }));
    return dot;
  });
  const first = dots[points.indexOf(byName[data.baseline])] ?? dots[0];
  first.setAttribute("tabindex", 0);  // one stop of the Tab key; the arrows lead on
  dots.forEach((dot, i) => dot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go({ b: points[i].name, page: "1", question: "" }); }
    if (!step) return;
    event.preventDefault();
    const next = dots[(i + step + dots.length) % dots.length];
    dot.setAttribute("tabindex", -1); next.setAttribute("tabindex", 0); next.focus();
  }));
  for (const [i, v] of [...points.entries()].sort(([, a], [, b]) => named.has(a) - named.has(b))) {
    const [cx, cy] = at(v), [slow, fast] = ends(v, state.cost).map(x);
    svg.append(draw("line", { class: "whisker", x1: cx, x2: cx, y1: y(row(v).low), y2: y(row(v).high) }));
    if (slow < fast) svg.append(draw("line", { class: "whisker", x1: slow, x2: fast, y1: cy, y2: cy }));
    svg.append(dots[i]);
  }
  plot.replaceChildren(svg);
  labelPoints(svg, [...named].map((v) => [v.name, ...at(v)]), points.map(at), [left, 0, width, height - bottom]);
}

// Writes names beside their points where they cover nothing; the other names are shown when the pointer is over the point.
function labelPoints(svg, names, points, [left, top, right, bottom]) {
  const high = 14, taken = points.map(([cx, cy]) => [cx - 6, cy - 6, cx + 6, cy + 6]);
  for (const [name, cx, cy] of names) {
    const label = draw("text", { class: "name" }, name);
    svg.append(label);
    const wide = label.getComputedTextLength(), box = ([bx, by]) => [bx, by - high / 2, bx + wide, by + high / 2];
    const spots = [0, 16, 32, 48, 64].flatMap((away) => [[cx + 9, cy - away], [cx - 9 - wide, cy - away], [cx + 9, cy + away], [cx - 9 - wide, cy + away], [cx - wide / 2, cy - 14 - away], [cx - wide / 2, cy + 14 + away]]);
    const spot = spots.find((place) => { const [l, t, r, b] = box(place);
      return l >= left && r <= right && t >= top && b <= bottom && !taken.some(([l2, t2, r2, b2]) => l < r2 && l2 < r && t < b2 && t2 < b); });
    if (!spot) { label.remove(); continue; }
    taken.push(box(spot));
    label.setAttribute("x", spot[0]); label.setAttribute("y", spot[1] + 4);
  }
}
