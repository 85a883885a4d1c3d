"""Episodes of a command that plays over HTTP: those of a host rollout; what goes wrong costs an episode."""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from guess import Guess

from hgpo_jax import agents
from hgpo_jax import config as configuration
from hgpo_jax.agents import AgentRunner
from hgpo_jax.errors import ConfigError, RunError
from hgpo_jax.job import build
from hgpo_jax.mesh import make_mesh
from hgpo_jax.rollout.chat_format import ChatFormat
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.sampling import Decoding
from hgpo_jax.serving.sessions import Session
from tests.helpers.agreement import assert_same
from tests.helpers.byte_policy import byte_policy

PLAYER = Path(__file__).parent / "player.py"
B, TASKS, GROUPS = 6, [3, 3, 4, 4, 2**40, 2**40], [0, 0, 1, 1, 2, 2]
FIELDS = [
    "env.name=agent", "env.max_turns=3", "warm_start=none", "policy.tokenizer=any", "rollout.prompt_groups=3",
    "rollout.group_size=2", "rollout.prompt_limit=128", "rollout.response_limit=9", "rollout.history_length=0",
]  # fmt: skip


def mesh_of(spec):
    return make_mesh(spec, jax.devices()[: int(spec[-1])])


@pytest.fixture(scope="module")
def policy():
    return byte_policy()


def runner_of(policy, mesh, how="well", *fields) -> AgentRunner:
    command = f"env.command={sys.executable} {PLAYER} {how}"
    return AgentRunner(configuration.load(None, [*FIELDS, command, *fields]), policy.config, policy.tokenizer, mesh)


def played(policy, how="well", *fields, spec="data=1", temperature=0.9):
    mesh = mesh_of(spec)
    runner = runner_of(policy, mesh, how, *fields)
    params = jax.device_put(policy.params, jax.NamedSharding(mesh, jax.P()))
    keys = jax.random.split(jax.random.key(5), B)
    return runner.rollout(params, TASKS, keys, GROUPS, Decoding(temperature=temperature))


@pytest.fixture(scope="module")
def expected(policy, tmp_path_factory):
    """Of our own rollout, in which the prompt is what Guess shows."""
    template = tmp_path_factory.mktemp("agents") / "bare.txt"
    template.write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action\n")
    mesh = mesh_of("data=1")
    rollout = HostRollout(
        Guess, ChatFormat(policy.tokenizer, str(template), 128), policy.graphdef, mesh, batch=B, history_length=0,
        response_limit=9, decode_batch_size=4, strict=True,
    )  # fmt: skip
    return rollout(policy.params, TASKS, jax.random.split(jax.random.key(5), B), GROUPS, Decoding(temperature=0.9))


def test_what_a_policy_is_not_made_for_is_refused(policy):
    with pytest.raises(ConfigError, match=r"^rollout.prompt_limit=504: with rollout.response_limit=9 more than the 512 tokens"):
        runner_of(policy, mesh_of("data=1"), "well", "rollout.prompt_limit=504")
    runner_of(policy, mesh_of("data=1"), "well", "rollout.prompt_limit=503")


@pytest.mark.parametrize("spec", ["data=1", pytest.param("data=2", marks=pytest.mark.slow)])
def test_episodes_are_those_of_a_host_rollout(policy, expected, spec):
    ours, report = expected
    theirs, told = played(policy, spec=spec)
    assert_same(theirs, ours)
    assert ours.success.any() and ours.invalid.any() and len(set(ours.mask.sum(1).tolist())) > 1
    assert told.texts == report.texts
    assert told.responses == report.responses
    assert told.admissible == report.admissible
    for name in ("unfinished", "inadmissible", "prompt_tokens", "response_tokens", "excluded"):
        assert told.counts[name] == report.counts[name]
    assert told.goals[4] == f"task {2**40} of train"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("crashes", "its command ended with 1: it is broken"),
        pytest.param("hangs", "its command neither asked nor ended in 1.5 s", marks=pytest.mark.slow),
        pytest.param("leaves", "its command ended without a reward", marks=pytest.mark.slow),
        pytest.param("idles", "its command asked the policy nothing", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_costs_an_episode(policy, expected, how, reason):
    episodes, report = played(policy, how, "env.time_limit=1.5")
    assert report.failures == {0: reason, 1: reason}
    assert not episodes.mask[:2].any() and report.counts["excluded"] == 2
    ours, _ = expected
    for name in ("responses", "prompts", "rewards", "mask"):
        np.testing.assert_array_equal(getattr(episodes, name)[2:], getattr(ours, name)[2:])


@pytest.mark.slow
def test_an_episode_has_no_more_turns_than_it_may(policy):
    episodes, report = played(policy, "talks")
    assert not report.failures and report.counts["out_of_turns"] == 2
    assert episodes.mask[:2].all() and not episodes.rewards[:2].any() and not episodes.success[:2].any()


def test_a_command_that_cannot_be_started_is_a_reason(tmp_path):
    (script := tmp_path / "script").write_text("no program")
    script.chmod(0o755)
    with agents.Commands([str(script)], 5.0) as commands:
        assert commands.run(Session("x", 1), {}) == "its command could not be started: Exec format error"
    with agents.Commands(["yes"], 60.0) as commands:
        assert commands.run(Session("x", 1), {}) == "its command wrote more than 67,108,864 bytes"


@pytest.mark.slow
def test_where_all_fail_the_run_ends(policy):
    with pytest.raises(RunError, match=r"failed in all 6 episodes, in the first one: its command ended with 2: .*nowhere.py"):
        runner = runner_of(policy, mesh_of("data=1"))
        runner._command = [sys.executable, "nowhere.py"]
        runner.rollout(policy.params, TASKS, jax.random.split(jax.random.key(5), B), GROUPS, Decoding())


def test_a_signal_ends_the_commands(policy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    script = "import os, time; open(str(os.getpid()), 'w'); time.sleep(600)"
    runner = runner_of(policy, mesh_of("data=1"))
    runner._command = [sys.executable, "-c", script]
    wait = agents._wait

    def interrupted(process):
        if len(os.listdir(tmp_path)) == B:
            raise KeyboardInterrupt
        return wait(process)

    monkeypatch.setattr(agents, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.rollout(policy.params, TASKS, jax.random.split(jax.random.key(5), B), GROUPS, Decoding())
    for name in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(name), 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["env.command="], "env.command=: env.name=agent needs the command"),
        (["env.command=nowhere/agent --x"], "env.command=nowhere/agent --x: there is no program nowhere/agent"),
        (["env.command=a 'b"], "env.command=a 'b: No closing quotation"),
        (["policy.tokenizer="], "env.name=agent has no words for a small policy; give policy="),
        (["warm_start=cloning"], "warm_start=cloning: env.name=agent has no expert to clone"),
        (["env.template=plain"], "env.template=plain: env.name=agent does not read it"),
        (["env.strict=true"], "env.strict=True: env.name=agent does not read it"),
    ],
)
def test_mistakes_are_one_line(policy, fields, message, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    policy.tokenizer.save_pretrained(tokenizer)
    given = [*FIELDS, f"policy.tokenizer={tokenizer}", f"env.command={sys.executable} x.py", *fields]
    with pytest.raises(ConfigError) as raised:
        build(configuration.load(None, given))
    assert message in str(raised.value) and "\n" not in str(raised.value)
