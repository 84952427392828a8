// Imports conversations that this page exported as JSON. A file may come from anywhere: each field is checked.
import { newId, put, tell } from "./store.js";

const PICTURE = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);
const list = (value) => (Array.isArray(value) ? value : []);

// Returns a text with the origins of its tokens, which must be in order.
function withOrigins(answer) {
  const whole = text(answer?.text);
  const runs = [];
  for (const run of list(answer?.runs)) {
    const [start, source, position] = list(run);
    const least = runs.at(-1)?.[0] ?? -1;
    if (Number.isInteger(start) && start > least && start < whole.length) {
      runs.push([start, typeof source === "string" ? source : null, number(position) ?? 0]);
    }
  }
  if (whole && runs[0]?.[0] !== 0) runs.unshift([0, null, 0]);
  return { text: whole, runs };
}

function asExchange(record, conversation, ids) {
  return {
    id: ids.get(record.id), conversation, parent: ids.get(record.parent) ?? null, question: text(record.question),
    images: list(record.images).filter((url) => PICTURE.test(url)),
    files: list(record.files).map((file) => ({ name: text(file?.name) || "file", text: text(file?.text), tokens: number(file?.tokens) })),
    model: text(record.model), answer: withOrigins(record.answer), thinking: record.thinking ? withOrigins(record.thinking) : null,
    facts: list(record.facts).map(text), race: record.race ? list(record.race).map(text) : null, problem: text(record.problem) || null,
    tokens: number(record.tokens), thoughtMs: number(record.thoughtMs), canGoOn: record.canGoOn === true,
  };
}

function asSettings(settings) {
  if (!settings || typeof settings !== "object") return null;
  return Object.fromEntries(Object.entries(settings).filter(([, value]) => ["string", "boolean"].includes(typeof value)));
}

// Stores the conversation of an exported file under new ids, and returns its record. Throws an Error that says what is wrong.
export async function importFile(file) {
  let exported;
  try {
    exported = JSON.parse(await file.text());
  } catch {
    exported = null;
  }
  const exchanges = list(exported?.exchanges).filter((one) => typeof one?.id === "string");
  if (!exchanges.length) throw new Error(`${file.name} is not a conversation that this page exported as JSON; Markdown is only to read`);
  exchanges.sort((a, b) => (a.id < b.id ? -1 : 1)); // by age
  const ids = new Map(exchanges.map(({ id }) => [id, newId()]));
  const record = {
    id: newId(), title: text(exported.title).slice(0, 200) || file.name, leaf: ids.get(exported.leaf) ?? [...ids.values()].at(-1),
    updated: Date.now(), deleted: null, settings: asSettings(exported.settings),
  };
  await put("conversations", record);
  for (const one of exchanges) {
    const made = asExchange(one, record.id, ids);
    if (made.parent >= made.id) made.parent = null; // no circle
    await put("exchanges", made);
  }
  tell(record.id);
  return record;
}
