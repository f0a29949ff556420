// Reading curves: a rule at the pointer's x, and the values of all curves of the panel there, nearest point each.
"use strict";
window.jomaHover = (() => {
  const MOST = 12; // curves that are listed: of more, those nearest to the pointer
  // all curves of a view: their panel's place and size, their points in pixels, colour and fields
  function curves(view, fields) {
    const found = [];
    const visit = (mark, x, y, panel) => {
      const about = mark.marktype === "line" && fields[(mark.name || "").replace(/_marks$/, "")];
      if (about && mark.items.length && panel) found.push({ about, panel, x, y, points: mark.items });
      if (mark.marktype !== "group") return;
      for (const group of mark.items) {
        const a = x + (group.x || 0), b = y + (group.y || 0);
        const own = group.width > 0 && group.height > 0 && (mark.role === "scope" || !panel)
          ? { x: a, y: b, width: group.width, height: group.height } : panel;
        for (const below of group.items || []) visit(below, a, b, own);
      }
    };
    visit(view.scenegraph().root, 0, 0, null);
    return found;
  }
  const visible = (item) => (item.opacity ?? 1) > 0.02 && item.defined !== false && Number.isFinite(item.y);
  function nearest(points, x) {
    let best = null;
    for (const point of points) if (visible(point) && (!best || Math.abs(point.x - x) < Math.abs(best.x - x))) best = point;
    return best;
  }
  // what is under a place (px, py) of the canvas: the x that is read, and a row for each curve
  function read(view, fields, px, py) {
    const [left, top] = view.origin(), pad = view.padding(), x = px - pad.left - left, y = py - pad.top - top;
    const inside = ({ panel }) => x >= panel.x - 2 && x <= panel.x + panel.width + 2 && y >= panel.y && y <= panel.y + panel.height;
    const text = (value, format) => (typeof value === "number" ? view.locale().format(format)(value) : String(value)), rows = [];
    for (const curve of curves(view, fields).filter(inside)) {
      const point = nearest(curve.points, x - curve.x);
      if (!point || point.x < curve.panel.x - curve.x - 1 || point.x > curve.panel.x - curve.x + curve.panel.width + 1) continue;
      const { about } = curve, value = point.datum;
      rows.push({
        panel: curve.panel, x: curve.x + point.x, y: curve.y + point.y, at: text(value[about.x.field], about.x.format), title: about.x.title,
        name: about.series.map((field) => `${field} ${text(value[field], ".4~g")}`).join(", ") || about.y.title,
        value: text(value[about.y.field], about.y.format), colour: point.stroke,
      });
    }
    if (!rows.length) return null;
    const closest = rows.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
    const listed = rows.length > MOST ? rows.toSorted((a, b) => Math.abs(a.y - y) - Math.abs(b.y - y)).slice(0, MOST) : rows;
    return { ...closest, x: closest.x + pad.left + left, rows: listed.toSorted((a, b) => a.y - b.y), more: rows.length - listed.length,
      top: closest.panel.y + pad.top + top, height: closest.panel.height };
  }
  function element(name) {
    const made = document.createElement("div");
    made.className = name;
    return made;
  }
  function show(box, rule, tip, seen, event) {
    const canvas = box.querySelector("canvas").getBoundingClientRect(), frame = box.getBoundingClientRect();
    Object.assign(rule.style, { left: `${canvas.left - frame.left + box.scrollLeft + seen.x}px`, top: `${canvas.top - frame.top + seen.top}px`, height: `${seen.height}px` });
    tip.replaceChildren(...[[`${seen.title} ${seen.at}`, "", null], ...seen.rows.map((row) => [row.name, row.value, row.colour]),
      ...(seen.more ? [[`and ${seen.more} more`, "", null]] : [])].map(([name, value, colour]) => {
      const line = element("line"), [mark, label, number] = ["i", "span", "b"].map((tag) => document.createElement(tag));
      if (colour) mark.style.background = colour;
      label.textContent = name;
      number.textContent = value;
      line.append(mark, label, number);
      return line;
    }));
    rule.hidden = tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4))}px`;
  }
  // a figure's box, and what gives its view and its fields once it is drawn
  function attach(box, current) {
    const rule = element("rule"), tip = element("tip");
    rule.hidden = tip.hidden = true;
    tip.setAttribute("aria-hidden", "true"); // the numbers are in the table that can be downloaded
    box.append(rule, tip);
    const hide = () => { rule.hidden = tip.hidden = true; };
    box.addEventListener("pointermove", (event) => {
      const now = current(), canvas = box.querySelector("canvas");
      if (!now || !canvas || event.buttons) return hide();
      const place = canvas.getBoundingClientRect();
      const seen = read(now.view, now.fields, event.clientX - place.left, event.clientY - place.top);
      if (seen) show(box, rule, tip, seen, event); else hide();
    });
    box.addEventListener("pointerleave", hide);
  }
  return { attach, read };
})();
