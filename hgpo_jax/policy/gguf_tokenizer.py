"""Conversion of the tokenizer in a GGUF file's metadata to a transformers tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type: special tokens, and others that are never split

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str):
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


# tokenizer.ggml.pre: the rules that cut text into parts for merging tokens, as in the models' own tokenizer.json.
GPT2 = [pre_tokenizers.ByteLevel(False)]
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
SPLITS = {
    "gpt-2": GPT2,
    "smollm": [pre_tokenizers.Digits(individual_digits=True), *GPT2],
    "qwen2": _split(WORDS.format(digits="")),
    **dict.fromkeys(LLAMA3, _split(WORDS.format(digits="{1,3}"))),
}


def make_tokenizer(metadata: dict) -> PreTrainedTokenizerFast:
    """Makes the tokenizer, with its chat template and special tokens.

    Raises:
      ValueError: the tokenizer is not byte-level BPE, or splits text by an unknown rule.
    """

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind, split = get("model"), get("pre", "default")
    if split == "default" and metadata.get("general.architecture") in ("qwen2", "qwen3"):
        split = "qwen2"  # as files are that were converted before there was a name for it
    if kind != "gpt2" or split not in SPLITS:
        name, value = ("pre", split) if kind == "gpt2" else ("model", kind)
        raise ValueError(
            f"has tokenizer.ggml.{name}={value!r:.50}, which is not supported; give the model's Hugging Face folder instead"
        )
    tokens, merges = get("tokens", []), [tuple(merge.split(" ")) for merge in get("merges", [])]
    types = get("token_type", [])
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise ValueError("is damaged: its tokens are not distinct, have no types, or its merges are not pairs")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split in LLAMA3))
    except Exception as error:  # a merge of tokens that do not exist; the library raises no narrower type
        raise ValueError(f"is damaged: its tokenizer cannot be made: {error}") from None
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(SPLITS[split]), decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    )
    special = {}
    for name, word in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = get(f"{word}_token_id")
        if index is not None:
            if not 0 <= index < len(tokens):
                raise ValueError(f"is damaged: tokenizer.ggml.{word}_token_id={index} is not a token")
            special[f"{name}_token"] = tokens[index]
    if "eos_token" not in special:
        raise ValueError("has no tokenizer.ggml.eos_token_id; give the model's Hugging Face folder instead")
    special.setdefault("pad_token", special["eos_token"])
    if get("add_bos_token", split in LLAMA3) and (bos := special.get("bos_token")):
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
                ),
            ]
        )
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError("is damaged: tokenizer.chat_template is not a text")
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast_tokenizer.chat_template = template
    return fast_tokenizer
