// ---- charts ----

const WIDTH = 360, HEIGHT = 214, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 38;
const DASHES = ["", "5 3", "2 3", "8 3 2 3", "1 4"];
const MODES = [["sampled", true], ["greedy", false]]; // of the evaluation that ends a run; whether its mark is filled
const percent = (y) => `${show(100 * y)} %`;

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found;
}

// 1, 2 and 5 times the powers of ten between low and high, or the powers alone where that would be many; where only one such
// number lies between them, equal steps.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of high / low > 300 ? [1] : [1, 2, 5]) found.push(m * 10 ** power);
  const inside = found.filter((y) => y >= low * 0.999 && y <= high * 1.001);
  return inside.length > 1 ? inside : ticks(low, high, 4);
}

// The mean over `window` neighbours, as hgpo_jax/trainer/curves.py has it: null where it reaches beyond an end, and a gap stays
// a gap.
function smooth(values, window) {
  const half = (window - 1) / 2;
  return values.map((value, i) => {
    if (value == null || i < half || i >= values.length - half) return null;
    return mean(values.slice(i - half, i + half + 1).filter((y) => y != null));
  });
}

const chosen = { window: data.window };

// panel: {title, metric, unit, range: share (0 to 100 %), zero (from 0) or free, lines: [{run, metric, label, held_out}]};
// log: whether the y axis is logarithmic.
function chart(panel) {
  const several = data.runs.length > 1, log = Boolean(panel.log);
  const labels = [...new Set(panel.lines.filter((line) => !line.held_out).map((line) => line.label))];
  const lines = panel.lines.map((line) => {
    const raw = data.runs[line.run].metrics[line.metric];
    return {
      ...line,
      raw: log ? raw.map((y) => (y > 0 ? y : null)) : raw,
      x: data.runs[line.run].x,
      color: several ? `var(--line${line.run % 8})` : line.held_out ? "var(--held)" : `var(--line${labels.indexOf(line.label) % 8})`,
      dash: several && !line.held_out ? DASHES[labels.indexOf(line.label) % DASHES.length] : "",
      name: [several ? data.runs[line.run].name : "", labels.length > 1 || line.held_out ? line.label : ""].filter(Boolean).join(" "),
    };
  });
  for (const line of lines) line.values = line.held_out ? line.raw : smooth(line.raw, chosen.window);
  // The evaluation that ends a run of N iterations stands at N.
  const marks = data.runs.flatMap((run, i) => MODES.flatMap(([mode, filled]) => {
    const y = run.held_out?.[mode][panel.metric];
    if (y == null || !run.x.length) return [];
    return [{
      x: run.x.at(-1) + 1, y, mode, filled, color: several ? `var(--line${i % 8})` : "var(--held)",
      interval: panel.metric === "success" ? run.held_out[mode].interval : null,
      name: `${several ? run.name + " " : ""}held-out, ${mode}`,
    }];
  }));
  const every = [...lines.flatMap((line) => line.raw.filter((y) => y != null)), ...marks.flatMap((mark) => mark.interval ?? [mark.y])];
  if (!every.length) return null;
  // All charts have one x axis, with or without marks at its end.
  let x0 = Infinity, x1 = -Infinity;
  for (const run of data.runs.filter((run) => run.x.length))
    [x0, x1] = [Math.min(x0, run.x[0]), Math.max(x1, run.x.at(-1) + (run.held_out ? 1 : 0))];
  let [y0, y1] = [every.reduce((a, b) => Math.min(a, b)), every.reduce((a, b) => Math.max(a, b))];
  if (!log && panel.range !== "free" && y0 >= 0) y0 = 0;
  if (panel.range === "share") y1 = Math.max(1, y1);
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) [y0, y1] = log ? [y0 / 2, y1 * 2] : [y0, y0 + (Math.abs(y0) || 1)];
  if (panel.range === "zero" && !log) y1 += (y1 - y0) * 0.05;
  const scaled = (y) => (log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0));
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - scaled(y) * (HEIGHT - TOP - BOTTOM);
  const shown = panel.range === "share" ? percent : show;
  const first = lines[0].raw.find((y) => y != null), last = lines[0].raw.findLast((y) => y != null);
  const svg = make("svg:svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
    "aria-label": `${panel.title}, ${panel.unit}: ${lines[0].name || "it"} goes from ${shown(first)} to ${shown(last)}. Arrow keys read the values.`,
  });
  for (const y of log ? logTicks(y0, y1) : ticks(y0, y1, 4)) {
    svg.append(make("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }));
    svg.append(make("svg:text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, shown(y)));
  }
  for (const x of ticks(x0, x1, 5).filter(Number.isInteger))
    svg.append(make("svg:text", { class: "tick", x: px(x), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, show(x)));
  const middle = TOP + (HEIGHT - TOP - BOTTOM) / 2;
  svg.append(make("svg:text", { class: "axis", x: LEFT + (WIDTH - LEFT - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "iteration"));
  svg.append(make("svg:text", { class: "axis", x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, panel.unit));
  const path = (x, values) => {
    let path = "", pen = "M";
    values.forEach((y, i) => {
      if (y == null) { pen = "M"; return; }
      path += `${pen}${px(x[i]).toFixed(1)},${py(y).toFixed(1)}`;
      pen = "L";
    });
    return path;
  };
  for (const line of lines) {
    const style = `stroke: ${line.color}`;
    if (line.held_out) { // one in many iterations: dots, joined
      const known = line.x.map((x, i) => [x, line.raw[i]]).filter(([, y]) => y != null);
      svg.append(make("svg:path", { class: "held", d: path(known.map(([x]) => x), known.map(([, y]) => y)), style }));
      for (const [x, y] of known) svg.append(make("svg:circle", { cx: px(x), cy: py(y), r: 2.5, style: `fill: ${line.color}` }));
      continue;
    }
    if (chosen.window > 1) svg.append(make("svg:path", { class: "raw", d: path(line.x, line.raw), style }));
    svg.append(make("svg:path", { class: "line", d: path(line.x, line.values), "stroke-dasharray": line.dash, style }));
    if (line.raw.filter((y) => y != null).length === 1) {
      const i = line.raw.findIndex((y) => y != null);
      svg.append(make("svg:circle", { cx: px(line.x[i]), cy: py(line.raw[i]), r: 2.5, style: `fill: ${line.color}` }));
    }
  }
  for (const mark of marks) {
    const x = px(mark.x) - (mark.filled ? 4 : 0), style = `stroke: ${mark.color}`;
    if (mark.interval)
      svg.append(make("svg:line", { class: "interval", x1: x, x2: x, y1: py(mark.interval[0]), y2: py(mark.interval[1]), style }));
    svg.append(make("svg:circle", { class: "mark", cx: x, cy: py(mark.y), r: 3.4, style: `${style}; fill: ${mark.filled ? mark.color : "var(--surface)"}` }));
  }
  const cursor = make("svg:g", { visibility: "hidden" });
  svg.append(cursor);
  const said = make("output");
  const grid = [...new Set([...lines.flatMap((line) => line.x), ...marks.map((mark) => mark.x)])].sort((a, b) => a - b);
  let at = grid.length;
  function read(index) {
    at = Math.max(0, Math.min(grid.length - 1, index));
    const x = grid[at];
    cursor.replaceChildren(make("svg:line", { class: "cursor", x1: px(x), x2: px(x), y1: TOP, y2: HEIGHT - BOTTOM }));
    const parts = [];
    for (const line of lines) {
      const y = line.raw[line.x.indexOf(x)];
      if (y == null) continue;
      cursor.append(make("svg:circle", { cx: px(x), cy: py(y), r: 3, style: `fill: ${line.color}` }));
      parts.push(`${line.name} ${shown(y)}`.trim());
    }
    for (const mark of marks.filter((m) => m.x === x))
      parts.push(`${mark.name} ${shown(mark.y)}${mark.interval ? ` (${mark.interval.map(shown).join(" to ")})` : ""}`);
    cursor.setAttribute("visibility", "visible");
    said.textContent = `iteration ${x}: ${parts.join(", ")}`;
    said.title = said.textContent;
  }
  const key = (symbol, text) => make("span", { class: "key" }, symbol, text);
  function leave() {
    cursor.setAttribute("visibility", "hidden");
    said.replaceChildren();
    if (labels.length > 1)
      labels.forEach((label, i) => said.append(key(
        several
          ? make("svg:svg", { class: "dash", viewBox: "0 0 24 8", "aria-hidden": "true" },
            make("svg:path", { d: "M0,4H24", "stroke-dasharray": DASHES[i % DASHES.length], style: "stroke: currentColor" }))
          : make("span", { class: "dot", "--c": `var(--line${i % 8})` }), label)));
    const held = several ? "currentColor" : "var(--held)";
    if (lines.some((line) => line.held_out)) said.append(key(make("span", { class: "dot small", "--c": held }), "held-out, while training"));
    for (const [mode, filled] of MODES.filter(([mode]) => marks.some((mark) => mark.mode === mode)))
      said.append(key(make("span", { class: `dot ${filled ? "" : "ring"}`, "--c": held }), `held-out, ${mode}`));
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = x0 + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (x1 - x0);
    read(grid.reduce((best, g, i) => (Math.abs(g - x) < Math.abs(grid[best] - x) ? i : best), 0));
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: grid.length - 1 }[event.key];
    if (move == null) return;
    event.preventDefault();
    read(move);
  });
  leave();
  const figure = make("figure", { class: "chart" }, make("figcaption", {}, make("span", {}, panel.title),
    panel.range === "zero" && every.some((y) => y > 0)
      ? make("button", { type: "button", class: "log", "aria-pressed": String(log), title: "logarithmic axis", onclick: () => {
        panel.log = !log;
        const other = chart(panel);
        figure.replaceWith(other);
        other.querySelector(".log").focus();
      } }, "log") : null), said, svg);
  return figure;
}

function charts() {
  for (const place of document.querySelectorAll("[data-charts]")) {
    place.replaceChildren(...data.panels[place.dataset.charts].map(chart).filter(Boolean));
    if (!place.children.length) place.append(make("p", { class: "note" }, "No iteration has been written yet."));
  }
}
charts();
for (const place of document.querySelectorAll("[data-legend]"))
  if (data.runs.length > 1)
    place.append(...data.runs.map((run, i) => make("li", {}, make("span", { class: "dot", "--c": `var(--line${i % 8})` }), run.name)));

// Every metric of every iteration, as the runs wrote them.
function csv() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))];
  const quoted = (x) => (/[",\n\r]/.test(x) ? `"${x.replaceAll('"', '""')}"` : x);
  const rows = data.runs.flatMap((run) => run.x.map((x, i) => [run.name, x, ...names.map((name) => run.metrics[name]?.[i] ?? "")]));
  return [["run", "iteration", ...names], ...rows].map((row) => row.map((x) => quoted(String(x))).join(",")).join("\n") + "\n";
}
function json() {
  return JSON.stringify({ runs: data.runs.map(({ name, x, metrics, held_out }) => ({ name, iterations: x, metrics, held_out })) });
}

{
  const count = Math.max(...data.runs.map((run) => run.x.length));
  const windows = [...new Set([1, data.window, 5, 11, 25, 51])].filter((w) => w === 1 || w <= Math.max(count, data.window)).sort((a, b) => a - b);
  const select = make("select", { id: "choose-window" }, ...windows.map((w) =>
    make("option", { value: w, selected: w === chosen.window }, w === 1 ? "none" : `mean over ${w} iterations`)));
  select.addEventListener("change", () => { chosen.window = Number(select.value); charts(); });
  const download = (name, type, text) => make("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) }, name);
  byId("chart-controls").append(make("label", {}, "smoothing", select), make("p", { class: "downloads" },
    "All values: ", download("metrics.csv", "text/csv", csv()), " ", download("metrics.json", "application/json", json())));
}

// ---- distribution of group sizes ----

const BINS = [[1, 1, "1"], [2, 2, "2"], [3, 4, "3–4"], [5, 8, "5–8"], [9, 16, "9–16"], [17, Infinity, "17+"]];
{
  const bars = make("div", { class: "bars" });
  data.runs.forEach((run) => run.dumps.forEach((dump) => {
    bars.append(make("div", { class: "head" }, `${data.runs.length > 1 ? run.name + ", " : ""}iteration ${dump.iteration}`));
    dump.sizes.forEach(({ level, counts }) => {
      // counts: [group size, groups]; a bar shows steps.
      const steps = BINS.map(([low, high]) => counts.filter(([n]) => n >= low && n <= high).reduce((sum, [n, c]) => sum + n * c, 0));
      const all = steps.reduce((a, b) => a + b, 0);
      if (!all) return;
      const groups = counts.reduce((sum, [, c]) => sum + c, 0);
      const bar = make("div", { class: "bar", role: "img", "aria-label": BINS.map(([, , name], i) => `${name}: ${show((100 * steps[i]) / all)} %`).join(", ") });
      steps.forEach((count, i) => {
        if (!count) return;
        const share = (100 * count) / all;
        bar.append(make("span", {
          title: `groups of ${BINS[i][2]}: ${show(share)} % of the steps`,
          style: `width: ${share}%; background: color-mix(in oklab, var(--pos) ${[4, 22, 38, 54, 70, 88][i]}%, var(--sunk)); color: ${i > 3 ? "var(--paper)" : "var(--ink)"}`,
        }, share > 6 ? BINS[i][2] : ""));
      });
      bars.append(make("div", {}, `level ${level}`), make("div", { class: "n" }, make("small", {}, `mean ${show(all / groups)}`)), bar);
    });
  }));
  if (bars.children.length)
    byId("sizes").append(
      make("h3", {}, "Steps by the size of their group"),
      make("p", { class: "note" }, "All episodes of the dumped iterations; the darker the colour, the larger the group."), bars);
}
