"use strict";
/* Draws what the tables say. No library, no network; colours come from the style sheet, so light, dark and print agree. */
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", DASHES = ["", "7 4", "9 3 2 3", "2 3"], FEW = 40;
const colour = g => `var(--g${g % 7})`;
const $ = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function draw(tag, attributes = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function show(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toPrecision(3);
  return String(Number(value.toPrecision(digits)));
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find(m => m * power >= raw), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function marker(g, x, y, size) {
  const s = size, style = { fill: colour(g) };
  switch (g % 4) {
    case 0: return draw("circle", { cx: x, cy: y, r: s, ...style });
    case 1: return draw("rect", { x: x - s * .9, y: y - s * .9, width: s * 1.8, height: s * 1.8, ...style });
    case 2: return draw("path", { d: `M${x} ${y - s * 1.2}l${s * 1.1} ${s * 2}h${-s * 2.2}z`, ...style });
    default: return draw("path", { d: `M${x} ${y - s * 1.3}l${s * 1.3} ${s * 1.3}l${-s * 1.3} ${s * 1.3}l${-s * 1.3} ${-s * 1.3}z`, ...style });
  }
}
/* A frame with axes; returns how values become places. */
function frame(host, label, x, y, options) {
  const width = Math.max(280, host.clientWidth), height = options.height || 340;
  const left = 62, right = 14, top = 12, bottom = 46;
  if (options.lens && options.lens.x) [x, y] = [options.lens.x, options.lens.y];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const px = v => left + (v - x[0]) / (x[1] - x[0] || 1) * (width - left - right);
  const py = v => top + (y[1] - v) / (y[1] - y[0] || 1) * (height - top - bottom);
  for (const t of ticks(x[0], x[1], Math.max(3, width / 130))) {
    svg.append(draw("line", { class: "axis", x1: px(t), x2: px(t), y1: top, y2: height - bottom }));
    svg.append(draw("text", { x: px(t), y: height - bottom + 17, "text-anchor": "middle" }, show(t)));
  }
  for (const t of ticks(y[0], y[1], 5)) {
    svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: py(t), y2: py(t) }));
    svg.append(draw("text", { x: left - 7, y: py(t) + 4, "text-anchor": "end" }, show(t)));
  }
  svg.append(draw("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, options.xlabel));
  svg.append(draw("text", { transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.ylabel));
  const clip = `c${Math.random().toString(36).slice(2)}`, path = draw("clipPath", { id: clip });
  path.append(draw("rect", { x: left, y: top - 4, width: width - left - right + 6, height: height - top - bottom + 8 }));
  svg.append(path);
  const inside = draw("g", { "clip-path": `url(#${clip})` });
  svg.append(inside);
  const unx = at => x[0] + (at - left) / (width - left - right) * (x[1] - x[0]);
  const uny = at => y[1] - (at - top) / (height - top - bottom) * (y[1] - y[0]);
  const isInside = (v, w) => v >= x[0] && v <= x[1] && w >= y[0] && w <= y[1];
  return { svg, inside, px, py, unx, uny, x, y, width, isInside };
}
function widen([low, high], by = .06) {
  const least = 5e-3 * Math.max(Math.abs(low), Math.abs(high)); // what differs by rounding is drawn as one
  const span = high === low ? Math.abs(high) || 1 : Math.max(high - low, least), room = span * by + Math.max(0, least - (high - low)) / 2;
  return [low - room, high + room];
}
const extent = values => [Math.min(...values), Math.max(...values)];
/* What lies nearest to the pointer is told in words; a tap does the same. */
function hover(figure, svg, points) {
  const tip = make("div", { class: "tip", role: "status" });
  figure.append(tip);
  const tell = event => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    let best = null, least = 40 ** 2;
    for (const p of points) {
      const far = (p.x * scale - (event.clientX - box.left)) ** 2 + (p.y * scale - (event.clientY - box.top)) ** 2;
      if (far < least) [best, least] = [p, far];
    }
    tip.style.display = best ? "block" : "none";
    if (!best) return;
    tip.textContent = best.text;
    const at = best.x * scale;
    tip.style.left = `${Math.max(0, Math.min(at + 10, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, best.y * scale - tip.offsetHeight - 8)}px`;
  };
  svg.addEventListener("pointermove", tell);
  svg.addEventListener("pointerdown", tell);
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
function select(label, options, changed) {
  const box = make("select");
  for (const [value, text] of options) box.append(make("option", { value }, text));
  box.addEventListener("change", changed);
  return [make("label", {}, `${label} `, box), () => box.value];
}
function legend(bar, hidden, changed) {
  data.groups.forEach((name, g) => {
    const button = make("button", { type: "button", "aria-pressed": "true" }, document.querySelectorAll("article .sample")[g].cloneNode(true), name);
    button.addEventListener("click", () => {
      hidden.has(g) ? hidden.delete(g) : hidden.add(g);
      button.setAttribute("aria-pressed", String(!hidden.has(g)));
      changed();
    });
    bar.append(button);
  });
}
const AXES = { 0: "optimizer steps", 1: "tokens seen", 2: "seconds of training, evaluation left out", cost: "cost in dense steps" };
/* Where a point [step, tokens, seconds, value] of a group stands along an axis; null where that is unknown or withheld. */
function place(p, along, g) {
  if (along === "cost") return data.costs[g] === null ? null : p[0] * data.costs[g];
  return p[along];
}

function mean(values) { return values.reduce((a, b) => a + b, 0) / values.length; }
function averaged(runs, name, along) {
  const steps = new Map();
  for (const run of runs) for (const p of run.curves[name] || []) {
    if (place(p, along, run.group) === null) continue;
    if (!steps.has(p[0])) steps.set(p[0], []);
    steps.get(p[0]).push(p);
  }
  return [...steps.values()].map(ps => ({
    x: mean(ps.map(p => place(p, along, runs[0].group))), y: mean(ps.map(p => p[3])), low: Math.min(...ps.map(p => p[3])),
    high: Math.max(...ps.map(p => p[3])), n: ps.length, step: ps[0][0],
  })).sort((a, b) => a.step - b.step);
}
function curves(host) {
  const found = new Set(data.runs.flatMap(run => Object.keys(run.curves).filter(k => run.curves[k].length)));
  const names = found.has(data.course) ? [...new Set([data.course, ...found])] : [...found]; // a test split has one point
  if (!names.length) { host.append(make("p", { class: "note" }, "No run that counts logged a curve.")); return; }
  const bar = make("div", { class: "bar" }), figure = make("figure"), hidden = new Set(), lens = makeLens();
  const redraw = () => { Object.assign(lens, makeLens()); paint(); };
  const [pick, name] = select("Metric", names.map(n => [n, n]), redraw);
  const [axis, along] = select("against", [[0, "steps"], ["cost", "cost"], [1, "tokens"], [2, "training time"]], redraw);
  const [lines, mode] = select("shown as", [["runs", "each run"], ["mean", "mean and range of seeds"]], redraw);
  bar.append(pick, axis, lines);
  const keys = make("div", { class: "bar keys" });
  legend(keys, hidden, redraw);
  host.append(bar, keys, figure);
  function paint() {
    const n = name(), a = along(), sets = [];
    data.groups.forEach((label, g) => {
      if (hidden.has(g)) return;
      const runs = data.runs.filter(run => run.group === g);
      if (mode() === "mean") sets.push({ g, label, band: true, points: averaged(runs, n, a) });
      else for (const run of runs) sets.push({
        g, label: `${label}, seed ${run.seed ?? "unknown"}`,
        points: (run.curves[n] || []).filter(p => place(p, a, g) !== null).map(p => ({ x: place(p, a, g), y: p[3], step: p[0] })),
      });
    });
    const all = sets.flatMap(s => s.points), later = all.filter(p => p.step > 0), shown = later.length ? later : all;
    figure.replaceChildren();
    if (!all.length) { figure.append(make("p", { class: "note" }, "Nothing to draw.")); return; }
    let y = extent(shown.flatMap(p => p.low === undefined ? [p.y] : [p.low, p.high]));
    const span = y[1] - y[0], start = all.filter(p => p.step === 0);
    const far = start.length && later.length && start.some(p => p.y > y[1] + span || p.y < y[0] - span);
    if (!far) y = extent(all.flatMap(p => p.low === undefined ? [p.y] : [p.low, p.high]));
    const unit = data.units[n] ? `${n} (${data.units[n]})` : n;
    const f = frame(figure, `${n} against ${AXES[a]}`, [0, Math.max(...all.map(p => p.x)) * 1.02 || 1], widen(y), { xlabel: AXES[a], ylabel: unit, lens });
    const points = [], rows = [];
    for (const s of sets) {
      if (!s.points.length) continue;
      const at = s.points.map(p => `${f.px(p.x).toFixed(1)} ${f.py(p.y).toFixed(1)}`);
      if (s.band) {
        const up = s.points.map(p => `${f.px(p.x)} ${f.py(p.high)}`), down = s.points.map(p => `${f.px(p.x)} ${f.py(p.low)}`).reverse();
        f.inside.append(draw("path", { d: `M${up.join("L")}L${down.join("L")}Z`, fill: colour(s.g), opacity: .18 }));
      }
      f.inside.append(draw("path", { d: `M${at.join("L")}`, fill: "none", stroke: colour(s.g), "stroke-width": 1.8, "stroke-dasharray": DASHES[s.g % 4], opacity: .9 }));
      for (const p of s.points) {
        if (s.points.length <= FEW) f.inside.append(marker(s.g, f.px(p.x), f.py(p.y), 3.2));
        rows.push([s.label, p.step, p.x, p.y, p.low, p.high]);
        if (!f.isInside(p.x, p.y)) continue;
        const range = p.n ? `\n${show(p.low)} to ${show(p.high)}, ${p.n} seeds` : "";
        points.push({ x: f.px(p.x), y: f.py(p.y), text: `${s.label}\n${show(p.y, 5)} at step ${p.step}${range}` });
      }
    }
    figure.append(f.svg);
    if (far) figure.append(make("figcaption", {}, `Before training: ${show(mean(start.map(p => p.y)))} (outside the drawing).`));
    hover(figure, f.svg, points);
    const tools = offer(figure, f.svg, `${n} against ${AXES[a]}`, ["curve", "step", AXES[a], n, "lowest", "highest"], rows);
    magnify(figure, tools, f, lens, paint);
  }
  return paint;
}
function pareto(host) {
  const costs = [["cost", "cost"], ["step_seconds", "time of a step"], ["held_bytes", "memory held"]].filter(([key]) => data.trades.some(t => t.costs[key] !== null));
  const WORDS = { cost: [1, "FLOPs of the baseline"], step_seconds: [1000, "milliseconds a step"], held_bytes: [1e-6, "memory held by a step, MB"] };
  if (!costs.length || !data.trades.some(t => t.quality !== null)) { host.append(make("p", { class: "note" }, "Nothing to draw: quality or costs are missing.")); return; }
  const bar = make("div", { class: "bar" }), figure = make("figure"), lens = makeLens();
  const [pick, cost] = select("Quality against", costs, () => { Object.assign(lens, makeLens()); paint(); });
  bar.append(pick);
  host.append(bar, figure);
  function paint() {
    const key = cost(), [scale, word] = WORDS[key];
    const all = data.trades.map((t, g) => ({ g, label: t.label, x: t.costs[key] === null ? null : t.costs[key] * scale, y: t.quality, sd: t.sd || 0, paired: t.is_paired })).filter(p => p.x !== null && p.y !== null);
    figure.replaceChildren();
    if (!all.length) return;
    const sign = data.better === "higher" ? -1 : 1;
    const better = (a, b) => a.x <= b.x && sign * a.y <= sign * b.y && (a.x < b.x || sign * a.y < sign * b.y);
    const front = data.better ? all.filter(p => p.paired && !all.some(q => q.paired && better(q, p))).sort((a, b) => a.x - b.x) : [];
    const single = key === "step_seconds" ? data.runs.filter(run => run.step !== null && run.quality !== null) : [];
    const xs = [...all.map(p => p.x), ...single.map(run => run.step * 1000)], ys = [...all.flatMap(p => [p.y - p.sd, p.y + p.sd]), ...single.map(run => run.quality)];
    const f = frame(figure, `${data.metric} against ${word}`, widen(extent(xs), .16), widen(extent(ys), .12), { xlabel: word, ylabel: `${data.metric}${data.better ? `, ${data.better} is better` : ""}`, lens });
    if (front.length > 1) f.inside.append(draw("path", { class: "front", d: front.map((p, i) => i ? `H${f.px(p.x)}V${f.py(p.y)}` : `M${f.px(p.x)} ${f.py(p.y)}`).join("") }));
    for (const run of single) {
      const dot = marker(run.group, f.px(run.step * 1000), f.py(run.quality), 2.6);
      dot.setAttribute("opacity", ".4");
      f.inside.append(dot);
    }
    const points = [], taken = [];
    for (const p of all) {
      const x = f.px(p.x), y = f.py(p.y);
      if (p.sd) f.inside.append(draw("line", { x1: x, x2: x, y1: f.py(p.y - p.sd), y2: f.py(p.y + p.sd), stroke: colour(p.g), "stroke-width": 1.5 }));
      f.inside.append(marker(p.g, x, y, 6));
      if (!f.isInside(p.x, p.y)) continue;
      const half = p.label.length * 3.4, middle = Math.min(Math.max(x, 66 + half), f.width - 14 - half);
      let line = y - 13;
      for (const away of [-13, 23, -28, 38, -43, 53]) { // above, below, further away: where no other name stands
        line = y + away;
        if (!taken.some(t => Math.abs(t.y - line) < 14 && Math.abs(t.x - middle) < t.half + half + 6)) break;
      }
      taken.push({ x: middle, y: line, half });
      f.svg.append(draw("text", { class: "name", x: middle, y: line, "text-anchor": "middle" }, p.label));
      points.push({ x, y, text: `${p.label}\n${data.metric} ${show(p.y, 5)}${p.sd ? ` ± ${show(p.sd, 2)}` : ""}\n${show(p.x)} ${word}` });
    }
    figure.append(f.svg);
    hover(figure, f.svg, points);
    const rows = [...all.map(p => [p.label, "mean", p.x, p.y, p.sd]), ...single.map(run => [data.groups[run.group], run.id, run.step * 1000, run.quality, null])];
    magnify(figure, offer(figure, f.svg, `${data.metric} against ${word}`, ["group", "run", word, data.metric, "standard deviation"], rows), f, lens, paint);
  }
  return paint;
}
/* One row a group: mean and interval, zero marked. */
function forest(host) {
  const kinds = [["quality", data.metric, v => v, ""], ["step", "time of a step, %", v => 100 * (v - 1), " %"], ["held", "memory held by a step, %", v => 100 * (v - 1), " %"]];
  function paint() {
    host.replaceChildren();
    const wanted = [];
    for (const [key, title, turn, unit] of kinds) {
      const rows = data.differences.filter(d => d[key]).map(({ group: g, [key]: d }) => {
        const [low, high] = d.family_low === null ? [d.low, d.high] : [d.family_low, d.family_high];
        return { g, n: d.n, mean: turn(d.mean), low: low === null ? null : turn(low), high: high === null ? null : turn(high), pairs: d.pairs.map(([seed, v]) => [seed, turn(v)]) };
      });
      if (!rows.length) continue;
      const figure = make("figure", {}, make("figcaption", {}, title));
      host.append(figure);
      wanted.push({ figure, rows, title, unit });
    }
    for (const { figure, rows, title, unit } of wanted) { // the figures share the width: all stand before one is drawn
      const width = Math.max(260, figure.clientWidth), line = 42, height = rows.length * line + 30;
      const x = widen(extent([0, ...rows.flatMap(r => [r.mean, r.low ?? r.mean, r.high ?? r.mean, ...r.pairs.map(p => p[1])])]), .08);
      const px = v => 10 + (v - x[0]) / (x[1] - x[0] || 1) * (width - 20);
      const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}: differences to the baseline` });
      for (const t of ticks(x[0], x[1], 4)) svg.append(draw("text", { x: px(t), y: height - 6, "text-anchor": "middle" }, show(t)));
      svg.append(draw("line", { class: "zero", x1: px(0), x2: px(0), y1: 4, y2: height - 20 }));
      const points = [];
      rows.forEach((r, i) => {
        const y = i * line + 30;
        svg.append(draw("text", { class: "name", x: 2, y: y - 14 }, data.groups[r.g]));
        if (r.low !== null) svg.append(draw("line", { x1: px(r.low), x2: px(r.high), y1: y, y2: y, stroke: colour(r.g), "stroke-width": 2.5 }));
        for (const [seed, v] of r.pairs) {
          svg.append(draw("circle", { class: "pair", cx: px(v), cy: y + 8, r: 2.5, fill: "none", stroke: colour(r.g) }));
          points.push({ x: px(v), y: y + 8, text: `${data.groups[r.g]}, seed ${seed}: ${show(v, 3)}${unit}` });
        }
        svg.append(marker(r.g, px(r.mean), y, 5));
        const inside = r.low === null ? "no interval under three seeds" : `${show(r.low, 3)} to ${show(r.high, 3)}${unit}`;
        points.push({ x: px(r.mean), y, text: `${data.groups[r.g]}: ${show(r.mean, 3)}${unit}\n${inside}, ${r.n} pairs` });
      });
      figure.append(svg);
      hover(figure, svg, points);
      const values = rows.flatMap(r => [[data.groups[r.g], "mean", r.mean, r.low, r.high], ...r.pairs.map(([seed, v]) => [data.groups[r.g], `seed ${seed}`, v, null, null])]);
      offer(figure, svg, `${title}, difference to the baseline`, ["group", "pair", title, "interval from", "interval to"], values);
    }
  }
  return paint;
}
/* cividis, at eight places: even in lightness, and the same to colour-blind readers. */
const CIVIDIS = [[0, 34, 78], [34, 57, 109], [73, 79, 110], [107, 109, 114], [139, 138, 121], [177, 163, 112], [218, 196, 91], [254, 232, 56]];
function shade(v) {
  const at = Math.min(1, Math.max(0, v)) * 7, i = Math.min(6, Math.floor(at)), f = at - i;
  return CIVIDIS[i].map((c, k) => Math.round(c + (CIVIDIS[i + 1][k] - c) * f));
}
function layers(host) {
  const words = { kept_share: "kept share", cosine: "cosine to dense", sign_agreement: "signs that agree", relative_error: "relative error" };
  for (const group of data.layers) {
    const row = make("div", { class: "charts" });
    host.append(make("h3", {}, group.label), row);
    for (const [key, word] of Object.entries(words)) {
      const cells = group.figures[key];
      if (!cells || !cells.length) continue;
      const canvas = make("canvas", { width: group.steps.length, height: cells.length, role: "img", "aria-label": `${group.label}: ${word} by layer and step` });
      canvas.style.height = `${Math.max(120, Math.min(420, cells.length * 9))}px`;
      const paper = canvas.getContext("2d"), image = paper.createImageData(group.steps.length, cells.length);
      cells.forEach((line, y) => line.forEach((v, x) => {
        const place = 4 * (y * group.steps.length + x);
        image.data.set(v === null ? [0, 0, 0, 0] : [...shade(v), 255], place);
      }));
      paper.putImageData(image, 0, 0);
      const tip = make("div", { class: "tip", role: "status" });
      const figure = make("figure", {}, make("figcaption", {}, `${word}, steps ${group.steps[0]} to ${group.steps.at(-1)}`), canvas, tip,
        make("p", { class: "note" }, `Top: ${group.names[0]}; bottom: ${group.names.at(-1)}.`));
      const tell = event => {
        const box = canvas.getBoundingClientRect();
        const x = Math.floor((event.clientX - box.left) / box.width * group.steps.length), y = Math.floor((event.clientY - box.top) / box.height * cells.length);
        if (!cells[y] || group.steps[x] === undefined) return;
        tip.textContent = `${group.names[y]}\nstep ${group.steps[x]}: ${show(cells[y][x], 3)}`;
        tip.style.display = "block";
        tip.style.left = `${Math.max(0, Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth))}px`;
        tip.style.top = `${event.clientY - box.top + 30}px`;
      };
      canvas.addEventListener("pointermove", tell);
      canvas.addEventListener("pointerdown", tell);
      canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
      offer(figure, canvas, `${group.label}, ${word} by layer and step`, ["layer", ...group.steps], cells.map((line, y) => [group.names[y], ...line]));
      row.append(figure);
    }
  }
  host.append(make("p", { class: "scale" }, "0", make("i"), "1 and above"));
}
/* A folded section is drawn when it opens, because it has no width before; a link to it opens it. */
function unfold() {
  const part = location.hash.length > 1 && $(decodeURIComponent(location.hash.slice(1)));
  if (part && part.tagName === "DETAILS") { part.open = true; part.scrollIntoView(); }
}
addEventListener("hashchange", unfold);
document.querySelector("main").addEventListener("click", event => { if (event.target.closest("a[href^='#']")) setTimeout(unfold); });
const paints = [[forest, "forest"], [curves, "curves"], [pareto, "pareto"]].flatMap(([f, id]) => $(id) ? [f($(id))] : []).filter(Boolean);
const repaint = () => paints.forEach(paint => paint());
repaint();
if ($("layers")) layers($("layers"));
let last = document.body.clientWidth;
addEventListener("resize", () => { if (document.body.clientWidth !== last) { last = document.body.clientWidth; repaint(); } });
addEventListener("beforeprint", () => {
  document.querySelectorAll("details[data-print]").forEach(d => { d.open = true; });
  repaint(); // paper has another width
});
addEventListener("afterprint", repaint);
document.querySelectorAll("details").forEach(d => d.addEventListener("toggle", repaint));
unfold();
