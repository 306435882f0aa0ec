"""Value types of configuration fields, and the class of a config's sections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def refused(problem: str) -> PydanticCustomError:
    """The error that our validators raise, worded like pydantic's own errors.

    >>> print(refused("at most 3").message())
    Input should be at most 3
    """
    return PydanticCustomError("not_allowed", f"Input should be {problem}")  # type: ignore[arg-type]


def _single(value: float) -> float:
    if value and not 1.2e-38 <= abs(value) <= 3.4e38:
        raise refused("a number of single precision, from 1.2e-38 to 3.4e+38")
    return value


# Limit integers because libraries count with 32 bits, floats because training is in fp32.
_MOST = 2**31 - 1
PositiveInt = Annotated[int, Gt(0), Le(_MOST)]
NonNegativeInt = Annotated[int, Ge(0), Le(_MOST)]
PositiveFloat = Annotated[float, Gt(0), AfterValidator(_single)]
NonNegativeFloat = Annotated[float, Ge(0), AfterValidator(_single)]
LearningRate = Annotated[float, Gt(0), Le(1e30)]
"""Learning rates above 1e30 overflow in single precision."""
Probability = Annotated[float, Ge(0), Le(1)]
ProbabilityBelowOne = Annotated[float, Ge(0), Lt(1)]
FolderName = Annotated[str, Field(pattern=r"^[^\x00]*$"), AfterValidator(os.path.expanduser)]
"""A path; ``~`` is the home folder, as in a shell."""


class Section(BaseModel):
    """A section of a config: no unknown keys, and values of the very types that YAML gives them.

    A method's attribute ``kwargs_type`` is the subclass for its settings. Keys that a config leaves
    out of a nested section keep the values that the outer class's default gives them.

    >>> class Head(Section):
    ...     layers: PositiveInt = 2
    ...     width: PositiveInt = 128
    >>> class Kwargs(Section):
    ...     head: Head = Head(layers=3)
    >>> Kwargs(head={"width": 64})
    Kwargs(head=Head(layers=3, width=64))
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        presets = {
            name: field.default.model_dump(exclude_unset=True)
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Section) and isinstance(given.get(name), Mapping)
        }
        return {**given, **{name: {**preset, **given[name]} for name, preset in presets.items()}}
