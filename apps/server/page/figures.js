// Live figures: from the answer that streams here, and from /metrics.json for the answers of all clients.
import { byId, bytes, decimal, duration, element, known, percent, plural, shape, speed } from "./dom.js";

const MAX_POINTS = 240; // of a chart
const SPEED_ROUNDS = 6; // rounds that a point of the speed is an average of
const MAX_ROUNDS = 120; // in the chart of draft lengths
const LEFT = 36; // px, for the numbers of the axis
const BELOW = 16; // px, for the numbers below bars
const NOTHING = "not measured yet";

// Reasons of the server in words; others are shown as they come.
const REASONS = {
  "fixed by user": "The draft length was fixed when the server was started.",
  "disabled by user": "Speculation is off: the server was started that way.",
  "no drafter": "Speculation is off: this model has no drafter.",
  learning: "Learning: too few tokens were compared to say more.",
  "speculation pays": "Speculation is on: it pays.",
  "no draft available": "Speculation is on: no drafter has a draft for this text now.",
  "verification costs more than it gains": "Speculation is off: checking drafts costs more here than it gains.",
  "too few draft tokens accepted": "Speculation is off: too few draft tokens were accepted in this text.",
  "speculation has lost time so far": "Speculation is off: it has lost time in this answer so far.",
  probing: "Probing: a few tokens are drafted to see whether it pays again.",
};

export class Figures {
  constructor() {
    this.now = { speed: null, gain: null, reason: null, isOn: null, perRound: null, firstToken: null, whose: null };
    this.speeds = []; // {x: seconds of generating, y: tokens/s}
    this.lengths = []; // draft tokens, a round each
    this.memory = []; // {x: seconds, y: bytes}
    this.budget = null; // bytes
    this.drafted = []; // draft tokens by position, of the whole server
    this.accepted = []; // those of them that were accepted
    this.statistics = null; // the last ones of the answer that streams here
    this.rounds = []; // the last of them: {tokens, seconds}
    this.roundCount = 0; // of that answer
    this.metrics = null; // the last ones of the server
    this.generatingSeconds = 0;
    this.isStreaming = false;
    this.isScheduled = false;
  }

  // --- the answer that streams here

  begin() {
    Object.assign(this, { isStreaming: true, statistics: null, rounds: [], roundCount: 0, sentAt: performance.now() });
    this.now.whose = "this answer";
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
    this.skipsNext = true; // the next metrics hold this answer
    if (timings) {
      this.#takeTimings(timings);
      this.now.firstToken = timings.ttft_ms ?? this.now.firstToken;
    }
    this.drawSoon();
  }

  // `statistics` are those of the answer so far: the round is their difference to the ones before.
  #takeRound(statistics) {
    const before = this.statistics ?? { draft_n: 0, predicted_n: 0, predicted_ms: 0 };
    const tokens = statistics.predicted_n - before.predicted_n;
    const seconds = (statistics.predicted_ms - before.predicted_ms) / 1000;
    addGrowth(this.drafted, statistics.drafted_at, before.drafted_at);
    addGrowth(this.accepted, statistics.accepted_at, before.accepted_at);
    this.statistics = statistics;
    this.roundCount += 1;
    if (tokens > 0 && seconds > 0) {
      keep(this.rounds, { tokens, seconds }, SPEED_ROUNDS);
      const sum = (key) => this.rounds.reduce((total, round) => total + round[key], 0);
      this.#addSpeed(sum("tokens") / sum("seconds"), seconds);
    }
    keep(this.lengths, statistics.draft_n - before.draft_n);
    this.#takeTimings(statistics);
    this.drawSoon();
  }

  #takeTimings(timings) {
    this.now.speed = timings.predicted_per_second ?? this.now.speed;
    this.now.gain = timings.gain ?? null;
    this.now.reason = timings.reason ?? this.now.reason;
    if (timings.speculation) this.now.isOn = timings.speculation === "on";
    if (this.roundCount && known(timings.predicted_n)) this.now.perRound = timings.predicted_n / this.roundCount;
  }

  #addSpeed(value, seconds) {
    this.generatingSeconds += seconds;
    keep(this.speeds, { x: this.generatingSeconds, y: value });
  }

  // --- all answers of the server

  // Takes /metrics.json. An answer that streams here is followed by itself.
  look(metrics, seconds) {
    if (known(metrics.memory_bytes)) keep(this.memory, { x: seconds, y: metrics.memory_bytes });
    this.budget = metrics.memory_budget_bytes ?? null;
    const before = this.metrics;
    this.metrics = metrics;
    if (!this.isStreaming) {
      this.drafted = sumPositions(metrics, "spec_decode_num_draft_tokens_per_pos_total");
      this.accepted = sumPositions(metrics, "spec_decode_num_accepted_tokens_per_pos_total");
      if (!before) this.#takePast(metrics);
      else if (!this.skipsNext) this.#takeOthers(before, metrics);
      this.skipsNext = false;
    }
    this.drawSoon();
  }

  // Takes what was counted before this page was opened. It is no point of a chart.
  #takePast(metrics) {
    this.#takeOthers({ models: {} }, metrics);
    if (this.now.whose) this.now.whose = "all answers so far";
    Object.assign(this, { speeds: [], lengths: [], generatingSeconds: 0 });
  }

  #takeOthers(before, metrics) {
    const growth = (name) => sumOf(metrics, name) - sumOf(before, name);
    const tokens = growth("generation_tokens_total");
    const seconds = growth("generation_seconds_total");
    if (tokens <= 0 || seconds <= 0) return;
    this.now.speed = tokens / seconds;
    this.#addSpeed(this.now.speed, seconds);
    const { gain, reason, speculation } = metrics.last ?? {};
    this.now.gain = gain ?? null;
    if (reason) Object.assign(this.now, { reason, isOn: speculation === "on" });
    const drafts = growth("spec_decode_num_drafts_total");
    if (drafts > 0) keep(this.lengths, growth("spec_decode_num_draft_tokens_total") / drafts);
    const first = growth("time_to_first_token_seconds_count");
    if (first > 0) this.now.firstToken = (growth("time_to_first_token_seconds_sum") / first) * 1000;
    this.now.perRound = drafts > 0 ? 1 + growth("spec_decode_num_accepted_tokens_total") / drafts : null;
    const answers = growth("time_per_output_token_seconds_count"); // that have ended; others still run
    this.now.whose = answers <= 1 ? "another client's answer" : `${answers} answers of other clients`;
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
    const { now } = this;
    const plain = known(now.speed) && known(now.gain) ? now.speed / now.gain : null;
    byId("speed").textContent = speed(now.speed);
    byId("speed-note").textContent = known(now.speed) ? now.whose ?? "" : NOTHING;
    byId("gain").textContent = decimal(now.gain, 2);
    byId("gain-note").textContent = plain ? `plain: ${speed(plain)} tokens/s` : NOTHING;
    if (now.reason) {
      const isOn = now.isOn ?? true;
      byId("reason").textContent = REASONS[now.reason] ?? `Speculation is ${isOn ? "on" : "off"}: ${now.reason}.`;
      byId("reason").dataset.on = String(isOn);
    }
    this.#drawCharts(plain);
    const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
    showTile("per-round", known(now.perRound) ? decimal(now.perRound, 1) : null);
    showTile("first-token", known(now.firstToken) ? duration(now.firstToken) : null);
    showTile("accepted", total(this.drafted) ? percent(total(this.accepted) / total(this.drafted)) : null);
  }

  #drawCharts(plain) {
    const hasSpeeds = this.speeds.length > 1;
    byId("plain-key").hidden = !plain || !hasSpeeds;
    if (!hasSpeeds) {
      drawEmpty(byId("speed-chart"), NOTHING);
    } else {
      const against = plain ? `, plain decoding ${speed(plain)}` : "";
      const label = `${speed(this.speeds.at(-1).y)} tokens per second now${against}`;
      const format = (value) => speed(value).replace(/\.0$/, "");
      drawLine(byId("speed-chart"), { points: this.speeds, reference: plain, format, label });
    }
    const lengths = this.lengths.slice(-MAX_ROUNDS);
    if (!lengths.length) drawEmpty(byId("length-chart"), NOTHING);
    else drawSteps(byId("length-chart"), lengths, `draft length of the last round: ${lengths.at(-1)}`);
    if (this.drafted.some((count) => count > 0)) drawBars(byId("acceptance-chart"), this.drafted, this.accepted);
    else drawEmpty(byId("acceptance-chart"), lengths.length ? "nothing was drafted" : NOTHING);
    if (this.memory.length < 2) {
      drawEmpty(byId("memory-chart"), NOTHING);
      return;
    }
    const used = bytes(this.memory.at(-1).y);
    byId("memory-note").textContent = this.budget ? `${used} of ${bytes(this.budget)} allowed` : used;
    const format = (value) => (value ? bytes(value).replace(" ", "") : "0");
    drawLine(byId("memory-chart"), { points: this.memory, format, label: `${used} in use` });
  }
}

function keep(list, value, most = MAX_POINTS) {
  list.push(value);
  if (list.length > most) list.shift();
}

function addGrowth(totals, counts = [], before = []) {
  counts.forEach((count, i) => { totals[i] = (totals[i] ?? 0) + count - (before[i] ?? 0); });
}

function sumOf(metrics, name) {
  return Object.values(metrics.models).reduce((total, model) => total + (model[name] ?? 0), 0);
}

function sumPositions(metrics, name) {
  const totals = [];
  for (const model of Object.values(metrics.models)) addGrowth(totals, model[name]);
  return totals;
}

function showTile(id, text) {
  byId(id).textContent = text ?? NOTHING;
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

// points: {x, y}, x rises; reference: a value that a dashed line marks.
function drawLine(host, { points, reference, format, label }) {
  const drawn = chart(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const top = ceiling(Math.max(...points.map((point) => point.y), reference ?? 0));
  const foot = height - 5;
  const span = points.at(-1).x - points[0].x || 1;
  const y = (value) => foot - (foot - 6) * (value / top);
  const at = points.map((point) => [LEFT + (width - LEFT - 4) * ((point.x - points[0].x) / span), y(point.y)]);
  for (const value of height < 80 ? [0, top] : [0, top / 2, top]) drawRule(svg, width, y(value), format(value));
  drawArea(svg, at, foot);
  if (reference) {
    svg.append(shape("line", { class: "reference", x1: LEFT, x2: width, y1: y(reference), y2: y(reference) }));
  }
  svg.append(shape("circle", { class: "dot", cx: at.at(-1)[0], cy: at.at(-1)[1], r: 3 }));
}

// values: one for each round.
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

// A bar for each position: the share of its draft tokens that were accepted.
function drawBars(host, drafted, accepted) {
  const shares = drafted.map((count, i) => (count ? (accepted[i] ?? 0) / count : 0));
  const drawn = chart(host, shares.map((share, i) => `position ${i + 1}: ${percent(share)}`).join(", "));
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const foot = height - BELOW;
  const slot = (width + 6) / Math.max(shares.length, 4);
  const wide = Math.min(slot - 6, 56);
  shares.forEach((share, i) => {
    const x = slot * i;
    const tall = (foot - 14) * share;
    const title = `${accepted[i] ?? 0} of ${plural(drafted[i], "draft token")} at position ${i + 1}`;
    svg.append(
      shape("rect", { class: "bar-back", x, y: 14, width: wide, height: foot - 14, rx: 4 }),
      shape("rect", { class: "bar-front", x, y: foot - tall, width: wide, height: tall, rx: 4 }, shape("title", {}, title)),
      shape("text", { x: x + wide / 2, y: 9, "text-anchor": "middle" }, String(Math.round(share * 100))),
      shape("text", { x: x + wide / 2, y: height - 3, "text-anchor": "middle" }, String(i + 1)),
    );
  });
}
