"""Compiled rollouts of language models: games, prompts, sampling and parsing of answers in one jitted program.

    settings = TextSettings(batch=128, history_length=2)
    rollout = CompiledTextRollout(env, games, format, tokenizer, {"": policy.graphdef}, mesh, settings)
    episodes, report = rollout(params, tasks, keys, groups, Decoding())

It is called like a `host.HostRollout` and returns bit-identical Episodes and statistics. If an episode holds something that
the device cannot reproduce (`compiled_chat_prompts.py`), the host plays it. If the host does not have the games, the episode
is left out and counted as one whose environment failed. Where prompts show pictures (`protocol.Pictured`), each begins with the
current one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hgpo_jax.envs.protocol import Pictured
from hgpo_jax.rollout.chat_prompts import ChatFormat, Prompt
from hgpo_jax.rollout.compiled import EpisodeState, on_shards, start_episode
from hgpo_jax.rollout.compiled_chat_prompts import DeviceText
from hgpo_jax.rollout.compiled_prompts import picture_of
from hgpo_jax.rollout.compiled_slots import SlotProgram
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.requirements import roles_of
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.tasks import keys_of
from hgpo_jax.rollout.workers import EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.sampling.generate import Decoding

log = logging.getLogger(__name__)

INEXACT = "some text cannot be reproduced on the device (rollout/compiled_chat_prompts.py)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextProgram(SlotProgram):
    """A `SlotProgram` with chat prompts and free-text answers; `env` is a `DeviceText`.

    prompt_widths: widths of prompts at most.
    """

    prompt_widths: int

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self.env.end_tokens

    @property
    def response_slots(self) -> int:
        return self.env.response_limit

    @property
    def widths(self) -> tuple[int, ...]:
        return widths(self.env.format.prompt_limit, self.prompt_widths)

    def prompt(self, state: EpisodeState):
        prompt = self.env.prompt(state.env, state.goal, *state.history.of(0), state.observation)
        notes = {"pairs_dropped": prompt.pairs_dropped, "exact_prompts": prompt.exact}
        return prompt.ids, prompt.length, notes

    def picture(self, observation):
        return picture_of(self.env.env, observation)

    def read(self, response, length):
        answer = self.env.answer(response, length)
        if isinstance(self.env.env, Pictured) and not self.history_length:
            # No host plays an environment with pictures, and no prompt shows past actions: one that is not exact is no move.
            action = jnp.where(answer.exact, answer.action, 0)
            return action, answer.well_formed, {"exact_answers": jnp.ones_like(answer.exact)}
        return answer.action, answer.well_formed, {"exact_answers": answer.exact}

    def faults(self, well_formed, inadmissible) -> dict:
        return {"inadmissible": inadmissible}  # the EpisodeBuffer decides what is invalid

    def play_text(self, params, tasks, keys, decoding):
        """Plays all turns of B episodes, of games i32[B] or of the tasks of random keys [B].

        Returns: (record {field: [B, T, ...]}, last observations i32[B, O], how they ended {field: [B, ...]}, decoding steps
        i32[1], and the sum over these of the fraction of active slots f32[1]).
        """
        states = jax.vmap(start_episode, (None, None, 0, 0))(self.env, self.history_length, tasks, keys)
        played = self.play_slots(params, states, decoding)
        ends = self.ends(played.states, played.turn, played.prompts, played.lengths)
        ends["exact_final_prompts"] = ~ends["truncated"] | played.notes["exact_prompts"]
        return played.record, played.states.observation, ends, played.steps[None], played.busy[None]


def widths(limit: int, count: int) -> tuple[int, ...]:
    """Returns at most `count` widths for prompts of up to `limit` tokens, ascending, the last of which is the limit.

    They are made for prompts as in ALFWorld: most have 350 to 750 tokens, few more than a thousand.
    """
    most = min(1024, limit)
    steps = [most]
    while steps[0] > max(most // 4, 8):  # of less than 8 nothing is left
        steps.insert(0, int(steps[0] / 1.15) // 8 * 8)
    steps = sorted({*steps, (limit + most) // 2 // 8 * 8, limit}) if limit > most else steps
    count = min(count, len(steps))
    return tuple(steps[len(steps) * number // count - 1] for number in range(1, count + 1))


class CompiledTextRollout:
    """`rollout(params, tasks, keys, groups, decoding) -> RolloutResult`.

    Args:
      env: a compiled environment that satisfies `compiled_chat_prompts.RendersText`.
      games: i32[.], the number in `env` of each task; None: tasks are generated, with the numbers of `tasks.task_numbers`.
      host: plays the episodes that the device cannot; None: nothing does.
      format, tokenizer, graphdefs, mesh, settings: see `HostRollout`.

    Attributes: those of `HostRollout`; `program`, the jitted rollout.

    Raises ValueError for a tokenizer or template that cannot be reproduced.
    """

    signals: tuple[str, ...] = ()

    def __init__(
        self,
        env,
        games: np.ndarray | None,
        format: ChatFormat,
        tokenizer,
        graphdefs: dict[str, Any],
        mesh: Mesh | AbstractMesh,
        settings: TextSettings,
        host: HostRollout | None = None,
    ):
        self._env, self._format, self._settings = env, format, settings
        self._play_games(games, host)
        self.task_types = tuple(env.task_types)
        self.max_turns, self.roles = env.max_turns, roles_of(env)
        text = DeviceText(env, format, tokenizer, settings.response_limit)
        self._mesh, self._tables, self._text = mesh, None, text
        program = functools.partial(
            TextProgram,
            graphdefs=graphdefs,
            history_length=settings.history_length,
            decode_batch_size=settings.decode_batch_size,
            prompt_widths=settings.prompt_widths,
        )
        play = on_shards(TextProgram.play_text, program, text, mesh)

        def rollout(tables, *inputs):
            return jax.lax.with_sharding_constraint(play(tables, *inputs), NamedSharding(mesh, P()))

        self.program = jax.jit(rollout)

    def of_games(self, games: np.ndarray | None, host: HostRollout | None) -> CompiledTextRollout:
        """Returns the same rollout over other games, such as held-out ones; compiled programs are shared."""
        other = copy.copy(self)
        other._play_games(games, host)
        return other

    def _play_games(self, games: np.ndarray | None, host: HostRollout | None) -> None:
        self._games, self._host = None if games is None else np.asarray(games), host
        self.num_tasks = None if games is None else len(games)

    def abstract_episodes(self) -> Episodes:
        """Returns the shapes and dtypes of the episodes of a call."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._no_episodes())

    def _no_episodes(self) -> Episodes:
        batch, picture = self._settings.batch, self._env.picture_size if isinstance(self._env, Pictured) else None
        slots = self._format.prompt_limit, self._settings.response_limit
        return Episodes.zeros(batch, self.max_turns, *slots, picture=picture)

    def lowered(self, params, keys, decoding: Decoding):
        """Lowers the program for these parameters and keys [B], which may be abstract."""
        whole = NamedSharding(self._mesh, P())
        shape = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)  # noqa: E731
        dtype = keys.dtype if self._games is None else np.int32
        tasks = jax.ShapeDtypeStruct((self._settings.batch,), dtype, sharding=whole)
        return self.program.lower(jax.tree.map(shape, self._text.tables), params, tasks, keys, decoding)

    def __call__(self, params, tasks: Sequence[int] | np.ndarray, keys, groups, decoding: Decoding) -> RolloutResult:
        """Plays B episodes of the games with these numbers, as `HostRollout` does."""
        if len(tasks) != self._settings.batch:
            raise ValueError(f"tasks: has {len(tasks)} episodes, the rollout was built for batch={self._settings.batch}")
        if self._tables is None:
            self._tables = jax.device_put(self._text.tables, NamedSharding(self._mesh, P()))
        if self._games is None:
            numbers, begin = np.asarray(tasks, np.uint64), keys_of(tasks)
        else:
            numbers = self._games[np.asarray(tasks)]
            begin = jnp.asarray(numbers)
        played = self.program(self._tables, params, begin, keys, decoding)
        record, final, ends, steps, busy = jax.device_get(played)
        buffer = EpisodeBuffer(self._no_episodes(), groups, self._settings.history_length, self._settings.strict)
        inexact = []
        for episode in range(self._settings.batch):
            turn, end = ({name: values[episode] for name, values in part.items()} for part in (record, ends))
            exact = (turn["exact_prompts"] & turn["exact_answers"])[turn["mask"]].all() and end["exact_final_prompts"]
            if not exact:
                inexact.append(episode)
                continue
            self._read(buffer, episode, int(numbers[episode]), turn, final[episode], end)
        if inexact and self._host:
            self._host.play(buffer, inexact, params, tasks, keys, decoding)
        elif inexact:
            for episode in inexact:
                buffer.exclude(episode, INEXACT)
            log.warning("%d of %d episodes are excluded: %s", len(inexact), self._settings.batch, INEXACT)
        counts = {"decode_steps": int(steps.max()), "slot_use": float(busy.sum()) / max(1, int(steps.sum()))}
        return buffer.result(counts | {"played_on_host": len(inexact) if self._host else 0})

    def _read(self, buffer: EpisodeBuffer, episode: int, game: int, turn: dict, final, end: dict) -> None:
        """Copies one finished episode into the buffer."""
        turns, env, task, won = int(turn["mask"].sum()), self._env, int(end["task"]), bool(end["success"])
        goal, observations = env.goal_of(game), [*turn["observations"][:turns], final]
        buffer.add_output(episode, EnvOutput(env.decode(observations[0]), [], goal, task))
        for t in range(turns):
            ids = turn["prompts"][t, : turn["prompt_lengths"][t]].tolist()
            prompt = Prompt(ids, int(turn["pairs_dropped"][t]))
            length = turn["response_lengths"][t]
            tokens = turn["responses"][t, :length]
            response = SlotResponse(episode, tokens, turn["logp"][t, :length])
            parsed, ended = self._format.parse(tokens.tolist()), tokens[-1] in self._format.end_tokens
            picture = turn["pictures"][t] if "pictures" in turn else None
            buffer.add_response(prompt, response, parsed, ended, picture=picture)
            done = t + 1 == turns
            buffer.add_output(
                episode,
                EnvOutput(
                    env.decode(observations[t + 1]),
                    [],
                    goal,
                    task,
                    float(turn["rewards"][t]),
                    done,
                    done and won,
                    not turn["inadmissible"][t],
                    float(done and won),
                    truncated=bool(done and end["truncated"]),
                ),
            )
        if end["truncated"]:
            buffer.add_final_prompt(episode, end["final_prompts"][: end["final_prompt_lengths"]])

    def close(self) -> None:
        """Closes the rollout on the host."""
        if self._host:
            self._host.close()
