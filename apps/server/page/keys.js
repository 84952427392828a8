// The keys of the page. Browsers keep ⌘N and ⌘T for themselves, so a new chat has Shift.
import { byId } from "./dom.js";

const IS_MAC = navigator.platform.startsWith("Mac");

export const named = (key) => (IS_MAC ? `⌘ ${key}` : `Ctrl ${key}`);

const isTyping = (target) => target.matches("input, textarea, select, [contenteditable]");

// Calls `actions`: search, newChat, editLast, focus, stop.
export function prepareKeys(actions) {
  for (const key of document.querySelectorAll("kbd.mod")) key.textContent = IS_MAC ? "⌘" : "Ctrl";
  const take = (event, action) => {
    event.preventDefault();
    action();
  };
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const isShortcut = IS_MAC ? event.metaKey : event.ctrlKey;
    if (isShortcut && key.toLowerCase() === "k") return take(event, actions.search);
    if (isShortcut && event.shiftKey && key.toLowerCase() === "o") return take(event, actions.newChat);
    if (isShortcut || event.altKey) return;
    if (key === "Escape" && !target.closest("form.editing, #chats")) actions.stop();
    if (key === "/" && !isTyping(target)) take(event, actions.focus);
    if (key === "ArrowUp" && target === byId("message") && !target.value) take(event, actions.editLast);
  });
}
