"""What `hgpo_jax.analysis` says of a run, against plain loops over its steps and against the estimators' own records."""

import dataclasses
import io
import json
import shutil

import jax
import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from hgpo_jax import analysis
from hgpo_jax.advantages import ESTIMATORS, estimate
from hgpo_jax.analysis import diagnostics, dumps, plots
from hgpo_jax.config import load
from hgpo_jax.policy.tokenizer import text_tokenizer
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.inspected import EXAMPLE, text_run
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def dump():
    return analysis.load(EXAMPLE)


@pytest.fixture(scope="module")
def hgpo(dump):
    return dump.estimate()


def some_steps(dump, count=12):
    steps = np.argwhere(dump.episodes.mask)
    return steps[np.random.default_rng(0).choice(len(steps), count, replace=False)].tolist()


def test_the_last_dump_is_loaded_unless_another_is_asked_for(dump):
    assert dump.iteration == 39
    early = analysis.load(EXAMPLE, iteration=9)
    assert early.iteration == analysis.load(EXAMPLE / "episodes" / "iteration-00009.npz").iteration == 9
    assert early.episodes.success.mean() < dump.episodes.success.mean()


def test_estimates_have_the_runs_own_settings(dump, hgpo):
    e, settings = dump.episodes, dump.config.advantage
    batch = {name: getattr(e, name) for name in ("rewards", "mask", "states", "groups", "invalid")}
    own = estimate("hgpo", **batch, history_length=2, gamma=settings.gamma, normalize=settings.normalize)
    np.testing.assert_array_equal(hgpo.advantages, own.advantages)
    assert settings.normalize == "mean"
    other = dump.estimate("hgpo", history_length=0, normalize="mean_std")
    assert other.levels == (0,)
    np.testing.assert_array_equal(
        other.advantages, estimate("hgpo", **batch, history_length=0, gamma=settings.gamma).advantages
    )
    assert dump.estimators[0] == "hgpo"
    assert "gae" not in dump.estimators
    with pytest.raises(ValueError, match="gae needs values"):
        dump.estimate("gae")


def test_an_estimator_of_ones_own_is_loaded_by_its_place(dump, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hgpo_jax.advantages import Estimate\n"
        "def totals(batch):\n"
        "    return Estimate(advantages=batch.rewards.sum(1, keepdims=True) * batch.mask, returns=batch.rewards)\n"
    )
    place = f"{tmp_path / 'mine.py'}:totals"
    expected = dump.episodes.rewards.sum(1, keepdims=True) * dump.episodes.mask
    np.testing.assert_allclose(dump.estimate(place).advantages, expected, rtol=1e-6)
    del ESTIMATORS[place]
    with pytest.raises(ValueError, match=r"mine\.py:other"):
        dump.estimate(place.replace("totals", "other"))
    with pytest.raises(ValueError, match="unknown estimator 'nothing like it': Known: adora, "):
        dump.estimate("nothing like it")


def test_roles_are_told_where_there_are_several(dump):
    """By number: the example's environment knows of one only."""
    assert dump.roles == ("agent",) and dump.role(0, 0) == "" and "dr_mas" not in dump.estimators
    agents = np.where(dump.episodes.mask, np.arange(dump.episodes.mask.shape[1]) % 2, 0).astype(np.int32)
    team = dataclasses.replace(dump, episodes=dump.episodes.replace(agents=agents))
    assert team.roles == ("role_0", "role_1") and [team.role(0, t) for t in range(3)] == ["role_0", "role_1", "role_0"]
    plain, lines = (each.transcript(0).splitlines() for each in (dump, team))
    assert lines[0] == plain[0] and lines[1::2] == plain[1::2]
    for t, (alone, told) in enumerate(zip(plain[2::2], lines[2::2], strict=True)):
        assert told == alone.replace(">", f"role_{t % 2} >", 1)
    assert f"\n    {team.response_with_role(0, 1)}\n" in analysis.step_text(team, team.estimate(), 0, 1)
    assert analysis.steps_table(team, team.estimate())["role"].tolist() == agents[team.episodes.mask].tolist()
    e = team.episodes
    figure = plots.plot_group(team, {"hgpo": team.estimate()}, int(e.groups[0]))
    rows = np.flatnonzero((e.groups == e.groups[0]) & e.mask.any(1))
    marks = [text.get_text() for text in figure.axes[0].texts]
    assert marks == [str(agent) for row in rows for agent in agents[row][e.mask[row]]]
    assert figure.get_suptitle().endswith(" (0 role_0, 1 role_1)")
    assert not plots.plot_group(dump, {"hgpo": dump.estimate()}, int(e.groups[0])).axes[0].texts
    batch = {name: getattr(e, name) for name in ("rewards", "mask", "states", "groups", "invalid", "agents")}
    penalty = team.config.advantage.invalid_penalty
    own = estimate("dr_mas", **batch, normalize="mean", invalid_penalty=penalty)
    assert "dr_mas" in team.estimators
    np.testing.assert_array_equal(team.estimate("dr_mas").advantages, own.advantages)
    advantage = team.config.advantage.model_copy(update={"by_role": True})
    apart = dataclasses.replace(team, config=team.config.model_copy(update={"advantage": advantage}))
    np.testing.assert_array_equal(apart.estimate("dr_mas").advantages, own.advantages)  # which takes no by_role
    assert (apart.estimate().advantages != team.estimate().advantages).any()


def test_the_groups_of_a_prompt_group_are_those_of_all_episodes(dump, hgpo):
    for level in (-1, 0, 2):
        all_ids = analysis.group_ids(dump.episodes, hgpo, level)
        for group in np.unique(dump.episodes.groups)[:4]:
            rows = np.flatnonzero(dump.episodes.groups == group)
            ids = analysis.group_ids(dump.episodes, hgpo, level, rows)
            np.testing.assert_array_equal(ids[:, :, None, None] == ids, all_ids[rows][:, :, None, None] == all_ids[rows])
            np.testing.assert_array_equal(ids < 0, all_ids[rows] < 0)


@pytest.mark.parametrize("level", [-1, 0, 1, 2, 99])
def test_groups_are_those_of_a_plain_loop(dump, hgpo, level):
    e = dump.episodes
    found = {}
    for b, t in np.argwhere(e.mask).tolist():
        context = () if level < 0 else tuple(e.states[b, max(0, t - level) : t + 1])
        found.setdefault((int(e.groups[b]), *context), []).append((b, t))
    ids = analysis.group_ids(e, hgpo, level)
    assert (ids[~e.mask] == -1).all()
    assert len(np.unique(ids[e.mask])) == len(found)
    for members in found.values():
        assert len({int(ids[step]) for step in members}) == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hgpo", {"base_group": True}), ("gigpo", {}), ("eb_gae", {}), ("gigpo", {"statistics": "per_trajectory"}),
        ("hgpo", {"by_role": True, "base_group": True}), ("gigpo", {"keep": "informative"}),
        ("gigpo", {"statistics": "per_trajectory", "by_role": True}), ("beacon", {"signals": True}),
    ],
    ids=str,
)  # fmt: skip
def test_a_steps_groups_add_up_to_its_advantage(dump, name, options):
    e = dump.episodes
    turns = np.arange(e.mask.shape[1])
    given = {
        "by_role": np.where(e.mask, turns % 2, 0).astype(np.int32),
        "signals": np.where(e.mask, turns // 3 + (e.states % 2 == 0), 0).astype(np.float32)[..., None],
    }
    record = dump.estimate(name, **{option: given.get(option, value) for option, value in options.items()})
    for b, t in some_steps(dump):
        groups = analysis.step_groups(dump, record, b, t)
        assert [g["level"] for g in groups] == [k for k, n in zip(record.levels, record.level_sizes[b, t], strict=True) if n]
        for group in groups:
            column = record.levels.index(group["level"])
            members = group["members"]
            shares = group["level"] < 0 and "statistics" in options
            counted = {m["episode"] for m in members} if shares else members
            assert len(counted) == record.level_sizes[b, t, column]
            (self,) = (m for m in members if (m["episode"], m["turn"]) == (b, t))
            assert self["advantage"] == group["advantage"]
            assert len(group["history"]) == (0 if group["level"] < 0 or name == "beacon" else min(group["level"], t) + 1)
            if group["history"]:
                assert group["history"][-1] == dump.observation(b, t)
            # Settings are `mean`: an advantage is the distance from the mean.
            np.testing.assert_allclose(self["value"] - group["mean"], group["advantage"], atol=1e-4)
        if name != "eb_gae":
            total = sum(g["weight"] * g["advantage"] for g in groups)
            np.testing.assert_allclose(total, record.advantages[b, t], atol=1e-4)


def test_the_text_of_a_step_names_its_company(dump, hgpo):
    b, t = max(some_steps(dump), key=lambda step: hgpo.level_sizes[tuple(step)][2])
    text = analysis.step_text(dump, hgpo, b, t, shown=4)
    assert text.count("<- this step") <= 3
    assert f"advantage {hgpo.advantages[b, t]:+.3g}" in text
    for level, size in enumerate(hgpo.level_sizes[b, t]):
        assert f"level {level}: {size} steps" in text
    with pytest.raises(ValueError, match="not one of them"):
        analysis.step_groups(dump, hgpo, b, dump.turns(b))


def test_the_prompt_ends_with_what_was_just_seen(dump):
    for b, t in some_steps(dump, 10):
        lines = dump.prompt(b, t).split("\n")
        assert lines[0] == dump.goal(b)
        assert lines[-2:] == [dump.observation(b, t), ">"]
        seen = [dump.observation(b, s) for s in range(max(0, t - 2), t)]
        did = [dump.response(b, s) for s in range(max(0, t - 2), t)]
        assert [line for line in lines[1:-2:2]] == seen
        if not dump.episodes.invalid[b, max(0, t - 2) : t].any():
            assert lines[2:-2:2] == did
    assert "_ " not in dump.transcript(0)
    responses, beyond = dump.episodes.responses.copy(), len(dump.tokenizer)
    responses[0, 0, 0] = beyond
    odd = dataclasses.replace(dump, episodes=dump.episodes.replace(responses=responses))
    assert odd.response(0, 0).startswith(f"#{beyond} ")


def test_tables_hold_every_step_once(dump, hgpo):
    table = analysis.steps_table(dump, hgpo)
    assert {len(column) for column in table.values()} == {dump.episodes.mask.sum()}
    np.testing.assert_array_equal(table["advantage"], hgpo.advantages[table["episode"], table["turn"]])
    assert {"level1_advantage", "level2_weight"} <= set(table)
    for column, level in enumerate(hgpo.levels):
        sizes = hgpo.level_sizes[..., column][table["episode"], table["turn"]]
        np.testing.assert_array_equal(table[f"level{level}_size"], sizes)
    differ = analysis.compare(dump)
    for name in ("grpo", "gigpo", "hgpo"):
        np.testing.assert_allclose(np.mean(differ[name] ** 2), 1, rtol=1e-5)


def test_the_transition_graph_counts_every_step(dump, hgpo):
    e = dump.episodes
    edges = analysis.transitions(dump, hgpo, group=0)
    steps = e.mask & (e.groups == 0)[:, None]
    assert edges["count"].sum() == steps.sum()
    assert edges["ends"].sum() == e.success[e.groups == 0].sum()
    np.testing.assert_allclose((edges["count"] * edges["advantage"]).sum(), hgpo.advantages[steps].sum(), atol=1e-3)
    nothing = analysis.transitions(dump, hgpo, group=10**6)
    assert len(nothing["count"]) == 0


def test_text_runs_without_a_report_or_a_tokenizer(tmp_path):
    told = analysis.load(run := text_run(tmp_path / "told", ["a room", "a hall", "a shed"]))
    assert told.goal(1) == "goal 0: a room"
    assert [told.observation(0, t) for t in range(3)] == ["a room", "a hall", "a shed"]
    assert told.response(2, 1).startswith("answer 2 1")
    assert told.action(2, 1) == "act 2 1"
    assert [told.admissible(1, t) for t in range(2)] == [False, True]
    assert told.state_name(2) == "a shed"
    untold = analysis.load(text_run(tmp_path / "untold", ["", "", ""], report=False, method="dapo"))
    assert untold.estimator == "grpo"
    assert untold.goal(0) == ""
    assert untold.observation(0, 1) == untold.prompt(0, 1) != ""
    assert untold.response(0, 1) == untold.action(0, 1) != ""
    assert untold.admissible(0, 1)
    assert untold.state_name(2) == "state 2"
    assert "success" in untold.transcript(0)
    shutil.rmtree(run / "policy")
    unread = analysis.load(run)
    assert "> answer 2 1" in unread.transcript(2)
    assert "act 2 1" in analysis.step_text(unread, unread.estimate(), 2, 1)
    with pytest.raises(ConfigError, match="no tokenizer"):
        unread.prompt(2, 1)


def test_maps_of_a_group_with_prices_whose_first_episode_failed(tmp_path):
    told = analysis.load(text_run(tmp_path / "told", ["costs $3", r"$\frac{ $5", "a shed"]))
    e = told.episodes
    mask, states = e.mask.copy(), e.states.copy()
    mask[0], states[0] = False, 1  # whatever stands there
    dump = dataclasses.replace(told, episodes=e.replace(mask=mask, states=states))
    record = dump.estimate("grpo")
    figure = plots.plot_transitions(dump, record, group=0)
    figure.savefig(tmp_path / "map.png")
    assert {text.get_text() for text in graph_of(figure)[1]} >= {"costs $3", r"$\frac{ $5"}
    maps = plots.plot_group(dump, {"grpo": record}, group=0)
    maps.savefig(tmp_path / "group.png")
    assert [label.get_text().split()[0] for label in maps.axes[0].get_yticklabels()] == ["1"]
    for plot in (lambda: plots.plot_transitions(dump, record, 7), lambda: plots.plot_group(dump, {"grpo": record}, 7)):
        with pytest.raises(ValueError, match="group 7: no step"):
            plot()


def graph_of(figure):
    """(boxes, their names, arrows) of a transition graph after it was drawn."""
    figure.savefig(io.BytesIO())
    axis = figure.axes[0]
    boxes = [patch for patch in axis.patches if isinstance(patch, FancyBboxPatch)]
    names = [text for text in axis.texts if "↻" not in text.get_text()]
    return boxes, names, [patch for patch in axis.patches if isinstance(patch, FancyArrowPatch)]


@pytest.mark.parametrize("states", [6, 99])
def test_the_transition_graph_is_legible(states):
    dump = analysis.load(EXAMPLE, iteration=9)
    record = dump.estimate()
    group = int(np.argmin(np.abs(dump.episodes.success.reshape(-1, 8).mean(1) - 0.5)))
    edges = analysis.transitions(dump, record, group)
    known = len(set(edges["state"].tolist()) | set(edges["next_state"].tolist()))
    figure = plots.plot_transitions(dump, record, group, states)
    boxes, names, arrows = graph_of(figure)
    assert len(boxes) == len(names) == min(states, known)
    spaces = [box.get_window_extent() for box in boxes]
    for box, name in zip(spaces, names, strict=True):
        written = name.get_window_extent()
        assert name.get_fontsize() >= 8
        assert box.x0 <= written.x0 and written.x1 <= box.x1  # a name stays in its box
        assert box.y0 <= written.y0 and written.y1 <= box.y1
    assert not any(a.overlaps(b) for i, a in enumerate(spaces) for b in spaces[:i])
    columns = {round(box.x0) for box in spaces}
    assert len(columns) < len(boxes) or states == 6
    start = next(box for box, name in zip(spaces, names, strict=True) if name.get_text().startswith("you are in"))
    assert round(start.x0) == min(columns)
    (goal,) = (box for box, name in zip(spaces, names, strict=True) if name.get_text() == "success")
    assert round(goal.x0) == max(columns)
    moved = edges["state"] != edges["next_state"]
    assert (len(arrows) == moved.sum()) == (states == 99)
    assert (f"the {states} most visited of {known} states" in figure.axes[0].get_title(loc="left")) == (states < known)


def test_refusals_are_one_line(tmp_path):
    """Each of a folder in which one more thing is damaged or missing than before."""
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLE, folder)
    said = text_run(tmp_path / "text", ["a", "b", "c"]) / "episodes" / "iteration-00000.json"
    told = json.loads(said.read_text())
    dump = folder / "episodes" / "iteration-00039.npz"
    for change, path, fragment in (
        (lambda: said.write_text(json.dumps(told | {"texts": ["a", "b"]})), tmp_path / "text", "not the report of"),
        (lambda: said.write_text(json.dumps(told | {"actions": [["a"]] * 4})), tmp_path / "text", "not the report of"),
        (lambda: None, folder / "episodes" / "iteration-00003.npz", "no such dump"),
        (lambda: shutil.rmtree(folder / "policy"), folder, "holds no tokenizer"),
        (lambda: dump.write_bytes(b"PK no"), folder, "not a dump of Episodes"),
        (lambda: shutil.rmtree(folder / "episodes"), folder, "holds no dump of episodes yet"),
        (lambda: (folder / "config.yaml").write_text("methud: hgpo\n"), folder, "methud"),
        (lambda: shutil.rmtree(folder), folder, "not the folder of a run"),
    ):
        change()
        with refused(fragment, ConfigError):
            analysis.load(path)
    with pytest.raises(ConfigError, match=r"iteration=3: .*iterations 9, 39"):
        analysis.load(EXAMPLE, iteration=3)


def test_a_signal_that_means_something_else_is_no_milestone(dump):
    signals = np.zeros((*dump.episodes.mask.shape, 1), np.float32)
    for fields, able in (([], False), (["env.milestones=true"], True)):
        counted = dataclasses.replace(dump, episodes=dump.episodes.replace(signals=signals), config=load("household", fields))
        assert ("beacon" in counted.estimators) == able and "hbpo" not in counted.estimators


def test_the_readmes_example_is_the_step_in_its_picture(dump, hgpo):
    text = analysis.step_text(dump, hgpo, episode=6, turn=6)
    assert "> go_to fridge_1\nreturn 8.15, advantage +5.46" in text
    assert "level 2: 3 steps, mean 2.72, advantage +5.43, weight 0.44" in text


def test_estimators_see_groups_of_training_and_the_oracle_all_episodes(dump):
    """GRPO says nothing of an episode that is alone; dealt whole, groups are as they were."""
    few = dataclasses.replace(dump, episodes=jax.tree.map(lambda array: array[:32], dump.episodes))
    options = {"HGPO": {"name": "hgpo"}, "GRPO": {"name": "grpo", "invalid_penalty": 0.0}}
    whole, dealt, alone = (analysis.oracle_errors(few, options, group_size=size) for size in (0, 8, 1))
    assert whole == dealt != analysis.oracle_errors(few, options, group_size=4)
    oracle = diagnostics.oracle_groups(few.episodes.states, few.episodes.mask, few.episodes.groups)
    returns = few.estimate("hgpo").returns
    assert alone["GRPO"] == diagnostics.against_oracle(np.zeros_like(returns), returns, oracle)


def test_roles_that_have_not_been_saved_are_read_as_they_began(tmp_path):
    for name, tokenizer in (("words", text_tokenizer(["go to shelf 1"])), ("bytes", byte_tokenizer())):
        tokenizer.save_pretrained(tmp_path / name)
    places = [f"policy.tokenizer={tmp_path / 'words'}", f"roles.searcher.policy={tmp_path / 'bytes'}"]
    config = load(None, ["env.name=household_team_text", *places])
    searcher, carrier = dumps._tokenizers_of_roles(config, [])
    assert len(searcher) == len(byte_tokenizer()) != len(carrier)
    (saved := tmp_path / "run" / "policy" / "carrier").mkdir(parents=True)
    byte_tokenizer().save_pretrained(saved)
    searcher, carrier = dumps._tokenizers_of_roles(config, [saved])
    assert len(searcher) == len(carrier) == len(byte_tokenizer())
