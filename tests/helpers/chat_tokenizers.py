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


CHATML = (
    "{{{{ {first} }}}}"
    "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' + {content} + '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{last}{{% endif %}}"
)
WITHOUT_THOUGHT = "(m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content)"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
SYSTEM = "('' if messages[0].role == 'system' else '<|im_start|>system\nBe of use.<|im_end|>\n')"
DAY = "'<|im_start|>system\nToday: ' + strftime_now(\"%d %B %Y\") + '<|im_end|>\n'"
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nDate: ' + date_string + '\n\n<|eot_id|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ '<｜User｜>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
IM, THINK, IM_ENDS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<think>", "</think>"], ["<|im_end|>", "<|endoftext|>"]
R1_END = "<｜end▁of▁sentence｜>"
LLAMA3_TOKENS = [
    "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "<|start_header_id|>",
    "<|end_header_id|>",
]  # fmt: skip
# Families of models: special tokens, other added ones, a template of their form, and the end tokens that their
# generation_config.json lists; the first of these is the tokenizer's.
FAMILIES = {
    "qwen2.5": (IM, [], CHATML.format(first=SYSTEM, content="m.content", last=""), IM_ENDS),
    "qwen3": (IM, THINK, CHATML.format(first="''", content=WITHOUT_THOUGHT, last=SWITCH), IM_ENDS),
    "qwen3-thinking": (IM, THINK, CHATML.format(first="''", content=WITHOUT_THOUGHT, last="{{ '<think>\n' }}"), IM_ENDS),
    "r1-distill": ([R1_END, "<｜begin▁of▁sentence｜>"], ["<｜User｜>", "<｜Assistant｜>", *THINK], R1, [R1_END]),
    "llama3.2": (LLAMA3_TOKENS, [], LLAMA3, ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
    "smollm2": (IM, [], CHATML.format(first=SYSTEM, content="m.content", last=""), ["<|im_end|>"]),
    "smollm3": (IM, THINK, CHATML.format(first=DAY, content=WITHOUT_THOUGHT, last=SWITCH), ["<|im_end|>"]),
    "base": (IM, [], CHATML.format(first="''", content="m.content", last=""), ["<|endoftext|>"]),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with the tokens, the form of template and the end tokens of a family of models."""
    special, others, template, ends = FAMILIES[name]
    tokenizer = byte_tokenizer()
    made = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in others])
    bos = {"bos_token": special[1]} if "bos_token" in template else {}
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=ends[0], chat_template=template, **bos)
    found.generation = {"eos_token_id": [made.token_to_id(token) for token in ends]}
    return found


# Stand-ins for published templates: how they show tools and calls, in words of ours. Llama 3's shows one call an answer and no
# text beside it; Qwen3-Coder's quotes no string and writes other values as Python does.
LLAMA3_CALLS = (
    "{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}"
    "{{ 'A call is written {\"name\": NAME, \"parameters\": OBJECT}.\n' }}{{ tools | tojson }}{{ '<|eot_id|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('One call at once.') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_CODER_CALLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content }}"
    "{% if m.tool_calls and m.content %}{{ '\n\n' }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ ('' if loop.first else '\n') + '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for key, value in c.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES_CALLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '' if loop.first and not m.content else '\n' }}"
    "{{ '<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = {"hermes": ("qwen2.5", HERMES_CALLS), "llama": ("llama3.2", LLAMA3_CALLS), "qwen-coder": ("qwen2.5", QWEN_CODER_CALLS)}


def calling_tokenizer(form: str) -> PreTrainedTokenizerFast:
    """A family's byte tokenizer with a stand-in for its template that shows tools and calls."""
    family, template = CALLS[form]
    tokenizer = family_tokenizer(family)
    tokenizer.chat_template = template
    return tokenizer
