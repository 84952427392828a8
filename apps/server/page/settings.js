// What the user has set for the next answer.
import { byId, element } from "./elements.js";

let cards = [];

export function offerModels(found) {
  cards = found;
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...found.map((card) => element("option", { value: card.id }, card.id)));
  if (found.some((card) => card.id === chosen)) select.value = chosen;
  changed();
}

export function model() {
  return byId("model").value || cards[0]?.id || "";
}

// The fields of a request but its messages.
export function fields() {
  const body = { model: model() };
  const temperature = byId("temperature").valueAsNumber;
  const most = byId("max-tokens").valueAsNumber;
  if (Number.isFinite(temperature)) body.temperature = temperature;
  if (Number.isFinite(most)) body.max_completion_tokens = most;
  if (byId("thinking").checked && !byId("thinking").disabled) body.chat_template_kwargs = { enable_thinking: true };
  return body;
}

export function system() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

export function changed() {
  const card = cards.find((one) => one.id === model());
  byId("thinking").disabled = card?.thinks === false;
  const { temperature, max_completion_tokens: most, chat_template_kwargs: thinks } = fields();
  const parts = [temperature ? `temperature ${temperature}` : "greedy"];
  if (most) parts.push(`up to ${most} tokens`);
  if (thinks) parts.push("thinking");
  if (system().length) parts.push("system prompt");
  byId("settings-summary").textContent = parts.join(" · ");
  byId("log").classList.toggle("origins", byId("highlight").checked);
  byId("legend").hidden = !byId("highlight").checked;
}

export function watchSettings(onModel) {
  byId("settings").addEventListener("input", () => {
    changed();
    onModel(model());
  });
  changed();
}
