"""Cases of RingAttentionUpdateV2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array

from .case import BFLOAT16, FLOAT16, FLOAT32, FLOAT_TYPES, Case, normal

__all__ = ["CASES"]

OPERATOR = "RingAttentionUpdateV2"
LANES = 8
SOFTMAX_LAYOUTS = {"default": "", "sbh": "SBH", "tnd": "TND"}
Inputs = dict[str, Array]
Edit = Callable[[Inputs], None]


@dataclass(frozen=True)
class Padded:
    """An SBH call: attention (S, B, N * D), statistics (B, N, S, 8)."""

    tokens: int = 5
    batch: int = 2
    heads: int = 3
    head_size: int = 16
    dtype: np.dtype[Any] = FLOAT32

    def build(self, rng: np.random.Generator) -> Inputs:
        attention = (self.tokens, self.batch, self.heads * self.head_size)
        return build(rng, attention, (self.batch, self.heads, self.tokens), self.dtype)


@dataclass(frozen=True)
class Packed:
    """A TND call: attention (T, N, D), statistics declared (T, N, 8); one length per batch entry."""

    lengths: tuple[int, ...] = (2, 4, 3)
    heads: int = 3
    head_size: int = 16
    dtype: np.dtype[Any] = FLOAT32

    def build(self, rng: np.random.Generator) -> Inputs:
        tokens = sum(self.lengths)
        inputs = build(rng, (tokens, self.heads, self.head_size), (tokens, self.heads), self.dtype)
        inputs["actual_seq_qlen"] = np.cumsum([0, *self.lengths]).astype(np.int64)
        return inputs


def build(rng: np.random.Generator, attention: tuple[int, ...], rows: tuple[int, ...], dtype: np.dtype[Any]) -> Inputs:
    """Statistics with eight equal lanes: maxima of both signs, sums of at least 1."""

    def lanes(values: NDArray[np.float64]) -> Array:
        return np.repeat(values.astype(np.float32)[..., None], LANES, axis=-1)

    inputs: Inputs = {}
    for side in ("prev", "cur"):
        inputs[f"{side}_attn_out"] = normal(rng, attention, dtype)
        inputs[f"{side}_softmax_max"] = lanes(2 * rng.standard_normal(rows))
        inputs[f"{side}_softmax_sum"] = lanes(rng.uniform(1, 30, rows))
    return inputs


def case(name: str, call: Padded | Packed, *edits: Edit, outputs: tuple[str, ...] = (), **attributes: Any) -> Case:
    """A case; `edits` change the inputs that `build` made. SBH is left to the default."""

    def make(rng: np.random.Generator) -> Mapping[str, Array]:
        inputs = call.build(rng)
        for edit in edits:
            edit(inputs)
        return inputs

    layout = {} if isinstance(call, Padded) else {"input_layout": "TND"}
    return Case(name, OPERATOR, make, {**layout, **attributes}, outputs)


def rows_of(side: str, statistic: str, value: float, *, every: int = 1) -> Edit:
    """Sets every `every`-th row of a statistic; a row is the eight lanes of one token and head."""

    def edit(inputs: Inputs) -> None:
        inputs[f"{side}_softmax_{statistic}"].reshape(-1, LANES)[::every] = value

    return edit


def attention_of(side: str, value: float) -> Edit:
    def edit(inputs: Inputs) -> None:
        inputs[f"{side}_attn_out"][0] = value

    return edit


def shifted_maxima(prev: float, cur: float) -> Edit:
    def edit(inputs: Inputs) -> None:
        inputs["prev_softmax_max"] += np.float32(prev)
        inputs["cur_softmax_max"] += np.float32(cur)

    return edit


def equal_maxima(inputs: Inputs) -> None:
    inputs["cur_softmax_max"] = inputs["prev_softmax_max"].copy()


def large_sums(inputs: Inputs) -> None:
    """As after a million keys."""
    inputs["prev_softmax_sum"] *= np.float32(1e6)
    inputs["cur_softmax_sum"] *= np.float32(1e6)


def log_sum_exp(inputs: Inputs) -> None:
    """Sums of 1, as where the statistic is a log-sum-exp."""
    inputs["prev_softmax_sum"][:] = 1
    inputs["cur_softmax_sum"][:] = 1


def unequal_lanes(inputs: Inputs) -> None:
    """Statistics are element by element; what attention does with unequal lanes is open."""
    ramp = np.arange(LANES, dtype=np.float32)
    inputs["prev_softmax_max"] += ramp
    inputs["cur_softmax_sum"] += ramp


def lengths(*values: int) -> Edit:
    """Sequence bounds that are not the call's own."""

    def edit(inputs: Inputs) -> None:
        inputs["actual_seq_qlen"] = np.array(values, np.int64)

    return edit


def without_lengths(inputs: Inputs) -> None:
    del inputs["actual_seq_qlen"]


def layouts() -> list[Case]:
    """Each type in SBH and in TND with the three orders of the statistics."""
    found = []
    for type_name, dtype in FLOAT_TYPES.items():
        found += [
            case(f"{type_name}_sbh", Padded(dtype=dtype)),
            case(f"{type_name}_sbh_head_64", Padded(dtype=dtype, head_size=64)),
        ]
        for order, softmax_layout in SOFTMAX_LAYOUTS.items():
            found += [
                case(f"{type_name}_tnd_{order}", Packed(dtype=dtype), input_softmax_layout=softmax_layout),
                case(
                    f"{type_name}_tnd_{order}_head_64",
                    Packed(dtype=dtype, head_size=64, lengths=(7, 1, 9)),
                    input_softmax_layout=softmax_layout,
                ),
            ]
    found += [
        case("sbh_softmax_layout_is_ignored", Padded(), input_softmax_layout="TND"),
        case("sbh_lengths_are_ignored", Padded(), lengths(0, 1, 9)),
        case("sbh_said", Padded(), input_layout="SBH", input_softmax_layout=""),
        case("tnd_softmax_layout_by_default", Packed()),
        case("tnd_tnd_lengths_are_ignored", Packed(), lengths(2, 9), input_softmax_layout="TND"),
        case("published_example", Packed(lengths=(2,), heads=1, head_size=64), input_softmax_layout="TND"),
        case("tnd_tnd_without_lengths", Packed(), without_lengths, input_softmax_layout="TND"),
    ]
    for order, softmax_layout in SOFTMAX_LAYOUTS.items():
        found.append(
            case(
                f"tnd_{order}_lengths_are_ignored_with_one_head",
                Packed(heads=1),
                lengths(2, 9),
                input_softmax_layout=softmax_layout,
            )
        )
    return found


def sizes() -> list[Case]:
    around_powers = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)
    found = [case(f"sbh_tokens_{s}", Padded(tokens=s)) for s in around_powers]
    found += [case(f"sbh_batch_{b}", Padded(batch=b)) for b in (1, 3, 5, 7, 8, 9)]
    found += [case(f"sbh_heads_{n}", Padded(heads=n)) for n in (1, 2, 5, 7, 8, 9, 16, 17)]
    found += [case(f"sbh_head_size_{d}", Padded(head_size=d)) for d in (1, 2, 3, 5, 7, 8, 15, 17, 63, 65)]
    for order, softmax_layout in SOFTMAX_LAYOUTS.items():
        found += [
            case(f"tnd_{order}_one_batch_of_{t}", Packed(lengths=(t,)), input_softmax_layout=softmax_layout)
            for t in around_powers
        ]
        found += [
            case(f"tnd_{order}_heads_{n}", Packed(heads=n), input_softmax_layout=softmax_layout)
            for n in (1, 2, 5, 7, 8, 9, 16, 17)
        ]
        found += [
            case(f"tnd_{order}_head_size_{d}", Packed(head_size=d), input_softmax_layout=softmax_layout)
            for d in (1, 2, 3, 5, 7, 8, 15, 17, 65)
        ]
    return found


def ragged() -> list[Case]:
    tables = {
        "one_token_each": (1, 1, 1, 1),
        "growing": (1, 2, 3, 5, 7),
        "shrinking": (9, 8, 2, 1),
        "equal": (4, 4, 4),
        "long_and_short": (65, 1, 33),
        "first_empty": (0, 5, 2),
        "middle_empty": (3, 0, 4),
        "last_empty": (3, 4, 0),
        "many_empty": (0, 0, 2, 0, 0, 0, 3, 1, 0),
        "only_one_filled": (0, 6, 0),
    }
    return [
        case(f"tnd_{order}_{name}", Packed(lengths=table), input_softmax_layout=softmax_layout)
        for order, softmax_layout in SOFTMAX_LAYOUTS.items()
        for name, table in tables.items()
    ]


def emptiness() -> list[Case]:
    found = [
        case("sbh_empty_s", Padded(tokens=0)),
        case("sbh_empty_b", Padded(batch=0)),
        case("sbh_empty_s_float16", Padded(tokens=0, dtype=FLOAT16)),
    ]
    for order, softmax_layout in SOFTMAX_LAYOUTS.items():
        found += [
            case(f"tnd_{order}_empty_t", Packed(lengths=(0,)), input_softmax_layout=softmax_layout),
            case(f"tnd_{order}_empty_t_of_three", Packed(lengths=(0, 0, 0)), input_softmax_layout=softmax_layout),
            case(f"tnd_{order}_no_batch", Packed(lengths=()), input_softmax_layout=softmax_layout),
            case(f"tnd_{order}_empty_t_one_head", Packed(lengths=(0,), heads=1), input_softmax_layout=softmax_layout),
        ]
    return found


EDITS: Mapping[str, tuple[Edit, ...]] = {
    "negative_maxima": (shifted_maxima(-50, -50),),
    "large_maxima": (shifted_maxima(80, 80),),
    "equal_maxima": (equal_maxima,),
    "prev_far_below": (shifted_maxima(-200, 0),),
    "cur_far_below": (shifted_maxima(0, -200),),
    "cur_below_by_60": (shifted_maxima(0, -60),),
    "large_sums": (large_sums,),
    "log_sum_exp": (log_sum_exp,),
    "prev_max_minus_inf": (rows_of("prev", "max", -np.inf, every=2),),
    "cur_max_minus_inf": (rows_of("cur", "max", -np.inf, every=2),),
    "prev_has_no_key": (rows_of("prev", "max", -np.inf, every=3), rows_of("prev", "sum", 0, every=3)),
    "both_max_minus_inf": (rows_of("prev", "max", -np.inf, every=2), rows_of("cur", "max", -np.inf, every=4)),
    "prev_sum_zero": (rows_of("prev", "sum", 0, every=2),),
    "cur_sum_zero": (rows_of("cur", "sum", 0),),
    "both_sums_zero": (rows_of("prev", "sum", 0, every=2), rows_of("cur", "sum", 0, every=4)),
    "nan_in_prev": (attention_of("prev", np.nan),),
    "inf_in_cur": (attention_of("cur", -np.inf),),
    "nan_with_weight_zero": (attention_of("cur", np.nan), rows_of("cur", "sum", 0)),
}


def numerics() -> list[Case]:
    found = []
    for name, edits in EDITS.items():
        found += [
            case(f"sbh_{name}", Padded(), *edits),
            case(f"tnd_default_{name}", Packed(dtype=FLOAT16), *edits),
            case(f"tnd_tnd_{name}", Packed(dtype=BFLOAT16), *edits, input_softmax_layout="TND"),
        ]
    statistics = ("softmax_max", "softmax_sum")
    found += [
        case("sbh_unequal_lanes", Padded(), unequal_lanes, outputs=statistics),
    ]
    for order, softmax_layout in SOFTMAX_LAYOUTS.items():
        found.append(
            case(
                f"tnd_{order}_unequal_lanes",
                Packed(),
                unequal_lanes,
                outputs=statistics,
                input_softmax_layout=softmax_layout,
            )
        )
    return found


CASES = layouts() + sizes() + ragged() + emptiness() + numerics()
