// How to use the endpoint from elsewhere, with the real address and model.
import { byId, copying, element } from "./elements.js";

const CLIENTS = [
  ["curl", (base, model) => `curl ${base}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer $KEY" \\
  -d '${JSON.stringify({ model, messages: [{ role: "user", content: "What does zip do?" }] })}'`],
  ["Python", (base, model) => `from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=KEY)
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "What does zip do?"}],
)
print(answer.choices[0].message.content)`],
  ["Environment", (base) => `export OPENAI_BASE_URL=${base}/v1
export OPENAI_API_KEY=$KEY`],
  ["Claude Code", (base, model) => `export ANTHROPIC_BASE_URL=${base}
export ANTHROPIC_AUTH_TOKEN=$KEY
export ANTHROPIC_MODEL=${model}
claude`],
];

const panels = new Map();
let needsKey = false;
let named = "";

export function drawGuide() {
  const [tabs, host] = [document.querySelector(".tabs"), document.querySelector(".panels")];
  for (const [name] of CLIENTS) {
    const id = name.toLowerCase().replace(" ", "-");
    const tab = element("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}` }, name);
    const code = element("code");
    const copy = element("button", { type: "button", class: "quiet" }, "Copy");
    copying(copy, () => code.textContent);
    const panel = element("div", { class: "panel", role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}` },
      element("pre", { tabindex: "0" }, code), copy);
    panels.set(name, { tab, panel, code });
    tab.addEventListener("click", () => choose(name));
    tab.addEventListener("keydown", (event) => step(event, name));
    tabs.append(tab);
    host.append(panel);
  }
  choose(CLIENTS[0][0]);
  byId("endpoint").textContent = `${location.origin}/v1`;
  copying(document.querySelector("[data-copy=endpoint]"), () => byId("endpoint").textContent);
  byId("guide-toggle").addEventListener("click", toggle);
}

function toggle() {
  const guide = byId("guide");
  guide.hidden = !guide.hidden;
  byId("guide-toggle").setAttribute("aria-expanded", String(!guide.hidden));
}

export function fillGuide(model, locked = needsKey) {
  [named, needsKey] = [model || named, locked];
  for (const [name, text] of CLIENTS) panels.get(name).code.textContent = keyed(name, text(location.origin, named));
}

// Without a key the clients still want some text; curl does without.
function keyed(name, text) {
  if (name === "Python") return text.replace("=KEY", needsKey ? '="YOUR_KEY"' : '="none"');
  if (needsKey) return text.replace("$KEY", "YOUR_KEY");
  return name === "curl" ? text.replace(/.*Authorization.*\n/, "") : text.replace("$KEY", "none");
}

function choose(name) {
  for (const [other, { tab, panel }] of panels) {
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    panel.hidden = other !== name;
  }
}

function step(event, name) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const names = [...panels.keys()];
  const next = names[(names.indexOf(name) + by + names.length) % names.length];
  choose(next);
  panels.get(next).tab.focus();
}
