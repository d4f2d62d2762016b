// Before the first paint, so that a dark room stays dark. `auto` follows the system.
"use strict";
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("forebay.theme");
  } catch {
    // Storage may be forbidden; the system's theme is a good answer then.
  }
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
})();
