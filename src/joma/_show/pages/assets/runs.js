// Figures whose rows have steps and τ = Σ lr: a switch between the two. The axes are in the figure's `usermeta`.
"use strict";
window.jomaRuns = (() => {
  const over = new Map(); // figure -> "step" or "tau", once chosen
  function swapped(node, axes, axis) {
    if (Array.isArray(node)) return node.map((item) => swapped(item, axes, axis));
    if (!node || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([key, value]) => {
      if (key === "datasets" || key === "usermeta") return [key, value];
      return [key, key === "x" && value?.field in axes ? { ...value, ...axis } : swapped(value, axes, axis)];
    }));
  }
  function placed(id, spec) {
    const axes = spec.usermeta?.clocks, name = over.get(id);
    return axes && name ? swapped(spec, axes, axes[name]) : spec;
  }
  // what is read at the pointer (hover.js): by the axis that is shown
  function fields(id, spec) {
    const { curves, clocks } = spec.usermeta, name = over.get(id);
    if (!clocks || !name) return curves;
    const { field, title } = clocks[name];
    return Object.fromEntries(Object.entries(curves).map(([mark, about]) => [
      mark, about.x.field in clocks && about.x.field !== field ? { ...about, x: { field, title, format: ".4~g" } } : about,
    ]));
  }
  function start(draw) {
    document.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-over]");
      if (!button) return;
      const { over: id, clock } = button.dataset;
      over.set(id, clock);
      for (const other of document.querySelectorAll(`[data-over="${id}"]`)) other.setAttribute("aria-pressed", other === button);
      draw(document.getElementById(id));
    });
  }
  return { placed, fields, start };
})();
