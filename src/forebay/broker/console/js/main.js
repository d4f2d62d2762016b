// The page: which view is shown, the keys, the theme, the token.

import { Problem, get, onTokenWanted, token, wantTokenAgain } from "./api.js";
import { byId, el, empty, problemBox, say, setText } from "./dom.js";
import { installKeys } from "./keys.js";
import { groups } from "./groups.js";
import { overview } from "./overview.js";
import { partition } from "./partition.js";
import { produce } from "./produce.js";
import { tail } from "./tail.js";
import { topics } from "./topics.js";
import { topic } from "./topic.js";

const VIEWS = [
  { pattern: ["overview"], nav: "overview", title: "Overview", show: overview },
  { pattern: ["topics"], nav: "topics", title: "Topics", show: topics },
  { pattern: ["topics", ":topic"], nav: "topics", title: "Topic", show: topic },
  { pattern: ["topics", ":topic", ":partition"], nav: "topics", title: "Partition", show: partition },
  { pattern: ["tail"], nav: "tail", title: "Live tail", show: tail },
  { pattern: ["produce"], nav: "produce", title: "Produce", show: produce },
  { pattern: ["groups"], nav: "groups", title: "Groups", show: groups.list },
  { pattern: ["groups", ":group"], nav: "groups", title: "Group", show: groups.one },
];

/** How long a view lives: its requests end with it. */
class Life {
  #ended = new AbortController();

  get signal() {
    return this.#ended.signal;
  }

  end() {
    this.#ended.abort();
  }

  /** Run now, and again while somebody looks. What fails is shown in `place`, and goes when it works again. */
  every(ms, place, work) {
    let timer = null;
    let running = false;
    const run = async () => {
      clearTimeout(timer);
      if (running || this.signal.aborted) return;
      running = true;
      try {
        if (!document.hidden) {
          await work();
          if (place.firstChild) place.replaceChildren();
        }
      } catch (error) {
        this.fail(place, error);
      } finally {
        running = false;
        if (!this.signal.aborted && ms) timer = setTimeout(run, ms);
      }
    };
    const awake = () => document.hidden || run();
    document.addEventListener("visibilitychange", awake, { signal: this.signal });
    document.addEventListener("console:refresh", run, { signal: this.signal });
    this.signal.addEventListener("abort", () => clearTimeout(timer));
    return run();
  }

  fail(place, error) {
    if (error.name === "AbortError" || this.signal.aborted) return;
    if (!(error instanceof Problem)) console.error(error);
    const known = `${error.type}: ${error.message}`;
    if (place.dataset.problem === known && place.firstChild) return;
    place.dataset.problem = known;
    place.replaceChildren(problemBox(error));
  }
}

let life = null;
let shown = null;

function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  try {
    return [path.split("/").filter(Boolean).map(decodeURIComponent), new URLSearchParams(query || "")];
  } catch {
    return [["?"], new URLSearchParams()];
  }
}

function match(parts) {
  for (const view of VIEWS) {
    if (view.pattern.length !== parts.length) continue;
    const params = {};
    const fits = view.pattern.every((part, place) => {
      if (part.startsWith(":")) params[part.slice(1)] = parts[place];
      return part.startsWith(":") || part === parts[place];
    });
    if (fits) return [view, params];
  }
  return [null, {}];
}

function route() {
  if (location.hash === "#main") return;
  const [parts, query] = parse(location.hash || "#/overview");
  const [view, params] = match(parts);
  life?.end();
  life = new Life();
  const main = byId("main");
  const root = el("div", { class: "view" });
  for (const link of document.querySelectorAll("#nav a")) {
    if (view && link.dataset.view === view.nav) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const names = Object.values(params);
  const title = view ? [view.title, ...names].join(" ") : "Not found";
  document.title = `${title} – Forebay`;
  main.replaceChildren(root);
  window.scrollTo(0, 0);
  if (view) view.show(root, { params, query, life });
  else root.append(el("h1", {}, "Not found"), empty("There is no such view.", el("a", { href: "#/overview" }, "To the overview")));
  if (shown !== null) {
    main.focus({ preventScroll: true });
    say(title);
  }
  shown = title;
}

// -- token

function tokenDialog(reason) {
  const dialog = byId("token-dialog");
  const input = byId("token-input");
  setText(byId("token-reason"), reason);
  byId("token-forget").hidden = !token.get();
  input.value = "";
  return new Promise((resolve) => {
    const done = new AbortController();
    const finish = (given) => {
      done.abort();
      input.value = "";
      dialog.close();
      showToken();
      resolve(given);
    };
    const on = (id, kind, act) => byId(id).addEventListener(kind, act, { signal: done.signal });
    on("token-form", "submit", (event) => {
      event.preventDefault();
      const given = input.value.trim();
      if (!given) return input.focus();
      token.set(given);
      return finish(true);
    });
    on("token-forget", "click", () => {
      token.forget();
      finish(false);
    });
    on("token-cancel", "click", () => finish(false));
    on("token-dialog", "cancel", (event) => {
      event.preventDefault();
      finish(false);
    });
    dialog.showModal();
    input.focus();
  });
}

function showToken() {
  setText(byId("token-button"), token.get() ? "Token: set" : "Token");
}

function installToken() {
  onTokenWanted(tokenDialog);
  showToken();
  byId("token-button").addEventListener("click", async () => {
    await tokenDialog(token.get() ? "A token is set." : "No token is set.");
    wantTokenAgain();
    route();
  });
}

// -- theme

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme-button"), `Theme: ${theme}`);
  try {
    localStorage.setItem("forebay.theme", theme);
  } catch {
    // It holds until the page is left.
  }
}

function nextTheme() {
  const now = document.documentElement.dataset.theme || "auto";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  setTheme(next);
  say(`Theme: ${next}`);
}

// -- start

async function showBroker() {
  try {
    const health = await get("/health");
    setText(byId("broker"), health.broker_id);
    byId("broker").title = `${health.host}:${health.port}`;
  } catch {
    setText(byId("broker"), "");
  }
}

setText(byId("theme-button"), `Theme: ${document.documentElement.dataset.theme || "auto"}`);
byId("theme-button").addEventListener("click", nextTheme);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
installToken();
installKeys({ nextTheme });
window.addEventListener("hashchange", route);
showBroker();
route();
