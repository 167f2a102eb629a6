"""Loading and saving: what is refused, where weights end up, and that a failed save leaves nothing behind."""

import os
import subprocess
import sys
import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ascend_onnx import storage
from ascend_onnx.errors import InputError
from ascend_onnx.session import run_model
from ascend_onnx.storage import load, save
from ascend_onnx.tensors import external_path, tensor_slots

ROWS = 64
WEIGHTS = {
    "w": np.arange(ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS),
    "v": np.full((ROWS, ROWS), 0.5, np.float32),
    "b": np.ones(ROWS, np.float32),
}


def linear_model(opset=18) -> onnx.ModelProto:
    """y = x @ w @ v + b"""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], name="first"),
        helper.make_node("MatMul", ["xw", "v"], ["xwv"], name="second"),
        helper.make_node("Add", ["xwv", "b"], ["y"], name="bias"),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", ROWS])],
        [onnx.numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.fixture
def single_file(tmp_path):
    path = tmp_path / "single" / "model.onnx"
    path.parent.mkdir()
    onnx.save(linear_model(), path)
    return path


@pytest.fixture
def with_data(tmp_path):
    """A model with its weights in weights.bin beside it."""
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    onnx.save(linear_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def result(path):
    return run_model(path, {"x": np.ones((2, ROWS), np.float32)})["y"]


def locations(path):
    """Initializer name -> (file, offset), None for a tensor inside the model file."""
    found = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        found[tensor.name] = (entries["location"], int(entries["offset"])) if entries else None
    return found


def files(folder):
    return sorted(entry.name for entry in folder.iterdir())


# ---------------------------------------------------------------------------------------------------------------- load


def test_a_path_a_proto_and_a_model_are_accepted(single_file):
    model = load(single_file)
    assert isinstance(model, ir.Model)
    assert load(model) is model
    assert isinstance(load(str(single_file)), ir.Model)
    assert isinstance(load(linear_model()), ir.Model)


def test_external_weights_stay_on_disk(with_data, monkeypatch):
    monkeypatch.chdir(with_data.parent)
    model = load("model.onnx")
    monkeypatch.chdir("/")
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.raw is None
    assert np.array_equal(tensor.numpy(), WEIGHTS["w"])


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), (b"not a model at all", "not an ONNX protobuf"), (b"", "no graph")],
)
def test_what_is_no_model_is_refused(tmp_path, content, words):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="folder"):
        load(tmp_path)


def test_a_file_cut_short_is_refused(single_file):
    single_file.write_bytes(single_file.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cut short"):
        load(single_file)


def test_what_the_checker_rejects_is_refused(single_file):
    proto = linear_model()
    proto.graph.node[0].input[0] = "absent"
    onnx.save(proto, single_file)
    with pytest.raises(InputError, match=r"onnx\.checker rejects .*absent"):
        load(single_file)


def test_an_opset_that_does_not_exist_is_refused_with_a_way_out(single_file):
    onnx.save(linear_model(opset=99), single_file)
    for model in (single_file, linear_model(opset=99), ir.from_proto(linear_model(opset=99))):
        with pytest.raises(InputError, match=r"opset 99.*knows opsets up to.*update onnx"):
            load(model)


def test_an_old_opset_is_refused_with_a_way_out(single_file):
    onnx.save(linear_model(opset=16), single_file)
    for model in (single_file, linear_model(opset=16), ir.from_proto(linear_model(opset=16))):
        with pytest.raises(InputError, match=r"opset 16.*17.*version_converter"):
            load(model)


def test_missing_and_short_data_is_refused(with_data):
    data = with_data.parent / "weights.bin"
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(InputError, match="which has only"):
        load(with_data)
    data.unlink()
    with pytest.raises(InputError, match=r"'w' needs .*weights\.bin, which is not there \(and 2 more tensors\)"):
        load(with_data)


def test_data_of_constants_is_checked_too(tmp_path):
    value = onnx.numpy_helper.from_array(WEIGHTS["b"], "c")
    value.ClearField("raw_data")
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value="absent.bin")
    proto = linear_model()
    del proto.graph.initializer[2]
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["b"], value=value))
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"absent\.bin"):
        load(tmp_path / "model.onnx")


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname"])
def test_data_outside_the_folder_is_refused(with_data, location):
    proto = onnx.load(with_data, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    with_data.write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match="at or below"):
        load(with_data)


def test_sparse_initializers_are_refused(single_file):
    proto = linear_model()
    proto.graph.sparse_initializer.add().values.name = "s"
    onnx.save(proto, single_file)
    with pytest.raises(InputError, match="sparse"):
        load(single_file)


def test_operators_of_the_domain_pass_the_checker(single_file):
    proto = linear_model()
    proto.opset_import.append(helper.make_opsetid("ai.ascend", 1))
    proto.graph.node.append(helper.make_node("RingAttentionUpdateV2", ["x"] * 6, ["z"], domain="ai.ascend"))
    onnx.save(proto, single_file)
    assert len(load(single_file).graph) == 4


# ---------------------------------------------------------------------------------------------------------------- save


def test_a_small_model_without_external_data_stays_one_file(single_file, tmp_path):
    save(load(single_file), tmp_path / "out.onnx", source=single_file)
    assert files(tmp_path) == ["out.onnx", "single"]
    assert np.array_equal(result(tmp_path / "out.onnx"), result(single_file))


def test_auto_in_the_same_folder_keeps_pointing_at_the_data(with_data):
    out = with_data.with_name("out.onnx")
    save(load(with_data), out, source=with_data)
    assert files(out.parent) == ["model.onnx", "out.onnx", "weights.bin"]
    assert locations(out) == locations(with_data)
    assert np.array_equal(result(out), result(with_data))


def test_auto_writes_new_tensors_to_a_data_file(with_data):
    model = load(with_data)
    value = model.graph.initializers["v"]
    value.const_value = ir.LazyTensor(
        lambda: ir.Tensor(WEIGHTS["v"] * 2), ir.DataType.FLOAT, ir.Shape(WEIGHTS["v"].shape), name="v"
    )
    out = with_data.with_name("out.onnx")
    save(model, out, source=with_data)
    assert files(out.parent) == ["model.onnx", "out.onnx", "out.onnx.data", "weights.bin"]
    assert locations(out) == {**locations(with_data), "v": ("out.onnx.data", 0)}
    assert np.allclose(result(out) - 1, (result(with_data) - 1) * 2)
    assert isinstance(value.const_value, ir.LazyTensor)


def test_auto_elsewhere_copies(with_data, tmp_path):
    out = tmp_path / "elsewhere" / "out.onnx"
    out.parent.mkdir()
    save(load(with_data), out, source=with_data)
    assert files(out.parent) == ["out.onnx", "out.onnx.data"]
    assert {place[0] for place in locations(out).values()} == {"out.onnx.data"}
    assert all(place[1] % 4096 == 0 for place in locations(out).values())
    expected = result(with_data)
    (with_data.parent / "weights.bin").unlink()
    assert np.array_equal(result(out), expected)


def test_copy_copies_in_the_same_folder(with_data):
    out = with_data.with_name("out.onnx")
    save(load(with_data), out, source=with_data, external_data="copy")
    assert {place[0] for place in locations(out).values()} == {"out.onnx.data"}


def test_link_reaches_below_the_folder_but_not_elsewhere(with_data, tmp_path):
    save(load(with_data), tmp_path / "above.onnx", source=with_data, external_data="link")
    assert {place[0] for place in locations(tmp_path / "above.onnx").values()} == {"in/weights.bin"}
    assert np.array_equal(result(tmp_path / "above.onnx"), result(with_data))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(InputError, match="cannot link"):
        save(load(with_data), elsewhere / "out.onnx", source=with_data, external_data="link")
    assert files(elsewhere) == []


def test_slices_of_a_stacked_weight_are_copied_once(tmp_path):
    experts, rows = 4, 1024
    (tmp_path / "in").mkdir()
    stacked = np.random.default_rng(0).standard_normal((experts, rows)).astype(np.float32)
    stacked.tofile(tmp_path / "in" / "w.bin")

    def external(name, offset, shape):
        return ir.Value(
            name=name,
            const_value=ir.ExternalTensor(
                "w.bin", offset, None, ir.DataType.FLOAT, shape=ir.Shape(shape), name=name, base_dir=tmp_path / "in"
            ),
        )

    values = [
        external("stacked", 0, (experts, rows)),
        *(external(f"e{e}", e * rows * 4, (rows,)) for e in range(experts)),
    ]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 18}, name="g"), ir_version=10)
    save(model, tmp_path / "out.onnx", external_data="copy")
    assert (tmp_path / "out.onnx.data").stat().st_size == stacked.nbytes
    copied = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer
    }
    assert np.array_equal(copied["stacked"], stacked)
    assert np.array_equal(copied["e2"], stacked[2])


def test_a_tensor_used_twice_is_written_once(with_data, tmp_path):
    model = load(with_data)
    shared = ir.Tensor(np.ones((ROWS, ROWS), np.float32))
    for name in ("w", "v"):
        model.graph.initializers[name].const_value = shared
    save(model, tmp_path / "out.onnx", source=with_data)
    places = locations(tmp_path / "out.onnx")
    assert places["w"] == places["v"]


def test_the_model_keeps_working_after_it_was_saved(with_data, tmp_path):
    model = load(with_data)
    before = [slot.tensor for slot in tensor_slots(model)]
    save(model, tmp_path / "out.onnx", source=with_data)
    assert [slot.tensor for slot in tensor_slots(model)] == before
    assert external_path(model.graph.initializers["w"].const_value) == with_data.parent / "weights.bin"
    assert np.array_equal(run_model(model, {"x": np.ones((2, ROWS), np.float32)})["y"], result(with_data))


def test_saving_over_the_model_itself_keeps_its_data(with_data):
    expected = result(with_data)
    save(load(with_data), with_data, source=with_data)
    assert files(with_data.parent) == ["model.onnx", "weights.bin"]
    assert np.array_equal(result(with_data), expected)


def test_the_models_own_weights_are_never_overwritten(with_data, tmp_path):
    data = with_data.parent / "weights.bin"
    with pytest.raises(InputError, match="own weights"):
        save(load(with_data), data, source=with_data)
    own = tmp_path / "own" / "model.onnx"
    own.parent.mkdir()
    save(load(with_data), own, source=with_data)
    before = {entry: entry.read_bytes() for entry in own.parent.iterdir()}
    for mode in ("auto", "copy"):
        model = load(own)
        model.graph.initializers["v"].const_value = ir.Tensor(WEIGHTS["v"] * 3)
        with pytest.raises(InputError, match=r"model\.onnx\.data: the model's own weights"):
            save(model, own, source=own, external_data=mode)
    assert {entry: entry.read_bytes() for entry in own.parent.iterdir()} == before


def test_an_existing_output_is_replaced(with_data, tmp_path):
    out = tmp_path / "out.onnx"
    out.write_bytes(b"old")
    (tmp_path / "out.onnx.data").write_bytes(b"old")
    save(load(with_data), out, source=with_data)
    assert files(tmp_path) == ["in", "out.onnx", "out.onnx.data"]
    assert np.array_equal(result(out), result(with_data))


def test_new_files_are_as_readable_as_others(with_data, tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    save(load(with_data), tmp_path / "out.onnx", source=with_data)
    assert (tmp_path / "out.onnx").stat().st_mode == (tmp_path / "plain").stat().st_mode


class _BrokenTensorError(Exception):
    pass


def _break():
    raise _BrokenTensorError


@pytest.mark.parametrize("had_output", [False, True])
def test_a_tensor_that_cannot_be_computed_leaves_nothing_behind(with_data, tmp_path, had_output):
    out = tmp_path / "out" / "out.onnx"
    out.parent.mkdir()
    if had_output:
        out.write_bytes(b"old model")
        out.with_name("out.onnx.data").write_bytes(b"old data")
    before = {entry.name: entry.read_bytes() for entry in out.parent.iterdir()}
    model = load(with_data)
    model.graph.initializers["v"].const_value = ir.LazyTensor(
        _break, ir.DataType.FLOAT, ir.Shape((ROWS, ROWS)), name="v"
    )
    with pytest.raises(_BrokenTensorError):
        save(model, out, source=with_data)
    assert {entry.name: entry.read_bytes() for entry in out.parent.iterdir()} == before
    assert isinstance(model.graph.initializers["w"].const_value, ir.ExternalTensor)


@pytest.mark.parametrize("had_output", [False, True])
@pytest.mark.parametrize("failing", ["model.onnx.data", "model.onnx"])
def test_a_rename_that_fails_leaves_nothing_behind(with_data, tmp_path, monkeypatch, had_output, failing):
    out = tmp_path / "out" / "model.onnx"
    out.parent.mkdir()
    if had_output:
        out.write_bytes(b"old model")
        out.with_name("model.onnx.data").write_bytes(b"old data")
    before = {entry.name: entry.read_bytes() for entry in out.parent.iterdir()}
    for name in ("rename", "replace"):
        original = getattr(storage.Path, name)

        def refuse(self, target, original=original):
            if target.name == failing and ".old." not in self.name:
                raise PermissionError(1, "Operation not permitted")
            return original(self, target)

        monkeypatch.setattr(storage.Path, name, refuse)
    with pytest.raises(InputError, match="Operation not permitted; nothing was changed"):
        save(load(with_data), out, source=with_data)
    assert {entry.name: entry.read_bytes() for entry in out.parent.iterdir()} == before


def test_impossible_targets_are_refused(with_data, tmp_path):
    with pytest.raises(InputError, match="no folder"):
        save(load(with_data), tmp_path / "absent" / "out.onnx")
    with pytest.raises(InputError, match="it is no regular file"):
        save(load(with_data), with_data.parent)
    with pytest.raises(InputError, match="auto, link, copy"):
        save(load(with_data), tmp_path / "out.onnx", external_data="move")


def test_constants_with_external_data_move_along(tmp_path):
    (tmp_path / "in").mkdir()
    WEIGHTS["b"].tofile(tmp_path / "in" / "b.bin")
    value = onnx.numpy_helper.from_array(WEIGHTS["b"], "c")
    value.ClearField("raw_data")
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value="b.bin")
    proto = linear_model()
    del proto.graph.initializer[2]
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["b"], name="constant", value=value))
    onnx.save(proto, tmp_path / "in" / "model.onnx")
    model = load(tmp_path / "in" / "model.onnx")
    save(model, tmp_path / "out.onnx", source=tmp_path / "in" / "model.onnx")
    assert np.array_equal(model.graph.node("constant").attributes["value"].as_tensor().numpy(), WEIGHTS["b"])
    (tmp_path / "in" / "b.bin").unlink()
    copied = onnx.load(tmp_path / "out.onnx").graph.node[0].attribute[0].t
    assert np.array_equal(onnx.numpy_helper.to_array(copied), WEIGHTS["b"])


def test_ten_thousand_nodes_are_saved_quickly(tmp_path):
    proto = linear_model()
    for index in range(10_000):
        proto.graph.node.append(helper.make_node("Relu", ["y" if index == 0 else f"r{index - 1}"], [f"r{index}"]))
    model = load(proto)
    started = time.perf_counter()
    save(model, tmp_path / "out.onnx")
    assert time.perf_counter() - started < 5
    assert len(load(tmp_path / "out.onnx").graph) == 10_003


_COPY_OF_A_LARGE_MODEL = """
import resource, sys
import numpy as np, onnx_ir as ir
from ascend_onnx.storage import load, save
model = load(sys.argv[1])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shape = (1024, 8192)
for name in ("w", "v"):
    model.graph.initializers[name].const_value = ir.LazyTensor(
        lambda: ir.Tensor(np.zeros(shape, np.float32)), ir.DataType.FLOAT, ir.Shape(shape), name=name)
save(model, sys.argv[2], source=sys.argv[1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10)
"""


def test_saving_holds_one_tensor_at_a_time(tmp_path):
    """Four external tensors of 64 MiB are copied and two lazy ones of 32 MiB written in the memory of about one."""
    size = 64 << 20
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(4 * size)
    proto = linear_model()
    for index in range(4):
        tensor = proto.graph.initializer.add(name=f"big{index}", data_type=TensorProto.UINT8, dims=[size])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "big.bin"), ("offset", index * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "out").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", _COPY_OF_A_LARGE_MODEL, tmp_path / "model.onnx", tmp_path / "out" / "out.onnx"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 100
    assert (tmp_path / "out" / "out.onnx.data").stat().st_size == 4 * size + 2 * (32 << 20)


def test_data_of_the_source_is_kept_even_if_no_tensor_points_at_it_any_more(tmp_path):
    source = tmp_path / "model.onnx"
    onnx.save(linear_model(), source, save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    model = load(source)
    for name in WEIGHTS:
        model.graph.initializers[name].const_value = ir.ExternalTensor(
            "other.bin", 0, None, ir.DataType.FLOAT, shape=ir.Shape(WEIGHTS[name].shape), name=name, base_dir=tmp_path
        )
    WEIGHTS["w"].tofile(tmp_path / "other.bin")
    with pytest.raises(InputError, match=r"out\.onnx\.data: the model's own weights"):
        save(model, tmp_path / "out.onnx", source=source, external_data="copy")
    assert files(tmp_path) == ["model.onnx", "other.bin", "out.onnx.data"]
