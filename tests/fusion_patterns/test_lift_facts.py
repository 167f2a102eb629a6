"""What is known of values: constants, shapes, shape arithmetic, and nodes that change nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fusion_patterns.graph import Facts, attribute, is_op, only_reader, same_dim, static
from tests.fusion_patterns.graphs import Run, graph, normal, value

CONSTANT = {
    "tensor": ("c = Constant<value=float[2]{1, 2}>()", [1, 2]),
    "number": ("c = Constant<value_float=1.5>()", 1.5),
    "integer": ("c = Constant<value_int=3>()", 3),
    "integers": ("c = Constant<value_ints=[3,4]>()", [3, 4]),
    "numbers": ("c = Constant<value_floats=[0.5,4.0]>()", [0.5, 4.0]),
}


@pytest.mark.parametrize(("body", "expected"), CONSTANT.values(), ids=CONSTANT)
def test_constant_nodes(body: str, expected: object) -> None:
    model = graph(body, "c")
    np.testing.assert_array_equal(Facts().constant(value(model, "c")), expected)


def test_what_is_no_constant() -> None:
    model = graph("y = Add(x, w)", "y", x="float[2]", w=np.ones(2, np.float32), big=np.ones(5000, np.float32))
    facts = Facts()
    assert facts.constant(value(model, "x")) is None
    assert facts.constant(value(model, "y")) is None
    assert facts.constant(value(model, "big")) is None
    assert facts.constant(None) is None
    np.testing.assert_array_equal(facts.constant(value(model, "w")), [1, 1])
    model.graph.inputs.append(value(model, "w"))
    assert Facts().constant(value(model, "w")) is None


def test_scalars_and_integers() -> None:
    model = graph("y = Relu(x)", "y", x="float[2]", f=2.5, i=3, many=[1, 2], one=[7])
    facts = Facts()
    assert [facts.scalar(value(model, name)) for name in ("f", "i", "one", "many", "x")] == [2.5, 3, 7, None, None]
    assert [facts.integers(value(model, name)) for name in ("f", "i", "one", "many", "x")] == [
        None,
        [3],
        [7],
        [1, 2],
        None,
    ]


SHAPES = "s = Shape(x) b = Gather<axis=0>(s, zero) bv = Unsqueeze(b, front) "
ARITHMETIC = {
    "Shape": "y = Shape(x)",
    "Shape, part": "y = Shape<start=1, end=3>(x)",
    "Shape, from the end": "y = Shape<start=-2>(x)",
    "Gather": SHAPES + "y = Gather<axis=0>(s, last)",
    "Gather, several": SHAPES + "y = Gather<axis=0>(s, some)",
    "Slice": SHAPES + "y = Slice(s, front, two_v)",
    "Slice, from the end": SHAPES + "y = Slice(s, back, far)",
    "Slice, by two": SHAPES + "y = Slice(s, front, far, front, two_v)",
    "Concat": SHAPES + "y = Concat<axis=0>(bv, two_v, bv)",
    "Add": SHAPES + "y = Add(b, two)",
    "Sub": SHAPES + "y = Sub(two, b)",
    "Mul": SHAPES + "y = Mul(bv, some)",
    "Div": SHAPES + "y = Div(b, two)",
    "Squeeze": SHAPES + "y = Squeeze(bv)",
    "Cast": SHAPES + "y = Cast<to=6>(bv)",
    "Reshape": SHAPES + "y = Reshape(b, minus)",
    "Identity": SHAPES + "y = Identity(b)",
    "constant": "y = Add(some, two)",
}
NUMBERS = {
    "zero": 0,
    "two": 2,
    "front": [0],
    "two_v": [2],
    "last": -1,
    "some": [0, 2],
    "back": [-2],
    "far": [100],
    "minus": [-1],
}


@pytest.mark.parametrize("body", ARITHMETIC.values(), ids=ARITHMETIC)
def test_shape_arithmetic(body: str) -> None:
    model = graph(body, "y", x="float[B,S,4,6]", **NUMBERS)
    dims = Facts().symbolic(value(model, "y"))
    assert dims is not None
    run = Run(model, normal(x=(5, 3, 4, 6)))
    assert [run.size(dim) for dim in dims] == run.of(value(model, "y")).reshape(-1).tolist()


UNKNOWN = {
    "a value": "y = Cast<to=7>(x)",
    "an index from outside": SHAPES + "y = Gather<axis=0>(s, n)",
    "bounds from outside": SHAPES + "nv = Unsqueeze(n, front) y = Slice(s, nv, two_v)",
    "an index beyond the end": "s = Shape<end=1>(x) y = Gather<axis=0>(s, n)",
}


@pytest.mark.parametrize("body", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_arithmetic(body: str) -> None:
    model = graph(body, "y", x="float[B,S,4,6]", n="int64[]", **NUMBERS)
    assert Facts().symbolic(value(model, "y")) is None


def dim(text: str | None) -> ir.SymbolicDim:
    return ir.SymbolicDim(text)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (dim("B"), dim("B"), True),
        (dim("B"), dim("S"), False),
        (dim("512"), 512, True),
        (dim("B"), 2, False),
        (dim(None), dim(None), False),
        (None, None, False),
        (dim("s + 1"), dim("1 + s"), True),
        (dim("s") + 1 - 1, dim("s"), True),
        (dim("s") * 2, dim("s") + dim("s"), True),
        (dim("s") + 1, dim("s"), False),
    ],
    ids=str,
)
def test_same_dim(left: object, right: object, same: bool) -> None:
    assert same_dim(left, right) == same
    assert same_dim(right, left) == same


NOTHING = {
    "Identity": ("y = Identity(x)", True),
    "Cast to itself": ("y = Cast<to=1>(x)", True),
    "times one": ("y = Mul(x, one)", True),
    "one times": ("y = Mul(one, x)", True),
    "by one": ("y = Div(x, one)", True),
    "plus zero": ("y = Add(zero, x)", True),
    "minus zero": ("y = Sub(x, zero)", True),
    "Reshape to itself": ("y = Reshape(x, same)", True),
    "Expand to itself": ("y = Expand(x, unit)", True),
    "chain": ("a = Identity(x) b = Mul(a, one) y = Cast<to=1>(b)", True),
    "Cast": ("y = Cast<to=10>(x)", False),
    "times two": ("y = Mul(x, two)", False),
    "one by": ("y = Div(one, x)", False),
    "zero minus": ("y = Sub(zero, x)", False),
    "plus one": ("y = Add(x, one)", False),
    "times zero": ("y = Mul(x, zero)", False),
    "ones that widen": ("y = Mul(x, wide)", False),
    "Reshape": ("y = Reshape(x, other)", False),
    "Expand": ("y = Expand(x, larger)", False),
}


@pytest.mark.parametrize(("body", "nothing"), NOTHING.values(), ids=NOTHING)
def test_nodes_that_change_nothing(body: str, nothing: bool) -> None:
    numbers = {
        "one": 1.0,
        "zero": 0.0,
        "two": 2.0,
        "same": [2, 3],
        "unit": [1, 1],
        "other": [3, 2],
        "larger": [4, 2, 3],
    }
    model = graph(body, "y", x="float[2,3]", wide=np.ones((1, 1, 1), np.float32), **numbers)
    facts = Facts()
    assert (facts.plain(value(model, "y")).name == "x") == nothing
    if nothing:
        run = Run(model, normal(x=(2, 3)))
        np.testing.assert_array_equal(run.of(value(model, "y")), run.of(value(model, "x")))


def test_readers_behind_nodes_that_change_nothing() -> None:
    model = graph(
        "a = Identity(x) b = Relu(a) c = Mul(x, one) d = Add(c, b) e = Relu(x)", "d e", x="float[2,3]", one=1.0
    )
    readers = sorted((node.outputs[0].name, index) for node, index in Facts().readers(value(model, "x")))
    assert readers == [("b", 0), ("d", 0), ("e", 0)]


def test_attributes_and_their_defaults() -> None:
    model = graph("y = ReduceMean(x) z = Softmax<axis=1>(x) w = Softmax(x)", "y z w", x="float[2,3]")
    mean, softmax, default = model.graph
    assert (attribute(mean, "keepdims"), attribute(softmax, "axis"), attribute(default, "axis")) == (1, 1, -1)
    assert attribute(mean, "unheard_of", 5) == 5
    default.domain = "elsewhere"
    assert attribute(default, "axis", 7) == 7
    assert is_op(softmax, "Softmax", "Relu")
    assert not is_op(default, "Softmax")
    assert not is_op(None, "Softmax")


def test_only_reader() -> None:
    model = graph("a = Relu(x) b = Relu(a) c = Relu(x) d = Add(c, c)", "b d a", x="float[2]")
    assert only_reader(value(model, "a")) is None  # a graph output
    assert only_reader(value(model, "x")) is None
    assert only_reader(value(model, "c")) is None
    model.graph.outputs.pop()
    reader = only_reader(value(model, "a"))
    assert reader is not None
    assert (reader[0].outputs[0].name, reader[1]) == ("b", 0)


def test_static_shapes() -> None:
    assert static(ir.Shape([2, 3])) == (2, 3)
    with pytest.raises(ValueError, match="shape of numbers"):
        static(ir.Shape([2, "B"]))
    with pytest.raises(ValueError, match="shape of numbers"):
        static(None)


def test_answers_are_remembered_per_value() -> None:
    model = graph("y = Relu(x)", "y", x="float[2]")
    facts, asked = Facts(), []

    def compute(v: ir.Value, _: Facts) -> str:
        asked.append(v)
        return v.name or ""

    assert [facts.remember("name", value(model, n), compute) for n in ("x", "x", "y")] == ["x", "x", "y"]
    assert len(asked) == 2
