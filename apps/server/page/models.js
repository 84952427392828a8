// The models of this machine: what is on the disk, what can be fetched, and what to do with them.
import { announce, byId, bytes, element, known } from "./dom.js";
import { getJson } from "./server.js";

const POLL_MS = 1000; // while something is fetched or loaded

export class ModelsDialog {
  // `chosen` is called with the served name of a model that was loaded, `changed` when the server offers others.
  constructor({ chosen, changed }) {
    Object.assign(this, { chosen, changed, list: null, wanted: null, timer: 0, isOffered: false });
    this.dialog = byId("models");
    this.problem = byId("models-problem");
    byId("close-models").addEventListener("click", () => this.dialog.close());
    byId("show-models").addEventListener("click", () => this.show());
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
  }

  // Asks whether this page may manage models, and shows the button for that if so.
  async prepare() {
    this.isOffered = await getJson("page/models/progress").then(() => true, () => false);
    byId("show-models").hidden = !this.isOffered;
    if (location.hash === "#models") await this.show(); // as the menu of macOS asks
  }

  async show() {
    if (!this.isOffered || this.dialog.open) return;
    this.#say("");
    this.dialog.showModal();
    await this.#read();
  }

  // Loads the model that is served by a name, if it is on the disk, and closes.
  async load(name) {
    await this.show();
    const model = this.list?.disk.find(({ shown }) => shown === name);
    if (!model) return this.#say(`${name} is not on this disk`);
    this.closes = true;
    return this.#load(model);
  }

  async #read() {
    try {
      this.list = await getJson("page/models");
    } catch (error) {
      this.#say(error.message);
    }
    if (!this.list) return;
    this.draw();
    this.#follow();
  }

  // Follows downloads and loads until they end.
  #follow() {
    clearTimeout(this.timer);
    const { fetches, loading } = this.list;
    const isBusy = fetches.some(({ state }) => state === "running") || loading || this.wanted;
    if (isBusy) this.timer = setTimeout(() => this.#look(), POLL_MS);
  }

  async #look() {
    try {
      const before = this.list.fetches.filter(({ state }) => state === "running").length;
      Object.assign(this.list, await getJson("page/models/progress"));
      const { fetches, loaded, problems } = this.list;
      if (before > fetches.filter(({ state }) => state === "running").length) return this.#read();
      if (this.wanted && loaded.includes(this.wanted)) {
        announce(`${this.wanted} is loaded`);
        this.chosen(this.wanted);
        this.wanted = null;
        if (this.closes) this.dialog.close();
        this.closes = false;
      } else if (problems[this.wanted]) {
        this.#say(problems[this.wanted]);
        this.wanted = null;
      }
    } catch (error) {
      this.#say(error.message);
    }
    this.draw();
    return this.#follow();
  }

  #say(text) {
    this.problem.textContent = text;
    this.problem.hidden = !text;
  }

  async #act(action, name) {
    this.#say("");
    const options = {
      method: "POST", body: JSON.stringify({ name }),
      headers: { "content-type": "application/json", "x-page-token": this.list.token },
    };
    try {
      return await getJson(`page/models/${action}`, options);
    } catch (error) {
      this.#say(error.message);
      return null;
    }
  }

  async #load(model) {
    this.wanted = model.shown;
    if (!await this.#act("load", model.name)) this.wanted = null;
    this.changed();
    await this.#look();
  }

  async #unload(model) {
    await this.#act("unload", model.name);
    setTimeout(() => this.#read(), POLL_MS); // it goes with the next turn of the engine
  }

  // Asks before anything is fetched: how much, and whether there is space.
  async #fetch(name) {
    const plan = await this.#act("plan", name);
    if (!plan) return;
    const size = known(plan.missing) ? `${bytes(plan.missing)} for ` : "";
    const question = `Fetch ${size}${name}? ${bytes(plan.free)} are free on this disk.`;
    if (!await this.#ask(question, "Fetch")) return;
    if (await this.#act("fetch", name)) await this.#read();
  }

  async #remove(model) {
    if (!await this.#ask(`Remove ${model.shown} from this disk? ${bytes(model.size)} are freed.`, "Remove")) return;
    if (await this.#act("remove", model.name)) this.changed();
    await this.#read();
  }

  // Asks a question. Resolves to true for yes.
  #ask(question, yes) {
    return new Promise((resolve) => {
      const box = element("div", { class: "question", role: "alertdialog", "aria-label": question }, element("p", {}, question));
      const answer = (value) => () => { box.remove(); resolve(value); };
      box.append(button(yes, answer(true), ""), button("Cancel", answer(false)));
      this.dialog.querySelector(".question")?.remove();
      this.problem.before(box);
      box.querySelector("button").focus();
    });
  }

  draw() {
    const { disk, catalogue, fetches } = this.list;
    byId("models-disk").replaceChildren(...disk.map((model) => this.#row(model)));
    byId("models-catalogue").replaceChildren(...catalogue.map((entry) => {
      const fetch = fetches.find(({ name }) => name === entry.name);
      const facts = entry.drafter ? [`with its drafter ${entry.drafter}`] : [];
      return this.#entry(entry.name, facts, this.#fetchParts(fetch, entry.name, "Get"));
    }));
  }

  #fetchParts(fetch, name, word) {
    if (fetch?.state === "running") {
      const label = fetch.total ? `${bytes(fetch.bytes)} of ${bytes(fetch.total)}` : "fetching";
      const bar = element("progress", { "aria-label": label, ...(fetch.total ? { max: fetch.total, value: fetch.bytes } : {}) });
      return [bar, element("span", { class: "aside" }, label), button("Stop", () => this.#act("stop", name))];
    }
    const problem = fetch?.problem ? [element("span", { class: "problem" }, fetch.problem)] : [];
    const isBegun = fetch && fetch.state !== "done";
    return [...problem, button(isBegun ? "Go on" : word, () => this.#fetch(name))];
  }

  #row(model) {
    const { loaded, loading, fetches } = this.list;
    const isLoaded = loaded.includes(model.shown);
    const context = `with ${model.context >= 1024 ? `${Math.floor(model.context / 1024)}k` : model.context} of context`;
    const fits = model.fits === null ? [] : [model.fits ? `fits ${context}` : `does not fit ${context} (${bytes(model.memory)})`];
    const facts = [bytes(model.size), ...fits, ...(model.drafter ? [`drafter: ${model.drafter}`] : []),
      ...(known(model.gain) ? [`about ${model.gain.toFixed(1)} × faster expected`] : []), ...(isLoaded ? ["loaded"] : [])];
    const parts = [];
    if (model.problem?.startsWith("incomplete")) parts.push(...this.#fetchParts(fetches.find(({ name }) => name === model.name), model.name, "Go on"));
    else if (model.problem) parts.push(element("span", { class: "problem" }, model.problem));
    else if (loading === model.shown || this.wanted === model.shown) parts.push(element("span", { class: "aside", role: "status" }, "loading …"));
    else if (isLoaded) parts.push(button("Chat", () => { this.dialog.close(); this.chosen(model.shown); }, ""), button("Unload", () => this.#unload(model)));
    else parts.push(button("Load", () => this.#load(model)));
    if (model.removable && !isLoaded) parts.push(button("Remove", () => this.#remove(model)));
    return this.#entry(model.shown, facts, parts);
  }

  #entry(name, facts, parts) {
    return element("li", {}, element("div", {}, element("strong", {}, name), element("p", { class: "aside" }, facts.join(" · "))),
      element("div", { class: "row" }, ...parts));
  }
}

function button(text, action, kind = "quiet") {
  const made = element("button", { type: "button", class: kind }, text);
  made.addEventListener("click", action);
  return made;
}
