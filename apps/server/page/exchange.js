// An exchange: a question and its answer, which is drawn while it streams, and kept in the browser.
import { copyButton, decimal, duration, element, known, plural, speed } from "./dom.js";
import { Rendered } from "./markdown.js";
import { asContent, chip } from "./attachments.js";
import { thumbnails } from "./pictures.js";
import { RaceView } from "./race.js";

const FOLLOW_PX = 80; // the page follows an answer if it is scrolled this near to the end of the conversation
const IDLE_SHARE = 3; // the pause after a drawing, as a multiple of its time: leaves time to scroll in long answers

export class Exchange {
  // `view` is {log, sources, actions}. The legend explains `sources`; actions are called with this exchange.
  constructor(view, { id, parent, question, images = [], files = [], conversation }) {
    Object.assign(this, view, { id, parent, question, images, files, conversation, model: "", facts: [], problem: null, race: null, hasEnded: false });
    Object.assign(this, { tokens: null, thoughtMs: null, canGoOn: false }); // tokens: of prompt and answer
    this.said = element("div", { class: "said", dir: "auto" }, ...thumbnails(images), ...files.map(chip), question);
    this.tools = element("div", { class: "tools" });
    this.asked = element("article", { class: "turn user", "aria-label": "You" }, this.said, this.tools);
    this.body = element("div", { class: "answer waiting" });
    this.status = element("div", { class: "phase" });
    this.turn = element("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.body, this.status);
    this.answer = new Rendered(this.body);
    this.thinking = null;
    this.isScheduled = false;
    this.elements = [this.asked, this.turn];
  }

  // Draws the exchange as branch `number` of `count`.
  show(number, count) {
    const branches = count < 2 ? [] : [
      this.#button("‹", () => this.actions.turn(this, -1), "Branch before"),
      element("span", {}, `${number} of ${count}`),
      this.#button("›", () => this.actions.turn(this, 1), "Next branch"),
    ];
    this.tools.replaceChildren(...branches, this.#button("Edit", () => this.edit()));
    if (this.isDrawn || !this.hasEnded) return;
    this.isDrawn = true;
    this.#drawText(true);
  }

  // Lets the user edit the question in place; the draft in the message box stays.
  edit() {
    const box = element("textarea", { class: "edited", "aria-label": "Edited message", rows: "3", dir: "auto" });
    box.value = this.question;
    const close = () => form.replaceWith(this.said);
    const form = element("form", { class: "editing" }, box,
      element("button", { type: "submit" }, "Send as a new branch"), this.#button("Cancel", close));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!box.value.trim() && !this.images.length && !this.files.length) return;
      close();
      this.actions.ask(box.value, this);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
    this.said.replaceWith(form);
    box.focus();
  }

  // Shows what the answer waits for, until its first text; `share` is the part that is done, or null.
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

  // Adds the text of a chunk, by the origins of its tokens; without origins it counts as the target's.
  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = delta.content || delta.reasoning_content;
    if (!text) return;
    this.showPhase("");
    if (delta.content) this.#endThoughts();
    const target = delta.content ? this.answer : this.#thinkingText();
    const spans = chunk.mlx_spec?.spans ?? [];
    const isWhole = spans.map((span) => span.text).join("") === text;
    for (const span of isWhole ? spans : [{ text, source: null, position: 0 }]) {
      if (!span.text) continue;
      this.sources.add(span.source);
      target.append(span.text, span.source, span.position ?? 0);
    }
    this.keep();
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => this.#drawPiece());
  }

  #drawPiece() {
    const began = performance.now();
    if (!this.hasEnded) this.draw();
    setTimeout(() => {
      this.isScheduled = false;
      if (!this.hasEnded) this.draw();
    }, IDLE_SHARE * (performance.now() - began));
  }

  #thinkingText() {
    if (!this.thinking) {
      const inner = element("div", { class: "answer" });
      this.thoughts = element("details", { class: "thoughts", open: "" }, element("summary", {}, "Thinking"), inner);
      this.turn.prepend(this.thoughts);
      this.thinking = new Rendered(inner);
      this.thoughtFrom = performance.now();
    }
    return this.thinking;
  }

  // Folds the thoughts once, when the answer begins.
  #endThoughts() {
    if (!this.thinking || this.thoughtMs !== null) return;
    this.thoughtMs = Math.round(performance.now() - this.thoughtFrom);
    this.#foldThoughts();
  }

  #foldThoughts() {
    this.thoughts.open = false;
    this.thoughts.firstChild.textContent = `Thought for ${duration(this.thoughtMs)}`;
  }

  draw(isComplete = false) {
    const isFollowed = this.turn.isConnected && isNearEnd(this.log);
    this.#drawText(isComplete);
    if (isFollowed) this.log.scrollTop = this.log.scrollHeight;
  }

  #drawText(isComplete) {
    this.answer.draw(isComplete);
    this.thinking?.draw(isComplete || Boolean(this.answer.text));
  }

  end(facts, problem) {
    const isFollowed = this.turn.isConnected && isNearEnd(this.log);
    Object.assign(this, { isDrawn: true });
    this.showPhase("");
    this.#drawText(true);
    this.#close(facts, problem);
    if (isFollowed) this.log.scrollTop = this.log.scrollHeight;
    this.keep();
  }

  #close(facts, problem) {
    Object.assign(this, { facts, problem, hasEnded: true });
    this.body.classList.remove("waiting");
    this.body.hidden = !this.answer.text;
    this.turn.setAttribute("aria-busy", "false");
    this.status.replaceWith(
      ...(problem ? [element("p", { class: "problem", role: "alert" }, problem)] : []),
      element("div", { class: "foot" },
        element("div", { class: "actions" },
          ...(this.answer.text ? [copyButton(() => this.answer.text, "Copy answer")] : []),
          this.#button("Retry", () => this.actions.ask(this.question, this)),
          ...(this.canGoOn && this.answer.text ? [this.#button("Continue", () => this.actions.goOn(this), "Continue this answer")] : []),
          this.#button("Race", () => this.actions.race(this), "Race: answer this twice at once, with drafts and plain")),
        ...(facts.length ? [element("p", { class: "facts" }, facts.join(" · "))] : [])),
    );
  }

  #button(text, action, label = text) {
    const button = element("button", { type: "button", class: "small again", "aria-label": label, ...(label === text ? {} : { title: label }) }, text);
    button.addEventListener("click", action);
    return button;
  }

  // Shows a race of this question, in place of an earlier one.
  showRace() {
    const view = new RaceView();
    this.turn.querySelector(".race")?.remove();
    this.turn.append(view.element);
    view.element.scrollIntoView({ block: "nearest" });
    return view;
  }

  // Keeps how a race ended.
  endRace(lines) {
    this.race = lines;
    this.keep();
  }

  // Opens an ended answer again: what is streamed next goes on after its text.
  reopen() {
    this.turn.querySelectorAll(":scope > :is(.problem, .foot)").forEach((one) => one.remove());
    Object.assign(this, { hasEnded: false, problem: null, canGoOn: false });
    this.body.classList.add("waiting");
    this.turn.setAttribute("aria-busy", "true");
    this.body.after(this.status);
  }

  // Returns the record that is kept. A record that was kept before the end says that the answer was cut off.
  toJSON() {
    const { id, conversation, parent, question, images, files, model, facts, race, tokens, thoughtMs, hasEnded } = this;
    const problem = hasEnded ? this.problem : "The answer was cut off: its page was closed.";
    const [answer, thinking] = [this.answer.toJSON(), this.thinking?.toJSON() ?? null];
    const canGoOn = this.canGoOn || !hasEnded;
    return { id, conversation, parent, question, images, files, model, answer, thinking, facts, race, problem, tokens, thoughtMs, canGoOn };
  }

  // Takes a kept answer; it is drawn when it is shown.
  restore({ model, answer, thinking, facts, race = null, problem, tokens = null, thoughtMs = null, canGoOn = false }) {
    Object.assign(this, { model, race, tokens, thoughtMs, canGoOn });
    if (thinking) this.#thinkingText().restore(thinking);
    if (thinking && thoughtMs !== null) this.#foldThoughts();
    this.answer.restore(answer);
    for (const { source } of [...this.answer.runs, ...(this.thinking?.runs ?? [])]) this.sources.add(source);
    this.#close(facts, problem);
    if (race) this.showRace().end(race);
  }
}

// Returns the messages of an exchange or of its record; none without an answer.
export function asMessages(exchange) {
  return exchange.answer.text ? [asQuestion(exchange), { role: "assistant", content: exchange.answer.text }] : [];
}

export function asQuestion({ question, images = [], files = [] }) {
  return { role: "user", content: asContent(question, images, files) };
}

export function isNearEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < FOLLOW_PX;
}

// Returns the facts that are shown below an answer.
export function summary({ timings, usage, reason, stopped }, limit) {
  const facts = timings?.gain_words ? [timings.gain_words] : [];
  const count = timings?.generated_tokens ?? usage?.completion_tokens;
  if (known(count) && !timings?.drafted) facts.push(plural(count, "token"));
  if (timings?.tokens_per_second) facts.push(`${speed(timings.tokens_per_second)} tokens/s`);
  if (timings?.batch_size >= 1.05) {
    facts.push(`${decimal(timings.batch_size, 1)} answers in a pass`);
    if (known(timings.longest_pause_ms)) facts.push(`longest pause ${duration(timings.longest_pause_ms)}`);
  }
  if (timings?.drafted) facts.push(`${timings.accepted} of ${plural(count, "token")} drafted`);
  else if (timings?.reason_words) facts.push(`drafts: ${timings.reason_words}`);
  if (timings?.drafted && known(timings.tokens_per_pass)) facts.push(`${decimal(timings.tokens_per_pass, 1)} a pass`);
  if (timings?.exact_words && (timings.drafted || !timings.exact)) facts.push(timings.exact_words);
  if (known(timings?.ttft_ms)) facts.push(`first token after ${duration(timings.ttft_ms)}`);
  if (timings?.reused_tokens) facts.push(`${plural(timings.reused_tokens, "prompt token")} reused`);
  if (timings?.reread_words) facts.push(`${timings.reread_tokens} read again: ${timings.reread_words}`);
  if (stopped) facts.push("stopped");
  if (reason === "length") facts.push(count === limit ? "cut at the longest answer allowed" : "cut: the context is full");
  return facts;
}
