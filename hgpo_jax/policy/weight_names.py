"""The names and shapes of weights in files: transformers' ones for our parameters.

The files have one tensor per layer for our stacked parameters, and linear weights [out, in] for our [in, out].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

LEAF_NAMES = {"kernel": "weight", "embedding": "weight", "lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
# Parameters that stack layers, and their names in files before the number of a layer. The last layer of the language model is
# apart from the others, as `last`.
STACKS: dict[tuple[str, ...], tuple[str, ...]] = {("layers",): ("model", "layers"), ("visual", "blocks"): ("visual", "blocks")}
TRANSPOSED = ("kernel", "lora_a", "lora_b")  # stored transposed in the file


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file and its parameter: a whole parameter, or one layer of a stacked one."""

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]  # in the file
    dtype: str

    @property
    def transposed(self) -> bool:
        return self.path[-1] in TRANSPOSED

    @property
    def param_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def layout(params: dict, layers: int, prefix: str = "") -> list[Tensor]:
    """Lists the tensors that hold these parameters (arrays or ShapeDtypeStructs); layers come last, in order."""
    tensors = []
    for path, leaf in flatten_dict(params).items():
        stack = next((stack for stack in STACKS if path[: len(stack)] == stack), None)
        for layer in range(leaf.shape[0]) if stack else [None]:
            if path[0] == "last":
                head = (*STACKS[("layers",)], str(layers - 1), *path[1:-1])
            else:
                head = (*STACKS[stack], str(layer), *path[len(stack) : -1]) if stack else path[:-1]
            name = ".".join((*head, LEAF_NAMES.get(path[-1], path[-1])))
            if head[0] not in ("model", "lm_head", "visual"):
                name = f"model.{name}"
            shape = leaf.shape[1:] if stack else leaf.shape
            tensor = Tensor(prefix + name, path, layer, shape, jnp.dtype(leaf.dtype).name)
            tensors.append(dataclasses.replace(tensor, shape=shape[::-1]) if tensor.transposed else tensor)
    return sorted(tensors, key=lambda t: layers if t.path[0] == "last" else -1 if t.layer is None else t.layer)


def as_stored(tensors: list[Tensor], names: Container[str]) -> list[Tensor]:
    """Renames the tensors of a Qwen2.5-VL as those files name them that transformers writes since 4.52, if `names` has such."""
    if "model.language_model.norm.weight" not in names:
        return tensors

    def renamed(name: str) -> str:
        if name.startswith("visual."):
            return f"model.{name}"
        return re.sub(r"^model\.", "model.language_model.", name)

    return [dataclasses.replace(tensor, name=renamed(tensor.name)) for tensor in tensors]
