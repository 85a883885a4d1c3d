"""The compiled games for a small policy: short prompts that list the commands, of which the policy says one.

    put some alarmclock on desk                                                the task
    You arrive at loc 4. The drawer 1 is closed.>open drawer 1                 the last turns
    You open the drawer 1. The drawer 1 is open. In it, you see a pen 2 cd 1   now
    go to bed 1 desk 1 take cd 1 drawer 1 pen 2>                               what it can do

(in one piece, without the line breaks).

Every turn leaves out the same parts. Of the commands: those that change nothing (`SILENT`); the verb if the command before
has the same, and then also the thing in the agent's hands, or else an unchanged second argument. Of observations: the commas
and articles of lists; the words after the first `PAST` of earlier ones and the first `NOW` of the current one (things that can
be taken are among the commands); all but the first word of an episode's first one (the room's places are among the commands).
If a prompt does not fit its slots, past turns are left out, the oldest first; if it then still does not fit, so are the last
commands, and the word `MORE` marks that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld, State
from hgpo_jax.envs.alfworld.phrases import AND, COMMA, ID, ITEM, MORE, STOP, TASK, VERBS, WELCOME

SILENT = ("examine", "help", "inventory", "look")  # verbs that are not listed
IN_HAND = ("clean", "cool", "heat", "move", "put")  # verbs whose first argument is always the thing in the agent's hands
PAST, NOW = 5, 16  # words of a past and of the current observation


class ShortPromptAlfworld(CompiledAlfworld):
    """`CompiledAlfworld` with prompts of its own.

    Args:
      tables, max_turns: as there.
      slots: P, slots of a prompt.
    """

    def __init__(self, tables, max_turns: int = 50, slots: int = 128):
        super().__init__(tables, max_turns)
        least = self.goal_length + NOW + len(VERBS) + 8
        if slots < least:
            raise ValueError(f"slots={slots}: must be at least {least}")
        self.slots = slots
        self._more = self.word_id[MORE]

    def prompt_slots(self, history_length: int) -> int:
        """Returns P, whatever the history's length is."""
        return self.slots

    def prompt(self, state: State, goal, observations, actions, observation, act: int) -> tuple[jax.Array, jax.Array]:
        """Builds the policy's prompt for its next action.

        Args:
          state: the episode.
          goal: i32[goal_length].
          observations, actions: i32[K, observation_length] and i32[K, 3], the last K turns, oldest first; 0 before the first.
          observation: i32[observation_length], the current one.
          act: the token that asks for an action.

        Returns: (the prompt i32[P], followed by 0, its length i32[]).
        """
        rows = self._listed(state)
        before = jnp.pad(rows, ((1, 0), (0, 0)))[:-1]
        goes_on, again = rows[:, 0] == before[:, 0], rows[:, 2] == before[:, 2]
        in_hand = (rows[:, :1] == jnp.array(_ids(IN_HAND))).any(1)
        left_out = jnp.stack([goes_on, goes_on & in_hand, goes_on & again & ~in_hand], 1)
        listing = jnp.where(left_out, 0, rows)

        task = jnp.where(goal == ID[STOP], 0, goal)
        now = _shortened(observation, NOW)
        requests = jnp.where((observations != 0).any(1), act, 0)[:, None]
        turns = jnp.concatenate([jax.vmap(_shortened, (0, None))(observations, PAST), requests, actions], 1)

        used = lambda words: (words != 0).sum(-1)  # noqa: E731
        room = self.slots - used(task) - used(now) - 1
        ends = jnp.cumsum(used(listing))
        whole = ends[-1] <= room
        listing = jnp.where((whole | (ends < room))[:, None], listing, 0)
        more = jnp.where(whole, 0, self._more)[None]
        since = jnp.cumsum(used(turns)[::-1])[::-1]  # words of each turn and of those after it
        turns = jnp.where((since <= room - ends[-1])[:, None], turns, 0)

        asks = jnp.full(1, act, jnp.int32)
        words = jnp.concatenate([task, turns.ravel(), now, listing.ravel(), more, asks]).astype(jnp.int32)
        at, length = bits.select(bits.pack(words != 0), self.slots)
        return jnp.where(jnp.arange(self.slots) < length, words[jnp.minimum(at, words.shape[0] - 1)], 0), length

    def goal_text(self, observation) -> str:
        """Returns the task, from an episode's first observation."""
        return self.decode(observation).rpartition(TASK)[2]

    def _listed(self, state: State) -> jax.Array:
        """Returns the listed commands, 0 elsewhere, i32[commands, 3]."""
        filled, rows = self.admissible(state)
        listed = filled & (rows[:, :1] != jnp.array(_ids(SILENT))).all(1)
        return jnp.where(listed[:, None], rows, 0)


def _ids(words) -> list[int]:
    return [ID[word] for word in words]


def _shortened(observation, length: int):
    """Returns the first words of an observation without those that only link a list, i32[length]."""
    tells = (observation[:, None] != jnp.array([0, *_ids((ITEM, COMMA, AND, STOP))])).all(1)
    at, count = bits.select(bits.pack(tells), length)
    count = jnp.where(observation[0] == ID[WELCOME], 1, count)
    return jnp.where(jnp.arange(length) < count, observation[jnp.minimum(at, observation.shape[0] - 1)], 0)
