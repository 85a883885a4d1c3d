"""The metadata and tensors of a GGUF file, llama.cpp's format.

The `gguf` package dequantizes the tensors. Its reader is not used: it takes seconds for a vocabulary, and a damaged length in
the header makes it fill the memory.

Source: the specification, docs/gguf.md of ggml-org/ggml.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

# Type number of a value -> its dtype. Two more types are composed of these.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor as stored in the file. shape: outermost dimension first, as in numpy. data: u8[*shape[:-1], bytes of a row]."""

    shape: tuple[int, ...]
    type: int
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """Returns the tensor as f32[shape]. Raises ValueError for a type that the `gguf` package cannot read."""
        import gguf  # optional

        kind = gguf.GGMLQuantizationType(self.type)
        try:
            return gguf.dequantize(self.data, kind).reshape(self.shape)
        except NotImplementedError:
            raise ValueError(f"holds tensors of type {kind.name}, which the gguf package cannot dequantize") from None


class GgufFile:
    """The content of a GGUF file.

    metadata: values by key; numbers, text, or a list of either. tensors: `Entry` by name, not read until used.

    Raises:
      ValueError: not a GGUF file of version 2 or 3, or damaged; says how, without the file's name.
      OSError: the file cannot be opened.
    """

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            start = file.read(4)
        if start != b"GGUF":
            raise ValueError("is not a GGUF file")
        self._bytes, self._at = np.asarray(np.memmap(path, np.uint8, "r")), 4
        version = self._number("<u4")
        if version not in (2, 3):
            raise ValueError(f"is a GGUF file of version {version}; 2 and 3 are supported")
        tensors, values = self._number("<u8"), self._number("<u8")
        self.metadata = dict(self._pair() for _ in range(values))
        described = [self._description() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"is damaged: general.alignment is {alignment!r:.50}")
        begin = -(-self._at // alignment) * alignment
        self.tensors = {name: self._entry(name, shape, kind, begin + offset) for name, shape, kind, offset in described}

    def _numbers(self, kind: str, count: int) -> np.ndarray:
        size = np.dtype(kind).itemsize * count
        if size > len(self._bytes) - self._at:
            raise ValueError("is damaged or incomplete: it ends within its header")
        self._at += size
        return self._bytes[self._at - size : self._at].view(kind)

    def _number(self, kind: str):
        return self._numbers(kind, 1)[0].item()

    def _text(self) -> str:
        try:
            return self._numbers("u1", self._number("<u8")).tobytes().decode()
        except UnicodeDecodeError:
            raise ValueError("is damaged: a text in its header is not UTF-8") from None

    def _pair(self) -> tuple:
        name, kind = self._text(), self._number("<u4")
        if kind != ARRAY:
            return name, self._value(kind)
        kind, count = self._number("<u4"), self._number("<u8")
        if kind in SCALARS:
            return name, self._numbers(SCALARS[kind], count).tolist()
        return name, [self._value(kind) for _ in range(count)]

    def _value(self, kind: int):
        if kind != STRING and kind not in SCALARS:
            raise ValueError(f"is damaged: its header holds a value of type {kind}")
        return self._text() if kind == STRING else self._number(SCALARS[kind])

    def _description(self) -> tuple:
        name, dimensions = self._text(), self._number("<u4")
        shape = tuple(self._numbers("<u8", dimensions).tolist()[::-1])
        return name, shape, self._number("<u4"), self._number("<u8")

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # optional

        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"holds {name:.100} of type {kind}, which the gguf package does not know")
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % elements:
            raise ValueError(f"is damaged: {name:.100} has shape {list(shape)}")
        row = shape[-1] // elements * size
        end = begin + math.prod(shape[:-1]) * row
        if end > len(self._bytes):
            raise ValueError(f"is incomplete: it ends within {name:.100}")
        return Entry(shape, kind, self._bytes[begin:end].reshape(*shape[:-1], row))
