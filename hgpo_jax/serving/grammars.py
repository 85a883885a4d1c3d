"""The grammars of answers, compiled for a policy's tokenizer, so that only what was asked for can be sampled.

    grammars = Grammars(tokenizer, vocabulary, end_tokens)
    constraint = grammars.constraint(AnswerForm(json=Json("response_format", {"type": "object"})))

Needs llguidance, the extra `grammar`; xgrammar 0.2.9 requires torch and triton. It decides byte by byte: a token may
end one part of an answer and begin the next.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from hgpo_jax.policy.answers import TAGS
from hgpo_jax.sampling.constraint import BITS, Constraint, words_of
from hgpo_jax.serving.answer_forms import AnswerForm
from hgpo_jax.utils.errors import one_line

INSTALL = "needs the package llguidance; pip install 'hgpo_jax[grammar]'"
COMPILED = 64  # grammars that are kept: programs send the same ones again and again
_PLACE = re.compile(r"^at \d+\(\d+\): |\n\s*\d+ \|.*", re.DOTALL)  # where in a grammar, which clients do not see


class Grammars:
    """Compiles the grammars of a policy's answers; may be used by several threads.

    Args:
      tokenizer: a transformers tokenizer whose tokens are bytes of texts.
      vocabulary: number of token ids; those that the tokenizer lacks are never allowed.
      end_tokens: the tokens that end an answer.

    Raises ValueError, in a line, for another tokenizer, or without the package.
    """

    def __init__(self, tokenizer, vocabulary: int, end_tokens: Sequence[int]):
        try:
            import llguidance  # optional
        except ImportError:
            raise ValueError(INSTALL) from None
        self._matcher, self._limits = llguidance.LLMatcher, llguidance.LLParserLimits(verbose_errors=False)
        added = tokenizer.added_tokens_decoder
        try:
            backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            if isinstance(backend.model, models.WordLevel):
                raise ValueError("its tokens are words")
            backend.no_padding()
            backend.no_truncation()
            self._tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=vocabulary, eos_token=list(end_tokens))
        except Exception as error:  # the package's own have no common type
            raise ValueError(f"this policy's tokenizer has no grammars: {one_line(str(error))[:200]}") from None
        # For the package these are also others in angle brackets, such as the tags of thoughts and calls.
        self._special = {one.content: index for index, one in added.items() if self._tokenizer.is_special_token(index)}
        self._ends = tuple(end_tokens)
        # A later prompt could not show a marker in a text (`chat_template.TokenText`).
        markers = (index for index, token in added.items() if len(token.content.strip()) > 1 and token.content not in TAGS)
        self._texts = ~_set_of([*markers, *end_tokens], vocabulary)
        self._end_set = _set_of(end_tokens, vocabulary)
        self._compile = functools.lru_cache(COMPILED)(self._compile_anew)

    def constraint(self, form: AnswerForm) -> Constraint:
        """Makes the constraint of one response. Raises ValueError, in a line, for a schema that cannot be compiled."""
        for part in form.parts():
            part.check()
        try:
            matcher = self._compile(form.lark(self._special)).deep_copy()
        except ValueError as error:
            for part in form.parts():
                if reason := self._reason(f"start: {part.lark}"):
                    raise ValueError(f"{part.field}: {reason}") from None
            raise ValueError(f"the grammar of the answer: {error}") from None
        return _OfGrammar(matcher, self._ends, self._end_set, self._texts)

    def _compile_anew(self, lark: str) -> Any:
        if reason := self._reason(lark):
            raise ValueError(reason)
        return self._matcher(self._tokenizer, self._matcher.grammar_from_lark(lark), log_level=0, limits=self._limits)

    def _reason(self, lark: str) -> str:
        """Returns why a grammar cannot be compiled, in a line; "" if it can."""
        grammar = self._matcher.grammar_from_lark(lark)
        failed, messages = self._matcher.validate_grammar_with_warnings(grammar, self._tokenizer, limits=self._limits)
        return one_line(_PLACE.sub("", messages[0]))[:300] if failed else ""


class _OfGrammar(Constraint):
    """The constraint of one response.

    matcher: of llguidance, at the beginning. ends, end_set: the tokens that end a response. texts: those that may be in one.
    """

    def __init__(self, matcher, ends: tuple[int, ...], end_set: np.ndarray, texts: np.ndarray):
        self._matcher, self._ends, self._end_set, self._texts = matcher, ends, end_set, texts
        self._consumed, self.failure = 0, ""

    def next_set(self, sampled: Sequence[int]) -> np.ndarray:
        new, self._consumed = sampled[self._consumed :], len(sampled)
        if self.failure or (new and new[-1] in self._ends):
            return self._end_set
        self._matcher.consume_tokens(list(new))
        # At some sizes the package's sets have one word more, which is empty.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32, len(self._texts))
        allowed = bits & self._texts
        if self._matcher.is_accepting():
            allowed |= self._end_set
        if self._matcher.is_error() or not allowed.any():
            error = one_line(self._matcher.get_error()) or "no token of this policy fits"
            self.failure = f"the grammar of the answer does not go on: {error[:200]}"
            return self._end_set
        return allowed


def _set_of(tokens: Iterable[int], vocabulary: int) -> np.ndarray:
    """Makes a set of tokens, u32[W]."""
    members = np.zeros(words_of(vocabulary) * BITS, bool)
    members[[token for token in tokens if token < vocabulary]] = True
    return np.packbits(members, bitorder="little").view(np.uint32)
