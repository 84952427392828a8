// The list of Ctrl K or ⌘K: what the page can do, and all conversations, searched by their text.
import { byId, element } from "./dom.js";
import { allExchanges } from "./store.js";

const MOST = 30; // entries that are shown
const AROUND = 40; // characters before a match

// Returns the texts of all exchanges by conversation, newest first.
async function textsByConversation() {
  const texts = {};
  for (const { conversation, question, files = [], answer } of await allExchanges().catch(() => [])) {
    (texts[conversation] ??= []).unshift(...[question, answer.text, ...files.map(({ name, text }) => `${name} ${text}`)].filter(Boolean));
  }
  return texts;
}

export class Palette {
  // `commands` are [words, action, keys]. `records` returns the conversations, newest first; `open` shows one.
  constructor({ commands, records, open }) {
    Object.assign(this, { commands, records, open, texts: {}, entries: [], chosen: 0 });
    this.box = element("input", { role: "combobox", "aria-label": "Search conversations and commands", "aria-expanded": "true",
      "aria-controls": "palette-list", "aria-autocomplete": "list", placeholder: "Search conversations and commands", autocomplete: "off" });
    this.list = element("ul", { id: "palette-list", role: "listbox", "aria-label": "Matches" });
    this.none = element("p", { class: "note", role: "status" });
    this.dialog = element("dialog", { class: "palette", "aria-label": "Search" }, this.box, this.list, this.none);
    document.body.append(this.dialog);
    this.box.addEventListener("input", () => this.#draw());
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.dialog.addEventListener("click", ({ target }) => { if (target === this.dialog) this.dialog.close(); });
  }

  async show() {
    if (this.dialog.open) return;
    this.box.value = "";
    this.texts = {};
    this.#draw();
    this.dialog.showModal();
    this.texts = await textsByConversation();
    this.#draw();
  }

  #key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      this.#choose((this.chosen + step + this.entries.length) % Math.max(this.entries.length, 1));
    } else if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      this.#take(this.entries[this.chosen]);
    }
  }

  #take(entry) {
    if (!entry) return;
    this.dialog.close();
    entry.act();
  }

  #matches() {
    const wanted = this.box.value.trim().toLowerCase();
    const commands = this.commands.filter(([words]) => words.toLowerCase().includes(wanted))
      .map(([words, act, keys = ""]) => ({ words, act, aside: keys, isCommand: true }));
    const matches = [];
    for (const record of this.records()) {
      const aside = record.title.toLowerCase().includes(wanted) ? "" : this.#passage(record.id, wanted);
      if (aside !== null) matches.push({ words: record.title, aside, act: () => this.open(record) });
    }
    return (wanted ? [...matches, ...commands] : [...commands, ...matches]).slice(0, MOST);
  }

  // Returns the text around a match in a conversation, or null.
  #passage(id, wanted) {
    for (const text of this.texts[id] ?? []) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at >= 0) return text.slice(Math.max(0, at - AROUND), at + wanted.length + AROUND).replace(/\s+/g, " ");
    }
    return null;
  }

  #draw() {
    this.entries = this.#matches();
    this.list.replaceChildren(...this.entries.map((entry, i) => {
      const aside = entry.isCommand ? element("kbd", {}, entry.aside) : element("span", { class: "aside" }, entry.aside);
      const node = element("li", { role: "option", id: `match-${i}`, dir: "auto" }, entry.words, ...(entry.aside ? [" ", aside] : []));
      node.addEventListener("click", () => this.#take(entry));
      return node;
    }));
    this.none.textContent = this.entries.length ? "" : "Nothing found.";
    this.#choose(0);
  }

  #choose(index) {
    this.chosen = index;
    [...this.list.children].forEach((node, i) => node.setAttribute("aria-selected", String(i === index)));
    const node = this.list.children[index];
    if (node) this.box.setAttribute("aria-activedescendant", node.id);
    else this.box.removeAttribute("aria-activedescendant");
    node?.scrollIntoView({ block: "nearest" });
  }
}
