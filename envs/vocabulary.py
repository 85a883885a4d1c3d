"""Words and their token ids: what compiled environments of words have in common."""

from __future__ import annotations

from functools import cached_property

import numpy as np


class Vocabulary:
    """A base for environments whose actions are words; a word's index in `words` is its token id, the empty word's is 0."""

    words: tuple[str, ...]
    action_length: int

    @cached_property
    def word_id(self) -> dict[str, int]:
        """Word -> token id."""
        return {word: index for index, word in enumerate(self.words)}

    def encode(self, text: str) -> np.ndarray:
        """Encodes an action's words as i32[action_length]; unknown words become 0."""
        ids = [self.word_id.get(word, 0) for word in text.split()][: self.action_length]
        return np.array(ids + [0] * (self.action_length - len(ids)), np.int32)

    def decode(self, ids) -> str:
        """Decodes word ids of any length to text, without empty slots."""
        return " ".join(self.words[i] for i in np.asarray(ids).ravel() if i)
