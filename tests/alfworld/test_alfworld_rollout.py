"""Whole episodes of the compiled games: the host's engine, given the same actions, tells, pays and ends the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from alfworld_places import DATA, SHARED

from hgpo_jax.config import load
from hgpo_jax.envs.alfworld.dataset import list_games
from hgpo_jax.envs.alfworld.short_prompts import ShortPromptAlfworld
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.rollout.alfworld_games import alfworld, alfworld_games
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.validate import check_together
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.plain_rollout import action_of
from tests.helpers.training import command, rows_of


def replay(paths, env: ShortPromptAlfworld, games, e: Episodes) -> None:
    """Asserts that the engine, given what the answers mean, tells, pays and ends as the Episodes say."""
    host, end, ids = AlfworldText(paths, max_turns=env.max_turns), len(env.words) + 1, {}
    for b, game in enumerate(games):
        text, _ = host.reset(int(game))
        won = done = False
        assert e.task[b] == host.task_type
        for t in range(int(e.mask[b].sum())):
            assert not done and env.decode(e.observations[b, t]) == text
            assert ids.setdefault(text, e.states[b, t]) == e.states[b, t]
            words, ended = action_of(e.responses[b, t, : e.response_lengths[b, t]].tolist(), end, env.action_length)
            action = env.command(words) if ended else ""
            text, _, reward, done, info = host.step(action)
            assert (reward, not info["admissible"]) == (e.rewards[b, t], e.invalid[b, t]), (b, t, action)
            assert ids.setdefault(text, e.next_states[b, t]) == e.next_states[b, t]
            won = info["won"]
        assert done and won == e.success[b]
    assert len(set(ids.values())) == len(ids)


def test_games_of_a_configuration(tmp_path: Path) -> None:
    """All splits share one vocabulary; streams of tasks hold the games of their splits."""
    fields = [f"data={DATA}", f"cache_dir={tmp_path}", "env.split=valid_train"]
    config = load("alfworld_small", fields)
    check_together(config)
    env, games = alfworld(config), alfworld_games(config)
    train, held_out = ([game.path for game in list_games(split, DATA)] for split in ("valid_train", "valid_seen"))
    assert games["train"].tolist() == games["warm_start"].tolist() == [0, 1] and games["held_out"].tolist() == [2]
    for stream, paths in (("train", train), ("held_out", held_out)):
        for game, path in zip(games[stream], paths, strict=True):
            assert env.decode(env.goal(env.start(int(game))[0])) == AlfworldText([path]).reset(0)[0].rpartition("is to: ")[2]
    assert (tmp_path / "alfworld").is_dir()
    with pytest.raises(ConfigError, match="valid_unseen") as error:
        alfworld_games(load("alfworld_small", [*fields, "env.held_out=valid_unseen"]))
    assert "\n" not in str(error.value)


def test_what_does_not_go_together_and_games_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for field, message in (
        ("env.name=household", "env.compiled=true: env.name=household"),
        ("policy.tokenizer=x", "policy.tokenizer=x"),
        ("env.compiled=false", "env.split=generated: has no files"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            check_together(load("alfworld_small", ["data=x", field]))
        assert "\n" not in str(error.value)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    for data, message in (("", "alfworld needs its games"), (tmp_path, f"env.data={tmp_path}")):
        with pytest.raises(ConfigError, match=message) as error:
            alfworld(load("alfworld_small", [f"data={data}", f"cache_dir={tmp_path}"]))
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.needs("data")
def test_trains_from_cloning_to_evaluation(tmp_path: Path) -> None:
    data, run = SHARED / "alfworld" / "sample", tmp_path / "run"
    tiny = (
        "iterations=1", "policy.hidden_size=16", "policy.intermediate_size=16", "rollout.prompt_groups=2",
        "rollout.group_size=4", "env.max_turns=10", "cloning.episodes=32", "cloning.max_steps=20", "log.dump_every=1",
    )  # fmt: skip
    where = ("env.split=valid_train", f"data={data}", f"run_dir={run}", f"cache_dir={tmp_path / 'cache'}")
    command("-m", "hgpo_jax.train", "--config", "alfworld_small", *where, *tiny, cwd=tmp_path)
    (row,) = rows_of(run)
    assert row["logp_difference"] < 1e-4
    paths = [game.path for split in ("valid_train", "valid_seen", "valid_unseen") for game in list_games(split, data)]
    config = load(str(run / "config.yaml"))
    env, e = alfworld(config), Episodes.load(run / "episodes" / "iteration-00000.npz")
    titles = {env.decode(row): game for game, row in enumerate(np.asarray(env.games.intro))}
    games = [titles[env.decode(row)] for row in e.observations[:, 0]]
    assert set(games) <= set(alfworld_games(config)["train"].tolist())
    replay(paths, env, games, e)
    # A panel of the six games that are here: played are the games in the order of their names.
    small = "PANELS[name] = dataclasses.replace(PANELS[name], count=6)"
    program = f"import dataclasses\nfrom hgpo_jax.evaluation.panels import PANELS\nname = 'alfworld-valid_unseen'\n{small}\n"
    program += "from hgpo_jax import evaluate\nfrom hgpo_jax.config import cli\ncli.run(evaluate.main)"
    command("-c", program, run, "--panel", "alfworld-valid_unseen", cwd=tmp_path)
    file = run / "evaluations" / "panel-alfworld-valid_unseen-t1-n6-s0.json"
    unseen, tasks = list_games("valid_unseen", data), json.loads(file.read_text())["tasks"]
    assert [task["task"].split()[0] for task in tasks] == [game.trial for game in unseen]
    lines = [json.loads(line) for line in Path(f"{file}l").read_text().splitlines()]
    host = AlfworldText([game.path for game in unseen])
    for i, line in enumerate(lines):
        host.reset(i % 6)
        assert line["task"] == i % 6 and f"task: {host.goal}" in line["transcript"]
