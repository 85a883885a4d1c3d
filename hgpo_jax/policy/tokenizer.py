"""Word-level tokenizers of small policies: one token per word of the environment.

A compiled environment's word indices are the token ids, so a compiled rollout writes ids straight into prompts. Three tokens
follow them: padding, the end of a response and the mark after which the agent acts. For a text environment the words come from
its texts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BLANK, PAD, END, ACT = "_", "<|endoftext|>", "<|im_end|>", ">"
PLAIN = "{{ messages[0]['content'] }}"  # the chat template of a policy that sees only one message
# Qwen2's pattern for cutting text before bytes are merged (its tokenizer.json); transformers 5 puts it into all such folders.
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r" ?\p{Ll}+|\p{Lu}\p{Ll}+|."  # a drawing's characters stay apart, so that it is read cell by cell
MAX_WORDS = 2048  # tokens
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")  # files of which a tokenizer has one
GENERATION = "generation_config.json"
AS_TRAINED = "hgpo_jax"  # its key for how a run has shown the chat template (`ChatFrame.kept`)


def word_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Makes a transformers tokenizer in which the id of words[i] is i; words[0], the empty slot, reads "_".

    Text is words separated by spaces; an unknown word becomes the padding token. If words contain spaces themselves
    (`envs/alfworld/phrases.py`), text is words written together and is cut into the longest that fit.
    """
    names, phrases = (BLANK, *words[1:], PAD, END, ACT), any(" " in word for word in words)
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    if phrases:
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Words are also added tokens: transformers 5 gives every folder of model type qwen2 its own splitting rules and
    # byte-level model, and only added tokens survive that.
    splits = {} if phrases else {"lstrip": True, "single_word": True}
    tokenizer.add_tokens([AddedToken(name, **splits, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD, clean_up_tokenization_spaces=False
    )


def text_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Makes a transformers tokenizer in which every word of some texts is a token; it spells out any other text.

    Words are lower-case except for their first letter; digits and other characters are separate tokens. If there are very many
    words, the most frequent are tokens. It is byte-level BPE in Qwen2's manner, so decoding restores every text.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Every merge is inside a word, so the tokens do not depend on how the text is cut around words.
    trainer = trainers.BpeTrainer(vocab_size=MAX_WORDS - 2, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level])
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (PAD, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        chat_template=PLAIN,
        clean_up_tokenization_spaces=False,
    )


def vocabulary_size(words: tuple[str, ...]) -> int:
    """Returns the embedding rows for these words: the tokenizer's size rounded up to a multiple of 8, which meshes divide."""
    return embedding_rows(len(words) + 3)


def embedding_rows(tokens: int) -> int:
    """Rounds a vocabulary's size up to a multiple of 8, which meshes divide."""
    return -(-tokens // 8) * 8


def read_tokenizer(name: str):
    """Reads the tokenizer of a folder, with the data of `generation_of`. Raises ValueError, in one line."""
    from transformers import AutoTokenizer  # takes seconds to import, and many commands need no tokenizer

    if Path(name).is_dir() and not any(file for pattern in VOCABULARIES for file in Path(name).glob(pattern)):
        # transformers would make one that knows no words.
        raise ValueError(f"policy.tokenizer={name}: holds no vocabulary, such as tokenizer.json; download the folder again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if _cuts_otherwise(tokenizer, Path(name, "tokenizer.json")):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    except Exception as error:  # transformers and the hub raise many kinds of errors
        raise ValueError(f"policy.tokenizer={name}: cannot be read: {' '.join(str(error).split())[:300]}") from None
    tokenizer.generation = _read_generation(name)
    return tokenizer


def _cuts_otherwise(tokenizer, file: Path) -> bool:
    """Whether a tokenizer normalizes or cuts texts in another way than its tokenizer.json says.

    In every folder of model type qwen2 transformers 5 puts Qwen2's rules in place of the file's, also where the policy was
    trained with others, such as DeepSeek's distilled ones.
    """
    if not file.is_file() or not getattr(tokenizer, "is_fast", False):
        return False
    parts = ("normalizer", "pre_tokenizer")
    written = json.loads(file.read_text())
    rules = {name: written.get(name) for name in parts}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    meant = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model} | rules))  # fills in defaults
    state = lambda part: part and part.__getstate__()  # noqa: E731
    return any(state(getattr(meant, name)) != state(getattr(tokenizer.backend_tokenizer, name)) for name in parts)


def generation_of(tokenizer) -> dict[str, Any]:
    """Returns the generation_config.json beside a tokenizer, `eos_token_id` as a list; {} if there is none."""
    return getattr(tokenizer, "generation", {})


def _read_generation(name: str) -> dict[str, Any]:
    """Reads the generation_config.json of a folder, or without one the end tokens in its config.json, as transformers does.

    Raises ValueError.
    """
    file = Path(name, GENERATION)
    try:
        fields = json.loads(file.read_text()) if file.is_file() else _ends_in_config(Path(name))
        if fields == {}:
            return {}
        ends = fields.get("eos_token_id")
        fields["eos_token_id"] = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if odd := [end for end in fields["eos_token_id"] if type(end) is not int or end < 0]:
            raise ValueError(f"eos_token_id={odd[0]!r:.50} is no token id")
        if AS_TRAINED in fields and not _tells_form(fields[AS_TRAINED]):
            raise ValueError(f"{AS_TRAINED}={fields[AS_TRAINED]!r:.80}: needs a date and thinking; remove it")
    except (OSError, ValueError, AttributeError) as error:  # the last of a file without a JSON object
        raise ValueError(f"policy.tokenizer={name}: {file.name}: {' '.join(str(error).split())[:300]}") from None
    return fields


def _ends_in_config(folder: Path) -> dict[str, Any]:
    """Returns the `eos_token_id` of a config.json, {} without one. What else is wrong there is said where weights are read."""
    try:
        fields = json.loads((folder / "config.json").read_text())
        ends = (fields.get("text_config") or {}).get("eos_token_id", fields.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return {}
    return {} if ends is None else {"eos_token_id": ends}


def _tells_form(trained: Any) -> bool:
    try:
        datetime.date.fromisoformat(trained["date"])
        return trained["thinking"] in (None, False, True)
    except (KeyError, TypeError, ValueError):
        return False
