"""The HTML report: what it embeds, that texts stay texts, and in headless Chromium that it draws and answers keys."""

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from inspected import EXAMPLE, text_run

from hgpo_jax import inspect, report
from hgpo_jax.config import ConfigError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


@pytest.fixture(scope="module")
def content():
    return report.gather([EXAMPLE, EXAMPLE], dumps=1, groups=2)


@pytest.fixture(scope="module")
def page(content):
    return report.render(content)


@pytest.fixture
def two_estimators(monkeypatch):
    monkeypatch.setattr(inspect.Dump, "estimators", ("hgpo", "grpo"))


def test_what_is_embedded_is_what_the_run_says(content, page):
    data = Page(page).data
    assert data == json.loads(json.dumps(content["data"]))
    dump = inspect.load(EXAMPLE)
    assert [run["dumps"][0]["iteration"] for run in data["runs"]] == [39, 39]
    assert data["runs"][0]["x"] == list(range(40))
    for group in data["runs"][0]["dumps"][0]["groups"]:
        for b, episode in enumerate(group["episodes"]):
            row = episode["index"]
            assert len(episode["turns"]) == dump.turns(row)
            text = lambda lines: "\n".join(data["lines"][line] for line in lines)  # noqa: E731
            for t, turn in enumerate(episode["turns"]):
                assert text(turn["observation"]) == dump.observation(row, t)
                assert text(turn["prompt"]) == dump.prompt(row, t)
                assert text(turn["response"]) == dump.response(row, t)
            for name in ("grpo", "gigpo", "hgpo"):
                record = dump.estimate(name)
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
    assert len(titles) == len(report.LEARNING) + len(report.GROUPS)


def test_groups_with_mixed_outcomes_are_chosen():
    dump = inspect.load(EXAMPLE)
    e = dump.episodes
    chosen = report.choose(dump, 4)
    mixed = {g for g in range(32) if 0 < e.success[e.groups == g].mean() < 1}
    assert len(chosen) == 4
    assert set(chosen) <= mixed
    assert len(report.choose(dump, 10**6)) == 32


def test_texts_cannot_break_out(tmp_path, two_estimators):
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


def test_text_runs_without_a_report_show_prompts(tmp_path, two_estimators):
    folder = text_run(tmp_path / "run", ["", "", ""], report=False, method="dapo")
    (run,) = report.gather([folder], 3, 4)["data"]["runs"]
    assert run["x"] == []
    assert run["dumps"][0]["own"] == "grpo"
    assert len(run["dumps"][0]["groups"]) == 2


def test_long_runs_are_averaged_over_stretches(tmp_path):
    rows = [{"iteration": i, "success": i / 1000, "invalid": 0.25, "kl": None if i else 1.0} for i in range(1000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    x, curves = report.series(tmp_path)
    assert len(x) == 334
    assert x[:2] == [2, 5]
    assert x[-1] == 999
    assert curves["success"][:2] == [0.001, 0.004]
    assert set(curves["valid"]) == {0.75}
    assert curves["kl"][:2] == [1, None]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    runs = lambda *names: report.run_names([tmp_path / name for name in names])  # noqa: E731
    assert runs("a/s0", "b/s1") == ["s0", "s1"]
    assert runs("a/s0", "b/s0") == ["a/s0", "b/s0"]
    assert runs("household/hgpo/s0", "sokoban/hgpo/s0", "sokoban/hgpo/s1") == [
        "household/hgpo/s0", "sokoban/hgpo/s0", "sokoban/hgpo/s1",
    ]  # fmt: skip
    assert runs("a/s0", "a/s0") == ["s0", "s0"]


def test_settings_that_were_changed_are_named(tmp_path):
    folder = text_run(tmp_path / "run", ["a", "b", "c"], method="gigpo")
    changed = report.changed_fields(inspect.read_config(folder))
    assert changed == ["warm_start=none", "env.name=household_text"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["nowhere"], "nowhere: not the folder of a run"),
        ([str(EXAMPLE), "--dumps", "0"], "--dumps 0"),
        ([str(EXAMPLE), "--to", "no/such/folder.html"], "--to no/such/folder.html"),
        (["empty"], "empty: nothing to show"),
        (["odd"], "not an evaluation"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(arguments, fragment, tmp_path, monkeypatch, two_estimators):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("seed: 1\n")
    text_run(tmp_path / "odd", ["a", "b", "c"])
    (tmp_path / "odd" / "evaluation.json").write_text('{"success": 1}')
    monkeypatch.setattr("sys.argv", ["report", *arguments])
    with pytest.raises(ConfigError) as caught:
        report.main()
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.html*"))


def test_the_command_writes_beside_the_run(tmp_path, monkeypatch, capsys, two_estimators):
    folder = text_run(tmp_path / "run", ["a", "b", "c"])
    monkeypatch.setattr("sys.argv", ["report", str(folder)])
    report.main()
    assert "report.html: 0." in capsys.readouterr().out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob("*.partial"))


PROBE = """
<script>
{
const said = [];
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const say = (name, value) => said.push(`${name}=${value}`);
say("start", byId("said").textContent);
const cell = document.querySelector("#map [aria-selected=true]");
cell.focus();
press(document.activeElement, "Home");
press(document.activeElement, "ArrowRight");
say("map", document.activeElement.getAttribute("aria-label"));
press(document.activeElement, "ArrowDown");
say("down", document.activeElement.getAttribute("aria-label"));
const option = document.querySelector("#turns [aria-selected=true]");
option.focus();
press(document.activeElement, "ArrowDown");
say("turns", document.activeElement.querySelector(".number").textContent);
document.querySelector("#step .peers button").click();
say("peer", byId("said").textContent);
const chart = document.querySelector("svg[role=img]");
chart.focus();
press(chart, "End");
say("chart", chart.parentElement.querySelector("output").textContent);
const choose = byId("choose-estimator");
choose.value = "grpo";
choose.dispatchEvent(new Event("change"));
say("grpo", byId("said").textContent);
say("note", document.querySelector("#step").textContent.includes("grpo has no groups of steps; those of hgpo"));
say("wide", document.documentElement.scrollWidth - document.documentElement.clientWidth);
document.body.append(make("pre", { id: "probe" }, said.join("\\n")));
}
</script>
"""


def chromium(*arguments, cwd):
    """(standard output, what the page complained of)."""
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={cwd / 'profile'}"
    ]  # fmt: skip
    done = subprocess.run([*command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [1300, 500])
def test_charts_and_browser_in_chromium(page, width, tmp_path):
    (tmp_path / "page.html").write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dom, complaints = chromium(f"--window-size={width},900", "--dump-dom", (tmp_path / "page.html").as_uri(), cwd=tmp_path)
    assert complaints == []
    assert dom.count('<figure class="chart">') == len(report.LEARNING) + len(report.GROUPS)
    assert dom.count('role="gridcell"') > 50
    said = dict(line.split("=", 1) for line in re.search(r'id="probe">(.*?)</pre>', dom, re.DOTALL)[1].splitlines())

    dump = inspect.load(EXAMPLE)
    record = dump.estimate()
    b, t = map(int, re.match(r"Episode (\d+), turn (\d+)", said["start"]).groups())
    spoken = [float(x.replace("−", "-")) for x in re.findall(r"[+−]?[\d.]+(?=,|$)", said["start"].split("advantage")[1])]
    wanted = [record.advantages[b, t], *record.level_advantages[b, t][record.level_sizes[b, t] > 0]]
    np.testing.assert_allclose(spoken, wanted, rtol=6e-3, atol=1e-4)
    assert said["map"].startswith(f"episode {b}, turn 1, advantage ")
    assert not said["down"].startswith(f"episode {b},") or "turn 1" in said["down"]
    assert said["turns"] == "2"
    assert said["peer"].startswith("Episode ")
    assert said["chart"].startswith("iteration 39: ")
    assert said["grpo"] != said["peer"]
    assert said["note"] == "true"
    assert said["wide"] == "0"  # nothing but tables scrolls sideways


def test_nasty_texts_in_chromium(tmp_path, two_estimators):
    folder = text_run(tmp_path / "run", NASTY)
    written = report.render(report.gather([folder], 1, 9))
    (tmp_path / "page.html").write_text(written, encoding="utf-8", errors="replace")
    dom, complaints = chromium("--dump-dom", (tmp_path / "page.html").as_uri(), cwd=tmp_path)
    assert complaints == []
    assert "<title>run</title>" in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes(page, scheme, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    more = ["--force-dark-mode"] if scheme == "dark" else []
    where = (tmp_path / "page.html").as_uri()
    chromium(*more, "--window-size=900,600", f"--screenshot={tmp_path / 'page.png'}", where, cwd=tmp_path)
    corner = image.open(tmp_path / "page.png").convert("L").getpixel((3, 3))
    assert corner > 240 if scheme == "light" else corner < 40
