// What is known of the server: from the answer that streams here, and from its counters for everybody's.
import { Counters } from "./counters.js";
import { known } from "./elements.js";

const KEPT = 240; // points of a chart
const WINDOW = 6; // rounds that a point of the speed is an average of

export class Watch {
  constructor(changed) {
    this.changed = changed;
    this.now = { speed: null, gain: null, reason: null, on: null, perRound: null, firstToken: null, whose: null };
    this.speeds = []; // {x: seconds of generating, y: tokens/s}
    this.lengths = []; // draft tokens, a round each
    this.memory = []; // {x: seconds, y: bytes}
    this.budget = null;
    this.totals = { tried: [], got: [] }; // by position, of the whole server
    this.own = null; // the last statistics of the answer that streams here
    this.rounds = []; // the last of them: {tokens, seconds}
    this.count = 0; // rounds of that answer
    this.counters = null;
    this.generating = 0; // seconds
    this.streaming = false;
  }

  began() {
    Object.assign(this, { streaming: true, own: null, rounds: [], count: 0, sent: performance.now() });
    this.now.whose = "this answer";
  }

  chunk(chunk) {
    const choice = chunk.choices?.[0]?.delta;
    if (this.sent && (choice?.content || choice?.reasoning_content)) {
      this.now.firstToken = performance.now() - this.sent; // the server's own figure replaces it
      this.sent = 0;
    }
    if (chunk.mlx_spec?.statistics) this.#round(chunk.mlx_spec.statistics);
  }

  ended(timings) {
    this.streaming = false;
    this.skip = true; // the next look at the counters holds this answer
    if (timings) {
      this.#figures(timings);
      this.now.firstToken = timings.ttft_ms ?? this.now.firstToken;
    }
    this.changed();
  }

  // `statistics` are those of the answer so far: the round is what they differ by.
  #round(statistics) {
    const before = this.own ?? { draft_n: 0, predicted_n: 0, predicted_ms: 0 };
    const tokens = statistics.predicted_n - before.predicted_n;
    const seconds = (statistics.predicted_ms - before.predicted_ms) / 1000;
    this.#positions(statistics, this.own);
    this.own = statistics;
    this.count += 1;
    if (tokens > 0 && seconds > 0) {
      this.rounds.push({ tokens, seconds });
      if (this.rounds.length > WINDOW) this.rounds.shift();
      const total = (key) => this.rounds.reduce((sum, round) => sum + round[key], 0);
      this.#speed(total("tokens") / total("seconds"), seconds);
    }
    keep(this.lengths, statistics.draft_n - before.draft_n);
    this.#figures(statistics);
    this.changed();
  }

  #figures(timings) {
    this.now.speed = timings.predicted_per_second ?? this.now.speed;
    this.now.gain = timings.gain ?? null;
    this.now.reason = timings.reason ?? this.now.reason;
    if (timings.speculation) this.now.on = timings.speculation === "on";
    if (this.count && known(timings.predicted_n)) this.now.perRound = timings.predicted_n / this.count;
  }

  #positions(statistics, before) {
    const more = (name, totals) => (statistics[name] ?? []).forEach((count, i) => {
      totals[i] = (totals[i] ?? 0) + count - (before?.[name]?.[i] ?? 0);
    });
    more("drafted_at", this.totals.tried);
    more("accepted_at", this.totals.got);
  }

  #speed(value, seconds) {
    this.generating += seconds;
    keep(this.speeds, { x: this.generating, y: value });
  }

  // A look at the counters. They move while answers stream; one that streams here is followed by itself.
  look(counters, seconds) {
    const active = counters.sum("memory_bytes", { kind: "active" });
    if (known(active)) keep(this.memory, { x: seconds, y: active });
    this.budget = counters.sum("memory_bytes", { kind: "budget" }) ?? null;
    const before = this.counters;
    this.counters = counters;
    if (this.streaming) {
      this.changed();
      return;
    }
    this.totals.tried = counters.positions("spec_decode_num_draft_tokens_per_pos_total");
    this.totals.got = counters.positions("spec_decode_num_accepted_tokens_per_pos_total");
    if (!before) this.#past(counters);
    else if (!this.skip) this.#others(before, counters);
    this.skip = false;
    this.changed();
  }

  // What was counted before this page was opened. It is no point of a chart.
  #past(counters) {
    this.#others(new Counters(""), counters);
    if (this.now.whose) this.now.whose = "all answers so far";
    Object.assign(this, { speeds: [], lengths: [], generating: 0 });
  }

  #others(before, counters) {
    const more = (name) => (counters.sum(name) ?? 0) - (before.sum(name) ?? 0);
    const tokens = more("generation_tokens_total");
    const spent = more("generation_seconds_total");
    if (tokens <= 0 || spent <= 0) return;
    const answers = more("time_per_output_token_seconds_count"); // that have ended; others still run
    const each = spent / tokens;
    this.now.speed = 1 / each;
    this.#speed(this.now.speed, tokens * each);
    this.now.gain = counters.sum("gain") && counters.rows("gain").length === 1 ? counters.sum("gain") : null;
    const why = counters.rows("reason").find((row) => row.value === 1);
    if (why) Object.assign(this.now, { reason: why.labels.reason, on: null });
    const drafts = more("spec_decode_num_drafts_total");
    if (drafts > 0) keep(this.lengths, more("spec_decode_num_draft_tokens_total") / drafts);
    const first = more("time_to_first_token_seconds_count");
    if (first > 0) this.now.firstToken = (more("time_to_first_token_seconds_sum") / first) * 1000;
    this.now.perRound = drafts > 0 ? 1 + more("spec_decode_num_accepted_tokens_total") / drafts : null;
    this.now.whose = answers <= 1 ? "another client's answer" : `${answers} answers of other clients`;
  }
}

function keep(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}
