// Charts of this page: a line over time, steps over rounds, bars by position.
import { element, percent, plural, shape } from "./elements.js";

const LEFT = 36; // px, for the numbers of the axis
const BELOW = 16;

function frame(host, label) {
  const [width, height] = [host.clientWidth, host.clientHeight];
  if (!width || !height) return null;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  host.replaceChildren(svg);
  return { svg, width, height };
}

export function empty(host, text) {
  host.replaceChildren(element("p", { class: "empty" }, text));
}

// A round number at or above the largest value.
export function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((top) => top >= value * 0.999);
}

function rule(svg, width, y, text) {
  svg.append(
    shape("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }),
    shape("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, text),
  );
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// points: {x, y}, x rising; reference: a value that a dashed line marks.
export function line(host, { points, reference, top, format, label }) {
  if (points.length < 2) return;
  const drawn = frame(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const most = top ?? ceiling(Math.max(...points.map((p) => p.y), reference ?? 0));
  const foot = height - 5;
  const span = points.at(-1).x - points[0].x || 1;
  const y = (value) => foot - (foot - 6) * (value / most);
  const at = points.map((p) => [LEFT + (width - LEFT - 4) * ((p.x - points[0].x) / span), y(p.y)]);
  const ticks = height < 80 ? [0, most] : [0, most / 2, most];
  for (const value of ticks) rule(svg, width, y(value), format(value));
  const area = `${path(at)}L${at.at(-1)[0].toFixed(1)} ${foot}L${at[0][0]} ${foot}Z`;
  svg.append(shape("path", { class: "area", d: area }), shape("path", { class: "line", d: path(at) }));
  if (reference) svg.append(shape("line", { class: "reference", x1: LEFT, x2: width, y1: y(reference), y2: y(reference) }));
  svg.append(shape("circle", { class: "dot", cx: at.at(-1)[0], cy: at.at(-1)[1], r: 3 }));
}

// values: one for each round.
export function steps(host, { values, label }) {
  if (!values.length) return;
  const drawn = frame(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const most = Math.max(4, ...values);
  const foot = height - 5;
  const y = (value) => foot - (foot - 6) * (value / most);
  const wide = (width - LEFT) / Math.max(values.length, 24);
  for (const value of [0, Math.round(most / 2), most]) rule(svg, width, y(value), String(value));
  const at = values.flatMap((value, i) => [[LEFT + wide * i, y(value)], [LEFT + wide * (i + 1), y(value)]]);
  svg.append(
    shape("path", { class: "area", d: `${path(at)}L${at.at(-1)[0].toFixed(1)} ${foot}L${LEFT} ${foot}Z` }),
    shape("path", { class: "line", d: path(at) }),
  );
}

// tried[i] rounds drafted a token at position i, got[i] of them had it accepted.
export function bars(host, { tried, got }) {
  const shares = tried.map((count, i) => (count ? (got[i] ?? 0) / count : 0));
  const label = shares.map((share, i) => `position ${i + 1}: ${percent(share)}`).join(", ");
  const drawn = frame(host, label);
  if (!drawn) return;
  const { svg, width, height } = drawn;
  const foot = height - BELOW;
  const slot = (width + 6) / Math.max(shares.length, 4);
  const wide = Math.min(slot - 6, 56);
  shares.forEach((share, i) => {
    const x = slot * i;
    const tall = (foot - 14) * share;
    svg.append(
      shape("rect", { class: "bar-back", x, y: 14, width: wide, height: foot - 14, rx: 4 }),
      shape("rect", { class: "bar-front", x, y: foot - tall, width: wide, height: tall, rx: 4 },
        shape("title", {}, `${got[i] ?? 0} of ${plural(tried[i], "draft token")} at position ${i + 1}`)),
      shape("text", { x: x + wide / 2, y: 9, "text-anchor": "middle" }, String(Math.round(share * 100))),
      shape("text", { x: x + wide / 2, y: height - 3, "text-anchor": "middle" }, String(i + 1)),
    );
  });
}
