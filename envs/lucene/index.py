"""BM25 over texts, equal to Lucene's to the last bit of its 32-bit scores: WebShop's catalogue, passages (`envs/search`).

With N documents, of which n hold a term, f of it in this one, and k1 = 0.9 and b = 0.4 as in Pyserini, a document scores
    sum over the query's terms of  ln(1 + (N - n + 1/2) / (n + 1/2)) * f / (f + k1 (1 - b + b length / average))
(Robertson and Zaragoza, 2009, as Lucene's BM25Similarity computes it, which leaves out the constant factor k1 + 1). A length is
that of the document in terms, of 40 and more rounded down to four significant bits; the average is of the true lengths.

An index is a handful of numpy arrays, in memory or mapped from files alike:
    term_text (bytes), term_start (int64)     sorted terms, concatenated UTF-8
    post_start (int64)                        first posting of each term
    post_doc (int32), post_damp (float32)     per posting: document, and 1 + f / (k1 (1 - b + b length / average))
"""

from array import array
from bisect import bisect_left
from collections import Counter

import numpy as np

from hgpo_jax.envs.lucene.analyzer import analyze, term, tokens

K1 = np.float32(0.9)
B = np.float32(0.4)
TOP_K = 50
_TOKEN_CACHE = 1 << 20
_BLOCK = 64
_PART = 20_000  # documents that are sorted at once


def lossy_length(length: int) -> int:
    """Returns a document length as Lucene's one-byte norm keeps it: exact below 40, then four significant bits."""
    if length < 40:
        return length
    shift = (length - 24).bit_length() - 4
    return 24 + (((length - 24) >> shift) << shift)


class _TokenIds(dict):
    """Token -> term id, filled on first sight; -1 for a stop word."""

    def __init__(self, term_ids: dict[str, int]):
        self._term_ids = term_ids

    def __missing__(self, token: str) -> int:
        word = term(token)
        self[token] = self._term_ids.setdefault(word, len(self._term_ids)) if word else -1
        return self[token]


class IndexBuilder:
    """Collects documents, then makes the arrays. About 8 bytes a posting while collecting, 16 while finishing."""

    def __init__(self):
        self._term_ids: dict[str, int] = {}
        self._token_ids = _TokenIds(self._term_ids)
        self._terms, self._freqs = array("i"), array("i")
        self._distinct, self._lengths = array("i"), array("i")

    def add(self, text: str) -> None:
        """Adds the next document."""
        if len(self._token_ids) > _TOKEN_CACHE:
            self._token_ids.clear()
        counts = Counter(map(self._token_ids.__getitem__, tokens(text)))
        counts.pop(-1, None)
        self._terms.extend(counts.keys())
        self._freqs.extend(counts.values())
        self._distinct.append(len(counts))
        self._lengths.append(counts.total())

    @property
    def documents(self) -> int:
        """Number of documents that hold at least one term."""
        return sum(length > 0 for length in self._lengths)

    def finish(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the index."""
        vocabulary = sorted((word.encode("utf-8", "surrogatepass"), i) for word, i in self._term_ids.items())
        rank = np.empty(len(vocabulary), np.int32)
        rank[[i for _, i in vocabulary]] = np.arange(len(vocabulary), dtype=np.int32)

        lengths = np.frombuffer(self._lengths, np.int32)
        average = np.float32(int(lengths.sum(dtype=np.int64)) / max(self.documents, 1))
        lossy = np.array([lossy_length(int(length)) for length in lengths], np.float32)
        one = np.float32(1)
        with np.errstate(divide="ignore"):
            scale = one / (K1 * ((one - B) + B * lossy / average)) if average else lossy

        terms, freqs = np.frombuffer(self._terms, np.int32), np.frombuffer(self._freqs, np.int32)
        post_start = _starts(np.bincount(terms, minlength=len(vocabulary))[[i for _, i in vocabulary]])
        post_doc, post_damp = np.empty(len(terms), np.int32), np.empty(len(terms), np.float32)
        doc_start, free = _starts(np.frombuffer(self._distinct, np.int32)), post_start[:-1].copy()
        # By parts, because sorting everything at once would take three times the memory of the result.
        for first in range(0, len(lengths), _PART):
            starts = doc_start[first : first + _PART + 1]
            part = slice(starts[0], starts[-1])
            term_rank = rank[terms[part]]
            order = np.argsort(term_rank, kind="stable")
            sizes = np.bincount(term_rank, minlength=len(vocabulary))
            # Where the postings of each term begin in the result, less where they begin in the part.
            shift = free - _starts(sizes)[:-1]
            places = np.arange(len(order)) + shift[term_rank[order]]
            doc = np.repeat(np.arange(first, first + len(starts) - 1, dtype=np.int32), np.diff(starts))[order]
            post_doc[places] = doc
            post_damp[places] = freqs[part][order].astype(np.float32) * scale[doc] + one
            free += sizes
        return {
            "term_text": np.frombuffer(b"".join(word for word, _ in vocabulary), np.uint8),
            "term_start": _starts([len(word) for word, _ in vocabulary]),
            "post_start": post_start,
            "post_doc": post_doc,
            "post_damp": post_damp,
        }


class Index:
    """A read-only search index.

    Args:
        arrays: what `IndexBuilder.finish` returned.
        documents: number of documents that hold at least one term.
        rank: int32 of each document, settles equal scores: the smaller first.
    """

    def __init__(self, arrays: dict[str, np.ndarray], documents: int, rank: np.ndarray):
        self._arrays = arrays
        self._documents = documents
        self._rank = rank
        self._vocabulary = range(len(arrays["term_start"]) - 1)
        # Views: reading one element is ten times cheaper than from a numpy array.
        self._term_text, self._term_start = arrays["term_text"].data, arrays["term_start"].data

    def search(self, query: str, k: int = TOP_K) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions (int64) and scores (float32) of the best `k` documents, best first."""
        scores = np.zeros(-(-len(self._rank) // _BLOCK) * _BLOCK)
        for word, count in Counter(analyze(query)).items():
            docs, damp = self._postings(word)
            if len(docs):
                frequency = len(docs)
                idf = np.float32(np.log(1 + (self._documents - frequency + 0.5) / (frequency + 0.5)))
                weight = np.float32(count) * idf
                scores[docs] += weight - weight / damp  # Lucene adds 32-bit parts in 64 bits
        scores = scores.astype(np.float32)
        # The k-th best of the blocks' maxima is no better than the k-th best score, and is found many times faster.
        maxima = scores.reshape(-1, _BLOCK).max(1)
        floor = np.partition(maxima, -k)[-k] if len(maxima) > k else 0
        matches = np.flatnonzero(scores >= floor if floor > 0 else scores)
        order = np.lexsort((self._rank[matches], -scores[matches]))[:k]
        return matches[order], scores[matches[order]]

    def _postings(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        key = word.encode("utf-8", "surrogatepass")
        i = bisect_left(self._vocabulary, key, key=self._term)
        if i == len(self._vocabulary) or self._term(i) != key:
            return self._arrays["post_doc"][:0], self._arrays["post_damp"][:0]
        start, end = self._arrays["post_start"][i : i + 2]
        return self._arrays["post_doc"][start:end], self._arrays["post_damp"][start:end]

    def _term(self, i: int) -> bytes:
        return self._term_text[self._term_start[i] : self._term_start[i + 1]].tobytes()


def _starts(sizes) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
