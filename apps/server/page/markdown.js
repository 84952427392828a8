// Renders Markdown whose tokens have origins. markdown-it parses it; text becomes text nodes only, never HTML.
import { highlights } from "./highlight.js";
import { copyButton, element } from "./dom.js";
import { Origins } from "./origins.js";
import { extendSyntax } from "./extensions.js";

const { markdownit, temml } = globalThis; // set by the scripts before this module
const LINK = /^(?:https?:|mailto:)/i;
const TARGET = /\]\([^)]*\)/y; // the address of a link, after its text
// The beginning of a line that may become a list, a heading, a rule or a fence.
const UNDECIDED = /^[ \t]*(?:[-=*_+#>|~`:$\\[ \t]+|\d{1,9}[.)]?)$/;

const BLOCKS = new Set(["p", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "td", "th", "summary"]);

const parser = markdownit({ html: false, linkify: true, breaks: true }).use(extendSyntax);
parser.validateLink = (address) => LINK.test(address);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is a file
parser.core.ruler.disable("text_join"); // so that an escaped character keeps its own token

// Markdown that grows. Blocks before the last one are drawn once only.
export class Rendered extends Origins {
  constructor(host) {
    super();
    this.host = host;
    this.env = {}; // of the parser: definitions of links, from block to block
    this.settled = { offset: 0, nodes: 0 };
  }

  // Draws the text without a last line that may still become a list or heading; all text once it is complete.
  draw(isComplete = false) {
    while (this.host.childNodes.length > this.settled.nodes) this.host.lastChild.remove();
    const { offset } = this.settled;
    const lastLine = this.text.lastIndexOf("\n") + 1;
    const isHeld = !isComplete && UNDECIDED.test(this.text.slice(lastLine));
    const source = this.text.slice(offset, isHeld ? lastLine : undefined);
    const tokens = parser.parse(source, Object.assign(this.env, { isComplete }));
    const last = new Builder(this, source, offset).build(tokens);
    if (!last || this.host.childNodes.length < 2 || !this.text.includes("\n", last)) return;
    this.settled = { offset: last, nodes: this.host.childNodes.length - 1 };
  }
}

// Makes elements from tokens of markdown-it. Finds each text again in the source, to know the origins of its tokens.
class Builder {
  constructor(rendered, source, offset) {
    this.rendered = rendered;
    this.text = rendered.text;
    this.cursor = offset; // the text before it is drawn
    this.limit = offset; // the end of the present block
    this.starts = [offset]; // of lines
    for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) this.starts.push(offset + at + 1);
    this.end = offset + source.length;
  }

  // Returns where the last block begins.
  build(tokens) {
    const stack = [this.rendered.host];
    let last = 0;
    for (const token of tokens) {
      if (token.map) {
        this.cursor = Math.max(this.cursor, this.starts[token.map[0]]);
        this.limit = this.starts[token.map[1]] ?? this.end;
        if (token.level === 0) last = this.starts[token.map[0]];
      }
      this.#step(token, stack);
    }
    return last;
  }

  #step(token, stack) {
    const parent = stack.at(-1);
    if (token.nesting === 1) {
      stack.push(token.hidden ? parent : open(token, parent));
      return;
    }
    if (token.nesting === -1) {
      stack.pop();
      TARGET.lastIndex = this.cursor;
      if (token.type === "link_close" && TARGET.test(this.text)) this.cursor = TARGET.lastIndex;
      return;
    }
    switch (token.type) {
      case "inline": {
        const inner = [parent];
        for (const child of token.children) this.#step(child, inner);
        break;
      }
      case "fence": case "code_block": this.#code(token, parent); break;
      case "code_inline": {
        const code = element("code");
        this.#paint(code, token.content);
        parent.append(code);
        break;
      }
      case "formula": this.#paintAs(parent, token.markup, formula(token)); break;
      case "text_special": this.#paintAs(parent, token.markup, token.content); break;
      case "footnote_mark": this.#paintAs(parent, token.markup, element("sup", {}, token.content)); break;
      case "task": {
        const box = element("input", { type: "checkbox", class: "task", disabled: "", "aria-label": token.meta.isDone ? "done" : "to do" });
        box.checked = token.meta.isDone;
        this.#paintAs(parent, token.markup, box);
        break;
      }
      case "softbreak": case "hardbreak": parent.append(element("br"), "\n"); break;
      case "hr": parent.append(element("hr")); break;
      case "image": { // none is fetched
        const address = token.attrGet("src");
        parent.append(element("a", link(address), token.content || address));
        break;
      }
      default: this.#paint(parent, token.content);
    }
  }

  #code({ type, info, content: raw, map }, parent) {
    const content = raw.replace(/\n$/, "");
    const language = info.trim().split(/\s/)[0];
    if (type === "fence") this.cursor = Math.max(this.cursor, this.starts[map[0] + 1] ?? this.end);
    const code = element("code");
    this.#paint(code, content, highlights(content, language));
    const head = element("div", { class: "code-head" }, element("span", { class: "language" }, language));
    head.append(copyButton(() => content, "Copy code"));
    parent.append(element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code)));
  }

  // Returns the offset of a text in the source; -1 if the source writes it in another form.
  #find(text) {
    const at = this.text.indexOf(text, this.cursor);
    if (at < 0 || at + text.length > this.limit) return -1;
    this.cursor = at + text.length;
    return at;
  }

  #paint(parent, content, marks = []) {
    if (!content) return;
    const whole = this.#find(content);
    if (whole >= 0) {
      this.rendered.paint(parent, whole, whole + content.length, marks);
      return;
    }
    let shift = 0;
    for (const line of content.split(/(?<=\n)/)) { // code in a list is indented in the source
      const at = line.trim() ? this.#find(line) : -1;
      if (at < 0) parent.append(line);
      else this.rendered.paint(parent, at, at + line.length, marks, shift);
      shift += line.length;
    }
  }

  #paintAs(parent, source, node) {
    const at = this.#find(source);
    this.rendered.paintAs(parent, at < 0 ? this.cursor : at, node);
  }
}

// Returns the element that a token opens, within its parent.
function open(token, parent) {
  const heading = /^h([1-6])$/.exec(token.tag); // the page has h1
  const address = token.attrGet("href");
  const attributes = address ? link(address) : {};
  if (BLOCKS.has(token.tag) && !parent.closest("[dir]")) attributes.dir = "auto"; // as the first letters of the whole list
  if (token.attrGet("class") === "footnote") attributes.class = "footnote";
  if (token.tag === "details" && token.attrGet("open") !== null) attributes.open = "";
  if (token.attrGet("start")) attributes.start = token.attrGet("start");
  if (heading) attributes.class = `level${heading[1]}`;
  const node = element(heading ? `h${Math.min(Number(heading[1]) + 1, 6)}` : token.tag, attributes);
  const [, side] = /text-align:(\w+)/.exec(token.attrGet("style") ?? "") ?? [];
  if (side) node.style.textAlign = side;
  parent.append(token.tag === "table" ? element("div", { class: "table", tabindex: "0" }, node) : node);
  return node;
}

const link = (href) => ({ href, rel: "noopener noreferrer", target: "_blank" });

function formula({ content, markup, meta }) {
  const host = element("span", { class: meta.isDisplayed ? "formula displayed" : "formula" });
  if (!content) host.append(markup); // the formula has not ended yet
  else try {
    temml.render(content, host, { displayMode: meta.isDisplayed, throwOnError: true });
  } catch { // not valid LaTeX
    host.replaceChildren(markup);
  }
  return host;
}
