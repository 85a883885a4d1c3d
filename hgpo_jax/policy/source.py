"""The origin of a policy: a Hugging Face folder, a GGUF file or package, or the hub."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from hgpo_jax.policy import huggingface_folder
from hgpo_jax.policy.gguf_folder import unpack
from hgpo_jax.policy.tokenizer import read_tokenizer
from hgpo_jax.utils.files import CACHE_DIR
from hgpo_jax.utils.heartbeat import phase


@phase("finding the policy")
def find(folder: str | Path, cache_dir: str | Path = CACHE_DIR, *, weights: bool = True) -> Path:
    """Returns the local folder of a policy; a name like Qwen/Qwen2.5-1.5B-Instruct is fetched from the hub.

    A GGUF file or package (`gguf_folder.py`) becomes a folder in `cache_dir`. weights: whether they are fetched, too.

    Raises:
      ValueError: neither a folder nor available from the hub, or a GGUF file that cannot be read.
    """
    folder = unpack(Path(folder).expanduser() if str(folder).startswith("~") else folder, cache_dir)
    if Path(folder).is_dir():
        return Path(folder)
    if not is_hub_name(folder):
        raise ValueError(f"policy {folder}: no such folder")
    from huggingface_hub import snapshot_download  # takes seconds to import, and folders need no hub

    patterns = [*["model*.safetensors"] * weights, "*.json", huggingface_folder.CARD, *huggingface_folder.TOKENIZER_FILES]
    patterns += [f"{huggingface_folder.TEMPLATES}/*.jinja", "*.model"]
    try:
        return Path(snapshot_download(str(folder), allow_patterns=patterns))
    except Exception as error:  # errors come from several libraries, and none is worth a traceback
        reason = " ".join(str(error).split())
        raise ValueError(f"policy {folder}: no such folder, and it cannot be fetched from the hub: {reason}") from None


def is_hub_name(source: str | Path) -> bool:
    """Whether this is a name like Qwen/Qwen2.5-1.5B-Instruct, and no folder here."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source))) and not Path(source).is_dir()


def load_tokenizer(name: str, cache_dir: str):
    """Calls `read_tokenizer`, cached while its files stay as they are. Raises ValueError, in one line.

    name: a folder, a GGUF file or package (`gguf_folder.py`), or a name on the hub.
    """
    place = str(unpack(name, cache_dir))
    try:
        place = _fetched_tokenizer(place) if is_hub_name(place) else place
    except ValueError as error:
        raise ValueError(f"policy.tokenizer={name}: cannot be read: {error}") from None
    folder = Path(place)  # none for names of one word, such as gpt2, which transformers finds
    stats = [(folder / file).stat() for file in huggingface_folder.beside_weights(folder)] if folder.is_dir() else []
    return _cached_tokenizer(place, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@functools.lru_cache(maxsize=16)  # each look at the hub takes a moment
def _fetched_tokenizer(name: str) -> str:
    return str(find(name, weights=False))


@functools.lru_cache(maxsize=16)
def _cached_tokenizer(place: str, files: tuple):
    return read_tokenizer(place)
