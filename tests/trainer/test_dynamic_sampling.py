"""Around the update: which episodes are learned from, what is logged of them, and PPO's critic."""

import contextlib
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hgpo_jax import advantages
from hgpo_jax.config import load
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.critic import initialize_critic, make_value_loss, make_values, values_of_episodes
from hgpo_jax.learner.update import make_map
from hgpo_jax.policy import network
from hgpo_jax.policy.placement import storage_shardings
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.setup.job import Job
from hgpo_jax.trainer import step
from hgpo_jax.trainer.metrics import advantage_metrics, rollout_metrics, rollout_sums
from hgpo_jax.utils.errors import RunError
from tests.helpers.tiny import MODEL, WORDS, mesh_of, parameters

GROUPS, MEMBERS, T, P, R, O = 4, 3, 5, 6, 3, 2
B = GROUPS * MEMBERS


def episodes(seed: int, wins) -> Episodes:
    """Random episodes whose success is given per prompt group and member; `prompts` say where a step comes from."""
    rng, wins = np.random.default_rng(seed), np.asarray(wins, bool).reshape(B)
    mask = np.arange(T) < rng.integers(1, T + 1, B)[:, None]
    last = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    zeros = lambda *shape: np.zeros((B, T, *shape), np.int32)  # noqa: E731
    return Episodes(
        prompts=zeros(P) + 1000 * seed + np.arange(B)[:, None, None], prompt_lengths=mask * 4, responses=zeros(R),
        response_lengths=mask * 2, logp=zeros(R) * 0.0, observations=zeros(O), mask=mask,
        rewards=np.float32(10 * last * wins[:, None]), invalid=rng.random((B, T)) < 0.2,
        states=rng.integers(0, 2, (B, T)), next_states=rng.integers(0, 2, (B, T)),
        agents=np.zeros((B, T), np.int32), actions=np.zeros((B, T), np.int32),
        groups=np.repeat(np.arange(GROUPS, dtype=np.int32), MEMBERS), success=wins, judged=mask[:, 0],
        task=np.zeros(B, np.int32),
        truncated=np.arange(B) % 3 > 0, final_prompts=rng.integers(1, WORDS, (B, P), np.int32),
        final_prompt_lengths=np.where(np.arange(B) % 3 == 1, P - 1, 0).astype(np.int32),
    )  # fmt: skip


def fake_job(batches, method, roles=("agent",)):
    """A job whose rollouts are these batches, one after the other."""
    left = iter(batches)
    config = load(None, [f"method={method}", f"rollout.prompt_groups={GROUPS}", f"rollout.group_size={MEMBERS}"])
    runner = types.SimpleNamespace(
        rollout=lambda params, *inputs: RolloutResult(next(left), None),
        select_tasks=lambda *which: None,
        roles=roles,
        signals=(),
    )
    return Job(config=config, mesh=None, policies={}, tokenizer=None, runner=runner)


def sample(job):
    """The episodes of an iteration, and its metrics."""
    (kept, _), sums, counts = step.sample(job, None, 0)
    return kept, rollout_metrics(sums) | counts


MIXED, LOST, WON = [1, 0, 1], [0, 0, 0], [1, 1, 1]


def test_dynamic_sampling_keeps_groups_with_different_rewards_in_their_order():
    first, second = episodes(1, [LOST, MIXED, WON, MIXED]), episodes(2, [MIXED, LOST, MIXED, MIXED])
    kept, metrics = sample(fake_job([first, second], "dapo"))
    came_from = np.asarray(kept.prompts[:, 0, 0]).reshape(GROUPS, MEMBERS)[:, 0].tolist()
    assert came_from == [1003, 1009, 2000, 2006]  # the third of the second batch found no place
    np.testing.assert_array_equal(kept.groups, first.groups)
    assert metrics["rollouts"] == 2
    assert metrics["kept_groups"] == GROUPS
    # The metrics are those of all episodes, kept or not.
    assert metrics["success"] == pytest.approx((first.success.sum() + second.success.sum()) / (2 * B))
    assert metrics["steps"] == first.mask.sum() + second.mask.sum()


def test_dynamic_sampling_says_what_went_wrong_in_all_rollouts():
    job = fake_job([], "dapo")
    left = [RolloutResult(episodes(n, [MIXED, MIXED, WON, LOST]), types.SimpleNamespace(failures={}, counts=counts))
            for n, counts in enumerate((
                {"failed/crash": 0.5, "malformed": 2, "longest_prompt": 3, "slot_use": 0.5},
                {"failed/crash": 0.25, "malformed": 5, "longest_prompt": 9, "slot_use": 1.0}))]  # fmt: skip
    job.runner.rollout = lambda *_: left.pop(0)
    _, metrics = sample(job)
    expected = {"failed/crash": 0.375, "malformed": 7, "longest_prompt": 9, "slot_use": 0.75}
    assert {name: metrics[name] for name in expected} == expected and not left


def test_dynamic_sampling_ends_after_its_tries_and_leaves_places_empty():
    batches = [episodes(n, [LOST, MIXED if n == 2 else LOST, WON, WON]) for n in range(5)]
    kept, metrics = sample(fake_job(batches, "dapo"))
    assert (metrics["rollouts"], metrics["kept_groups"]) == (4, 1)
    assert np.asarray(kept.mask)[:MEMBERS].any(1).all()
    assert not np.asarray(kept.mask)[MEMBERS:].any()


def test_roles_learn_in_turns_only_where_the_first_of_them_acts_first():
    batch = episodes(1, [LOST, MIXED, WON, MIXED])
    agents = np.tile(np.arange(T, dtype=np.int32) % 2, (B, 1))
    kept, _ = sample(fake_job([batch.replace(agents=agents)], "himac", roles=("planner", "executor")))
    np.testing.assert_array_equal(kept.agents, agents)
    agents[-1] = 1
    with pytest.raises(RunError, match=r"^method=himac: .*, executor, must act first, but planner did"):
        sample(fake_job([batch.replace(agents=agents)], "himac", roles=("executor", "planner")))
    sample(fake_job([batch.replace(agents=agents)], "dr_mas", roles=("executor", "planner")))


@pytest.mark.parametrize("method", ["pgpo", "hgpo"])
def test_a_method_that_needs_success_refuses_an_unknown_one(method):
    e, job = episodes(0, np.ones(B)), fake_job([], method)
    report = types.SimpleNamespace(failures={}, counts={})
    for judged, refused in ((e.mask[:, 0], False), (np.arange(B) != 5, method == "pgpo")):
        job.runner.rollout = lambda *_, judged=judged: RolloutResult(e.replace(judged=judged), report)
        with pytest.raises(RunError, match=r"^method=pgpo: needs to know") if refused else contextlib.nullcontext():
            step.sample(job, None, 0)


def test_other_methods_learn_from_everything():
    batch = episodes(1, [LOST, MIXED, WON, MIXED])
    kept, metrics = sample(fake_job([batch], "hgpo"))
    assert kept is batch
    gamma = load().advantage.gamma
    returns = (batch.rewards * gamma ** np.arange(T)).sum(1).mean()
    assert metrics["return"] == pytest.approx(returns, rel=1e-5)
    assert metrics["invalid"] == pytest.approx((batch.invalid & batch.mask).sum() / batch.mask.sum())
    assert metrics["success"] == pytest.approx(batch.success.mean())
    assert metrics["turns"] == pytest.approx(batch.mask.sum() / B)
    assert metrics["tokens"] == (4 + 2) * batch.mask.sum()


def test_metrics_of_each_role():
    e = episodes(1, [LOST, MIXED, WON, MIXED])
    e = e.replace(agents=np.random.default_rng(0).integers(0, 2, (B, T)), response_lengths=e.mask * (1 + np.arange(T) % 3))
    usual = rollout_metrics([rollout_sums(e, 0.9, ("agent",))] * 2)
    metrics = rollout_metrics([rollout_sums(e, 0.9, ("talker", "doer"))] * 2)
    assert usual.items() <= metrics.items() and len(metrics) == len(usual) + 2 * 4
    for index, role in enumerate(("talker", "doer")):
        own = e.mask & (e.agents == index)
        acted = own.any(1)
        assert 0 < acted.sum() < B
        assert metrics[f"by_role/success/{role}"] == pytest.approx(e.success[acted].mean())
        assert metrics[f"by_role/turns/{role}"] == pytest.approx(own.sum() / B)
        assert metrics[f"by_role/invalid/{role}"] == pytest.approx(e.invalid[own].mean())
        assert metrics[f"by_role/response_length/{role}"] == pytest.approx(e.response_lengths[own].mean())


def test_where_a_filter_drops_every_step_all_advantages_are_zero():
    mask = jnp.ones((B, T), bool)
    metrics = advantage_metrics(mask, advantages.Estimate(jnp.zeros((B, T)), jnp.zeros((B, T)), keep=~mask))
    assert metrics["kept_share"] == metrics["advantage_abs"] == 0 and metrics["advantage_zero"] == 1


def test_hgpo_with_no_history_is_reported_beside_hgpo():
    e = episodes(3, [MIXED] * GROUPS)
    batch = {"rewards": e.rewards, "mask": e.mask, "states": e.states, "groups": e.groups, "invalid": e.invalid}
    deep, alone = (advantages.estimate("hgpo", **batch, history_length=k, normalize="mean") for k in (2, 0))
    a, b = np.asarray(deep.advantages)[e.mask], np.asarray(alone.advantages)[e.mask]
    got = advantage_metrics(jnp.asarray(e.mask), deep)
    assert got["cosine_to_level0"] == pytest.approx((a @ b) / np.sqrt((a @ a) * (b @ b)), abs=1e-5)
    assert 0 < got["cosine_to_level0"] < 0.999
    assert advantage_metrics(jnp.asarray(e.mask), alone)["cosine_to_level0"] == pytest.approx(1, abs=1e-5)


N = 24


@pytest.fixture(scope="module")
def critic():
    """(parameters with a head away from zero, batch)"""
    params = initialize_critic(parameters(0))
    assert not any(part.any() for part in params["value"].values())  # a fresh critic says 0
    params["value"] = {"kernel": jax.random.normal(jax.random.key(1), (16,)), "bias": jnp.float32(0.5)}
    rng = np.random.default_rng(0)
    batch = TrainingBatch(
        prompts=rng.integers(0, WORDS, (N, P)), prompt_lengths=rng.integers(1, P + 1, N), responses=np.zeros((N, R), int),
        response_lengths=np.ones(N, int), old_logp=np.zeros((N, R)), advantages=np.zeros(N), values=np.zeros(N),
        returns=rng.normal(size=N).astype(np.float32),
    )  # fmt: skip
    return jax.device_get(params), batch


def plain_values(params, batch):
    """The value head on the last prompt token's final hidden state, one row at a time without padding."""

    @jax.jit
    def value(prompt):
        model = nnx.merge(network(dataclasses.replace(MODEL, tie_word_embeddings=True)), params["body"])
        hidden = model.hidden(prompt[None], jnp.array([[len(prompt) - 1]]))[0, 0]
        return hidden @ params["value"]["kernel"] + params["value"]["bias"]

    return np.array([value(prompt[:n]) for prompt, n in zip(batch.prompts, batch.prompt_lengths, strict=True)])


def test_values_of_all_rows(critic):
    params, batch = critic
    mesh = mesh_of("data=2,fsdp=2")
    order, count = np.random.default_rng(1).permutation(N), 17
    mapped = jax.jit(make_map(make_values(MODEL), mesh, microbatch_size=3))
    with jax.set_mesh(mesh):  # as a job does
        got = np.asarray(mapped(params, batch, order, count))
    expected = np.zeros(N)
    expected[order[:count]] = plain_values(params, batch)[order[:count]]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_after_a_time_limit_the_critic_values_what_would_have_come_next(critic):
    """Or what came last, where there is no final prompt; the end of a task is worth 0."""
    params, _ = critic
    e = episodes(3, np.ones(B))
    e = e.replace(prompts=np.random.default_rng(4).integers(1, WORDS, (B, T, P), np.int32))
    batch, order = step.training_batch(e), np.argsort(~e.mask.ravel(), kind="stable")
    predict = jax.jit(make_map(make_values(MODEL), mesh_of(), microbatch_size=5))
    values, after = values_of_episodes(functools.partial(predict, params), batch, e, order, e.mask.sum())
    some = lambda lengths: np.maximum(lengths, 1)  # noqa: E731
    expected = plain_values(params, batch.replace(prompt_lengths=some(batch.prompt_lengths))) * e.mask.ravel()
    np.testing.assert_allclose(values, expected, atol=1e-5)
    finals = plain_values(params, batch.replace(prompts=e.final_prompts, prompt_lengths=some(e.final_prompt_lengths)))
    last = expected.reshape(B, T)[np.arange(B), e.mask.sum(1) - 1]
    np.testing.assert_allclose(after, np.select([~e.truncated, e.final_prompt_lengths > 0], [0, finals], last), atol=1e-5)
    assert min(np.bincount(e.truncated * (1 + (e.final_prompt_lengths > 0)), minlength=3)) > 0


def test_three_heads_are_read_before_and_behind_the_plan(critic):
    """The first two where the prompt ends, the third at the last token of the plan, or of a shorter answer."""
    params, batch = critic
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, R + 1, N)
    prompt_lengths = 3 + batch.prompt_lengths % 2  # of few lengths: each compiles
    batch = batch.replace(responses=rng.integers(1, WORDS, (N, R)), response_lengths=lengths, prompt_lengths=prompt_lengths)
    kernel, bias = rng.normal(size=(3, 16)).astype(np.float32), np.float32([1, 2, 3])
    got = jax.jit(make_map(make_values(MODEL, plan_words=2), mesh_of(), microbatch_size=5))(
        params | {"value": {"kernel": kernel, "bias": bias}}, batch, np.arange(N), N
    )
    assert got.shape == (N, 3) and set(lengths) == {1, 2, 3}
    for column, read in enumerate((0 * lengths, 0 * lengths, np.minimum(2, lengths - 1))):
        longer = np.concatenate([batch.prompts, np.zeros((N, R), int)], axis=1)
        for row, n, more, said in zip(longer, batch.prompt_lengths, read, batch.responses, strict=True):
            row[n : n + more] = said[:more]
        head = params | {"value": {"kernel": kernel[column], "bias": bias[column]}}
        expected = plain_values(head, batch.replace(prompts=longer, prompt_lengths=batch.prompt_lengths + read))
        np.testing.assert_allclose(got[:, column], expected, atol=1e-5)


def test_a_head_without_a_target_learns_nothing(critic):
    params, batch = critic
    params = params | {"value": {"kernel": np.zeros((3, 16), np.float32), "bias": np.zeros(3, np.float32)}}
    has_target = np.random.default_rng(3).random((N, 3)) < [1, 0.5, 0]
    batch = batch.replace(values=np.zeros((N, 3)), returns=np.ones((N, 3), np.float32), has_target=has_target)
    loss = make_value_loss(make_values(MODEL, plan_words=2), clip=10.0)
    gradient, stats = jax.jit(jax.grad(lambda params: loss(params, None, batch)[:2], has_aux=True))(params)
    np.testing.assert_allclose(gradient["value"]["bias"], -has_target.sum(0), rtol=1e-6)
    assert stats["squared_error"] == (has_target.sum(), has_target.sum())
    assert stats["loss"] == (pytest.approx(has_target.sum() / 2), N)  # over decisions, as the gradient is


def test_offloaded_arrays_are_in_host_memory_and_scalars_are_not():
    mesh = mesh_of()
    moments = jax.eval_shape(optax.adam(1.0).init, parameters(0))
    places = storage_shardings(moments, MODEL, mesh, offload=True)
    for array, where in zip(jax.tree.leaves(moments), jax.tree.leaves(places), strict=True):
        assert where.memory_kind == ("pinned_host" if array.ndim else "device")
    places = storage_shardings(moments, MODEL, mesh, offload=False)
    assert {where.memory_kind for where in jax.tree.leaves(places)} == {"device"}
