// The page: shows a conversation, sends its requests, and asks for the server's state every two seconds.
import { Attachments, asContent } from "./attachments.js";
import { Chats } from "./chats.js";
import { ContextMeter, countTokens } from "./context.js";
import { Conversation } from "./conversation.js";
import { announce, byId, copyButton, element, keep, known, plural, recall } from "./dom.js";
import { asQuestion, isNearEnd, summary } from "./exchange.js";
import { Figures } from "./figures.js";
import { named, prepareKeys } from "./keys.js";
import { drawLegend } from "./origins.js";
import { ModelsDialog } from "./models.js";
import { Palette } from "./palette.js";
import { Pictures } from "./pictures.js";
import { Refused, getJson, setKey, streamAnswer, streamRace } from "./server.js";
import {
  awayModel, chooseModel, chosenCard, currentSettings, hasSeveral, offerModels, prepareSettings, requestFields, servedName, showSettings, systemMessages,
} from "./settings.js";
import { isKept, onChange, problemOf as problemOfStore } from "./store.js";

const POLL_MS = 2000; // between two requests for the server's state
const RACE_TOKENS = 256; // in each answer of a race: enough turns to compare
const WAITING_POLL_MS = 300; // while an answer has not begun
const OPENED = "mlx_spec.opened"; // the conversation of this tab
const DRAFT = "mlx_spec.draft"; // the text that was typed and not sent
const SWITCHES = "mlx_spec.switches"; // of this browser
const EXAMPLES = {
  demo: ["What does os.path.join do?", "Write code that reads a JSON file", "What does zip do?"], // its one subject
  others: ["Explain how a rainbow forms", "Compare tea and coffee in a table", "Write a short poem about rain"],
};
const WIDE = { chats: matchMedia("(min-width: 75rem)").matches, figures: matchMedia("(min-width: 60rem)").matches };
const STATES = {
  ok: ["ready", "ready"],
  loading: ["wait", "loading"],
  stuck: ["bad", "a pass takes very long"],
  draining: ["wait", "shutting down"],
  failed: ["bad", "could not load its model"],
};
const QUEUED = { answers: "waiting for other answers", measuring: "waiting for a measurement of this machine" };

const figures = new Figures();
const attachments = new Attachments({ count: countText, changed: () => meter.update() });
const pictures = new Pictures(() => Boolean(chosenCard()?.images), (files) => attachments.add(files));
const meter = new ContextMeter(contextState);
const sources = new Set(); // origins of all text so far
const log = byId("log");
const welcome = byId("welcome");
const ideas = byId("ideas");
const getModel = byId("get-model"); // in the welcome, which is not always there
let running = null; // {controller, exchange, phase} of the answer that streams

// --- the switches

const switches = { tints: true, ...WIDE, ...recall("localStorage", SWITCHES) };

function setSwitch(name, on) {
  switches[name] = on;
  keep("localStorage", SWITCHES, switches);
  drawSwitches();
}

function drawSwitches() {
  byId("highlight").checked = switches.tints;
  log.classList.toggle("origins", switches.tints);
  byId("legend").hidden = !switches.tints || !conversation.record.leaf || ![...sources].some((source) => source);
  for (const name of ["chats", "figures"]) {
    byId(name).hidden = !switches[name];
    byId(`show-${name}`).setAttribute("aria-expanded", String(switches[name]));
  }
  figures.drawSoon();
}

// --- the conversation

const view = { log, sources, actions: { ask: askAgain, race, turn, goOn }, failed: sayNotKept };
const opened = new Map(); // conversations by id
let conversation = new Conversation(view);
const chats = new Chats({ open, find, removed, failed: sayNotKept });

async function find(record) {
  if (!opened.has(record.id)) {
    const loaded = new Conversation(view, record);
    await loaded.load();
    opened.set(record.id, loaded);
  }
  return opened.get(record.id);
}

// Shows the conversation of a record, or a new one for null. A streaming answer goes on in its conversation.
async function open(record) {
  show(record ? await find(record) : new Conversation(view));
  log.scrollTop = log.scrollHeight;
  if (!matchMedia("(min-width: 60rem)").matches) setSwitch("chats", false); // it covers the conversation
  byId("message").focus();
}

// Stops the answer that streams in a deleted conversation. After an undo its text so far is there.
function removed(record) {
  if (running?.exchange.conversation === record.id) stop();
}

// Another tab has changed a conversation, or deleted it.
async function changedElsewhere({ conversation: id, exchange }) {
  await chats.load();
  const isThere = chats.records.some((record) => record.id === id);
  if (opened.has(id) && isThere && exchange) await opened.get(id).takeOther(exchange);
  if (id !== conversation.record.id || conversation.isNew) return;
  if (isThere) {
    if (!byId("settings").contains(document.activeElement)) showSettings(conversation.record.settings);
    return;
  }
  if (running?.exchange.conversation === id) stop();
  opened.delete(id);
  open(null);
  announce(byId("not-kept").textContent = "The conversation was deleted in another tab.");
  byId("not-kept").hidden = false;
}

function show(next) {
  const isOther = next !== conversation;
  conversation = next;
  if (isOther) {
    showSettings(next.record.settings);
    settingsChanged();
  }
  opened.set(next.record.id, next);
  if (next.record.leaf) next.show();
  else log.replaceChildren(welcome);
  keep("sessionStorage", OPENED, next.record.leaf ? next.record.id : null);
  chats.choose(next.record);
  drawLegend(byId("legend"), sources);
  drawSwitches();
  drawLatest();
  meter.update();
}

function turn(exchange, step) {
  if (running) return;
  const before = exchange.asked.offsetTop - log.scrollTop;
  log.scrollTop = conversation.turnTo(exchange, step).asked.offsetTop - before;
  meter.update();
}

// Says why something was not kept; null takes that back.
function sayNotKept(error) {
  byId("not-kept").textContent = error ? problemOfStore(error) : "";
  byId("not-kept").hidden = !error;
  if (error) announce(byId("not-kept").textContent);
}

// Returns what the meter of the context shows.
function contextState() {
  const model = servedName();
  const question = byId("message").value.trim();
  const hasDraft = question || attachments.files.length || pictures.urls.length;
  const draft = { role: "user", content: asContent(question, pictures.urls, attachments.files) };
  const messages = hasDraft ? [...systemMessages(), ...conversation.history(), draft] : null;
  return { model, messages, used: conversation.last()?.tokens ?? null, most: chosenCard()?.context_length };
}

function countText(text) {
  return countTokens(servedName(), [{ role: "user", content: text }]);
}

function stop() {
  running?.controller.abort();
}

// Asks again in a new branch beside an exchange, which stays.
function askAgain(question, exchange) {
  if (!running) send(question, exchange.parent, exchange.images, exchange.files);
}

async function send(written, parent = conversation.record.leaf, images = [], files = []) {
  const text = written.trim();
  if (!(text || images.length || files.length) || running) return;
  conversation.record.settings = currentSettings();
  conversation.changed.settings = conversation.record.settings;
  const exchange = conversation.add(text, parent, images, files);
  const messages = [...systemMessages(), ...conversation.history(exchange), asQuestion(exchange)];
  show(conversation);
  log.scrollTop = log.scrollHeight;
  await stream(exchange, messages);
}

// Lets an answer that was cut go on where it ends.
async function goOn(exchange) {
  if (running) return;
  const begun = { role: "assistant", content: exchange.answer.text };
  const messages = [...systemMessages(), ...conversation.history(exchange), asQuestion(exchange), begun];
  exchange.reopen();
  await stream(exchange, messages, {
    continue_final_message: true, ...(chosenCard()?.thinks ? { chat_template_kwargs: { enable_thinking: false } } : {}),
  });
}

async function stream(exchange, messages, more = {}) {
  const mine = conversation;
  const fields = requestFields();
  exchange.model = servedName();
  setRunning({ controller: new AbortController(), exchange, phase: "waiting" });
  const end = await follow(exchange, { ...fields, ...more, messages });
  const facts = summary(end, fields.max_completion_tokens);
  if (facts.length && hasSeveral()) facts.unshift(fields.model);
  exchange.tokens = end.usage ? end.usage.prompt_tokens + end.usage.completion_tokens : null;
  exchange.canGoOn = end.stopped || end.reason === "length" || end.problem !== null;
  exchange.end(facts, end.problem);
  mine.ended(exchange);
  chats.draw();
  drawLegend(byId("legend"), sources);
  drawSwitches();
  const count = end.usage?.completion_tokens;
  const complete = `Answer complete${count ? `, ${plural(count, "token")}` : ""}`;
  announce(end.problem ?? (end.stopped ? "Stopped" : complete));
  setRunning(null);
  meter.update();
  isListed = false; // the list of models says more about a model once it was loaded
}

// Answers a question twice at the same time, with drafts and plain, and shows the race below its answer.
async function race(exchange) {
  if (running) return;
  const view = exchange.showRace();
  const messages = [...systemMessages(), ...conversation.history(exchange), asQuestion(exchange)];
  const fields = requestFields();
  const most = Math.min(fields.max_completion_tokens ?? RACE_TOKENS, RACE_TOKENS);
  const seed = fields.temperature && !known(fields.seed) ? { seed: 0 } : {}; // without a seed both answers would draw other tokens
  const controller = new AbortController();
  setRunning({ controller, exchange: { conversation: exchange.conversation, showPhase: (text) => view.showPhase(text) }, phase: "waiting" });
  let lines = ["The race was stopped."];
  try {
    for await (const turn of streamRace({ ...fields, ...seed, max_completion_tokens: most, messages }, controller.signal)) {
      setPhase("racing");
      view.take(turn);
      if (turn.verdict.length) lines = turn.verdict;
    }
  } catch (error) {
    if (!controller.signal.aborted) lines = [problemOf(error)];
  }
  view.end(lines.slice(-2)); // the rows say the rest
  if (!controller.signal.aborted) exchange.endRace(lines);
  announce(lines.slice(-2).join(". "));
  setRunning(null);
}

function problemOf(error) {
  if (error instanceof Refused && error.status === 401) askForKey();
  return error instanceof Refused ? error.message : "The server cannot be reached. Is it still running?";
}

// Streams one answer into an exchange. Returns what `summary` reads.
async function follow(exchange, body) {
  const end = { timings: null, usage: null, reason: null, stopped: false, problem: null };
  const { signal } = running.controller;
  let last = null; // figures of the answer so far: a stopped one keeps them
  figures.begin(exchange.model); // at once: no figure of another answer stays while this one waits
  try {
    await untilLoaded(signal);
    for await (const chunk of streamAnswer(body, signal)) {
      if (chunk.mlx_spec?.prompt) showReading(exchange, chunk.mlx_spec.prompt);
      else if (running?.exchange === exchange && chunk.mlx_spec) setPhase("answering");
      exchange.take(chunk);
      figures.take(exchange.model, chunk);
      last = chunk.mlx_spec?.statistics ?? last;
      end.timings = chunk.timings ?? end.timings;
      end.usage = chunk.usage ?? end.usage;
      end.reason = chunk.choices?.[0]?.finish_reason ?? end.reason;
    }
  } catch (error) {
    if (signal.aborted) end.stopped = true;
    else end.problem = problemOf(error);
  }
  figures.end(exchange.model, end.timings);
  return { ...end, timings: end.timings ?? last };
}

// A message that comes before the first model is loaded waits for it.
async function untilLoaded(signal) {
  while ((await getJson("page/health", { signal })).status === "loading") {
    await new Promise((resolve) => { setTimeout(resolve, WAITING_POLL_MS); });
  }
}

function showReading(exchange, { prompt_n: total, cached_n: cached, read_n: read }) {
  setPhase("reading");
  const count = (total - cached).toLocaleString("en");
  exchange.showPhase(`reading ${count} tokens`, (read - cached) / Math.max(total - cached - 1, 1));
}

function setPhase(phase) {
  if (!running || running.phase === phase) return;
  running.phase = phase;
  drawState();
}

function setRunning(answer) {
  running = answer;
  byId("send").hidden = answer !== null;
  byId("stop").hidden = answer === null;
  log.classList.toggle("running", answer !== null);
  if (answer) announce("Answering");
  byId("message").focus({ preventScroll: true });
  drawState();
  poll();
}

function setMessage(text) {
  byId("message").value = text;
  growMessage();
}

function growMessage() {
  const box = byId("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
  keep("localStorage", DRAFT, box.value || null);
  meter.update();
}

function drawLatest() {
  byId("latest").hidden = isNearEnd(log);
}

// --- the server's state

let isListed = false;
let needsKey = false;
let polls = 0;
const server = { health: null, loading: null, waitsFor: null };

function drawState() {
  let [kind, text] = ["bad", "not reachable"];
  if (server.health) [kind, text] = STATES[server.health] ?? ["unknown", String(server.health)];
  if (kind !== "bad" && server.loading) [kind, text] = ["wait", `loading ${server.loading}`];
  else if (kind === "ready" && running) [kind, text] = ["busy", running.phase];
  byId("state").dataset.state = kind;
  byId("state").textContent = text;
  if (running?.phase !== "waiting") return;
  const queued = QUEUED[server.waitsFor] ?? "";
  const loading = server.loading ?? (server.health === "loading" ? "the model" : null);
  running.exchange.showPhase(loading ? `loading ${loading} …` : queued);
}

function askForKey(problem = "") {
  needsKey = true;
  byId("key-form").hidden = false;
  byId("key-problem").textContent = problem;
}

async function listModels() {
  offerModels((await getJson("v1/models")).data ?? []);
  settingsChanged();
  isListed = true;
  needsKey = false;
  byId("key-form").hidden = true;
}

async function look() {
  try {
    const health = await getJson("page/health");
    server.health = health.status;
    figures.drawRequests(health);
    if (!needsKey) {
      if (!isListed) await listModels();
      const askedAt = performance.now();
      const metrics = await getJson("metrics.json");
      Object.assign(server, { loading: metrics.loading, waitsFor: metrics.queue.waits_for });
      figures.look(metrics, askedAt);
    }
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    else if (!(error instanceof Refused)) Object.assign(server, { health: null, loading: null, waitsFor: null });
  }
  drawState();
}

async function poll() {
  const mine = polls += 1;
  if (!document.hidden) await look();
  const next = () => { if (polls === mine) poll(); }; // unless another call has taken over
  setTimeout(next, running?.phase === "waiting" ? WAITING_POLL_MS : POLL_MS);
}

// --- the page

function submit() {
  if (running) return;
  const text = byId("message").value;
  setMessage("");
  send(text, conversation.record.leaf, pictures.take(), attachments.take());
}

function settingsChanged() {
  byId("away").hidden = !awayModel();
  byId("away-words").textContent = `The model of this conversation, ${awayModel()}, is not loaded: ${servedName()} would answer.`;
  byId("load-away").hidden = !models.isOffered;
  getModel.hidden = !models.isOffered || servedName() !== "demo";
  byId("files").accept = chosenCard()?.images ? "" : "text/*,application/pdf,application/json,.md,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.toml,.yaml,.yml,.csv,.tex";
  pictures.draw();
  figures.choose(servedName());
  meter.update();
  const examples = EXAMPLES[servedName()] ?? EXAMPLES.others;
  ideas.replaceChildren(...examples.map((example) => {
    const button = element("button", { type: "button", class: "quiet" }, example);
    button.addEventListener("click", () => send(example));
    return element("li", {}, button);
  }));
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("message").addEventListener("input", growMessage);
const focusMessage = () => byId("message").focus();
const newChat = () => open(null);
const editLast = () => { if (!running) conversation.last()?.edit(); };
const palette = new Palette({
  commands: [
    ["New chat", newChat, named("⇧ O")],
    ["Edit the last question", editLast, "↑"],
    ["Write a message", focusMessage, "/"],
    ["Stop the answer", stop, "Esc"],
    ["Models: load, fetch, remove", () => models.show()],
    ["Settings, system prompt, presets", () => { byId("settings").open = true; byId("system").focus(); }],
    ["Attach a file", () => byId("files").click()],
    ["Import a conversation", () => byId("import-files").click()],
    ["Live figures", () => setSwitch("figures", !switches.figures)],
  ],
  records: () => chats.records,
  open,
});
const models = new ModelsDialog({
  chosen: async (name) => {
    await listModels();
    chooseModel(name);
  },
  changed: () => { isListed = false; },
});
byId("load-away").addEventListener("click", () => models.load(awayModel()));
byId("get-one").addEventListener("click", () => models.show());
const search = () => palette.show();
byId("search").addEventListener("click", search);
prepareKeys({ search, newChat, editLast, focus: focusMessage, stop });
byId("stop").addEventListener("click", stop);
byId("highlight").addEventListener("change", (event) => setSwitch("tints", event.target.checked));
for (const name of ["chats", "figures"]) {
  byId(`show-${name}`).addEventListener("click", () => setSwitch(name, !switches[name]));
}
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  try {
    await listModels();
    byId("key").value = "";
    byId("message").focus();
  } catch (error) {
    askForKey(error.message);
  }
});
byId("latest").addEventListener("click", () => { log.scrollTop = log.scrollHeight; });
log.addEventListener("scroll", drawLatest, { passive: true });
new MutationObserver(drawLatest).observe(log, { childList: true, subtree: true });
onChange(changedElsewhere);

const base = new URL(".", location.href).href; // a proxy may put the page below a path
byId("endpoint").textContent = `${base}v1`;
byId("endpoint").after(copyButton(() => byId("endpoint").textContent, "Copy endpoint"));
byId("base-url").textContent = byId("endpoint").textContent;
byId("anthropic").textContent = base.slice(0, -1);
prepareSettings(() => {
  if (!conversation.isNew) conversation.set({ settings: currentSettings() });
  settingsChanged();
});
showSettings(null);
settingsChanged();
setMessage(recall("localStorage", DRAFT) ?? "");
const before = recall("sessionStorage", OPENED);
show(conversation);
new ResizeObserver(() => figures.drawSoon()).observe(byId("figures"));
byId("message").focus();
await chats.load();
const last = chats.records.find(({ id }) => id === before);
if (last) await open(last);
if (!await isKept()) sayNotKept(new DOMException("", "UnknownError"));
models.prepare().then(settingsChanged);
poll();
