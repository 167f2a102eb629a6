"""Small layers with 8-bit projections in many spellings, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ascend_onnx.compare import compare_outputs
from ascend_onnx.session import CpuSession
from fusion_patterns import Report, fuse
from tests.fusion_patterns.graphs import Array, graph

HIDDEN, LOW_RANK, HEADS, NOPE, LATENT, ROPE = 32, 24, 2, 8, 512, 64
SLOTS, TOKENS = 64, 6
OUTPUTS = "query query_rope latent_cache rope_cache"


@dataclass(frozen=True)
class Spelling:
    """How a layer is written. `down` and `up`: "explicit", "qdq", "qdq_uint8", "integer".

    `joint`: one weight for latent, rotary key and query latent; else two, which may read the rows quantised once
    (`shared`) or each for itself.
    """

    down: str = "explicit"
    up: str = "explicit"
    joint: bool = True
    shared: bool = True
    batch: bool = False
    input_norm: bool = True
    bias: bool = True
    beta: bool = True
    interleaved: bool = False
    half_angles: bool = False
    einsum: bool = False
    epsilon: float = 1e-6


EXPLICIT = Spelling()


def layer(spelling: Spelling = EXPLICIT, seed: int = 0, **changed: Any) -> ir.Model:
    """Hidden states to query, rotated query and both caches; `changed` constants by name."""
    values = {**_constants(spelling, seed), **_inputs(spelling), **changed}
    return graph("\n".join(_body(spelling)), OUTPUTS, opset=20, **values)


def feeds(spelling: Spelling = EXPLICIT, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    rows = (2, TOKENS // 2) if spelling.batch else (TOKENS,)
    width = ROPE // 2 if spelling.half_angles else ROPE
    shapes = {
        "x": (*rows, HIDDEN),
        "cos": (*rows, width),
        "sin": (*rows, width),
        "latents": (SLOTS, LATENT),
        "ropes": (SLOTS, ROPE),
    }
    drawn = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return {**drawn, "slots": generator.permutation(SLOTS)[:TOKENS].astype(np.int64)}


def _inputs(spelling: Spelling) -> dict[str, str]:
    rows = "B,S" if spelling.batch else "T"
    width = ROPE // 2 if spelling.half_angles else ROPE
    tokens = "M" if spelling.batch else "T"
    return {
        "x": f"float[{rows},{HIDDEN}]",
        "cos": f"float[{rows},{width}]",
        "sin": f"float[{rows},{width}]",
        "latents": f"float[P,{LATENT}]",
        "ropes": f"float[P,{ROPE}]",
        "slots": f"int64[{tokens}]",
    }


def _constants(spelling: Spelling, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed + 100)

    def codes(*shape: int) -> Array:
        return generator.integers(-127, 128, shape).astype(np.int8)

    def positive(width: int) -> Array:
        return generator.uniform(0.5, 1.5, width).astype(np.float32)

    joint, heads = LATENT + ROPE + LOW_RANK, HEADS * (NOPE + ROPE)
    widths = {"down": joint, "key": LATENT + ROPE, "low": LOW_RANK, "up": heads}
    sources = {"down": HIDDEN, "key": HIDDEN, "low": HIDDEN, "up": LOW_RANK}
    made: dict[str, Any] = {
        "last": [-1],
        "first": [1],
        "second": [2],
        "eps": spelling.epsilon,
        "low_bound": -128.0,
        "high_bound": 127.0,
        "zero8": np.int8(0),
    }
    for name, width in widths.items():
        made[f"w_{name}"] = codes(sources[name], width)
        made[f"d_{name}"] = positive(width) * np.float32(2e-4)
        made[f"sw_{name}"] = positive(width) * np.float32(0.01)
        made[f"b_{name}"] = generator.integers(-3000, 3000, width).astype(np.int32)
        made[f"z_{name}"] = np.zeros(width, np.int8)
    for place, width, scale, zero in (("in", HIDDEN, 0.03, 4), ("q", LOW_RANK, 0.025, -6)):
        made[f"g_{place}"], made[f"be_{place}"] = positive(width), positive(width) * np.float32(0.1)
        made[f"s_{place}"], made[f"z_{place}"] = float(scale), float(zero)
        made[f"zi_{place}"], made[f"zu_{place}"] = np.int8(zero), np.uint8(zero + 128)
        made[f"inv_{place}"] = float(1 / scale)
    made["g_kv"] = positive(LATENT)
    made["wuk"] = generator.standard_normal((HEADS, NOPE, LATENT), dtype=np.float32) * np.float32(0.1)
    made["parts"] = [LATENT, ROPE, LOW_RANK]
    made["key_parts"] = [LATENT, ROPE]
    made["head_parts"] = [NOPE, ROPE]
    made["to_heads"] = [0, 0, HEADS, NOPE + ROPE] if spelling.batch else [-1, HEADS, NOPE + ROPE]
    made["to_rows"], made["to_ropes"] = [-1, LATENT], [-1, ROPE]
    made["start0"], made["start1"], made["end"], made["step"] = [0], [1], [2**31], [2]
    return made


def _body(spelling: Spelling) -> list[str]:
    lines = _normed("xn", "x", "g_in") if spelling.input_norm else ["xn = Identity(x)"]
    rows = "xn"
    if spelling.beta and spelling.input_norm:
        lines.append("xb = Add(xn, be_in)")
        rows = "xb"
    if spelling.joint:
        lines += [
            *_codes("xq", rows, "in", spelling.down),
            *_product("c", "xq", "in", "down", spelling.down, spelling.bias),
        ]
        lines.append("ckv, kr, cq = Split<axis=-1>(c, parts)")
    else:
        names = ("xq", "xq") if spelling.shared else ("ck_q", "cq_q")
        for name in dict.fromkeys(names):
            lines += _codes(name, rows, "in", spelling.down)
        lines += _product("ck", names[0], "in", "key", spelling.down, spelling.bias)
        lines += _product("cq", names[1], "in", "low", spelling.down, spelling.bias)
        lines.append("ckv, kr = Split<axis=-1>(ck, key_parts)")
    lines += _normed("qn", "cq", "g_q")
    lines.append("qb = Add(qn, be_q)" if spelling.beta else "qb = Identity(qn)")
    lines += [*_codes("qq", "qb", "q", spelling.up), *_product("q", "qq", "q", "up", spelling.up, spelling.bias)]
    lines += ["heads = Reshape(q, to_heads)", "nope, qr = Split<axis=-1>(heads, head_parts)"]
    axis = "second" if spelling.batch else "first"
    lines += [f"cos_h = Unsqueeze(cos, {axis})", f"sin_h = Unsqueeze(sin, {axis})"]
    if spelling.batch:
        lines.append('query = Einsum<equation="bshd,hdc->bshc">(nope, wuk)')
    elif spelling.einsum:
        lines.append('query = Einsum<equation="thd,hdc->thc">(nope, wuk)')
    else:
        lines += ["turned = Transpose<perm=[1,0,2]>(nope)", "product = MatMul(turned, wuk)"]
        lines.append("query = Transpose<perm=[1,0,2]>(product)")
    lines += _rotated("query_rope", "qr", "cos_h", "sin_h", spelling)
    lines += _normed("latent", "ckv", "g_kv")
    if spelling.batch:
        lines += ["kr_h = Unsqueeze(kr, second)", *_rotated("kr_t", "kr_h", "cos_h", "sin_h", spelling)]
        lines += ["latent_rows = Reshape(latent, to_rows)", "rope_rows = Reshape(kr_t, to_ropes)"]
    else:
        lines += [*_rotated("kr_t", "kr", "cos", "sin", spelling)]
        lines += ["latent_rows = Identity(latent)", "rope_rows = Identity(kr_t)"]
    lines.append("index = Unsqueeze(slots, last)")
    lines.append("latent_cache = ScatterND(latents, index, latent_rows)")
    lines.append("rope_cache = ScatterND(ropes, index, rope_rows)")
    return lines


def _normed(out: str, x: str, gamma: str) -> list[str]:
    return [
        f"{out}_s = Mul({x}, {x})",
        f"{out}_m = ReduceMean<keepdims=1>({out}_s, last)",
        f"{out}_e = Add({out}_m, eps)",
        f"{out}_r = Sqrt({out}_e)",
        f"{out}_n = Div({x}, {out}_r)",
        f"{out} = Mul({out}_n, {gamma})",
    ]


def _codes(out: str, x: str, place: str, spelling: str) -> list[str]:
    if spelling == "qdq_uint8":
        return [f"{out} = QuantizeLinear({x}, s_{place}, zu_{place})"]
    if spelling in ("qdq", "integer"):
        return [f"{out} = QuantizeLinear({x}, s_{place}, zi_{place})"]
    return [
        f"{out}_d = Div({x}, s_{place})",
        f"{out}_r = Round({out}_d)",
        f"{out}_z = Add({out}_r, z_{place})",
        f"{out}_c = Clip({out}_z, low_bound, high_bound)",
        f"{out} = Cast<to=3>({out}_c)",
    ]


def _product(out: str, codes: str, place: str, name: str, spelling: str, bias: bool) -> list[str]:
    if spelling.startswith("qdq"):
        zero = f"zu_{place}" if spelling == "qdq_uint8" else f"zi_{place}"
        return [
            f"{out}_x = DequantizeLinear({codes}, s_{place}, {zero})",
            f"{out}_w = DequantizeLinear<axis=1>(w_{name}, sw_{name}, z_{name})",
            f"{out} = MatMul({out}_x, {out}_w)",
        ]
    if spelling == "integer":
        lines = [f"{out}_i = MatMulInteger({codes}, w_{name}, zi_{place}, zero8)"]
    else:
        lines = [
            f"{out}_x = Cast<to=6>({codes})",
            f"{out}_w = Cast<to=6>(w_{name})",
            f"{out}_i = MatMul({out}_x, {out}_w)",
        ]
    lines += [f"{out}_b = Add({out}_i, b_{name})" if bias else f"{out}_b = Identity({out}_i)"]
    return [*lines, f"{out}_f = Cast<to=1>({out}_b)", f"{out} = Mul({out}_f, d_{name})"]


def _rotated(out: str, x: str, cos: str, sin: str, spelling: Spelling) -> list[str]:
    if spelling.interleaved:
        return [
            f"{out}_e = Slice({x}, start0, end, last, step)",
            f"{out}_o = Slice({x}, start1, end, last, step)",
            f"{out}_1 = Mul({out}_e, {cos})",
            f"{out}_2 = Mul({out}_o, {sin})",
            f"{out}_3 = Mul({out}_o, {cos})",
            f"{out}_4 = Mul({out}_e, {sin})",
            f"{out}_5 = Sub({out}_1, {out}_2)",
            f"{out}_6 = Add({out}_3, {out}_4)",
            f"{out} = Concat<axis=-1>({out}_5, {out}_6)",
        ]
    return [
        f"{out}_a, {out}_b = Split<axis=-1, num_outputs=2>({x})",
        f"{out}_n = Neg({out}_b)",
        f"{out}_c = Concat<axis=-1>({out}_n, {out}_a)",
        f"{out}_1 = Mul({x}, {cos})",
        f"{out}_2 = Mul({out}_c, {sin})",
        f"{out} = Add({out}_1, {out}_2)",
    ]


def fused_equal(build: Callable[[], ir.Model], given: Mapping[str, Array]) -> Report:
    """Fuse without validation; every output is what it was."""
    before = CpuSession(build()).run(given)
    model = build()
    report = fuse(model, validate="none")
    off = [c for c in compare_outputs(before, CpuSession(model).run(given)) if not c.within]
    assert not off, [f"{c.name}: {c.reason}" for c in off]
    return report


def codes_of(report: Report) -> list[str]:
    return [missed.code for missed in report.missed]
