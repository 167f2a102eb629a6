"""What a case table is made of: one call of an operator, with inputs that are the same in every run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.oracles import ORACLES, Array, Expected

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT_TYPES", "Case", "normal"]

FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_TYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}


@dataclass(frozen=True, eq=False)
class Case:
    """One call. `build` makes the inputs from a generator seeded by the name; absent inputs are left out.

    `opset` is the version of the default domain that the case needs; `outputs` names the outputs that the node lists,
    all that the oracle gives when it is empty.
    """

    name: str
    operator: str
    build: Callable[[np.random.Generator], Mapping[str, Array]]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    opset: int = 18

    def __str__(self) -> str:
        return f"{self.operator}-{self.name}"

    @cached_property
    def inputs(self) -> Mapping[str, Array]:
        return self.build(np.random.default_rng(zlib.crc32(self.name.encode())))

    @cached_property
    def expected(self) -> Mapping[str, Expected]:
        """The outputs that the node lists, as the oracle has them."""
        results = ORACLES[self.operator](self.inputs, self.attributes)
        return {name: results[name] for name in self.outputs or results}


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], scale: float = 1.0) -> NDArray[Any]:
    """Normal values of standard deviation `scale`, rounded to `dtype`."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype)
