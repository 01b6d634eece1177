/* Live bytes over one step, part upon part; after page.js, whose tools it uses. */
const PART_WORDS = ["weights", "gradients", "optimizer state", "saved activations", "workspace"];
const PART_COLOURS = ["var(--g0)", "var(--g1)", "var(--g2)", "var(--g4)", "var(--soft)"];
const PHASE_WORDS = ["forward", "backward", "update"];

function bytes(value) {
  const [size, unit] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => value >= size) || [1, "B"];
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}
/* The upper edge of a pile of parts: a value holds until the next one. */
function edge(points, upto, px, py, scale) {
  let d = "";
  points.forEach((p, i) => {
    const y = py(p.slice(2, 2 + upto).reduce((a, b) => a + b, 0) / scale);
    d += i ? `H${px(p[0] / 1000)}V${y}` : `M${px(p[0] / 1000)} ${y}`;
  });
  return d;
}
function memory(host) {
  const total = p => p.slice(2).reduce((a, b) => a + b, 0);
  const keys = make("div", { class: "bar keys" });
  PART_WORDS.forEach((word, k) => {
    const sample = make("span", { class: "sample" });
    sample.style.color = PART_COLOURS[k];
    const key = make("span", {}, sample, ` ${word}`);
    sample.style.display = "inline-block";
    keys.append(key);
  });
  host.append(keys);
  const figures = data.memory.map(group => {
    const figure = make("figure");
    host.append(make("h3", {}, `${group.label}, step ${group.step}`), figure);
    return [group, figure];
  });
  const highest = Math.max(...data.memory.flatMap(group => group.points.map(total)));
  const scale = highest >= 1e9 ? 1e9 : 1e6, unit = scale === 1e9 ? "GB" : "MB";
  return () => {
    for (const [group, figure] of figures) {
      figure.replaceChildren();
      const points = group.points, times = points.map(p => p[0] / 1000);
      const { svg, inside, px, py, width } = frame(figure, `${group.label}: live bytes over step ${group.step}`,
        [times[0], times.at(-1)], [0, highest / scale * 1.18], { xlabel: "milliseconds into a step that was watched: slower than others", ylabel: `live, ${unit}`, height: 280 });
      for (let k = PART_WORDS.length; k > 0; k--) { // the whole pile first, each next one covers what is not its own
        const d = `${edge(points, k, px, py, scale)}V${py(0)}H${px(times[0])}z`;
        inside.append(draw("path", { class: "part", d, style: `fill:${PART_COLOURS[k - 1]}` }));
      }
      points.forEach((p, i) => {
        if (i && p[1] === points[i - 1][1]) return;
        const end = points.findIndex((q, j) => j > i && q[1] !== p[1]), from = px(times[i]), to = px(end < 0 ? times.at(-1) : times[end]);
        if (i) inside.append(draw("line", { class: "zero", x1: from, x2: from, y1: py(highest / scale * 1.18), y2: py(0) }));
        if (to - from > 60) inside.append(draw("text", { x: (from + to) / 2, y: py(highest / scale * 1.11), "text-anchor": "middle" }, PHASE_WORDS[p[1]]));
      });
      const peak = points.reduce((best, p) => total(p) > total(best) ? p : best);
      const late = px(peak[0] / 1000) > width * .6;
      inside.append(draw("circle", { cx: px(peak[0] / 1000), cy: py(total(peak) / scale), r: 3.5, style: "fill:var(--ink)" }));
      inside.append(draw("text", { class: "name", x: px(peak[0] / 1000) + (late ? -7 : 7), y: py(total(peak) / scale) - 4, "text-anchor": late ? "end" : "start" }, `peak ${bytes(total(peak))}`));
      figure.append(svg);
      hover(figure, svg, points.map(p => ({ x: px(p[0] / 1000), y: py(total(p) / scale),
        text: `${PHASE_WORDS[p[1]]}, ${bytes(total(p))} in all\n${PART_WORDS.map((word, k) => `${word} ${bytes(p[k + 2])}`).join("\n")}` })));
      offer(figure, svg, `${group.label}, live bytes over step ${group.step}`, ["milliseconds", "phase", ...PART_WORDS.map(word => `${word} (bytes)`)],
        points.map(p => [p[0] / 1000, PHASE_WORDS[p[1]], ...p.slice(2)]));
    }
  };
}
if ($("memory")) {
  const paint = memory($("memory"));
  paints.push(paint);
  paint();
}
