// Puts the page together and looks at the server every two seconds.
import { Conversation } from "./chat.js";
import { Counters } from "./counters.js";
import { byId } from "./elements.js";
import { drawRequests, drawSoon } from "./figures.js";
import { drawGuide, fillGuide } from "./guide.js";
import { Refused, health, metrics, models, useKey } from "./server.js";
import { model, offerModels, watchSettings } from "./settings.js";
import { Watch } from "./watch.js";

const EVERY = 2000; // ms between two looks
const STATES = {
  ok: ["ready", "ready"],
  loading: ["wait", "loading"],
  draining: ["wait", "shutting down"],
  failed: ["bad", "could not load its model"],
};

const watch = new Watch(() => drawSoon(watch));
let listed = false;
let locked = false;

function showState(kind, text) {
  byId("state").dataset.state = kind;
  byId("state").textContent = text;
}

function named(name) {
  byId("model-name").textContent = name;
  document.title = name ? `${name} · mlx_spec` : "mlx_spec";
  fillGuide(name);
}

function askForKey(problem = "") {
  locked = true;
  fillGuide(model(), true);
  byId("key-form").hidden = false;
  byId("key-problem").textContent = problem;
}

async function list() {
  offerModels(await models());
  listed = true;
  locked = false;
  byId("key-form").hidden = true;
  named(model());
}

async function look() {
  try {
    const found = await health();
    showState(...(STATES[found.status] ?? ["unknown", String(found.status)]));
    drawRequests(found);
    if (locked) return;
    if (!listed) await list();
    watch.look(new Counters(await metrics()), performance.now() / 1000);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    else if (!(error instanceof Refused)) showState("bad", "not reachable");
  }
}

async function lookOn() {
  if (!document.hidden) await look();
  setTimeout(lookOn, EVERY);
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  try {
    await list();
    byId("key").value = "";
    byId("message").focus();
  } catch (error) {
    askForKey(error.message);
  }
});

drawGuide();
fillGuide("");
watchSettings(named);
new Conversation(watch, () => askForKey());
new ResizeObserver(() => drawSoon(watch)).observe(document.querySelector(".figures"));
byId("message").focus();
lookOn();
