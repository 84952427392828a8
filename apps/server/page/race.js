// Shows a race below an answer: one question answered twice at the same time, with drafts and plain, in two rows.
import { element, known, plural, speed } from "./dom.js";

const TAIL = 200; // last characters of an answer that a row shows

export class RaceView {
  constructor() {
    this.status = element("p", { class: "phase" }, "reading the question");
    this.element = element("section", { class: "race", "aria-label": "Race" }, this.status);
    this.rows = [];
  }

  // Shows what the race waits for.
  showPhase(text) {
    if (text) this.status.textContent = text;
  }

  take({ racers }) {
    if (!this.rows.length) this.rows = racers.map(({ name }) => new Row(name));
    const most = Math.max(...racers.map((racer) => racer.tokens_per_second ?? 0));
    if (!most) return;
    if (!this.rows[0].element.isConnected) this.status.replaceWith(...this.rows.map((row) => row.element));
    racers.forEach((racer, i) => this.rows[i].take(racer, most));
  }

  // Shows the lines about the result.
  end(lines) {
    this.status.remove();
    this.element.append(...lines.map((line) => element("p", { class: "result" }, line)));
  }
}

class Row {
  constructor(name) {
    this.text = "";
    this.bar = element("div", { class: "pace" });
    this.figures = element("span", { class: "numbers" });
    this.tail = element("p", { class: "tail" });
    this.element = element("div", { class: "racer" }, element("span", {}, name),
      element("div", { class: "track" }, this.bar), this.figures, this.tail);
  }

  take({ text, tokens, tokens_per_second: pace }, most) {
    this.text += text;
    this.bar.style.width = `${100 * (pace ?? 0) / most}%`;
    this.figures.textContent = known(pace) ? `${speed(pace)} tokens/s, ${plural(tokens, "token")}` : "";
    this.tail.textContent = this.text.slice(-TAIL);
    this.tail.scrollLeft = this.tail.scrollWidth;
  }
}
