"""Made-up catalogues of any size in the original's file format, to measure what the full one will cost.

Sizes follow the real thousand products: about 108 indexed words a product, 42 % with options, 9 % with a price range.
Words follow Zipf's law, and every product adds a few of its own (brands, part numbers), as real ones do.
"""

import json
from pathlib import Path

import numpy as np

_SYLLABLES = [c + v + e for c in "bcdfgklmnprstvw" for v in "aeiou" for e in ("", "n", "r", "s", "t")]
_ENDINGS = ("", "", "s", "ing", "ed", "er", "ness", "able")
_CATEGORIES = ("beauty", "electronics", "garden", "fashion", "grocery")
_ASIN_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def write_catalogue(folder: Path | str, products: int, seed: int = 0, vocabulary: int = 300_000) -> tuple[Path, Path]:
    """Writes `items.json` and `attributes.json` into `folder`; returns both paths."""
    rng = np.random.default_rng(seed)
    words = np.array([_word(rank) for rank in range(vocabulary)])
    items, attributes = Path(folder) / "items.json", Path(folder) / "attributes.json"
    with open(items, "w") as file, open(attributes, "w") as extra:
        for number in range(products):
            product, wish = _product(rng, words, number)
            file.write(("[" if number == 0 else ",\n") + json.dumps(product))
            extra.write(("{" if number == 0 else ",\n") + f"{json.dumps(product['asin'])}: {json.dumps(wish)}")
        file.write("]")
        extra.write("}")
    return items, attributes


def _product(rng: np.random.Generator, words: np.ndarray, number: int) -> tuple[dict, dict]:
    ranks = np.exp(rng.random(160) * np.log(len(words))).astype(int)  # density 1 / rank
    text = [*words[ranks], _asin(number * 7919), f"{number % 97}.{number % 10}oz", _word(number + len(words))]
    options = {}
    for name in ("color", "size", "style")[: int(rng.choice(4, p=(0.58, 0.15, 0.2, 0.07)))]:
        values = _pick(rng, words, 2000, int(rng.integers(2, 8)))
        options[name] = [{"value": str(value)} for value in dict.fromkeys(values)]
    low = round(float(rng.uniform(5, 200)), 2)
    product = {
        "asin": _asin(number),
        "name": " ".join(text[-3:] + text[:12]),
        "full_description": " ".join(text[12:80]),
        "small_description": [" ".join(text[start : start + 16]) for start in range(80, 160, 16)],
        "pricing": f"${low}${low + 10:.2f}" if rng.random() < 0.09 else f"${low}",
        "images": [""],
        "category": _CATEGORIES[number % 5],
        "query": " ".join(_pick(rng, words, 300, 2)),
        "product_category": " › ".join(_pick(rng, words, 200, 3)),
        "customization_options": options,
    }
    named = [" ".join(pair) for pair in _pick(rng, words, 500, (3, 2))]
    wish: dict[str, str | list[str]] = {"attributes": named}
    if rng.random() < 0.4:
        wish |= {"instruction": f"Find me {named[0]} {product['query']}", "instruction_attributes": named[:1]}
    return product, wish


def _pick(rng: np.random.Generator, words: np.ndarray, commonest: int, size: int | tuple[int, int]) -> np.ndarray:
    return words[rng.integers(0, min(commonest, len(words)), size)]


def _word(rank: int) -> str:
    """Returns a made-up word, another one for each rank."""
    ending = _ENDINGS[rank % len(_ENDINGS)]
    text = ""
    while True:
        rank, digit = divmod(rank, len(_SYLLABLES))
        text += _SYLLABLES[digit]
        if not rank:
            return text + ending
        rank -= 1


def _asin(number: int) -> str:
    digits = ""
    for _ in range(8):
        number, digit = divmod(number, 36)
        digits = _ASIN_DIGITS[digit] + digits
    return "B0" + digits
