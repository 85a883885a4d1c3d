"""From episodes to new parameters: the first gradient and the metrics of an iteration, computed again by hand."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hgpo_jax import advantages
from hgpo_jax.advantages import estimate
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner import losses
from hgpo_jax.policy import network
from hgpo_jax.rollout.episodes import Episodes, action_ids
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.trainer.alarms import estimator_fault
from hgpo_jax.trainer.step import _shuffle, make_train_step
from tests.helpers.tiny import MODEL, WORDS, mesh_of, parameters

B, T, P, R, TEMPERATURE = 6, 4, 5, 3, 0.8
ENDS = tuple(range(1, WORDS // 2))  # a response of another last token was cut
SETTINGS = (
    "rollout.prompt_groups=2", "rollout.group_size=3", "rollout.history_length=1", f"rollout.temperature={TEMPERATURE}",
    "advantage.gamma=0.9", "advantage.invalid_penalty=0.3", "advantage.lam=0.7",
    # One optimizer step, whose first moment is a tenth of the gradient. The KL has none where the reference is the policy.
    "learner.minibatch_size=64", "learner.kl_weight=0.1", "learner.entropy_weight=0",
    "learner.grad_clip=1e6", "critic.grad_clip=1e6", "critic.value_clip=100",
)  # fmt: skip
OPTIONS = {"normalize": "mean", "history_length": 1, "gamma": 0.9, "lam": 0.7, "invalid_penalty": 0.3}  # of SETTINGS


@jax.jit
def logprobs(params, prompts, prompt_lengths, responses):
    """f32[N, R] of the responses' tokens, by one forward pass over prompt and response."""
    slots = prompt_lengths[:, None] + jnp.arange(R)
    text = jnp.pad(prompts, ((0, 0), (0, R))).at[jnp.arange(len(prompts))[:, None], slots].set(responses)
    model = nnx.merge(network(MODEL), params)
    logps = jax.nn.log_softmax(model.logits(model.hidden(text, slots - 1)) / TEMPERATURE)
    return jnp.take_along_axis(logps, responses[..., None], axis=2)[..., 0]


@pytest.fixture(scope="module")
def episodes():
    """Random episodes of all lengths, with the log-probabilities of these parameters."""
    rng = np.random.default_rng(0)
    mask = np.arange(T) < np.array([4, 1, 3, 2, 4, 1])[:, None]
    lengths = mask * rng.integers(1, R + 1, (B, T))
    prompt_lengths = mask * rng.integers(1, P + 1, (B, T))
    prompts = rng.integers(1, WORDS, (B, T, P)) * (np.arange(P) < prompt_lengths[..., None])
    responses = rng.integers(1, WORDS, (B, T, R)) * (np.arange(R) < lengths[..., None])
    flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
    logp = np.asarray(logprobs(parameters(0), flat(prompts), np.maximum(flat(prompt_lengths), 1), flat(responses)))
    return Episodes(
        prompts=prompts, prompt_lengths=prompt_lengths, responses=responses, response_lengths=lengths,
        logp=logp.reshape(B, T, R) * (np.arange(R) < lengths[..., None]), observations=np.zeros((B, T, 1), np.int32),
        rewards=np.float32(rng.integers(0, 4, (B, T)) * mask), mask=mask, invalid=(rng.random((B, T)) < 0.4) & mask,
        states=rng.integers(0, 4, (B, T)) * mask, next_states=rng.integers(2, 6, (B, T)) * mask,
        agents=(np.arange(T) + np.arange(B)[:, None]) % 2 * mask, actions=np.arange(B * T).reshape(B, T) // 2 % 3 * mask,
        groups=np.repeat(np.arange(2, dtype=np.int32), 3), success=np.array([1, 0, 1, 0, 1, 1], bool),
        judged=mask[:, 0], task=np.zeros(B, np.int32), truncated=np.arange(B) % 2 > 0, final_prompts=prompts[:, 0],
        final_prompt_lengths=prompt_lengths[:, 0] * (np.arange(B) % 2),
    )  # fmt: skip


def estimated(e: Episodes, name: str, **more):
    """The estimate under SETTINGS, as far as an estimator has these options."""
    arrays = {"rewards": e.rewards, "mask": e.mask, "states": e.states, "groups": e.groups, "invalid": e.invalid}
    options = {option: value for option, value in OPTIONS.items() if option in advantages.parameters(name)[1]}
    return estimate(name, **arrays, **options | more)


def fresh_critic(*values):
    """What a critic says before it has learned."""
    return dict.fromkeys(values, np.zeros((B, T), np.float32)) | {"final_values": np.zeros(B, np.float32)}


def switches(e: Episodes):
    """bool[B, T], of answers whose first token says so."""
    return (e.responses[..., 0] % 2 == 1) & e.mask


@functools.cache
def built(*overrides, devices, roles):
    """(mesh, the iteration's `learn`, its `init`); of an answer that has parts every token is one."""
    config, mesh = load(None, [*SETTINGS, *overrides]), mesh_of(f"data={devices}")
    policy = PolicySetup(SHARED, config, mesh, types.SimpleNamespace(config=MODEL), MODEL)
    runner = types.SimpleNamespace(roles=roles, answer_parts=(1, 1, 1), switches=switches, end_tokens=(ENDS,) * len(roles))
    return mesh, *make_train_step(Job(config, mesh, {SHARED: policy}, None, runner))


def learn(e: Episodes, *overrides, scale=1.0, devices=1, roles=("agent",), reference=None, role=None):
    """(state, metrics) after one iteration, and the state before it. reference: parameters, by default the policy's. role: the
    index of the one that learns, by default all."""
    mesh, step, init = built(*overrides, devices=devices, roles=roles)
    with jax.set_mesh(mesh):
        state = init({SHARED: jax.tree.map(jnp.asarray, parameters(0))})
        before = jax.device_get(state)
        frozen = {SHARED: jax.tree.map(jnp.array, reference or parameters(0))}
        one = () if role is None else (jnp.int32(role),)
        return *jax.device_get(step(state, frozen, jax.tree.map(jnp.asarray, e), jax.random.key(0), scale, *one)), before


def assert_first_gradient(state, e: Episodes, weights) -> float:
    """The policy's first moments are a tenth of the gradient of -sum w log p, weights [N, R] of the decisions that happened;
    returns the gradient's norm."""

    def loss(params):
        return -(weights * logprobs(params, e.prompts[e.mask], e.prompt_lengths[e.mask], e.responses[e.mask])).sum()

    gradient = jax.grad(loss)(jax.tree.map(jnp.asarray, parameters(0)))
    moments = optax.tree.get(state.opt_state[SHARED], "mu")
    jax.tree.map(lambda m, g: np.testing.assert_allclose(m, 0.1 * g, atol=2e-6), moments, gradient)
    return float(optax.tree.norm(gradient))


def said(e: Episodes):
    """i32[B, T], a number for each response there is."""
    numbers, ids = {}, np.zeros((B, T), np.int32)
    for b, t in np.argwhere(e.mask):
        ids[b, t] = numbers.setdefault(tuple(e.responses[b, t, : e.response_lengths[b, t]]), len(numbers))
    return ids


# How much each token's log-probability counts, from the advantages f32[N], tokens [N, R] and lengths [N] of N decisions.
AGGREGATES = {
    "token-mean": lambda A, tokens, lengths: A[:, None] * tokens / tokens.sum(),
    "seq-mean-token-sum": lambda A, tokens, lengths: A[:, None] * tokens / len(A),
    "seq-mean-token-mean": lambda A, tokens, lengths: A[:, None] * tokens / lengths[:, None] / len(A),
}
GIGPO = ("learner.aggregate=seq-mean-token-sum", "advantage.normalize=mean_std")
CASES = {
    "hgpo": ((), "token-mean", lambda e: estimated(e, "hgpo")),
    "gigpo": (GIGPO, "seq-mean-token-sum", lambda e: estimated(e, "gigpo", normalize="mean_std")),
    "gspo": ((), "seq-mean-token-mean", lambda e: estimated(e, "grpo")),
    "graphgpo": (
        (),
        "token-mean",
        lambda e: estimated(e, "graphgpo", success=e.success, next_states=e.next_states, normalize="mean_std"),
    ),
    "dr_mas": ((), "token-mean", lambda e: estimated(e, "dr_mas", agents=e.agents, normalize="mean_std")),
    "eb_gae": ((), "token-mean", lambda e: estimated(e, "eb_gae")),
    "ppo": ((), "token-mean", lambda e: estimated(e, "gae", **fresh_critic("values"))),
}


@pytest.mark.parametrize("method", ["hgpo", *(pytest.param(method, marks=pytest.mark.slow) for method in list(CASES)[1:])])
def test_the_first_gradient_is_that_of_reinforce(episodes, method):
    """On the sampler's own policy the ratio is 1, and the surrogate's gradient that of -sum A log p."""
    e, (overrides, aggregate, expected) = episodes, CASES[method]
    state, metrics, before = learn(e, f"method={method}", *overrides)
    happened, record = e.mask, expected(e)
    lengths, A = e.response_lengths[happened], np.asarray(record.advantages)[happened]
    weights = AGGREGATES[aggregate](A, np.arange(R) < lengths[:, None], lengths)
    norm = assert_first_gradient(state, e, weights)
    assert norm > 0.05
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["loss"] == pytest.approx(-weights.sum(), abs=1e-5)
    assert metrics["logp_difference"] < 1e-5 and "correction/weight" not in metrics
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, before.params)
    assert max(jax.tree.leaves(moved)) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gbpo", "hgpo"])
def test_gbpo_draws_ratios_by_margins_or_else_by_advantages(episodes, method):
    """An even number of episodes, none of which is the median."""
    e = episodes.replace(groups=np.zeros(B, np.int32))
    state, metrics, _ = learn(e, f"method={method}", "learner.loss=gbpo")
    record = estimated(e, method)
    A = np.asarray(record.advantages)[e.mask]
    margins = np.asarray(record.margins)[e.mask] if method == "gbpo" else A
    assert margins.all() and (np.sign(margins) != np.sign(A)).any() == (method == "gbpo")
    lengths = e.response_lengths[e.mask]
    weights = AGGREGATES["token-mean"](np.abs(A) * np.sign(margins), np.arange(R) < lengths[:, None], lengths)
    assert_first_gradient(state, e, weights)
    assert metrics["loss"] == pytest.approx(0.2 * np.abs(weights).sum(), rel=1e-4)


CUT = "learner.unfinished=mask"


@pytest.mark.parametrize("method", ["eb_gae", pytest.param("ppo", marks=pytest.mark.slow)])
def test_the_tokens_of_answers_that_were_cut_can_be_left_out_and_their_steps_still_count(episodes, method):
    e, happened, lengths = episodes, episodes.mask, episodes.response_lengths[episodes.mask]
    state, metrics, _ = learn(e, f"method={method}", CUT)
    cut = ~np.isin(e.responses[happened][np.arange(len(lengths)), lengths - 1], ENDS)
    assert 2 < cut.sum() < len(cut) - 2 and metrics["unfinished_share"] == pytest.approx(cut.mean())
    A, tokens = np.asarray(CASES[method][2](e).advantages)[happened], (np.arange(R) < lengths[:, None]) & ~cut[:, None]
    norm = assert_first_gradient(state, e, A[:, None] * tokens / tokens.sum())
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if method == "ppo":  # the critic learns from all steps
        whole, _, _ = learn(e, "method=ppo")
        jax.tree.map(np.testing.assert_array_equal, state.critic, whole.critic)


@pytest.mark.slow  # one more update to compile
def test_where_episodes_say_what_was_finished_that_counts(episodes):
    """An agent's answer may end at a stop string, without an end token."""
    finished = np.random.default_rng(0).random(episodes.mask.shape) < 0.5
    state, metrics, _ = learn(episodes.replace(finished=finished), "method=eb_gae", CUT)
    cut, lengths = ~finished[episodes.mask], episodes.response_lengths[episodes.mask]
    assert metrics["unfinished_share"] == pytest.approx(cut.mean())
    A = np.asarray(CASES["eb_gae"][2](episodes).advantages)[episodes.mask]
    tokens = (np.arange(R) < lengths[:, None]) & ~cut[:, None]
    assert_first_gradient(state, episodes, A[:, None] * tokens / tokens.sum())


@pytest.mark.slow
def test_steps_that_a_filter_drops_leave_sums_and_counts(episodes):
    """Half of the prompt groups score the same."""
    e = episodes.replace(rewards=np.where(episodes.groups[:, None] % 2, episodes.rewards, 0))
    state, metrics, _ = learn(e, "advantage.keep=informative")
    record = estimated(e, "hgpo", keep="informative")
    kept = np.asarray(record.keep)
    assert 0 < kept.sum() < e.mask.sum() and metrics["kept_share"] == pytest.approx(kept.sum() / e.mask.sum())
    tokens = (np.arange(R) < e.response_lengths[e.mask][:, None]) & kept[e.mask][:, None]
    A = np.asarray(record.advantages)[e.mask]
    assert_first_gradient(state, e, A[:, None] * tokens / tokens.sum())
    assert metrics["advantage_abs"] == pytest.approx(np.abs(A).sum() / kept.sum())


@pytest.mark.slow
def test_hipers_first_gradient_gives_every_token_its_parts_advantage(episodes):
    """A planner's token is credited where its answer begins a segment alone, and the end of an answer with its action."""
    e, happened = episodes, episodes.mask
    state, metrics, before = learn(e, "method=hiper")
    zeros = fresh_critic("high_values", "low_values", "term_values")
    record = estimated(e, "hiper", switches=switches(e), **zeros)
    weights = np.asarray(record.part_advantages)[happened] * (np.arange(R) < e.response_lengths[happened][:, None])
    weights /= e.response_lengths.sum()
    begins = (switches(e) | (np.arange(T) == 0))[happened]
    assert 2 < begins.sum() < happened.sum() - 2
    assert not weights[~begins, 1].any()
    assert metrics["switch_rate"] == pytest.approx(begins.mean())
    assert_first_gradient(state, e, weights)
    # The bias of a head of zeros moves by the mean over decisions of what it says too little; V_high's by that of its segments.
    bias = optax.tree.get(state.critic.opt_state, "mu")["value"]["bias"]
    np.testing.assert_allclose(bias, -0.1 * np.asarray(record.part_returns)[happened].sum(0) / happened.sum(), rtol=1e-4)
    assert (before.critic.params["value"]["kernel"].shape, metrics["nonfinite_steps"]) == ((3, 16), 0)


def test_actions_are_equal_exactly_where_responses_are(episodes):
    """A token 0 is a token, and what stands beyond a response's end is none."""
    rng = np.random.default_rng(1)
    e = episodes.replace(responses=rng.integers(0, 2, (B, T, R)))
    assert ((e.responses != 0) & (np.arange(R) >= e.response_lengths[..., None]))[e.mask].any()
    found, expected = np.asarray(action_ids(e.responses, e.response_lengths, e.mask))[e.mask], said(e)[e.mask]
    np.testing.assert_array_equal(found[:, None] == found, expected[:, None] == expected)
    assert 4 < len(set(found.tolist())) < e.mask.sum()


def test_what_is_said_of_the_advantages(episodes):
    e = episodes
    _, metrics, _ = learn(e, "method=hgpo")
    record = estimated(e, "hgpo")
    A = np.asarray(record.advantages)[e.mask]
    assert metrics["advantage_abs"] == pytest.approx(np.abs(A).mean(), rel=1e-5)
    assert metrics["advantage_zero"] == pytest.approx((A == 0).mean())
    for level in (0, 1):
        peers = (np.asarray(record.level_sizes)[e.mask][:, level] > 1).mean()
        assert 0 < peers < 1
        assert metrics[f"peers/level{level}"] == pytest.approx(peers)
    _, metrics, _ = learn(e, "method=eb_gae", CUT)  # which are the same for all tokens
    stats = estimated(e, "eb_gae").stats
    assert len(set(stats["tau2"].tolist())) > 1
    assert metrics["hierarchy/rho"] == pytest.approx(float(stats["rho"]), rel=1e-4)
    for column, level in enumerate((-1, 0, 1)):
        assert metrics[f"hierarchy/s2_level{level}"] == pytest.approx(float(stats["s2"][column]), rel=1e-4)
    for column, level in enumerate((0, 1)):
        assert metrics[f"hierarchy/tau2_level{level}"] == pytest.approx(float(stats["tau2"][column]), rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_signal_that_is_no_number_stops_the_update_and_is_named(episodes):
    """One of a compiled environment, which nothing has checked on the way."""
    e = episodes.replace(signals=np.where(np.arange(T) == 1, np.nan, np.ones((B, T)))[..., None].astype(np.float32))
    state, metrics, before = learn(e, "method=beacon")
    assert metrics["nonfinite_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    assert "signals[0, 1, 0] is nan" in estimator_fault(load(None, [*SETTINGS, "method=beacon"]), e)[0]


def test_what_is_said_of_each_role(episodes):
    e, roles, reference = episodes, ("talker", "doer"), jax.tree.map(lambda a: a * 0.8, parameters(0))
    state, metrics, _ = learn(e, "method=hgpo", roles=roles, reference=reference)
    alone, usual, _ = learn(e, "method=hgpo", reference=reference)
    said = (e.prompts[e.mask], e.prompt_lengths[e.mask], e.responses[e.mask])
    kl = np.zeros((B, T, R))
    kl[e.mask] = losses.kl(logprobs(parameters(0), *said), logprobs(reference, *said))
    happened = np.arange(R) < e.response_lengths[..., None]
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    told = {name: value for name, value in metrics.items() if name.startswith("by_role/")}
    assert {name: metrics[name] for name in metrics.keys() - told} == usual
    A, pulls, tokens = np.asarray(estimated(e, "hgpo").advantages), [], []
    for index, role in enumerate(roles):
        own = e.mask & (e.agents == index)
        assert own.sum() > 5
        assert told[f"by_role/advantage_mean/{role}"] == pytest.approx(A[own].mean(), rel=1e-5)
        assert told[f"by_role/advantage_std/{role}"] == pytest.approx(A[own].std(), rel=1e-5)
        tokens.append(e.response_lengths[own].sum())
        pulls.append((A[own] ** 2 * e.response_lengths[own]).sum())  # on the sampler's own policy a token's slope is -A
        far = kl[own][happened[own]].mean()
        assert far > 1e-3 and told[f"by_role/kl/{role}"] == pytest.approx(far, rel=1e-4)
    for pull, role in zip(pulls, roles, strict=True):
        assert told[f"by_role/logp_gradient_share/{role}"] == pytest.approx(pull / sum(pulls), rel=1e-4)
    entropy = [told[f"by_role/entropy/{role}"] for role in roles]
    assert entropy[0] != pytest.approx(entropy[1], rel=1e-3)
    assert np.dot(entropy, tokens) / sum(tokens) == pytest.approx(metrics["entropy"], rel=1e-5)
    assert len(told) == 5 * len(roles)


@pytest.mark.slow  # programs to compile
@pytest.mark.parametrize("role", [0, 1])
def test_one_role_learns_and_of_the_other_only_the_kl_is_felt(episodes, role):
    e, roles = episodes, ("planner", "executor")
    own = e.mask & (e.agents == role)
    state, metrics, _ = learn(e, "method=hgpo", roles=roles, role=role)
    A = np.where(own, estimated(e, "hgpo").advantages, 0)[e.mask]
    assert np.abs(A).max() > 0.5
    lengths = e.response_lengths[e.mask]
    weights = AGGREGATES["token-mean"](A, np.arange(R) < lengths[:, None], lengths)
    assert_first_gradient(state, e, weights)
    shares = [metrics[f"by_role/logp_gradient_share/{name}"] for name in roles]
    assert shares == pytest.approx([1 - role, role])
    _, usual, _ = learn(e, "method=hgpo", roles=roles)
    said = [name for name in usual if "advantage" in name or "kl" in name or "entropy" in name]
    assert len(said) > 8 and all(metrics[name] == pytest.approx(usual[name], rel=1e-5) for name in said)


@pytest.mark.slow
def test_the_critic_learns_the_returns_and_a_scale_of_zero_moves_nothing(episodes):
    e = episodes
    state, metrics, before = learn(e, "method=ppo", scale=0.0)
    returns = np.asarray(CASES["ppo"][2](e).returns)[e.mask]
    assert metrics["critic/loss"] == pytest.approx((returns**2).mean() / 2, rel=1e-5)
    assert metrics["critic/explained"] == pytest.approx(1 - (returns**2).mean() / returns.var(), rel=1e-4)
    bias = optax.tree.get(state.critic.opt_state, "mu")["value"]["bias"]
    assert bias == pytest.approx(0.1 * -returns.mean(), rel=1e-5)
    for now, then in ((state.params, before.params), (state.critic.params, before.critic.params)):
        jax.tree.map(np.testing.assert_array_equal, now, then)


@pytest.mark.parametrize(
    ("method", "level"),
    [
        ("hgpo", "token"),
        pytest.param("gspo", "sequence", marks=pytest.mark.slow),
    ],
)
def test_what_another_policy_sampled_is_weighted(episodes, method, level):
    """The ratio is to this policy, not to the sampler, whose probabilities only enter the weights."""
    e, (_, aggregate, expected) = episodes, CASES[method]
    happened, lengths = e.mask, e.response_lengths[e.mask]
    tokens = np.arange(R) < lengths[:, None]
    cap, difference = 2.0, np.random.default_rng(2).normal(0, 0.5, tokens.shape) * tokens  # log p - log q
    logp = e.logp.copy()
    logp[happened] -= difference
    fields = (f"method={method}", f"learner.rollout_correction={level}")
    state, metrics, _ = learn(e.replace(logp=logp), *fields)
    ratio = np.exp(difference if level == "token" else np.broadcast_to(difference.sum(1, keepdims=True), tokens.shape))
    weights = AGGREGATES[aggregate](np.asarray(expected(e).advantages)[happened], tokens, lengths) * np.minimum(ratio, cap)
    assert_first_gradient(state, e, weights)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logp_difference"] == pytest.approx(np.abs(difference).max(), rel=1e-3)
    counted = ratio[tokens] if level == "token" else ratio[:, 0]
    assert metrics["correction/weight"] == pytest.approx(np.minimum(counted, cap).mean(), rel=1e-4)
    assert metrics["correction/truncated"] == pytest.approx((counted > cap).mean(), rel=1e-4) and (counted > cap).any()


@pytest.mark.slow
def test_what_another_policy_sampled_too_differently_is_masked(episodes):
    """The ratio is that to the sampler, and what does not count stays in the denominator."""
    e, happened = episodes, episodes.mask
    lengths = e.response_lengths[happened]
    tokens = np.arange(R) < lengths[:, None]
    difference = np.random.default_rng(2).normal(0, 0.3, tokens.shape) * tokens  # log p - log q
    logp = e.logp.copy()
    logp[happened] -= difference
    limits = ("learner.mask_token=0.3", "learner.mask_response=0.2", "learner.clip_low=0.1", "learner.clip_high=0.1")
    state, metrics, _ = learn(e.replace(logp=logp), "method=hgpo", "learner.rollout_correction=mask", *limits)
    ratio, mean = np.exp(difference), np.exp(difference.sum(1, keepdims=True) / lengths[:, None])
    kept = (np.abs(ratio - 1) < 0.3) & (np.abs(mean - 1) < 0.2) & tokens
    A = np.asarray(estimated(e, "hgpo").advantages)[happened]
    clipped = np.where(A[:, None] > 0, ratio > 1.1, ratio < 0.9)
    weights = AGGREGATES["token-mean"](A, tokens, lengths) * ratio * kept * ~clipped
    assert 0 < (kept & clipped).sum() < kept.sum() < tokens.sum()
    assert_first_gradient(state, e, weights)
    assert metrics["correction/weight"] == pytest.approx(kept.sum() / tokens.sum())
    assert metrics["ratio"] == pytest.approx(ratio[tokens].mean(), rel=1e-4)


@pytest.mark.slow  # one more program to compile
def test_the_loss_sees_the_parameters_in_the_computing_type(episodes):
    """bfloat16 rounds log-probabilities in their third digit; what is trained stays float32."""
    state, metrics, _ = learn(episodes, "method=hgpo", "policy.compute_dtype=bfloat16")
    assert 1e-3 < metrics["logp_difference"] < 0.1
    assert {str(a.dtype) for a in jax.tree.leaves(state.params)} == {"float32"}


@pytest.mark.slow
def test_a_difference_to_the_sampler_is_seen_on_whichever_device_it_falls(episodes):
    e = episodes
    for b, t in np.argwhere(e.mask):
        logp = e.logp.copy()
        logp[b, t, 0] -= 0.5
        _, metrics, _ = learn(e.replace(logp=logp), "method=hgpo", "learner.microbatch_size=2", devices=2)
        assert metrics["logp_difference"] == pytest.approx(0.5, abs=1e-4)


def chat(e: Episodes) -> Episodes:
    """The episodes with responses of one token, after each of which the next prompt goes on."""
    texts = np.random.default_rng(1).integers(1, WORDS, (B, P + T))
    lengths, one = (1 + np.arange(T)) * e.mask, 1 * e.mask
    at = lengths[..., None]
    return e.replace(
        prompts=np.where(np.arange(P) < at, texts[:, None, :P], 0), prompt_lengths=lengths, response_lengths=one,
        responses=np.where(np.arange(R) < one[..., None], np.take_along_axis(texts[:, None], at, 2), 0),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hgpo", "ppo"])
def test_a_chat_teaches_what_its_turns_teach(episodes, method):
    fields = (f"method={method}", *["learner.rollout_correction=token"] * (method == "hgpo"))  # programs that others compile
    e = chat(episodes)
    chatted, metrics, _ = learn(e, *fields, "env.name=household_text", "env.template=conversation")
    apart, expected, _ = learn(e, *fields)
    assert metrics.pop("conversation/turns") == pytest.approx(e.mask.sum() / B)
    longest = (e.prompt_lengths + e.response_lengths).max(1).sum()
    assert metrics.pop("conversation/token_share") == pytest.approx(longest / (e.prompt_lengths + e.response_lengths).sum())
    for name in expected:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    moments = (optax.tree.get(state.opt_state[SHARED], "mu") for state in (chatted, apart))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *moments)


def test_an_epochs_order_keeps_a_chat_together_and_decisions_without_one_where_they_were():
    chain, happened = np.array([0, 1, 1, 3, 0, 1, 6, 3]), np.arange(8) != 5
    order, count = _shuffle(jax.random.key(0), happened, chain)
    assert count == 7 and order[7] == 5
    assert [list(map(int, some)) for _, some in itertools.groupby(order[:7], lambda decision: chain[decision])] in [
        list(chats) for chats in itertools.permutations([[0, 4], [1, 2], [3, 7], [6]])
    ]
    alone, _ = _shuffle(jax.random.key(0), happened, np.arange(8))
    np.testing.assert_array_equal(alone, _shuffle(jax.random.key(0), happened, None)[0])
