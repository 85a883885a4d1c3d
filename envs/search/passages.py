"""Passages and their search index in a folder of mapped arrays, which processes share.

    passages = Passages.open(cache, digest, source)    # builds the folder cache/digest where it is not there yet
    passages.retrieve(["who founded ashbury belford?"], 3)

The index is the one of WebShop (`envs/lucene`). Measured beside bm25s 0.3.16 in `README.md`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from hgpo_jax.envs.lucene.index import Index, IndexBuilder

FORMAT = {"format": "hgpo_jax passages", "version": 1}
MAX_QUERY = 1000  # characters that are read of a query
_META, _TEXTS = "meta.json", "texts.bin"
# dtype kind and the array, or file, that has as many items, one item less, or whose end its last item is.
_INDEX = {"term_start": "i", "post_start": "i", "post_doc": "i", "post_damp": "f", "term_text": "u", "text_start": "i"}


class Passages:
    """The passages of one corpus, in the order of the corpus, read-only.

    Args:
      arrays: those of `IndexBuilder.finish`, `text_start` (i64[passages + 1]) and `texts` (u8[.], UTF-8 one after another).
      documents: passages that hold at least one term.
    """

    def __init__(self, arrays: dict[str, np.ndarray], documents: int):
        self._start, self._texts = arrays["text_start"], arrays["texts"]
        self._index = Index(arrays, documents, np.arange(len(self), dtype=np.int32))
        self._best = functools.lru_cache(maxsize=1 << 12)(self._search)  # members of a group ask alike

    def __len__(self) -> int:
        return len(self._start) - 1

    def __getitem__(self, number: int) -> str:
        start, end = self._start[number : number + 2]
        return self._texts[start:end].tobytes().decode("utf-8", "replace")

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """Returns (passage, score) of the best `k` passages for each query, best first: fewer if fewer have a word of it."""
        return [self._best(query[:MAX_QUERY], k) for query in queries]

    def _search(self, query: str, k: int) -> list[tuple[str, float]]:
        numbers, scores = self._index.search(query, k)
        return [(self[int(number)], float(score)) for number, score in zip(numbers, scores, strict=True)]

    @classmethod
    def open(cls, cache: Path, digest: str, source: Callable[[], Iterable[str]]) -> Passages:
        """Maps the folder `cache/digest`, which is first built from the passages of `source()` if it does not exist.

        digest: a name of the corpus; equal names are equal corpora. Raises ValueError for a folder that is damaged or
        holds another corpus, and the errors of `source`.
        """
        folder = Path(cache, digest)
        if not folder.exists():
            Path(cache).mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=cache))
            try:
                build(source(), digest, partial)
                os.rename(partial, folder)
            except OSError:
                if not folder.exists():  # otherwise another process was first
                    raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return _mapped(os.fspath(folder), digest)


def build(passages: Iterable[str], digest: str, folder: Path) -> None:
    """Writes passages and their index into an empty folder. Raises ValueError if there are none."""
    index, start = IndexBuilder(), [0]
    with open(folder / _TEXTS, "wb") as texts:
        for passage in passages:
            start.append(start[-1] + texts.write(passage.encode("utf-8", "replace")))
            index.add(passage.lower())
    if len(start) == 1:
        raise ValueError("there are no passages; give a file with at least one")
    documents = index.documents
    for name, values in (index.finish() | {"text_start": np.array(start, np.int64)}).items():
        np.save(folder / f"{name}.npy", values)
    meta = FORMAT | {"digest": digest, "documents": documents}
    (folder / _META).write_text(json.dumps(meta), "utf-8")


@functools.lru_cache(maxsize=4)
def _mapped(folder: str, digest: str) -> Passages:
    """Maps a built folder; environments of one process share it. Raises ValueError."""
    try:
        meta = json.loads(Path(folder, _META).read_text("utf-8"))
        if not isinstance(meta, dict) or {key: meta.get(key) for key in FORMAT} != FORMAT:
            raise ValueError("another format or version")
        if meta["digest"] != digest:
            raise ValueError(f"it is of another corpus, {meta['digest']!r:.80}")
        arrays = {name: np.load(Path(folder, f"{name}.npy"), mmap_mode="r", allow_pickle=False) for name in _INDEX}
        arrays["texts"] = np.memmap(Path(folder, _TEXTS), np.uint8, "r")
        _check(arrays)
        return Passages(arrays, int(meta["documents"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: no index of these passages ({error}); remove it, and it is built again") from None


def _check(arrays: dict[str, np.ndarray]) -> None:
    """Raises ValueError unless the arrays have the dtypes and sizes of one build."""
    odd = [name for name, kind in _INDEX.items() if arrays[name].dtype.kind != kind or arrays[name].ndim != 1]
    ends = {"text_start": "texts", "term_start": "term_text", "post_start": "post_doc"}
    odd += [name for name, of in ends.items() if not len(arrays[name]) or arrays[name][-1] != len(arrays[of])]
    if len(arrays["post_damp"]) != len(arrays["post_doc"]) or len(arrays["term_start"]) != len(arrays["post_start"]):
        odd.append("post_damp")
    if odd:
        raise ValueError(f"{odd[0]}.npy does not fit the other files")
