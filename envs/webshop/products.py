"""Read WebShop's catalogue and attribute files (`.json` or `.json.gz`) into clean product records."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DEFAULT_PRICE = 100.0  # of a product that states none
MAX_ASIN_LENGTH = 10
_CHUNK = 1 << 22  # characters read at a time: the full catalogue is one JSON list of several gigabytes
DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError, RecursionError)  # of files, besides invalid UTF-8 and JSON
_MAX_ELEMENT = 1 << 26  # characters one product may take before the file is taken to be broken


class Product(NamedTuple):
    """One product as the engine sees it; every text as in the file, options cleaned as the original does."""

    asin: str
    name: str
    description: str
    bullets: list[str]
    price_tag: str  # "$19.99" or "$19.99 to $27.99"
    prices: list[float]  # one price, or the two ends of the range a price is drawn from
    category: str
    query: str
    product_category: str  # levels separated by " › "
    options: dict[str, list[str]]  # option name -> values, in page order
    attributes: list[str]
    instruction: str | None  # of the synthetic goals; None: the product has none
    instruction_attributes: list[str]


def read_json(path: Path | str):
    """Returns the content of a JSON file, gzipped or not.

    Raises:
        ValueError: the file is not JSON.
        FileNotFoundError: there is no such file.
    """
    try:
        with _open(path) as file:
            return json.load(file)
    except (ValueError, *DAMAGE) as error:
        raise ValueError(f"{Path(path).name}: not readable as JSON ({error}); get the file again") from None


def read_products(items: Path | str, attributes: Path | str) -> Iterator[Product]:
    """Yields the products of a catalogue in file order, as the original loads them.

    Left out, as in the original: asins that are "nan", longer than ten characters or seen before.

    Args:
        items: the catalogue (`items_shuffle*.json`), a JSON list of products.
        attributes: the attributes and synthetic instructions (`items_ins_v2*.json`), a JSON object by asin.

    Raises:
        ValueError: a file is broken; one line naming file, field, fault and fix.
    """
    annotations = read_json(attributes)
    _need(isinstance(annotations, dict), attributes, "the file", "is not a JSON object", "pass items_ins_v2*.json here")
    asins = set()
    for number, raw in enumerate(_iter_json_list(items)):
        _need(isinstance(raw, dict), items, f"product {number}", "is not a JSON object", "remove it")
        asin = _text(raw, "asin", items, f"product {number}")
        if asin == "nan" or len(asin) > MAX_ASIN_LENGTH or asin in asins:
            continue
        asins.add(asin)
        yield _product(raw, annotations.get(asin, {}), items, attributes)


def search_text(product: Product) -> str:
    """Returns the text of `product` that the search index holds."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return " ".join((product.name, product.description, first_bullet, options)).lower()


def _product(raw: dict, extra: dict, items: Path | str, attributes: Path | str) -> Product:
    asin = raw["asin"]
    where = f"product {asin}"
    bullets = raw.get("small_description")
    bullets = bullets if isinstance(bullets, list) else [bullets]
    _strings(bullets, items, f"{where}, field 'small_description'")
    prices, price_tag = _prices(raw.get("pricing"), items, where)
    _need(isinstance(extra, dict), attributes, where, "is not a JSON object", "give it an 'attributes' list")
    instruction = extra.get("instruction")
    instruction_attributes = extra.get("instruction_attributes") or []
    _strings(instruction_attributes, attributes, f"{where}, field 'instruction_attributes'")
    if instruction is not None:
        _need(isinstance(instruction, str), attributes, f"{where}, field 'instruction'", "is not a string", "write a string")
        _need(
            instruction_attributes,
            attributes,
            f"{where}, field 'instruction_attributes'",
            "is missing or empty although there is an instruction",
            "name at least one attribute",
        )
    return Product(
        asin,
        _text(raw, "name", items, where),
        _text(raw, "full_description", items, where),
        bullets,
        price_tag,
        prices,
        _text(raw, "category", items, where),
        _text(raw, "query", items, where).lower().strip(),
        _text(raw, "product_category", items, where),
        _options(raw.get("customization_options"), items, where),
        _strings(extra.get("attributes", ["DUMMY_ATTR"]), attributes, f"{where}, field 'attributes'"),
        instruction,
        instruction_attributes,
    )


def _prices(pricing, items: Path | str, where: str) -> tuple[list[float], str]:
    """Returns the prices and the price tag of a `pricing` text such as "$19.99$27.99"."""
    field = f"{where}, field 'pricing'"
    _need(pricing is None or isinstance(pricing, str), items, field, "is not a string", "write it like '$19.99'")
    parts = [re.sub(r"[^\d.]", "", part) for part in (pricing or "").split("$")[1:]]
    try:
        prices = [float(part) for part in parts][:2] or [DEFAULT_PRICE]
    except ValueError:
        prices = [math.inf]
    numbers = max(prices) < math.inf
    _need(numbers, items, field, f"holds no number after a '$' ({pricing!r:.80})", "write it like '$19.99'")
    return prices, " to ".join(f"${price}" for price in prices)


def _options(raw, items: Path | str, where: str) -> dict[str, list[str]]:
    """Returns the cleaned options; names that differ in case only keep the last list, as in the original."""
    field = f"{where}, field 'customization_options'"
    if not raw:
        return {}
    _need(isinstance(raw, dict), items, field, "is not a JSON object", "map each option name to a list of values")
    options = {}
    for name, contents in raw.items():
        if contents is None:
            continue
        well_formed = isinstance(contents, list) and all(
            isinstance(content, dict) and isinstance(content.get("value"), str) for content in contents
        )
        _need(well_formed, items, field, f"has a broken list under {name!r}", 'write [{"value": "red"}, ...]')
        options[name.lower()] = [content["value"].strip().replace("/", " | ").lower() for content in contents]
    return options


def _text(raw: dict, key: str, path: Path | str, where: str) -> str:
    value = raw.get(key)
    _need(isinstance(value, str), path, f"{where}, field '{key}'", "is missing or not a string", "give it a string")
    assert isinstance(value, str)
    return value


def _strings(value, path: Path | str, where: str) -> list[str]:
    well_formed = isinstance(value, list) and all(isinstance(item, str) for item in value)
    _need(well_formed, path, where, "is not a list of strings", "make it a JSON list of strings")
    return value


def _need(condition, path: Path | str, where: str, fault: str, fix: str) -> None:
    if not condition:
        raise ValueError(f"{Path(path).name}: {where} {fault}; {fix}")


def _open(path: Path | str):
    opener = gzip.open if str(path).endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8")


def _iter_json_list(path: Path | str) -> Iterator:
    """Yields the elements of a JSON list without holding the whole file in memory."""
    decode = json.JSONDecoder().raw_decode
    try:
        with _open(path) as file:
            buffer = file.read(_CHUNK).lstrip()
            _need(buffer.startswith("["), path, "the file", "is not a JSON list", "pass items_shuffle*.json here")
            at, ended = 1, False
            while True:
                while at < len(buffer) and buffer[at] in " \t\r\n,":
                    at += 1
                if buffer[at : at + 1] == "]":
                    return
                try:
                    element, end = decode(buffer, at)
                except json.JSONDecodeError as error:  # an element cut off by the end of the buffer, or a real fault
                    more = file.read(_CHUNK)
                    ended = ended or not more
                    broken = ended or len(buffer) - at > _MAX_ELEMENT
                    _need(not broken, path, "the file", f"is broken JSON ({error.msg})", "get the file again")
                    buffer, at = buffer[at:] + more, 0
                except ValueError as error:  # a number of thousands of digits
                    _need(False, path, "the file", f"is broken JSON ({error})", "get the file again")
                else:
                    yield element
                    at = end
    except (UnicodeDecodeError, *DAMAGE) as error:
        raise ValueError(f"{Path(path).name}: not readable as JSON ({error}); get the file again") from None
