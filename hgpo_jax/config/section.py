"""The base class and the types of configuration sections."""

from __future__ import annotations

import os
import re
from typing import Annotated, get_args

import pydantic
from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]

CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # not allowed in a text; the file system decides what else a path may hold


def _takes_bool(annotation) -> bool:
    return annotation is bool or any(map(_takes_bool, get_args(annotation)))


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _is_meant(cls, value, info):
        """Rejects booleans for numbers: `true`, `yes` and `on` do not mean the number 1."""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[info.field_name].annotation):
            raise ValueError("true and false are not values of this field")
        return value

    @pydantic.field_validator("*")
    @classmethod
    def _is_text(cls, value):
        if isinstance(value, str) and CONTROL.search(value):
            raise ValueError("contains a control character; remove it")
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def field(default, meaning, **limits):
    return Field(default, description=meaning, validate_default=True, **limits)
