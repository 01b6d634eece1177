"use strict";
/* What every drawing offers: a closer look, and itself as SVG, PNG and CSV. Before page.js, whose tools it uses. */
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "paint-order", "opacity", "font-size", "font-family", "text-anchor"];

/* The drawing as a file of its own: colours of this page's style sheet written out, text as text. */
function standalone(svg) {
  const copy = svg.cloneNode(true), { width, height } = svg.viewBox.baseVal;
  const originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    node.removeAttribute("class");
    node.setAttribute("style", DRAWN.map(name => `${name}:${style.getPropertyValue(name).replaceAll('"', "'")}`).join(";"));
  });
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.prepend(draw("rect", { width, height, fill: getComputedStyle(document.body).backgroundColor }));
  return new XMLSerializer().serializeToString(copy);
}
/* A table of values with a line of headings, as RFC 4180 has it. */
function toCsv(columns, rows) {
  const quote = value => /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  return [columns, ...rows].map(row => row.map(v => quote(v === null || v === undefined ? "" : String(v))).join(",")).join("\r\n") + "\r\n";
}
function save(name, blob) {
  const url = URL.createObjectURL(blob), link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
function savePng(name, svg) {
  const picture = new Image(), { width, height } = svg.viewBox.baseVal, scale = 3;
  picture.addEventListener("load", () => {
    const canvas = make("canvas", { width: width * scale, height: height * scale });
    canvas.getContext("2d").drawImage(picture, 0, 0, width * scale, height * scale);
    canvas.toBlob(blob => save(name, blob), "image/png");
  });
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(standalone(svg))}`;
}
/* Buttons below a drawing, which is an SVG or a canvas. The name makes file names; columns and rows are the values that it shows. */
function offer(figure, drawing, name, columns, rows) {
  const file = name.replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const button = (text, label, act) => {
    const found = make("button", { type: "button", "aria-label": label, title: label }, text);
    found.addEventListener("click", act);
    return found;
  };
  const bar = make("div", { class: "bar tools" }), isCanvas = drawing.tagName === "CANVAS";
  if (!isCanvas) bar.append(button("SVG", `Save "${name}" as SVG`, () => save(`${file}.svg`, new Blob([standalone(drawing)], { type: "image/svg+xml" }))));
  bar.append(
    button("PNG", `Save "${name}" as PNG`, () => isCanvas ? drawing.toBlob(blob => save(`${file}.png`, blob)) : savePng(`${file}.png`, drawing)),
    button("CSV", `Save the values of "${name}" as CSV`, () => save(`${file}.csv`, new Blob([toCsv(columns, rows)], { type: "text/csv" }))));
  figure.append(bar);
  return bar;
}
/* What part of a drawing is shown: `lens.x` and `lens.y` once somebody has looked closer, else all of it. */
function makeLens() { return { x: null, y: null }; }
/* Three buttons, and a rectangle drawn with the mouse; a double click shows everything again. */
function magnify(figure, bar, f, lens, repaint) {
  const look = (x, y) => { Object.assign(lens, { x, y }); repaint(); };
  const around = ([low, high], by) => { const middle = (low + high) / 2, half = (high - low) / 2 * by; return [middle - half, middle + half]; };
  const buttons = [["+", "Closer", () => look(around(f.x, .5), around(f.y, .5))], ["\u2212", "Further away", () => look(around(f.x, 2), around(f.y, 2))]];
  if (lens.x) buttons.push(["whole", "Show everything", () => look(null, null)]);
  for (const [text, label, act] of buttons) {
    const button = make("button", { type: "button", "aria-label": label, title: label }, text);
    button.addEventListener("click", () => {
      act(); // draws everything again: the focus goes to the new button of the same name, or to the first one
      const bars = figure.querySelectorAll(".tools button");
      ([...bars].find(b => b.title === label) || bars[0]).focus();
    });
    bar.append(button);
  }
  const svg = f.svg;
  let start = null, box = null;
  const at = event => {
    const frame = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / frame.width;
    return [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
  };
  svg.addEventListener("pointerdown", event => {
    if (event.pointerType !== "mouse" || event.button !== 0) return; // a finger scrolls
    start = at(event);
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  svg.addEventListener("pointermove", event => {
    if (!start) return;
    const [x, y] = at(event);
    if (!box) svg.append(box = draw("rect", { class: "lens" }));
    for (const [key, value] of [["x", Math.min(x, start[0])], ["y", Math.min(y, start[1])], ["width", Math.abs(x - start[0])], ["height", Math.abs(y - start[1])]]) box.setAttribute(key, value);
  });
  svg.addEventListener("pointerup", event => {
    const from = start, [x, y] = at(event);
    start = null;
    if (box) box.remove();
    box = null;
    if (!from || Math.abs(x - from[0]) < 8 || Math.abs(y - from[1]) < 8) return;
    look([f.unx(Math.min(x, from[0])), f.unx(Math.max(x, from[0]))], [f.uny(Math.max(y, from[1])), f.uny(Math.min(y, from[1]))]);
  });
  svg.addEventListener("dblclick", () => { if (lens.x) look(null, null); });
}
