"use strict";
// Texts of a run are data: they only ever become text nodes.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function show(x) {
  if (x == null) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(1);
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(3))).replace("-", "−");
}
const signed = (x) => (x == null ? "–" : (x > 0 ? "+" : "") + show(x));
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const text = (lines) => lines.map((line) => data.lines[line]).join("\n");
const valueOf = (x) => make("span", { class: `value ${x > 0 ? "pos" : x < 0 ? "neg" : ""}` }, signed(x));

// ---- charts ----

const WIDTH = 360, HEIGHT = 190, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 22;
const DASHES = ["", "5 3", "2 3", "8 3 2 3", "1 4"];

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found;
}

// panel: {title, range: share (0 to 1), zero (from 0) or free, lines: [{run, label, values}]}
function chart(panel) {
  const several = data.runs.length > 1;
  const labels = [...new Set(panel.lines.map((line) => line.label))];
  const lines = panel.lines.map((line) => ({
    ...line,
    x: data.runs[line.run].x,
    color: `var(--line${(several ? line.run : labels.indexOf(line.label)) % 8})`,
    dash: several ? DASHES[labels.indexOf(line.label) % DASHES.length] : "",
    name: [several ? data.runs[line.run].name : "", line.label].filter(Boolean).join(" "),
  }));
  const every = lines.flatMap((line) => line.values.filter((y) => y != null));
  if (!every.length) return null;
  const xs = lines.flatMap((line) => line.x);
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...every, panel.range !== "free" && every.every((y) => y >= 0) ? 0 : Infinity), Math.max(...every, panel.range === "share" ? 1 : -Infinity)];
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) y1 = y0 + (Math.abs(y0) || 1);
  if (panel.range === "zero") y1 += (y1 - y0) * 0.05;
  const px = (x) => LEFT + ((x - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - ((y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const first = lines[0].values.find((y) => y != null), last = lines[0].values.findLast((y) => y != null);
  const svg = make("svg:svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img",
    "aria-label": `${panel.title}: ${lines[0].name || "it"} goes from ${show(first)} to ${show(last)}. Arrow keys read the values.`,
  });
  for (const y of ticks(y0, y1, 4)) {
    svg.append(make("svg:line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }));
    svg.append(make("svg:text", { x: LEFT - 6, y: py(y) + 4, "text-anchor": "end" }, show(y)));
  }
  for (const x of ticks(x0, x1, 5).filter(Number.isInteger))
    svg.append(make("svg:text", { x: px(x), y: HEIGHT - 6, "text-anchor": "middle" }, show(x)));
  for (const line of lines) {
    let path = "", pen = "M";
    line.values.forEach((y, i) => {
      if (y == null) { pen = "M"; return; }
      path += `${pen}${px(line.x[i]).toFixed(1)},${py(y).toFixed(1)}`;
      pen = "L";
    });
    svg.append(make("svg:path", { d: path, stroke: line.color, "stroke-dasharray": line.dash, style: `stroke: ${line.color}` }));
    if (line.values.filter((y) => y != null).length === 1) {
      const i = line.values.findIndex((y) => y != null);
      svg.append(make("svg:circle", { cx: px(line.x[i]), cy: py(line.values[i]), r: 2.5, style: `fill: ${line.color}` }));
    }
  }
  const cursor = make("svg:g", { visibility: "hidden" });
  svg.append(cursor);
  const said = make("output");
  const grid = [...new Set(xs)].sort((a, b) => a - b);
  let at = grid.length;
  function read(index) {
    at = Math.max(0, Math.min(grid.length - 1, index));
    const x = grid[at];
    cursor.replaceChildren(make("svg:line", { class: "cursor", x1: px(x), x2: px(x), y1: TOP, y2: HEIGHT - BOTTOM }));
    const parts = [`iteration ${x}:`];
    for (const line of lines) {
      const y = line.values[line.x.indexOf(x)];
      if (y == null) continue;
      cursor.append(make("svg:circle", { cx: px(x), cy: py(y), r: 3, style: `fill: ${line.color}` }));
      parts.push(`${line.name} ${show(y)}`.trim() + (line === lines.at(-1) ? "" : ","));
    }
    cursor.setAttribute("visibility", "visible");
    said.textContent = parts.join(" ");
    said.title = said.textContent;
  }
  function leave() {
    cursor.setAttribute("visibility", "hidden");
    said.replaceChildren();
    if (labels.length > 1)
      labels.forEach((label, i) => said.append(
        several
          ? make("span", { style: "margin-right: 1em" }, make("svg:svg", { class: "dash", viewBox: "0 0 24 8", "aria-hidden": "true" },
            make("svg:path", { d: "M0,4H24", "stroke-dasharray": DASHES[i % DASHES.length], style: "stroke: currentColor" })), label)
          : make("span", { style: "margin-right: 1em" }, make("span", { class: "dot", "--c": `var(--line${i % 8})` }), label)));
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
  return make("figure", { class: "chart" }, make("figcaption", {}, panel.title), said, svg);
}

for (const place of document.querySelectorAll("[data-charts]")) {
  place.append(...data.panels[place.dataset.charts].map(chart).filter(Boolean));
  if (!place.children.length) place.append(make("p", { class: "note" }, "No iteration has been written yet."));
}
for (const place of document.querySelectorAll("[data-legend]"))
  if (data.runs.length > 1)
    place.append(...data.runs.map((run, i) => make("li", {}, make("span", { class: "dot", "--c": `var(--line${i % 8})` }), run.name)));

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
      make("p", { class: "note" }, "All episodes of the dumped iterations; the stronger the colour, the more company a step has."), bars);
}

// ---- episodes ----

const at = { run: data.runs.findIndex((run) => run.dumps.length), dump: 0, group: 0, estimator: "", episode: 0, turn: 0, level: null };
const dumpNow = () => data.runs[at.run].dumps[at.dump];
const groupNow = () => dumpNow().groups[at.group];
const stepNow = () => groupNow().episodes[at.episode].turns[at.turn];
const advantage = (b, t, name = at.estimator) => groupNow().estimators[name].advantages[b][t];
// An estimator without step groups is explained by HGPO's.
const explainer = () => (groupNow().estimators[at.estimator].levels.length ? at.estimator : "hgpo");

function paint(element, value) {
  element.style.setProperty("--hue", value < 0 ? "var(--neg)" : "var(--pos)");
  const largest = dumpNow().largest[at.estimator];
  // Bent, so that small advantages stay visible beside large ones.
  element.style.setProperty("--share", `${value && largest ? Math.round(6 + 94 * Math.min(1, Math.abs(value) / largest) ** 0.75) : 0}%`);
}

// The steps [episode, turn] of a level's group, with what the level compares.
function members(level) {
  const group = groupNow(), detail = group.estimators[explainer()], ids = group.ids[level];
  const id = ids[at.episode][at.turn], column = detail.levels.indexOf(level);
  const values = level < 0 && detail.scores ? detail.scores : detail.compared;
  const found = [];
  ids.forEach((row, b) => row.forEach((other, t) => {
    if (other !== id) return;
    found.push({ b, t, value: values[b][t], advantage: detail.level_advantages[b][t][column] });
  }));
  return found;
}
const levelName = (level) => (level < 0 ? "prompt group" : `level ${level}`);

function options(name, label, entries, chosen) {
  const select = make("select", { id: `choose-${name}` });
  entries.forEach(([value, shown]) => select.append(make("option", { value, selected: String(value) === String(chosen) }, shown)));
  select.addEventListener("change", () => {
    const value = name === "estimator" ? select.value : Number(select.value);
    const below = { run: ["dump", "group"], dump: ["group"], group: [], estimator: null }[name];
    at[name] = value;
    if (below) {
      for (const part of below) at[part] = part === "dump" ? data.runs[at.run].dumps.length - 1 : 0;
      Object.assign(at, { episode: 0, turn: 0, level: null });
      most();
    }
    browse();
    byId(`choose-${name}`).focus();
  });
  return make("label", {}, label, select);
}

// Starts at a step that many levels speak about, and of these at the one with the largest advantage.
function most() {
  const known = Object.keys(groupNow().estimators);
  if (!known.includes(at.estimator)) at.estimator = known.includes(dumpNow().own) ? dumpNow().own : "hgpo";
  const detail = groupNow().estimators[explainer()];
  let best = -1;
  groupNow().episodes.forEach((episode, b) => episode.turns.forEach((_, t) => {
    const interest = 1e6 * detail.level_weights[b][t].filter(Boolean).length + Math.abs(advantage(b, t));
    if (interest > best) { best = interest; at.episode = b; at.turn = t; }
  }));
}

function controls() {
  const run = data.runs[at.run], place = byId("controls");
  const runs = data.runs.map((r, i) => [i, r.name]).filter(([i]) => data.runs[i].dumps.length);
  place.replaceChildren(
    ...(runs.length > 1 ? [options("run", "run", runs, at.run)] : []),
    options("dump", "iteration", run.dumps.map((d, i) => [i, d.iteration]), at.dump),
    options("group", "task", dumpNow().groups.map((g, i) => [i, `${g.goal || "task " + g.group} (${g.episodes.filter((e) => e.success).length} of ${g.episodes.length} succeed)`]), at.group),
    options("estimator", "coloured by the advantage of", Object.keys(groupNow().estimators).map((n) => [n, n === dumpNow().own ? `${n} (trained with)` : n]), at.estimator));
}

function map() {
  const group = groupNow(), longest = Math.max(...group.episodes.map((e) => e.turns.length));
  const ringed = new Set(at.level == null ? [] : members(at.level).map(({ b, t }) => `${b},${t}`));
  const table = make("table", { class: "map", role: "grid", "aria-label": "Advantages of the prompt group: a row is an episode, a cell a turn" });
  table.append(make("thead", {}, make("tr", {}, make("th", {}), ...Array.from({ length: longest }, (_, t) => make("th", { scope: "col" }, t % 5 ? "" : String(t))))));
  const body = make("tbody");
  group.episodes.forEach((episode, b) => {
    const row = make("tr", { class: b === at.episode ? "now" : "" }, make("th", { scope: "row" }, `${episode.success ? "✓" : "✗"} episode ${episode.index}`));
    episode.turns.forEach((turn, t) => {
      const here = b === at.episode && t === at.turn, value = advantage(b, t);
      const cell = make("td", {
        class: `cell ${ringed.has(`${b},${t}`) ? "peer" : ""}`, role: "gridcell", tabindex: here ? 0 : -1, "aria-selected": String(here),
        "aria-label": `episode ${episode.index}, turn ${t}, advantage ${signed(value)}${turn.invalid ? ", invalid action" : ""}${turn.reward > 0 ? ", rewarded" : ""}`,
        title: `turn ${t}: ${signed(value)}`, onclick: () => go(b, t, "map"),
      }, turn.reward > 0 ? "★" : turn.invalid ? "!" : "");
      paint(cell, value);
      row.append(cell);
    });
    body.append(row);
  });
  table.append(body);
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const turns = group.episodes[at.episode].turns.length;
    if (moves) go(at.episode + moves[0], at.turn + moves[1], "map");
    else if (event.key === "Home" || event.key === "End") go(at.episode, event.key === "Home" ? 0 : turns - 1, "map");
    else return;
    event.preventDefault();
  });
  const largest = dumpNow().largest[at.estimator];
  byId("map").replaceChildren(table, make("p", { class: "scale" }, `−${show(largest)}`, make("i"), `+${show(largest)}`,
    make("span", {}, `advantage (${at.estimator}) · ★ reward · ! invalid action · ringed: the same ${at.level == null ? "group" : levelName(at.level) + (at.level < 0 ? "" : " group")}`)));
}

function turns() {
  const episode = groupNow().episodes[at.episode];
  const list = make("ol", { class: "turns", role: "listbox", "aria-label": `Turns of episode ${episode.index}` });
  episode.turns.forEach((turn, t) => {
    const here = t === at.turn, item = make("li", { role: "option", tabindex: here ? 0 : -1, "aria-selected": String(here), onclick: () => go(at.episode, t, "turns") },
      make("span", { class: "number" }, String(t)),
      make("span", {}, make("span", { class: "seen" }, text(turn.observation)),
        make("span", { class: "did mono" }, `> ${text(turn.response)}`, turn.invalid ? make("span", { class: "tag" }, "invalid") : null,
          turn.reward > 0 ? make("span", { class: "tag good" }, `reward ${show(turn.reward)}`) : null)),
      valueOf(advantage(at.episode, t)));
    paint(item, advantage(at.episode, t));
    list.append(item);
  });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowUp: at.turn - 1, ArrowDown: at.turn + 1, Home: 0, End: episode.turns.length - 1 }[event.key];
    if (move == null) return;
    event.preventDefault();
    go(at.episode, move, "turns");
  });
  byId("turns").replaceChildren(
    make("h3", {}, `Episode ${episode.index}: ${groupNow().goal || "task " + groupNow().group}`,
      make("span", { class: `tag ${episode.success ? "good" : ""}` }, episode.success ? "success" : "failure")),
    ...(episode.note ? [make("p", { class: "note" }, episode.note)] : []), list);
  const now = list.children[at.turn];
  list.scrollTop = now.offsetTop - list.offsetTop - list.clientHeight / 2 + now.clientHeight / 2;
}

function pull(value, largest) {
  const half = largest ? Math.min(50, (50 * Math.abs(value)) / largest) : 0;
  return make("span", { class: "pull", "aria-hidden": "true" },
    make("i", { style: `width: ${half}%; ${value < 0 ? "right" : "left"}: 50%; background: var(--${value < 0 ? "neg" : "pos"})` }));
}

function step() {
  const group = groupNow(), episode = group.episodes[at.episode], turn = stepNow(), name = explainer(), detail = group.estimators[name];
  const weights = detail.level_weights[at.episode][at.turn], parts = detail.level_advantages[at.episode][at.turn];
  const levels = detail.levels.map((level, column) => ({ level, weight: weights[column], part: parts[column], column })).filter(({ part }) => part != null);
  if (!levels.some(({ level }) => level === at.level)) at.level = (levels.findLast(({ weight }) => weight) ?? levels.at(-1))?.level ?? null;

  const table = make("table", { class: "levels" },
    make("thead", {}, make("tr", {}, ...[["group", 0], ["steps", 1], ["mean", 1], ["advantage", 1], ["weight", 1], ["", 0]].map(([t, n]) => make("th", { scope: "col", class: n ? "n" : "" }, t)))));
  const body = make("tbody");
  for (const { level, weight, part } of levels) {
    const who = members(level);
    body.append(make("tr", { class: level === at.level ? "now" : "" },
      make("td", {}, make("button", { type: "button", "aria-pressed": String(level === at.level), id: `level-${level}`, onclick: () => { at.level = level; map(); step(); byId(`level-${level}`).focus(); } }, levelName(level))),
      make("td", { class: "n" }, String(who.length)), make("td", { class: "n" }, show(mean(who.map((m) => m.value)))),
      make("td", { class: "n" }, valueOf(part)), make("td", { class: "n" }, weight ? show(weight) : "left out"),
      make("td", {}, pull(part, Math.max(...levels.map((l) => Math.abs(l.part)))))));
  }
  table.append(body);

  let company = [];
  if (at.level != null) {
    const who = members(at.level).sort((a, b) => b.value - a.value), scores = at.level < 0 && detail.scores;
    const rows = scores ? who.filter((m, i) => who.findIndex((o) => o.b === m.b) === i) : who;
    const largest = Math.max(...who.map((m) => Math.abs(m.advantage)));
    const list = make("tbody");
    for (const m of rows) {
      const other = group.episodes[m.b], self = m.b === at.episode && (scores || m.t === at.turn);
      list.append(make("tr", { class: self ? "self" : "" },
        make("td", {}, make("button", { type: "button", onclick: () => go(m.b, scores ? 0 : m.t, "step") }, scores ? `episode ${other.index}` : `${other.index}, turn ${m.t}`)),
        make("td", { class: "mono" }, scores ? `${other.turns.length} turns, ${other.success ? "success" : "failure"}` : text(other.turns[m.t].response)),
        make("td", { class: "n" }, show(m.value)), make("td", { class: "n" }, valueOf(m.advantage)), make("td", {}, pull(m.advantage, largest))));
    }
    const past = at.level < 0 ? [] : episode.turns.slice(Math.max(0, at.turn - at.level), at.turn + 1);
    company = [
      make("h3", {}, at.level < 0 ? "Prompt group: the episodes of this task" : `Level ${at.level}: steps that ${at.level ? `share these ${at.level + 1} observations` : "share the observation"}`),
      ...(past.length ? [make("ol", { class: "history" }, ...past.map((p) => make("li", {}, text(p.observation).slice(0, 400))))] : []),
      make("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "Steps of the group" },
        make("table", { class: "peers" }, make("thead", {}, make("tr", {}, ...["episode", "what it did", scores ? "score" : "return", "advantage", ""].map((t, i) => make("th", { scope: "col", class: i === 2 || i === 3 ? "n" : "" }, t)))), list))];
  }

  const names = Object.keys(group.estimators), others = make("tbody");
  for (const other of names) {
    const value = advantage(at.episode, at.turn, other);
    others.append(make("tr", { class: other === at.estimator ? "self" : "" }, make("td", {}, other + (other === dumpNow().own ? " (trained with)" : "")),
      make("td", { class: "n" }, valueOf(value)), make("td", {}, pull(value, dumpNow().largest[other]))));
  }
  const used = levels.filter(({ weight }) => weight);
  const total = group.estimators[name].advantages[at.episode][at.turn];
  // HGPO's and GiGPO's advantage is the weighted sum of their levels; others only use the levels on the way.
  const sum = detail.summed && used.length
    ? make("p", { class: "sum mono" }, used.map(({ weight, part }) => `${show(weight)} × ${signed(part)}`).join("  +  ") + `  =  ${signed(total)}`)
    : detail.summed ? make("p", { class: "sum" }, "No level says anything about this step: its advantage is 0.") : null;
  byId("step").replaceChildren(make("div", { class: "step" },
    make("h3", {}, `Episode ${episode.index}, turn ${at.turn}`, turn.invalid ? make("span", { class: "tag" }, "invalid action") : null),
    make("pre", {}, text(turn.observation)), make("pre", {}, `> ${text(turn.response)}`),
    make("details", {}, make("summary", {}, "The whole prompt, as the agent read it"), make("pre", {}, text(turn.prompt))),
    make("p", { class: "sum" }, `Return ${show(detail.returns[at.episode][at.turn])}, advantage (${at.estimator}) `, valueOf(advantage(at.episode, at.turn))),
    make("h3", {}, name === at.estimator ? `How ${name} comes to it` : `${at.estimator} has no groups of steps; those of ${name}:`), sum,
    make("div", { class: "scroll" }, table), ...company,
    make("h3", {}, "What the other estimators make of this step"),
    make("p", { class: "note" }, "Bars are relative to the largest advantage of each estimator in this iteration."),
    make("table", { class: "peers" }, others)));
  byId("said").textContent = `Episode ${episode.index}, turn ${at.turn}, advantage ${signed(advantage(at.episode, at.turn))}, ${levels.map(({ level, part }) => `${levelName(level)} ${signed(part)}`).join(", ")}`;
}

function go(b, t, from) {
  const episodes = groupNow().episodes;
  at.episode = Math.max(0, Math.min(episodes.length - 1, b));
  at.turn = Math.max(0, Math.min(episodes[at.episode].turns.length - 1, t));
  step(); // decides the level that the map rings
  map();
  turns();
  if (from !== "step") document.querySelector(`#${from} [aria-selected=true]`).focus({ preventScroll: from === "turns" });
}

function browse() {
  controls();
  step();
  map();
  turns();
}

if (at.run >= 0) {
  at.dump = data.runs[at.run].dumps.length - 1;
  most();
  browse();
} else {
  byId("browser-note").textContent = "No dump of these runs holds a step to show; log.dump_every says how often one is written.";
}
