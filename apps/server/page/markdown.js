// Light Markdown over text whose tokens have origins: the model itself, or a drafter. No library keeps origins.
// Text only ever becomes text nodes.
import { highlights } from "./code.js";
import { copyButton, element } from "./dom.js";

const SHADES = 8; // classes k1 to k8 of the style sheet
const SOURCES = {
  lookup: "lookup in the text so far",
  grammar: "forced by the grammar",
  prediction: "the client's prediction",
};
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEAD = /^#{1,6}\s+/;
const INDENTED = /^ {4}\s*\S/;
const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+/;
const INLINE = /(`{1,3})([^`\n]+)\1|\*\*([^\n]+?)\*\*|(?<![\w*])\*[^\s*][^*\n]*?\*(?![\w*])/g;

// Text as it grows. Blocks before the last one are drawn once.
export class Rendered {
  constructor(host) {
    this.host = host;
    this.text = "";
    this.runs = []; // {start, source, position}, in order; neighbours of the model itself are one
    this.settled = { offset: 0, nodes: 0 };
  }

  append(text, source, position) {
    const before = this.runs.at(-1);
    if (source || !before || before.source) this.runs.push({ start: this.text.length, source, position });
    this.text += text;
  }

  // As it is kept for a reload.
  toJSON() {
    return { text: this.text, runs: this.runs.map(({ start, source, position }) => [start, source, position]) };
  }

  restore({ text, runs }) {
    runs.forEach(([start, source, position], i) => this.append(text.slice(start, runs[i + 1]?.[0]), source, position));
    this.draw();
  }

  draw() {
    while (this.host.childNodes.length > this.settled.nodes) this.host.lastChild.remove();
    const found = blocks(this.text, this.settled.offset);
    for (const block of found) this.host.append(this.#block(block));
    if (found.length > 1) {
      this.settled.offset = found.at(-1).start;
      this.settled.nodes = this.host.childNodes.length - 1;
    }
  }

  #block(block) {
    if (block.kind === "code") {
      const text = this.text.slice(block.from, block.to);
      const code = this.#paint(element("code"), block.from, block.to, highlights(text, block.language));
      const head = element("div", { class: "code-head" }, element("span", { class: "language" }, block.language));
      head.append(copyButton(() => text, "Copy code"));
      return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
    }
    if (block.kind === "list") {
      const items = block.items.map((item) => this.#inline(element("li"), item.from, item.to));
      const start = block.number === undefined ? {} : { start: block.number };
      return element(block.number === undefined ? "ul" : "ol", start, ...items);
    }
    return this.#inline(element("p", block.kind === "head" ? { class: "head" } : {}), block.from, block.to);
  }

  #inline(parent, from, to) {
    let at = from;
    for (const match of this.text.slice(from, to).matchAll(INLINE)) {
      const [ticks, code, bold] = match.slice(1);
      const mark = ticks?.length ?? (bold === undefined ? 1 : 2);
      const start = from + match.index;
      const end = start + match[0].length;
      this.#paint(parent, at, start);
      const tag = code !== undefined ? "code" : bold !== undefined ? "strong" : "em";
      const inner = element(tag);
      if (tag === "code") this.#paint(inner, start + mark, end - mark);
      else this.#inline(inner, start + mark, end - mark);
      parent.append(inner);
      at = end;
    }
    return this.#paint(parent, at, to);
  }

  // Appends the text from one place to another, a span for each origin; `marks` colour parts of it.
  #paint(parent, from, to, marks = []) {
    let passed = 0; // marks
    for (let i = this.#runAt(from); i < this.runs.length && this.runs[i].start < to; i += 1) {
      const run = this.runs[i];
      const end = this.runs[i + 1]?.start ?? this.text.length;
      const [low, high] = [Math.max(run.start, from), Math.min(end, to)];
      if (low >= high) continue;
      const begins = run.position === 1 && run.start >= from; // a round of several tokens
      const name = originClass(run) + (begins ? " first" : "");
      while (marks[passed]?.end <= low - from) passed += 1;
      const parts = coloured(this.text.slice(low, high), marks, passed, low - from);
      parent.append(element("span", { class: name, title: originText(run) }, ...parts));
    }
    return parent;
  }

  #runAt(offset) {
    let [low, high] = [0, this.runs.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.runs[middle].start <= offset) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

// Returns the text as strings and coloured spans; it stands at `offset` of what the marks, from one on, are for.
function coloured(text, marks, first, offset) {
  const parts = [];
  let at = 0;
  for (let i = first; i < marks.length && marks[i].start - offset < text.length; i += 1) {
    const { start, end, kind } = marks[i];
    const [low, high] = [Math.max(start - offset, at), Math.min(end - offset, text.length)];
    parts.push(text.slice(at, low), element("span", { class: kind }, text.slice(low, high)));
    at = high;
  }
  parts.push(text.slice(at));
  return parts.filter((part) => part);
}

// Returns the blocks of the text from an offset on: {kind, start, from, to}, and more by kind.
function blocks(text, offset) {
  const found = [];
  let fence = null;
  for (const { start, end } of lines(text, offset)) {
    const line = text.slice(start, end);
    const last = found.at(-1);
    if (fence) {
      const mark = line.trim(); // a longer fence may hold shorter ones
      if (mark.length >= fence.mark.length && mark === fence.mark[0].repeat(mark.length)) fence = null;
      else fence.to = end;
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      const from = Math.min(end + 1, text.length);
      fence = { kind: "code", start, from, to: from, mark: opening[1], language: opening[2] };
      found.push(fence);
    } else if (!line.trim()) {
      if (last) last.closed = true;
    } else if (HEAD.test(line)) {
      found.push({ kind: "head", start, from: start + HEAD.exec(line)[0].length, to: end, closed: true });
    } else if (ITEM.test(line)) {
      item(found, line, start, end);
    } else if (last && !last.closed && last.kind === "list") {
      last.items.at(-1).to = end;
    } else if (last && !last.closed && (last.kind === "text" || last.isBare)) {
      last.to = end;
    } else {
      found.push({ kind: "text", start, from: start, to: end });
    }
    const open = found.at(-1); // small models leave out the fences of code
    if (open?.kind === "text" && open.start < start && INDENTED.test(line)) {
      Object.assign(open, { kind: "code", language: "", isBare: true });
    }
  }
  return found;
}

function item(found, line, start, end) {
  const match = ITEM.exec(line);
  const number = match[1] === undefined ? undefined : Number(match[1]);
  const last = found.at(-1);
  const entry = { from: start + match[0].length, to: end };
  const same = last?.kind === "list" && (last.number === undefined) === (number === undefined);
  if (same) {
    last.items.push(entry);
    last.closed = false;
  } else {
    found.push({ kind: "list", start, number, items: [entry] });
  }
}

function* lines(text, offset) {
  while (offset < text.length) {
    const found = text.indexOf("\n", offset);
    const end = found < 0 ? text.length : found;
    yield { start: offset, end };
    offset = end + 1;
  }
}

// --- origins

function originClass(run) {
  if (!run.source) return "run target";
  if (run.source in SOURCES) return `run ${run.source}`;
  return `run drafter k${Math.min(Math.max(run.position, 1), SHADES)}`;
}

function originText(run) {
  if (!run.source) return "made by the model itself";
  const place = run.position ? `, token ${run.position} of its draft` : "";
  return `drafted: ${SOURCES[run.source] ?? run.source}${place}`;
}

// Draws the entries for `sources`, those of the text so far.
export function drawLegend(host, sources) {
  const drafters = [...sources].filter((source) => source && !(source in SOURCES));
  const shades = Array.from({ length: SHADES }, (_, i) => `drafter k${i + 1}`);
  host.replaceChildren(
    legendEntry(["target"], "the model itself"),
    legendEntry(["edge"], "a round of several tokens"),
    ...(drafters.length ? [legendEntry(shades, `1st to ${SHADES}th token of ${drafters.join(", ")}`)] : []),
    ...Object.keys(SOURCES).filter((source) => sources.has(source)).map((source) => legendEntry([source], source)),
  );
}

function legendEntry(classes, text) {
  const swatches = classes.map((name) => element("span", { class: `run ${name}` }));
  return element("span", { class: "entry" },
    element("span", { class: "swatches", "aria-hidden": "true" }, ...swatches), text);
}
