// The conversation: what was said, the answer that is coming, and how it is stopped.
import { Answer, asked } from "./answer.js";
import { announce, byId, element, plural } from "./elements.js";
import { drawLegend } from "./origin.js";
import { Refused, complete } from "./server.js";
import { fields, system } from "./settings.js";

const IDEAS = ["What does os.path.join do?", "Write code that reads a JSON file", "What does zip do?"];

export class Conversation {
  // `watch` follows an answer: began(), chunk(chunk), ended(timings). `locked` asks for a key.
  constructor(watch, locked) {
    this.watch = watch;
    this.locked = locked;
    this.messages = [];
    this.running = null; // AbortController of the answer that is coming
    this.seen = new Set();
    this.log = byId("log");
    this.welcome = byId("welcome");
    this.#wire();
    drawLegend(byId("legend"), this.seen);
  }

  #wire() {
    const message = byId("message");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(message.value);
    });
    message.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(message.value);
      }
    });
    message.addEventListener("input", grow);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("restart").addEventListener("click", () => this.restart());
    for (const idea of IDEAS) {
      const button = element("button", { type: "button", class: "quiet" }, idea);
      button.addEventListener("click", () => this.send(idea));
      byId("ideas").append(element("li", {}, button));
    }
  }

  stop() {
    this.running?.abort();
  }

  restart() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren(this.welcome);
    byId("restart").hidden = true;
    byId("message").focus();
  }

  async send(written) {
    const text = written.trim();
    if (!text || this.running) return;
    byId("message").value = "";
    grow();
    asked(this.log, text);
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.#busy(new AbortController());
    const answer = new Answer(this.log, this.seen);
    const end = await this.#follow(answer);
    answer.end(end);
    this.#settle(messages, text, answer, end);
    this.#busy(null);
  }

  // Draws the chunks of one answer; returns how it ended.
  async #follow(answer) {
    const end = { timings: null, usage: null, reason: null, stopped: false, problem: null };
    const body = { ...fields(), messages: [...system(), ...this.messages] };
    const signal = this.running.signal;
    this.watch.began();
    try {
      for await (const chunk of complete(body, signal)) {
        answer.take(chunk);
        this.watch.chunk(chunk);
        end.timings = chunk.timings ?? end.timings;
        end.usage = chunk.usage ?? end.usage;
        end.reason = chunk.choices?.[0]?.finish_reason ?? end.reason;
      }
    } catch (error) {
      if (signal.aborted) end.stopped = true;
      else end.problem = explained(error);
      if (error instanceof Refused && error.status === 401) this.locked();
    }
    this.watch.ended(end.timings);
    return end;
  }

  // A question without an answer leaves the history and goes back to the message box.
  #settle(messages, text, answer, end) {
    if (answer.text) {
      messages.push({ role: "assistant", content: answer.text });
    } else {
      messages.pop();
      if (end.problem && !byId("message").value) byId("message").value = text;
    }
    drawLegend(byId("legend"), this.seen);
    const count = end.usage?.completion_tokens;
    announce(end.problem ?? (end.stopped ? "Stopped" : `Answer complete${count ? `, ${plural(count, "token")}` : ""}`));
  }

  #busy(controller) {
    this.running = controller;
    const busy = controller !== null;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    byId("restart").hidden = busy || !this.log.querySelector(".turn");
    if (busy) announce("Answering");
    byId("message").focus();
  }
}

function explained(error) {
  if (error instanceof Refused) return error.message;
  return "The server cannot be reached. Is it still running?";
}

function grow() {
  const box = byId("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}
