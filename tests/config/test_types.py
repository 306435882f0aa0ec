"""Value types, and the words for them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Annotated, Any, Literal

import pytest
from annotated_types import MinLen
from pydantic import BaseModel, Field

from solo_ext.config.check import check_method_kwargs, expected, literal_choices
from solo_ext.config.schema import Seed, Share
from solo_ext.core.errors import ConfigError
from solo_ext.core.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProbabilityBelowOne,
    method_kwargs,
)


class Inner(BaseModel):
    b: int = 0
    a: int = 0


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (bool, "true or false"),
        (PositiveInt, "an integer above 0"),
        (NonNegativeInt, "an integer of 0 or more"),
        (PositiveFloat, "a number above 0"),
        (NonNegativeFloat, "a number of 0 or more"),
        (Probability, "a number from 0 to 1"),
        (ProbabilityBelowOne, "a number of 0 or more, below 1"),
        (Share, "a number above 0, up to 1"),
        (Seed, "an integer from 0 to 4294967295"),
        (Annotated[float, Field(ge=0, le=0.5)], "a number from 0 to 0.5"),
        (str | None, "text, or null"),
        (Literal["a", "b"], "a or b"),
        (Literal["a"] | Literal[3] | None, "a or 3 or null"),
        (Literal[-1] | Share, "-1, or a number above 0, up to 1"),
        (list[PositiveInt], "a list, each an integer above 0"),
        (Annotated[list[float], MinLen(1)], "a list of 1 or more, each a number"),
        (Annotated[list[str], Field(min_length=3, max_length=3)], "a list of 3, each text"),
        (list[Any], "a list"),
        (dict[str, Any], "a mapping"),
        (Inner, "a mapping with the keys a, b"),
        (Annotated[str, Field(description="a time")] | None, "a time, or null"),
        (Any, "a value"),
    ],
)
def test_words(annotation: Any, words: str) -> None:
    assert expected(annotation) == words


def test_choices_are_told_from_other_unions() -> None:
    assert literal_choices(Literal["a", 1] | None) == ["a", "1", "null"]
    assert literal_choices(Literal["a"] | int) is None
    assert literal_choices(None | int) is None


@method_kwargs
class Kwargs:
    dim: PositiveInt
    share: ProbabilityBelowOne = 0.1
    sizes: list[PositiveInt] | None = None
    kind: Literal["a", "bee"] = "a"


def test_dataclass_is_frozen_and_keyword_only() -> None:
    kwargs = Kwargs(dim=3)
    assert [f.name for f in fields(Kwargs)] == ["dim", "share", "sizes", "kind"]  # type: ignore
    with pytest.raises(FrozenInstanceError):
        kwargs.dim = 4
    with pytest.raises(TypeError):
        Kwargs(3)  # type: ignore[misc]


def test_method_kwargs_are_filled() -> None:
    filled = check_method_kwargs(Kwargs, {"dim": 3, "sizes": [1]})
    assert filled == {"dim": 3, "share": 0.1, "sizes": [1], "kind": "a"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "method_kwargs.dim=null: this key is required; allowed: an integer above 0"),
        ({"dim": 0}, "method_kwargs.dim=0: not a valid value; allowed: an integer above 0"),
        ({"dim": 1.0}, "method_kwargs.dim=1.0: not a valid value; allowed: an integer above 0"),
        ({"dim": True}, "method_kwargs.dim=true: not a valid value; allowed: an integer above 0"),
        (
            {"dim": 1, "share": 1},
            "method_kwargs.share=1: not a valid value; allowed: a number of 0 or more, below 1",
        ),
        (
            {"dim": 1, "sizes": [1, "x"]},
            "method_kwargs.sizes.1='x': not a valid value; allowed: an integer above 0",
        ),
        (
            {"dim": 1, "kind": "be"},
            "method_kwargs.kind='be': not a valid choice; did you mean 'bee'? allowed: a, bee",
        ),
        (
            {"dim": 1, "shar": 0.5},
            "method_kwargs.shar=0.5: unknown key; did you mean 'share'? "
            "allowed: dim, kind, share, sizes",
        ),
    ],
)
def test_method_kwargs_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_method_kwargs(Kwargs, given)
    assert str(caught.value) == line
