// A question and its answer: drawn while it streams, and kept for a reload.
import { copyButton, decimal, duration, element, known, percent, plural, speed } from "./dom.js";
import { Rendered } from "./markdown.js";

const FOLLOW_PX = 80; // from the end of the conversation; further up the page does not scroll

export class Exchange {
  // The actions are called with this exchange; `sources` gets the origins that the legend has to explain.
  constructor(log, question, sources, actions) {
    Object.assign(this, { log, question, sources, actions, model: "", facts: [], problem: null, hasEnded: false });
    this.asked = element("article", { class: "turn user", "aria-label": "You" },
      element("div", { class: "said" }, question));
    this.body = element("div", { class: "answer waiting" });
    this.status = element("div", { class: "phase" });
    this.turn = element("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.body, this.status);
    this.answer = new Rendered(this.body);
    this.thinking = null;
    this.isScheduled = false;
    log.append(this.asked, this.turn);
    log.scrollTop = log.scrollHeight;
  }

  // Says what happens before the first text; `share` of it is done, if that is known.
  showPhase(text, share = null) {
    if (this.answer.text || this.thinking) return;
    if (this.status.textContent !== text) {
      const bar = share === null ? [] : [element("progress", { max: "1", value: "0", "aria-label": text })];
      this.status.replaceChildren(text, ...bar);
      this.body.hidden = Boolean(text);
    }
    const bar = this.status.querySelector("progress");
    if (bar && share !== null) bar.value = share;
  }

  // Takes the text of a chunk by origin; text without origins is the model's own.
  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = delta.content || delta.reasoning_content;
    if (!text) return;
    this.showPhase("");
    const target = delta.content ? this.answer : this.#thinkingText();
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
    this.answer.draw();
    this.thinking?.draw();
    if (isNearEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  end(facts, problem) {
    Object.assign(this, { facts, problem, hasEnded: true });
    this.showPhase("");
    this.draw();
    this.body.classList.remove("waiting");
    this.body.hidden = !this.answer.text;
    this.turn.setAttribute("aria-busy", "false");
    this.status.replaceWith(
      ...(problem ? [element("p", { class: "problem", role: "alert" }, problem)] : []),
      element("div", { class: "foot" },
        ...(facts.length ? [element("p", { class: "facts" }, facts.join(" · "))] : []),
        element("div", { class: "actions" },
          ...(this.answer.text ? [copyButton(() => this.answer.text, "Copy answer")] : []),
          this.#button("Retry", this.actions.retry), this.#button("Edit", this.actions.edit))),
    );
    this.log.scrollTop = this.log.scrollHeight;
  }

  #button(text, action) {
    const button = element("button", { type: "button", class: "small again" }, text);
    button.addEventListener("click", () => action(this));
    return button;
  }

  remove() {
    this.asked.remove();
    this.turn.remove();
  }

  messages() { // a question without an answer is not part of the history
    if (!this.answer.text) return [];
    return [{ role: "user", content: this.question }, { role: "assistant", content: this.answer.text }];
  }

  toJSON() {
    const { question, model, answer, thinking, facts, problem, hasEnded } = this;
    return { question, model, answer, thinking, facts, problem: hasEnded ? problem : "The answer was cut off by a reload." };
  }

  restore({ model, answer, thinking, facts, problem }) {
    this.model = model;
    if (thinking) this.#thinkingText().restore(thinking);
    this.answer.restore(answer);
    for (const { source } of [...this.answer.runs, ...(this.thinking?.runs ?? [])]) this.sources.add(source);
    this.end(facts, problem);
  }
}

// Returns what stands below an answer.
export function summary({ timings, usage, reason, stopped }, limit) {
  const facts = [];
  const count = timings?.predicted_n ?? usage?.completion_tokens;
  if (known(count)) facts.push(plural(count, "token"));
  if (known(timings?.predicted_per_second)) facts.push(`${speed(timings.predicted_per_second)} tokens/s`);
  if (known(timings?.gain)) facts.push(`${decimal(timings.gain, 2)} × plain`);
  if (timings?.batch_n >= 1.05) {
    facts.push(`${decimal(timings.batch_n, 1)} answers in a pass`);
    if (known(timings.longest_pause_ms)) facts.push(`longest pause ${duration(timings.longest_pause_ms)}`);
  }
  if (timings?.draft_n) {
    facts.push(`${percent(timings.draft_n_accepted / timings.draft_n)} of ${timings.draft_n} draft tokens accepted`);
  }
  if (known(timings?.ttft_ms)) facts.push(`first token after ${duration(timings.ttft_ms)}`);
  if (timings?.cache_n) facts.push(`${plural(timings.cache_n, "prompt token")} reused`);
  if (stopped) facts.push("stopped");
  if (reason === "length") facts.push(count === limit ? "cut at the longest answer allowed" : "cut: the context is full");
  return facts;
}
