"use strict";
// Nodes and numbers, the state in the address, and what is drawn when it changes. Tables, plot and questions follow in files of their own.
const $ = (id) => document.getElementById(id);
const fillNode = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
};
const make = (tag, attributes = {}, ...children) => fillNode(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) => fillNode(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const press = (label, key, action, attributes = {}) => {
  const button = make("button", { type: "button", "data-key": key, ...attributes }, label);
  button.onclick = (event) => { event.stopPropagation(); action(event); };
  return button;
};

const missing = (x) => x === null || x === undefined;
const percent = (x) => missing(x) ? "" : (100 * x).toFixed(1);
const digits = (x, count) => Math.abs(x) >= 1e7 ? x.toExponential(count - 1) : x.toLocaleString("en", { maximumSignificantDigits: count });
const level = (x, unit) => missing(x) ? "" : unit === "points" ? percent(x) : digits(x, 4);
const big = (x) => missing(x) ? "" : Math.abs(x) >= 1e9 ? (x / 1e9).toFixed(2) + " G" : Math.abs(x) >= 1e6 ? (x / 1e6).toFixed(1) + " M" :
  Math.abs(x) >= 1e4 ? (x / 1e3).toFixed(1) + " k" : x.toFixed(x < 100 ? 1 : 0);

async function unpack(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

// ---- the address is the state: what differs from the defaults stands behind its #
let data, byName, defaults, state, allowed;
const CONTROLS = ["variant", "task", "filter", "cost", "a", "b", "question_task", "find"];

function prepare(unpacked) {
  data = unpacked;
  byName = Object.fromEntries(data.variants.map((v) => [v.name, v]));
  const names = data.variants.map((v) => v.name), other = names.find((name) => name !== data.baseline) ?? data.baseline;
  const costs = data.costs.filter((one) => one.varies), cost = costs.find((one) => !one.key.endsWith("per_second")) ?? costs[0] ?? data.costs[0];
  defaults = { variant: other, tasks: "", task: data.tasks.at(-1), order: "-mean", filter: "", significant: "", open: [], cost: cost?.key ?? "",
    a: data.baseline, b: other, question_task: data.question_tasks[0] ?? "", show: "", find: "", page: "1", question: "" };
  allowed = { variant: names, task: data.tasks, cost: data.costs.map((one) => one.key), a: names, b: names, question_task: data.question_tasks, open: names };
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), read = { ...defaults }, unknown = [];
  for (const [key, value] of given) {
    if (!Object.hasOwn(defaults, key)) continue;
    if (allowed[key] && !allowed[key].includes(value)) unknown.push(`${key}=${value}`);
    else read[key] = Array.isArray(defaults[key]) ? [...read[key], value] : value;
  }
  $("message").textContent = unknown.length ? `Not in this comparison, and left out of the address: ${unknown.join(", ")}` : "";
  return read;
}

function addressOf(values) {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (String(value) !== String(defaults[key])) for (const each of [value].flat()) params.append(key, each);
  return "#" + params;
}

// ---- drawing: a part is drawn again if one of its values has changed
const PARTS = [[() => drawTasks(), ["variant", "tasks"]], [() => drawVariants(), ["task", "order", "filter", "significant", "open"]],
  [() => drawPlot(), ["task", "cost"]], [() => drawQuestions(), ["a", "b", "question_task", "show", "find", "page", "question"]]];

function focusKey(key) { if (key) document.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true }); }

function refresh(before) {
  const held = document.activeElement?.dataset?.key;
  for (const id of CONTROLS) if ($(id).value !== state[id]) $(id).value = state[id];
  $("significant").setAttribute("aria-pressed", state.significant === "yes");
  for (const [part, keys] of PARTS) if (!before || keys.some((key) => String(before[key]) !== String(state[key]))) part();
  if (held && document.activeElement?.dataset?.key !== held) focusKey(held);
}

function go(changes, { replace = false } = {}) {
  const before = state, task = changes.task;
  state = { ...state, ...changes };
  if (task && data.question_tasks.includes(task) && task !== before.question_task) state = { ...state, question_task: task, page: "1", question: "" };
  try { history[replace ? "replaceState" : "pushState"](null, "", addressOf(state)); } catch { /* a frame without an address of its own */ }
  refresh(before);
}

const ordering = (text) => [text.replace(/^-/, ""), text.startsWith("-")];
function sorted(rows, columns, order) {
  const [key, down] = ordering(order), column = columns.find((one) => one.key === key);
  if (!column) return rows;
  return [...rows].sort((x, y) => {
    const [u, w] = [column.value(x), column.value(y)];
    return u === w ? 0 : missing(u) ? 1 : missing(w) ? -1 : (u < w ? -1 : 1) * (down ? -1 : 1);
  });
}

function listen() {
  const options = (id, values, labels) => $(id).replaceChildren(...values.map((value, i) => make("option", { value }, (labels ?? values)[i])));
  for (const id of ["variant", "task", "a", "b", "question_task"]) options(id, id === "variant" ? allowed[id].filter((name) => name !== data.baseline) : allowed[id]);
  options("cost", allowed.cost, data.costs.map((one) => one.label));
  for (const id of ["variant", "task", "cost"]) $(id).onchange = () => go({ [id]: $(id).value });
  for (const id of ["a", "b", "question_task"]) $(id).onchange = () => go({ [id]: $(id).value, page: "1", question: id === "question_task" ? "" : state.question });
  $("filter").oninput = () => go({ filter: $("filter").value }, { replace: true });
  $("find").oninput = () => go({ find: $("find").value, page: "1", question: "" }, { replace: true });
  $("significant").onclick = () => go({ significant: state.significant ? "" : "yes" });
  for (const link of document.querySelectorAll("nav a, .skip")) link.onclick = (event) => {  // the address keeps the state
    event.preventDefault();
    const part = document.querySelector(link.getAttribute("href"));
    (part.querySelector(":scope > h2") ?? part).focus();
    part.scrollIntoView();
  };
  addEventListener("hashchange", () => {
    const before = state;
    state = readAddress();
    refresh(before);
    if (state.question && state.question !== before.question) reveal();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    const within = event.target.closest?.("section")?.id, searched = event.target.type === "search" && event.target.value ? event.target.id : null;
    if (searched) go({ [searched]: "" }, { replace: true });
    else if (state.question && within !== "variants-part") fold();
    else if (state.open.length) go({ open: [] });
  });
  let drawn = $("plot").clientWidth;
  addEventListener("resize", () => { if ($("plot").clientWidth !== drawn) { drawn = $("plot").clientWidth; drawPlot(); } });
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
}

async function start() {
  prepare(await unpack($("data").textContent.trim()));
  $("about").textContent = `${data.variants.length} variants, ${data.questions_total} questions; baseline: ${data.baseline}. ` +
    (data.missing.length ? `Results that are missing: ${data.missing.length}. ` : "") + data.created_by;
  $("notes").hidden = !data.notes.length;
  $("notes").open = data.notes.length < 4;
  $("notes").firstElementChild.textContent = data.notes.length === 1 ? "1 note" : `${data.notes.length} notes`;
  $("notes").lastElementChild.replaceChildren(...data.notes.map((note) => make("li", {}, note)));
  listen();
  drawLegend();
  state = readAddress();
  refresh(null);
  performance.mark("tables");
  await loaded[state.question_task];
  performance.mark("questions");
  if (state.question) await reveal();
  document.body.dataset.ready = "true";
}
