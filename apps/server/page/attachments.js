// Files of a message whose text is sent: text, code, PDF, and long pastes. Each shows its tokens before it is sent.
import { announce, byId, element, plural } from "./dom.js";
import { readPdf } from "./pdf.js";

const MAX_BYTES = 4_000_000; // of a file: the server takes 8 MiB of text in a request
const PASTE_CHARS = 4000; // a longer paste becomes an attachment
const MAX_FILES = 20; // in a message

// Returns the content of a message in the form of the API: files, pictures, and then the question.
export function asContent(question, images, files) {
  const text = [...files.map(({ name, text }) => `${name}\n${fenced(text)}`), ...(question ? [question] : [])].join("\n\n");
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Returns a text between fences that are longer than any in it.
export function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

export function chip({ name, tokens }) {
  const count = tokens ? element("span", { class: "aside" }, plural(tokens, "token")) : "";
  return element("span", { class: "chip" }, element("bdi", {}, name), count);
}

// Returns the text of a file. Throws an Error that says why it has none.
async function textOf(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 1e6} MB`);
  const data = new Uint8Array(await file.arrayBuffer());
  if (String.fromCharCode(...data.subarray(0, 5)) === "%PDF-") {
    const text = await readPdf(data).catch((error) => { throw new Error(`${file.name} cannot be read: ${error.message}`); });
    if (!text.trim()) throw new Error(`${file.name} holds pictures of pages and no text`);
    return text;
  }
  const mark = data[0] === 0xff && data[1] === 0xfe ? "utf-16le" : data[0] === 0xfe && data[1] === 0xff ? "utf-16be" : "utf-8";
  let text = "\0";
  try {
    text = new TextDecoder(mark, { fatal: true }).decode(data);
  } catch { // not UTF-8
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not text: text files, code and PDF are read`);
  if (!text.trim()) throw new Error(`${file.name} is empty`);
  return text;
}

export class Attachments {
  // `count` returns the tokens of a text, or null. `changed` is called after each change.
  constructor({ count, changed }) {
    Object.assign(this, { count, changed, files: [] });
    byId("message").addEventListener("paste", (event) => this.#paste(event));
  }

  #paste(event) {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (text.length <= PASTE_CHARS) return;
    event.preventDefault();
    const pasted = this.files.filter(({ name }) => name.startsWith("pasted")).length;
    this.#take(pasted ? `pasted-${pasted + 1}.txt` : "pasted.txt", text);
  }

  // Takes files. Returns why some were not taken, or "".
  async add(files) {
    const problems = [];
    for (const file of files) {
      try {
        if (this.files.length >= MAX_FILES) throw new Error(`A message has at most ${MAX_FILES} files.`);
        this.#take(file.name, await textOf(file));
      } catch (error) {
        problems.push(error.message);
      }
    }
    return problems.join(". ");
  }

  async #take(name, text) {
    const file = { name, text, tokens: null };
    this.files.push(file);
    this.draw();
    announce(`${name} is attached`);
    this.changed();
    file.tokens = await this.count(text);
    this.draw();
  }

  // Returns the files of the message that is sent now.
  take() {
    const taken = this.files;
    this.files = [];
    this.draw();
    return taken;
  }

  draw() {
    byId("attached").hidden = !this.files.length;
    byId("attached").replaceChildren(...this.files.map((file) => {
      const remove = element("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}` }, "×");
      remove.addEventListener("click", () => {
        this.files = this.files.filter((one) => one !== file);
        this.draw();
        this.changed();
      });
      return element("li", {}, chip(file), remove);
    }));
  }
}
