// The settings of requests: the model, its sampling, the system prompt. Each conversation has its own; presets have names.
import { byId, bytes, element, keep, recall } from "./dom.js";

const KEPT = "mlx_spec.settings"; // the last ones of this browser: a new conversation takes them, without the system prompt
const PRESETS = "mlx_spec.presets"; // settings by name
// Parameters of the API -> [label, least, most, step, placeholder]. An empty field is not sent.
const NUMBERS = {
  temperature: ["Temperature", 0, 2, 0.1, "0: the likeliest token"],
  max_completion_tokens: ["Longest answer, in tokens", 1, null, 1, "the context"],
  top_p: ["Top p", 0, 1, 0.05, "1: all"],
  top_k: ["Top k", 0, null, 1, "0: all"],
  min_p: ["Min p", 0, 1, 0.01, "0: all"],
  seed: ["Seed", 0, null, 1, "by chance"],
  presence_penalty: ["Presence penalty", -2, 2, 0.1, "0"],
  frequency_penalty: ["Frequency penalty", -2, 2, 0.1, "0"],
  repetition_penalty: ["Repetition penalty", 0, 2, 0.05, "1"],
};
const FIRST = { max_completion_tokens: "2048" }; // as in the terminal
const idOf = (name) => name.replaceAll("_", "-");
const IDS = [...Object.keys(NUMBERS).map(idOf), "system"];

let cards = []; // of the models that the server offers
let wanted = ""; // the model of the conversation; another one is shown if the server does not offer it

const modelName = () => byId("model").value;
export const chosenCard = () => cards.find((card) => card.id === modelName());
export const servedName = () => chosenCard()?.model ?? modelName(); // the name behind an alias
export const hasSeveral = () => cards.length > 1;

export function offerModels(offered) {
  const select = byId("model");
  cards = offered;
  select.replaceChildren(...offered.map((card) => element("option", { value: card.id }, card.id)));
  if (offered.some((card) => card.id === wanted)) select.value = wanted;
  describe();
}

// Returns the model of the conversation if the server does not offer it; null if it does.
export const awayModel = () => (cards.length && wanted && wanted !== modelName() ? wanted : null);

// Chooses a model as if the user did.
export function chooseModel(name) {
  byId("model").value = name;
  byId("model").dispatchEvent(new Event("change"));
}

// Sampling as in the model's generation_config.json; greedy without.
const ownSampling = () => ({ temperature: 0, ...chosenCard()?.sampling });

// Returns the fields of a request without its messages.
export function requestFields() {
  const fields = { model: modelName(), ...ownSampling() };
  for (const name of Object.keys(NUMBERS)) {
    const value = byId(idOf(name)).valueAsNumber;
    if (Number.isFinite(value)) fields[name] = value;
  }
  if (chosenCard()?.thinks) fields.chat_template_kwargs = { enable_thinking: byId("thinking").checked };
  return fields;
}

export function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function describe() {
  const name = modelName();
  document.title = name ? `${name} · mlx_spec` : "mlx_spec";
  byId("can-think").hidden = !chosenCard()?.thinks;
  const { model: _, temperature, max_completion_tokens: most, chat_template_kwargs: thinks, ...others } = requestFields();
  const stated = chosenCard()?.sampling ?? {};
  const suffix = (name) => name in stated && byId(idOf(name)).value === "" ? ", the model's own" : "";
  for (const [name, [, , , , empty]] of Object.entries(NUMBERS)) {
    byId(idOf(name)).placeholder = name in stated ? `${stated[name]}, the model's own` : empty;
  }
  const parts = [`temperature ${temperature}${suffix("temperature")}`];
  if (most) parts.push(`up to ${most} tokens`);
  for (const [key, value] of Object.entries(others)) parts.push(`${key.replaceAll("_", " ")} ${value}${suffix(key)}`);
  if (thinks?.enable_thinking) parts.push("thinking");
  if (systemMessages().length) parts.push("system prompt");
  byId("settings-summary").textContent = parts.join(" · ");
  byId("context-note").textContent = contextWords(chosenCard()?.contexts ?? []);
}

// Says what conversations of some lengths take, with the model itself.
function contextWords(contexts) {
  const words = contexts.map(({ tokens, bytes: size, fits }) =>
    `${Math.floor(tokens / 1024)}k ${bytes(size)}${fits ? "" : " (too much here)"}`);
  return words.length ? `Model and context: ${words.join(", ")}` : "";
}

// Returns the settings as they are in the fields.
export function currentSettings() {
  const values = Object.fromEntries(IDS.map((id) => [id.replaceAll("-", "_"), byId(id).value]));
  return { ...values, model: modelName() || wanted, thinking: byId("thinking").checked };
}

// Fills the fields: with the settings of a conversation, or for a new one as last time.
export function showSettings(settings) {
  const values = settings ?? { ...FIRST, ...recall("localStorage", KEPT), system: "" };
  for (const id of IDS) byId(id).value = values[id.replaceAll("-", "_")] ?? "";
  byId("thinking").checked = Boolean(values.thinking);
  wanted = values.model || wanted;
  if (cards.some(({ id }) => id === wanted)) byId("model").value = wanted;
  drawPresets("");
  describe();
}

function drawPresets(chosen) {
  const names = Object.keys(recall("localStorage", PRESETS) ?? {}).sort();
  byId("preset").replaceChildren(...["", ...names].map((name) => element("option", { value: name }, name || "none")));
  byId("preset").value = chosen;
  byId("remove-preset").hidden = !chosen;
}

function preparePresets(changed) {
  const update = (name, settings) => {
    const { [name]: _, ...others } = recall("localStorage", PRESETS) ?? {};
    keep("localStorage", PRESETS, settings ? { ...others, [name]: settings } : others);
    drawPresets(settings ? name : "");
  };
  byId("preset").addEventListener("change", () => {
    const name = byId("preset").value;
    const settings = recall("localStorage", PRESETS)?.[name];
    if (!settings) return;
    showSettings(settings);
    drawPresets(name);
    changed();
  });
  byId("keep-preset").addEventListener("click", () => {
    const name = byId("preset-name").value.trim() || byId("preset").value;
    if (name) update(name, currentSettings());
    else byId("preset-name").focus();
    byId("preset-name").value = "";
  });
  byId("remove-preset").addEventListener("click", () => update(byId("preset").value, null));
}

// Draws the fields. Calls `changed` after each change.
export function prepareSettings(changed) {
  for (const [name, [label, least, most, step, empty]] of Object.entries(NUMBERS)) {
    const id = idOf(name);
    const limits = { min: String(least), ...(most === null ? {} : { max: String(most) }), step: String(step) };
    byId("numbers").append(element("div", { class: "field" }, element("label", { for: id }, label),
      element("input", { id, type: "number", inputmode: "decimal", placeholder: empty, ...limits })));
  }
  const change = (event) => {
    if (event?.target.matches("#preset, #preset-name")) return;
    wanted = modelName() || wanted;
    keep("localStorage", KEPT, currentSettings());
    describe();
    changed();
  };
  byId("settings").addEventListener("input", change);
  byId("model").addEventListener("change", change);
  preparePresets(change);
}
