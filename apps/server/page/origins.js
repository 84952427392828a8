// Shows where each token came from, the target or a drafter: text in runs of one origin, and the legend.
import { element } from "./dom.js";

const SHADES = 8; // classes k1 to k8 of the style sheet
// Words for drafters that are not models. All models are "drafter": users do not care about families.
const SOURCES = {
  lookup: "copied from the text",
  earlier: "from earlier answers",
  grammar: "forced by the format",
  prediction: "copied from the prediction",
};

export function sourceWords(source) {
  return SOURCES[source] ?? "drafter";
}

export function isModel(source) {
  return !(source in SOURCES);
}

// Text that grows, with the origins of its tokens.
export class Origins {
  text = "";
  runs = []; // {start, source, position} in order; neighbouring tokens of the target are one run

  append(text, source, position) {
    const before = this.runs.at(-1);
    if (source || !before || before.source) this.runs.push({ start: this.text.length, source, position });
    this.text += text;
  }

  // Returns the form that is kept in the browser.
  toJSON() {
    return { text: this.text, runs: this.runs.map(({ start, source, position }) => [start, source, position]) };
  }

  restore({ text, runs }) {
    runs.forEach(([start, source, position], i) => this.append(text.slice(start, runs[i + 1]?.[0]), source, position));
  }

  // Appends the text between two offsets to `parent`, a span for each run; `marks` are ranges to colour.
  paint(parent, from, to, marks = [], shift = 0) {
    let passed = 0; // marks
    for (let i = this.#runAt(from); i < this.runs.length && this.runs[i].start < to; i += 1) {
      const run = this.runs[i];
      const end = this.runs[i + 1]?.start ?? this.text.length;
      const [low, high] = [Math.max(run.start, from), Math.min(end, to)];
      if (low >= high) continue;
      const offset = shift + low - from;
      while (marks[passed]?.end <= offset) passed += 1;
      const node = originSpan(run, coloured(this.text.slice(low, high), marks, passed, offset));
      if (run.position === 1 && run.start >= from) node.classList.add("first"); // of a round
      parent.append(node);
    }
  }

  // Appends nodes that replace text, such as a formula, with the origin of the text at `from`.
  paintAs(parent, from, ...nodes) {
    parent.append(this.runs.length ? originSpan(this.runs[this.#runAt(from)], nodes) : nodes[0]);
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

// Returns the text as strings and coloured spans. Marks count from `offset` before it; those before `first` are over.
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
  return parts.filter(Boolean);
}

function originSpan(run, nodes) {
  return element("span", { class: originClass(run), title: originText(run) }, ...nodes);
}

function originClass(run) {
  if (!run.source) return "run target";
  if (!isModel(run.source)) return `run ${run.source}`;
  return `run drafter k${Math.min(Math.max(run.position, 1), SHADES)}`;
}

function originText(run) {
  if (!run.source) return "made by the model itself";
  const position = run.position ? `, token ${run.position} of the draft` : "";
  return `${sourceWords(run.source)}${position}`;
}

// Draws the legend for the sources of the text so far.
export function drawLegend(host, sources) {
  const hasDrafter = [...sources].some((source) => source && isModel(source));
  const shades = Array.from({ length: SHADES }, (_, i) => `drafter k${i + 1}`);
  host.replaceChildren(
    legendEntry([], "no line: the model itself"),
    ...(hasDrafter ? [legendEntry(shades, `drafter, 1st to ${SHADES}th token of a draft`)] : []),
    ...Object.keys(SOURCES).filter((source) => sources.has(source)).map((source) => legendEntry([source], SOURCES[source])),
  );
}

function legendEntry(classes, text) {
  const swatches = classes.map((name) => element("span", { class: `run ${name}` }, "a"));
  return element("span", { class: "entry" },
    element("span", { class: "swatches", "aria-hidden": "true" }, ...swatches), text);
}
