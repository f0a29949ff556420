// What the page does: unpack what is embedded, draw the figures, filter the claims, copy, download, change the theme.
"use strict";
const joma = { views: new Map(), started: performance.now() };
window.joma = joma;

// ---- embedded files: gzip, base64 ----
async function unpack(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)); // older browsers
  const packed = new ReadableStream({ start(to) { to.enqueue(bytes); to.close(); } }); // a Blob would go through another process
  return new Response(packed.pipeThrough(new DecompressionStream("gzip")));
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

// the drawing library is the largest part of the page: unpacked after the first words are on the screen
let library;
function drawingLibrary() {
  library ??= unpack("vega").then((packed) => packed.text()).then((code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
    script.remove(); // it has run; a page that is saved keeps the packed copy alone
  });
  return library;
}

// ---- light and dark ----
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // by the button; else as the system says
const theme = () => chosen || (prefersDark.matches ? "dark" : "light");
const { colours: INK, depth: DEPTH, paper: PAPER } = JSON.parse(document.documentElement.dataset.dark); // joma._show.plots.style
function darker(node, key) {
  if (typeof node === "string") return (key === "stroke" && node === "white") ? PAPER : (INK[node] || node);
  if (Array.isArray(node)) return node.map((item) => darker(item, key));
  if (!node || typeof node !== "object") return node;
  if (key === "scheme" && node.extent) return { ...node, extent: DEPTH };
  return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, k === "datasets" ? v : darker(v, k)]));
}
function themed(spec) {
  const drawn = theme() === "light" ? spec : darker(spec);
  return { ...drawn, config: { ...drawn.config, background: null } };
}

// ---- figures ----
// A figure is in the page as a still picture. Near the screen an interactive one takes its place. The rule that hides the
// still is not part of the document: a page that is saved, or that runs no script, shows its stills.
const hiding = new CSSStyleSheet();
hiding.replaceSync("@media screen { .chart[data-live] > .still { display: none; } .chart[data-live] > .live { display: inline-block !important; } }");
document.adoptedStyleSheets = [...document.adoptedStyleSheets, hiding];
const charts = [...document.querySelectorAll(".chart")];
const specs = new Map();
function natural(box) {
  const still = box.querySelector(".still");
  return still ? [still.width.baseVal.value, still.height.baseVal.value] : [0, 0];
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
  const place = box.querySelector(".live") ?? box.appendChild(Object.assign(document.createElement("div"), { className: "live" }));
  try {
    await drawingLibrary();
    if (!specs.has(box.id)) specs.set(box.id, await (await unpack(box.dataset.spec)).json());
    const spec = jomaRuns.placed(box.id, specs.get(box.id)), before = joma.views.get(box.id);
    const kept = keep && before ? choices(before) : null, over = () => place.querySelector("canvas").offsetWidth - box.clientWidth;
    box.style.minHeight = box.offsetHeight + "px"; // no jump while it is drawn
    before?.finalize();
    box.dataset.live = "";
    let view;
    for (let room = box.clientWidth, tries = 3; ; ) {
      const fitted = themed(jomaLayout.placed(spec, room, natural(box)));
      ({ view } = await vegaEmbed(place, fitted, { actions: false, renderer: "canvas", mode: "vega-lite", tooltip: { theme: theme() } }));
      if (over() > 0) await jomaLayout.narrow(view, fitted, over()); // where labels are wider than was thought
      if (over() <= 0 || !--tries) break;
      view.finalize(); // or titles and legends are: again, for less room
      room = Math.max(200, room - over() - 4);
    }
    if (kept) await choose(view, kept);
    joma.views.set(box.id, view);
    switches(box, view);
  } catch (error) {
    console.error(box.id, error);
    delete box.dataset.live; // the still picture is there again
    place.remove();
    if (!box.querySelector(".still")) box.textContent = "This figure could not be drawn.";
  }
  box.style.minHeight = "";
  settle();
}
for (const box of charts) {
  box.querySelector(".live")?.remove(); // of a page that was saved while it was shown
  delete box.dataset.live;
  jomaHover.attach(box, () => joma.views.has(box.id) && { view: joma.views.get(box.id), fields: jomaRuns.fields(box.id, specs.get(box.id)) });
}
const NEAR = "600px 0px"; // of the screen: a figure is interactive before it is seen
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target: box } of entries) {
    if (!isIntersecting || joma.views.has(box.id)) continue;
    near.unobserve(box);
    draw(box);
  }
}, { rootMargin: NEAR });
function laidOut() {
  document.documentElement.dataset.drawn = theme(); // from here on all of the page is laid out
  void document.body.offsetHeight; // laid out, not only asked for
  settle();
  joma.drawn = performance.now();
}
// all that have come near the screen, again: the light or the room has changed
const redraw = () => Promise.all(charts.filter((box) => joma.views.has(box.id)).map((box) => draw(box))).then(laidOut);
joma.enliven = () => Promise.all(charts.map((box) => joma.views.has(box.id) || draw(box))); // all, wherever they are
function start() {
  for (const box of charts) near.observe(box);
  requestAnimationFrame(() => setTimeout(laidOut)); // after the first screen has been painted
}
// the picture of a figure as a file of its own, in the colours of a light page
async function picture(id) {
  await drawingLibrary();
  const spec = await (await unpack(`${id}-spec`)).json();
  const { view } = await vegaEmbed(document.createElement("div"), spec, { actions: false, mode: "vega-lite" });
  const svg = await view.toSVG();
  view.finalize();
  return svg;
}
joma.picture = picture;
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-picture]");
  if (!link) return;
  event.preventDefault();
  save(new Blob([await picture(link.dataset.picture)], { type: "image/svg+xml" }), link.download);
});

// ---- links within the page: what was asked for stays in place while figures above it are drawn ----
let target = null;
function settle() { target?.scrollIntoView({ behavior: "instant" }); }
function aim() {
  target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  const folded = target?.closest("details:not([open])");
  if (folded) folded.open = true;
  settle();
}
addEventListener("hashchange", aim);
document.addEventListener("click", (event) => { if (event.target.closest('a[href^="#"]')) setTimeout(aim); });
for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) addEventListener(kind, () => { target = null; }, { passive: true });
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
document.getElementById("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; apply(); redraw(); });
prefersDark.addEventListener("change", () => { if (!chosen) { apply(); redraw(); } });
const wide = matchMedia("(min-width: 75rem)");
const contents = document.querySelector("nav details");
contents?.addEventListener("click", (event) => { if (!wide.matches && event.target.closest("a")) contents.open = false; });
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
  later = setTimeout(() => { if (innerWidth !== room) { room = innerWidth; redraw(); } }, 300);
});
startClaims();
aim();
if (window.jomaExplorer) window.jomaExplorer.start();
jomaRuns.start(draw);
start();
