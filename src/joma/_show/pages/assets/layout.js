// How a figure takes its room: panels go below each other where they do not fit side by side, and grow where there is more.
// Works on a Vega-Lite specification, and on the skeleton of one, by which room is reserved before anything is drawn.
"use strict";
window.jomaLayout = (() => {
  const AXIS = 62, GAP = 20, NARROW = 640, LEAST = 150;
  const MOST = 2.4, TALLER = 1.25, TIGHTER = 0.75; // times its own width and height that a panel grows, or shrinks to stay in its row
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
  function height(node) {
    const key = parts(node);
    if (!key) return node.spec ? height(node.spec) : (node.height || 200) + AXIS;
    const each = node[key].map(height), columns = across(node, key);
    let sum = 0;
    for (let n = 0; n < each.length; n += columns) sum += Math.max(...each.slice(n, n + columns)) + (n ? GAP : 0);
    return sum;
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
  function grown(node, room) {
    const key = parts(node);
    if (!key) {
      if (node.spec || typeof node.width !== "number" || room <= breadth(node)) return node;
      const width = Math.min(room - AXIS, MOST * node.width);
      const factor = Math.min(TALLER, Math.sqrt(width / node.width));
      return { ...node, width, ...(typeof node.height === "number" ? { height: Math.round(node.height * factor) } : {}) };
    }
    const columns = across(node, key), each = node[key].map(breadth);
    if (key === "hconcat") { // the same for each, so that unlike panels stay unlike
      const extra = Math.max(0, room - breadth(node)) / each.length;
      return { ...node, [key]: node[key].map((child, n) => grown(child, each[n] + extra)) };
    }
    const share = (room - (columns - 1) * GAP) / columns;
    return { ...node, [key]: node[key].map((child) => grown(child, share)) };
  }
  // a page without pictures (one that is served live) does not know how large they would be
  const known = (node, natural) => (natural[1] ? natural : [breadth(node), height(node)]);
  // beside: what legends take of the width, where they stand beside the panels
  function fitted(node, room, natural) {
    const beside = room < NARROW ? 0 : Math.max(0, known(node, natural)[0] - breadth(node));
    const folded = wrapped(node, room - (breadth(node) + beside <= room ? 0 : Math.min(beside, room / 4)));
    return grown(folded, room - beside);
  }
  // height to reserve: as drawn, and what the panels took more or less after fitting
  const reserve = (skeleton, room, natural) => Math.max(120, known(skeleton, natural)[1] + height(fitted(skeleton, room, natural)) - height(skeleton) + (room < NARROW ? 30 : 0));
  function placed(spec, room, natural) {
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
  return { placed, reserve, narrow };
})();
