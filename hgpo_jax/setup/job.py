"""What every command works with: the mesh, the policies and how they are trained, the runner of episodes, the rewards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.methods import Method, method_named
from hgpo_jax.policy import ModelConfig, Policy, lora
from hgpo_jax.policy.placement import cast, place, shardings_like, storage_shardings
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.rollout.partial_rollout import PartialRollout
from hgpo_jax.rollout.rewards import Reward, TextReward
from hgpo_jax.rollout.runners import CompiledRunner, TextRunner
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.agent_rollout import AgentRunner

Runner = CompiledRunner | TextRunner | AgentRunner
MAX_TRIES = 4  # rollouts of an iteration at most, where a method drops prompt groups with equal rewards


@dataclasses.dataclass(frozen=True)
class PolicySetup:
    """One of a run's policies, and how it is trained.

    name: that of `config/policies.py`.
    settings: the run's configuration with what the policy's roles change in it.
    initial: the initial weights, random unless pretrained ones are configured; training keeps its own copy.
    model: the sizes of the network that samples and learns, with the adapters that LoRA adds to the initial weights.
    rollout_mesh: where rollouts read the parameters; None: where they are learned.
    """

    name: str
    settings: Config
    mesh: Mesh
    initial: Policy
    model: ModelConfig
    rollout_mesh: Mesh | None = None

    def trainable(self, params) -> dict:
        """Returns what training changes: a copy of the weights, or with LoRA adapters that change nothing yet."""
        if self.model.lora:
            return lora.initialize(self.model, self.settings.start_seed, self.mesh)
        return jax.tree.map(jnp.copy, params)

    def rollout_params(self, trained, reference) -> dict:
        """Returns a rollout's parameters: the trained weights, or with LoRA the reference policy's with trained adapters."""
        return self._on_rollout_mesh(self.compute_copy(lora.bind(reference, trained) if self.model.lora else trained))

    def sampling_copy(self, trained) -> dict:
        """Returns what `rollout_params` reads of the trained weights, in memory of its own: an update donates them."""
        copy = jax.tree.map(lambda cast, a: jnp.copy(a) if cast is a else cast, self.compute_copy(trained), trained)
        return self._on_rollout_mesh(copy)

    def _on_rollout_mesh(self, params) -> dict:
        """Moves parameters to the mesh of the rollouts; what is there is not copied."""
        if self.rollout_mesh is None:
            return params
        return place(params, shardings_like(params, self.model, self.rollout_mesh))

    def merged_params(self, trained, reference, donate: bool = False) -> dict:
        """Returns the weights of an equivalent policy without adapters.

        reference: the weights that the adapters adapt, in float32: a shorter type would round small changes away.
        donate: whether their memory is free to be used.
        """
        return lora.merge(self.model, reference, trained, donate=donate) if self.model.lora else trained

    def save(self, params, folder: Path) -> None:
        """Writes a policy with these weights to a folder. Raises ValueError if it cannot be written."""
        Policy(self.initial.config, params, self.initial.tokenizer).save(folder)

    def compute_copy(self, params):
        """Casts the parameters to `policy.compute_dtype`, for sampling and the loss; arrays of that type are not copied.

        Of descriptions of arrays (`jax.ShapeDtypeStruct`), returns those of the result.
        """
        dtype = self.settings.policy.compute_dtype
        leaves, structure = jax.tree.flatten(params)
        others = [a for a in leaves if a.dtype != dtype]
        if not others:
            return params
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):  # beside adapters, which are arrays
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype, sharding=a.sharding), params)
        # An array that passes through jit is copied: with LoRA, the whole reference policy if its adapters have another type.
        cast_ones = iter(_cast(others, dtype))
        return jax.tree.unflatten(structure, [a if a.dtype == dtype else next(cast_ones) for a in leaves])


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything built from a Config: mesh, policies, environment, rollout, rewards.

    mesh: that of the updates and, unless there is a `rollout_mesh`, of the rollouts.
    policies: by name, one unless roles have policies of their own (`config/policies.py`). Parameters are dicts by these names.
    tokenizer: that of policy=; on the host, policies of roles may have others (`PolicySetup.initial`).
    runner: makes rollouts in the configured environment.
    reward: adds the rewards of the configured reward function to the result of a training rollout.
    """

    config: Config
    mesh: Mesh
    policies: dict[str, PolicySetup]
    tokenizer: Any  # of transformers
    runner: Runner
    reward: Reward | None = None
    rollout_mesh: Mesh | None = None

    @property
    def policy(self) -> PolicySetup:
        """The policy of a run with one. Raises KeyError if there are several."""
        return self.policies[SHARED]

    def by_policy(self, call: Callable, *trees: dict[str, Any]) -> dict[str, Any]:
        """Returns by name the results of `call(policy, *trees)`, with each policy's part of the trees."""
        return {name: call(policy, *(tree[name] for tree in trees)) for name, policy in self.policies.items()}

    def on_rollout_mesh(self):
        """Returns a context in which arrays are made, and programs run, on the mesh of the rollouts."""
        return contextlib.nullcontext() if self.rollout_mesh is None else jax.set_mesh(self.rollout_mesh)

    def to_update(self, episodes: Episodes) -> Episodes:
        """Moves episodes from the mesh of the rollouts to that of the updates, on every device of it."""
        if self.rollout_mesh is None:
            return episodes
        return jax.device_put(episodes, NamedSharding(self.mesh, PartitionSpec()))

    @functools.cached_property
    def partial(self) -> PartialRollout | None:
        """Makes the training rollouts in which unfinished episodes of the last one go on; None: there are none."""
        settings = self.config.rollout
        if settings.keep == 1:
            return None
        assert isinstance(self.runner, TextRunner) and isinstance(self.runner.train, HostRollout)
        return PartialRollout(self.runner.train, settings.keep, self.episode_inputs, settings.group_size)

    def close(self) -> None:
        """Ends the processes of environments and reward functions."""
        self.runner.close()
        if isinstance(self.reward, TextReward):
            self.reward.close()

    @property
    def given_params(self) -> dict[str, dict]:
        """The initial weights."""
        return self.by_policy(lambda policy: policy.initial.params)

    @property
    def batch(self) -> int:
        """Episodes per rollout."""
        return self.config.rollout.prompt_groups * self.config.rollout.group_size

    @property
    def adapted(self) -> bool:
        """Whether any policy trains adapters."""
        return any(policy.model.lora for policy in self.policies.values())

    def rollout_params(self, trained, reference) -> dict[str, dict]:
        """Returns `PolicySetup.rollout_params` of each policy."""
        return self.by_policy(PolicySetup.rollout_params, trained, reference)

    def merged_params(self, trained, reference, donate: bool = False) -> dict[str, dict]:
        """Returns `PolicySetup.merged_params` of each policy. donate: the last one that adapts some weights uses them up."""
        last = {id(weights): name for name, weights in reference.items()}
        return self.by_policy(
            lambda policy, own, base: policy.merged_params(own, base, donate and last[id(base)] == policy.name),
            trained,
            reference,
        )

    def rollout_reference(self, reference) -> dict[str, dict]:
        """Returns what `rollout_params` reads of the reference policies, on the mesh of the rollouts: the weights that adapters
        adapt, one copy of those that several policies share."""
        if self.rollout_mesh is None:
            return reference
        moved: dict[int, dict] = {}

        def of_policy(policy: PolicySetup, params):
            if not policy.model.lora:
                return params
            if id(params) not in moved:
                moved[id(params)] = policy._on_rollout_mesh(params)
            return moved[id(params)]

        return self.by_policy(of_policy, reference)

    def base_rollout_params(self, params) -> dict[str, dict]:
        """Returns a rollout's parameters for weights without adapters."""

        def unchanged(policy: PolicySetup, params):
            return policy.rollout_params(policy.trainable(params) if policy.model.lora else params, params)

        return self.by_policy(unchanged, params)

    def reference_copy(self, params) -> dict[str, dict | None]:
        """Returns `compute_copy` of the reference policies; with learner.offload, but not with LoRA, in the host's memory.

        A policy without a KL and without adapters has None: nothing would read it.
        """
        copies: dict[int, dict] = {}  # of weights that the adapters of several policies share

        def copy_of(policy: PolicySetup, params):
            settings = policy.settings.learner
            if not settings.kl_weight and not policy.model.lora:
                return None
            if not settings.offload or policy.model.lora:  # sampling binds adapters to it
                if id(params) not in copies:
                    copies[id(params)] = policy.compute_copy(params)
                return copies[id(params)]
            copy = policy.compute_copy(params)
            return place(copy, storage_shardings(copy, policy.model, policy.mesh, offload=True))

        return self.by_policy(copy_of, params)

    @property
    def method(self) -> Method:
        """The method that `method=` names."""
        return method_named(self.config.method)

    def learning_role(self, iteration: int) -> int | None:
        """Returns the index of the role that an iteration trains; None if it trains all roles (`Method.alternate`)."""
        every, roles = self.method.alternate, len(self.runner.roles)
        return iteration // every % roles if every and roles > 1 else None

    def episode_inputs(self, iteration: int, attempt: int = 0) -> tuple:
        """Returns the inputs of a rollout besides the parameters for one training iteration.

        Equal seed, iteration and attempt give equal inputs; further attempts (dynamic sampling) get different tasks. If a role
        other than the first one learns, the members of a prompt group share the random key of their first turn. They then
        differ only in the outcome of one and the same plan.
        """
        settings = self.config.rollout
        groups = jnp.arange(self.batch, dtype=jnp.int32) // settings.group_size
        number = iteration * MAX_TRIES + attempt if self.method.dynamic_sampling else iteration
        tasks = self.runner.select_tasks("train", self.config.seed, number * settings.prompt_groups + groups)
        keys = jax.random.split(self.key(number, 0), self.batch)
        if (role := self.learning_role(iteration)) is not None:  # one shape for all iterations: another would recompile
            keys = jnp.stack([keys[groups * settings.group_size] if role else keys, keys], axis=1)
        return tasks, keys, groups, Decoding(temperature=settings.temperature)

    @property
    def signals(self) -> tuple[str, ...]:
        """The names of the signals in `Episodes.signals`: the environment's, then the reward function's."""
        return (*self.runner.signals, *(self.reward.signals if isinstance(self.reward, TextReward) else ()))

    def abstract_episodes(self) -> Episodes:
        """Returns the shapes of one iteration's episodes without computing anything."""
        params = jax.eval_shape(self.base_rollout_params, self.given_params)
        with self.on_rollout_mesh():
            e = self.runner.abstract_episodes(params, self.episode_inputs(0))
        if not self.signals:
            return e
        return e.replace(signals=jax.ShapeDtypeStruct((*e.mask.shape, len(self.signals)), jnp.float32))

    def key(self, iteration: int, purpose: int):
        """Returns the random key of an iteration for one purpose (0 sampling, 1 shuffling)."""
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), iteration), purpose)


_cast = jax.jit(cast, static_argnums=1)
