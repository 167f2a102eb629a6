"""Cases of MoeInitRoutingV3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles import Array

from .case import BFLOAT16, FLOAT16, FLOAT32, Case, normal

__all__ = ["CASES"]

OPERATOR = "MoeInitRoutingV3"
INT8 = np.dtype(np.int8)
INT32 = np.iinfo(np.int32)
X_TYPES = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8}
CUMSUM, COUNT, KEY_VALUE = 0, 1, 2
GATHER, SCATTER = 0, 1
REQUIRED = ("expanded_x", "expanded_row_idx")
OPSET_OF_E8M0 = 24
Inputs = dict[str, Array]


@dataclass(frozen=True)
class Routing:
    """The sizes of one call: `tokens` rows of `hidden` features, `chosen` of `experts` experts for each."""

    tokens: int = 9
    hidden: int = 6
    chosen: int = 3
    experts: int = 8
    dtype: np.dtype[Any] = FLOAT32


def build(routing: Routing, rng: np.random.Generator) -> Inputs:
    """Distinct experts per token where there are enough of them."""
    if routing.dtype == INT8:
        x: Array = rng.integers(-128, 128, (routing.tokens, routing.hidden)).astype(np.int8)
    else:
        x = normal(rng, (routing.tokens, routing.hidden), routing.dtype)
    if routing.chosen <= routing.experts:
        ids = [rng.permutation(routing.experts)[: routing.chosen] for _ in range(routing.tokens)]
    else:
        ids = [rng.integers(0, routing.experts, routing.chosen) for _ in range(routing.tokens)]
    return {"x": x, "expert_idx": np.array(ids, np.int32).reshape(routing.tokens, routing.chosen)}


def case(
    name: str,
    routing: Routing,
    *edits: Callable[[Inputs], None],
    outputs: tuple[str, ...] = (),
    opset: int = 18,
    **attributes: Any,
) -> Case:
    """A case; `edits` change the inputs that `build` made. Counts are asked for unless `attributes` say otherwise."""

    def make(rng: np.random.Generator) -> Mapping[str, Array]:
        inputs = build(routing, rng)
        for edit in edits:
            edit(inputs)
        return inputs

    given = {"expert_num": routing.experts, "expert_tokens_num_flag": 1, "expert_tokens_num_type": COUNT, **attributes}
    return Case(name, OPERATOR, make, given, outputs, opset)


def scale_per_token(inputs: Inputs) -> None:
    tokens = inputs["x"].shape[0]
    inputs["scale"] = np.linspace(0.5, 2.0, tokens, dtype=np.float32)


def scale_per_expert(rows: int) -> Callable[[Inputs], None]:
    def edit(inputs: Inputs) -> None:
        hidden = inputs["x"].shape[1]
        inputs["scale"] = np.linspace(0.5, 2.0, rows * hidden, dtype=np.float32).reshape(rows, hidden)

    return edit


def static_scale(scale: float, offset: float) -> Callable[[Inputs], None]:
    def edit(inputs: Inputs) -> None:
        inputs["scale"] = np.array([scale], np.float32)
        inputs["offset"] = np.array([offset], np.float32)

    return edit


def same_expert_twice(inputs: Inputs) -> None:
    """Repeated ids in one row: both assignments are routed, in the order in which they stand."""
    inputs["expert_idx"][:, 1] = inputs["expert_idx"][:, 0]


def one_expert_for_all(inputs: Inputs) -> None:
    inputs["expert_idx"][:] = 5


def out_of_range(inputs: Inputs) -> None:
    """Ids below 0 and from the number of experts on go nowhere."""
    flat = inputs["expert_idx"].reshape(-1)
    flat[:6] = [-1, 8, INT32.max, INT32.min, 100, -7]


def all_out_of_range(inputs: Inputs) -> None:
    inputs["expert_idx"][:] = INT32.max


def ids(*values: int) -> Callable[[Inputs], None]:
    """The flat list of ids, repeated over the whole table."""

    def edit(inputs: Inputs) -> None:
        inputs["expert_idx"] = np.resize(np.array(values, np.int32), inputs["expert_idx"].shape)

    return edit


def not_finite(inputs: Inputs) -> None:
    """Tokens 0 and 4 hold NaN and infinity; token 4 goes to experts past the range of 2 to 6 only."""
    inputs["x"][0] = np.nan
    inputs["x"][4] = -np.inf
    inputs["expert_idx"][4] = 7


def zero_token(inputs: Inputs) -> None:
    inputs["x"][0] = 0


def types() -> list[Case]:
    found = []
    for type_name, dtype in X_TYPES.items():
        routing = Routing(dtype=dtype)
        for kind_name, kind in (("gather", GATHER), ("scatter", SCATTER)):
            found += [
                case(f"{type_name}_{kind_name}", routing, row_idx_type=kind),
                case(
                    f"{type_name}_{kind_name}_range_scale",
                    routing,
                    scale_per_token,
                    row_idx_type=kind,
                    active_expert_range=(2, 6),
                ),
                case(f"{type_name}_{kind_name}_active", routing, row_idx_type=kind, active_num=7),
            ]
        found += [
            case(f"{type_name}_drop_pad", routing, drop_pad_mode=1, expert_capacity=2),
            case(f"{type_name}_drop_pad_scale", routing, scale_per_token, drop_pad_mode=1, expert_capacity=3),
        ]
    return found


def sizes() -> list[Case]:
    tokens = [case(f"tokens_{n}", Routing(tokens=n)) for n in (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 65)]
    hidden = [case(f"hidden_{h}", Routing(hidden=h)) for h in (1, 2, 3, 5, 7, 8, 31, 32, 33)]
    chosen = [case(f"chosen_{k}", Routing(chosen=k)) for k in (1, 2, 4, 5, 7, 8, 9)]
    experts = [
        case(f"experts_{e}_type{kind}", Routing(experts=e), expert_tokens_num_type=kind)
        for e in (1, 2, 3, 5, 7, 9, 63, 64, 65, 256)
        for kind in (CUMSUM, COUNT, KEY_VALUE)
    ]
    return tokens + hidden + chosen + experts


def ranges_and_counts() -> list[Case]:
    found = []
    for kind in (CUMSUM, COUNT, KEY_VALUE):
        for start, end in ((0, 8), (0, 3), (3, 8), (2, 6), (4, 5), (7, 8), (0, 1)):
            for row_kind in (GATHER, SCATTER):
                found.append(
                    case(
                        f"range_{start}_{end}_type{kind}_rows{row_kind}",
                        Routing(),
                        expert_tokens_num_type=kind,
                        active_expert_range=(start, end),
                        row_idx_type=row_kind,
                    )
                )
        short = f"type{kind}"
        found += [
            case(f"no_range_{short}", Routing(), expert_tokens_num_type=kind),
            case(f"few_experts_hit_{short}", Routing(), ids(6, 1, 6), expert_tokens_num_type=kind),
            case(f"every_expert_hit_{short}", Routing(), ids(*range(7, -1, -1)), expert_tokens_num_type=kind),
            case(f"one_expert_{short}", Routing(), one_expert_for_all, expert_tokens_num_type=kind),
            case(f"out_of_range_{short}", Routing(), out_of_range, expert_tokens_num_type=kind),
            case(f"all_out_of_range_{short}", Routing(), all_out_of_range, expert_tokens_num_type=kind),
            case(f"active_{short}", Routing(), expert_tokens_num_type=kind, active_num=4),
            case(
                f"range_all_outside_{short}",
                Routing(),
                ids(0, 1, 7),
                expert_tokens_num_type=kind,
                active_expert_range=(2, 6),
            ),
        ]
    found += [
        case("no_counts", Routing(), expert_tokens_num_flag=0),
        case("no_counts_drop_pad", Routing(), expert_tokens_num_flag=0, drop_pad_mode=1, expert_capacity=2),
        case("only_rows_listed", Routing(), outputs=REQUIRED),
        case("scale_without_counts", Routing(), scale_per_token, outputs=(*REQUIRED, "expanded_scale")),
        case("scale_not_listed", Routing(), scale_per_token, outputs=REQUIRED),
    ]
    return found


def active() -> list[Case]:
    """27 assignments, of which about half are routed in the cases with a range."""
    found = []
    for number in (-1, 0, 1, 2, 13, 26, 27, 28, 1000):
        for row_kind in (GATHER, SCATTER):
            short = f"{'dropless' if number == -1 else number}_rows{row_kind}"
            found += [
                case(f"active_{short}", Routing(), active_num=number, row_idx_type=row_kind),
                case(
                    f"active_{short}_range_scale",
                    Routing(),
                    scale_per_token,
                    active_num=number,
                    row_idx_type=row_kind,
                    active_expert_range=(2, 6),
                ),
            ]
    return found


def drop_pad() -> list[Case]:
    found = []
    for capacity in (1, 2, 3, 4, 8, 9):
        found.append(case(f"capacity_{capacity}", Routing(), drop_pad_mode=1, expert_capacity=capacity))
    pad: dict[str, Any] = {"drop_pad_mode": 1, "expert_capacity": 2}
    found += [
        case("drop_pad_out_of_range", Routing(), out_of_range, **pad),
        case("drop_pad_all_out_of_range", Routing(), all_out_of_range, **pad),
        case("drop_pad_one_expert", Routing(), one_expert_for_all, **pad),
        case("drop_pad_same_expert_twice", Routing(), same_expert_twice, **pad),
        case("drop_pad_ignores_active_num", Routing(), active_num=3, **pad),
        case("drop_pad_full_range", Routing(), active_expert_range=(0, 8), **pad),
        case("drop_pad_not_finite", Routing(), not_finite, **pad),
        case("drop_pad_one_token", Routing(tokens=1), drop_pad_mode=1, expert_capacity=1),
        case("drop_pad_one_expert_of_one", Routing(experts=1, chosen=1), **pad),
        case("drop_pad_empty_features", Routing(hidden=0), **pad),
    ]
    return found


def unusual() -> list[Case]:
    found = []
    for row_kind in (GATHER, SCATTER):
        short = f"rows{row_kind}"
        found += [
            case(f"same_expert_twice_{short}", Routing(), same_expert_twice, row_idx_type=row_kind),
            case(f"ascending_{short}", Routing(), ids(*range(8)), row_idx_type=row_kind),
            case(f"descending_{short}", Routing(), ids(*range(7, -1, -1)), row_idx_type=row_kind),
            case(f"out_of_range_{short}", Routing(), out_of_range, row_idx_type=row_kind, active_expert_range=(2, 6)),
            case(f"empty_tokens_{short}", Routing(tokens=0), row_idx_type=row_kind),
            case(f"empty_features_{short}", Routing(hidden=0), row_idx_type=row_kind),
            case(f"not_finite_{short}", Routing(), not_finite, row_idx_type=row_kind, active_expert_range=(2, 6)),
        ]
    found += [
        case("empty_tokens_key_value", Routing(tokens=0), expert_tokens_num_type=KEY_VALUE),
        case("empty_tokens_scale", Routing(tokens=0), scale_per_token, active_expert_range=(2, 6)),
        case("empty_tokens_active", Routing(tokens=0), active_num=4),
        case("not_finite_float16_active", Routing(dtype=FLOAT16), not_finite, active_num=20),
        case("many_tokens", Routing(tokens=512, experts=64, chosen=8, hidden=16), scale_per_token),
    ]
    return found


def quantised() -> list[Case]:
    found = []
    for type_name in ("float32", "float16", "bfloat16"):
        routing = Routing(hidden=40, dtype=X_TYPES[type_name])
        for row_kind in (GATHER, SCATTER):
            short = f"{type_name}_rows{row_kind}"
            ranged: dict[str, Any] = {"row_idx_type": row_kind, "active_expert_range": (2, 6)}
            found += [
                case(f"static_{short}", routing, static_scale(30.0, 3.0), quant_mode=0, **ranged),
                case(f"dynamic_{short}", routing, quant_mode=1, **ranged),
                case(f"dynamic_smooth_{short}", routing, scale_per_expert(4), quant_mode=1, **ranged),
                case(f"dynamic_shared_{short}", routing, scale_per_expert(1), quant_mode=1, **ranged),
                case(f"dynamic_active_{short}", routing, quant_mode=1, row_idx_type=row_kind, active_num=5),
            ]
        found += [
            case(f"static_saturated_{type_name}", routing, static_scale(300.0, -20.0), quant_mode=0),
            case(f"dynamic_zero_token_{type_name}", routing, zero_token, quant_mode=1),
            case(
                f"dynamic_drop_pad_{type_name}",
                routing,
                scale_per_expert(8),
                quant_mode=1,
                drop_pad_mode=1,
                expert_capacity=2,
            ),
        ]
    for mode in (2, 3):
        for type_name in ("float16", "bfloat16"):
            for hidden in (1, 31, 32, 33, 64, 65, 96, 100):
                routing = Routing(hidden=hidden, dtype=X_TYPES[type_name])
                name = f"mxfp8_mode{mode}_{type_name}_hidden_{hidden}"
                found.append(case(name, routing, quant_mode=mode, active_expert_range=(2, 6), opset=OPSET_OF_E8M0))
            routing = Routing(hidden=64, dtype=X_TYPES[type_name])
            found.append(
                case(f"mxfp8_mode{mode}_{type_name}_zero", routing, zero_token, quant_mode=mode, opset=OPSET_OF_E8M0)
            )
    return found


CASES = types() + sizes() + ranges_and_counts() + active() + drop_pad() + unusual() + quantised()
