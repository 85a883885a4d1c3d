"""Runners, which make rollouts in the configured environment: compiled together with the policy, or as text on the host."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hgpo_jax.config import Config
from hgpo_jax.config.policies import SHARED, policy_of_each
from hgpo_jax.envs.protocol import CompiledEnv, ListsGames, OwnPrompts, Plans, TextExpert
from hgpo_jax.policy import ModelConfig, network
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.pictures import grid_of, picture_tokens
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.rollout.backend import backend, converses
from hgpo_jax.rollout.chat_prompts import ChatFormat, PromptInput, load_template
from hgpo_jax.rollout.compiled import EpisodeState, Program, make_continuations, make_rollout, parse_answer, replay
from hgpo_jax.rollout.compiled_text_rollout import CompiledTextRollout
from hgpo_jax.rollout.env_tokenizer import template_of
from hgpo_jax.rollout.environments import Environment
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.requirements import check_compiled, check_lists_actions, roles_of
from hgpo_jax.rollout.result import RolloutResult, Story, told_turns
from hgpo_jax.rollout.signals import declared
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.workers import opened
from hgpo_jax.sampling.constraint import words_of
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.utils.errors import ConfigError, RunError

log = logging.getLogger(__name__)


def networks(models: dict[str, ModelConfig]) -> dict:
    """Returns the graph definition of each policy's network by name."""
    return {name: network(model) for name, model in models.items()}


def check_context(config: Config, models: dict[str, ModelConfig]) -> None:
    """Raises ConfigError if a prompt of a text environment and its response may exceed a policy's context."""
    prompt, response = config.rollout.prompt_limit, config.rollout.response_limit
    context = min(model.max_position_embeddings for model in models.values())
    if prompt + response > context:
        raise ConfigError(
            f"rollout.prompt_limit={prompt}: with rollout.response_limit={response} more than the {context} tokens that the "
            f"policy is made for (max_position_embeddings); their sum may be {context}"
        )


class CompiledRunner:
    """Runs a compiled environment: a rollout is one compiled program.

    Args:
      games: for an environment with a list of games, the numbers (i32[.]) of those of each stream of tasks.

    Attributes:
      env: the environment.
      program: the jitted rollout (`rollout.compiled.make_rollout`).
      task_types: names; `Episodes.task` is an index into them.
      roles: names; `Episodes.agents` is an index into them.
      signals: the names of the environment's signals (`signals.py`).
      end_tokens: of each role, the tokens that end a response.
      answer_parts: words of the switch, subgoal and action parts of an answer, if it has them (`envs.protocol.Plans`).
      num_tasks, num_held_out_tasks: games to train on and held-out ones; None where tasks are generated.

    Raises:
      ConfigError: the environment lacks something (`rollout/requirements.py`).
    """

    def __init__(
        self,
        config: Config,
        env: CompiledEnv,
        models: dict[str, ModelConfig],
        tokenizer,
        mesh: Mesh,
        games: dict | None = None,
    ):
        try:
            check_compiled(env)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if constrained := config.rollout.constrain == "admissible":
            try:
                check_lists_actions(env)
            except ValueError as error:
                raise ConfigError(f"rollout.constrain=admissible: {error}") from None
        self.env, self.task_types, self.roles, self._games = env, env.task_types, roles_of(env), games
        self.signals = declared(env)
        self.answer_parts = tuple(getattr(env, "answer_parts", ()))
        # An argument of the program: compiling thousands of games into it takes longer.
        tables = env.tables if isinstance(env, ListsGames) and games else None
        self._tables = None if tables is None else jax.device_put(tables, NamedSharding(mesh, PartitionSpec()))
        self.num_tasks, self.num_held_out_tasks = (len(games[stream]) if games else None for stream in ("train", "held_out"))
        self._history_length, self._end = config.rollout.history_length, tokenizer.eos_token_id
        program = functools.partial(
            Program,
            graphdefs=networks(models),
            history_length=self._history_length,
            decode_batch_size=config.rollout.decode_batch_size,
            end=self._end,
            act=tokenizer.convert_tokens_to_ids(ACT),
            policies=policy_of_each(config, self.roles),
            constrained=constrained,
        )
        self.program, self._play_on = make_rollout(env, program, mesh), make_continuations(env, program, mesh)
        self.end_tokens = ((self._end,),) * len(self.roles)

    def rollout(self, params, tasks, keys, groups, decoding: Decoding, *, held_out: bool = False) -> RolloutResult:
        """Plays B episodes; does not wait until they are computed, unless there are several roles.

        Args:
          params: {name of a policy: parameters of the network that plays}.
          tasks: [B], from `select_tasks`.
          keys: [B], a random key for each episode, or [B, 2] as for `sampling.turn_keys`.
          groups: i32[B], prompt groups.
          held_out: whether the tasks are held-out ones.
        """
        episodes = self.program(params, tasks, keys, groups, decoding, self._tables)
        if len(self.roles) > 1:
            low, high = int(episodes.agents.min()), int(episodes.agents.max())
            if low < 0 or high >= len(self.roles):
                name, index = type(self.env).__name__, low if low < 0 else high
                raise RunError(f"{name}: role(state) is {index}, an index into its {len(self.roles)} roles is needed")
        return RolloutResult(episodes, None)

    def switches(self, episodes: Episodes) -> jax.Array:
        """Marks the turns whose answer takes up a new subgoal, bool[B, T], in an environment with `answer_parts`."""

        def one(response, length):
            answer, _ = parse_answer(response, length, self._end, self.env.action_length)
            return cast(Plans, self.env).switches(answer)

        return jax.vmap(jax.vmap(one))(episodes.responses, episodes.response_lengths) & episodes.mask

    def replay(self, tasks, episodes: Episodes) -> EpisodeState:
        """Replays recorded episodes: their states [B (T + 1)] before each of an episode's T turns and after the last."""

        def states(tables, *recorded):
            env = self.env if tables is None else cast(ListsGames, self.env).bound(tables)

            def one(task, responses, lengths, mask):
                return replay(env, self._history_length, task, responses, lengths, mask, self._end)

            return jax.vmap(one)(*recorded)

        e = episodes
        result = jax.jit(states)(self._tables, tasks, e.responses, e.response_lengths, e.mask)
        return jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:2]), *a.shape[2:]), result)

    def play_on(self, params, states: EpisodeState, keys, decoding: Decoding) -> jax.Array:
        """Plays on from N states, such as those of `replay`; `keys` [N] decide the samples. Returns the rewards f32[N, T]."""
        return self._play_on(params, states, keys, decoding, self._tables)

    def select_tasks(self, stream: str, seed: int | None, indices) -> jax.Array:
        """Returns the tasks with these numbers, i32[B], in a stream (`rollout/tasks.py`); without a seed, in order."""
        if self._games is None:
            return task_keys(stream, seed or 0, indices)
        games = self._games[stream]
        return jnp.asarray(games[task_numbers(stream, seed, np.asarray(indices), len(games))])

    def close(self) -> None:
        """Does nothing: no process has been started."""

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        """Returns the shapes and dtypes of the episodes of `rollout(params, *inputs)` without computing anything."""
        return jax.eval_shape(self.program, params, *inputs, self._tables)

    def has_expert(self) -> bool:
        """Whether there is a scripted player, which the warm start can clone."""
        return True  # checked by `check_together`

    def compile(self, params, inputs: tuple) -> None:
        """Compiles the rollout; its first call then finds it in the compilation cache."""
        self.program.lower(params, *inputs, self._tables).compile()

    def story(self, result: RolloutResult, index: int) -> Story:
        """Renders one episode for a person."""
        episodes = result.episodes
        text = lambda ids: self.env.decode([i for i in np.asarray(ids) if i < len(self.env.words)])  # noqa: E731
        outcome = "success" if episodes.success[index] else "failure"
        if isinstance(self.env, OwnPrompts):
            goal = self.env.goal_text(episodes.observations[index, 0])
        else:
            goal = text(episodes.prompts[index][0][: self.env.goal_length])
        happened = episodes.mask[index]
        observations, responses = (
            [text(ids) for ids in part[index][happened]] for part in (episodes.observations, episodes.responses)
        )
        return Story(goal, told_turns(episodes, index, self.roles, observations, responses), outcome)


class TextRunner:
    """Runs text programs on the host: the compiled environments in sentences or drawings, ALFWorld's games, WebShop, or a
    user's own. ALFWorld's games run on the device where possible (`backend.py`), with the same Episodes.

    Args:
      environment: provides the prompts and the rule for malformed answers.
      train, held_out: make one environment each (`Environment.text`).
      models, tokenizers: of each policy, by name. Tokenizers may differ on the host only.

    Attributes:
      make_env: makes an environment for training.
      formats: the prompts and answers of each role.
      train: the rollout for training.
      signals: the names of the environment's signals (`signals.py`).

    Others, and methods, as in `CompiledRunner`.
    """

    def __init__(
        self,
        config: Config,
        environment: Environment,
        train: Callable,
        held_out: Callable,
        models: dict[str, ModelConfig],
        tokenizers: dict[str, Any],
        mesh: Mesh | AbstractMesh,
    ):
        env = config.env
        check_context(config, models)
        try:
            formats = {
                name: _chat_format(config, environment, tokenizer, models[name]) for name, tokenizer in tokenizers.items()
            }
            if environment.pictures:
                _check_whole(formats, train())
            self.make_env = train
            settings = _text_settings(config, environment, models)
            self.train: HostRollout | CompiledTextRollout
            self._held_out: HostRollout | CompiledTextRollout
            policies = policy_of_each(config, roles_of(train())) if config.roles else ()
            host = HostRollout(train, formats, networks(models), mesh, settings, policies)
            self.formats = tuple(formats[name] for name in policies or (SHARED,) * len(host.roles))
            self.train, self._held_out = host, host.with_environment(held_out)
            if backend(config) == "compiled_text":
                assert environment.compiled  # as environments with text on the device are
                try:
                    games = environment.games(config) if environment.games else {"train": None, "held_out": None}
                    played, only_here = environment.compiled(config), env.split == "generated" or environment.pictures
                    text, graphdefs = (self.formats[0], tokenizers[SHARED]), networks(models)  # games have one role
                    fallback = None if only_here else host
                    device = CompiledTextRollout(played, games["train"], *text, graphdefs, mesh, settings, fallback)
                    held_out_host = None if environment.pictures else self._held_out
                    self.train, self._held_out = device, device.of_games(games["held_out"], held_out_host)
                except ValueError as error:
                    if env.compiled or environment.pictures:
                        raise
                    log.warning("env.name=%s is played on the host: %s", env.name, error)
        except (ValueError, OSError) as error:
            raise ConfigError(f"env.name={env.name}: {' '.join(str(error).split())}") from None
        if settings.words and not all(form.template.bare for form in self.formats):
            raise ConfigError(
                "rollout.constrain=admissible: the template asks for a thought, which is free; give env.template=plain"
            )
        self.task_types, self.roles = self.train.task_types, self.train.roles
        self.end_tokens = tuple(form.end_tokens for form in self.formats)
        self.signals = self.train.signals
        self.num_tasks, self.num_held_out_tasks = self.train.num_tasks, self._held_out.num_tasks
        # The host loads only the template games from which games are generated; the warm start's expert plays there.
        self._num_files = len(train()) if env.split == "generated" else self.num_tasks

    def rollout(self, params, tasks, keys, groups, decoding: Decoding, *, held_out: bool = False) -> RolloutResult:
        return (self._held_out if held_out else self.train)(params, tasks, keys, groups, decoding)

    def select_tasks(self, stream: str, seed: int | None, indices) -> list[int]:
        count = {"held_out": self.num_held_out_tasks, "train": self.num_tasks, "warm_start": self._num_files}.get(stream)
        return task_numbers(stream, seed, np.asarray(indices), count)

    def close(self) -> None:
        """Ends the worker processes."""
        self.train.close()
        self._held_out.close()

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        return self.train.abstract_episodes()

    def has_expert(self) -> bool:
        with opened(self.make_env) as env:
            return isinstance(env, TextExpert)

    def compile(self, params, inputs: tuple) -> None:
        """Compiles as `CompiledRunner` does. On the host shapes depend on the prompts: each compiles when it first occurs."""
        if isinstance(self.train, CompiledTextRollout):
            _, keys, _, decoding = inputs
            self.train.lowered(params, keys, decoding).compile()

    def story(self, result: RolloutResult, index: int) -> Story:
        assert result.report is not None  # a HostRollout makes one
        return result.report.story(result.episodes, index, self.roles)


def _check_whole(formats: dict[str, ChatFormat], env: Any) -> None:
    """Raises ValueError if a first prompt would lose a part of its text, which the device cannot cut."""
    _, commands = env.reset(0)
    for form in formats.values():
        (prompt,) = form.build([PromptInput(env.goal, [], 0, "", commands)])
        if prompt.tokens_cut:
            raise ValueError(f"prompt_limit={form.prompt_limit}: a prompt takes {len(prompt.ids) + prompt.tokens_cut} tokens")


def _chat_format(config: Config, environment: Environment, tokenizer, model: ModelConfig) -> ChatFormat:
    """Returns the prompts and answers of a policy with this tokenizer. Raises ValueError."""
    rollout, picture = config.rollout, list[int]()
    template = template_of(config, tokenizer)
    if config.env.budgets and not load_template(template).tells_goal:
        raise ValueError(f"template={template}: needs $goal in every first message, to which env.budgets adds")
    if environment.pictures and model.vision and environment.compiled:
        picture = picture_tokens(math.prod(environment.compiled(config).picture_features), model.vision)
        if "observation" in load_template(template).slots:
            raise ValueError(f"env.template={template}: a picture stands for $observation; leave it out")
    elif environment.picture_size and model.vision:
        patches = math.prod(grid_of(*environment.picture_size, model.vision))
        picture = picture_tokens(patches // model.vision.spatial_merge_size**2, model.vision)
    return ChatFormat(
        ChatFrame(tokenizer, thinking=rollout.thinking, stop=rollout.stop),
        template,
        rollout.prompt_limit,
        environment.fallback,
        lower_case=environment.lower_case,
        picture=picture,
    )


def _text_settings(config: Config, environment: Environment, models: dict[str, ModelConfig]) -> TextSettings:
    env, rollout = config.env, config.rollout
    constrained = rollout.constrain == "admissible"
    return TextSettings(
        batch=rollout.prompt_groups * rollout.group_size,
        history_length=rollout.history_length,
        response_limit=rollout.response_limit,
        decode_batch_size=rollout.decode_batch_size,
        vision=next(iter(models.values())).vision if environment.picture_size else None,
        prompt_widths=rollout.prompt_widths,
        strict=env.strict,
        workers=env.workers,
        time_limit=env.time_limit,
        ready_fraction=rollout.ready_fraction,
        keep=rollout.keep,
        reread=rollout.reread,
        reuse=converses(config),
        store=rollout.store * 2**20,
        budgets=env.budgets,
        words=words_of(max(model.vocab_size for model in models.values())) if constrained else 0,
    )
