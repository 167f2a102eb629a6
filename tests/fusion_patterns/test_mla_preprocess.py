"""Projections with constant 8-bit scales: what becomes MlaPreprocess, what does not and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.check import check
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load, save
from ascend_onnx.verify import verify
from fusion_patterns import find, fuse
from tests.fusion_patterns.edits import Edit, Editor, fused_after
from tests.fusion_patterns.w8a8 import HIDDEN, LATENT, ROPE, Spelling, codes_of, feeds, fused_equal, layer
from tests.models import EXPECTED, corpus_feeds

Corpus = Callable[[str], Path]
OPERATOR = "MlaPreprocess"
EXPLICIT = [name for name, counts in EXPECTED.items() if OPERATOR in counts]
INTEGER = "w8a8_explicit_int_op18_opt"
SIZES = [{"s13": 5, "s23": 32, "s20": 32}, {"s13": 21, "s23": 256, "s20": 384}]
"""Slots that blocks of 128 divide, and slots that they do not."""


# -------------------------------------------------------------------------------------------------------- real graphs


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_arithmetic_fuses_and_stays_equal(corpus: Corpus, tmp_path: Path, name: str) -> None:
    model = load(corpus(name))
    report = fuse(model, validate="all")
    assert report.counts == EXPECTED[name]
    assert not report.missed
    (entry,) = report.fused
    assert entry.validated is not None
    assert entry.validated < 1e-5
    assert entry.assumed == ["slots-valid"]
    path = tmp_path / "fused.onnx"
    save(model, path, source=corpus(name))
    for sizes in SIZES:
        draws = [verify(corpus(name), path, inputs=corpus_feeds(name, sizes, seed)) for seed in range(3)]
        assert any(draw.equal for draw in draws), draws[0].reason


def test_few_tokens_round_the_other_way(corpus: Corpus) -> None:
    """One code off by 1 changes all features of its token: the part of such tokens stays small."""
    given = corpus_feeds(INTEGER, {"s13": 200, "s23": 256, "s20": 256})
    model = load(corpus(INTEGER))
    before = CpuSession(model.clone()).run(given)
    fuse(model, validate="none")
    after = CpuSession(model).run(given)
    for name, expected in before.items():
        largest = np.abs(expected).max()
        off = np.abs(after[name] - expected).reshape(len(expected), -1).max(1) / largest
        assert np.mean(off > 1e-4) < 0.05
        assert off.max() < 0.03


def test_one_operator_and_what_reshapes_its_caches_is_left(corpus: Corpus) -> None:
    model = load(corpus(INTEGER))
    fuse(model, validate="none")
    kept = {"Shape", "Mod", "Equal", "Where", "Concat", "Reshape", "Cast", OPERATOR}
    assert {node.op_type for node in model.graph} == kept
    (node,) = (node for node in model.graph if node.op_type == OPERATOR)
    assert node.attributes["cache_mode"].value == 1
    assert node.inputs[5] is not None
    assert (node.inputs[5].dtype, list(node.inputs[5].shape or ())) == (ir.DataType.INT8, [2112, 1024])


def test_static_slots_become_blocks_that_the_device_takes(corpus: Corpus) -> None:
    model = load(corpus(INTEGER))
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.shape is not None and str(value.shape[0]) in ("s23", "s20"):
            value.shape = ir.Shape([192 * 128, *value.shape[1:]])
    fuse(model, validate="none")
    (node,) = (node for node in model.graph if node.op_type == OPERATOR)
    caches = [list(value.shape or ()) for value in node.outputs[1::2]]
    assert caches == [[192, 128, 1, LATENT], [192, 128, 1, ROPE]]
    rules = {finding.rule for finding in check(model, "a3")}
    assert not rules & {"block_count", "block_size", "cache_shape", "missing_input", "shapes_agree", "weight_rows"}


@pytest.mark.parametrize(
    ("name", "code", "got"),
    [
        ("qdq_prefill_op18_s8s8_mm", "quantisation-unsupported", "quantised again"),
        ("qdq_decode_op18_inputs_only", "query-not-absorbed", "expanded from the latents"),
    ],
)
def test_static_quantisation_of_the_whole_attention_says_why_not(
    corpus: Corpus, name: str, code: str, got: str
) -> None:
    report = find(load(corpus(name)))
    assert report.counts == EXPECTED[name] == {}
    (missed,) = report.missed
    assert (missed.fusion, missed.code) == ("mla_preprocess", code)
    assert got in missed.got


def test_nothing_is_fused_twice(corpus: Corpus) -> None:
    model = load(corpus(INTEGER))
    fuse(model, validate="none")
    again = fuse(model, validate="none")
    assert (again.counts, again.missed) == ({}, [])


def test_slots_are_an_assumption(corpus: Corpus) -> None:
    report = fuse(load(corpus(INTEGER)), validate="none", assume=["none"])
    assert codes_of(report) == ["assumption-off"]


# ---------------------------------------------------------------------------------------------------------- spellings

SPELLINGS = {
    "explicit": Spelling(),
    "two weights": Spelling(joint=False),
    "neither bias nor beta": Spelling(bias=False, beta=False),
    "no norm of the input": Spelling(input_norm=False),
    "QDQ": Spelling(down="qdq", up="qdq"),
    "QDQ, two weights": Spelling(down="qdq", up="qdq", joint=False),
    "QDQ of uint8 rows": Spelling(down="qdq_uint8", up="qdq_uint8", joint=False),
    "MatMulInteger": Spelling(down="integer", up="integer"),
    "QDQ, then explicit": Spelling(down="qdq"),
    "rows quantised for each weight": Spelling(joint=False, shared=False),
    "interleaved features": Spelling(interleaved=True, half_angles=True),
    "Einsum": Spelling(einsum=True),
    "batch": Spelling(batch=True),
    "batch, QDQ, two weights": Spelling(batch=True, joint=False, down="qdq", up="qdq"),
    "batch, interleaved features": Spelling(batch=True, interleaved=True, half_angles=True),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_spelling(spelling: Spelling) -> None:
    report = fused_equal(lambda: layer(spelling), feeds(spelling))
    assert (report.counts, report.missed) == ({OPERATOR: 1}, [])


@pytest.mark.parametrize("spelling", [SPELLINGS["explicit"], SPELLINGS["batch, QDQ, two weights"]])
def test_spelling_is_validated(spelling: Spelling) -> None:
    (entry,) = fuse(layer(spelling), validate="all").fused
    assert entry.validated is not None
    assert entry.validated < 1e-5


def test_weight_stored_by_rows_is_taken_as_it_lies() -> None:
    def stored_by_rows(e: Editor) -> None:
        codes = e.weight("w_up").T
        turned = e.add("Transpose", np.ascontiguousarray(codes), perm=[1, 0])
        turned.type, turned.shape = ir.TensorType(ir.DataType.INT8), ir.Shape(codes.T.shape)
        e.instead_of("w_up", turned)

    outcome = fused_after(layer, stored_by_rows, feeds())
    assert outcome.counts == {OPERATOR: 1}
    outcome.assert_equal()
    (node,) = (node for node in outcome.model.graph if node.op_type == OPERATOR)
    assert node.inputs[12] is not None
    assert not node.inputs[12].name.endswith(".rows")


# ----------------------------------------------------------------------------------------- what only looks like a layer


def scaled(value: str, factor: float | np.ndarray) -> Edit:
    return lambda e: e.instead_of(value, e.add("Mul", value, factor))


def reads(result: str, index: int, operand: str | float | list[int]) -> Edit:
    return lambda e: e.read(result, index, operand)


def exchanged(one: str, other: str, *readers: str) -> Edit:
    return lambda e: e.exchange(one, other, readers)


def exposed(*names: str) -> Edit:
    return lambda e: e.expose(*names)


def rounded_away_from_zero(e: Editor) -> None:
    e.set_op("round_1", "Floor")
    e.read("round_1", 0, e.add("Add", "div", 0.5))


def bias_after_scaling(e: Editor) -> None:
    e.read("_to_copy_3", 0, "matmul")
    e.instead_of("mul_30", e.add("Add", "mul_30", np.linspace(-1, 1, 2112, dtype=np.float32)))


def fractional_bias(e: Editor) -> None:
    e.read("_to_copy_3", 0, "matmul")
    e.instead_of("_to_copy_3", e.add("Add", "_to_copy_3", np.full(2112, 0.5, np.float32)))


def two_biases(e: Editor) -> None:
    e.instead_of("_to_copy_3", e.add("Add", "_to_copy_3", np.ones(2112, np.float32)))


def query_columns_first(e: Editor) -> None:
    """Columns [query latent | latent | rotary key]."""
    split = e.node("split_with_sizes_split_0")
    e.read("split_with_sizes_split_0", 1, [1536, LATENT, ROPE])
    first, second, third = split.outputs
    readers = [list(output.uses()) for output in split.outputs]
    for uses, output in zip(readers, (second, third, first), strict=True):
        for use in uses:
            use.node.replace_input_with(use.idx, output)
    for output, width in zip(split.outputs, (1536, LATENT, ROPE), strict=True):
        output.shape = ir.Shape(["s13", width])


def rotary_columns_first(e: Editor) -> None:
    """Heads [rope | nope]."""
    nope, rope = "split_with_sizes_1_split_0", "split_with_sizes_1_split_1"
    e.read(nope, 1, [64, 128])
    e.exchange(nope, rope)
    e[nope].shape, e[rope].shape = e[rope].shape, e[nope].shape


def other_slots(e: Editor) -> None:
    e.read("index_put_1", 1, e.add("Mod", e.add("Add", "val_105", 1), 32))


def slots_laid_out_twice(e: Editor) -> None:
    e.read("index_put_1", 1, e.add("Unsqueeze", "slot", [1], like="val_105"))


def slots_of_int32(e: Editor) -> None:
    slots = e["slot"]
    slots.type = ir.TensorType(ir.DataType.INT32)
    wide = e.add("Cast", "slot", to=ir.DataType.INT64)
    wide.type = ir.TensorType(ir.DataType.INT64)
    e.instead_of("slot", wide)


def scattered_by_element(e: Editor) -> None:
    for cache, width in (("index_put", LATENT), ("index_put_1", ROPE)):
        index = e.add("Expand", "val_105", [1, width])
        index.shape = ir.Shape(["s13", width])
        e.set_op(cache, "ScatterElements", axis=0)
        e.read(cache, 1, index)


def paged_caches(e: Editor) -> None:
    """Caches (2, 16, 1, H) that are flattened, written, and put back."""
    for name, result, width in (("kvc", "index_put", LATENT), ("krc", "index_put_1", ROPE)):
        e[name].shape = ir.Shape([2, 16, 1, width])
        flat = e.add("Reshape", name, [-1, width])
        flat.shape = ir.Shape([32, width])
        e.read(result, 0, flat)
        e[result].shape = ir.Shape([32, width])


def norm_with_epsilon_outside(root: str, reciprocal: str, mean: str) -> Edit:
    def edit(e: Editor) -> None:
        e.read(root, 0, mean)
        e.read(reciprocal, 0, e.add("Add", root, 0.1))

    return edit


def through_float16(e: Editor) -> None:
    half = e.add("Cast", "mul_30", to=ir.DataType.FLOAT16)
    half.type = ir.TensorType(ir.DataType.FLOAT16)
    e.instead_of("mul_30", e.add("Cast", half, like="mul_30", to=ir.DataType.FLOAT))


def quantised_again(value: str) -> Edit:
    def edit(e: Editor) -> None:
        codes = e.add("QuantizeLinear", value, 0.05, np.int8(0))
        codes.type = ir.TensorType(ir.DataType.INT8)
        e.instead_of(value, e.add("DequantizeLinear", codes, 0.05, np.int8(0), like=value))

    return edit


def scale_that_callers_may_set(e: Editor) -> None:
    e.graph.inputs.append(e["s0"])


def codes_minus_zero_point(e: Editor) -> None:
    """The zero point is taken off before the product instead of by the bias."""
    shifted = e.add("Sub", "_to_copy_1", np.int32(3))
    e.instead_of("_to_copy_1", shifted)


def minimum_and_maximum(e: Editor) -> None:
    e.instead_of("clamp", e.add("Max", e.add("Min", "add_29", 127.0), -128.0))


TWINS: dict[str, tuple[Edit, str | None]] = {
    "nothing": (lambda e: None, None),
    "rows multiplied by the scale": (lambda e: e.set_op("div", "Mul"), None),
    "zero point subtracted": (lambda e: e.set_op("add_29", "Sub"), None),
    "zero point taken off the codes": (codes_minus_zero_point, None),
    "Min and Max for Clip": (minimum_and_maximum, None),
    "other order of columns": (query_columns_first, None),
    "cos for sin everywhere": (exchanged("cos", "sin"), None),
    "slots laid out twice": (slots_laid_out_twice, None),
    "rows scattered by element": (scattered_by_element, None),
    "norm of the input unknown": (norm_with_epsilon_outside("val_9", "rsqrt", "mean"), None),
    "query in the latent space scaled": (scaled("bmm", 2.0), None),
    "codes read elsewhere": (exposed("_to_copy"), None),
    "rows read elsewhere": (exposed("mul_134", "add_203"), None),
    "query read elsewhere": (exposed("mul_47", "mul_69"), None),
    "columns divided by the scale": (lambda e: e.set_op("mul_30", "Div"), "quantisation-unsupported"),
    "codes from -127": (reads("clamp", 1, -127.0), "quantisation-unsupported"),
    "codes to 126": (reads("clamp_1", 2, 126.0), "quantisation-unsupported"),
    "rounded away from zero": (rounded_away_from_zero, "quantisation-unsupported"),
    "not rounded": (reads("add_29", 0, "div"), "quantisation-unsupported"),
    "half a zero point": (reads("add_29", 1, 3.5), "quantisation-unsupported"),
    "scale for each feature": (
        lambda e: e.read("div", 1, np.linspace(0.02, 0.05, 1024, dtype=np.float32)),
        "quantisation-unsupported",
    ),
    "scale that callers may set": (scale_that_callers_may_set, "quantisation-unsupported"),
    "quantised again": (quantised_again("mul_69"), "quantisation-unsupported"),
    "down projection quantised again": (quantised_again("mul_30"), "quantisation-unsupported"),
    "rounded to float16 in between": (through_float16, "quantisation-unsupported"),
    "bias after scaling": (bias_after_scaling, "bias"),
    "bias that is no integer": (fractional_bias, "bias"),
    "two biases": (two_biases, "bias"),
    "cos for sin in the query": (exchanged("unsqueeze", "unsqueeze_1", "mul_90", "mul_105"), "rope-differs"),
    "cos for sin in the key": (exchanged("cos", "sin", "mul_110", "mul_121"), "rope-differs"),
    "rotated backwards": (
        lambda e: (e.read("neg", 0, "slice_3"), e.read("cat", 1, "slice_2")),
        "rope-unrecognised",
    ),
    "rotary columns first": (rotary_columns_first, "rope-unrecognised"),
    "one head scaled": (
        scaled("view", np.array([1, 2, 0.5, 3], np.float32).reshape(1, 4, 1)),
        "rope-unrecognised",
    ),
    "other slots for the rotated keys": (other_slots, "slots-differ"),
    "added to the cache": (lambda e: e.set_attributes("index_put", reduction="add"), "cache-unrecognised"),
    "latents scaled on their way": (scaled("mul_134", 2.0), "cache-unrecognised"),
    "rotated keys scaled on their way": (scaled("add_203", 2.0), "cache-unrecognised"),
    "another epsilon in the norm of the latent": (reads("add_213", 1, 1e-5), "epsilon"),
    "another epsilon in the norm of the input": (reads("add_6", 1, 1e-5), "epsilon"),
    "norm of the query unknown": (norm_with_epsilon_outside("val_22", "rsqrt_1", "mean_1"), "no-query-low-rank"),
}


@pytest.mark.parametrize(("edit", "code"), TWINS.values(), ids=TWINS)
def test_twin(corpus: Corpus, edit: Edit, code: str | None) -> None:
    outcome = fused_after(corpus(INTEGER), edit, corpus_feeds(INTEGER, SIZES[0]))
    outcome.assert_equal()
    assert outcome.codes == ([] if code is None else [code])
    assert outcome.counts == ({OPERATOR: 1} if code is None else {})


def test_slots_of_32_bits_go_in_as_they_are(corpus: Corpus) -> None:
    given = corpus_feeds(INTEGER, SIZES[0])
    given["slot"] = given["slot"].astype(np.int32)
    outcome = fused_after(corpus(INTEGER), slots_of_int32, given)
    outcome.assert_equal()
    (node,) = (node for node in outcome.model.graph if node.op_type == OPERATOR)
    assert node.inputs[21] in outcome.model.graph.inputs


def test_paged_caches_go_in_as_they_are(corpus: Corpus) -> None:
    given = corpus_feeds(INTEGER, SIZES[0])
    given |= {name: given[name].reshape(2, 16, 1, -1) for name in ("kvc", "krc")}
    outcome = fused_after(corpus(INTEGER), paged_caches, given)
    outcome.assert_equal()
    (node,) = (node for node in outcome.model.graph if node.op_type == OPERATOR)
    assert {node.inputs[19], node.inputs[20]} <= set(outcome.model.graph.inputs)


def test_unequal_scales_of_the_two_down_projections() -> None:
    spelling = Spelling(joint=False, shared=False)
    outcome = fused_after(lambda: layer(spelling), lambda e: e.read("cq_q_d", 1, 0.031), feeds(spelling))
    outcome.assert_equal()
    assert (outcome.counts, outcome.codes) == ({}, ["quantisation-differs"])


def test_angles_for_each_head_instead_of_each_token() -> None:
    """As many tokens as heads: angles (1, 2, 64) broadcast over tokens (2, 2, 64)."""

    def build() -> ir.Model:
        sizes = {"x": f"float[2,{HIDDEN}]", "cos": f"float[2,{ROPE}]", "sin": f"float[2,{ROPE}]", "slots": "int64[2]"}
        return layer(**sizes)

    def by_head(e: Editor) -> None:
        for name in ("cos_h", "sin_h"):
            e.read(name, 1, [0])
            e.shape(name, 1, 2, ROPE)

    given = {name: array[:2] if name in ("x", "cos", "sin", "slots") else array for name, array in feeds().items()}
    fused_equal(build, given)
    outcome = fused_after(build, by_head, given)
    outcome.assert_equal()
    assert (outcome.counts, outcome.codes) == ({}, ["rope-unrecognised"])


def test_scales_computed_at_run_time() -> None:
    def dynamic(e: Editor) -> None:
        codes = ir.node("DynamicQuantizeLinear", [e["qb"]], num_outputs=3, name="dynamic")
        for output, name, dtype in zip(
            codes.outputs,
            ("codes", "scale", "zero"),
            (ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8),
            strict=True,
        ):
            output.name, output.type = name, ir.TensorType(dtype)
            output.shape = e["qb"].shape if name == "codes" else ir.Shape([])
        e.graph.append(codes)
        product = e.add("MatMulInteger", "codes", "w_up", "zero", like="q")
        product.type = ir.TensorType(ir.DataType.INT32)
        real = e.add("Cast", product, like="q", to=ir.DataType.FLOAT)
        e.instead_of("q", e.add("Mul", e.add("Mul", real, "scale"), "sw_up"))

    outcome = fused_after(layer, dynamic, feeds())
    outcome.assert_equal()
    assert outcome.counts == {}
    assert "quantisation-unsupported" in outcome.codes


def test_float16() -> None:
    """Scales of columns go in as bits, and int8 projections end in float16."""
    given = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds().items()}
    before, model = CpuSession(half_layer()).run(given), half_layer()
    assert fuse(model, validate="none").counts == {OPERATOR: 1}
    (node,) = (node for node in model.graph if node.op_type == OPERATOR)
    assert node.inputs[6] is not None
    assert node.inputs[6].dtype == ir.DataType.INT64
    after = CpuSession(model).run(given)
    for name, expected in before.items():
        off = np.abs(after[name].astype(np.float32) - expected.astype(np.float32))
        assert np.mean(off <= 2**-7 * np.abs(expected).max()) > 0.99


def half_layer() -> ir.Model:
    """The explicit layer in float16, but for the scaling of the integer products."""
    model = layer(Spelling(beta=False))
    e = Editor(model)
    wide = {"d_down", "d_up", "c_f", "q_f", "c", "q"}
    computed = (output for node in model.graph for output in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *computed):
        if value.dtype == ir.DataType.FLOAT and value.name not in wide:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float16), name=value.name)
    for name in ("c", "q"):
        half = e.add("Cast", name, to=ir.DataType.FLOAT16)
        half.type = ir.TensorType(ir.DataType.FLOAT16)
        e.instead_of(name, half)
    model.graph.sort()
    return model


def test_two_layers_share_angles_and_slots() -> None:
    """The second layer reads the query of the first one as its hidden state."""
    assert HIDDEN < LATENT  # the first columns are the hidden state
    first, second = layer(), layer(seed=1)
    outcome = fuse(joined(first, second), validate="none")
    assert outcome.counts == {OPERATOR: 2}


def joined(first: ir.Model, second: ir.Model) -> ir.Model:
    """Both layers in one graph, on the same inputs."""
    for value in (*second.graph.initializers.values(), *(o for n in second.graph for o in n.outputs)):
        value.name = f"second_{value.name}"
    inputs = {value.name: value for value in first.graph.inputs}
    nodes = list(second.graph)
    constants = list(second.graph.initializers.values())
    outputs = list(second.graph.outputs)
    second.graph.outputs.clear()
    for value in second.graph.inputs:
        ir.convenience.replace_all_uses_with(value, inputs[value.name])
    second.graph.remove(nodes)
    second.graph.initializers.clear()
    for constant in constants:
        first.graph.initializers.add(constant)
    first.graph.extend(nodes)
    first.graph.outputs.extend(outputs)
    return first
