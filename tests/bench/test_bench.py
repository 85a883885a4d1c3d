"""The benchmarks on very small shapes: rows that `--json` writes, one work on both sides, refusals."""

import dataclasses
import errno
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.bench import __main__ as command
from hgpo_jax.bench import accelerator, advantages, attention, limits, policy_options, sample
from hgpo_jax.policy import initialize
from hgpo_jax.policy.attention import attend_all
from tests.helpers.clocks import set_clock

TINY = ["--policy", "household", "--layers", "3", "--repeats", "1"]
PEER = ("--against", "transformers")


def against_torch(test):
    """A slow test that compares with transformers."""
    return pytest.mark.slow(pytest.mark.needs("torch", "peft")(test))


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Rates that need no gigabyte."""
    monkeypatch.setattr(limits, "measure_rates", lambda mesh, dtype: limits.Rates(100e9, 20e9))


def by_name(found: list[dict]) -> dict[str, dict]:
    """The rows, whose fields are those of every benchmark."""
    *rows, machine = found
    assert machine["name"] == "machine" and "cores" in machine["value"]
    for row in rows:
        assert set(row) == {"name", "value", "unit", "limit_share", "ratio"}, row
        assert row["unit"] in ("s", "tokens/s", "GiB", "GB/s", "GFLOP/s", "of the norm", "tokens"), row
        assert np.isfinite([row["value"], row["limit_share"] or 0, row["ratio"] or 0]).all(), row
    return {row["name"]: row for row in rows}


def starting(rows, text):
    return next(row for name, row in rows.items() if name.startswith(text))


@against_torch
def test_sample(bench, tmp_path):
    profiled = ("--profile", str(tmp_path / "traces"))
    rows = by_name(bench("sample", *TINY, "--batch", "4", "--prompt", "9", "--new", "24", *profiled, *PEER))
    both = starting(rows, "new tokens of both, batch 4")
    assert both["limit_share"] > 0 and both["ratio"] > 0
    assert starting(rows, "decode, household, float32, prompt 9, 24 new, data=1, batch 4")["unit"] == "tokens/s"
    assert list((tmp_path / "traces").rglob("*.xplane.pb"))


@against_torch
@pytest.mark.parametrize("lora", [(), ("--lora", "2")])
def test_update(bench, lora):
    """The command itself compares loss and gradient with the peer's."""
    rows = by_name(bench("update", *TINY, "--rows", "6", "--tokens", "12", "--response", "5", "--remat", "full", *lora, *PEER))
    update, again = starting(rows, "update, household, 3 layers, 6 x 12"), starting(rows, "the same")
    assert update["value"] == again["value"] and update["limit_share"] < again["limit_share"] and update["ratio"] > 0


@pytest.mark.slow
def test_conversations_are_computed_once(bench):
    """The command itself compares loss and gradient with those of separate turns."""
    rows = by_name(bench("conversations", *TINY, "--rows", "2", "--tokens", "60", "--turns", "20"))
    assert starting(rows, "tokens computed by conversations")["ratio"] <= 1.2
    assert starting(rows, "tokens computed by turns")["ratio"] > 8
    assert starting(rows, "update by conversations, household, 3 layers, 2 x 60 tokens, 20 turns")["ratio"] > 0


@pytest.mark.slow
def test_a_chat_reads_only_what_is_new(bench):
    rows = by_name(bench("chat", *TINY, "--turns", "4", "--message", "40", "--response", "5"))
    # Prompts of 85, 130 and 175 tokens, of which all but the message and the last token of an answer were read before.
    reused = starting(rows, "prompt tokens of later turns not read again")
    assert (reused["value"], reused["ratio"]) == (85 + 130 + 175 - 3 * 41, pytest.approx(1 - 3 * 41 / (85 + 130 + 175)))
    for name in ("held", "read anew"):
        before, after = starting(rows, f"first tokens at turn 2, {name}"), starting(rows, f"first tokens at turn 4, {name}")
        assert after["ratio"] == pytest.approx(after["value"] / before["value"])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_attention(bench, monkeypatch, wrong):
    if wrong:  # every slot would be its own start
        monkeypatch.setattr(attention, "attend_all", lambda q, k, v, start: attend_all(q, k, v, jnp.arange(q.shape[1])[None]))
    rows = by_name(bench("attention", *TINY, "--dtype", "bfloat16", "--rows", "2", "--tokens", "10"))
    for kind in ("", ", packed"):
        ours, products = (starting(rows, f"largest error of {name}{kind}")["value"] for name in ("ours", "products"))
        assert 0 < products < 0.01 and (ours > 0.1 if wrong else ours < 0.01)
    assert starting(rows, "attention and its gradient, household, 2 x 10 tokens")["ratio"] > 0


def test_a_device_that_counts_its_memory_has_a_row():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    mesh = types.SimpleNamespace(local_devices=[device({"peak_bytes_in_use": 2**30}), device({"peak_bytes_in_use": 2**31})])
    assert [row["value"] for row in limits.peak_rows(mesh)] == [2.0]
    assert limits.peak_rows(types.SimpleNamespace(local_devices=[device(None)])) == []


@pytest.mark.slow
def test_train(bench, tmp_path):
    small = "rollout.prompt_groups=8", "rollout.group_size=2", "env.max_turns=3", f"cache_dir={tmp_path}", "rollout.overlap=1"
    rows = by_name(bench("train", "--repeats", "1", *small))
    rollout, update = starting(rows, "rollout, 8 x 2 episodes of 3 turns"), starting(rows, "update")
    assert rows["iteration"]["value"] == rollout["value"] + update["value"]
    assert min(rollout["limit_share"], update["limit_share"]) < rows["iteration"]["limit_share"]
    overlapped = rows["iteration, overlapped"]
    assert overlapped["ratio"] == pytest.approx(rows["iteration"]["value"] / overlapped["value"])
    assert overlapped["limit_share"] == pytest.approx(max(rollout["value"], update["value"]) / overlapped["value"])


def test_the_dictionary_loop_computes_the_same(bench, monkeypatch):
    """The command itself compares the advantages."""
    monkeypatch.setattr(advantages, "TRAJECTORIES", (16, 32))
    small, large, growth, _ = bench("advantages", "--repeats", "1")
    assert small["ratio"] > 0 and large["ratio"] is None
    assert growth["name"] == "growth from 800 to 1,600 steps" and growth["value"] > 0


@against_torch
def test_the_peer_generates_the_same_tokens():
    from hgpo_jax.bench import peer

    model, _, mesh = policy_options.open_policy(parse(TINY), [3])
    model = dataclasses.replace(model, initializer_range=0.5)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (3, 7)).astype(np.int32)
    with jax.set_mesh(mesh):
        params = initialize(model, 0, mesh)
        ours = sample.samplers(model, mesh, params, prompts, 6, temperature=0.0)[6]()
        theirs = peer.sampler(peer.make_model(model, params, "float32"), prompts, 6, greedy=True)()
    np.testing.assert_array_equal(ours.tokens, theirs)


def parse(arguments):
    parser = command.cli.parser("bench", "")
    policy_options.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("arguments", "said"), [
    (["sample", "--policy", "Qwen9"], "--policy Qwen9: expected one of household, Qwen2.5-0.5B"),
    (["sample", "--batch", "3", "--mesh", "data=2"], "data=2 does not divide the 3 rows"),
    (["update", "--tokens", "8", "--response", "8"], "--response 8: leaves no prompt"),
    (["update", "--rows", "0"], "--rows: 0: must be a whole number"),
    (["conversations", "--tokens", "30"], "--turns 20: leaves no prompt and answer"),
    (["chat", "--turns", "1"], "--turns: 1: must be a whole number"),
    (["rollout", "--mean", "1"], "--mean 1: must be 2 or more"),
    (["rollout", "--keep", "2", "--episodes", "12"], "--episodes 12: must be a multiple of 8"),
    (["rollout", "--shortest-prompt", "2000"], "--shortest-prompt 2000: is above --longest-prompt 1200"),
    (["plan", "--mesh", "data=1", "--chip", "h100-80g", "--compile", "v5e:2x4"], "--chip h100-80g: --compile v5e:2x4"),
    (["envs"], "nothing is asked for; give --alfworld, --webshop, --products, --passages, --waiting"),
])  # fmt: skip
def test_refusals(refused, arguments, said):
    assert said in refused(*arguments)


@pytest.mark.parametrize("name", ["sample", "update"])
def test_without_torch_there_is_no_peer(monkeypatch, refused, name):
    monkeypatch.setattr(policy_options.importlib.util, "find_spec", lambda name: None)
    assert "needs torch; pip install 'hgpo_jax[parity]'" in refused(name, *PEER)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["sample", "update"])
def test_on_an_accelerator_the_hosts_torch_is_no_peer(monkeypatch, refused, name):
    import torch

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "jax has a GPU that torch does not find" in refused(name, *PEER)


def test_calls_are_timed_by_turns_and_the_first_round_apart(monkeypatch):
    now, order = [0.0], []
    set_clock(monkeypatch, limits, perf_counter=lambda: now[0])

    def call(name, *seconds):
        left = list(seconds)

        def one():
            order.append(name)
            now[0] += left.pop(0)

        return one

    timings = limits.timed({"a": call("a", 9, 1, 5, 2), "b": call("b", 7, 4, 3, 8)}, 3)
    assert order == ["a", "b"] * 4
    assert timings == {"a": limits.Timing(9, 2, 1), "b": limits.Timing(7, 4, 3)}


def test_counts_of_operations_and_bytes():
    model, _, mesh = policy_options.open_policy(parse(TINY), [1])
    params = initialize(model, 0, mesh)
    assert limits.read_bytes(model, 0, 0, 4) == sum(a.nbytes for a in jax.tree.leaves(params))
    size, heads = model.head_size, 3 * 2 * model.num_key_value_heads  # of all layers
    assert limits.read_bytes(model, 3, 5, 2) - limits.read_bytes(model, 0, 0, 2) == 3 * 5 * heads * size * 2
    # One token that sees itself alone is the same work either way.
    assert limits.decode_flops(model, 1) == limits.forward_flops(model, 1, 1)
    # Token by token, each sees itself and those before it; only the last predicts.
    head = 2 * model.hidden_size * model.vocab_size
    one_by_one = sum(limits.decode_flops(model, seen) - head for seen in range(1, 10)) + head
    last_layer = limits.forward_flops(dataclasses.replace(model, num_hidden_layers=1), 9, 9) - 9 * head
    saved = last_layer - (limits.forward_flops(dataclasses.replace(model, num_hidden_layers=1), 9, 1) - head)
    assert limits.forward_flops(model, 9, 1) == one_by_one - saved


@pytest.mark.parametrize("name", ["limits", "accelerator"])
def test_rows_that_cannot_be_written_leave_the_last_ones(name, bench, tmp_path, monkeypatch):
    stand_in = types.SimpleNamespace(__doc__="", add_arguments=lambda p: None, run=lambda args: [])
    monkeypatch.setitem(command.BENCHES, "limits", stand_in)
    monkeypatch.setattr(accelerator, "PARTS", {"a part": "bench limits"})
    monkeypatch.setattr(accelerator, "part", lambda command, seconds: [])
    monkeypatch.setattr(accelerator, "words", lambda text, args: [])

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "rows.json").write_text("[]")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        bench(name, *(["--tiny"] if name == "accelerator" else []))
    assert [path.read_text() for path in tmp_path.glob("rows.json*")] == ["[]"]
