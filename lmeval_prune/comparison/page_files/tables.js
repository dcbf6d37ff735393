// ---- the tables of tasks and of variants; a row is what one variant has on one task
const isClear = (r) => !missing(r?.p_holm) && r.p_holm < 0.05;
const tone = (r) => isClear(r) ? ((r.difference > 0) !== r.lower_is_better ? "up" : "down") : null;
// Columns of both tables: their text, the smaller line below it, and what they are sorted by.
const measures = () => data.columns.map(({ key, label }) => ({ key, label, text: (r) => r.text[key][0], under: (r) => r.text[key][1] }));

function drawLegend() {
  const entries = data.columns.map((column) => [column.label, column.legend]);
  if (data.costs.some((cost) => cost.timed)) entries.push(["speeds", "the median of several runs, with the slowest and the fastest"]);
  $("legend").replaceChildren(...entries.flatMap(([label, meaning]) => [make("dt", {}, label), make("dd", {}, meaning)]));
}

function fillTable(table, columns, order, rows) {
  const [by, down] = ordering(state[order]);
  table.tHead.rows[0].replaceChildren(...columns.map((column) => {
    const first = column.key === by ? !down : column.key !== "name" && !column.key.startsWith("p");  // names and p: the lowest first
    return make("th", { scope: "col", "data-column": column.key, "aria-sort": column.key === by ? (down ? "descending" : "ascending") : null },
      press(column.label, `${order}:${column.key}`, () => go({ [order]: (first ? "-" : "") + column.key })));
  }));
  table.tBodies[0].replaceChildren(...rows);
}

const cells = (columns, source, r) => columns.map((column) => {
  const under = r && column.under?.(r);
  return make("td", { class: column.key === "difference" ? tone(r) : null }, column.text(source), under ? make("small", {}, under) : null);
});

function drawTasks() {
  const base = (task) => byName[data.baseline].rows[task];
  const columns = [{ key: "name", label: "task", value: (r) => r.task }, ...measures().map((column) => ({ ...column, value: (r) => r[column.key] })),
    { key: "baseline", label: "baseline", value: (r) => base(r.task).mean, text: (r) => level(base(r.task).mean, r.unit) },
    { key: "questions", label: "questions", value: (r) => r.questions, text: (r) => r.questions.toLocaleString("en") }];
  const shown = data.tasks.map((task) => byName[state.variant]?.rows[task]).filter((r) => r && !missing(r.difference));
  const isOnly = data.tasks.length < 2;
  $("tasks-part").hidden = document.querySelector("nav a").hidden = isOnly;
  $("against").textContent = `against the baseline, ${data.baseline}; a task opens its variants and questions`;
  fillTable($("tasks"), columns, "tasks", sorted(shown, columns, state.tasks).map((r) => {
    const name = make("td", {}, press(r.task, `task:${r.task}`, () => go({ task: r.task }), { class: "name" }),
      data.parts.includes(r.task) ? make("span", { class: "tag" }, "part") : null);
    const line = make("tr", { class: "row", "data-task": r.task }, name, ...cells(columns.slice(1), r, r));
    line.onclick = () => go({ task: r.task });
    return line;
  }));
}

const ends = (v, cost) => v.ranges[cost] && !missing(v.ranges[cost][0]) ? v.ranges[cost] : [v.costs[cost], v.costs[cost]];

function drawVariants() {
  const row = (v) => v.rows[state.task];
  const columns = [{ key: "name", label: "variant", value: (v) => v.name },
    ...measures().map((column) => ({ ...column, value: (v) => row(v)?.[column.key], text: (v) => row(v) ? column.text(row(v)) : "" })),
    ...data.costs.filter((cost) => cost.varies).map((cost) => ({ key: cost.key, label: cost.label, value: (v) => v.costs[cost.key],
      text: (v) => big(v.costs[cost.key]) + (ends(v, cost.key)[0] < ends(v, cost.key)[1] ? ` (${ends(v, cost.key).map(big).join(" – ")})` : "") }))];
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = sorted(data.variants.filter((v) => words.every((word) => v.name.toLowerCase().includes(word)) &&
    (!state.significant || v.name === data.baseline || isClear(row(v)))), columns, state.order);
  $("metric").textContent = (data.metrics[state.task] ?? []).join("; ");
  $("shown").textContent = shown.length === data.variants.length ? "" : `${shown.length} of ${data.variants.length}`;
  fillTable($("table"), columns, "order", shown.flatMap((v) => {
    const isOpen = state.open.includes(v.name), toggle = () => go({ open: isOpen ? state.open.filter((name) => name !== v.name) : [...state.open, v.name] });
    const tags = [[v.name === data.baseline, "baseline", "tag"], [row(v)?.chosen_on, `chosen on ${row(v)?.chosen_on} of these questions`, "tag warn"], [!row(v), "missing", "tag warn"]];
    const name = make("td", {}, press(v.name, `variant:${v.name}`, toggle, { class: "name", "aria-expanded": isOpen }),
      ...tags.filter(([holds]) => holds).map(([, text, kind]) => make("span", { class: kind }, text)));
    const line = make("tr", { class: "row" + (v.name === data.baseline ? " base" : ""), "data-variant": v.name }, name, ...cells(columns.slice(1), v, row(v)));
    line.onclick = toggle;
    return isOpen ? [line, detailOf(v, columns.length)] : [line];
  }));
}

function detailOf(v, width) {
  const commands = Object.entries(v.commands).filter(([task]) => state.task === data.pooled || state.task === task);
  const failures = data.missing.filter(([name]) => name === v.name);
  return make("tr", { class: "detail" }, make("td", { colspan: width }, make("div", {},
    ...(v.name === data.baseline ? [] : [press("its questions beside the baseline's", `beside:${v.name}`, () => { go({ a: data.baseline, b: v.name, page: "1", question: "" }); $("questions-title").focus(); })]),
    ...commands.flatMap(([task, command]) => [make("p", { class: "soft" }, `${task} `, press("copy", `copy:${v.name}:${task}`, copyNext, { class: "copy" })), make("pre", {}, command)]),
    v.about ? make("p", {}, v.about) : null, ...failures.map(([, task, reason]) => make("p", {}, `${task}: ${reason}`)))));
}

// Copies the text below a button, or marks it where the browser does not let a file copy.
function copyNext({ target }) {
  const text = target.parentElement.nextElementSibling, mark = () => { getSelection().selectAllChildren(text); target.textContent = "marked"; };
  if (!navigator.clipboard) mark();
  else navigator.clipboard.writeText(text.textContent).then(() => { target.textContent = "copied"; }, mark);
}
