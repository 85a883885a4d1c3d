"""Pictures in requests: parts of messages whose data stand in the request itself, as PNG, JPEG, WebP or GIF.

Addresses are refused: a client could make the server ask for what only the server can reach.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from hgpo_jax.policy.model_config import VisionConfig
from hgpo_jax.policy.pictures import MAX_PIXELS, PromptPictures, check, grid_of, insert_tokens
from hgpo_jax.sampling.continuous_batching import MOST_PICTURES
from hgpo_jax.serving.requests import OpenBody, TooLong

MAX_BYTES = 2**26  # of all pictures of a request, as they are sent
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)


def _data_of(url: str) -> str:
    """Returns the base64 text of a data: URL. Raises ValueError for another one."""
    match = _DATA_URL.match(url)
    if not match:
        raise ValueError(f"{url[:30]!r} is no picture's data; give data:image/png;base64,... with the picture in it")
    return url[match.end() :]


DataUrl = Annotated[str, pydantic.AfterValidator(_data_of)]


class ImageUrl(OpenBody):
    """The picture of OpenAI's chat completions; its detail is ignored."""

    url: DataUrl


class ImageUrlPart(OpenBody):
    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, pydantic.BeforeValidator(lambda url: {"url": url} if isinstance(url, str) else url)]

    @property
    def data(self) -> str:
        return self.image_url.url


class InputImagePart(OpenBody):
    """The picture of OpenAI's responses; its detail is ignored."""

    type: Literal["input_image"]
    image_url: DataUrl

    @property
    def data(self) -> str:
        return self.image_url


class ImageSource(OpenBody):
    type: Literal["base64"]
    data: str


class ImageBlock(OpenBody):
    """The picture of Anthropic's messages."""

    type: Literal["image"]
    source: ImageSource

    @property
    def data(self) -> str:
        return self.source.data


def decode(data: str, name: str) -> np.ndarray:
    """Decodes the base64 text of a picture's file: uint8 [height, width, 3], with transparent parts on white.

    Raises ValueError, one line that begins with `name`, for what is no whole picture of reasonable sides.
    """
    from PIL import Image, ImageOps  # here: only pictures need it

    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{name}: its data are not base64") from None
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(file), formats=FORMATS) as opened:
            warnings.simplefilter("ignore")  # about sizes, which are checked here
            if opened.width * opened.height > MAX_PIXELS:
                raise ValueError(f"{name}: has {opened.width * opened.height:,} pixels; give at most {MAX_PIXELS:,}")
            turned: Any = ImageOps.exif_transpose(opened)
            image = turned.convert("RGBA" if turned.has_transparency_data else "RGB")
            if image.mode == "RGBA":
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
            picture = np.asarray(image)
    except Image.DecompressionBombError:
        raise ValueError(f"{name}: has too many pixels; give at most {MAX_PIXELS:,}") from None
    except (OSError, SyntaxError, EOFError):  # as PIL tells damaged files
        raise ValueError(f"{name}: its data are no whole picture; give one of {', '.join(FORMATS)}") from None
    check(picture, name)
    return picture


def prepared(data: Sequence[str], vision: VisionConfig | None, limit: int) -> PromptPictures | None:
    """Decodes the pictures of a prompt and prepares them, one after the other; None if it holds none.

    limit: the most features of all, a token each; beyond it nothing is prepared, which takes 16 times a picture's memory.

    Raises TooLong, or ValueError, one line.
    """
    if not data:
        return None
    if (v := vision) is None:
        raise ValueError("messages: this policy sees no pictures; send texts alone")
    if len(data) > MOST_PICTURES[-1]:
        raise ValueError(f"messages: hold {len(data)} pictures; send at most {MOST_PICTURES[-1]}")

    def decoded() -> Iterator[np.ndarray]:
        features = 0
        for number, one in enumerate(data, 1):
            picture = decode(one, f"messages: picture {number}")
            features += math.prod(grid_of(picture.shape[0], picture.shape[1], v)) // v.spatial_merge_size**2
            if features > limit:
                raise TooLong(features, limit)
            yield picture

    return PromptPictures.of(decoded(), v)


def with_features(ids: list[int], pictures: PromptPictures | None) -> list[int]:
    """Gives each picture as many image tokens as it has features.

    Raises ValueError, one line, if the chat template has not shown each as one.
    """
    if pictures is None:
        return ids
    count, shown = len(pictures.grids), ids.count(pictures.v.image_token_id)
    if shown != count:
        raise ValueError(f"tokenizer: its chat template shows {shown} of {count} pictures; take that of the published model")
    return insert_tokens(ids, pictures.grids, pictures.v)
