"""Word-level tokenizers for compiled environments: one token per word of the environment.

The environment's word indices are the token ids, so a compiled rollout writes ids straight into prompts. Three tokens
follow them: padding, the end of a response and the mark after which the agent acts.
"""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BLANK, PAD, END, ACT = "_", "<|endoftext|>", "<|im_end|>", ">"


def word_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A transformers tokenizer whose id of words[i] is i; words[0], the empty slot, reads "_".

    Text is words separated by spaces; an unknown word becomes the padding token. Where words contain spaces themselves
    (`envs/alfworld/phrases.py`), text is words written together and is cut into the longest that fit.
    """
    names, phrases = (BLANK, *words[1:], PAD, END, ACT), any(" " in word for word in words)
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=PAD))
    if phrases:
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Words are added tokens besides: transformers 5 gives every folder of model type qwen2 its own splitting rules and
    # byte-level model, and added tokens are what survives that.
    splits = {} if phrases else {"lstrip": True, "single_word": True}
    tokenizer.add_tokens([AddedToken(name, **splits, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD, clean_up_tokenization_spaces=False
    )


def vocabulary_size(words: tuple[str, ...]) -> int:
    """Embedding rows for these words: the tokenizer's size rounded up to a multiple of 8, which meshes divide."""
    return embedding_rows(len(words) + 3)


def embedding_rows(tokens: int) -> int:
    """A vocabulary's size rounded up to a multiple of 8, which meshes divide."""
    return -(-tokens // 8) * 8


def read_tokenizer(name: str):
    """The tokenizer of a folder or hub id. Raises ValueError in one line where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers and the hub raise many kinds
        raise ValueError(f"policy.tokenizer={name}: cannot be read: {' '.join(str(error).split())[:300]}") from None


@functools.cache
def load_tokenizer(name: str, cache_dir: str):
    """`read_tokenizer`, once, also of a GGUF file or package (`gguf_folder.py`)."""
    from hgpo_jax.policy import gguf_folder  # where tokenizers are made, too

    return read_tokenizer(gguf_folder.unpacked(name, cache_dir))
