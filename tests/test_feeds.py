"""Rules, sizes and what is inferred from a graph."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ascend_onnx.convert import to_float32
from ascend_onnx.dimension_search import Relation, apply_relations, find_relations
from ascend_onnx.errors import InputError
from ascend_onnx.feeds import choose_dimensions, fit_dimensions, infer_rules, make_feeds
from ascend_onnx.input_rules import selected_tokens
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load
from tests.models import CASES, GRAPHS

NAMES = sorted(path.stem for folder in GRAPHS for path in folder.glob("*.onnx"))
RELATED = {"attn_deepseek_v3_decode_sdpa_op17_ts"}  # calls past + 1 total: `verify` finds such relations, feeds do not
WHOLE = [name for name in NAMES if name.startswith(("lm_", "attn_")) and name not in RELATED]
INT, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


def model_of(inputs, nodes=(), outputs=(), initializers=(), opset=20):
    """A model of (name, type, shape) inputs and outputs, nodes as (op, inputs, outputs, attributes)."""
    graph = helper.make_graph(
        [helper.make_node(op, i, o, **attributes) for op, i, o, attributes in nodes],
        "g",
        [helper.make_tensor_value_info(*entry) for entry in inputs],
        [helper.make_tensor_value_info(*entry) for entry in outputs],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in initializers],
    )
    return load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10))


def drawn(rule, shape=(3, 4), dtype=INT, sizes=None, seed=0):
    return make_feeds(model_of([("x", dtype, shape)]), sizes or {}, {"x": rule}, seed=seed)["x"]


# --------------------------------------------------------------------------------------------------------------- rules


def test_normal():
    array = drawn("normal", (1000,), FLOAT)
    assert array.dtype == np.float32
    assert abs(array.mean()) < 0.1
    assert 0.9 < array.std() < 1.1


def test_lanes_repeat_one_value():
    lanes = drawn("lanes", (5, 8), FLOAT)
    assert (lanes == lanes[:, :1]).all()
    assert len(np.unique(lanes)) == 5
    assert (drawn("positive_lanes", (5, 8), FLOAT) >= 0.5).all()


def test_constants():
    assert (drawn("ones") == 1).all()
    assert drawn("ones", dtype=BOOL).all()
    assert drawn("scalar:2.5", (), FLOAT) == 2.5
    assert (drawn("scalar:n", dtype=FLOAT, sizes={"n": 7}) == 7).all()


def test_ids_stay_below_their_bound():
    array = drawn("ids:5", (1000,))
    assert set(np.unique(array)) == set(range(5))


def test_distinct_has_no_repetition_in_a_row():
    array = drawn("distinct:6", (50, 4))
    assert all(len(set(row)) == 4 for row in array)
    assert array.max() == 5
    assert len(np.unique(array, axis=0)) > 1


def test_a_permutation_has_no_repetition_at_all():
    array = drawn("permutation:a*b", (3, 4), sizes={"a": 2, "b": 10})
    assert len(np.unique(array)) == 12
    assert array.max() < 20


def test_arange_counts_along_the_last_axis():
    assert drawn("arange:past + 1", (2, 3), sizes={"past": 5}).tolist() == [[6, 7, 8]] * 2


def test_causal_masks():
    mask = drawn("causal", (1, 1, 2, 5), FLOAT)[0, 0]
    lowest = np.finfo(np.float32).min
    assert mask.tolist() == [[0, 0, 0, 0, lowest], [0] * 5]
    assert drawn("causal", (2, 3), BOOL).tolist() == [[True, True, False], [True, True, True]]
    assert drawn("future", (2, 3), BOOL).tolist() == [[False, False, True], [False, False, False]]


def test_element_types():
    assert drawn("normal", dtype=TensorProto.BFLOAT16).dtype == ml_dtypes.bfloat16
    assert drawn("normal", dtype=TensorProto.FLOAT16).dtype == np.float16
    assert np.isfinite(drawn("causal", dtype=TensorProto.FLOAT16)).all()
    assert drawn("ids:3", dtype=TensorProto.INT32).dtype == np.int32


def test_the_same_seed_gives_the_same_values_whatever_else_is_fed():
    alone = drawn("normal", dtype=FLOAT, seed=3)
    others = model_of([("a", FLOAT, (2,)), ("x", FLOAT, (3, 4))])
    assert np.array_equal(make_feeds(others, {}, seed=3)["x"], alone)
    assert not np.array_equal(drawn("normal", dtype=FLOAT, seed=4), alone)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("often", "not one of"),
        ("ids", "not one of"),
        ("ones:3", "not one of"),
        ("distinct:3", "cannot hold distinct:3"),
        ("permutation:11", "cannot hold permutation:11"),
        ("ids:0", "cannot hold ids:0"),
        ("ids:unknown", "'unknown' is not a number"),
        ("arange:__import__('os')", "is not a number"),
        ("arange:1 +", "is not a number"),
        ("scalar:x y", "is not a number"),
    ],
)
def test_impossible_rules_are_refused(rule, words):
    with pytest.raises(InputError, match=words):
        drawn(rule)


def test_a_rule_for_no_input_is_refused():
    with pytest.raises(InputError, match="no input is called 'y'"):
        make_feeds(model_of([("x", FLOAT, (1,))]), {}, {"y": "ones"})


# --------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_differ_between_sets_and_batches_are_at_least_two():
    model = model_of([("x", FLOAT, ("batch", "seq", 4)), ("y", FLOAT, ("batch", 1, "past + seq"))])
    first, second = choose_dimensions(model)
    assert list(first) == ["batch", "seq", "past"]
    assert all(first[name] != second[name] for name in first)
    assert min(first["batch"], second["batch"]) >= 2
    feeds = make_feeds(model, first)
    assert feeds["y"].shape == (first["batch"], 1, first["past"] + first["seq"])


def test_given_sizes_are_taken():
    model = model_of([("x", FLOAT, ("batch", "seq"))])
    assert all(sizes["seq"] == 17 for sizes in choose_dimensions(model, {"seq": 17}))
    assert [sizes["batch"] for sizes in choose_dimensions(model, {"batch": 1})] == [1, 1]
    with pytest.raises(InputError, match="no input of the model has a dimension 'absent'"):
        choose_dimensions(model, {"absent": 1})
    with pytest.raises(InputError, match="at least 1"):
        choose_dimensions(model, {"seq": 0})


def test_dimensions_without_a_name():
    model = model_of([("x.y", FLOAT, (None, 3))])
    sizes = choose_dimensions(model)[0]
    assert make_feeds(model, sizes)["x.y"].shape == (2, 3)


def test_bounds_leave_room_for_distinct_values():
    model = model_of([("cache", FLOAT, ("blocks", "size")), ("slot", INT, ("tokens",)), ("pick", INT, ("tokens", 4))])
    rules = {"slot": "permutation:blocks*size", "pick": "distinct:size"}
    for sizes in choose_dimensions(model, rules=rules):
        assert sizes["blocks"] * sizes["size"] >= 2 * sizes["tokens"]
        assert sizes["size"] >= 20
        make_feeds(model, sizes, {**rules, "cache": "normal"})
    fixed = fit_dimensions(model, rules, {"blocks": 1, "size": 1, "tokens": 2}, fixed={"size"})
    assert fixed["size"] == 1


@pytest.mark.parametrize("name", ["lm_deepseek_v32_hf_decode", "lm_deepseek_v32_hf_prefill"])
def test_a_model_with_selection_gets_five_times_as_many_tokens(corpus, name):
    model = load(corpus(name))
    ((tokens, selected),) = selected_tokens(model)
    assert selected == 8
    last = choose_dimensions(model)[-1]
    symbol = tokens.removesuffix(" + 1")
    assert last[symbol] + (symbol != tokens) >= 40


def test_a_router_is_no_selection(corpus):
    assert selected_tokens(load(corpus("lm_deepseek_v3_hf_decode"))) == []


# ----------------------------------------------------------------------------------------------------------- inference


@pytest.mark.parametrize("name", WHOLE)
def test_inferred_inputs_run_at_two_sets_of_sizes(corpus, name):
    model = load(corpus(name))
    runnable = to_float32(model) if "bf16" in name else model
    session = CpuSession(runnable)
    first, second = choose_dimensions(runnable)
    assert first != second or not first
    for sizes in (first, second):
        feeds = make_feeds(runnable, sizes)
        assert all(array.shape[0] >= 2 for array in feeds.values())
        for output in session.run(feeds).values():
            assert np.isfinite(output).all()


@pytest.mark.parametrize("name", WHOLE)
def test_inferred_rules_are_those_of_the_cases(corpus, name):
    rules = infer_rules(load(corpus(name)))
    masks = {"normal": "causal"}  # the cases take any additive mask
    for input_name, (_, _, rule) in CASES[name]["inputs"].items():
        if "mask" in input_name:
            rule = masks.get(rule, rule)
        assert rules[input_name].replace("256", "250") == rule


def test_selected_tokens_as_an_input(corpus):
    model = load(corpus("sfa_gather_op18_opt"))
    assert infer_rules(model)["idx"].startswith("distinct:s")


def test_token_masks_are_ones():
    nodes = [("Cast", ["mask"], ["seen"], {"to": BOOL})]
    model = model_of([("mask", INT, ("b", "s"))], nodes, [("seen", BOOL, ("b", "s"))])
    assert infer_rules(model) == {"mask": "ones"}


def test_ids_of_an_embedding():
    nodes = [("Gather", ["table", "ids"], ["rows"], {})]
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    model = model_of([("ids", INT, ("b", "s"))], nodes, [("rows", FLOAT, ("b", "s", 4))], [("table", table)])
    assert infer_rules(model) == {"ids": "ids:50"}


def test_positions_in_a_table_of_angles():
    angles = np.arange(50)[:, None] * np.array([1, 0.1])
    nodes = [("Gather", ["cos", "positions"], ["rows"], {})]
    outputs = [("rows", FLOAT, ("b", "s", 2))]
    cos = [("cos", np.cos(angles).astype(np.float32))]
    assert infer_rules(model_of([("positions", INT, ("b", "s"))], nodes, outputs, cos)) == {"positions": "arange:0"}


def test_slots_of_a_cache():
    nodes = [
        ("Unsqueeze", ["slot", "last"], ["index"], {}),
        ("ScatterND", ["cache", "index", "rows"], ["out"], {}),
    ]
    inputs = [("slot", INT, ("t",)), ("cache", FLOAT, ("slots", 4)), ("rows", FLOAT, ("t", 4))]
    model = model_of(inputs, nodes, [("out", FLOAT, ("slots", 4))], [("last", np.array([-1]))])
    assert infer_rules(model) == {"slot": "permutation:slots", "cache": "normal", "rows": "normal"}


def test_index_tuples_are_told_apart():
    nodes = [
        ("Unsqueeze", ["block", "last"], ["b1"], {}),
        ("Unsqueeze", ["offset", "last"], ["o1"], {}),
        ("Concat", ["b1", "o1"], ["index"], {"axis": -1}),
        ("GatherND", ["cache", "index"], ["rows"], {}),
    ]
    inputs = [("block", INT, ("t",)), ("offset", INT, ("t",)), ("cache", FLOAT, ("blocks", 16, 4))]
    model = model_of(inputs, nodes, [("rows", FLOAT, ("t", 4))], [("last", np.array([-1]))])
    rules = infer_rules(model)
    assert rules["block"] == "distinct:blocks"
    assert rules["offset"] == "ids:16"  # there may be more tokens than offsets


def test_expert_ids_are_counted_against_the_number_of_experts():
    nodes = [("Unsqueeze", ["ids", "last"], ["i"], {}), ("Equal", ["i", "range"], ["hit"], {})]
    constants = [("last", np.array([-1])), ("range", np.arange(8))]
    model = model_of([("ids", INT, ("t", 2))], nodes, [("hit", BOOL, ("t", 2, 8))], constants)
    assert infer_rules(model) == {"ids": "distinct:8"}


@pytest.mark.parametrize(("branches", "rule"), [(["low", "scores"], "future"), (["scores", "low"], "causal")])
def test_boolean_masks_by_what_true_means(branches, rule):
    nodes = [("Where", ["mask", *branches], ["masked"], {}), ("Softmax", ["masked"], ["p"], {})]
    shape = ("b", 1, "q", "k")
    inputs = [("mask", BOOL, shape), ("scores", FLOAT, shape)]
    low = [("low", np.array(-np.inf, np.float32))]
    assert infer_rules(model_of(inputs, nodes, [("p", FLOAT, shape)], low))["mask"] == rule
    inverted = [("Not", ["mask"], ["not"], {}), ("Where", ["not", *branches], ["masked"], {}), nodes[1]]
    opposite = {"future": "causal", "causal": "future"}[rule]
    assert infer_rules(model_of(inputs, inverted, [("p", FLOAT, shape)], low))["mask"] == opposite


def test_a_float_that_is_added_elsewhere_is_no_mask():
    nodes = [("Add", ["x", "bias"], ["y"], {}), ("MatMul", ["y", "y"], ["z"], {}), ("Softmax", ["z"], ["p"], {})]
    inputs = [("x", FLOAT, (4, 4)), ("bias", FLOAT, (4, 4))]
    assert infer_rules(model_of(inputs, nodes, [("p", FLOAT, (4, 4))]))["bias"] == "normal"


def test_inputs_with_a_default_are_not_fed():
    model = model_of([("x", FLOAT, (2,)), ("d", FLOAT, (2,))], initializers=[("d", np.zeros(2, np.float32))])
    assert list(make_feeds(model, {})) == ["x"]


# ----------------------------------------------------------------------------------------------------------- relations


def relations_under(names, runs, fixed=()):
    """`runs(sizes)` tells how far a run came, None for all the way; it is asked for two sets of sizes."""

    def attempt(relations):
        for values in ((2, 3, 5, 7, 11), (3, 11, 6, 4, 8)):
            reached = runs(apply_relations(relations, dict(zip(names, values, strict=False))))
            if reached is not None:
                return reached
        return None

    return find_relations(names, fixed, attempt)


def test_no_relation_where_none_is_needed():
    assert relations_under(["a", "b"], lambda sizes: None) == ()


def test_a_total_is_past_plus_one():
    runs = lambda sizes: None if sizes["total"] == sizes["past"] + 1 else 0  # noqa: E731
    assert relations_under(["batch", "total", "past"], runs) == (Relation("total", "past + 1"),)
    assert relations_under(["batch", "total"], runs=lambda sizes: 0) is None


def test_two_steps_follow_the_failing_node():
    def runs(sizes):
        if sizes["slots"] != sizes["batch"] * sizes["seq"]:
            return 4
        return None if sizes["q"] == sizes["seq"] else 9

    found = relations_under(["batch", "seq", "slots", "q"], runs)
    assert found is not None
    assert found[0] == Relation("slots", "batch * seq")
    assert len(found) == 2


def test_two_equalities_at_once():
    names = ["sequence_len", "seq_len", "past_sequence_len", "past_seq_len"]

    def runs(sizes):
        same = sizes["sequence_len"] == sizes["seq_len"] and sizes["past_sequence_len"] == sizes["past_seq_len"]
        return None if same else 0

    found = relations_under(names, runs)
    assert found is not None
    assert {frozenset((r.name, r.expression)) for r in found} == {frozenset(names[:2]), frozenset(names[2:])}


def test_fixed_dimensions_are_not_redefined():
    runs = lambda sizes: None if sizes["a"] == sizes["b"] else 0  # noqa: E731
    assert relations_under(["a", "b"], runs, fixed=("a",)) == (Relation("b", "a"),)
    assert relations_under(["a", "b"], runs, fixed=("a", "b")) is None
