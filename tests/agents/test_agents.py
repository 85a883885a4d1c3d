"""Episodes of a command that plays over HTTP: those of a host rollout; what goes wrong costs an episode."""

import functools
import gc
import os
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from guess import Guess

from hgpo_jax import config as configuration
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.rollout.chat_prompts import ChatFormat
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.tasks import task_numbers
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving import commands, engine
from hgpo_jax.serving.agent_rollout import AgentRunner
from hgpo_jax.serving.commands import KINDS, Commands, Launcher, Running
from hgpo_jax.serving.sessions import Session
from hgpo_jax.setup.build import build
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.agreement import assert_same
from tests.helpers.byte_policy import byte_policy
from tests.helpers.tiny import mesh_of

PLAYER = Path(__file__).parent / "player.py"
B, TASKS, GROUPS = 6, [3, 3, 4, 4, 2**40, 2**40], [0, 0, 1, 1, 2, 2]
FIELDS = [
    "env.name=agent", "env.max_turns=3", "warm_start=none", "policy.tokenizer=any", "rollout.prompt_groups=3",
    "rollout.group_size=2", "rollout.prompt_limit=128", "rollout.response_limit=9", "rollout.history_length=0",
    "env.num_held_out_tasks=10", "policy.num_hidden_layers=1", f"env.command={sys.executable} {PLAYER}",
]  # fmt: skip
PRELOAD = ["concurrent.futures", "urllib.request"]
KEYS, DECODING = jax.random.split(jax.random.key(5), B), Decoding(temperature=0.9)


policy = functools.cache(byte_policy)


@functools.cache
def runner_of(*fields) -> AgentRunner:
    return AgentRunner(configuration.load(None, [*FIELDS, *fields]), {SHARED: policy().config}, policy().tokenizer, mesh_of())


def played(*command, tasks=TASKS, held_out=False, failed="zero", before=True, preload=()):
    """before: whether an episode has come to a proper end before."""
    runner = runner_of()
    runner._excludes, runner._played = failed == "exclude", before
    runner._launcher, runner._time_limit = Launcher([sys.executable, *map(str, command)], preload), 60.0
    try:
        return runner.rollout({SHARED: policy().params}, tasks, KEYS, GROUPS, DECODING, held_out=held_out)
    finally:
        runner.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of our own rollout, in which the prompt is what Guess shows."""
    template = tmp_path_factory.mktemp("agents") / "bare.txt"
    template.write_text("== first ==\n$observation\n== later ==\n$observation\n== entry ==\n$action\n")
    rollout = HostRollout(
        Guess, ChatFormat(ChatFrame(policy().tokenizer), str(template), 128), {SHARED: policy().graphdef}, mesh_of(),
        TextSettings(batch=B, history_length=0, response_limit=9, decode_batch_size=B, strict=True),
    )  # fmt: skip
    return rollout({SHARED: policy().params}, TASKS, KEYS, GROUPS, DECODING)


@pytest.fixture
def hurried(monkeypatch, tmp_path):
    """Time flies for an agent that hangs, which says so, and for no other: those take as long as the machine does."""
    monkeypatch.chdir(tmp_path)
    silent = Session.silent.fget
    monkeypatch.setattr(Session, "silent", property(lambda s: silent(s) * (10_000 if Path(s.name).exists() else 1)))


def test_what_a_policy_is_not_made_for_is_refused():
    with pytest.raises(ConfigError, match=r"^rollout.prompt_limit=504: with rollout.response_limit=9 more than the 512 tokens"):
        runner_of("rollout.prompt_limit=504")
    runner_of("rollout.prompt_limit=503")


@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["anew", "forked"])
def test_episodes_are_those_of_a_host_rollout(expected, preload, monkeypatch):
    ours, report = expected
    samplers, made = weakref.WeakSet(), engine.SlotSampler
    monkeypatch.setattr(engine, "SlotSampler", lambda *a, **k: (sampler := made(*a, **k), samplers.add(sampler))[0])
    gc.disable()
    try:
        theirs, told = played(PLAYER, preload=preload)
        assert not samplers  # an update needs the memory of its caches, and cycles of references are collected much later
    finally:
        gc.enable()
    assert_same(theirs, ours)
    assert ours.success.any() and ours.invalid.any() and len(set(ours.mask.sum(1).tolist())) > 1
    assert told.texts == report.texts
    assert told.responses == report.responses
    assert told.admissible == report.admissible
    for name in ("unfinished", "inadmissible", "prompt_tokens", "response_tokens", "excluded"):
        assert told.counts[name] == report.counts[name]
    assert told.goals[4] == f"task {2**40} of train"


@pytest.mark.parametrize("preload", [(), PRELOAD], ids=["anew", "forked"])
def test_what_goes_wrong_costs_an_episode(expected, hurried, preload):
    odd = ["10=crashes", "11=leaves", "12=idles", "13=hangs", "14=talks"]
    e, report = played(PLAYER, *odd, tasks=[10, 11, 12, 13, 14, 2**40], held_out=True, failed="exclude", preload=preload)
    assert report.failures == {
        0: "its command ended with 1: it is broken", 1: "its command ended without a reward",
        2: "its command asked the policy nothing", 3: "its command neither asked nor ended in 60 s",
    }  # fmt: skip
    assert not e.mask[:4].any() and report.counts["excluded"] == 4
    for kind in KINDS:
        assert report.counts[f"failed/{kind}"] == (0 if kind == "context" else 1 / 6)
    # An episode has no more turns than it may, and then needs no reward.
    assert report.counts["out_of_turns"] == 1 and e.mask[4].all() and not e.rewards[4].any() and not e.success[4]
    for name in ("responses", "prompts", "rewards", "mask"):
        np.testing.assert_array_equal(getattr(e, name)[5], getattr(expected[0], name)[5])
    assert report.goals[4] == "task 14 of held_out"


def test_what_an_answer_may_have_caused_is_lost(caplog, hurried):
    odd = ["10=crashes", "11=pays", "12=idles", "13=hangs", "14=overflows", "15=leaves"]
    e, report = played(PLAYER, *odd, tasks=range(10, 16))
    assert report.failures == {2: "its command asked the policy nothing"}  # infrastructure alone is left out
    assert e.mask.sum(1).tolist() == [1, 1, 0, 1, 1, 1] and e.rewards.sum(1).tolist() == [0, 0.5, 0, 0, 0, 0]
    assert not e.success.any()
    shares = {kind: report.counts[f"failed/{kind}"] * 6 for kind in KINDS}
    assert shares == pytest.approx({"infrastructure": 1, "crash": 2, "context": 1, "silence": 1, "no_reward": 1})
    assert "5 of 6 episodes are lost, the first one: its command ended with 1: it is broken" in caplog.text


@pytest.mark.slow
def test_who_is_asked_at_the_same_time_is_a_branch_with_the_same_samples():
    """Each is asked the same and has an answer of its own, whichever is sooner."""
    answers = []
    for _ in range(2):
        e, report = played(PLAYER, "3=delegates", tasks=[3] * B)
        assert report.counts["branches"] == 3 and e.mask.all() and e.success.all() and (e.rewards.sum(1) == 1).all()
        answers.append([(said[0], set(said[1:])) for said in report.responses])
    assert answers[0] == answers[1] and all(len({first, *others}) == 3 for first, others in answers[0])


@pytest.mark.slow
def test_conversations_that_share_a_slot_are_read_once_with_a_store():
    runner = runner_of("rollout.prompt_limit=448", "rollout.decode_batch_size=1", "env.workers=6", "rollout.store=1")
    runner._launcher = Launcher([sys.executable, str(PLAYER), "3=chats"])
    e, report = runner.rollout({SHARED: policy().params}, [3] * B, KEYS, GROUPS, DECODING)
    lengths = e.prompt_lengths
    assert runner._slots == 1 and e.mask.all() and lengths[:, 0].min() > 64
    assert report.counts["reused_share"] >= lengths[:, :-1].sum() / lengths.sum()


def test_tasks_to_train_on_and_held_out_ones():
    for stream, count in (("train", None), ("held_out", 10)):
        assert runner_of().select_tasks(stream, 3, range(25)) == task_numbers(stream, 3, np.arange(25), count)


def test_a_command_that_cannot_be_started_is_a_reason(tmp_path):
    (script := tmp_path / "script").write_text("no program")
    script.chmod(0o755)
    with Commands(Launcher([str(script)]), 5.0) as commands:
        assert commands.run(Session("x", 1), {}) == ("infrastructure", "its command could not be started: Exec format error")
    with Commands(Launcher(["yes"]), 60.0) as commands:
        assert commands.run(Session("x", 1), {}) == ("crash", "its command wrote more than 67,108,864 bytes")


@pytest.mark.slow  # processes that fail
def test_where_all_fail_the_run_ends():
    too_long = "failed in all 6 episodes, in the first one: its first prompt is longer than rollout.prompt_limit"
    with pytest.raises(RunError, match=too_long):
        played(PLAYER, *(f"{task}=exceeds" for task in TASKS), before=False)
    with pytest.raises(RunError, match=r"failed in all 6 episodes, in the first one: its command ended with 2: .*nowhere.py"):
        played("nowhere.py")
    # Though an answer may have caused it: a program that never plays to an end is broken. Later the run goes on.
    broken = [PLAYER, *(f"{task}=crashes" for task in {*TASKS})]
    for how in ({"before": False}, {"failed": "exclude"}):
        with pytest.raises(RunError, match=r"in all 6 episodes, in the first one: its command ended with 1: it is broken"):
            played(*broken, **how)
    assert played(*broken).episodes.mask[:, 0].all()


def test_a_signal_ends_the_commands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    wait = Running.wait

    def interrupted(running):
        if len(os.listdir(tmp_path)) == B:
            raise KeyboardInterrupt
        return wait(running)

    monkeypatch.setattr(Running, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        played("-c", "import os, time; open(str(os.getpid()), 'w'); time.sleep(600)")
    for name in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(name), 0)


def test_an_agent_asks_nobody_else_and_keeps_its_settings(monkeypatch):
    gone = ["OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_ORG_ID", "ANTHROPIC_AUTH_TOKEN",
            "ANTHROPIC_BEDROCK_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS", "CLAUDE_CODE_USE_BEDROCK"]  # fmt: skip
    kept = ["OPENAI_MODEL", "OPENAI_LOG", "ANTHROPIC_MODEL", "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "HOME"]
    for name in (*gone, *kept):
        monkeypatch.setenv(name, "mine")
    variables = commands._environment("127.0.0.1")
    assert not variables.keys() & {*gone} and all(variables[name] == "mine" for name in kept)
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"  # else no two prompts of Claude Code begin alike
    assert variables["OPENAI_AGENTS_DISABLE_TRACING"] == "1"  # else the Agents SDK sends what it does to OpenAI
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "0")
    assert commands._environment("127.0.0.1")["OPENAI_AGENTS_DISABLE_TRACING"] == "0"


def test_mistakes_are_one_line(tmp_path):
    policy().tokenizer.save_pretrained(tmp_path / "tokenizer")
    for field, message in (
        ("env.command=", "env.command=: env.name=agent needs the command"),
        ("env.command=nowhere/agent --x", "env.command=nowhere/agent --x: there is no program nowhere/agent"),
        ("env.command=python3 nowhere.py --x", "env.command=python3 nowhere.py --x: there is no file nowhere.py in "),
        ("env.command=a 'b", "env.command=a 'b: No closing quotation"),
        ("policy.tokenizer=", "env.name=agent needs a language model; give policy="),
        ("warm_start=cloning", "warm_start=cloning: env.name=agent has no expert to clone"),
        ("env.template=plain", "env.template=plain: env.name=agent does not read it"),
        ("env.strict=true", "env.strict=True: env.name=agent does not read it"),
        ("env.preload=[json,nowhere]", 'env.preload=nowhere: cannot be imported: ModuleNotFoundError("No module'),
    ):
        with pytest.raises(ConfigError) as raised:
            build(configuration.load(None, [*FIELDS, f"policy.tokenizer={tmp_path / 'tokenizer'}", field]))
        assert message in str(raised.value) and "\n" not in str(raised.value)
