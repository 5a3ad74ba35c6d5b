"use strict";
// What the scripts of the page share. Without scripts the page is complete but for charts, sorting and searching.
const report = {
  data: (id) => JSON.parse(document.getElementById(id).textContent),
  element: (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children); // text nodes: nothing of a trace is ever parsed as markup
    return made;
  },
  color: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
  number: (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
  themed: [], // called when colours change
};

// Light or dark: as the system has it, until the button says otherwise.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.textContent = isDark() ? "Light colours" : "Dark colours";
    for (const call of report.themed) call();
  };
  const remembered = () => {
    try {
      return localStorage.getItem("whatif-theme");
    } catch {
      return null; // a page from disk may have no storage
    }
  };
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("whatif-theme", root.dataset.theme);
    } catch {
      // then it is not remembered
    }
    show();
  });
  system.addEventListener("change", show);

  // Paper is white, and what is folded away on a screen cannot be opened on it.
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      details.dataset.closed = "";
    }
    show();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    for (const details of document.querySelectorAll("details[data-closed]")) {
      details.open = false;
      delete details.dataset.closed;
    }
    show();
  });
  show();
})();
