"""Weights as safetensors files: read from a folder straight into a mesh, written in files of bounded size.

The files hold transformers' names and shapes: one tensor per layer for our stacked parameters, and linear weights [out, in] for
our [in, out]. A process reads only the byte ranges that its devices hold.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from hgpo_jax.policy.weight_names import Tensor
from hgpo_jax.utils.errors import one_line

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SHARD_SIZE = 5_000_000_000
PICKLED = ("pytorch_model*.bin", "adapter_model*.bin", "consolidated*.pth", "model*.pt")  # weights in other forms
QUANTIZED = ("qweight", "scales", "biases", "weight_scale", "weight_scale_inv")  # ends of names
UNQUANTIZED = "give the weights as they were before quantization"


class Weights:
    """The tensors of a folder's safetensors files, headers only: shapes and dtypes (`F32`, ...) by name.

    Raises ValueError, one line, if a file is missing or damaged.
    """

    def __init__(self, folder: Path, stem: str = "model"):
        self.folder, self.shapes, self.dtypes, self._files = folder, {}, {}, {}
        files, index = _find(folder, stem)
        for file in files:
            with self._open(file) as handle:
                for name in handle.keys():  # noqa: SIM118  a handle is not a dict
                    part = handle.get_slice(name)
                    self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                    self._files[name] = file
        for name, file in index.items():
            if self._files.get(name) != file:
                raise ValueError(one_line(f"policy {folder}: tensor {name} is not in {file.name}, where the index has it"))

    def _open(self, file: Path):
        try:
            return safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(one_line(f"policy {self.folder}: {file.name} is damaged: {error}")) from None

    def check(self, tensors: list[Tensor], tied: bool = False) -> None:
        """Raises ValueError unless the files hold exactly these tensors.

        tied: a head may be stored beside the embedding if it equals it.
        """
        where, expected = f"policy {self.folder}", {t.name: t.shape for t in tensors}
        missing = [name for name in expected if name not in self.shapes]
        if missing:
            hint = f"; {UNQUANTIZED}" if any(name.endswith(QUANTIZED) for name in self.shapes) else ""
            raise ValueError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all){hint}")
        unexpected = sorted(self.shapes.keys() - expected.keys() - ({"lm_head.weight"} if tied else set()))
        # Old files of Llamas keep what rope_theta gives.
        unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
        if unexpected:
            raise ValueError(one_line(f"{where}: tensor {unexpected[0]} is unexpected ({len(unexpected)} in all)"))
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                actual = list(self.shapes[name])
                raise ValueError(f"{where}: tensor {name} has shape {actual}, the config asks for {list(shape)}")
            if self.dtypes[name] not in DTYPES:
                raise ValueError(f"{where}: tensor {name} has dtype {self.dtypes[name]}; {', '.join(DTYPES)} are supported")
        if tied and "lm_head.weight" in self.shapes:
            self._check_tied("lm_head.weight", next(t.name for t in tensors if t.path[0] == "embed_tokens"))

    def _check_tied(self, head: str, embedding: str) -> None:
        rows, step = self.shapes[embedding][0], 4096
        same = self.shapes[head] == self.shapes[embedding]
        for start in range(0, rows, step):
            part = (slice(start, min(start + step, rows)), slice(None))
            same = same and np.array_equal(self.read(head, part), self.read(embedding, part))
        if not same:
            raise ValueError(
                f"policy {self.folder}: tensor {head} differs from {embedding}, but tie_word_embeddings is true in config.json"
            )

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a tensor, or the part of it at `index`, in the file's dtype."""
        # Opened for each read: an open file keeps everything read from it in memory.
        with self._open(self._files[name]) as handle:
            return handle.get_slice(name)[index or (slice(None),) * len(self.shapes[name])]

    def load(self, tensors: list[Tensor], shardings: dict, dtype: str) -> dict:
        """Loads the parameters of these tensors, placed by `shardings` (NamedSharding) and converted to `dtype`.

        Besides the process's shards, the host holds only parts of one tensor at a time: stacked parameters are filled in place,
        layer by layer, after embedding and head, which are the largest tensors.
        """
        shardings, params = flatten_dict(shardings), {}
        for t in tensors:
            path, sharding = t.path, shardings[t.path]
            if t.layer is None:
                params[path] = self._array(t, sharding, dtype)
                continue
            of_layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            if t.layer == 0:
                count = sum(other.path == path for other in tensors)
                params[path] = jnp.zeros((count, *t.param_shape), dtype, device=sharding)
            params[path] = _layer_writer(sharding)(params[path], self._array(t, of_layer, dtype), t.layer)
            params[path].block_until_ready()  # do not read ahead of the devices
        return unflatten_dict(params)

    def _array(self, tensor: Tensor, sharding: NamedSharding, dtype: str) -> jax.Array:
        """Puts one tensor on the mesh, in our orientation; one part of it at a time passes through the host."""
        shards: list[jax.Array] = []
        by_index: dict[tuple, jax.Array] = {}
        for device, index in sharding.addressable_devices_indices_map(tensor.param_shape).items():
            assert index is not None  # as for every device of this process
            key = tuple((s.start, s.stop) for s in index)
            if key in by_index:  # a replica, copied from device to device
                shards.append(jax.device_put(by_index[key], device))
                continue
            value = self.read(tensor.name, index[::-1] if tensor.transposed else index).astype(jnp.dtype(dtype), copy=False)
            by_index[key] = jax.device_put(value.T if tensor.transposed else value, device)
            shards.append(by_index[key])
        return jax.make_array_from_single_device_arrays(tensor.param_shape, sharding, shards)


@functools.cache
def _layer_writer(sharding: NamedSharding):
    """Compiles the write of one layer into a stack with this sharding."""
    write = lambda stack, layer, index: jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)  # noqa: E731
    return jax.jit(write, donate_argnums=0, out_shardings=sharding)


def _find(folder: Path, stem: str) -> tuple[list[Path], dict[str, Path]]:
    """Finds a folder's safetensors files, and the file of each tensor according to its index, if it has one."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single], {}
    if not index.is_file():
        pickled = [file for pattern in PICKLED for file in sorted(folder.glob(pattern))]
        if pickled:
            raise ValueError(
                f"policy {folder}: {pickled[0].name} is a pickle, which can run code when read; convert it to {single.name}"
            )
        raise ValueError(f"policy {folder}: holds neither {single.name} nor {index.name}")
    try:
        names = json.loads(index.read_text())["weight_map"]
        where = {tensor: folder / file for tensor, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"policy {folder}: {index.name} holds no weight_map from tensors to files") from None
    for tensor, file in names.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            text = f"policy {folder}: {index.name} puts {tensor} into {file!r}; expected a .safetensors file's name"
            raise ValueError(one_line(text))
        if not os.path.isfile(where[tensor]):  # also False for an impossible file name
            raise ValueError(one_line(f"policy {folder}: file {file} is missing, in which {index.name} has {tensor}"))
    return sorted(set(where.values())), where


def to_host(params: dict) -> Callable[[Tensor], np.ndarray]:
    """Returns a function that gathers one tensor, in the file's orientation; all processes call it in the same order."""
    flat = flatten_dict(params)

    def gather(tensor: Tensor) -> np.ndarray:
        value = flat[tensor.path] if tensor.layer is None else _row(flat[tensor.path], tensor.layer)
        value = np.asarray(value) if value.is_fully_addressable else multihost_utils.process_allgather(value, tiled=True)
        return value.T if tensor.transposed else value

    return gather


@jax.jit
def _row(stack, index):
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def write(
    folder: Path, tensors: list[Tensor], read: Callable[[Tensor], np.ndarray], stem: str = "model", size: int = SHARD_SIZE
) -> None:
    """Writes tensors one after the other into files of at most `size` bytes, with an index if there are several.

    read: returns the value of a tensor in its file's shape, converted here to the tensor's dtype.
    Source of the format: github.com/huggingface/safetensors, "Format".
    """
    shards: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if _bytes(tensor) > room or not shards:
            shards.append([])
            room = size
        shards[-1].append(tensor)
        room -= _bytes(tensor)
    count = len(shards)
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [f"{stem}.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, read)
    if count > 1:
        where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(map(_bytes, tensors))}, "weight_map": dict(sorted(where.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * jnp.dtype(tensor.dtype).itemsize


def _write_file(file: Path, tensors: list[Tensor], read: Callable[[Tensor], np.ndarray]) -> None:
    codes = {name: code for code, name in DTYPES.items()}
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        begin, end = end, end + _bytes(t)
        header[t.name] = {"dtype": codes[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            value = np.ascontiguousarray(read(t).astype(jnp.dtype(t.dtype), copy=False))
            out.write(value.reshape(-1).view(np.uint8).data)
