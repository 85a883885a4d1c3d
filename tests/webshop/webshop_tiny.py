"""A hand-made catalogue of 13 products, one quirk of the original engine each."""

import json
from pathlib import Path


def product(asin, name, **fields):
    """Return a raw catalogue entry."""
    return {
        "asin": asin, "name": name, "full_description": "A cotton thing.", "small_description": ["Soft cotton"],
        "pricing": "$19.99", "images": ["x"], "category": "fashion", "query": "Cotton Things ",
        "product_category": "Clothing › Women › Tops", "customization_options": "",
    } | fields  # fmt: skip


def values(*names):
    return [{"value": name, "image": None} for name in names]


ITEMS = [
    product(
        "B000000001", "Red Cotton Shirt", pricing="$19.99",
        customization_options={"Size": values("Small", "Large "), "Color": values("red", "blue/white")},
    ),
    product("B000000002", "Ranged Cotton Hat", pricing="$1,010.00$1,020.50$5"),
    product("B000000003", "Bare Cotton Sock", pricing="", full_description="", small_description=["", " padded "]),
    product(
        "B000000004", "Twin Cotton Coat",
        customization_options={
            "fit": values("medium", "features"), "size": values("medium", "tall"), "null": None, "none": [],
        },
    ),
    product("B000000005", "", small_description="One plain string"),
    product(
        "B000000006", "Cotton Candy", category="grocery", query="candy", product_category="Food › Sweets",
        customization_options={"flavor name": values("peppermint cookie", "plain")},
    ),
    product("B000000007", "Second Ranged Cotton Cap", pricing="$5$35", product_category="Clothing › Women › Caps"),
    product("b00000008x", "Lower Case Cotton Belt", small_description=[]),
    product("B000000009", "Cotton Lamp <b>&amp; \"Shade\"", category="garden", product_category="Home › Lamps"),
    product("B00000000A", "Cotton Rug", customization_options={"size": values("a[1]", "<b> 'x' & \"y\"")}),
    product("B00000000B", "Cotton Rope", pricing="no dollar"),
    product("B00000000C", "Cotton Tape"),
    product("B00000000D", "Cotton Tape"),
    product("nan", "Left out: no asin"),
    product("B0000000012", "Left out: asin too long"),
    product("B000000001", "Left out: asin seen before"),
]  # fmt: skip

ATTRIBUTES = {
    "B000000001": {
        "attributes": ["machine washable", "soft"], "instruction": "Find me soft cotton things",
        "instruction_attributes": ["machine wash", "soft"],
    },
    "B000000002": {"attributes": ["warm"], "instruction": "Find me a hat", "instruction_attributes": ["warm"]},
    "B000000004": {"attributes": ["soft"], "instruction": "Find me a coat", "instruction_attributes": ["soft"]},
    "B000000006": {"attributes": ["sweet"], "instruction": "Find me candy", "instruction_attributes": ["sweet"]},
    "B000000007": {"attributes": ["warm"], "instruction": "Find me a cap", "instruction_attributes": ["warm", "waterproof"]},
    "B000000009": {"attributes": []},
}  # fmt: skip

HUMAN = {
    "B000000007": [
        {"instruction": "a warm cap.", "instruction_attributes": ["warm"], "instruction_options": []},
        {"instruction": "nothing named", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000000001": [{
        "instruction": "i want a large shirt in blue...", "instruction_attributes": ["soft"],
        "instruction_options": ["blue", "large"],
    }],
    "B0GONE": [{"instruction": "not sold here", "instruction_attributes": ["x"], "instruction_options": []}],
}  # fmt: skip


def write(folder, items=ITEMS, attributes=ATTRIBUTES, human=HUMAN):
    """Write the three files into `folder`; return their paths."""
    paths = []
    for name, content in (("items", items), ("attributes", attributes), ("human", human)):
        paths.append(Path(folder) / f"{name}.json")
        paths[-1].write_text(json.dumps(content), "utf-8")
    return paths
