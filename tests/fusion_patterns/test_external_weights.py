"""Weights outside the model file: not read while matching, not copied when they do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ascend_onnx.compare import compare_outputs
from ascend_onnx.session import CpuSession
from ascend_onnx.storage import load, save
from fusion_patterns import find, fuse
from tests.models import EXPECTED, corpus_feeds, graph_path

Corpus = Callable[[str], Path]
V3 = "lm_deepseek_v3_hf_decode"
NO_INTERLEAVE = "attn_dsv3_decode_sdpa_op18_opt_nointerleave"
SMALL = 2**16
WHOLE = [V3, "lm_deepseek_v3_hf_prefill", "lm_deepseek_v32_hf_decode", "lm_deepseek_v32_hf_prefill"]


def external(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    initializers = model.graph.initializers.values()
    return {v.name or "": v.const_value for v in initializers if isinstance(v.const_value, ir.ExternalTensor)}


@pytest.fixture
def beside(corpus: Corpus, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A model with its weights in a folder of its own, and the path of its fused form in the same folder."""

    def make(name: str) -> tuple[Path, Path]:
        source = corpus(name)
        for file in (source, source.with_suffix(".weights")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        path, fused = tmp_path / source.name, tmp_path / "fused.onnx"
        model = load(path)
        fuse(model, validate="none")
        save(model, fused, source=path)
        return path, fused

    return make


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith(("lm_", "attn_"))])
def test_matching_does_not_read_weights(name: str) -> None:
    """The graphs of `models/` have no weight files at all."""
    path = graph_path(name)
    assert not path.with_suffix(".weights").exists()
    model = ir.load(path)
    find(model)
    assert fuse(model, validate="none").counts == EXPECTED[name]


def test_saving_reads_them(tmp_path: Path) -> None:
    model = ir.load(graph_path(V3))
    fuse(model, validate="none")
    with pytest.raises((OSError, ValueError)):
        save(model, tmp_path / "fused.onnx", source=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [V3, NO_INTERLEAVE])
def test_unchanged_weights_stay_in_place(beside: Callable[[str], tuple[Path, Path]], name: str) -> None:
    path, fused = beside(name)
    before, after = external(load(path)), external(load(fused))
    shared = before.keys() & after.keys()
    assert shared
    for weight in shared:
        old, new = before[weight], after[weight]
        assert (Path(new.location).name, new.offset or 0, new.nbytes) == (
            path.with_suffix(".weights").name,
            old.offset or 0,
            old.nbytes,
        )


def test_experts_are_slices_of_the_stack(beside: Callable[[str], tuple[Path, Path]]) -> None:
    path, fused = beside(V3)
    stacks = {name: t for name, t in external(load(path)).items() if len(t.shape) == 3}
    after = external(load(fused))
    assert len(stacks) == 2
    for name, stack in stacks.items():
        assert name not in after
        stride = stack.nbytes // 8
        slices = sorted((t for n, t in after.items() if n.startswith(f"{name}.")), key=lambda t: t.offset or 0)
        assert [t.offset or 0 for t in slices] == [(stack.offset or 0) + e * stride for e in range(8)]
        assert {t.location for t in slices} == {stack.location}
        assert {tuple(t.shape) for t in slices} == {tuple(stack.shape)[1:]}
        for expert, piece in enumerate(slices):
            np.testing.assert_array_equal(piece.numpy(), stack.numpy()[expert])


def written(fused: Path) -> dict[str, ir.ExternalTensor]:
    """The weights in the file that saving wrote, which also takes what is small out of the model file."""
    data = {name: t for name, t in external(load(fused)).items() if Path(t.location).name == "fused.onnx.data"}
    return {name: t for name, t in data.items() if t.nbytes > SMALL}


@pytest.mark.parametrize("name", WHOLE)
def test_only_absorbed_weights_are_written(beside: Callable[[str], tuple[Path, Path]], name: str) -> None:
    """The interleaved export rotates as the operator does: nothing but W_UK and W_UV is new, two layers of each."""
    _, fused = beside(name)
    new = written(fused)
    assert sorted(tuple(map(int, t.shape)) for t in new.values()) == sorted([(4, 128, 512), (4, 512, 128)] * 2)
    assert fused.with_name("fused.onnx.data").stat().st_size <= 4 * 4 * 128 * 512 * 4 + 2 * SMALL


def test_weights_of_a_half_split_rotation_are_permuted(beside: Callable[[str], tuple[Path, Path]]) -> None:
    """The columns of q_b and kv_a move, so these two are written as well."""
    path, fused = beside(NO_INTERLEAVE)
    new = written(fused)
    shapes = sorted(tuple(map(int, t.shape)) for t in new.values())
    assert shapes == sorted([(4, 128, 512), (4, 512, 128), (1536, 768), (1024, 576)])
    by_shape = {tuple(map(int, t.shape)): t for t in new.values()}
    old = {tuple(map(int, t.shape)): t for t in external(load(path)).values()}
    for shape in ((1536, 768), (1024, 576)):
        moved, original = by_shape[shape].numpy(), old[shape].numpy()
        assert not np.array_equal(moved, original)
        np.testing.assert_array_equal(np.sort(moved, axis=1), np.sort(original, axis=1))


def test_absorbed_weights_are_the_parts_of_the_expansion(beside: Callable[[str], tuple[Path, Path]]) -> None:
    """W_UK (N, D, Hckv) and W_UV (N, Hckv, Dv) put together again are kv_b (Hckv, N * (D + Dv))."""
    path, fused = beside("attn_dsv3_decode_sdpa_op18_opt")
    new = {tuple(map(int, t.shape)): t.numpy() for t in written(fused).values()}
    expansion = next(
        t for t in external(load(path)).values() if tuple(map(int, t.shape)) == (512, 1024) and t.name == "val_116"
    )
    keys, values = new[(4, 128, 512)].transpose(2, 0, 1), new[(4, 512, 128)].transpose(1, 0, 2)
    np.testing.assert_array_equal(np.concatenate([keys, values], -1).reshape(512, 1024), expansion.numpy())


@pytest.mark.parametrize("mode", ["link", "auto", "copy"])
def test_the_saved_model_is_equal(corpus: Corpus, tmp_path: Path, mode: str) -> None:
    source = corpus(V3)
    for file in (source, source.with_suffix(".weights")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path, fused = tmp_path / source.name, tmp_path / "fused.onnx"
    model = load(path)
    fuse(model, validate="none")
    save(model, fused, source=path, external_data=mode)
    feeds = corpus_feeds(V3)
    assert all(c.within for c in compare_outputs(CpuSession(path).run(feeds), CpuSession(fused).run(feeds)))
    if mode == "copy":
        path.with_suffix(".weights").unlink()
        assert all(c.within for c in compare_outputs(CpuSession(fused).run(feeds), CpuSession(load(fused)).run(feeds)))


def test_saved_elsewhere_the_weights_are_copied(corpus: Corpus, tmp_path: Path) -> None:
    source = corpus(V3)
    model = load(source)
    fuse(model, validate="none")
    fused = tmp_path / "fused.onnx"
    save(model, fused, source=source)
    assert {Path(t.location).name for t in external(load(fused)).values()} == {"fused.onnx.data"}
    weights = source.with_suffix(".weights").stat().st_size
    assert fused.with_name("fused.onnx.data").stat().st_size < 1.05 * weights
