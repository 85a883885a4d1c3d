"""The HTML report: what it embeds, that texts stay texts, and in headless Chromium that it draws and answers keys."""

import base64
import dataclasses
import html.parser
import io
import json
import math
import re
import subprocess

import jax
import numpy as np
import pytest
from PIL import Image

from hgpo_jax import analysis, report
from hgpo_jax.config import load
from hgpo_jax.envs.sokoban import SokobanPixels
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.trainer import curves
from hgpo_jax.utils import figures
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.inspected import EXAMPLE, text_run
from tests.helpers.refusals import refused

ESTIMATORS = ("hgpo", "gigpo", "grpo", "eb_gae")  # one of each kind: tracing all of them takes most of the time
NASTY = [
    "</script><script>document.title = 'broken out'</script>", "<!-- <script> ]]> & \" ' {{ 7 * 7 }} {% raw %} \\u003c",
    "\u2028\u2029\u202e <img src=x onerror=alert(1)> \x00\x1f \ud800 \N{SNOWMAN}\nsecond line",
]  # fmt: skip


class Page(html.parser.HTMLParser):
    """Tags, and the texts of scripts, as a browser would find them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += text

    @property
    def data(self):
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module", autouse=True)
def few_estimators():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis.Dump, "estimators", ESTIMATORS)
        yield


@pytest.fixture(scope="module")
def content(few_estimators):
    return report.gather([EXAMPLE, EXAMPLE], dumps=1, groups=2)


@pytest.fixture(scope="module")
def page(content):
    return report.render(content)


def test_what_is_embedded_is_what_the_run_says(content, page):
    data = Page(page).data
    assert data == json.loads(json.dumps(content["data"]))
    dump = analysis.load(EXAMPLE)
    assert [run["dumps"][0]["iteration"] for run in data["runs"]] == [39, 39]
    assert data["runs"][0]["x"] == list(range(40))
    rows = [json.loads(line) for line in (EXAMPLE / "metrics.jsonl").read_text().splitlines()]
    for name in ("success", "kl", "grad_norm"):
        assert data["runs"][1]["metrics"][name] == pytest.approx([row[name] for row in rows], rel=1e-6)
    assert data["runs"][1]["metrics"]["valid"] == pytest.approx([1 - row["invalid"] for row in rows], rel=1e-6)
    evaluation = json.loads((EXAMPLE / "evaluation.json").read_text())
    for mode in ("sampled", "greedy"):
        shown = data["runs"][0]["held_out"][mode]
        assert shown["success"] == evaluation["success"][mode]
        assert shown["interval"] == evaluation["interval"][mode]
        assert shown["valid"] == 1 - evaluation["invalid"][mode]
    records = {name: dump.estimate(name) for name in ESTIMATORS}
    for group in data["runs"][0]["dumps"][0]["groups"]:
        for b, episode in enumerate(group["episodes"]):
            row = episode["index"]
            assert len(episode["turns"]) == dump.turns(row)
            text = lambda lines: "\n".join(data["lines"][line] for line in lines)  # noqa: E731
            for t, turn in enumerate(episode["turns"]):
                assert text(turn["observation"]) == dump.observation(row, t)
                assert text(turn["prompt"]) == dump.prompt(row, t)
                assert text(turn["response"]) == dump.response(row, t)
            for name, record in records.items():
                shown = group["estimators"][name]["advantages"][b]
                np.testing.assert_allclose(shown, record.advantages[row, : len(shown)], rtol=1e-3, atol=1e-6)
        # What the page compares, less its mean, is a level's advantage (settings are `mean`).
        gigpo = group["estimators"]["gigpo"]
        scores = np.concatenate(gigpo["scores"])
        advantages = np.concatenate(gigpo["level_advantages"])[:, gigpo["levels"].index(-1)]
        np.testing.assert_allclose(scores - scores.mean(), advantages, atol=1e-3)
    success = next(panel for panel in data["panels"]["learning"] if panel["title"] == "Success")
    assert [line["run"] for line in success["lines"]] == [0, 1]
    titles = {panel["title"] for panels in data["panels"].values() for panel in panels}
    assert titles == {panel.title for panel in (*curves.LEARNING, *curves.GROUPS)}
    assert all(panel["unit"] for panels in data["panels"].values() for panel in panels)


def test_pictures_are_embedded_once():
    """Two episodes of one room, the second of which moves to another; goals hold no image tokens."""
    env = SokobanPixels(tile=2)
    reset = jax.jit(env.reset)
    rooms = [np.asarray(reset(jax.random.key(seed))[1]) for seed in range(2)]
    before, feature, after = env.picture_words
    e = Episodes.zeros(2, 2, 40, 2)
    e.mask[:] = [[True, False], [True, True]]
    e.prompts[:] = [env.word_id["push_every_box_onto_a_target"], before, *[feature] * 36, after, len(env.words) + 2]
    order = np.array([[0, 0], [0, 1]])
    seen = np.stack([env.picture(room) for room in rooms])[order]
    e = e.replace(observations=np.stack(rooms)[order], states=order, pictures=seen)
    dump = analysis.Dump(e, load(None, ["env.name=sokoban_pixels", "rollout.history_length=0"]), word_tokenizer(env.words))
    lines = report.Lines()
    group = report.group_data(dump, 0, {"hgpo": dump.estimate("hgpo")}, lines)
    assert group["goal"] == "push_every_box_onto_a_target"
    addresses = [[lines.all()[turn["picture"][0]] for turn in episode["turns"]] for episode in group["episodes"]]
    assert addresses[0] == addresses[1][:1] and len(set(addresses[1])) == 2
    for address, picture in zip(addresses[1], seen[1], strict=True):
        start, _, data = address.partition(",")
        assert start == "data:image/png;base64"
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), picture)


def test_unknown_success_is_shown_as_unknown(monkeypatch):
    dump = analysis.load(EXAMPLE)
    dump = dataclasses.replace(dump, episodes=dump.episodes.replace(judged=np.zeros(len(dump.episodes.mask), bool)))
    scored = dataclasses.replace(dump, report={"scores": [math.nan] * len(dump.episodes.mask)})
    monkeypatch.setattr(analysis.Dump, "action", lambda *_: "look")
    group = report.group_data(scored, 0, {}, report.Lines())
    assert {(episode["outcome"], episode["note"]) for episode in group["episodes"]} == {("unknown", "")}
    assert not analysis.steps_table(dump, dump.estimate())["judged"].any()


def test_an_estimator_that_is_gone_is_no_damaged_dump(monkeypatch):
    def gone(*_):
        raise ConfigError("method=./x.py:f: no file x.py")

    monkeypatch.setattr(report, "dump_data", gone)
    with refused("method=./x.py:f: no file x.py", ConfigError):
        report.gather([EXAMPLE], dumps=1, groups=1)


def test_an_estimator_that_fails_is_no_damaged_dump(monkeypatch):
    def failing(self, name="", **_):
        raise ValueError("too long")

    monkeypatch.setattr(analysis.Dump, "estimators", ("./x.py:f",))
    monkeypatch.setattr(analysis.Dump, "estimate", failing)
    with refused("method=./x.py:f: fails on the episodes of iteration 39: ValueError: too long", ConfigError):
        report.gather([EXAMPLE], dumps=1, groups=1)


def test_a_group_that_a_filter_drops_is_shown():
    dump = analysis.load(EXAMPLE)
    advantage = dump.config.advantage.model_copy(update={"keep": "informative"})
    dump = dataclasses.replace(dump, config=dump.config.model_copy(update={"advantage": advantage}))
    alike = next(g for g in np.unique(dump.episodes.groups) if len(set(dump.episodes.success[dump.episodes.groups == g])) == 1)
    shown = report.group_data(dump, int(alike), {"gigpo": dump.estimate("gigpo")}, report.Lines())
    assert {step for level in shown["ids"] for row in level for step in row} == {-1}


def test_groups_with_mixed_outcomes_are_chosen():
    dump = analysis.load(EXAMPLE)
    e = dump.episodes
    chosen = report.choose(dump, 4)
    mixed = {g for g in range(32) if 0 < e.success[e.groups == g].mean() < 1}
    assert len(chosen) == 4
    assert set(chosen) <= mixed
    assert len(report.choose(dump, 10**6)) == 32


def test_texts_cannot_break_out(tmp_path):
    folder = text_run(tmp_path / "<b>&run", NASTY)
    written = report.render(report.gather([folder], 1, 9))
    plain = report.render(report.gather([text_run(tmp_path / "plain", ["a", "b", "c"])], 1, 9))
    page = Page(written)
    # Whatever is in the texts, the page has the same elements; only a line of text more or less is data.
    assert page.tags == Page(plain).tags
    assert [tag for tag, _ in page.tags].count("script") == 2
    lines = page.data["lines"]
    group = page.data["runs"][0]["dumps"][0]["groups"][0]
    seen = ["\n".join(lines[i] for i in turn["observation"]) for turn in group["episodes"][0]["turns"]]
    assert seen == [text.replace("\ud800", "\ufffd") for text in NASTY]
    assert group["episodes"][1]["note"].endswith("0.25")
    assert "&lt;b&gt;&amp;run" in written
    assert not re.search(r"[<>&]", page.scripts[0])


def test_nothing_is_loaded_from_elsewhere(page):
    for _, attributes in Page(page).tags:
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML", page)


def test_every_value_of_a_long_run_is_embedded(tmp_path):
    rows = [{"iteration": i, "success": i / 3, "invalid": 0.25, "kl": None if i else 1.0} for i in range(2000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    x, known = report.series(tmp_path)
    assert x == list(range(2000))
    assert known["success"] == pytest.approx([i / 3 for i in range(2000)], rel=1e-6)
    assert set(known["valid"]) == {0.75}
    assert known["kl"][:2] == [1, None]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    runs = lambda *names: report.run_names([tmp_path / name for name in names])  # noqa: E731
    assert runs("a/s0", "b/s1") == ["s0", "s1"]
    assert runs("a/s0", "b/s0") == ["a/s0", "b/s0"]
    assert runs("household/hgpo/s0", "sokoban/hgpo/s0", "sokoban/hgpo/s1") == [
        "household/hgpo/s0", "sokoban/hgpo/s0", "sokoban/hgpo/s1",
    ]  # fmt: skip
    assert runs("a/s0", "a/s0") == ["s0", "s0"]


def test_changed_settings_are_told_as_they_are_given():
    given = [
        "method=gdpo", "env.name=household_team_text", "env.tasks=place,clean", "env.budgets=5,10", "learner.lr=0.001",
        "advantage.signal_weights=1.0,-0.5", "roles.carrier.reward=reward,cost", "rollout.stop=<end>",
    ]  # fmt: skip
    changed = report.changed_fields(load(None, given))
    assert sorted(["method=gdpo", *changed]) == sorted(given)  # a row names its method by itself


def test_the_command_writes_beside_the_run(tmp_path, monkeypatch, capsys):
    folder = text_run(tmp_path / "run", ["a", "b", "c"], method="gigpo")
    monkeypatch.setattr("sys.argv", ["report", str(folder)])
    report.main()
    assert "report.html: 0." in capsys.readouterr().out
    written = (folder / "report.html").read_text()
    assert written.startswith("<!doctype html>")
    assert "<code>warm_start=none</code> <code>env.name=household_text</code> </td>" in written  # and nothing else is changed
    assert not list(folder.glob("*.partial"))


PROBE = """
<script>
addEventListener("load", () => {
const said = [];
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const choose = (name, value) => { byId(name).value = value; byId(name).dispatchEvent(new Event("change")); };
const say = (name, value) => said.push(`${name}=${value}`);
const all = (selector) => [...document.querySelectorAll(selector)];
const chartOf = (title) => all(".chart").find((c) => c.querySelector("figcaption span").textContent === title);
const words = (element) => [...element.querySelectorAll("text")].map((t) => t.textContent).join("|");
say("start", byId("said").textContent);
say("hash", location.hash);
say("lost", !byId("lost").hidden);
say("charts", all(".chart").length);
say("cells", all("#map [role=gridcell]").length);
const cell = document.querySelector("#map [aria-selected=true]");
cell.focus();
press(document.activeElement, "Home");
press(document.activeElement, "ArrowRight");
say("map", document.activeElement.getAttribute("aria-label"));
say("moved", location.hash);
press(document.activeElement, "ArrowDown");
say("down", document.activeElement.getAttribute("aria-label"));
const option = document.querySelector("#turns [aria-selected=true]");
option.focus();
press(document.activeElement, "ArrowDown");
say("turns", document.activeElement.querySelector(".number").textContent);
document.querySelector("#step .peers button")?.click();
say("peer", byId("said").textContent);
const success = chartOf("Success"), svg = success.querySelector("svg[role=img]");
svg.focus();
press(svg, "End");
say("end", success.querySelector("output").textContent);
press(svg, "ArrowLeft");
say("before", success.querySelector("output").textContent);
say("axes", words(success));
say("marks", success.querySelectorAll(".mark").length);
say("raw", success.querySelectorAll(".raw").length);
choose("choose-window", "1");
say("unsmoothed", chartOf("Success").querySelectorAll(".raw").length);
say("smooth", smooth([1, 2, 6, null, 1, 3], 3).join("|"));
say("linear", words(chartOf("KL to the reference policy")));
chartOf("KL to the reference policy").querySelector(".log").click();
say("log", words(chartOf("KL to the reference policy")));
say("logs", all(".log").length);
say("csv", csv().split("\\n").slice(0, 2).join("~"));
say("lines", csv().split("\\n").length);
say("json", JSON.parse(json()).runs[0].metrics.success.length);
say("downloads", all(".downloads a").map((a) => `${a.download}:${a.href.split(":")[0]}`).join("|"));
choose("choose-only", "failures");
say("failures", all("#map tbody th").map((th) => th.textContent).join("|"));
document.querySelector("#map [aria-selected=true]").focus();
for (let i = 0; i < 9; i++) press(document.activeElement, "ArrowDown");
say("last", document.activeElement.getAttribute("aria-label"));
choose("choose-only", "all");
const flats = new Set();
groupNow().episodes.forEach((e, b) => e.turns.forEach((_, t) => {
  go(b, t, "step");
  for (const button of all(".levels button")) {
    byId(button.id).click();
    const line = document.querySelector(".flat")?.textContent;
    if (line) flats.add(`${line} ${all("#step .tall").length}`);
  }
}));
say("flat", [...flats].join("|"));
choose("choose-estimator", "grpo");
say("grpo", byId("said").textContent);
say("note", document.querySelector("#step").textContent.includes("grpo has no groups of steps; those of hgpo"));
say("wide", document.documentElement.scrollWidth - document.documentElement.clientWidth);
// A word is broken where its letters stand on two lines.
const broken = new Set();
const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
for (let node; (node = walk.nextNode());) for (const found of node.textContent.matchAll(/[\\w.]+/g)) {
  const range = document.createRange();
  range.setStart(node, found.index);
  range.setEnd(node, found.index + found[0].length);
  if (new Set([...range.getClientRects()].map((r) => Math.round(r.top))).size > 1) broken.add(found[0]);
}
say("broken", [...broken].join("|"));
parent.postMessage(said.join("\\n"), "*");
});
</script>
"""
# A window is no narrower than 500 pixels, a frame may be.
FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener("message", (event) => {
const pre = document.createElement("pre"); pre.id = "probe"; pre.textContent = event.data; document.body.append(pre); });
</script><iframe style="border: 0; width: WIDTHpx; height: 900px" src="page.htmlHASH"></iframe>"""


def chromium(*arguments, cwd):
    """(standard output, what the page complained of)."""
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={cwd}/profile"
    ]  # fmt: skip
    done = subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(page, folder, width=1300, address="") -> dict[str, str]:
    """What PROBE says of a page in a frame of this width."""
    (folder / "page.html").write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)).replace("HASH", address))
    dom, complaints = chromium(
        "--virtual-time-budget=20000", f"--window-size={max(width, 500)},900", "--dump-dom", (folder / "frame.html").as_uri(),
        cwd=folder,
    )  # fmt: skip
    assert complaints == []
    said = html.unescape(re.search(r'id="probe">(.*?)</pre>', dom, re.DOTALL)[1])
    return dict(line.split("=", 1) for line in said.splitlines())


@pytest.fixture(scope="module")
def single():
    return report.render(report.gather([EXAMPLE], dumps=1, groups=2))


@pytest.fixture(scope="module")
def narrow(single, tmp_path_factory):
    """What a page of one run says on a telephone."""
    return probe(single, tmp_path_factory.mktemp("narrow"), 390)


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_charts_and_browser_in_chromium(page, narrow, width, tmp_path):
    said = narrow if width < 1000 else probe(page, tmp_path, width)
    assert said["charts"] == str(len(curves.LEARNING) + len(curves.GROUPS))
    assert int(said["cells"]) > 50
    dump = analysis.load(EXAMPLE)
    record = dump.estimate()
    group = report.choose(dump, 2)[0]
    rows = np.flatnonzero(dump.episodes.groups == group)  # episodes are numbered within their task
    number, t = map(int, re.match(r"Episode (\d+), turn (\d+)", said["start"]).groups())
    b = rows[number]
    spoken = [float(x.replace("−", "-")) for x in re.findall(r"[+−]?[\d.]+(?=,|$)", said["start"].split("advantage")[1])]
    wanted = [record.advantages[b, t], *record.level_advantages[b, t][record.level_sizes[b, t] > 0]]
    np.testing.assert_allclose(spoken, wanted, rtol=6e-3, atol=1e-4)
    assert said["map"].startswith(f"episode {number}, turn 1, advantage ")
    assert said["hash"] == ""
    assert said["moved"] == f"#step/0/39/{group}/{number}/1/hgpo"
    assert not said["down"].startswith(f"episode {number},") or "turn 1" in said["down"]
    assert said["turns"] == "2"
    assert said["peer"].startswith("Episode ")
    assert said["grpo"] != said["peer"]
    assert said["note"] == "true"
    failures = [str(i) for i, row in enumerate(rows) if not dump.episodes.success[row]]
    assert [name.split()[-1] for name in said["failures"].split("|")] == failures
    assert said["last"].startswith(f"episode {failures[-1]}, ")
    assert re.search(r"All \d+ steps have return 0: without variance, the group gives no advantage\. 0", said["flat"])
    assert not re.search(r"\. 1", said["flat"])  # the line stands instead of the list
    assert said["wide"] == "0"  # nothing but tables scrolls sideways
    assert said["broken"] == ""


@pytest.mark.needs("chromium")
def test_charts_in_chromium(narrow):
    said = narrow
    sampled, greedy = "held-out, sampled 92.2 % (88.2 % to 94.9 %)", "held-out, greedy 69.5 % (63.6 % to 74.8 %)"
    assert said["end"] == f"iteration 40: {sampled}, {greedy}"
    assert said["before"] == "iteration 39: 91 %"
    assert said["axes"].split("|") == ["0 %", "25 %", "50 %", "75 %", "100 %", "0", "10", "20", "30", "40", "iteration",
                                       "share of episodes"]  # fmt: skip
    assert said["marks"] == "2"
    assert (said["raw"], said["unsmoothed"]) == ("1", "0")
    wanted = ["" if np.isnan(y) else f"{y:g}" for y in figures.smooth([1, 2, 6, np.nan, 1, 3], 3)]
    assert said["smooth"].split("|") == wanted
    assert said["linear"] != said["log"]
    assert said["log"].split("|")[:4] == ["0.005", "0.01", "0.02", "0.05"]
    zero = sum(panel.extent == "zero" for panel in (*curves.LEARNING, *curves.GROUPS))
    assert said["logs"] == str(zero)
    metrics = json.loads((EXAMPLE / "metrics.jsonl").read_text().splitlines()[0])
    heading, first = (line.split(",") for line in said["csv"].split("~"))
    row = dict(zip(heading, first, strict=True))
    assert (row["run"], row["iteration"]) == ("household", "0")
    assert float(row["kl"]) == pytest.approx(metrics["kl"], rel=1e-6)
    assert float(row["seconds.rollout"]) == pytest.approx(metrics["seconds"]["rollout"], rel=1e-6)
    assert (said["lines"], said["json"]) == ("42", "40")
    assert said["downloads"] == "metrics.csv:blob|metrics.json:blob"


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(("known", "episode"), [(True, 3), (False, 99)])
def test_a_link_opens_its_step(known, episode, single, tmp_path):
    group = report.choose(analysis.load(EXAMPLE), 2)[1]
    said = probe(single, tmp_path, address=f"#step/0/39/{group}/{episode}/2/gigpo")
    assert said["lost"] == str(not known).lower()
    assert said["start"].startswith("Episode 3, turn 2, ") == known
    if known:
        dump = analysis.load(EXAMPLE)
        row = np.flatnonzero(dump.episodes.groups == group)[episode]
        spoken = re.search(r"advantage ([+−]?[\d.]+)", said["start"])[1].replace("−", "-")
        assert float(spoken) == pytest.approx(float(dump.estimate("gigpo").advantages[row, 2]), rel=6e-3)


@pytest.mark.needs("chromium")
def test_nasty_texts_in_chromium(tmp_path):
    folder = text_run(tmp_path / "run", NASTY)
    written = report.render(report.gather([folder], 1, 9))
    (tmp_path / "page.html").write_text(written, encoding="utf-8", errors="replace")
    dom, complaints = chromium("--dump-dom", (tmp_path / "page.html").as_uri(), cwd=tmp_path)
    assert complaints == []
    assert "<title>run</title>" in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom
