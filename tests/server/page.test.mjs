// The page's functions without a browser, in Node's own runner. PAGE is a folder with the page's files.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const path = (name) => `${process.env.PAGE}/${name}`;
const load = (name) => import(pathToFileURL(path(name)));
vm.runInThisContext(readFileSync(path("vendor/markdown-it.min.js"), "utf8")); // a script of the page, not a module

const { bytes, decimal, duration, percent, plural, speed } = await load("dom.js");
const { asContent, fenced } = await load("attachments.js");
const { asMessages, summary } = await load("exchange.js");
const { highlights } = await load("highlight.js");
const { extendSyntax } = await load("extensions.js");
const { isModel, sourceWords } = await load("origins.js");
const { markdown } = await load("pictures.js");

test("numbers are short, and what is not known is a dash", () => {
  assert.deepEqual([decimal(2.25, 1), decimal(1234.5), speed(99.94), speed(123.4)], ["2.3", "1235", "99.9", "123"]);
  assert.deepEqual([percent(0.125), plural(1, "token"), plural(0, "token")], ["13%", "1 token", "0 tokens"]);
  assert.deepEqual([0, 999, 1000, 12_345_678, 3e15].map(bytes), ["0 B", "999 B", "1.0 kB", "12 MB", "3000 TB"]);
  assert.deepEqual([0.4, 999, 1000, 61_250].map(duration), ["0 ms", "999 ms", "1.0 s", "61.3 s"]);
  for (const show of [bytes, decimal, duration, percent, speed])
    assert.deepEqual([undefined, null, NaN, Infinity, "1"].map((value) => show(value)), Array(5).fill("–"));
});

test("files stand before the question, between fences longer than any in them", () => {
  assert.equal(fenced("a\n"), "```\na\n```");
  assert.equal(fenced("x ````` y"), "``````\nx ````` y\n``````");
  const files = [{ name: "a.py", text: "1" }, { name: "b", text: "2" }];
  const text = "a.py\n```\n1\n```\n\nb\n```\n2\n```\n\nWhy?";
  assert.equal(asContent("Why?", [], files), text);
  const picture = { type: "image_url", image_url: { url: "data:x" } };
  assert.deepEqual(asContent("Why?", ["data:x"], files), [picture, { type: "text", text }]);
  assert.deepEqual(asContent("", ["data:x"], []), [picture]);
});

test("an exchange without an answer is no message", () => {
  const exchange = { question: "Q", answer: { text: "" } };
  assert.deepEqual(asMessages(exchange), []);
  exchange.answer.text = "A";
  assert.deepEqual(asMessages(exchange), [{ role: "user", content: "Q" }, { role: "assistant", content: "A" }]);
});

test("the facts below an answer", () => {
  const timings = {
    gain_words: "2.0 × faster", generated_tokens: 20, tokens_per_second: 123.4, drafted: 12, accepted: 9,
    tokens_per_pass: 2.5, ttft_ms: 1500, reused_tokens: 1, batch_size: 1,
  };
  const facts = ["2.0 × faster", "123 tokens/s", "9 of 20 tokens drafted", "2.5 a pass"];
  facts.push("first token after 1.5 s", "1 prompt token reused");
  assert.deepEqual(summary({ timings, reason: "stop" }, 20), facts);
  assert.equal(summary({ timings, reason: "length" }, 20).at(-1), "cut at the longest answer allowed");
  assert.equal(summary({ timings, reason: "length" }, 99).at(-1), "cut: the context is full");
  assert.deepEqual(summary({ usage: { completion_tokens: 1 }, stopped: true }), ["1 token", "stopped"]);
  const busy = { generated_tokens: 3, batch_size: 3.04, longest_pause_ms: 80, reason_words: "too dear here" };
  const said = ["3 tokens", "3.0 answers in a pass", "longest pause 80 ms", "drafts: too dear here"];
  assert.deepEqual(summary({ timings: busy }), said);
});

test("code is coloured by its language", () => {
  const kinds = (text, name) => highlights(text, name).map(({ start, end, kind }) => `${kind}:${text.slice(start, end)}`);
  assert.deepEqual(kinds("return 'a # b'  # 1", "Python"), ["keyword:return", "string:'a # b'", "comment:# 1"]);
  assert.deepEqual(kinds("SELECT 0x1f -- all", "sql"), ["keyword:SELECT", "number:0x1f", "comment:-- all"]);
  assert.deepEqual(kinds("if (a) /* b", "js"), ["keyword:if", "comment:/* b"]); // its end has not streamed yet
  assert.deepEqual(kinds("if <!-- if -->", "html"), ["comment:<!-- if -->"]);
  assert.deepEqual([kinds("if 1", "text"), kinds("# if", "")], [[], ["keyword:if"]]);
});

test("formulas, prices, tasks, footnotes and folds", () => {
  const parser = globalThis.markdownit({ html: false, breaks: true }).use(extendSyntax);
  const flat = (tokens) => tokens.flatMap((one) => [one, ...flat(one.children ?? [])]);
  const types = (text) => flat(parser.parse(text, {})).map(({ type }) => type);
  const formulas = (text) => flat(parser.parse(text, {})).filter(({ type }) => type === "formula");
  assert.deepEqual(formulas("$a$ \\(b\\) $$c$$").map(({ content }) => content), ["a", "b", "c"]);
  assert.deepEqual(formulas("It costs $5 or $6, $ x $ or \\$y$."), []);
  assert.deepEqual(formulas("$$\n\\frac{1}{2}\n+ x").map(({ block }) => block), [true]); // it streams
  assert.ok(types("- [x] done").includes("task") && !types("[x] done").includes("task"));
  assert.ok(types("A claim[^1].\n\n[^1]: here").filter((type) => type === "footnote_mark").length === 2);
  const folded = types("<details><summary>More</summary>\n- a\n</details>");
  assert.ok(folded.includes("details_open") && folded.includes("bullet_list_open"));
  assert.ok(!types("<b>text</b>").includes("html_inline") && types("a<br>b").includes("hardbreak"));
  assert.ok(types("def f(x):\n    return x").includes("code_block"));
});

test("origins in words, and pictures of an exported answer", () => {
  assert.deepEqual(["lookup", "mtp"].map(sourceWords), ["copied from the text", "drafter"]);
  assert.deepEqual(["lookup", "mtp"].map(isModel), [false, true]);
  const [shown, addresses] = markdown(["data:a", "data:b"], 3);
  assert.deepEqual(shown, ["![Picture 3][picture-3]", "![Picture 4][picture-4]"]);
  assert.deepEqual(addresses, ["[picture-3]: data:a", "[picture-4]: data:b"]);
});
