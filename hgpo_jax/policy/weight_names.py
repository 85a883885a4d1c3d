"""The names and shapes of weights in files: transformers' ones for our parameters.

The files have one tensor per layer for our stacked parameters, and linear weights [out, in] for our [in, out].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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


def layout(params: dict, layers: int, prefix: str = "", nested: bool = False) -> list[Tensor]:
    """Lists the tensors that hold these parameters (arrays or ShapeDtypeStructs); layers come last, in order.

    nested: use the `is_nested` names of a Qwen2.5-VL.
    """
    tensors = []
    for path, leaf in flatten_dict(params).items():
        stack = next((stack for stack in STACKS if path[: len(stack)] == stack), None)
        for layer in range(leaf.shape[0]) if stack else [None]:
            if path[0] == "last":
                head = (*STACKS[("layers",)], str(layers - 1), *path[1:-1])
            else:
                head = (*STACKS[stack], str(layer), *path[len(stack) : -1]) if stack else path[:-1]
            if head[0] not in ("model", "lm_head", "visual"):
                head = ("model", *head)
            if nested and head[0] != "lm_head":
                head = ("model", "language_model", *head[1:]) if head[0] == "model" else ("model", *head)
            name = ".".join((*head, LEAF_NAMES.get(path[-1], path[-1])))
            shape = leaf.shape[1:] if stack else leaf.shape
            tensor = Tensor(prefix + name, path, layer, shape, jnp.dtype(leaf.dtype).name)
            tensors.append(dataclasses.replace(tensor, shape=shape[::-1]) if tensor.transposed else tensor)
    return sorted(tensors, key=lambda t: layers if t.path[0] == "last" else -1 if t.layer is None else t.layer)


def is_nested(names: Iterable[str], prefix: str = "") -> bool:
    """Whether transformers 4.52 or later named a Qwen2.5-VL so: `model.visual` and `model.language_model`."""
    return any(name.startswith((f"{prefix}model.visual.", f"{prefix}model.language_model.")) for name in names)
