"""Each comparator can fail: the oracle's own results, made wrong in one way, must be found wrong."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.cases import ALL_CASES, case_called
from tests.cases.case import Case
from tests.oracles import Array, Expected

from .compare import MIXED_TOLERANCE, Tolerance, compare, compare_all, compare_within

FLOATS = list(MIXED_TOLERANCE)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_the_oracle_agrees_with_itself(case: Case) -> None:
    assert compare_all({n: e.rounded() for n, e in case.expected.items()}, case.expected) == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_beyond_its_tolerance(dtype: np.dtype[np.generic]) -> None:
    value = np.linspace(0.5, 1.0, 1000)
    expected = Expected.maths(value, dtype)
    mixed = MIXED_TOLERANCE[dtype]
    step = mixed.atol + mixed.rtol
    few, many = value.copy(), value.copy()
    few[:9] += 2 * step
    many[:11] += 2 * step
    assert (compare("y", few.astype(dtype), expected) == []) is (mixed.fraction < 1)
    assert compare("y", many.astype(dtype), expected) != []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("wrong", [0.0, 3.0, np.nan, np.inf])
def test_one_wrong_float_of_many(dtype: np.dtype[np.generic], wrong: float) -> None:
    value = np.full(100_000, 0.75)
    expected = Expected.maths(value, dtype)
    actual = expected.rounded()
    actual[5] = wrong
    assert compare("y", actual, expected) != []


def test_nan_is_expected_only_where_it_is() -> None:
    expected = Expected.maths(np.array([1.0, np.nan, np.inf, -np.inf]), np.float32)
    actual = expected.rounded()
    assert compare("y", actual, expected) == []
    for place, wrong in ((1, 0.0), (2, -np.inf), (3, np.nan)):
        changed = actual.copy()
        changed[place] = wrong
        assert compare("y", changed, expected) != []


def test_int8_within_one_in_a_thousandth() -> None:
    expected = Expected.maths(np.zeros(3000, np.int8), np.int8)
    for changed, delta, agrees in ((3, 1, True), (4, 1, False), (1, 2, False)):
        actual = np.zeros(3000, np.int8)
        actual[:changed] = delta
        assert (compare("y", actual, expected) == []) is agrees


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8, np.float32, ml_dtypes.bfloat16])
def test_exact_elements_are_exact(dtype: type[np.generic]) -> None:
    value = np.arange(1, 50).astype(dtype)
    expected = Expected.exact(value)
    swapped = value.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert compare("y", value.copy(), expected) == []
    assert compare("y", swapped, expected) != []
    assert compare("y", np.roll(value, 1), expected) != []


def test_exact_floats_are_equal_bit_for_bit() -> None:
    value = np.array([0.0, 1.0], np.float32)
    assert compare("y", np.array([-0.0, 1.0], np.float32), Expected.exact(value)) != []
    assert compare("y", np.nextafter(value, np.float32(2)), Expected.exact(value)) != []


def test_type_shape_and_presence() -> None:
    expected = Expected.exact(np.zeros((2, 3), np.int32))
    assert compare("y", np.zeros((2, 3), np.int64), expected) != []
    assert compare("y", np.zeros((3, 2), np.int32), expected) != []
    assert compare("y", np.zeros((2, 3, 1), np.int32), expected) != []
    assert compare_all({}, {"y": expected}) != []


def with_first_element(value: float) -> Callable[[Array], Array]:
    def mutate(array: Array) -> Array:
        changed = array.copy()
        changed.reshape(-1)[0] = value
        return changed

    return mutate


ROUTING = "MoeInitRoutingV3-float32_scatter_range_scale"
ATTENTION = "SparseFlashAttention-bfloat16_bsnd_bsnd_mode3"
PROLOG = "MlaPrologV2WeightNz-bfloat16_pa_nz_bsh_nd"
PREPROCESS = "MlaPreprocess-int8_mode2_bfloat16"
JOINED_CACHE = "MlaPreprocess-int8_mode0_some_skipped"
RING = "RingAttentionUpdateV2-float32_tnd_default"
SKIPPED = "MlaPrologV2WeightNz-pa_bsnd_other_negatives"
MUTATIONS: list[tuple[str, str, Callable[[Array], Array]]] = [
    (ROUTING, "expanded_row_idx", lambda a: np.concatenate([a[1::-1], a[2:]])),
    (ROUTING, "expanded_row_idx", lambda a: np.where(a == -1, 0, a).astype(a.dtype)),
    (ROUTING, "expanded_x", lambda a: np.roll(a, 1, axis=0)),
    (ROUTING, "expanded_scale", lambda a: a * np.float32(1.0001)),
    (ROUTING, "expert_tokens_count_or_cumsum", lambda a: np.cumsum(a)),
    (ATTENTION, "attention_out", lambda a: a[:, :, ::-1]),
    (ATTENTION, "attention_out", lambda a: a[::-1]),
    (ATTENTION, "softmax_max", lambda a: a / np.float32(0.25)),
    (ATTENTION, "softmax_sum", lambda a: np.log(np.maximum(a, 1e-9))),
    (SKIPPED, "kv_cache_out", with_first_element(0.5)),
    (SKIPPED, "kr_cache_out", lambda a: a[::-1]),
    (SKIPPED, "kv_cache_out", np.zeros_like),
    (PREPROCESS, "q_out", lambda a: a[:, ::-1]),
    (PREPROCESS, "q_out", lambda a: a + (a == 17)),
    (PREPROCESS, "kv_cache_out", lambda a: a.swapaxes(1, 2).reshape(a.shape)),
    (PREPROCESS, "kv_cache_out", np.zeros_like),
    (PREPROCESS, "kr_cache_out", lambda a: a[:, :, ::-1]),
    (JOINED_CACHE, "q_out", lambda a: np.roll(a, 16, axis=-1)),
    (JOINED_CACHE, "kv_cache_out", with_first_element(0.5)),
    (RING, "attn_out", lambda a: a[:, ::-1]),
    (RING, "attn_out", lambda a: a * np.float32(1.01)),
    (RING, "softmax_max", lambda a: np.nextafter(a, np.float32(100))),
    (RING, "softmax_sum", lambda a: a.swapaxes(0, 1).reshape(a.shape)),
    (PROLOG, "query_rope", lambda a: np.concatenate([a[..., 8:], a[..., :8]], axis=-1)),
    (PROLOG, "query", lambda a: a[:, :, ::-1]),
    (PROLOG, "kv_cache_out", lambda a: a.reshape(3, 2, 4, 16).swapaxes(1, 2).reshape(a.shape)),
]


@pytest.mark.parametrize(("name", "output", "mutate"), MUTATIONS)
def test_a_mutation_is_found(name: str, output: str, mutate: Callable[[Array], Array]) -> None:
    expected = case_called(name).expected
    actual = {n: e.rounded() for n, e in expected.items()}
    actual[output] = np.ascontiguousarray(mutate(actual[output]))
    found = compare_all(actual, expected)
    assert found
    assert all(sentence.startswith(output) for sentence in found)


def test_vector_tolerance() -> None:
    expected = np.array([1.0, 100.0, 0.0], np.float32)
    tolerance = Tolerance(rtol=0.01, atol=0.1)
    assert compare_within("y", np.array([1.1, 101.0, -0.09], np.float32), expected, tolerance) == []
    assert compare_within("y", np.array([1.12, 100.0, 0.0], np.float32), expected, tolerance) != []
    assert compare_within("y", np.array([1.0, 102.0, 0.0], np.float32), expected, tolerance) != []
    mask = np.array([False, True, True])
    assert compare_within("y", np.array([9.0, 100.0, 0.0], np.float32), expected, tolerance, mask=mask) == []
    assert compare_within("y", np.array([9.0, 100.0, 1.0], np.float32), expected, tolerance, mask=mask) != []
    assert compare_within("y", expected[:2], expected, tolerance) != []


def test_vector_fraction_counts_written_elements_only() -> None:
    expected, actual = np.zeros(1000, np.int8), np.zeros(1000, np.int8)
    tolerance = Tolerance(rtol=0.0, atol=1.0, max_fraction=0.02)
    written = np.arange(1000) < 100
    actual[:2] = 1
    assert compare_within("y", actual, expected, tolerance, counted=written) == []
    actual[2] = 1
    assert compare_within("y", actual, expected, tolerance, counted=written) != []
    assert compare_within("y", actual, expected, tolerance) == []
