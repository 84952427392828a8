// The chat: settings, the conversation, and the server's state every two seconds.
import { announce, byId, copyButton, element, keep, plural, recall } from "./dom.js";
import { Exchange, summary } from "./exchange.js";
import { Figures } from "./figures.js";
import { drawLegend } from "./markdown.js";
import { Refused, getJson, setKey, streamAnswer } from "./server.js";

const POLL_MS = 2000; // between two looks at the server
const WAITING_POLL_MS = 300; // while an answer has not begun
const MAX_KEPT_CHARS = 2_000_000; // of a conversation that survives a reload; browsers keep 5 MB
const KEPT = "mlx_spec.conversation"; // of this tab
const SWITCHES = "mlx_spec.switches"; // of this browser
const SETTINGS = ["model", "temperature", "max-tokens", "system"]; // ids of fields that a reload keeps
const EXAMPLES = ["What does os.path.join do?", "Write code that reads a JSON file", "What does zip do?"];
const STATES = {
  ok: ["ready", "ready"],
  loading: ["wait", "loading"],
  draining: ["wait", "shutting down"],
  failed: ["bad", "could not load its model"],
};

const figures = new Figures();
const sources = new Set(); // of all text so far
const log = byId("log");
const welcome = byId("welcome");
let exchanges = [];
let running = null; // {controller, exchange, phase} of the answer that streams

// --- settings

let cards = []; // of the models that the server offers

function offerModels(found) {
  const select = byId("model");
  const chosen = cards.length ? select.value : recall("sessionStorage", KEPT)?.settings?.model;
  cards = found;
  select.replaceChildren(...found.map((card) => element("option", { value: card.id }, card.id)));
  if (found.some((card) => card.id === chosen)) select.value = chosen;
  settingsChanged();
}

const modelName = () => byId("model").value;
const chosenCard = () => cards.find((card) => card.id === modelName());
const servedName = () => chosenCard()?.model ?? modelName(); // what an alias stands for

// The fields of a request without its messages.
function requestFields() {
  const fields = { model: modelName() };
  const temperature = byId("temperature").valueAsNumber;
  const maxTokens = byId("max-tokens").valueAsNumber;
  if (Number.isFinite(temperature)) fields.temperature = temperature;
  if (Number.isFinite(maxTokens)) fields.max_completion_tokens = maxTokens;
  if (byId("thinking").checked && chosenCard()?.thinks) fields.chat_template_kwargs = { enable_thinking: true };
  return fields;
}

function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function settingsChanged() {
  const name = modelName();
  document.title = name ? `${name} · mlx_spec` : "mlx_spec";
  byId("can-think").hidden = !chosenCard()?.thinks;
  figures.choose(servedName());
  const fields = requestFields();
  const parts = [fields.temperature ? `temperature ${fields.temperature}` : "greedy"];
  if (fields.max_completion_tokens) parts.push(`up to ${fields.max_completion_tokens} tokens`);
  if (fields.chat_template_kwargs) parts.push("thinking");
  if (systemMessages().length) parts.push("system prompt");
  byId("settings-summary").textContent = parts.join(" · ");
}

// --- the two switches

const switches = { tints: true, figures: true, ...recall("localStorage", SWITCHES) };

function setSwitch(name, on) {
  switches[name] = on;
  keep("localStorage", SWITCHES, switches);
  drawSwitches();
}

function drawSwitches() {
  byId("highlight").checked = switches.tints;
  log.classList.toggle("origins", switches.tints);
  byId("legend").hidden = !switches.tints || ![...sources].some((source) => source);
  byId("figures").hidden = !switches.figures;
  byId("show-figures").setAttribute("aria-expanded", String(switches.figures));
  figures.drawSoon();
}

// --- the conversation

function keepConversation() {
  const settings = Object.fromEntries(SETTINGS.map((id) => [id, byId(id).value]));
  let kept = exchanges;
  const fits = () => JSON.stringify(kept).length <= MAX_KEPT_CHARS;
  while (kept.length && !(fits() && keep("sessionStorage", KEPT, { settings, exchanges: kept }))) kept = kept.slice(1);
  if (!kept.length) keep("sessionStorage", KEPT, null);
}

function restoreConversation() {
  const kept = recall("sessionStorage", KEPT);
  try {
    for (const id of SETTINGS) if (kept?.settings[id] && id !== "model") byId(id).value = kept.settings[id];
    for (const one of kept?.exchanges ?? []) addExchange(one.question).restore(one);
  } catch { // of another version of this page
    restart();
  }
  drawLegend(byId("legend"), sources);
  byId("restart").hidden = !exchanges.length;
}

function addExchange(question) {
  welcome.remove();
  exchanges.push(new Exchange(log, question, sources, { retry, edit }));
  return exchanges.at(-1);
}

function stop() {
  running?.controller.abort();
}

function restart() {
  stop();
  exchanges = [];
  sources.clear();
  log.replaceChildren(welcome);
  byId("restart").hidden = true;
  keepConversation();
  drawSwitches();
  byId("message").focus();
}

function drop(exchange) {
  exchange.remove();
  exchanges = exchanges.filter((other) => other !== exchange);
}

function retry(exchange) {
  if (running) return;
  drop(exchange);
  send(exchange.question);
}

function edit(exchange) {
  if (running) return;
  drop(exchange);
  setMessage(exchange.question);
  setRunning(null);
}

async function send(written) {
  const text = written.trim();
  if (!text || running) return;
  const messages = [...systemMessages(), ...exchanges.flatMap((one) => one.messages()), { role: "user", content: text }];
  const fields = requestFields();
  const exchange = addExchange(text);
  exchange.model = servedName();
  setRunning({ controller: new AbortController(), exchange, phase: "waiting" });
  const end = await follow(exchange, { ...fields, messages });
  const facts = summary(end, fields.max_completion_tokens);
  if (facts.length && cards.length > 1) facts.unshift(fields.model);
  exchange.end(facts, end.problem);
  drawLegend(byId("legend"), sources);
  drawSwitches();
  const count = end.usage?.completion_tokens;
  const complete = `Answer complete${count ? `, ${plural(count, "token")}` : ""}`;
  announce(end.problem ?? (end.stopped ? "Stopped" : complete));
  setRunning(null);
  keepConversation();
  isListed = false; // a model that was loaded knows more of itself
}

// Draws the chunks of one answer. Returns how it ended.
async function follow(exchange, body) {
  const end = { timings: null, usage: null, reason: null, stopped: false, problem: null };
  const { signal } = running.controller;
  figures.begin(exchange.model);
  try {
    for await (const chunk of streamAnswer(body, signal)) {
      if (chunk.mlx_spec?.prompt) showReading(exchange, chunk.mlx_spec.prompt);
      else if (running?.exchange === exchange && chunk.mlx_spec) setPhase("answering");
      exchange.take(chunk);
      figures.take(exchange.model, chunk);
      end.timings = chunk.timings ?? end.timings;
      end.usage = chunk.usage ?? end.usage;
      end.reason = chunk.choices?.[0]?.finish_reason ?? end.reason;
    }
  } catch (error) {
    if (signal.aborted) end.stopped = true;
    else end.problem = error instanceof Refused ? error.message : "The server cannot be reached. Is it still running?";
    if (error instanceof Refused && error.status === 401) askForKey();
  }
  figures.end(exchange.model, end.timings);
  return end;
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
  byId("restart").hidden = answer !== null || !exchanges.length;
  log.classList.toggle("running", answer !== null);
  if (answer) announce("Answering");
  byId("message").focus();
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
}

// --- the server's state

let isListed = false;
let needsKey = false;
let polls = 0;
const server = { health: null, loading: null, waiting: 0 };

function drawState() {
  let [kind, text] = ["bad", "not reachable"];
  if (server.health) [kind, text] = STATES[server.health] ?? ["unknown", String(server.health)];
  if (kind !== "bad" && server.loading) [kind, text] = ["wait", `loading ${server.loading}`];
  else if (kind === "ready" && running) [kind, text] = ["busy", running.phase];
  byId("state").dataset.state = kind;
  byId("state").textContent = text;
  if (running?.phase !== "waiting") return;
  const queued = server.waiting ? "waiting for other answers" : "";
  running.exchange.showPhase(server.loading ? `loading ${server.loading} …` : queued);
}

function askForKey(problem = "") {
  needsKey = true;
  byId("key-form").hidden = false;
  byId("key-problem").textContent = problem;
}

async function listModels() {
  offerModels((await getJson("v1/models")).data ?? []);
  isListed = true;
  needsKey = false;
  byId("key-form").hidden = true;
}

async function look() {
  try {
    const health = await getJson("health");
    server.health = health.status;
    figures.drawRequests(health);
    if (!needsKey) {
      if (!isListed) await listModels();
      const askedAt = performance.now();
      const metrics = await getJson("metrics.json");
      Object.assign(server, { loading: metrics.loading, waiting: metrics.queue.waiting });
      figures.look(metrics, askedAt);
    }
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    else if (!(error instanceof Refused)) Object.assign(server, { health: null, loading: null, waiting: 0 });
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

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});

function submit() {
  if (running) return;
  const text = byId("message").value;
  setMessage("");
  send(text);
}

byId("message").addEventListener("input", growMessage);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("restart").addEventListener("click", restart);
byId("settings").addEventListener("input", settingsChanged);
byId("model").addEventListener("change", settingsChanged);
byId("highlight").addEventListener("change", (event) => setSwitch("tints", event.target.checked));
byId("show-figures").addEventListener("click", () => setSwitch("figures", !switches.figures));
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
addEventListener("pagehide", keepConversation);
for (const example of EXAMPLES) {
  const button = element("button", { type: "button", class: "quiet" }, example);
  button.addEventListener("click", () => send(example));
  byId("ideas").append(element("li", {}, button));
}
const base = new URL(".", location.href).href; // a proxy may put the page below a path
byId("endpoint").textContent = `${base}v1`;
byId("endpoint").after(copyButton(() => byId("endpoint").textContent, "Copy endpoint"));
byId("base-url").textContent = byId("endpoint").textContent;
byId("anthropic").textContent = base.slice(0, -1);
restoreConversation();
settingsChanged();
drawSwitches();
new ResizeObserver(() => figures.drawSoon()).observe(byId("figures"));
byId("message").focus();
poll();
