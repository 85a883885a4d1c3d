// ---- episodes ----

// episode: its number within its task. only: which episodes the map shows.
const at = { run: data.runs.findIndex((run) => run.dumps.length), dump: 0, group: 0, estimator: "", only: "all", episode: 0, turn: 0, level: null };
const dumpNow = () => data.runs[at.run].dumps[at.dump];
const groupNow = () => dumpNow().groups[at.group];
const stepNow = () => groupNow().episodes[at.episode].turns[at.turn];
const KINDS = { all: () => true, failures: ({ outcome }) => outcome === "failure", successes: ({ outcome }) => outcome === "success" };
const MARKS = { success: "✓", failure: "✗", unknown: "?" };
const shownEpisodes = () => groupNow().episodes.map((_, b) => b).filter((b) => KINDS[at.only](groupNow().episodes[b]));
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
  const group = groupNow(), detail = group.estimators[explainer()], ids = group.ids[detail.ids[level]];
  const id = ids[at.episode][at.turn], column = detail.levels.indexOf(level);
  const values = level < 0 && detail.scores ? detail.scores : detail.compared;
  const found = [];
  ids.forEach((row, b) => row.forEach((other, t) => {
    if (other !== id) return;
    found.push({ b, t, value: values[b][t], advantage: detail.level_advantages[b][t][column] });
  }));
  return found;
}
// The mean that a level subtracts. Where the steps of an episode share the weight of one, each counts that much less.
function meanOf(who, level) {
  if (level >= 0 || !groupNow().estimators[explainer()].shares) return mean(who.map((m) => m.value));
  const steps = new Map();
  for (const m of who) steps.set(m.b, (steps.get(m.b) ?? 0) + 1);
  return who.reduce((sum, m) => sum + m.value / steps.get(m.b), 0) / steps.size;
}
// Whether all members of a group have done equally well: then it compares nothing, however many they are.
const flat = (who) => who.length > 1 && who.every((m) => Math.abs(m.value - who[0].value) <= 1e-6 * Math.abs(who[0].value));
const levelName = (level) => (level < 0 ? "prompt group" : `level ${level}`);

function options(name, label, entries, chosen) {
  const select = make("select", { id: `choose-${name}` });
  entries.forEach(([value, shown]) => select.append(make("option", { value, selected: String(value) === String(chosen) }, shown)));
  select.addEventListener("change", () => {
    const value = name === "estimator" || name === "only" ? select.value : Number(select.value);
    const below = { run: ["dump", "group"], dump: ["group"], group: [], only: [], estimator: null }[name];
    at[name] = value;
    if (below) {
      for (const part of below) at[part] = part === "dump" ? data.runs[at.run].dumps.length - 1 : 0;
      Object.assign(at, { episode: 0, turn: 0, level: null });
      most();
    }
    browse();
    remember();
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
  for (const b of shownEpisodes()) groupNow().episodes[b].turns.forEach((_, t) => {
    const interest = 1e6 * detail.level_weights[b][t].filter(Boolean).length + Math.abs(advantage(b, t));
    if (interest > best) { best = interest; at.episode = b; at.turn = t; }
  });
}

function controls() {
  const run = data.runs[at.run], place = byId("controls");
  const runs = data.runs.map((r, i) => [i, r.name]).filter(([i]) => data.runs[i].dumps.length);
  place.replaceChildren(
    ...(runs.length > 1 ? [options("run", "run", runs, at.run)] : []),
    options("dump", "iteration", run.dumps.map((d, i) => [i, d.iteration]), at.dump),
    options("group", "task", dumpNow().groups.map((g, i) => [i, `${g.goal || "task " + g.group} (${g.episodes.filter(KINDS.successes).length} of ${g.episodes.length} succeed)`]), at.group),
    options("only", "episodes", Object.entries(KINDS).map(([kind, is]) => [kind, `${kind} (${groupNow().episodes.filter(is).length})`]), at.only),
    options("estimator", "coloured by advantage under", Object.keys(groupNow().estimators).map((n) => [n, n === dumpNow().own ? `${n} (trained with)` : n]), at.estimator));
}

function map() {
  const group = groupNow(), rows = shownEpisodes();
  if (!rows.length) {
    byId("map").replaceChildren(make("p", {}, `No episode of this task ${at.only === "failures" ? "fails" : "succeeds"}.`));
    return;
  }
  const longest = Math.max(...rows.map((b) => group.episodes[b].turns.length));
  const ringed = new Set(at.level == null ? [] : members(at.level).map(({ b, t }) => `${b},${t}`));
  const table = make("table", { class: "map", role: "grid", "aria-label": "Advantages of the prompt group: a row is an episode, a cell a turn" });
  table.append(make("thead", {}, make("tr", {}, make("th", {}), ...Array.from({ length: longest }, (_, t) => make("th", { scope: "col" }, t % 5 ? "" : String(t))))));
  const body = make("tbody");
  for (const b of rows) {
    const episode = group.episodes[b];
    const row = make("tr", { class: b === at.episode ? "now" : "" }, make("th", { scope: "row" }, `${MARKS[episode.outcome]} `, make("span", { class: "wide" }, "episode "), String(b)));
    episode.turns.forEach((turn, t) => {
      const here = b === at.episode && t === at.turn, value = advantage(b, t);
      const cell = make("td", {
        class: `cell ${ringed.has(`${b},${t}`) ? "peer" : ""}`, role: "gridcell", tabindex: here ? 0 : -1, "aria-selected": String(here),
        "aria-label": `episode ${b}, turn ${t}${turn.role && `, ${turn.role}`}, advantage ${signed(value)}${turn.invalid ? ", invalid action" : ""}${turn.reward > 0 ? ", rewarded" : ""}`,
        title: `turn ${t}: ${signed(value)}`, onclick: () => go(b, t, "map"),
      }, turn.reward > 0 ? "★" : turn.invalid ? "!" : "");
      paint(cell, value);
      row.append(cell);
    });
    body.append(row);
  }
  table.append(body);
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const turns = group.episodes[at.episode].turns.length;
    if (moves) go(rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(at.episode) + moves[0]))], at.turn + moves[1], "map");
    else if (event.key === "Home" || event.key === "End") go(at.episode, event.key === "Home" ? 0 : turns - 1, "map");
    else return;
    event.preventDefault();
  });
  const largest = dumpNow().largest[at.estimator];
  byId("map").replaceChildren(table, make("p", { class: "scale" }, `−${show(largest)}`, make("i"), `+${show(largest)}`,
    make("span", {}, `advantage (${at.estimator}) · ★ reward · ! invalid action · outlined: the same ${at.level == null ? "group" : levelName(at.level) + (at.level < 0 ? "" : " group")}`)));
}

function turns() {
  const episode = groupNow().episodes[at.episode];
  const list = make("ol", { class: "turns", role: "listbox", "aria-label": `Turns of episode ${at.episode}` });
  episode.turns.forEach((turn, t) => {
    const here = t === at.turn, item = make("li", { role: "option", tabindex: here ? 0 : -1, "aria-selected": String(here), onclick: () => go(at.episode, t, "turns") },
      make("span", { class: "number" }, String(t)),
      make("span", {}, make("span", { class: "seen" }, text(turn.observation)),
        make("span", { class: "did mono" }, `${turn.role} > ${text(turn.response)}`.trimStart(), turn.invalid ? make("span", { class: "tag" }, "invalid") : null,
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
    make("h3", {}, `Episode ${at.episode}: ${groupNow().goal || "task " + groupNow().group}`,
      make("span", { class: `tag ${episode.outcome === "success" ? "good" : ""}` }, episode.outcome)),
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
      make("td", { class: "n" }, String(who.length)), make("td", { class: "n" }, show(meanOf(who, level))),
      make("td", { class: "n" }, valueOf(part)), make("td", { class: "n" }, weight ? show(weight) : who.length === 1 ? "no peer" : flat(who) ? "no variance" : "left out"),
      make("td", {}, pull(part, Math.max(...levels.map((l) => Math.abs(l.part)))))));
  }
  table.append(body);

  let peers = [];
  if (at.level != null) {
    const who = members(at.level).sort((a, b) => b.value - a.value), scores = at.level < 0 && detail.scores;
    // Steps of an episode differ in their penalties alone: one row for each value, this step's own among them.
    const same = (m, o) => o.b === m.b && o.value === m.value, own = who.find((m) => m.b === at.episode && m.t === at.turn);
    const rows = scores ? who.filter((m, i) => (own && same(m, own) ? m === own : who.findIndex((o) => same(m, o)) === i)) : who;
    const largest = Math.max(...who.map((m) => Math.abs(m.advantage)));
    const list = make("tbody");
    for (const m of flat(who) ? [] : rows) {
      const other = group.episodes[m.b], self = m === own;
      list.append(make("tr", { class: self ? "self" : "" },
        make("td", {}, make("button", { type: "button", onclick: () => go(m.b, m.t, "step") }, scores ? `episode ${m.b}` : `${m.b}, turn ${m.t}`)),
        make("td", { class: "mono" }, scores ? `${other.turns.length} turns, ${other.outcome}` : text(other.turns[m.t].response)),
        make("td", { class: "n" }, show(m.value)), make("td", { class: "n" }, valueOf(m.advantage)), make("td", {}, pull(m.advantage, largest))));
    }
    const past = at.level < 0 || detail.milestones ? [] : episode.turns.slice(Math.max(0, at.turn - at.level), at.turn + 1);
    peers = [
      make("h3", {}, at.level < 0 ? "Prompt group: the episodes of this task" : detail.milestones ? "Level 0: steps towards the same milestone"
        : `Level ${at.level}: steps that ${at.level ? `share these ${at.level + 1} observations` : "share the observation"}`),
      ...(past.length ? [make("ol", { class: "history" }, ...past.map((p) => make("li", {}, text(p.observation).slice(0, 400))))] : []),
      flat(who) ? make("p", { class: "flat" }, scores
        ? `All ${rows.length} episodes score ${show(rows[0].value)}: without variance, the group gives no advantage.`
        : `All ${rows.length} steps have return ${show(rows[0].value)}: without variance, the group gives no advantage.`)
      : make("div", { class: "tall", tabindex: 0, role: "region", "aria-label": "Steps of the group" },
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
  const sum = detail.summed && used.some(({ part }) => part !== 0)
    ? make("p", { class: "sum mono" }, used.map(({ weight, part }) => `${show(weight)} × ${signed(part)}`).join("  +  ") + `  =  ${signed(total)}`)
    : detail.summed ? make("p", { class: "sum" }, "In no group did another step do better or worse: the advantage is 0.") : null;
  byId("step").replaceChildren(make("div", { class: "step" },
    make("h3", {}, `Episode ${at.episode}, turn ${at.turn}${turn.role && `, ${turn.role}`}`, turn.invalid ? make("span", { class: "tag" }, "invalid action") : null,
      make("a", { class: "link", href: link() }, "link to this step")),
    turn.picture.length ? make("img", { class: "picture", src: text(turn.picture), alt: "what the policy saw" }) : null,
    make("pre", {}, text(turn.observation)), make("pre", {}, `> ${text(turn.response)}`),
    turn.prompt.length ? make("details", {}, make("summary", {}, "The whole prompt, as the agent read it"), make("pre", {}, text(turn.prompt))) : null,
    make("details", {}, make("summary", {}, "The same step in Python"), make("pre", {},
      `from hgpo_jax.analysis import load, step_text\ndump = load(RUN, iteration=${dumpNow().iteration})\nprint(step_text(dump, dump.estimate("${at.estimator}"), episode=${episode.index}, turn=${at.turn}))`)),
    make("p", { class: "sum" }, `Return ${show(detail.returns[at.episode][at.turn])}, advantage (${at.estimator}) `, valueOf(advantage(at.episode, at.turn))),
    make("h3", {}, name === at.estimator ? `How ${name} arrives at it` : `${at.estimator} has no groups of steps; those of ${name}:`), sum,
    make("div", { class: "scroll" }, table), ...peers,
    make("h3", {}, "This step under every estimator"),
    make("p", { class: "note" }, "Bars are relative to the largest advantage of each estimator in this iteration."),
    make("table", { class: "peers" }, others)));
  byId("said").textContent = `Episode ${at.episode}, turn ${at.turn}, advantage ${signed(advantage(at.episode, at.turn))}, ${levels.map(({ level, part }) => `${levelName(level)} ${signed(part)}`).join(", ")}`;
}

function go(b, t, from) {
  const episodes = groupNow().episodes;
  at.episode = Math.max(0, Math.min(episodes.length - 1, b));
  at.turn = Math.max(0, Math.min(episodes[at.episode].turns.length - 1, t));
  if (!shownEpisodes().includes(at.episode)) { // a peer that the filter hides
    at.only = "all";
    controls();
  }
  step(); // decides the level whose group the map marks
  map();
  turns();
  remember();
  if (from !== "step") document.querySelector(`#${from} [aria-selected=true]`).focus({ preventScroll: from === "turns" });
}

function browse() {
  controls();
  if (!shownEpisodes().includes(at.episode)) {
    map(); // which says that there is none
    byId("step").replaceChildren();
    byId("turns").replaceChildren();
    return;
  }
  step();
  map();
  turns();
}

// ---- links to a step: #step/RUN/ITERATION/GROUP/EPISODE/TURN/ESTIMATOR ----

const link = () => `#step/${[at.run, dumpNow().iteration, groupNow().group, at.episode, at.turn, at.estimator].join("/")}`;
const remember = () => history.replaceState(null, "", link());

// Goes to the step of the address, and returns whether the address names one.
function follow() {
  if (!location.hash.startsWith("#step/")) return false;
  const [run, iteration, group, episode, turn, estimator] = location.hash.slice(6).split("/");
  const dump = data.runs[run]?.dumps.findIndex((d) => String(d.iteration) === iteration) ?? -1;
  const place = data.runs[run]?.dumps[dump]?.groups.findIndex((g) => String(g.group) === group) ?? -1;
  const found = data.runs[run]?.dumps[dump]?.groups[place];
  const known = Boolean(found?.episodes[episode]?.turns[turn] && found.estimators[estimator]);
  byId("lost").hidden = known;
  if (!known) return false;
  Object.assign(at, { run: Number(run), dump, group: place, estimator, only: "all", episode: Number(episode), turn: Number(turn), level: null });
  browse();
  byId("browser").scrollIntoView();
  return true;
}

if (at.run >= 0) {
  at.dump = data.runs[at.run].dumps.length - 1;
  most();
  if (!follow()) browse();
  addEventListener("hashchange", follow);
} else {
  byId("browser-note").textContent = "No dump of these runs holds a step to show; log.dump_every says how often one is written.";
}
