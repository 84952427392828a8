// Syntax highlighting: finds comments, strings, numbers and keywords as ranges of a text.

const PLAIN = new Set("text txt plain plaintext output console markdown md diff log".split(" "));
const HASH = new Set(
  "python py sh bash shell zsh fish yaml yml toml ruby rb r perl makefile make dockerfile ini conf julia elixir".split(" "),
);
const DASHES = new Set("sql lua haskell hs ada".split(" "));
const TAGS = new Set("html xml svg vue".split(" "));
const KEYWORDS = new Set(`and as assert async await break case catch class const continue def default defer del do
  elif else elsif end enum except export extends false finally fn for foreach from func function global go guard if impl
  implements import in interface is lambda let loop match mod module mut namespace new nil none nonlocal not null of or
  override package pass private protected public pub raise require return self static struct super switch template then
  this throw throws trait true try type typedef typeof undefined union unless unsafe until use using val var virtual void
  when where while with yield
  True False None
  select insert update delete create table into values set join left inner outer on group order by having limit`.split(/\s+/));

const STRING = [
  /"""[\s\S]*?(?:"""|$)/, /'''[\s\S]*?(?:'''|$)/, /"(?:\\.|[^"\\\n])*"/, /'(?:\\.|[^'\\\n])*'/, /`(?:\\.|[^`\\])*`/,
].map((one) => one.source).join("|");
const NUMBER = /\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/.source;
const WORD = /[A-Za-z_]\w*/.source;

function commentOf(language) {
  if (HASH.has(language)) return /(?<![^\s;(])#.*/.source;
  if (DASHES.has(language)) return /--.*/.source;
  if (TAGS.has(language)) return /<!--[\s\S]*?(?:-->|$)/.source;
  return /\/\*[\s\S]*?(?:\*\/|$)|(?<!:)\/\/.*/.source;
}

// Returns ranges {start, end, kind} in their order, without overlaps.
export function highlights(text, name) {
  const language = name.toLowerCase();
  if (PLAIN.has(language)) return [];
  const comment = language ? commentOf(language) : "(?!)";
  const token = new RegExp(
    `(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>${WORD})`, "g");
  const spans = [];
  for (const match of text.matchAll(token)) {
    let kind = Object.keys(match.groups).find((group) => match.groups[group] !== undefined);
    if (kind === "word") {
      const isKeyword = KEYWORDS.has(DASHES.has(language) ? match[0].toLowerCase() : match[0]);
      if (!isKeyword || TAGS.has(language)) continue;
      kind = "keyword";
    }
    spans.push({ start: match.index, end: match.index + match[0].length, kind });
  }
  return spans;
}
