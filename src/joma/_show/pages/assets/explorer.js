// Eqn. 6, v' = (μ − v) exp(v²/2) from v(0) = 0, solved as the library does: with s = ln(1/δ), v = μ (1 − e^−s), time is
// the integral t = F(s) = ∫₀ˢ exp(−v(u)²/2) du. F is tabulated once for each μ and inverted within an interval.
"use strict";
window.jomaExplorer = (() => {
  const LAST = 40; // from here on v = μ in floating point
  const speed = (mu, s) => { const v = -mu * Math.expm1(-s); return Math.exp(-v * v / 2); };
  const piece = (mu, a, b) => (b - a) / 6 * (speed(mu, a) + 4 * speed(mu, (a + b) / 2) + speed(mu, b)); // Simpson
  function table(mu) {
    const s = [0], F = [0];
    while (s.at(-1) < LAST) {
      const a = s.at(-1), b = a + Math.min(0.03 + 0.015 * a, 0.012 * (1 + 12 * a) / (1 + Math.abs(mu)));
      s.push(b);
      F.push(F.at(-1) + piece(mu, a, b));
    }
    return { mu, s, F };
  }
  function at({ mu, s, F }, t) {
    if (t <= 0) return 0;
    if (t >= F.at(-1)) return mu;
    let low = 0, high = F.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (F[mid] <= t) low = mid; else high = mid; }
    let x = s[low] + (s[high] - s[low]) * (t - F[low]) / (F[high] - F[low]);
    for (let n = 0; n < 6; n++) {
      x = Math.min(s[high], Math.max(s[low], x + (t - F[low] - piece(mu, s[low], x)) / speed(mu, x)));
    }
    return -mu * Math.expm1(-x);
  }
  const bounce = (mu, times) => { const tables = mu.map(table); return times.map((t) => tables.map((one) => at(one, t))); };
  function attention(v) {
    const z = v.map((x) => x * x / 2), top = Math.max(...z), w = z.map((x) => Math.exp(x - top));
    const total = w.reduce((a, b) => a + b);
    return w.map((x) => x / total);
  }
  const entropy = (v) => attention(v).reduce((sum, p) => sum - (p > 0 ? p * Math.log(p) : 0), 0);

  // ---- the panels ----
  const J = 10, END = 2.5, STEPS = 500, W = 300, H = 190, M = { left: 36, right: 8, top: 8, bottom: 28 };
  const times = Array.from({ length: STEPS + 1 }, (_, k) => END * k / STEPS);
  const colour = (j) => `var(--c${j})`; // dark to light, of the theme
  const x = (share) => M.left + share * (W - M.left - M.right), y = (share) => H - M.bottom - share * (H - M.top - M.bottom);
  const path = (points) => "M" + points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join("L");
  const state = { mu: [], v: [], H: [], k: 0, playing: 0 };
  const by = (id) => document.getElementById(id);

  function axes(yMax, yTicks, xTicks, xTitle) {
    const lines = yTicks.map((v) => `<line x1="${M.left}" x2="${W - M.right}" y1="${y(v / yMax)}" y2="${y(v / yMax)}" stroke="var(--line)"/>` +
      `<text x="${M.left - 6}" y="${y(v / yMax) + 4}" text-anchor="end">${v}</text>`);
    const labels = xTicks.map(([share, name]) => `<text x="${x(share)}" y="${H - M.bottom + 14}" text-anchor="middle">${name}</text>`);
    return lines.join("") + labels.join("") + `<text x="${x(0.5)}" y="${H - 2}" text-anchor="middle">${xTitle}</text>`;
  }
  const timeTicks = [0, 0.5, 1, 1.5, 2, 2.5].map((t) => [t / END, t]);
  function solve() {
    const centre = +by("x-centre").value, spread = +by("x-spread").value;
    state.mu = Array.from({ length: J }, (_, j) => centre + spread * (2 * j / (J - 1) - 1));
    by("x-centre-out").textContent = centre.toFixed(1);
    by("x-spread-out").textContent = `± ${spread.toFixed(2)}: μ from ${state.mu[0].toFixed(2)} to ${state.mu[J - 1].toFixed(2)}`;
    state.v = bounce(state.mu, times);
    state.H = state.v.map(entropy);
    const top = Math.max(1, Math.ceil(Math.max(...state.mu.map(Math.abs)))), low = Math.min(0, ...state.mu);
    const yv = (value) => y((value - low) / (top - low));
    const ticks = Array.from({ length: top + 1 }, (_, n) => n).filter((n) => top < 5 || n % 2 === 0);
    by("x-v").innerHTML = ticks.map((n) => `<line x1="${M.left}" x2="${W - M.right}" y1="${yv(n)}" y2="${yv(n)}" stroke="var(--line)"/>` +
      `<text x="${M.left - 6}" y="${yv(n) + 4}" text-anchor="end">${n}</text>`).join("") +
      timeTicks.map(([s, n]) => `<text x="${x(s)}" y="${H - M.bottom + 14}" text-anchor="middle">${n}</text>`).join("") +
      `<text x="${x(0.5)}" y="${H - 2}" text-anchor="middle">t</text>` +
      state.mu.map((_, j) => `<path d="${path(times.map((t, k) => [x(t / END), yv(state.v[k][j])]))}" fill="none" stroke="${colour(j)}" stroke-width="1.6"/>`).join("") +
      `<line class="cursor" y1="${M.top}" y2="${H - M.bottom}" stroke="var(--ink)" stroke-dasharray="3 3"/>` +
      state.mu.map((_, j) => `<circle class="v" r="3.4" fill="${colour(j)}"/>`).join("");
    state.yv = yv;
    by("x-a").innerHTML = axes(1, [0, 0.5, 1], [[0.1, "smallest μ"], [0.9, "largest μ"]], "component") +
      state.mu.map((_, j) => `<rect class="a" x="${x((j + 0.15) / J)}" width="${0.7 * (W - M.left - M.right) / J}" fill="${colour(j)}"/>`).join("");
    by("x-h").innerHTML = axes(2.4, [0, 0.8, 1.6, 2.4], timeTicks, "t") +
      `<path d="${path(times.map((t, k) => [x(t / END), y(state.H[k] / 2.4)]))}" fill="none" stroke="var(--accent)" stroke-opacity=".35" stroke-width="2"/>` +
      `<path class="past" fill="none" stroke="var(--accent)" stroke-width="2.4"/>` +
      `<line class="cursor" y1="${M.top}" y2="${H - M.bottom}" stroke="var(--ink)" stroke-dasharray="3 3"/><circle class="h" r="4.5" fill="var(--accent)"/>`;
    show();
  }
  function show() {
    const k = state.k, at = x(times[k] / END), v = state.v[k], share = attention(v);
    by("x-time").value = k;
    by("x-time").setAttribute("aria-valuetext", `t = ${times[k].toFixed(2)}`);
    for (const line of document.querySelectorAll(".explorer .cursor")) { line.setAttribute("x1", at); line.setAttribute("x2", at); }
    document.querySelectorAll(".explorer .v").forEach((dot, j) => { dot.setAttribute("cx", at); dot.setAttribute("cy", state.yv(v[j])); });
    document.querySelectorAll(".explorer .a").forEach((bar, j) => { bar.setAttribute("y", y(share[j])); bar.setAttribute("height", Math.max(0, y(0) - y(share[j]))); });
    document.querySelector(".explorer .h").setAttribute("cx", at);
    document.querySelector(".explorer .h").setAttribute("cy", y(state.H[k] / 2.4));
    document.querySelector(".explorer .past").setAttribute("d", path(times.slice(0, k + 1).map((t, i) => [x(t / END), y(state.H[i] / 2.4)])));
    by("x-now").innerHTML = `<b>t = ${times[k].toFixed(2)}</b>: attention entropy <b id="x-entropy">${state.H[k].toFixed(3)}</b> nats. ` + story(state.H);
  }
  function story(H) { // by the rule that the page is given: joma._runs.curve
    const rule = JSON.parse(document.querySelector(".explorer").dataset.rule);
    const low = Math.min(...H), end = H[STEPS], depth = H[0] - low, from = H[0].toFixed(2), to = low.toFixed(2);
    if (depth <= 0 || depth < Math.max(rule.least_dip, rule.dip * H[0])) return `It moves between ${from} and ${to}: less than a dip (${rule.fall}).`;
    const bounced = end - low > 0 && end - low >= Math.max(rule.least_bounce, rule.bounce * depth);
    const turn = bounced ? "and rises again, to" : `and does not bounce (${rule.rise}):`;
    return `It falls from ${from} to ${to} at t = ${times[H.indexOf(low)].toFixed(2)}, ${turn} ${end.toFixed(2)} in the end.`;
  }
  function play(on) {
    cancelAnimationFrame(state.playing);
    state.playing = 0;
    by("x-play").textContent = on ? "Pause" : "Play";
    by("x-now").setAttribute("aria-live", on ? "off" : "polite");
    if (!on) return;
    if (state.k >= STEPS) state.k = 0;
    const begin = performance.now(), from = state.k;
    const frame = (now) => {
      state.k = Math.min(STEPS, from + Math.round(Math.max(0, now - begin) / 8000 * STEPS));
      show();
      if (state.k >= STEPS) play(false); else state.playing = requestAnimationFrame(frame);
    };
    state.playing = requestAnimationFrame(frame);
  }
  function start() {
    if (!by("explorer")) return;
    for (const id of ["x-v", "x-a", "x-h"]) by(id).setAttribute("viewBox", `0 0 ${W} ${H}`);
    by("x-time").max = STEPS;
    for (const id of ["x-centre", "x-spread"]) by(id).addEventListener("input", solve);
    by("x-time").addEventListener("input", () => { play(false); state.k = +by("x-time").value; show(); });
    by("x-play").addEventListener("click", () => play(!state.playing));
    state.k = Math.round(0.35 / END * STEPS);
    solve();
  }
  return { start, bounce, entropy, attention, story, state, times };
})();
