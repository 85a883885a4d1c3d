"""Tokenizers with a chat template: a made-up byte tokenizer, one that folds letters, and Qwen2.5's."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.helpers.needs import DATA

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; two special tokens, and two added ones that overlap."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("ol><", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with a template that shows tools and what was called."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    return tokenizer


def folding_tokenizer() -> PreTrainedTokenizerFast:
    """Folds letters before it looks for its added tokens, so that other characters become markers; one is one character."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True, normalized=True), "¶"])
    return tokenizer


def qwen_tokenizer():
    """Its tests need the data."""
    return AutoTokenizer.from_pretrained(DATA / "qwen2.5")
