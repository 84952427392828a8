// The column of live figures: what `Watch` knows, drawn.
import { bars, empty, line, steps } from "./charts.js";
import { byId, bytes, decimal, duration, known, percent, speed } from "./elements.js";

const NOTHING = "not measured yet";

// Reasons of the server in words; others are shown as they come.
const REASONS = {
  "fixed by user": [true, "The draft length was fixed when the server was started."],
  "disabled by user": [false, "Speculation is off: the server was started that way."],
  "no drafter": [false, "Speculation is off: this model has no drafter."],
  "warming up": [true, "Warming up: the first rounds measure what drafting costs here."],
  "speculation pays": [true, "Speculation is on: it pays."],
  "no draft to be had now": [true, "Speculation is on: no drafter has a draft for this text now."],
  "verification costs more than it gains": [false, "Speculation is off: checking drafts costs more here than it gains."],
  "too few draft tokens accepted": [false, "Speculation is off: too few draft tokens were accepted in this text."],
  "speculation has lost time so far": [false, "Speculation is off: it has lost time in this answer so far."],
  probing: [true, "Probing: a few tokens are drafted to see whether it pays again."],
};

let scheduled = false;

export function drawSoon(watch) {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw(watch);
  });
}

function draw(watch) {
  const { now } = watch;
  const plain = known(now.speed) && known(now.gain) ? now.speed / now.gain : null;
  byId("speed").textContent = speed(now.speed);
  byId("speed-note").textContent = known(now.speed) ? now.whose ?? "" : NOTHING;
  byId("gain").textContent = decimal(now.gain, 2);
  byId("gain-note").textContent = plain ? `plain: ${speed(plain)} tokens/s` : NOTHING;
  drawReason(now);
  drawCharts(watch, plain);
  tile("per-round", known(now.perRound) ? decimal(now.perRound, 1) : null);
  tile("first-token", known(now.firstToken) ? duration(now.firstToken) : null);
  tile("accepted", accepted(watch.totals));
}

function drawReason({ reason, on }) {
  if (!reason) return;
  const [usual, text] = REASONS[reason] ?? [on ?? true, `Speculation is ${on === false ? "off" : "on"}: ${reason}.`];
  byId("reason").textContent = text;
  byId("reason").dataset.on = String(on ?? usual);
}

function drawCharts(watch, plain) {
  const speeds = byId("speed-chart");
  if (watch.speeds.length < 2) empty(speeds, NOTHING);
  else line(speeds, { points: watch.speeds, reference: plain, format: (value) => speed(value).replace(/\.0$/, ""),
    label: `${speed(watch.speeds.at(-1).y)} tokens per second now${plain ? `, plain decoding ${speed(plain)}` : ""}` });
  byId("plain-key").hidden = !plain || watch.speeds.length < 2;
  const lengths = byId("length-chart");
  if (!watch.lengths.length) empty(lengths, NOTHING);
  else steps(lengths, { values: watch.lengths.slice(-120), label: `draft length of the last round: ${watch.lengths.at(-1)}` });
  const acceptance = byId("acceptance-chart");
  if (!watch.totals.tried.some((count) => count > 0)) empty(acceptance, watch.lengths.length ? "nothing was drafted" : NOTHING);
  else bars(acceptance, watch.totals);
  drawMemory(watch);
}

function drawMemory(watch) {
  const host = byId("memory-chart");
  if (watch.memory.length < 2) {
    empty(host, NOTHING);
    return;
  }
  const last = watch.memory.at(-1).y;
  byId("memory-note").textContent = watch.budget ? `${bytes(last)} of ${bytes(watch.budget)} allowed` : bytes(last);
  line(host, { points: watch.memory, format: (value) => (value ? bytes(value).replace(" ", "") : "0"), label: `${bytes(last)} in use` });
}

function accepted({ tried, got }) {
  const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
  return total(tried) ? percent(total(got) / total(tried)) : null;
}

function tile(id, text) {
  byId(id).textContent = text ?? NOTHING;
  byId(id).classList.toggle("empty", text === null);
}

export function drawRequests(health) {
  const { running, waiting } = health;
  tile("requests", known(running) ? `${running} running, ${waiting ?? 0} waiting` : null);
  byId("requests").classList.add("empty");
}
