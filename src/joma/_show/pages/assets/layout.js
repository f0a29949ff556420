// How a figure takes its room: as it was drawn where it fits, so that it is where its still picture was; on a narrower screen
// panels become narrower, or go below each other. Works on a Vega-Lite specification.
"use strict";
window.jomaLayout = (() => {
  const AXIS = 62, GAP = 20, NARROW = 640, LEAST = 150;
  const TIGHTER = 0.75; // times its own width that a panel shrinks to stay in its row
  const parts = (node) => ["hconcat", "vconcat", "concat"].find((key) => node[key]);
  const across = (node, key) => (key === "hconcat" ? node[key].length : key === "concat" ? node.columns || node[key].length : 1);
  function breadth(node) {
    const key = parts(node);
    if (!key) return node.spec ? breadth(node.spec) : (node.width || 300) + AXIS;
    const each = node[key].map(breadth);
    if (key === "hconcat") return each.reduce((a, b) => a + b + GAP);
    const columns = across(node, key);
    return columns * Math.max(...each) + (columns - 1) * GAP;
  }
  // what the panels of a row take without axes and legends; of the emptiest row
  function panels(node) {
    const key = parts(node);
    if (!key) return node.spec ? panels(node.spec) : node.width || 300;
    const each = node[key].map(panels);
    return key === "hconcat" ? each.reduce((a, b) => a + b) : Math.min(...each) * across(node, key);
  }
  function scaled(node, factor) {
    const key = parts(node);
    if (key) return { ...node, [key]: node[key].map((child) => scaled(child, factor)) };
    return typeof node.width === "number" ? { ...node, width: Math.floor(node.width * factor) } : node;
  }
  function wrapped(node, room) {
    const key = parts(node);
    if (!key) {
      if (node.spec || typeof node.width !== "number") return node;
      return { ...node, width: Math.max(LEAST, Math.min(node.width, room - AXIS)) };
    }
    const children = node[key].map((child) => wrapped(child, room)), { [key]: _, columns, ...rest } = node;
    const row = { ...node, [key]: children }, over = breadth(row) - room;
    if (key === "vconcat" || over <= 0) return row;
    const factor = 1 - over / panels(row);
    if (factor >= TIGHTER) return scaled(row, factor); // rather than a row of its own for the last
    const most = Math.max(1, Math.floor((room + GAP) / (Math.max(...children.map(breadth)) + GAP)));
    const rows = Math.ceil(children.length / Math.min(most, columns || Infinity));
    return { ...rest, concat: children, columns: Math.ceil(children.length / rows) };
  }
  // beside: what legends take of the width, where they stand beside the panels
  function fitted(node, room, natural) {
    const beside = room < NARROW ? 0 : Math.max(0, (natural[0] || breadth(node)) - breadth(node));
    return wrapped(node, room - Math.min(beside, room / 4));
  }
  function placed(spec, room, natural) {
    if (natural[0] && natural[0] <= room) return spec;
    const config = { ...spec.config, padding: { left: 0, right: 4, top: 8, bottom: 8 } };
    if (room < NARROW) {
      config.legend = { ...config.legend, orient: "bottom", columns: 2, labelLimit: Math.round(room / 2) - 40 };
      config.title = { ...config.title, limit: room - 10, subtitleFontSize: 10 };
    }
    return fitted({ ...spec, config }, room, natural);
  }
  // makes the panels of a view narrower, so that it takes so many pixels less
  async function narrow(view, spec, over) {
    const { signals } = view.getState({ signals: (name) => /(^|_)(childWidth|width)$/.test(name), data: () => false, recurse: false });
    const factor = Math.max(0.5, 1 - (over + 2) / panels(spec));
    for (const [name, value] of Object.entries(signals)) if (typeof value === "number") view.signal(name, Math.floor(value * factor));
    await view.resize().runAsync();
  }
  return { placed, narrow };
})();
