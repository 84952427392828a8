// Where a piece of text came from, in words and as a class of the style sheet.
import { element } from "./elements.js";

const SHADES = 8;
const OWN = {
  lookup: "lookup in the text so far",
  grammar: "forced by the grammar",
  prediction: "the client's prediction",
};

export function classes(run) {
  if (!run.source) return ["run", "target"];
  if (run.source in OWN) return ["run", run.source];
  return ["run", "drafter", `k${Math.min(Math.max(run.position, 1), SHADES)}`];
}

export function words(run) {
  if (!run.source) return "made by the model itself";
  const place = run.position ? `, token ${run.position} of its draft` : "";
  return `drafted: ${OWN[run.source] ?? run.source}${place}`;
}

// The entries for what has been seen; the model's own text and its drafter are always explained.
export function drawLegend(host, seen) {
  const drafters = [...seen].filter((source) => source && !(source in OWN));
  const shades = Array.from({ length: SHADES }, (_, i) => swatch(`drafter k${i + 1}`));
  const entries = [
    entry([swatch("target")], "the model itself"),
    entry(shades, `drafted${drafters.length ? ` by ${drafters.join(", ")}` : ""}, 1st to ${SHADES}th token`),
  ];
  for (const source of Object.keys(OWN)) {
    if (seen.has(source)) entries.push(entry([swatch(source)], source));
  }
  entries.push(entry([swatch("edge")], "a round begins"));
  host.replaceChildren(...entries);
}

function entry(swatches, text) {
  return element("span", { class: "entry" },
    element("span", { class: "swatches", "aria-hidden": "true" }, ...swatches), text);
}

function swatch(name) {
  return element("span", { class: `run ${name}` });
}
