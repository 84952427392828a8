// Extensions of Markdown: formulas, code without fences, tasks, footnotes, and three tags of HTML that models write.

const CLOSES = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const DISPLAYED = ["$$", "\\["];

// Plugin for markdown-it. Formulas become tokens of the type "formula".
export function extendSyntax(parser) {
  parser.inline.ruler.before("escape", "formula", inlineFormula);
  parser.block.ruler.before("fence", "formula", displayedFormula, { alt: ["paragraph", "blockquote", "list"] });
  parser.block.ruler.before("paragraph", "bare_code", bareCode);
  parser.inline.ruler.before("link", "footnote", footnoteMark);
  parser.inline.ruler.before("html_inline", "line_break", lineBreak);
  const ends = { alt: ["paragraph", "reference", "blockquote", "list"] };
  parser.block.ruler.before("reference", "footnote", footnote, ends);
  parser.block.ruler.before("fence", "details", details, ends);
  parser.core.ruler.after("inline", "tasks", tasks);
}

const lineFrom = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

// <br> is a line break, also in a cell of a table.
function lineBreak(state, silent) {
  const match = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!match) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += match[0].length;
  return true;
}

// [^1] is the mark of a footnote.
function footnoteMark(state, silent) {
  const match = /^\[\^([^\]\s]{1,40})\]/.exec(state.src.slice(state.pos, state.pos + 44));
  if (!match) return false;
  if (!silent) Object.assign(state.push("footnote_mark", "", 0), { markup: match[0], content: match[1] });
  state.pos += match[0].length;
  return true;
}

// A paragraph that begins with such a mark and a colon is the footnote; it stays where it is written.
function footnote(state, start, end, silent) {
  if (!/^\[\^[^\]\s]{1,40}\]:/.test(lineFrom(state, start))) return false;
  if (silent) return true;
  let line = start + 1;
  while (line < end && !state.isEmpty(line) && !/^\[\^/.test(lineFrom(state, line))) line += 1;
  const open = state.push("paragraph_open", "p", 1);
  open.attrSet("class", "footnote");
  open.map = [start, line];
  const content = state.getLines(start, line, state.blkIndent, false).trim();
  Object.assign(state.push("inline", "", 0), { content, map: [start, line], children: [] });
  state.push("paragraph_close", "p", -1);
  state.line = line;
  return true;
}

// <details> and <summary> fold the Markdown between them. All other HTML stays text.
function details(state, start, end, silent) {
  const head = /^<details(\s+open)?\s*>\s*(?:<summary>(.*?)<\/summary>)?\s*$/i.exec(lineFrom(state, start));
  if (!head) return false;
  if (silent) return true;
  let [line, depth, summary, from] = [start, 1, head[2], start + 1];
  while (depth && (line += 1) < end) {
    const text = lineFrom(state, line);
    if (/^<details/i.test(text)) depth += 1;
    if (/^<\/details>\s*$/i.test(text)) depth -= 1;
  }
  const inside = summary === undefined && from < end && /^<summary>(.*?)<\/summary>\s*$/i.exec(lineFrom(state, from));
  if (inside) [summary, from] = [inside[1], from + 1];
  const open = state.push("details_open", "details", 1);
  open.map = [start, Math.min(line + 1, end)];
  if (head[1]) open.attrSet("open", "");
  state.push("summary_open", "summary", 1);
  Object.assign(state.push("inline", "", 0), { content: summary ?? "Details", map: [start, from], children: [] });
  state.push("summary_close", "summary", -1);
  const before = [state.lineMax, state.parentType];
  Object.assign(state, { lineMax: Math.min(line, end), parentType: "blockquote" });
  state.md.block.tokenize(state, from, Math.min(line, end));
  [state.lineMax, state.parentType] = before;
  state.push("details_close", "details", -1);
  state.line = Math.min(line + 1, end);
  return true;
}

// "[x] " at the beginning of an item becomes a box that shows whether a task is done.
function tasks({ tokens, Token }) {
  tokens.forEach((token, i) => {
    const [first] = token.children ?? [];
    const match = first?.type === "text" && tokens[i - 2]?.type === "list_item_open" && /^\[([ xX])\](?=\s)/.exec(first.content);
    if (!match) return;
    const task = Object.assign(new Token("task", "", 0), { markup: match[0], meta: { isDone: match[1] !== " " } });
    first.content = first.content.slice(match[0].length);
    token.children.unshift(task);
  });
}

function inlineFormula(state, silent) {
  const { src, pos } = state;
  const open = Object.keys(CLOSES).find((mark) => src.startsWith(mark, pos));
  if (!open) return false;
  const from = pos + open.length;
  const to = open === "$" ? dollarAfter(src, from) : src.indexOf(CLOSES[open], from);
  if (to <= from) return false;
  if (!silent) pushFormula(state, src.slice(from, to), DISPLAYED.includes(open), src.slice(pos, to + open.length));
  state.pos = to + open.length;
  return true;
}

// Returns where a formula in single dollars ends. Returns -1 for prices: space at its ends, or a digit after it.
function dollarAfter(src, from) {
  if (/\s/.test(src[from] ?? " ")) return -1;
  let to = from;
  do to = src.indexOf("$", to + 1); while (to > 0 && src[to - 1] === "\\");
  return to < 0 || /\s/.test(src[to - 1]) || /\d/.test(src[to + 1] ?? "") ? -1 : to;
}

function displayedFormula(state, start, end, silent) {
  const first = state.src.slice(state.bMarks[start] + state.tShift[start], state.eMarks[start]);
  const open = DISPLAYED.find((mark) => first.startsWith(mark));
  if (!open) return false;
  let [text, line, to] = [first.slice(2), start, first.indexOf(CLOSES[open], 2) - 2];
  while (to < 0) {
    line += 1;
    if (line >= end && !state.env.isComplete) break; // its end has not streamed yet
    if (line >= end || state.isEmpty(line) || state.sCount[line] < state.blkIndent) return false;
    const before = text.length;
    text += `\n${state.getLines(line, line + 1, state.blkIndent, false)}`;
    to = text.indexOf(CLOSES[open], before);
  }
  if (to >= 0 && text.slice(to + 2).trim()) return false; // text follows on the line
  if (silent) return true;
  const token = pushFormula(state, text.slice(0, Math.max(to, 0)), true, open + text);
  state.line = Math.min(line + 1, end);
  Object.assign(token, { block: true, map: [start, state.line] });
  return true;
}

function pushFormula(state, content, isDisplayed, markup) {
  return Object.assign(state.push("formula", "", 0), { content, markup, meta: { isDisplayed } });
}

// Small models leave out the fences of code: a paragraph with an indented line is code.
function bareCode(state, start, end) {
  const rules = state.md.block.ruler.getRules("paragraph");
  let line = start + 1;
  let isIndented = false;
  for (; line < end && !state.isEmpty(line); line += 1) {
    const indent = state.sCount[line] - state.blkIndent;
    if (indent < 0 || (indent < 4 && rules.some((rule) => rule(state, line, end, true)))) break;
    isIndented ||= indent >= 4;
  }
  if (!isIndented) return false;
  const token = state.push("code_block", "code", 0);
  Object.assign(token, { content: state.getLines(start, line, state.blkIndent, false), map: [start, line] });
  state.line = line;
  return true;
}
