// Shortcuts. Single keys can be turned off, for those whose tools type them by accident.

import { byId, el } from "./dom.js";

const SETTING = "forebay.keys";
const GO = { o: "overview", t: "topics", l: "tail", p: "produce", g: "groups" };
const LEADER_MS = 1500;

const SHOWN = [
  ["g o", "overview"],
  ["g t", "topics"],
  ["g l", "live tail"],
  ["g p", "produce"],
  ["g g", "groups"],
  ["/", "to the filter, or the first field"],
  ["r", "ask the broker again"],
  ["p", "pause and resume the live tail"],
  ["Ctrl Enter", "send the record, in Produce"],
  ["d", "auto, light, dark"],
  ["?", "this list"],
  ["Esc", "close, or leave a field"],
];

const enabled = () => {
  try {
    return localStorage.getItem(SETTING) !== "off";
  } catch {
    return true;
  }
};

const isTyping = (node) => node instanceof HTMLElement && (node.matches("input, textarea, select") || node.isContentEditable);

function help() {
  const dialog = byId("help-dialog");
  if (!dialog.open) dialog.showModal();
}

function toFilter() {
  const main = byId("main");
  const target = main.querySelector("input[type=search]") || main.querySelector("input, select, textarea");
  target?.focus();
}

export function installKeys({ nextTheme }) {
  const single = {
    "?": help,
    "/": toFilter,
    d: nextTheme,
    r: () => document.dispatchEvent(new CustomEvent("console:refresh")),
    p: () => document.dispatchEvent(new CustomEvent("console:pause")),
  };
  let leaderAt = -Infinity;
  byId("help-keys").append(
    ...SHOWN.map(([keys, text]) =>
      el("div", {}, el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, text)),
    ),
  );
  byId("help-button").addEventListener("click", help);
  byId("help-close").addEventListener("click", () => byId("help-dialog").close());
  const box = byId("keys-on");
  box.checked = enabled();
  box.addEventListener("change", () => {
    try {
      localStorage.setItem(SETTING, box.checked ? "on" : "off");
    } catch {
      box.checked = true;
    }
  });

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isTyping(event.target) && !event.target.closest("dialog")) event.target.blur();
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(event.target) || document.querySelector("dialog[open]") || !enabled()) return;
    const led = event.timeStamp - leaderAt < LEADER_MS;
    leaderAt = -Infinity;
    if (led && Object.hasOwn(GO, event.key)) location.hash = `#/${GO[event.key]}`;
    else if (event.key === "g") leaderAt = event.timeStamp;
    else if (Object.hasOwn(single, event.key)) single[event.key]();
    else return;
    event.preventDefault();
  });
}
