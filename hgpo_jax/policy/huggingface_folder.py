"""Hugging Face folders: config.json, the tokenizer's files, and writing whole folders atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from hgpo_jax.policy import huggingface_vision, safetensors_files, weight_names
from hgpo_jax.policy.model_config import ModelConfig, RopeScaling

# Prefixes of transformers' class names.
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral", "qwen2_5_vl": "Qwen2_5_VL"}
MISTRAL = {"sliding_window": 4096, "max_position_embeddings": 131072}  # transformers' defaults, which a config.json may omit
REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
CONFIG_FIELDS = (
    *REQUIRED_FIELDS,
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
ROPE_FIELDS = tuple(field.name for field in dataclasses.fields(RopeScaling))
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja, beside the default one
CARD = "README.md"  # with front matter for model hubs (hgpo_jax/policy/model_card.py)
# Files that a folder may hold besides STEM*.safetensors, by that stem.
FILES = {
    "model": {
        CARD,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        huggingface_vision.PREPROCESSOR,
        huggingface_vision.PROCESSOR,
        huggingface_vision.VIDEO,
        *TOKENIZER_FILES,
    },
    "adapter_model": {CARD, "adapter_config.json", "adapter_model.safetensors.index.json"},
}


def beside_weights(folder: Path) -> list[str]:
    """Returns the files of a policy's folder other than its weights and their index, relative to it, in order."""
    names = FILES["model"] - {"model.safetensors.index.json"}
    templates = (f"{TEMPLATES}/{file.name}" for file in (folder / TEMPLATES).glob("*.jinja"))
    return sorted([*(name for name in names if (folder / name).is_file()), *templates])


def digest(folder: Path) -> str:
    """Returns the SHA-256 over the files of a folder that define its policy; other files there do not count."""
    sha256 = hashlib.sha256()
    weights = [file.name for file in folder.glob("model*.safetensors") if file.is_file()]
    weights += ["model.safetensors.index.json"] * (folder / "model.safetensors.index.json").is_file()
    for name in sorted({*weights, *beside_weights(folder)} - {CARD, huggingface_vision.VIDEO}):
        with (folder / name).open("rb") as content:
            sha256.update(f"\0{name}\0".encode() + hashlib.file_digest(content, "sha256").digest())
    return sha256.hexdigest()


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files, its chat templates among them."""
    for name in beside_weights(source):
        if name in TOKENIZER_FILES or name.startswith(TEMPLATES):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def read_json(folder: Path, name: str) -> dict:
    """Reads a JSON file of a policy's folder. Raises ValueError if it is missing or broken."""
    try:
        raw = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise ValueError(f"policy {folder}: holds no {name}") from None
    except OSError as error:
        raise ValueError(f"policy {folder}: {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"policy {folder}: {name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"policy {folder}: {name} is not a JSON object")
    return raw


def read_config(folder: Path) -> ModelConfig:
    """Reads the ModelConfig of a Hugging Face folder.

    Raises:
      ValueError: config.json is missing or broken, or needs features that `Qwen2` does not implement.
    """
    whole = (folder / "config.json").exists() and any(folder.glob("model*.safetensors"))
    if (folder / "adapter_config.json").exists() and not whole:
        base = read_json(folder, "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"policy {folder}: holds adapters of {base or 'another policy'}; merge them first (peft's merge_and_unload), "
            "and give the folder of the result"
        )
    raw = read_json(folder, "config.json")
    if raw.get("model_type") not in list(ARCHITECTURES):
        types = ", ".join(ARCHITECTURES)
        raise ValueError(f"policy {folder}: model_type is {raw.get('model_type')!r:.50} in config.json; {types} are supported")
    if vision := raw["model_type"] == "qwen2_5_vl":
        try:
            raw = huggingface_vision.with_text_at_top(raw)
        except ValueError as error:
            raise ValueError(f"policy {folder}: config.json: {error}") from None
    if raw["model_type"] == "llama" and raw.get("num_key_value_heads") is None and "num_attention_heads" in raw:
        raw["num_key_value_heads"] = raw["num_attention_heads"]  # as the first Llamas leave out
    if raw["model_type"] == "mistral":
        raw = MISTRAL | raw
    missing = [name for name in REQUIRED_FIELDS if name not in raw]
    if missing:
        raise ValueError(f"policy {folder}: config.json lacks {missing[0]}")
    rope, layers = raw.get("rope_scaling") or raw.get("rope_parameters") or {}, raw.get("layer_types") or []
    if not isinstance(rope, dict) or not isinstance(layers, list):
        name = "layer_types" if isinstance(rope, dict) else "rope_scaling"
        raise ValueError(f"policy {folder}: {name} in config.json is not {'a list' if isinstance(rope, dict) else 'an object'}")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _refuse_unsupported(folder, raw, rope, rope_type, layers)
    names = (*CONFIG_FIELDS, "head_dim") if raw["model_type"] == "qwen3" else CONFIG_FIELDS
    if left_out := [name for name in names if name not in raw]:
        raw |= _defaults(raw["model_type"], left_out)
    theta = rope.get("rope_theta", raw.get("rope_theta", 1e6 if vision else 10_000.0))  # as in transformers
    filled = {name: raw[name] for name in CONFIG_FIELDS}
    try:
        if not isinstance(filled["tie_word_embeddings"], bool):
            raise ValueError(f"tie_word_embeddings={filled['tie_word_embeddings']!r:.50}: must be true or false")
        return ModelConfig(
            **filled,
            model_type=raw["model_type"],
            head_dim=raw.get("head_dim"),
            rope_theta=float(theta) if isinstance(theta, int | float) else theta,
            rope_scaling=RopeScaling(**{name: rope[name] for name in ROPE_FIELDS}) if rope_type == "llama3" else None,
            vision=huggingface_vision.vision_of(raw, rope, _preprocessor(folder)) if vision else None,
        )
    except KeyError as error:
        raise ValueError(f"policy {folder}: rope_scaling in config.json lacks {error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"policy {folder}: config.json: {error}") from None


def _refuse_unsupported(folder: Path, raw: dict, rope: dict, rope_type: object, layers: list) -> None:
    """Raises ValueError if a config.json needs features that `Qwen2` lacks."""
    refused = {
        "use_sliding_window": raw.get("use_sliding_window"),
        # A window of the whole context is none.
        "sliding_window": raw["model_type"] == "mistral"
        and raw["sliding_window"] not in (None, 0)
        and raw["sliding_window"] != raw["max_position_embeddings"],
        "layer_types": any(kind != "full_attention" for kind in layers),
        "rope_scaling": rope_type not in ("default", "mrope" if raw["model_type"] == "qwen2_5_vl" else "llama3"),
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": raw["model_type"] in ("qwen3", "llama") and raw.get("attention_bias"),
        "mlp_bias": raw["model_type"] == "llama" and raw.get("mlp_bias"),
        "quantization_config": raw.get("quantization_config"),
    }
    for name, present in refused.items():
        if present:
            value = rope if name == "rope_scaling" else raw[name]
            mend = ""
            if name == "quantization_config":  # it may name hundreds of layers
                value = raw[name].get("quant_method") if isinstance(raw[name], dict) else raw[name]
                mend = f"; {safetensors_files.UNQUANTIZED}"
            raise ValueError(f"policy {folder}: {name}={json.dumps(value):.300} in config.json is not supported{mend}")


def _preprocessor(folder: Path) -> dict:
    """Reads how a folder prepares pictures; {} if it does not say. Raises ValueError."""
    if (folder / huggingface_vision.PREPROCESSOR).exists():
        return read_json(folder, huggingface_vision.PREPROCESSOR)
    name = huggingface_vision.PROCESSOR
    content = read_json(folder, name).get("image_processor", {}) if (folder / name).exists() else {}
    if not isinstance(content, dict):
        raise ValueError(f"policy {folder}: {name}: image_processor is not an object")
    return content


def _defaults(model_type: str, names: list[str]) -> dict:
    """Returns transformers' defaults for fields that a config.json omits, which it may do if they equal the defaults."""
    import transformers  # here, because its configurations take seconds to import, and few files need them

    defaults = getattr(transformers, f"{ARCHITECTURES[model_type]}Config")()
    return {name: getattr(defaults.get_text_config(), name) for name in names}


def config_json(
    config: ModelConfig, dtype: str, bos: int | None = None, eos: int | None = None, pad: int | None = None
) -> dict:
    """Returns the content of config.json, readable by transformers 4 and 5."""
    scaling = config.rope_scaling
    rope: dict[str, object] = {"rope_type": "default"}
    more: dict[str, object] = {}
    if scaling:
        rope = more["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(scaling)}
    if config.model_type == "llama":
        more |= {"attention_bias": False, "mlp_bias": False}
    elif config.model_type == "mistral":
        more["sliding_window"] = None
    else:
        more["use_sliding_window"] = False
    kind = "ForCausalLM"
    if config.vision:
        more |= huggingface_vision.config_fields(config.vision)
        rope["mrope_section"] = list(config.vision.mrope_section)
        kind = "ForConditionalGeneration"
    return {
        "architectures": [f"{ARCHITECTURES[config.model_type]}{kind}"],
        "model_type": config.model_type,
        **{name: getattr(config, name) for name in CONFIG_FIELDS},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        **more,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def open_to_transformers_4(folder: Path) -> None:
    """Rewrites what transformers 5 writes into tokenizer_config.json and transformers 4, as in many servers, cannot read."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return
    before = read_json(folder, file.name)
    settings = dict(before)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if settings != before:  # otherwise a copied file stays as it is, to the byte
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def atomic_folder(folder: Path, stem: str = "model") -> Iterator[Path]:
    """Yields a new folder beside `folder` to write into; it replaces `folder` at the end, or is removed after an error.

    Raises:
      ValueError: `folder` holds a file that this code would not have written there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"policy {folder}: is a file; choose a folder")
    present = [p.name for p in folder.iterdir()] if folder.exists() else []
    weight_files = {name for name in present if name.startswith(stem) and name.endswith(".safetensors")}
    strange = set(present) - FILES[stem] - weight_files
    if stem == "model" and all(file.suffix == ".jinja" for file in (folder / TEMPLATES).glob("*")):
        strange.discard(TEMPLATES)
    if strange:
        raise ValueError(f"policy {folder}: holds {min(strange)}, which a save would not put there; choose another folder")
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    old = partial.with_suffix(".old")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"policy {folder}: cannot be written: {str(error.strerror).lower()}") from None
    try:
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def save(folder: Path, params: dict, tensors: list[weight_names.Tensor], write_rest, stem: str, size: int) -> None:
    """Writes tensors of the parameters, and the files of `write_rest(folder)`, into an `atomic_folder`.

    With several processes, all of them call this and process 0 writes.
    """
    gather = safetensors_files.to_host(params)
    if jax.process_index() == 0:
        with atomic_folder(folder, stem) as partial:
            write_rest(partial)
            safetensors_files.write(partial, tensors, gather, stem, size)
    else:
        for tensor in tensors:
            gather(tensor)
    multihost_utils.sync_global_devices("policy saved")
