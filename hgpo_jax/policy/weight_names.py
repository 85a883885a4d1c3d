"""The names and shapes of weights in files: transformers' ones for our parameters.

The files have one tensor per layer for our stacked parameters, and linear weights [out, in] for our [in, out].
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

LEAF_NAMES = {"kernel": "weight", "embedding": "weight", "lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
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
        stacked = path[0] == "layers"
        for layer in range(layers - 1) if stacked else [None]:
            number = layer if stacked else layers - 1
            head = ("model", "layers", str(number), *path[1:-1]) if path[0] in ("layers", "last") else path[:-1]
            name = ".".join((*head, LEAF_NAMES.get(path[-1], path[-1])))
            if head[0] not in ("model", "lm_head"):
                name = f"model.{name}"
            shape = leaf.shape[1:] if stacked else leaf.shape
            tensor = Tensor(prefix + name, path, layer, shape, jnp.dtype(leaf.dtype).name)
            tensors.append(dataclasses.replace(tensor, shape=shape[::-1]) if tensor.transposed else tensor)
    return sorted(tensors, key=lambda t: layers if t.path[0] == "last" else -1 if t.layer is None else t.layer)
