// Extensions of Markdown: formulas, and code without fences.

const CLOSES = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const DISPLAYED = ["$$", "\\["];

// Plugin for markdown-it. Formulas become tokens of the type "formula".
export function extendSyntax(parser) {
  parser.inline.ruler.before("escape", "formula", inlineFormula);
  parser.block.ruler.before("fence", "formula", displayedFormula, { alt: ["paragraph", "blockquote", "list"] });
  parser.block.ruler.before("paragraph", "bare_code", bareCode);
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
