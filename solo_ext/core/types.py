"""Value types of configuration fields; pydantic enforces them when a config is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt

C = TypeVar("C")

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
LearningRate = Annotated[float, Gt(0), Le(1e30)]
"""Learning rates above 1e30 overflow in single precision."""
Probability = Annotated[float, Ge(0), Le(1)]
ProbabilityBelowOne = Annotated[float, Ge(0), Lt(1)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def method_kwargs(cls: type[C]) -> type[C]:
    """Class decorator for the typed ``method_kwargs`` of a method; unknown keys are refused.

    The class becomes a frozen, keyword-only dataclass; annotate its fields with the types of this
    module. :func:`solo_ext.config.check.check_method_kwargs` checks values against it.
    """
    return dataclass(frozen=True, kw_only=True)(cls)
