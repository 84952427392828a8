// Makes elements of the document, keeps values in the browser's storage, and formats numbers.

const SVG = "http://www.w3.org/2000/svg"; // a name, never fetched

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function announce(text) {
  byId("announce").textContent = text;
}

const SAID_MS = 1500; // how long a button shows "Copied"

// Returns a button that copies what `text` returns.
export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", class: "small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy by hand"; // browsers have a clipboard on localhost and https only
    }
    announce(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, SAID_MS);
  });
  return button;
}

// --- values that survive a reload: in "sessionStorage" for this tab, in "localStorage" for this browser

export function recall(storage, key) {
  try {
    return JSON.parse(window[storage].getItem(key));
  } catch {
    return null; // storage is blocked, or the value is not JSON
  }
}

// Stores a value; null removes it. Returns false if storage is full or blocked.
export function keep(storage, key, value) {
  try {
    if (value === null) window[storage].removeItem(key);
    else window[storage].setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// --- numbers

export const known = (value) => typeof value === "number" && Number.isFinite(value);

export function decimal(value, digits = 1) {
  return known(value) ? value.toFixed(value >= 1000 ? 0 : digits) : "–";
}

export function speed(value) {
  return decimal(value, value >= 100 ? 0 : 1);
}

export function percent(share) {
  return known(share) ? `${Math.round(share * 100)}%` : "–";
}

export function bytes(count) {
  if (!known(count)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) {
    count /= 1000;
    at += 1;
  }
  return `${count.toFixed(count < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function duration(milliseconds) {
  if (!known(milliseconds)) return "–";
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
