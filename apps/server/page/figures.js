// Shows live figures by model: from the answer that streams here, and from /metrics.json for other clients.
import { byId, bytes, decimal, duration, element, known, percent, plural, shape, speed } from "./dom.js";
import { isModel, sourceWords } from "./origins.js";

const MAX_POINTS = 240; // of a chart
const SPEED_ROUNDS = 6; // each point of the speed is an average over this many rounds
const MAX_ROUNDS = 120; // in the chart of draft lengths
const MAX_POSITIONS = 12; // more bars would have no space for their numbers
const CANCEL_MS = 1000; // by then the server has counted an answer that was stopped
const LEFT = 36; // px, for the numbers of the axis
const BELOW = 16; // px, for the numbers below bars
const NOTHING = "not measured yet";

// The figures of one model: of the answer that streams here, or of the last one of another client.
class ModelFigures {
  constructor() {
    this.now = {}; // figures of one answer: speed, gain, least, most, reason, isOn, perRound, firstToken, accepted, whose
    this.speeds = []; // {x: seconds of generating, y: tokens/s}
    this.lengths = []; // draft tokens of each round
    this.drafters = {}; // name -> {drafted, accepted}: tokens by position, of all answers
    this.numbers = null; // this model's latest part of /metrics.json
    this.statistics = null; // latest statistics of the answer that streams here
    this.rounds = []; // its latest rounds: {tokens, seconds}
    this.generatingSeconds = 0;
    this.isStreaming = false;
    this.endedAt = 0; // performance.now() when that answer ended
    this.isCounted = true; // true once `numbers` includes that answer
  }

  begin() {
    Object.assign(this, { isStreaming: true, statistics: null, rounds: [], sentAt: performance.now() });
    this.now = { whose: "this answer" };
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta;
    if (this.sentAt && (delta?.content || delta?.reasoning_content)) {
      this.now.firstToken = performance.now() - this.sentAt; // the server's own figure replaces it
      this.sentAt = 0;
    }
    if (chunk.mlx_spec?.statistics) this.#takeRound(chunk.mlx_spec.statistics);
  }

  end(timings) {
    this.isStreaming = false;
    this.isCounted = false;
    this.endedAt = performance.now() + (timings ? 0 : CANCEL_MS);
    if (!timings) return;
    this.#takeTimings(timings);
    this.now.firstToken = timings.ttft_ms ?? this.now.firstToken;
  }

  // Takes the statistics of the answer so far. The round is the difference to the statistics before it.
  #takeRound(statistics) {
    const before = this.statistics ?? { drafted: 0, generated_tokens: 0, decode_seconds: 0 };
    const tokens = statistics.generated_tokens - before.generated_tokens;
    const seconds = statistics.decode_seconds - before.decode_seconds;
    for (const [name, { drafted_at: drafted, accepted_at: accepted }] of Object.entries(statistics.by_drafter)) {
      const totals = this.drafters[name] ??= { drafted: [], accepted: [] };
      addGrowth(totals.drafted, drafted, before.by_drafter?.[name]?.drafted_at);
      addGrowth(totals.accepted, accepted, before.by_drafter?.[name]?.accepted_at);
    }
    this.statistics = statistics;
    if (tokens > 0 && seconds > 0) {
      push(this.rounds, { tokens, seconds }, SPEED_ROUNDS);
      const sum = (key) => this.rounds.reduce((total, round) => total + round[key], 0);
      this.#addSpeed(sum("tokens") / sum("seconds"), seconds);
    }
    push(this.lengths, statistics.drafted - before.drafted);
    this.#takeTimings(statistics);
  }

  #takeTimings(timings) {
    this.#takeLast(timings);
    this.now.perRound = timings.acceptance_length || null;
    this.now.accepted = timings.drafted ? timings.accepted / timings.drafted : null;
  }

  // Takes figures that belong to one answer.
  #takeLast({ tokens_per_second: speed, known_gain: gain, gain_at_least: least, gain_at_most: most, reason_words: reason, speculation }) {
    Object.assign(this.now, { speed: speed || null, gain: gain ?? null, least: least ?? null, most: most ?? null });
    if (reason) Object.assign(this.now, { reason, isOn: speculation === "on" });
  }

  #addSpeed(value, seconds) {
    this.generatingSeconds += seconds;
    push(this.speeds, { x: this.generatingSeconds, y: value });
  }

  // Takes this model's part of /metrics.json. While an answer streams here, its own statistics are shown.
  look(numbers, askedAt) {
    if (askedAt < this.endedAt) return; // the server may not have counted the end of the last answer yet
    const before = this.numbers;
    this.numbers = numbers;
    if (this.isStreaming) return;
    const drafted = numbers.spec_decode_num_draft_tokens_per_pos_total ?? {};
    const accepted = numbers.spec_decode_num_accepted_tokens_per_pos_total ?? {};
    this.drafters = {};
    for (const name of Object.keys(drafted)) {
      this.drafters[name] = { drafted: [...drafted[name]], accepted: [...accepted[name] ?? []] };
    }
    if (before && this.isCounted) this.#takeOthers(before, numbers);
    else if (!before && numbers.last && !this.now.whose) { // older than this page: shown, but not in charts
      this.#takeLast(numbers.last);
      this.now.whose = "the last answer";
    }
    this.isCounted = true;
  }

  #takeOthers(before, numbers) {
    const growth = (name) => (numbers[name] ?? 0) - (before[name] ?? 0);
    const tokens = growth("generation_tokens_total");
    const seconds = growth("generation_seconds_total");
    if (tokens <= 0 || seconds <= 0) return;
    this.#addSpeed(tokens / seconds, seconds);
    const [drafts, drafted] = [growth("spec_decode_num_drafts_total"), growth("spec_decode_num_draft_tokens_total")];
    const accepted = growth("spec_decode_num_accepted_tokens_total");
    if (drafts > 0) push(this.lengths, drafted / drafts);
    const answers = growth("time_to_first_token_seconds_count"); // answers that have ended
    this.now = {
      whose: answers <= 1 ? "another client's answer" : `the last of ${answers} answers of other clients`,
      firstToken: answers > 0 ? (growth("time_to_first_token_seconds_sum") / answers) * 1000 : null,
      perRound: drafts > 0 ? growth("speculative_tokens_total") / drafts : null,
      accepted: drafted > 0 ? accepted / drafted : null,
    };
    this.#takeLast(numbers.last ?? {});
  }
}

export class Figures {
  constructor() {
    this.models = {}; // ModelFigures by name
    this.chosen = "";
    this.memory = []; // {x: milliseconds, y: bytes}
    this.budget = null; // bytes
    this.isScheduled = false;
    this.hasLooked = false;
  }

  #of(model) {
    return this.models[model] ??= new ModelFigures();
  }

  choose(model) {
    this.chosen = model;
    this.drawSoon();
  }

  begin(model) {
    this.#of(model).begin();
    this.#draw();
  }

  take(model, chunk) {
    this.#of(model).take(chunk);
    this.drawSoon();
  }

  end(model, timings) {
    this.#of(model).end(timings);
    this.drawSoon();
  }

  // Takes /metrics.json, requested at `askedAt` (performance.now()).
  look(metrics, askedAt) {
    if (known(metrics.memory_bytes)) push(this.memory, { x: askedAt, y: metrics.memory_bytes });
    this.budget = metrics.memory_budget_bytes ?? null;
    for (const [name, numbers] of Object.entries(metrics.models)) {
      if (this.hasLooked) this.#of(name).numbers ??= {}; // a model that is new there: all its counts are new
      this.#of(name).look(numbers, askedAt);
    }
    this.hasLooked = true;
    this.drawSoon();
  }

  // --- drawing

  drawRequests({ running, waiting }) {
    showTile("requests", known(running) ? `${running} running, ${waiting ?? 0} waiting` : null);
    byId("requests").classList.add("empty");
  }

  drawSoon() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      this.#draw();
    });
  }

  #draw() {
    const model = this.#of(this.chosen);
    const { now } = model;
    const plain = known(now.speed) && known(now.gain) ? now.speed / now.gain : null;
    byId("speed").textContent = speed(now.speed);
    byId("speed-note").textContent = now.whose ?? NOTHING;
    const [gain, unit, note] = gainWords(now);
    byId("gain").textContent = gain;
    byId("gain-unit").textContent = unit;
    byId("gain-note").textContent = plain ? `plain: ${speed(plain)} tokens/s` : note;
    byId("reason").textContent = now.reason
      ? `Drafts: ${now.reason}.`
      : model.isStreaming ? "No token of this answer yet." : `${this.chosen || "The model"} has not answered yet.`;
    byId("reason").dataset.on = now.reason ? String(now.isOn) : "unknown";
    this.#drawCharts(model, plain);
    showTile("per-round", known(now.perRound) ? decimal(now.perRound, 1) : null);
    showTile("first-token", known(now.firstToken) ? duration(now.firstToken) : null);
    showTile("accepted", known(now.accepted) ? percent(now.accepted) : null);
  }

  #drawCharts({ speeds, lengths: allLengths, drafters }, plain) {
    const hasSpeeds = speeds.length > 1;
    byId("plain-key").hidden = !plain || !hasSpeeds;
    if (!hasSpeeds) {
      drawEmpty(byId("speed-chart"), NOTHING);
    } else {
      const against = plain ? `, plain decoding ${speed(plain)}` : "";
      const label = `${speed(speeds.at(-1).y)} tokens per second now${against}`;
      const format = (value) => speed(value).replace(/\.0$/, "");
      drawLine(byId("speed-chart"), { points: speeds, reference: plain, format, label });
    }
    const lengths = allLengths.slice(-MAX_ROUNDS);
    if (!lengths.length) drawEmpty(byId("length-chart"), NOTHING);
    else drawSteps(byId("length-chart"), lengths, `draft length of the last round: ${lengths.at(-1)}`);
    this.#drawAcceptance(drafters, lengths.length ? "nothing was drafted" : NOTHING);
    if (this.memory.length < 2) {
      drawEmpty(byId("memory-chart"), NOTHING);
      return;
    }
    const used = bytes(this.memory.at(-1).y);
    byId("memory-note").textContent = this.budget ? `${used} of ${bytes(this.budget)} allowed` : used;
    const format = (value) => (value ? bytes(value).replace(" ", "") : "0");
    drawLine(byId("memory-chart"), { points: this.memory, format, label: `${used} in use` });
  }

  // Draws a chart for each drafter, because their acceptance rates have nothing in common.
  #drawAcceptance(drafters, otherwise) {
    const drafting = Object.entries(drafters).filter(([, { drafted }]) => drafted.some((count) => count > 0));
    const hosts = drafting.map(() => element("div", { class: "chart" }));
    const names = drafting.map(([name]) => element("p", { class: "aside" }, sourceWords(name)));
    byId("acceptance").replaceChildren(...hosts.flatMap((host, i) => [names[i], host]));
    const slots = Math.min(Math.max(4, ...drafting.map(([, { drafted }]) => drafted.length)), MAX_POSITIONS);
    drafting.forEach(([name, { drafted, accepted }], i) => drawBars(hosts[i], { name, drafted, accepted, slots }));
    if (drafting.length) return;
    const empty = element("div", { class: "chart" });
    drawEmpty(empty, otherwise);
    byId("acceptance").append(empty);
  }
}

// Returns the gain, or its bounds while it is not known: number, unit and note. Bounds are rounded away from it.
function gainWords({ gain, least, most, speed: now }) {
  if (known(gain)) return [decimal(gain, 2), gain > 1 ? "× faster" : gain < 1 ? "× plain speed" : "× plain speed, the same", ""];
  if (!known(least)) return [decimal(null, 2), "", known(now) ? "not known for these passes" : ""];
  const low = Math.floor(10 * least) / 10;
  if (low > 1) return [`≥ ${decimal(low, 1)}`, "× faster", "at least; more answers tell it closer"];
  return [`${decimal(low, 1)}–${decimal(Math.ceil(10 * most) / 10, 1)}`, "× plain speed", "more answers tell it closer"];
}

function push(list, value, most = MAX_POINTS) {
  list.push(value);
  if (list.length > most) list.shift();
}

function addGrowth(totals, counts = [], before = []) {
  counts.forEach((count, i) => { totals[i] = (totals[i] ?? 0) + count - (before[i] ?? 0); });
}

function showTile(id, text) {
  byId(id).textContent = text ?? "–";
  byId(id).classList.toggle("empty", text === null);
}

// --- charts

function drawEmpty(host, text) {
  host.replaceChildren(element("p", { class: "empty" }, text));
}

function chart(host, label) {
  const [width, height] = [host.clientWidth, host.clientHeight];
  if (!width || !height) return null;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  host.replaceChildren(svg);
  return { svg, width, height };
}

// Returns a round number at or above a value.
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((top) => top >= value * 0.999);
}

function drawRule(svg, width, y, text) {
  svg.append(
    shape("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }),
    shape("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, text),
  );
}

// Draws a line through points, and the area between it and `foot`.
function drawArea(svg, points, foot) {
  const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const area = `${path}L${points.at(-1)[0].toFixed(1)} ${foot}L${points[0][0].toFixed(1)} ${foot}Z`;
  svg.append(shape("path", { class: "area", d: area }), shape("path", { class: "line", d: path }));
}

// Draws `points` {x, y}, sorted by x. A dashed line marks the value `reference`.
function drawLine(host, { points, reference, format, label }) {
  const drawn = chart(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const values = points.map((point) => point.y).sort((a, b) => a - b);
  const most = Math.min(values.at(-1), 3 * values[values.length >> 1]); // 3 × median: outliers would flatten the rest
  const top = ceiling(Math.max(most, reference ?? 0));
  const foot = height - 5;
  const span = points.at(-1).x - points[0].x || 1;
  const y = (value) => foot - (foot - 6) * Math.min(value / top, 1);
  const at = points.map((point) => [LEFT + (width - LEFT - 4) * ((point.x - points[0].x) / span), y(point.y)]);
  for (const value of height < 80 ? [0, top] : [0, top / 2, top]) drawRule(svg, width, y(value), format(value));
  drawArea(svg, at, foot);
  if (reference) {
    svg.append(shape("line", { class: "reference", x1: LEFT, x2: width, y1: y(reference), y2: y(reference) }));
  }
  svg.append(shape("circle", { class: "dot", cx: at.at(-1)[0], cy: at.at(-1)[1], r: 3 }));
}

// Draws a step for each value.
function drawSteps(host, values, label) {
  const drawn = chart(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const top = Math.max(4, ...values);
  const foot = height - 5;
  const y = (value) => foot - (foot - 6) * (value / top);
  const wide = (width - LEFT) / Math.max(values.length, 24);
  for (const value of [0, Math.round(top / 2), top]) drawRule(svg, width, y(value), String(value));
  drawArea(svg, values.flatMap((value, i) => [[LEFT + wide * i, y(value)], [LEFT + wide * (i + 1), y(value)]]), foot);
}

// Draws a bar for each position: the accepted share of its draft tokens.
function drawBars(host, { name, drafted, accepted, slots }) {
  const shares = drafted.slice(0, MAX_POSITIONS).map((count, i) => (count ? (accepted[i] ?? 0) / count : 0));
  const drawn = chart(host, `${sourceWords(name)}: ${shares.map((share, i) => `position ${i + 1}: ${percent(share)}`).join(", ")}`);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const foot = height - BELOW;
  const slot = (width + 6) / slots;
  const wide = Math.min(slot - 6, 56);
  shares.forEach((share, i) => {
    const x = slot * i;
    const tall = (foot - 14) * share;
    const title = `${accepted[i] ?? 0} of ${plural(drafted[i], "draft token")} at position ${i + 1}`;
    const colour = `bar-front ${isModel(name) ? "" : name}`;
    svg.append(
      shape("rect", { class: "bar-back", x, y: 14, width: wide, height: foot - 14, rx: 4 }),
      shape("rect", { class: colour, x, y: foot - tall, width: wide, height: tall, rx: 4 }, shape("title", {}, title)),
      shape("text", { x: x + wide / 2, y: 9, "text-anchor": "middle" }, String(Math.round(share * 100))),
      shape("text", { x: x + wide / 2, y: height - 3, "text-anchor": "middle" }, String(i + 1)),
    );
  });
}
