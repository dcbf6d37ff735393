// ---- two variants' answers side by side; every question has a link, which opens it
const PAGE = 8, HEAD = 260, TAIL = 160;  // questions on a page; characters of a folded text
const KINDS = { binary: [["differ", ""], ["onlyA", "only A right"], ["onlyB", "only B right"], ["both", "both right"], ["neither", "neither right"], ["all", "all"]],
  figures: [["differ", ""], ["onlyA", "A better"], ["onlyB", "B better"], ["all", "all"]] };
const loaded = {};  // questions by task, or a promise of them
let folds = true, pageShown = 1, showsEvery = false;

// The blocks of questions follow the program, so that the tables can be read while the rest of a large page arrives.
async function load(task) {
  if (document.readyState === "loading") await new Promise((resolve) => addEventListener("DOMContentLoaded", resolve));
  loaded[task] = await unpack(document.querySelectorAll("script.block")[data.question_tasks.indexOf(task)].textContent.trim());
}

function drawQuestions() {
  const task = state.question_task, part = $("questions-part");
  if (!task) { part.hidden = true; return Promise.resolve(); }
  if (!loaded[task] || loaded[task] instanceof Promise) {
    part.setAttribute("aria-busy", "true");
    loaded[task] ??= load(task);
    return Promise.resolve(loaded[task]).then(() => { if (state.question_task === task) drawQuestions(); });
  }
  part.setAttribute("aria-busy", "false");
  const questions = loaded[task], held = document.activeElement?.dataset?.key, [u, w] = [questions.values[state.a], questions.values[state.b]];
  if (!u || !w) {
    $("counts").replaceChildren();
    $("questions").replaceChildren(make("p", { class: "soft" }, "One of the two variants has no results on this task."));
    for (const pager of document.querySelectorAll(".pager")) pager.replaceChildren();
    return Promise.resolve();
  }
  const { chosen, counts, show, differ } = select(questions, u, w), opened = questions.shown.findIndex((one) => one.id === state.question);
  const list = opened >= 0 && !chosen.includes(opened) ? u.map((_, i) => i) : chosen;  // a link leads to its question, whatever is filtered
  if (state.question && opened < 0) {
    $("message").textContent = `There is no question ${state.question} in ${task}.`;
    state = { ...state, question: "" };
  }
  const last = Math.max(1, Math.ceil(list.length / PAGE)), target = opened >= 0 ? Math.floor(list.indexOf(opened) / PAGE) + 1 : Number(state.page) || 1;
  pageShown = Math.max(1, Math.min(last, target));
  $("counts").replaceChildren(...KINDS[questions.binary ? "binary" : "figures"].map(([key, label]) =>
    press(`${label || differ}: ${counts[key]}`, `kind:${key}`, () => go({ show: key, page: "1", question: "" }), { "data-kind": key, "aria-pressed": (list === chosen ? show : "all") === key })));
  const numbers = list.slice((pageShown - 1) * PAGE, pageShown * PAGE);
  $("questions").replaceChildren(...(numbers.length ? numbers.map((i) => itemOf(questions, i, i === opened)) : [make("p", { class: "soft" }, "No question is like this.")]));
  document.querySelectorAll(".pager").forEach((pager, which) => pager.replaceChildren(...(last === 1 ? [] : [
    press("← before", `before:${which}`, () => turn(-1, which), { disabled: pageShown === 1 ? "" : null }),
    make("span", { class: "soft" }, `${(pageShown - 1) * PAGE + 1} – ${Math.min(list.length, pageShown * PAGE)} of ${list.length}`),
    press("next →", `next:${which}`, () => turn(1, which), { disabled: pageShown === last ? "" : null })])));
  if (held && document.activeElement?.dataset?.key !== held) focusKey(held);
  return Promise.resolve();
}

function turn(step, which) {
  go({ page: String(pageShown + step), question: "" });
  if (which === 1) $("counts").scrollIntoView();  // from the end of a page to the beginning of the next
  if (document.activeElement === document.body) $("questions-title").focus({ preventScroll: true });  // the last page: the button cannot be pressed again
}

const answerOf = (questions, name, i) => questions.texts && questions.answers[name] ? questions.texts[questions.answers[name][i]] : null;

// Returns the numbers of the questions to show, and how many there are of each kind.
function select(questions, u, w) {
  const { a, b } = state, kinds = KINDS[questions.binary ? "binary" : "figures"], hasAnswers = hasTexts(questions);
  const is = { all: () => true, differ: (i) => hasAnswers ? questions.answers[a][i] !== questions.answers[b][i] : u[i] !== w[i], both: (i) => u[i] > 0 && w[i] > 0,
    onlyA: (i) => questions.lower ? u[i] < w[i] : u[i] > w[i], onlyB: (i) => questions.lower ? u[i] > w[i] : u[i] < w[i], neither: (i) => !(u[i] > 0) && !(w[i] > 0) };
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (i) => [questions.shown[i].id, questions.shown[i].question, questions.shown[i].target, answerOf(questions, a, i), answerOf(questions, b, i)].join("\n").toLowerCase();
  const found = u.map((_, i) => i).filter((i) => !words.length || words.every((word) => text(i).includes(word)));
  const counts = Object.fromEntries(kinds.map(([key]) => [key, found.filter(is[key]).length])), first = counts.differ ? "differ" : "all";
  const show = kinds.some(([key]) => key === state.show) ? state.show : first;
  return { show, chosen: found.filter(is[show]), counts, differ: hasAnswers ? "answers differ" : "outcomes differ" };
}

const hasTexts = (questions) => Boolean(questions.texts?.some(Boolean) && questions.answers[state.a] && questions.answers[state.b]);  // a single scored text has a log-likelihood only
const outcome = (questions, value) => questions.binary ? (value ? "right" : "wrong") : missing(value) ? "" : digits(value, 6);
const isLong = (text) => text.length > HEAD + TAIL + 40 || text.split("\n").length > 9;

// The beginning of a long text and its end, where an answer comes to its result.
function folded(text) {
  if (!folds || !isLong(text)) return text;
  const head = text.slice(0, HEAD).split("\n").slice(0, 5).join("\n"), tail = text.slice(-TAIL).split("\n").slice(-3).join("\n");
  return `${head}\n[… ${text.length - head.length - tail.length} characters …]\n${tail}`;
}

function itemOf(questions, i, isOpen) {
  const about = questions.shown[i], cut = isOpen ? (text) => text : folded, sides = [], texts = [about.question ?? ""];
  const address = addressOf({ ...state, page: defaults.page, question: isOpen ? "" : about.id });
  const link = make("a", { href: address, "data-key": `question:${about.id}`, "aria-expanded": isOpen }, `${state.question_task} · ${about.id}`);
  if (isOpen) link.onclick = (event) => { event.preventDefault(); fold(); };
  for (const name of [state.a, state.b]) {
    const likelihood = questions.likelihoods?.[name]?.[i], value = questions.values[name][i], answer = answerOf(questions, name, i);
    const side = make("div", {}, make("div", { class: "soft wrap" }, [name, outcome(questions, value), likelihood].filter(Boolean).join(" · ")));
    if (hasTexts(questions) || !likelihood) {
      const note = questions.withheld ? "(not shown: the texts of this task are left out of this page)" : "(the answers are too long for this page; see the samples files)";
      const kind = questions.binary ? (value > 0 ? " right" : "") : " plain";
      texts.push(answer ?? "");
      side.append(make("div", { class: `answer text${kind}` }, cut(answer ?? note)));
    }
    sides.push(side);
  }
  const whole = !isOpen && texts.some(isLong) ? press("whole texts", `whole:${about.id}`, () => { location.hash = address; }, { class: "whole" }) : null;
  return make("div", { class: "item" + (isOpen ? " open" : ""), "data-question": about.id }, make("h3", {}, link),
    make("div", { class: "text" }, cut(about.question ?? `question ${about.id}`)), about.target ? make("p", { class: "soft wrap" }, `gold: ${about.target}`) : null,
    make("div", { class: "two" }, ...sides), whole, isOpen ? everyVariant(questions, i) : null);
}

// What came of a question in every variant; one of them takes the place of B.
function everyVariant(questions, i) {
  const names = data.variants.map((v) => v.name).filter((name) => questions.values[name]), right = names.filter((name) => questions.values[name][i] > 0).length;
  const details = make("details", { open: showsEvery ? "" : null }, make("summary", { "data-key": "every" }, questions.binary ? `${right} of ${names.length} variants are right` : "All variants"),
    make("ul", { class: "chips" }, ...names.map((name) => make("li", {}, press(`${name}: ${outcome(questions, questions.values[name][i])}`, `chip:${name}`, () => go({ b: name }), { "aria-pressed": name === state.b })))));
  details.ontoggle = () => { showsEvery = details.open; };
  return details;
}

async function reveal() {  // after a link was followed
  await loaded[state.question_task];
  await drawQuestions();
  document.querySelector(".item.open")?.scrollIntoView();
  focusKey(`question:${state.question}`);
}

function fold() {
  const key = `question:${state.question}`;
  go({ question: "", page: String(pageShown) });
  focusKey(key);
}

function printing(is) { folds = !is; $("legend").parentElement.open = is; drawQuestions(); }

start().catch((error) => {  // the report below stands for the page
  document.documentElement.className = "";
  document.querySelector("#report").prepend(make("p", {}, `This browser cannot open the page with questions and answers (${error}).`));
});
