"""Roles with weights, templates, answer lengths and optimizers of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.config import load
from hgpo_jax.config.choices import ROLES
from hgpo_jax.config.policies import SHARED, config_of, policy_of_each, roles_by_policy
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import network
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.backend import role_names
from hgpo_jax.rollout.environments import ENVIRONMENTS
from hgpo_jax.setup import memory
from hgpo_jax.setup.build import build, make_policies
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import loop
from hgpo_jax.trainer import step as iteration
from hgpo_jax.trainer.behavior_cloning import demonstrations
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.byte_policy import byte_policy
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY, command, rows_of

# Of the first updates, which are looked at, a long warm-up would leave little.
TEAM = (*TINY, "env.name=household_team", "env.max_turns=7", "learner.minibatch_size=1024", "learner.warmup_steps=5")
OWN = "roles.searcher.policy=own"
# The searcher trains adapters, at ten times the carrier's rate, and the carrier all of its weights.
APART = ("roles.searcher.lora_rank=2", "roles.searcher.lr=2e-2")


def job_of(*fields, cache):
    return build(load(None, [*TEAM, *fields, f"cache_dir={cache}"]), mesh_of())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with jax.set_mesh(mesh_of()):  # which a job sets for good
        yield tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shared(cache):
    return job_of(cache=cache)


@pytest.fixture(scope="module")
def apart(cache):
    return job_of(*APART, cache=cache)


LEARN: dict = {}  # by the id of each job: itself, `make_train_step`, compiled once, and what its given weights play


def episodes_of(job, params):
    (episodes, _), _, _ = iteration.sample(job, job.base_rollout_params(params), 0)
    return jax.device_get(episodes)


def trained(job, role=None, change=lambda episodes: episodes):
    """(The state before an update, after it, and its metrics.)"""
    if id(job) not in LEARN:
        LEARN[id(job)] = job, iteration.make_train_step(job), episodes_of(job, job.given_params)
    _, (learn, init), episodes = LEARN[id(job)]
    state = init(job.given_params)
    before = jax.device_get(state)
    # Random rewards: a policy that knows nothing never wins.
    rewards = np.where(episodes.mask, np.random.default_rng(0).random(episodes.mask.shape), 0).astype(np.float32)
    reference = job.reference_copy(job.given_params)
    role = None if role is None else jnp.int32(role)
    after, metrics = learn(state, reference, change(episodes.replace(rewards=rewards)), job.key(0, 1), jnp.float32(1), role)
    return before, jax.device_get(after), jax.device_get(metrics)


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def step(before, after, name: str) -> np.ndarray:
    """What an update added to a set of weights."""
    pairs = zip(jax.tree.leaves(after.params[name]), jax.tree.leaves(before.params[name]), strict=True)
    return np.concatenate([np.ravel(new - old) for new, old in pairs])


def test_sets_of_weights_are_named_by_their_roles():
    roles = ("a", "b", "c")
    config = lambda **fields: load().model_copy(update={"roles": {  # noqa: E731
        role: load(None, ["env.name=household_team", f"roles.searcher.{field}"]).roles["searcher"]
        for role, field in fields.items()
    }})  # fmt: skip
    assert roles_by_policy(config(), roles) == roles_by_policy(config(b="lr=1"), roles) == {SHARED: roles}
    assert roles_by_policy(config(b="policy=own"), roles) == {"a+c": ("a", "c"), "b": ("b",)}
    assert policy_of_each(config(b="policy=own"), roles) == ("a+c", "b", "a+c")
    assert policy_of_each(config(a="lora_rank=4", b="policy=own"), roles) == ("a", "b", "c")
    some = config(a="lr=1", b="policy=folder", c="lora_rank=4")
    assert config_of(some, "a").learner == some.learner.model_copy(update={"lr": 1})
    assert config_of(some, "b").policy.source == "folder" and config_of(some, "b").learner == some.learner
    assert config_of(some, "c").lora.rank == 4 and config_of(some, "a+b") is some


def test_the_roles_of_our_environments_are_known_before_they_are_made(tmp_path):
    names = [name for name in ENVIRONMENTS if name.startswith(("household", "math", "search"))]
    made = {name: role_names(load(None, [f"env.name={name}", f"cache_dir={tmp_path}"])) for name in names}
    assert {name: roles for name, roles in made.items() if len(roles) > 1} == ROLES


REFUSED = [
    (["roles.searcher.policy=own"], "roles.searcher.policy=own: env.name=household has no roles; leave it out"),
    (["env.name=household_team", "roles.serchr.lr=1"], "roles.serchr.lr=1.0: env.name=household_team has no such role; did you "
     "mean searcher?"),
    (["env.name=household_team", "roles.searcher.lrr=1"], "roles.searcher.lrr=1: no such field; did you mean roles.searcher."),
    (["env.name=household_team", "roles={searcher: {lrr: 1}}"], "roles.searcher.lrr=1: no such field; did you mean "
     "roles.searcher.lr?"),
    (["env.name=household_team", "roles.searcher.lr=-1"], "roles.searcher.lr=-1: must be greater than 0"),
    (["env.name=household_team", "roles.searcher.lora_rank=true"], "roles.searcher.lora_rank=True: true and false are not"),
    (["env.name=household_team", "roles.searcher=3"], "roles.searcher=3: is a section; its fields are"),
    (["roles.a b.lr=1"], "roles.a b.lr=1: no such field"),
]  # fmt: skip
REFUSED_TOGETHER = [
    (["roles.searcher.lr=1e-3"], "roles.searcher.lr=0.001: it shares its policy, whose rate is learner.lr; give "
     "roles.searcher.policy=own, too"),
    (["roles.searcher.lora_rank=2"], "roles.searcher.lora_rank=2: LoRA needs base weights; give policy=, too"),
    (["roles.searcher.lora_rank=2", "policy=x", "cloning.optimizer=muon"], "roles.searcher.lora_rank=2: cloning.optimizer="),
    (["env.name=hgpo_jax.envs.household:HouseholdTeam", "roles.serchr.policy=own"], "roles.serchr.policy=own: "
     "env.name=hgpo_jax.envs.household:HouseholdTeam has no such role; did you mean searcher?"),
    (["env.name=hgpo_jax.envs.household:Household", "warm_start=none", "roles.a.policy=own"], "roles.a.policy=own: "
     "env.name=hgpo_jax.envs.household:Household has no roles; leave it out"),
    ([OWN, "method=ppo"], "roles.searcher.policy=own: method=ppo has one critic, for a policy that all roles share"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), [*REFUSED, *REFUSED_TOGETHER])
def test_refusals(fields, message):
    with refused(message, ConfigError):
        check_together(load(None, fields if (fields, message) in REFUSED else ["env.name=household_team", *fields]))


@pytest.mark.slow
def test_equal_weights_apart_sample_what_they_sample_together(shared, apart):
    ours, theirs = (episodes_of(job, job.given_params) for job in (apart, shared))
    assert set(ours.agents[ours.mask]) == {0, 1}
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_each_role_samples_with_its_own_weights(apart):
    params = dict(apart.given_params)
    params["searcher"] = jax.tree.map(lambda a: 1.5 * a, params["searcher"])
    e = episodes_of(apart, params)
    batch = iteration.training_batch(e)
    batch = batch.replace(prompt_lengths=np.maximum(batch.prompt_lengths, 1))
    logprobs = jax.jit(lambda params: token_logprobs(nnx.merge(network(apart.policies["carrier"].model), params), batch)[0])
    logp = {name: logprobs(of) for name, of in params.items()}
    for role, (name, other) in enumerate((("searcher", "carrier"), ("carrier", "searcher"))):
        own = (e.mask & (e.agents == role)).reshape(-1)
        np.testing.assert_allclose(logp[name][own], batch.old_logp[own], atol=1e-4)
        assert np.abs(logp[other][own] - batch.old_logp[own]).max() > 0.1


def test_a_role_learns_from_its_own_turns_alone(apart):
    """And the other's weights stay as they are. What its turns say does not reach the role that learns."""

    def change(role):
        return lambda e: e.replace(logp=np.where((e.agents == role)[..., None], e.logp + 0.3, e.logp))

    largest = {}
    for role, (own, other) in enumerate((("searcher", "carrier"), ("carrier", "searcher"))):
        before, after, metrics = trained(apart, role)
        _, alike, _ = trained(apart, role, change(1 - role))
        _, changed, _ = trained(apart, role, change(role))
        for part in ("params", "opt_state"):
            then, now, same_as_now, others = (getattr(state, part) for state in (before, after, alike, changed))
            assert same(then[other], now[other]) and not same(then[own], now[own])
            assert same(same_as_now, now) and not same(others[own], now[own])
        largest[own] = np.abs(step(before, after, own)).max()
        assert np.isnan(metrics[f"by_role/kl/{other}"]) and np.isfinite(metrics[f"by_role/kl/{own}"])
        assert np.isfinite(metrics["kl"]) and metrics["logp_difference"] < 1e-4
        assert (metrics["optimizer_steps"], metrics["nonfinite_steps"]) == (1, 0)
    # Adam's first step is the learning rate, a fifth of it in the warm-up, wherever the gradient is far from 0.
    assert largest == pytest.approx({"searcher": 4e-3, "carrier": 4e-4}, rel=0.02)
    # A set of weights without a turn stays as it is.
    before, after, _ = trained(apart, 1, lambda e: e.replace(agents=np.zeros_like(e.agents)))
    assert same(before, after)


def test_adapters_of_their_own_stand_beside_one_copy_of_the_weights(apart, cache):
    job = job_of("roles.searcher.lora_rank=2", "roles.carrier.lora_rank=4", cache=cache)
    for of, ranks in ((job, {"searcher": 2, "carrier": 4}), (apart, {"searcher": 2, "carrier": None})):
        assert {name: one.model.lora and one.model.lora.rank for name, one in of.policies.items()} == ranks
        reference = of.reference_copy(of.given_params)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, reference.values()), strict=True))
    _, after, _ = trained(apart, 0)
    merged = apart.merged_params(after.params, reference)
    assert same(*map(jax.tree.structure, merged.values())) and not same(merged["searcher"], reference["searcher"])
    assert same(merged["carrier"], after.params["carrier"])
    alone = {"searcher": jax.tree.map(jnp.copy, reference["searcher"]), "carrier": reference["carrier"]}
    shared = dict.fromkeys(("searcher", "carrier"), jax.tree.map(jnp.copy, reference["searcher"]))
    for base, used_up in ((shared, False), (alone, True)):  # the carrier comes after the searcher
        again = apart.merged_params(after.params, base, donate=True)
        assert same(again["searcher"], merged["searcher"])
        assert any(a.is_deleted() for a in jax.tree.leaves(base["searcher"])) == used_up
    both = dict.fromkeys(("searcher", "carrier"), jax.tree.map(jnp.copy, reference["searcher"]))
    adapters = job.by_policy(PolicySetup.trainable, both)
    assert same(*job.merged_params(adapters, both, donate=True).values())
    assert any(a.is_deleted() for a in jax.tree.leaves(both["searcher"]))


@pytest.mark.slow  # jobs to build
def test_what_is_compiled_ahead_is_described_without_copies(apart, cache):
    job = job_of("roles.searcher.lora_rank=2", "roles.carrier.lora_rank=4", cache=cache)
    alone = job_of("learner.kl_weight=0", "roles.searcher.lora_rank=2", cache=cache)
    half = dataclasses.replace(alone, policies={
        name: dataclasses.replace(one, settings=load(None, [*TEAM, "policy.compute_dtype=bfloat16"]))
        for name, one in alone.policies.items()
    })  # fmt: skip
    for of in (job, apart, alone, half):
        given = loop.describe(of.given_params)
        for call in (Job.reference_copy, Job.base_rollout_params):
            made, described = call(of, of.given_params), loop.describe(call(of, given))
            assert jax.tree.structure(made) == jax.tree.structure(described)
            for a, like in zip(*map(jax.tree.leaves, (made, described)), strict=True):
                assert (a.shape, a.dtype) == (like.shape, like.dtype) and a.sharding.is_equivalent_to(like.sharding, a.ndim)
    assert [one is None for one in alone.reference_copy(alone.given_params).values()] == [False, True]  # nothing would read it


@pytest.mark.slow  # one more update to compile
def test_each_set_of_adapters_is_corrected_for_its_own_sampler(cache):
    """The searcher's tokens as if drawn with a third of their probability: weights of 3, cut to 2, and the carrier's of 1."""
    adapters = ("roles.searcher.lora_rank=2", "roles.carrier.lora_rank=4")
    job = job_of(*adapters, "learner.rollout_correction=token", cache=cache)
    turns = {}

    def rarer(episodes):
        mine = episodes.mask & (episodes.agents == 0)
        turns.update(mine=mine.sum(), all=episodes.mask.sum())
        tokens = np.arange(episodes.logp.shape[-1]) < episodes.response_lengths[..., None]
        return episodes.replace(logp=episodes.logp - np.log(3) * (tokens & mine[..., None]).astype(np.float32))

    before, after, metrics = trained(job, change=rarer)
    assert metrics["optimizer_steps"] == 2 and metrics["by_role/grad_norm/searcher"] != metrics["by_role/grad_norm/carrier"]
    share = turns["mine"] / turns["all"]
    assert 0.2 < share < 0.8
    assert metrics["correction/truncated"] == pytest.approx(share, abs=1e-5)
    assert metrics["correction/weight"] == pytest.approx(1 + share, abs=1e-4)
    assert metrics["ratio"] == pytest.approx(1, abs=0.05) and metrics["logp_difference"] == pytest.approx(np.log(3), abs=1e-3)
    _, usual, uncorrected = trained(job_of(*adapters, cache=cache))
    carrier = [step(before, state, "carrier") for state in (after, usual)]
    np.testing.assert_allclose(*carrier, atol=1e-5)
    assert np.abs(carrier[0]).max() > 1e-4
    growth = [metrics[f"by_role/grad_norm/{role}"] / uncorrected[f"by_role/grad_norm/{role}"] for role in job.runner.roles]
    assert growth == pytest.approx([2, 1], rel=0.05)  # the entropy bonus is not weighted


@pytest.mark.slow  # one more update to compile
def test_state_in_host_memory_gives_the_same(apart, cache):
    _, usual, _ = trained(apart, 0)
    _, offloaded, _ = trained(job_of(*APART, "learner.offload=true", cache=cache), 0)
    jax.tree.map(np.testing.assert_array_equal, offloaded, usual)


def test_what_experts_do_is_labelled_with_its_role(shared):
    shared = dataclasses.replace(shared, config=load(None, [*TEAM, "cloning.episodes=8"]))
    decisions, _ = demonstrations(shared, jnp.arange(8))
    happened = decisions.response_lengths > 0
    searcher = shared.runner.env.words.index("searcher")
    spoken_to = (decisions.prompts == searcher).any(1)
    np.testing.assert_array_equal((decisions.agents == 0)[happened], spoken_to[happened])


def test_memory_of_several_sets():
    mesh = mesh_of()
    config, both = load(None, list(TEAM)), load(None, [*TEAM, OWN])
    one, two = memory.bytes_of_run(config, mesh), memory.bytes_of_run(both, mesh)
    assert one == memory.bytes_by_phase(config, mesh, memory.workload_of(config, mesh))
    assert two["always"]["parameters"] == 2 * one["always"]["parameters"]
    assert two["always"]["episodes"] == one["always"]["episodes"] and two["update"]["gradients"] == one["update"]["gradients"]
    adapters = [*TEAM, "roles.searcher.lora_rank=2", "roles.carrier.lora_rank=2"]
    beside = memory.bytes_of_run(load(None, adapters), mesh)["always"]["reference policy"]
    assert beside == one["always"]["reference policy"]
    alone = memory.bytes_of_run(load(None, [*adapters, "policy=Qwen/Qwen2.5-0.5B-Instruct", "warm_start=none"]), mesh)
    assert alone["loading"]["weights in float32"] == 2 * alone["always"]["reference policy"]  # one is merged, then the other


TEXT = (
    "env.name=household_team_text", "policy.num_key_value_heads=1", "rollout.prompt_limit=256", "env.max_turns=6",
)  # fmt: skip


def test_answers_that_do_not_fit_are_refused(cache):
    with pytest.raises(ConfigError, match=r"^rollout\.response_limit=2: the commands take up to \d+ tokens; give as"):
        job_of(*TEXT, "rollout.response_limit=2", cache=cache)


def test_in_a_compiled_environment_another_tokenizer_is_refused(shared, tmp_path):
    def sets(source):
        return make_policies(load(None, [*TEAM, f"roles.searcher.policy={source}"]), shared.policy.initial, shared.mesh, None)

    given = dataclasses.replace(shared.policy.initial, tokenizer=word_tokenizer(["other"]))
    for name, policy in (("mine", shared.policy.initial), ("other", given)):
        policy.save(tmp_path / name)
    with pytest.raises(ConfigError, match=r"^roles\.searcher\.policy=\S*other: has another tokenizer than .*text on"):
        sets(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^roles\.searcher\.policy=nowhere: "):
        sets("nowhere")
    assert same(*(jax.device_get(policy.initial.params) for policy in sets(tmp_path / "mine").values()))


@pytest.fixture(scope="module")
def strangers(cache):
    """A team whose searcher is larger and reads bytes, while the carrier's tokens are the words of the environment."""
    policy = byte_policy()
    policy.save(cache / "bytes")
    fields = (
        "env.template=plain", "rollout.prompt_limit=448", "rollout.response_limit=16", "policy.num_key_value_heads=1",
        "env.max_turns=4",
    )  # fmt: skip
    return job_of("env.name=household_team_text", f"roles.searcher.policy={cache / 'bytes'}", *fields, cache=cache)


@pytest.mark.slow  # two updates to compile
def test_roles_of_different_tokenizers_read_and_learn_in_their_own(strangers):
    before, after, metrics = trained(strangers)
    e = episodes_of(strangers, strangers.given_params)
    tokenizers = {name: policy.initial.tokenizer for name, policy in strangers.policies.items()}
    words, own = tokenizers["carrier"], tokenizers["searcher"]
    assert strangers.policies["searcher"].model.vocab_size != strangers.policies["carrier"].model.vocab_size
    for role, tokenizer in enumerate((own, words)):
        (b, t) = np.argwhere(e.mask & (e.agents == role))[0]
        text = tokenizer.decode(e.prompts[b, t, : e.prompt_lengths[b, t]])
        assert strangers.runner.roles[role] in text and ("<|im_start|>" in text) == (tokenizer is own)
    # What the samplers say of their tokens, the updates say, too, and both learn.
    assert metrics["logp_difference"] < 1e-4 and metrics["nonfinite_steps"] == 0
    assert all(np.abs(step(before, after, name)).max() > 0 for name in ("searcher", "carrier"))
    ended = np.take_along_axis(e.responses, np.maximum(e.response_lengths - 1, 0)[..., None], axis=2)[..., 0]
    ends = np.where(e.agents == 0, own.eos_token_id, words.eos_token_id)
    assert metrics["unfinished_share"] == pytest.approx((ended != ends)[e.mask].mean())


@pytest.mark.slow
def test_what_experts_do_is_told_each_role_in_its_own_tokens(strangers):
    decisions, _ = demonstrations(strangers, jnp.arange(4))
    for role, name in enumerate(("searcher", "carrier")):
        tokenizer = strangers.policies[name].initial.tokenizer
        for at in np.flatnonzero(np.asarray(decisions.agents) == role):
            answer = tokenizer.decode(decisions.responses[at, : decisions.response_lengths[at]], skip_special_tokens=True)
            prompt = tokenizer.decode(decisions.prompts[at, : decisions.prompt_lengths[at]])
            assert answer.strip() and name in prompt


@pytest.mark.slow
def test_trains_end_to_end(tmp_path):
    """Cloned, trained, and evaluated again from what was saved."""
    fields = [*TINY, "env.name=household_team_text", "env.max_turns=6", "iterations=2", "warm_start=cloning",
              "cloning.episodes=16", "cloning.max_steps=20", "cloning.check_every=10", f"cache_dir={tmp_path / 'cache'}", OWN,
              "rollout.prompt_limit=254", "rollout.decode_batch_size=1", "rollout.response_limit=16"]  # fmt: skip
    said = command("-m", "hgpo_jax.train", *fields, "run_dir=run", cwd=tmp_path).stdout
    assert "loss searcher" in said and "loss carrier" in said
    for row in rows_of(tmp_path / "run"):
        assert row["logp_difference"] < 1e-4 and row["by_role/grad_norm/searcher"] > 0
    before = (tmp_path / "run" / "evaluation.json").read_text()
    command("-m", "hgpo_jax.evaluate", "run", cwd=tmp_path)
    assert (tmp_path / "run" / "evaluation.json").read_text() == before
