"""The folder where compiled programs stay for later processes."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from hgpo_jax.utils.errors import ConfigError


def keep_compiled(cache_dir: str) -> None:
    """Lets jax keep compiled programs in cache_dir/compiled, unless the user's JAX_COMPILATION_CACHE_DIR says where.

    Raises ConfigError if part of the path is a file.
    """
    folder = Path(cache_dir, "compiled")
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        raise ConfigError(f"cache_dir={cache_dir}: part of the path is a file; move that away, or choose another folder")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
