"""Whole rollouts on a Ray cluster: the episodes of workers and commands on this machine, and the same failures."""

import sys
import threading
import time

import jax
import numpy as np
import pytest
from guess import Guess
from test_agents import DECODING, FIELDS, GROUPS, KEYS, PLAYER, PRELOAD, TASKS, B, hurried, played, policy  # noqa: F401

from hgpo_jax import config as configuration
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.rollout.chat_prompts import ChatFormat
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.agreement import assert_same
from tests.helpers.ray_cluster import two_nodes
from tests.helpers.tiny import mesh_of

pytestmark = pytest.mark.needs("ray")


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as nodes:
        yield nodes


def on_ray(*odd, preload=()):
    """A runner whose command plays so."""
    command = f"env.command={sys.executable} {PLAYER} {' '.join(odd)}"
    fields = [*FIELDS, command, "env.workers=ray:2", "env.failed=exclude", f"env.preload=[{','.join(preload)}]"]
    return AgentRunner(configuration.load(None, fields), {SHARED: policy().config}, policy().tokenizer, mesh_of())


def rollout(runner, tasks=TASKS, **more):
    return runner.rollout({SHARED: policy().params}, tasks, KEYS, GROUPS, DECODING, **more)


def test_episodes_of_a_text_environment_are_the_same_to_the_bit(cluster, tmp_path):
    (tmp_path / "bare.txt").write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action\n")
    results = []
    for workers in (0, "ray:2"):
        rollout = HostRollout(
            Guess, ChatFormat(ChatFrame(policy().tokenizer), str(tmp_path / "bare.txt"), 128), {SHARED: policy().graphdef},
            mesh_of(),
            TextSettings(batch=B, history_length=0, response_limit=9, decode_batch_size=B, workers=workers, time_limit=600),
        )  # fmt: skip
        results.append(rollout({SHARED: policy().params}, TASKS, KEYS, GROUPS, DECODING))
        rollout.close()
    (theirs, told), (episodes, report) = results
    jax.tree.map(np.testing.assert_array_equal, episodes, theirs)
    assert report.responses == told.responses and not told.failures and episodes.success.any()


@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["anew", "forked"])
def test_episodes_are_those_of_commands_here(cluster, preload):
    ours, report = played(PLAYER)
    runner = on_ray(preload=preload)
    theirs, told = rollout(runner)
    runner.close()
    assert_same(theirs, ours)
    assert told.responses == report.responses and not told.failures


def test_what_goes_wrong_costs_its_episode(cluster, hurried, tmp_path):  # noqa: F811
    """The failures of commands on this machine; and an actor that dies, whose episode is left out."""
    odd, tasks = ["10=crashes", "11=leaves", "12=idles", "13=hangs", "14=talks"], [10, 11, 12, 13, 14, 2**40]
    e, report = played(PLAYER, *odd, tasks=tasks, held_out=True, failed="exclude")
    runner = on_ray(*odd)
    theirs, told = rollout(runner, tasks, held_out=True)
    assert told.failures == report.failures and told.counts["out_of_turns"] == 1
    assert_same(theirs, e)
    for file in tmp_path.iterdir():
        file.unlink()

    def kill():
        while not any(tmp_path.iterdir()):  # what hangs says so
            time.sleep(0.01)
        for place in runner._launcher._places:
            if actor := place._actor:
                actor.kill()

    threading.Thread(target=kill).start()
    runner._time_limit = 1e9  # nothing is silent
    theirs, told = rollout(runner, [13, *[2**40] * 5])
    runner.close()
    assert 0 in told.failures and len(told.failures) <= 2 and {*told.failures.values()} == {"its worker process died"}
    assert theirs.mask.any(1).tolist() == [n not in told.failures for n in range(6)]


def test_mistakes_are_one_line(cluster):
    for field, message in (
        ("env.command=nowhere/agent --x", r"^env\.command=nowhere/agent --x: there is no program nowhere/agent$"),
        ("env.preload=nowhere", r"^env\.preload=nowhere: cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            AgentRunner(
                configuration.load(None, [*FIELDS, "env.workers=ray:1", field]), {SHARED: policy().config}, policy().tokenizer,
                mesh_of(),
            )  # fmt: skip
