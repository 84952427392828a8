// A conversation is a tree of exchanges. An edited or repeated question is a branch. The page shows the path to one leaf.
import { fenced } from "./attachments.js";
import { element } from "./dom.js";
import { Exchange, asMessages } from "./exchange.js";
import { markdown } from "./pictures.js";
import { change, getExchange, keeper, listExchanges, newId, put, tell } from "./store.js";

const TITLE_CHARS = 60;
const SHOWN = 50; // exchanges that are drawn at once; earlier ones when they are scrolled to

export class Conversation {
  // `view` is {log, sources, actions, failed}: the page's elements and callbacks. Without a record it is a new one.
  constructor(view, record = null) {
    this.view = view;
    this.isNew = record === null;
    this.record = record ?? { id: newId(), title: "", leaf: null, updated: 0, deleted: null, settings: null };
    this.exchanges = new Map(); // records by id, oldest first; an Exchange instead once it is drawn or asked
    this.children = new Map(); // ids by the id of their parent
    this.changed = {}; // fields that are not written yet
    this.first = 0; // index in the path of the first exchange that is drawn
    this.keep = keeper(() => this.#write(), view.failed);
    this.earlier = element("div", { class: "earlier" });
    new IntersectionObserver(([{ isIntersecting }]) => { if (isIntersecting) this.#showEarlier(); }, { root: view.log })
      .observe(this.earlier);
  }

  async #write() {
    const fields = this.changed;
    this.changed = {};
    try {
      if (this.isNew) await put("conversations", this.record);
      else if (Object.keys(fields).length) await change(this.record.id, fields);
      if (this.isNew) tell(this.record.id);
      this.isNew = false;
    } catch (error) {
      this.changed = { ...fields, ...this.changed }; // the next write tries again
      throw error;
    }
  }

  // Changes some fields of the record, here and in the store.
  set(fields) {
    Object.assign(this.record, fields);
    Object.assign(this.changed, fields);
    return this.keep();
  }

  async load() {
    for (const record of await listExchanges(this.record.id)) this.#link(record);
    if (!this.exchanges.has(this.record.leaf)) this.record.leaf = [...this.exchanges.keys()].at(-1) ?? null;
  }

  // Takes an exchange that another tab has added.
  async takeOther(id) {
    if (this.exchanges.has(id)) return;
    const record = await getExchange(id);
    if (!record || this.exchanges.has(id)) return;
    this.#link(record);
    if (this.path().some((one) => one.parent === record.parent)) this.show();
  }

  #link(node) {
    this.exchanges.set(node.id, node);
    const siblings = this.children.get(node.parent) ?? [];
    this.children.set(node.parent, [...siblings, node.id].sort()); // by age, also those of other tabs
  }

  #make({ id, parent, question, images, files }) {
    const exchange = new Exchange(this.view, { id, parent, question, images, files, conversation: this.record.id });
    exchange.keep = keeper(() => put("exchanges", exchange.toJSON()), this.view.failed);
    return exchange;
  }

  // Returns the Exchange of an id; makes it from its record the first time.
  #exchange(id) {
    const node = this.exchanges.get(id);
    if (node instanceof Exchange) return node;
    const exchange = this.#make(node);
    exchange.restore(node);
    this.exchanges.set(id, exchange);
    return exchange;
  }

  // Adds a question below another exchange, and shows it.
  add(question, parent, images = [], files = []) {
    const exchange = this.#make({ id: newId(), parent, question, images, files });
    this.#link(exchange);
    const named = question.trim() || files[0]?.name || "Picture";
    const title = this.record.title || named.replace(/\s+/g, " ").slice(0, TITLE_CHARS);
    this.set({ ...(title === this.record.title ? {} : { title }), leaf: exchange.id, updated: Date.now() });
    exchange.keep();
    this.show();
    return exchange;
  }

  // Tells the other tabs that an exchange has ended.
  async ended(exchange) {
    this.set({ updated: Date.now() });
    await exchange.keep();
    tell(this.record.id, exchange.id);
  }

  // Returns the exchanges down to the leaf, or their records.
  path(leaf = this.record.leaf) {
    const path = [];
    for (let one = this.exchanges.get(leaf); one; one = this.exchanges.get(one.parent)) path.push(one);
    return path.reverse();
  }

  // Shows a sibling of an exchange, `step` further, and its newest leaf. Returns the sibling.
  turnTo(exchange, step) {
    const siblings = this.children.get(exchange.parent);
    const sibling = siblings[siblings.indexOf(exchange.id) + step];
    if (!sibling) return exchange;
    let leaf = sibling;
    for (let child = leaf; child; child = this.children.get(child)?.at(-1)) leaf = child;
    this.set({ leaf });
    this.show(this.path(exchange.parent).length);
    return this.#exchange(sibling);
  }

  // Shows the last exchanges of the path, and all from index `from` on.
  show(from = Infinity) {
    const path = this.path();
    this.first = Math.max(0, Math.min(path.length - SHOWN, from));
    this.view.log.replaceChildren(...(this.first ? [this.earlier] : []), ...this.#draw(path.slice(this.first)));
  }

  #draw(nodes) {
    return nodes.flatMap(({ id, parent }) => {
      const exchange = this.#exchange(id);
      const siblings = this.children.get(parent);
      exchange.show(siblings.indexOf(id) + 1, siblings.length);
      return exchange.elements;
    });
  }

  #showEarlier() {
    const { log } = this.view;
    if (!this.first || !this.earlier.isConnected) return;
    const from = Math.max(0, this.first - SHOWN);
    const [before, height] = [log.scrollTop, log.scrollHeight];
    this.earlier.after(...this.#draw(this.path().slice(from, this.first)));
    this.first = from;
    if (!from) this.earlier.remove();
    log.scrollTop = before + log.scrollHeight - height;
  }

  // Returns the Exchange at the leaf, or null.
  last() {
    return this.record.leaf ? this.#exchange(this.record.leaf) : null;
  }

  // Returns the messages before an exchange, or all.
  history(exchange = null) {
    return this.path(exchange ? exchange.parent : this.record.leaf).flatMap(asMessages);
  }

  toMarkdown() {
    const { title, settings } = this.record;
    const parts = [`# ${title}`];
    if (settings?.system) parts.push("## System", settings.system);
    const held = [];
    for (const { question, images = [], files = [], answer } of this.path()) {
      const [places, lines] = markdown(images, held.length + 1);
      held.push(...lines);
      const attached = files.map(({ name, text }) => `<details>\n<summary>${name}</summary>\n\n${fenced(text)}\n\n</details>`);
      parts.push("## You", ...places, ...attached, ...(question ? [question] : []), "## Answer", answer.text);
    }
    return `${[...parts, ...held].join("\n\n")}\n`;
  }

  toJSON() {
    const system = this.record.settings?.system;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.history()];
    return { ...this.record, messages, exchanges: [...this.exchanges.values()] };
  }
}

