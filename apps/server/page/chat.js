// The chat: settings, the conversation, the answer that streams, and the server's state every two seconds.
import { announce, byId, decimal, duration, element, known, percent, plural, speed } from "./dom.js";
import { Figures } from "./figures.js";
import { Rendered, drawLegend } from "./markdown.js";

const POLL_MS = 2000; // between two looks at the server
const FOLLOW_PX = 80; // from the end of the conversation; further up the page does not scroll by itself
const EXAMPLES = ["What does os.path.join do?", "Write code that reads a JSON file", "What does zip do?"];
const STATES = {
  ok: ["ready", "ready"],
  loading: ["wait", "loading"],
  draining: ["wait", "shutting down"],
  failed: ["bad", "could not load its model"],
};

// --- the server

let apiKey = ""; // kept in this variable and nowhere else

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = apiKey ? { ...options.headers, authorization: `Bearer ${apiKey}` } : options.headers;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok || path === "/health") return response; // its status is 503 while the server loads or leaves
  const body = await response.json().catch(() => null); // no JSON: the status tells
  throw new Refused(response.status, body?.error?.message ?? `the server answered ${response.status}`);
}

const getJson = async (path) => (await request(path)).json();

// Yields the chunks of a streamed answer.
async function* streamAnswer(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, include_draft: true } }),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(200, chunk.error.message);
    yield chunk;
  }
  throw new Refused(200, "the stream ended early");
}

async function* eventData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (held + decoder.decode(value, { stream: true })).split("\n");
      held = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- settings

let cards = []; // of the models that the server offers

function offerModels(found) {
  cards = found;
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...found.map((card) => element("option", { value: card.id }, card.id)));
  if (found.some((card) => card.id === chosen)) select.value = chosen;
  settingsChanged();
}

const modelName = () => byId("model").value || cards[0]?.id || "";

// The fields of a request without its messages.
function requestFields() {
  const fields = { model: modelName() };
  const temperature = byId("temperature").valueAsNumber;
  const maxTokens = byId("max-tokens").valueAsNumber;
  if (Number.isFinite(temperature)) fields.temperature = temperature;
  if (Number.isFinite(maxTokens)) fields.max_completion_tokens = maxTokens;
  if (byId("thinking").checked && !byId("thinking").disabled) fields.chat_template_kwargs = { enable_thinking: true };
  return fields;
}

function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function settingsChanged() {
  const name = modelName();
  byId("model-name").textContent = name;
  document.title = name ? `${name} · mlx_spec` : "mlx_spec";
  byId("thinking").disabled = cards.find((card) => card.id === name)?.thinks === false;
  const fields = requestFields();
  const parts = [fields.temperature ? `temperature ${fields.temperature}` : "greedy"];
  if (fields.max_completion_tokens) parts.push(`up to ${fields.max_completion_tokens} tokens`);
  if (fields.chat_template_kwargs) parts.push("thinking");
  if (systemMessages().length) parts.push("system prompt");
  byId("settings-summary").textContent = parts.join(" · ");
  byId("log").classList.toggle("origins", byId("highlight").checked);
  byId("legend").hidden = !byId("highlight").checked;
}

// --- one answer

class Answer {
  constructor(log, sources) {
    this.body = element("div", { class: "answer waiting" });
    this.turn = element("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" }, this.body);
    this.rendered = new Rendered(this.body);
    this.thinking = null;
    this.log = log;
    this.sources = sources; // that the legend has to explain
    this.isScheduled = false;
    log.append(this.turn);
  }

  // Takes the text of a chunk by origin; text without origins is the model's own.
  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = delta.content || delta.reasoning_content;
    if (!text) return;
    const target = delta.content ? this.rendered : this.#thinkingText();
    const spans = chunk.mlx_spec?.spans ?? [];
    const isWhole = spans.map((span) => span.text).join("") === text;
    for (const span of isWhole ? spans : [{ text, source: null, position: 0 }]) {
      if (!span.text) continue;
      this.sources.add(span.source);
      target.append(span.text, span.source, span.position ?? 0);
    }
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      this.draw();
    });
  }

  #thinkingText() {
    if (!this.thinking) {
      const inner = element("div", { class: "answer" });
      this.turn.prepend(element("details", { class: "thoughts", open: "" }, element("summary", {}, "Thinking"), inner));
      this.thinking = new Rendered(inner);
    }
    return this.thinking;
  }

  draw() {
    const isNearEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < FOLLOW_PX;
    this.rendered.draw();
    this.thinking?.draw();
    if (isNearEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  end({ timings, usage, reason, stopped, problem }) {
    this.draw();
    this.body.classList.remove("waiting");
    this.turn.setAttribute("aria-busy", "false");
    const facts = timings ? summary(timings, usage) : [];
    if (stopped) facts.push("stopped");
    if (reason === "length") facts.push("cut at the most tokens allowed");
    if (facts.length) this.turn.append(element("p", { class: "facts" }, facts.join(" · ")));
    if (problem) this.turn.append(element("p", { class: "problem", role: "alert" }, problem));
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function summary(timings, usage) {
  const facts = [];
  const count = timings.predicted_n ?? usage?.completion_tokens;
  if (known(count)) facts.push(plural(count, "token"));
  if (known(timings.predicted_per_second)) facts.push(`${speed(timings.predicted_per_second)} tokens/s`);
  if (known(timings.gain)) facts.push(`${decimal(timings.gain, 2)} × plain`);
  if (timings.draft_n) {
    facts.push(`${percent(timings.draft_n_accepted / timings.draft_n)} of ${timings.draft_n} draft tokens accepted`);
  }
  if (known(timings.ttft_ms)) facts.push(`first token after ${duration(timings.ttft_ms)}`);
  if (timings.cache_n) facts.push(`${plural(timings.cache_n, "prompt token")} reused`);
  return facts;
}

// --- the conversation

const figures = new Figures();
const sources = new Set(); // of all text so far
const log = byId("log");
const welcome = byId("welcome");
let messages = [];
let running = null; // AbortController of the answer that streams

function stop() {
  running?.abort();
}

function restart() {
  stop();
  messages = [];
  log.replaceChildren(welcome);
  byId("restart").hidden = true;
  byId("message").focus();
}

async function send(written) {
  const text = written.trim();
  if (!text || running) return;
  setMessage("");
  welcome.remove();
  log.append(element("article", { class: "turn user", "aria-label": "You" }, element("div", { class: "said" }, text)));
  log.scrollTop = log.scrollHeight;
  const turns = messages; // "New conversation" may replace them while the answer streams
  turns.push({ role: "user", content: text });
  setRunning(new AbortController());
  const answer = new Answer(log, sources);
  const end = await follow(answer, turns);
  answer.end(end);
  if (answer.rendered.text) {
    turns.push({ role: "assistant", content: answer.rendered.text });
  } else { // a question without an answer leaves the history
    turns.pop();
    if (end.problem && !byId("message").value) setMessage(text);
  }
  drawLegend(byId("legend"), sources);
  const count = end.usage?.completion_tokens;
  const complete = `Answer complete${count ? `, ${plural(count, "token")}` : ""}`;
  announce(end.problem ?? (end.stopped ? "Stopped" : complete));
  setRunning(null);
}

// Draws the chunks of one answer. Returns how it ended.
async function follow(answer, turns) {
  const end = { timings: null, usage: null, reason: null, stopped: false, problem: null };
  const { signal } = running;
  figures.begin();
  try {
    for await (const chunk of streamAnswer({ ...requestFields(), messages: [...systemMessages(), ...turns] }, signal)) {
      answer.take(chunk);
      figures.take(chunk);
      end.timings = chunk.timings ?? end.timings;
      end.usage = chunk.usage ?? end.usage;
      end.reason = chunk.choices?.[0]?.finish_reason ?? end.reason;
    }
  } catch (error) {
    if (signal.aborted) end.stopped = true;
    else end.problem = error instanceof Refused ? error.message : "The server cannot be reached. Is it still running?";
    if (error instanceof Refused && error.status === 401) askForKey();
  }
  figures.end(end.timings);
  return end;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  byId("restart").hidden = controller !== null || !log.querySelector(".turn");
  if (controller) announce("Answering");
  byId("message").focus();
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

function showState(kind, text) {
  byId("state").dataset.state = kind;
  byId("state").textContent = text;
}

function askForKey(problem = "") {
  needsKey = true;
  byId("key-form").hidden = false;
  byId("key-problem").textContent = problem;
}

async function listModels() {
  offerModels((await getJson("/v1/models")).data ?? []);
  isListed = true;
  needsKey = false;
  byId("key-form").hidden = true;
}

async function look() {
  try {
    const health = await getJson("/health");
    showState(...(STATES[health.status] ?? ["unknown", String(health.status)]));
    figures.drawRequests(health);
    if (needsKey) return;
    if (!isListed) await listModels();
    figures.look(await getJson("/metrics.json"), performance.now() / 1000);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    else if (!(error instanceof Refused)) showState("bad", "not reachable");
  }
}

async function poll() {
  if (!document.hidden) await look();
  setTimeout(poll, POLL_MS);
}

// --- the page

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(byId("message").value);
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(byId("message").value);
});
byId("message").addEventListener("input", growMessage);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("restart").addEventListener("click", restart);
byId("settings").addEventListener("input", settingsChanged);
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  apiKey = byId("key").value;
  try {
    await listModels();
    byId("key").value = "";
    byId("message").focus();
  } catch (error) {
    askForKey(error.message);
  }
});
byId("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(byId("endpoint").textContent);
    byId("copy").textContent = "Copied";
  } catch {
    byId("copy").textContent = "Copy by hand"; // there is no clipboard outside localhost and https
  }
  announce(byId("copy").textContent);
  setTimeout(() => { byId("copy").textContent = "Copy"; }, 1500);
});
for (const example of EXAMPLES) {
  const button = element("button", { type: "button", class: "quiet" }, example);
  button.addEventListener("click", () => send(example));
  byId("ideas").append(element("li", {}, button));
}
byId("endpoint").textContent = `${location.origin}/v1`;
byId("anthropic").textContent = location.origin;
drawLegend(byId("legend"), sources);
settingsChanged();
new ResizeObserver(() => figures.drawSoon()).observe(document.querySelector(".figures"));
byId("message").focus();
poll();
