// The list of conversations: new, open, rename, delete with undo, export, import.
import { announce, byId, element } from "./dom.js";
import { importFile } from "./importing.js";
import { listConversations, purge } from "./store.js";

const UNDO_MS = 10_000; // how long a deletion can be undone
const FILES = { Markdown: ["md", "text/markdown", (one) => one.toMarkdown()],
  JSON: ["json", "application/json", (one) => JSON.stringify(one, null, 2)] };

export class Chats {
  // `open` shows the conversation of a record, or a new one for null. `find` returns the Conversation of a record.
  // `removed` is called with a deleted record, `failed` with the error of a write.
  constructor({ open, find, removed, failed }) {
    Object.assign(this, { open, find, removed, failed, records: [], current: null });
    byId("new-chat").addEventListener("click", () => open(null));
    byId("import").addEventListener("click", () => byId("import-files").click());
    byId("import-files").addEventListener("change", ({ target }) => this.#import([...target.files]));
    document.addEventListener("click", ({ target }) => {
      for (const menu of document.querySelectorAll("details.menu[open]")) menu.open = menu.contains(target);
    });
    byId("chat-list").addEventListener("keydown", (event) => {
      const menu = event.key === "Escape" && event.target.closest("details.menu[open]");
      if (!menu) return;
      menu.open = false;
      menu.firstChild.focus();
    });
  }

  // Reads the list. An open conversation keeps its branch; all else may have changed in another tab.
  async load() {
    const stored = await listConversations().catch(() => []);
    const now = Date.now();
    for (const one of stored.filter(({ deleted }) => deleted && deleted < now - UNDO_MS)) purge(one.id).catch(this.failed);
    const mine = new Map(this.records.map((one) => [one.id, one]));
    this.records = stored.filter(({ deleted }) => !deleted).map((one) => {
      const { leaf, ...others } = one;
      return mine.has(one.id) ? Object.assign(mine.get(one.id), others) : one;
    });
    this.draw();
  }

  // Marks the record of the shown conversation; adds it to the list if it is new.
  choose(record) {
    this.current = record.id;
    if (record.title && !this.records.some(({ id }) => id === record.id)) this.records.push(record);
    this.draw();
  }

  draw() {
    this.records.sort((a, b) => b.updated - a.updated);
    byId("chat-list").replaceChildren(...this.records.map((record) => this.#entry(record)));
  }

  #entry(record) {
    const title = button(record.title, () => this.open(record), "title");
    title.dir = "auto";
    if (record.id === this.current) title.setAttribute("aria-current", "true");
    const menu = element("details", { class: "menu" }, element("summary", { "aria-label": `More: ${record.title}` }, "⋯"));
    const entry = element("li", {}, title, menu);
    const exports = Object.entries(FILES).map(([name, file]) => button(`Export ${name}`, () => this.#export(record, file)));
    menu.append(element("div", {}, button("Rename", () => this.#rename(record, entry)), ...exports,
      element("small", {}, "Import reads JSON again."),
      button("Delete", () => this.#delete(record))));
    menu.addEventListener("click", ({ target }) => { if (target.closest("button")) menu.open = false; });
    return entry;
  }

  #rename(record, entry) {
    const box = element("input", { "aria-label": "Title" });
    box.value = record.title;
    entry.replaceChildren(box);
    box.select();
    const finish = async (title) => {
      if (title && title !== record.title) (await this.find(record)).set({ title });
      this.draw();
    };
    box.addEventListener("keydown", ({ key }) => {
      if (key === "Enter") box.blur();
      if (key === "Escape") box.value = record.title;
      if (key === "Escape") box.blur();
    });
    box.addEventListener("blur", () => finish(box.value.trim()), { once: true });
  }

  async #delete(record) {
    (await this.find(record)).set({ deleted: Date.now() });
    this.records = this.records.filter((one) => one !== record);
    this.draw();
    this.removed(record);
    if (record.id === this.current) this.open(null);
    this.#offerUndo(record);
  }

  #offerUndo(record) {
    const note = element("p", {}, element("span", {}, `Deleted “${record.title}”`));
    const timer = setTimeout(() => {
      note.remove();
      purge(record.id).catch(this.failed);
    }, UNDO_MS);
    note.append(button("Undo", async () => {
      clearTimeout(timer);
      note.remove();
      (await this.find(record)).set({ deleted: null });
      this.records.push(record);
      this.open(record);
    }));
    byId("notes").append(note);
    announce(note.textContent);
  }

  async #import(files) {
    byId("import-files").value = "";
    for (const file of files) {
      try {
        const record = await importFile(file);
        await this.load();
        this.open(this.records.find(({ id }) => id === record.id));
      } catch (error) {
        this.failed(error);
      }
    }
  }

  async #export(record, [ending, type, write]) {
    const text = write(await this.find(record));
    const name = record.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
    const address = URL.createObjectURL(new Blob([text], { type }));
    element("a", { href: address, download: `${name}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(address));
  }
}

function button(text, action, kind = "quiet") {
  const made = element("button", { type: "button", class: kind }, text);
  made.addEventListener("click", action);
  return made;
}
