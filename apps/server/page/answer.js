// One answer on the page, as it comes.
import { byId, decimal, duration, element, known, percent, plural, speed } from "./elements.js";
import { Rendered } from "./markdown.js";

export class Answer {
  constructor(log, seen) {
    this.body = element("div", { class: "answer waiting" });
    this.turn = element("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" }, this.body);
    this.rendered = new Rendered(this.body);
    this.thoughts = null;
    this.log = log;
    this.seen = seen; // sources that the legend has to explain
    this.pending = false;
    log.append(this.turn);
  }

  get text() {
    return this.rendered.text;
  }

  // A chunk of a stream: its text by origin; without origins it is the model's own.
  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    if (!thought && !text) return;
    const spans = chunk.mlx_spec?.spans ?? [];
    const target = text ? this.rendered : this.#thinking();
    const whole = text || thought;
    const told = spans.map((span) => span.text).join("") === whole;
    for (const span of told ? spans : [{ text: whole, source: null, position: 0 }]) {
      if (!span.text) continue;
      this.seen.add(span.source);
      target.append(span.text, span.source, span.position ?? 0);
    }
    this.#soon();
  }

  #thinking() {
    if (!this.thoughts) {
      const inner = element("div", { class: "answer" });
      this.turn.prepend(element("details", { class: "thoughts", open: "" }, element("summary", {}, "Thinking"), inner));
      this.thoughts = new Rendered(inner);
    }
    return this.thoughts;
  }

  #soon() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const near = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
    this.rendered.draw();
    this.thoughts?.draw();
    if (near) this.log.scrollTop = this.log.scrollHeight;
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
  if (timings.draft_n) facts.push(`${percent(timings.draft_n_accepted / timings.draft_n)} of ${timings.draft_n} draft tokens accepted`);
  if (known(timings.ttft_ms)) facts.push(`first token after ${duration(timings.ttft_ms)}`);
  if (timings.cache_n) facts.push(`${plural(timings.cache_n, "prompt token")} reused`);
  return facts;
}

export function asked(log, text) {
  byId("welcome")?.remove();
  log.append(element("article", { class: "turn user", "aria-label": "You" }, element("div", { class: "said" }, text)));
  log.scrollTop = log.scrollHeight;
}
