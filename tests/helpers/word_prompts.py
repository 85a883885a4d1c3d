"""The compiled rollout's prompts and answers for a host rollout: fixed slots, one token per word.

With `hgpo_jax.envs.compiled_as_text.Words` a host rollout has exactly the prompts, samples and actions of the compiled one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hgpo_jax.policy.tokenizer import BLANK
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt, PromptInput


class WordFormat:
    """Builds prompts like `prompts.build_prompt`, from texts of words separated by spaces.

    Args:
      env: a compiled environment, which defines the words and the slots of goal, observation and action.
      history_length: K; every prompt has slots for K pairs.
      end, act: token ids as in `compiled.Program`.

    A token that is not a word of the environment is written "#id", so that every response has a text.
    """

    def __init__(self, env, history_length: int, end: int, act: int):
        self._words = env.words
        self._ids = {word: index for index, word in enumerate(env.words)} | {BLANK: 0}
        self._slots = {"goal": env.goal_length, "observation": env.observation_length, "action": env.action_length}
        self._history_length, self._act, self.end_tokens = history_length, act, (end,)
        pair = env.observation_length + env.action_length
        self.prompt_limit = env.goal_length + history_length * pair + env.observation_length + 1

    def build(self, inputs: Sequence[PromptInput]) -> list[Prompt]:
        """Builds the prompt of each input."""
        return [Prompt(self._prompt(prompt_input)) for prompt_input in inputs]

    def _prompt(self, prompt_input: PromptInput) -> list[int]:
        unused = [("", "")] * (self._history_length - len(prompt_input.history))
        ids = self._encode(prompt_input.goal, "goal")
        for observation, action in [*unused, *prompt_input.history]:
            ids += self._encode(observation, "observation") + self._encode(action, "action")
        return [*ids, *self._encode(prompt_input.observation, "observation"), self._act]

    def _encode(self, text: str, part: str) -> list[int]:
        ids = [int(word[1:]) if word[0] == "#" else self._ids[word] for word in text.split()]
        return ids + [0] * (self._slots[part] - len(ids))

    def parse(self, ids: Sequence[int]) -> ParsedResponse:
        """Decodes a response's words; the first ones are the action, but without an end token there is none."""
        words = [(self._words[i] or BLANK) if i < len(self._words) else f"#{i}" for i in ids]
        if self.end_tokens[0] not in ids:
            return ParsedResponse(" ".join(words), "", False)
        words = words[: list(ids).index(self.end_tokens[0])]
        return ParsedResponse(" ".join(words), " ".join(words[: self._slots["action"]]), True)
