"""Loading of a policy from a Hugging Face folder, a GGUF file or the hub."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.sharding import Mesh

from hgpo_jax.policy import huggingface_folder, safetensors_files, weight_names
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.placement import shapes, shardings
from hgpo_jax.policy.policy import Policy
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import read_tokenizer
from hgpo_jax.utils.files import CACHE_DIR
from hgpo_jax.utils.heartbeat import phase

DTYPES = ("float32", "bfloat16")


@phase("loading the weights")
def load_policy(
    folder: str | Path, mesh: Mesh | None = None, dtype: str = "float32", cache_dir: str | Path = CACHE_DIR
) -> Policy:
    """Reads a Hugging Face folder; each process reads the parts of the weights that its devices hold.

    Args:
      folder: holds config.json, model.safetensors (or an index and the files that it lists) and, if the policy should read
        text, a tokenizer. A name such as Qwen/Qwen2.5-1.5B-Instruct is fetched from the hub. It may also be a GGUF file, or
        `smollm2`, the package that contains one (`gguf_folder.py`).
      mesh: the devices for the weights; one device if None.
      dtype: `float32` or `bfloat16`.
      cache_dir: keeps the folders converted from GGUF files.

    Raises:
      ValueError: one line that names the file or tensor at fault.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: must be {' or '.join(DTYPES)}")
    folder = find(folder, cache_dir)
    mesh = mesh or make_mesh("data=1", jax.local_devices()[:1])
    config = huggingface_folder.read_config(folder)
    source = safetensors_files.Weights(folder)
    nested = weight_names.is_nested(source.shapes)
    tensors = weight_names.layout(shapes(config), config.num_hidden_layers, nested=nested)
    source.check(tensors, tied=config.tie_word_embeddings)
    params = source.load(tensors, shardings(config, mesh), dtype)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    policy = Policy(config, params, read_tokenizer(str(folder)) if has_tokenizer else None)
    _check_rows(folder, policy)
    return policy


def _check_rows(folder: Path, policy: Policy) -> None:
    """Raises ValueError if prompts or answers could hold ids without a row of the embedding.

    More rows than tokens are usual: sampling draws from all of them, as the loss does. Tokens that were added without rows, as
    is often the case for padding, are never written.
    """
    tokenizer, rows = policy.tokenizer, policy.config.vocab_size
    if tokenizer is None:
        return
    try:
        frame = [*policy.frame.head, *policy.frame.tail] if policy.frame else []
    except ValueError as error:
        raise ValueError(f"policy {folder}: {error}") from None
    added = set(tokenizer.get_added_vocab().values())
    plain = max((index for index in tokenizer.get_vocab().values() if index not in added), default=0)
    ends = policy.end_tokens if policy.frame or tokenizer.eos_token_id is not None else ()
    if (largest := max([plain, *frame, *ends])) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"policy {folder}: its tokenizer writes {token!r}, id {largest}, but the embedding has {rows} rows")
