// The meter of the context: how many tokens the conversation and the message to be sent take, counted by the server.
import { byId } from "./dom.js";
import { getJson } from "./server.js";

const PAUSE_MS = 400; // after the last change, until the tokens are counted

// Returns the tokens of messages in the form of the API, or null if the server does not say.
export async function countTokens(model, messages) {
  const system = messages.filter(({ role }) => role === "system").map(({ content }) => content).join("\n\n");
  const others = messages.filter(({ role }) => role !== "system").map(({ role, content }) => ({ role, content: blocks(content) }));
  const body = JSON.stringify({ model, ...(system ? { system } : {}), messages: others });
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body };
    return (await getJson("v1/messages/count_tokens", options)).input_tokens;
  } catch { // no server, no model or no key: an answer will say so
    return null;
  }
}

// Returns a content in the form of Anthropic's API, which counts tokens.
function blocks(content) {
  if (typeof content === "string") return content;
  return content.map((block) => {
    if (block.type === "text") return block;
    const [, type, data] = /^data:([^;]*);base64,(.*)$/s.exec(block.image_url.url) ?? [];
    return { type: "image", source: { type: "base64", media_type: type, data } };
  });
}

export class ContextMeter {
  // `state` returns {model, most, used, messages}; `messages` is null while there is nothing to send.
  constructor(state) {
    Object.assign(this, { state, timer: 0, asked: 0 });
  }

  // Draws what is known, and counts soon.
  update() {
    clearTimeout(this.timer);
    const { messages, used, most } = this.state();
    this.asked += 1;
    if (messages) this.timer = setTimeout(() => this.#count(), PAUSE_MS);
    else this.#draw(used, most);
  }

  async #count() {
    const { model, messages, most } = this.state();
    const mine = this.asked += 1;
    if (!messages) return;
    const tokens = await countTokens(model, messages);
    if (mine === this.asked) this.#draw(tokens, most);
  }

  #draw(tokens, most) {
    byId("context").hidden = !tokens || !most;
    if (!tokens || !most) return;
    const [count, all] = [tokens, most].map((number) => number.toLocaleString("en"));
    const isOver = tokens >= most;
    Object.assign(byId("context-meter"), { max: most, value: Math.min(tokens, most), high: 0.9 * most, optimum: 0 });
    byId("context-words").textContent = isOver ? `${count} tokens: more than the ${all} of the context` : `${count} of ${all} tokens`;
    byId("context").classList.toggle("problem", isOver);
  }
}
