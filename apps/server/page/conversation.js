// A conversation is a tree of exchanges. An edited or repeated question is a branch. The page shows the path to one leaf.
import { Exchange } from "./exchange.js";
import { markdown } from "./pictures.js";
import { keeper, listExchanges, newId } from "./store.js";

const TITLE_CHARS = 60;

export class Conversation {
  // `view` is {log, sources, actions, failed}: the page's elements and callbacks.
  constructor(view, record = { id: newId(), title: "", leaf: null, updated: 0, deleted: null }) {
    this.view = view;
    this.record = record;
    this.exchanges = new Map(); // by id, oldest first
    this.keep = keeper("conversations", () => this.record, view.failed);
  }

  async load() {
    const found = await listExchanges(this.record.id);
    for (const record of found) this.#make(record).restore(record);
    if (!this.exchanges.has(this.record.leaf)) this.record.leaf = found.at(-1)?.id ?? null;
  }

  #make({ id, parent, question, images }) {
    const exchange = new Exchange(this.view, { id, parent, question, images, conversation: this.record.id });
    exchange.keep = keeper("exchanges", () => exchange.toJSON(), this.view.failed);
    this.exchanges.set(id, exchange);
    return exchange;
  }

  // Adds a question below another exchange, and shows it.
  add(question, parent, images = []) {
    const exchange = this.#make({ id: newId(), parent, question, images });
    if (!this.record.title) this.record.title = (question.trim() || "Picture").replace(/\s+/g, " ").slice(0, TITLE_CHARS);
    this.record.leaf = exchange.id;
    this.touch();
    exchange.keep();
    this.show();
    return exchange;
  }

  touch() {
    this.record.updated = Date.now();
    this.keep();
  }

  // Returns the exchanges down to the leaf.
  path(leaf = this.record.leaf) {
    const found = [];
    for (let one = this.exchanges.get(leaf); one; one = this.exchanges.get(one.parent)) found.unshift(one);
    return found;
  }

  #siblings({ parent }) {
    return [...this.exchanges.values()].filter((one) => one.parent === parent);
  }

  // Shows a sibling of an exchange, `step` further, and its newest leaf.
  turnTo(exchange, step) {
    const siblings = this.#siblings(exchange);
    let next = siblings[siblings.indexOf(exchange) + step];
    for (let child = next; child; child = this.#siblings({ parent: child.id }).at(-1)) next = child;
    if (!next) return;
    this.record.leaf = next.id;
    this.keep();
    this.show();
  }

  show() {
    const { log } = this.view;
    const shown = this.path();
    log.replaceChildren(...shown.flatMap((one) => one.elements));
    for (const one of shown) {
      const siblings = this.#siblings(one);
      one.show(siblings.indexOf(one) + 1, siblings.length);
    }
  }

  // Returns the messages before an exchange.
  history(exchange) {
    return this.path(exchange.parent).flatMap((one) => one.messages());
  }

  toMarkdown() {
    const parts = [`# ${this.record.title}`];
    const held = [];
    for (const { question, images, answer } of this.path()) {
      const [places, lines] = markdown(images, held.length + 1);
      held.push(...lines);
      parts.push("## You", ...places, ...(question ? [question] : []), "## Answer", answer.text);
    }
    return `${[...parts, ...held].join("\n\n")}\n`;
  }

  toJSON() {
    return { ...this.record, messages: this.path().flatMap((one) => one.messages()), exchanges: [...this.exchanges.values()] };
  }
}
