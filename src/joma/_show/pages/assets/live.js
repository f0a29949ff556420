// A page that is served while runs go on: it asks for changes and takes them over in its place, where the reader is.
"use strict";
(() => {
  const state = () => document.getElementById("live");
  const held = (node) => node.matches(".over, figure") || node.querySelector("figure"); // what the reader has set
  // one element after the other; false if the two are not built alike
  function takeOver(now, next) {
    const [old, fresh] = [[...now.children], [...next.children]];
    if (old.length !== fresh.length || old.some((node, n) => node.tagName !== fresh[n].tagName)) return false;
    return old.every((node, n) => {
      if (node.matches(".over, figure")) return true;
      if (held(node)) return takeOver(node, fresh[n]);
      if (node.matches("details")) fresh[n].toggleAttribute("open", node.open);
      if (node.outerHTML !== fresh[n].outerHTML) node.replaceWith(document.importNode(fresh[n], true));
      return true;
    });
  }
  async function follow() {
    const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
    const ids = (root) => [...root.querySelectorAll("main section[id], .chart")].map((node) => node.id).join(" ");
    const alike = ids(document) === ids(page) &&
      [...document.querySelectorAll("main section[id]")].every((section) => takeOver(section, page.getElementById(section.id)));
    if (!alike) return location.reload(); // a new figure, or a new run; the browser keeps the place
    const changed = [];
    for (const fresh of page.querySelectorAll('script[type="text/plain"]')) {
      const file = document.getElementById(fresh.id);
      if (!file || file.textContent === fresh.textContent) continue;
      file.textContent = fresh.textContent;
      const box = document.querySelector(`.chart[data-spec="${CSS.escape(fresh.id)}"]`);
      if (box) { specs.delete(box.id); changed.push(box); }
    }
    for (const box of changed) await draw(box);
    state().replaceWith(document.importNode(page.getElementById("live"), true));
    joma.followed = performance.now();
  }
  async function ask() {
    try {
      if (await (await fetch("/version")).text() !== state().dataset.version) await follow();
    } catch (error) {
      console.info(error);
      state().textContent = "The server does not answer: it has ended. What is shown is the last that came.";
      state().dataset.version = "";
    }
    setTimeout(ask, 1000 * state().dataset.every || 3000);
  }
  setTimeout(ask, 1000 * state().dataset.every);
})();
