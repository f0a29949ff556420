// What the page does: unpack what is embedded, draw the figures, filter the claims, copy, download, change the theme.
"use strict";
const joma = { views: new Map(), started: performance.now() };
window.joma = joma;

// ---- embedded files: gzip, base64 ----
async function unpack(id) {
  const text = atob(document.getElementById(id).textContent), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}
function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-file]");
  if (!link) return;
  event.preventDefault();
  save(new Blob([await (await unpack(link.dataset.file)).arrayBuffer()], { type: link.type }), link.download);
});

// ---- light and dark ----
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // by the button; else as the system says
const theme = () => chosen || (prefersDark.matches ? "dark" : "light");
const INK = { black: "#e6edf3", "#24292f": "#e6edf3", "#57606a": "#a3adb8", "#f0f0f0": "#242c35", "#7f7f7f": "#9aa3ad", "#0072b2": "#3f9fe0" };
const DARK = {
  background: null,
  axis: { labelColor: "#c3ccd5", titleColor: "#e6edf3", gridColor: "#232a32", domainColor: "#6b7682", tickColor: "#6b7682" },
  title: { color: "#e6edf3", subtitleColor: "#a3adb8" },
  legend: { labelColor: "#c3ccd5", titleColor: "#e6edf3" },
  header: { labelColor: "#e6edf3", titleColor: "#e6edf3" },
};
function darker(node, key) {
  if (typeof node === "string") return (key === "stroke" && node === "white") ? "#0f1419" : (INK[node] || node);
  if (Array.isArray(node)) return node.map((item) => darker(item, key));
  if (!node || typeof node !== "object") return node;
  return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, k === "datasets" ? v : darker(v, k)]));
}
function themed(spec) {
  if (theme() === "light") return { ...spec, config: { ...spec.config, background: null } };
  const dark = darker(spec);
  for (const [key, value] of Object.entries(DARK)) {
    dark.config[key] = value && typeof value === "object" ? { ...dark.config[key], ...value } : value;
  }
  return dark;
}

// ---- room: panels side by side go below each other where they do not fit ----
const AXIS = 62, GAP = 20;
const parts = (node) => ["hconcat", "vconcat", "concat"].find((key) => node[key]);
function breadth(node) {
  const key = parts(node);
  if (!key) return node.spec ? breadth(node.spec) : (node.width || 300) + AXIS;
  const each = node[key].map(breadth);
  if (key === "hconcat") return each.reduce((a, b) => a + b + GAP);
  const columns = key === "concat" ? node.columns || each.length : 1;
  return columns * Math.max(...each) + (columns - 1) * GAP;
}
function fitted(node, room) {
  const key = parts(node);
  if (!key) {
    if (node.spec || typeof node.width !== "number") return node;
    return { ...node, width: Math.max(150, Math.min(node.width, room - AXIS)) };
  }
  const children = node[key].map((child) => fitted(child, room)), { [key]: _, columns, ...rest } = node;
  if (key === "vconcat" || breadth({ ...rest, columns, [key]: children }) <= room) return { ...node, [key]: children };
  const most = Math.max(1, Math.floor((room + GAP) / (Math.max(...children.map(breadth)) + GAP)));
  const rows = Math.ceil(children.length / Math.min(most, columns || Infinity));
  return { ...rest, concat: children, columns: Math.ceil(children.length / rows) };
}
function placed(spec, room) {
  const narrow = room < 640, config = { ...spec.config, padding: { left: 0, right: 0, top: 8, bottom: 8 } };
  if (narrow) {
    config.legend = { ...config.legend, orient: "bottom", columns: 2 };
    config.title = { ...config.title, limit: room - 10, subtitleFontSize: 10 };
  }
  return fitted({ ...spec, config }, room);
}

// ---- figures ----
const specs = new Map(), alive = new Set();
// points to hover over cost as much as the rest: they come when the pointer does
function quiet(node) {
  if (Array.isArray(node)) {
    return node.filter((item) => !item?.params?.some((param) => param.name.startsWith("hover_"))).map(quiet);
  }
  if (!node || typeof node !== "object") return node;
  return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, key === "datasets" ? value : quiet(value)]));
}
// what the reader has chosen: series that are on, bound inputs, zooms; a figure that is drawn again keeps it
function choices(view) {
  const { data, signals } = view.getState({
    data: (name) => /^series_\d+_store$/.test(name), signals: (name) => !/_(tuple|anchor|delta)/.test(name), recurse: false,
  });
  const inputs = new Set(view._bind?.map((bind) => bind.param.signal)); // selects and sliders of the figure itself
  const range = (value) => Array.isArray(value) && value.length === 2;
  return {
    data: Object.entries(data).map(([name, all]) => [name, all.map(({ unit, fields, values }) => ({ unit, fields, values }))]),
    signals: Object.entries(signals).filter(([name, value]) => inputs.has(name) || (name.startsWith("zoom_") && range(value))),
  };
}
async function choose(view, { data, signals }) {
  const have = view.getState({ data: () => false, signals: () => true, recurse: false }).signals;
  for (const [name, all] of data) view.data(name, all);
  for (const [name, value] of signals) if (name in have) view.signal(name, value);
  await view.runAsync();
}
const turns = new Map(); // one after the other
function draw(box, keep = true) {
  const next = (turns.get(box.id) || Promise.resolve()).then(() => paint(box, keep));
  turns.set(box.id, next);
  return next;
}
async function paint(box, keep) {
  try {
    if (!specs.has(box.id)) specs.set(box.id, await (await unpack(box.dataset.spec)).json());
    const spec = specs.get(box.id), place = box.firstElementChild;
    box.style.minHeight = box.offsetHeight + "px"; // no jump while it is drawn again
    const before = joma.views.get(box.id), kept = keep && before ? choices(before) : null;
    before?.finalize();
    const result = await vegaEmbed(place, themed(placed(alive.has(box.id) ? spec : quiet(spec), box.clientWidth)), {
      actions: false, renderer: "canvas", mode: "vega-lite", tooltip: { theme: theme() },
    });
    if (kept) await choose(result.view, kept);
    box.style.minHeight = "";
    joma.views.set(box.id, result.view);
    box.dataset.alive = alive.has(box.id);
    switches(box, result.view);
  } catch (error) {
    console.error(box.id, error);
    box.firstElementChild.innerHTML = '<p class="failed">This figure could not be drawn.</p>';
  }
}
for (const box of document.querySelectorAll(".chart")) {
  let last = null;
  box.addEventListener("pointermove", (event) => { last = event; });
  box.addEventListener("pointerenter", async (event) => {
    last = event;
    if (alive.has(box.id) || !joma.views.has(box.id)) return;
    alive.add(box.id);
    await draw(box);
    // the new canvas has not seen where the pointer is
    box.querySelector("canvas")?.dispatchEvent(new PointerEvent("pointermove", { clientX: last.clientX, clientY: last.clientY, bubbles: true }));
  });
}
async function drawAll() {
  // those in sight first; a pause between two keeps the page alive
  const near = (box) => Math.abs(box.getBoundingClientRect().top);
  const boxes = [...document.querySelectorAll(".chart")].sort((a, b) => near(a) - near(b));
  for (const box of boxes) {
    await draw(box);
    await new Promise((next) => setTimeout(next));
  }
  joma.drawn = performance.now();
  document.documentElement.dataset.drawn = theme();
}
// the legend as buttons, for the keyboard
function switches(box, view) {
  for (const button of document.querySelectorAll(`[data-switch="${box.id}"]`)) {
    const { series, field } = button.dataset, value = JSON.parse(button.dataset.value), store = series + "_store";
    const on = () => { const all = view.data(store); return !all.length || all.some((tuple) => tuple.values[0] === value); };
    const show = () => button.setAttribute("aria-pressed", on());
    view.addDataListener(store, show);
    button.onclick = () => {
      const all = view.data(store), rest = all.filter((tuple) => tuple.values[0] !== value);
      const fields = [{ type: "E", field }];
      view.data(store, rest.length < all.length ? rest : [...all, { unit: "", fields, values: [value] }]).runAsync();
      show();
    };
    show();
  }
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-reset]");
  if (button) draw(document.getElementById(button.dataset.reset), false);
});

// ---- copy a command ----
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// ---- claims ----
function filterClaims() {
  const section = document.getElementById("claims");
  if (!section?.querySelector("input")) return;
  const words = section.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
  const group = section.querySelector("select").value;
  const verdict = section.querySelector('button[aria-pressed="true"]').dataset.verdict;
  let shown = 0;
  for (const row of section.querySelectorAll("tbody tr")) {
    const text = (row._text ??= (row.textContent + " " + row.dataset.verdict).toLowerCase());
    row.hidden = !(words.every((word) => text.includes(word)) && (!group || row.dataset.group === group) &&
      (!verdict || row.dataset.verdict === verdict));
    shown += !row.hidden;
  }
  section.querySelector("[role=status]").textContent = `${shown} of ${section.querySelectorAll("tbody tr").length} claims`;
}
function startClaims() {
  const section = document.getElementById("claims");
  if (!section?.querySelector("input")) return;
  section.querySelector("input").addEventListener("input", filterClaims);
  section.querySelector("select").addEventListener("change", filterClaims);
  for (const button of section.querySelectorAll("button[data-verdict]")) {
    button.addEventListener("click", () => {
      for (const other of section.querySelectorAll("button[data-verdict]")) other.setAttribute("aria-pressed", other === button);
      filterClaims();
    });
  }
  filterClaims();
}

// ---- start ----
function apply() {
  document.documentElement.dataset.theme = theme();
  document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
}
apply();
document.getElementById("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; apply(); drawAll(); });
prefersDark.addEventListener("change", () => { if (!chosen) { apply(); drawAll(); } });
const wide = matchMedia("(min-width: 75rem)");
const contents = document.querySelector("nav details");
if (contents) { contents.open = wide.matches; wide.addEventListener("change", () => { contents.open = wide.matches; }); }
const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) {
    for (const a of links.values()) a.removeAttribute("aria-current");
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "-10% 0px -80% 0px" });
for (const section of document.querySelectorAll("main section[id]")) seen.observe(section);
let room = innerWidth, later;
addEventListener("resize", () => {
  clearTimeout(later);
  later = setTimeout(() => { if (innerWidth !== room) { room = innerWidth; drawAll(); } }, 300);
});
startClaims();
if (window.jomaExplorer) window.jomaExplorer.start();
drawAll();
