"""Every verdict of the comparison, and that each of them can be negative."""

import json

import ml_dtypes
import numpy as np
import pytest

from ascend_onnx.compare import compare, compare_outputs

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]


def normal(shape=(4, 100), dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, np.float64, np.int8, np.int32, np.int64, np.bool_])
def test_an_output_equals_itself(dtype):
    array = (normal() * 5).astype(dtype)
    result = compare("y", array, array.copy())
    assert result.within
    assert (result.max_abs, result.max_rel, result.mere, result.mare) == (0, 0, 0, 0)
    assert result.reason == ""


def test_float32_is_held_to_the_largest_magnitude():
    expected = np.array([100.0, 1e-3], np.float32)
    assert compare("y", expected, expected + np.float32(0.009)).within
    result = compare("y", expected, expected + np.array([0, 0.011], np.float32))
    assert not result.within
    assert "[1]" in result.reason
    assert result.max_rel == pytest.approx(1.1e-4, rel=1e-3)
    assert result.mare == pytest.approx(11, rel=1e-2)


def test_rtol_overrides_for_all_floats():
    for dtype in FLOATS:
        expected = np.ones(1000, dtype)
        actual = expected.copy()
        actual[0] = 1.25
        assert compare("y", expected, actual, rtol=0.3).within
        assert not compare("y", expected, actual, rtol=0.1).within


@pytest.mark.parametrize(("dtype", "unit", "ceiling"), [(np.float16, 2**-9, 0.1), (ml_dtypes.bfloat16, 2**-6, 1.0)])
def test_half_precision_is_held_to_the_mixed_tolerance(dtype, unit, ceiling):
    expected = np.ones(1000, dtype)
    actual = expected.copy()
    actual[:10] = 1 + 4 * unit
    assert compare("y", expected, actual).within
    assert compare("y", expected, actual).mixed
    actual[:11] = 1 + 4 * unit
    result = compare("y", expected, actual)
    assert not result.within
    assert not result.mixed
    assert "98.90%" in result.reason
    one = expected.copy()
    one[3] = 1 + 1.5 * ceiling
    assert "largest error" in compare("y", expected, one).reason


def test_the_mixed_verdict_is_given_for_float32_too():
    expected = np.ones(1000, np.float32)
    assert compare("y", expected, expected * np.float32(1.0005)).mixed
    assert not compare("y", expected, expected * np.float32(1.01)).mixed


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_])
def test_integers_are_exact(dtype):
    expected = np.zeros(10_000, dtype)
    actual = expected.copy()
    actual[7] = 1
    result = compare("y", expected, actual)
    assert not result.within
    assert result.rule == "exact"
    assert "[7]" in result.reason


def test_int8_may_be_off_by_one_in_a_thousandth():
    expected = np.zeros(2000, np.int8)
    actual = expected.copy()
    actual[:2] = [1, -1]
    assert compare("y", expected, actual).within
    actual[2] = 1
    assert not compare("y", expected, actual).within
    far = expected.copy()
    far[0] = 2
    assert "more than one" in compare("y", expected, far).reason


def test_int8_distance_does_not_wrap():
    assert not compare("y", np.full(1, -128, np.int8), np.full(1, 127, np.int8)).within


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_may_land_on_the_neighbouring_value(dtype):
    expected = np.ones(1000, dtype)
    one, two = expected.copy(), expected.copy()
    one.view(np.uint8)[0] += 1
    two.view(np.uint8)[0] += 2
    assert compare("y", expected, one).within
    assert not compare("y", expected, two).within
    assert compare("y", np.zeros(1, dtype), -np.zeros(1, dtype)).within


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_must_be_at_the_same_places(dtype, special):
    expected = normal(dtype=dtype)
    expected[1, 2] = special
    assert compare("y", expected, expected.copy()).within
    finite = expected.copy()
    finite[1, 2] = 0
    assert not compare("y", expected, finite).within
    assert not compare("y", finite, expected).within
    assert "[1, 2]" in compare("y", finite, expected).reason


def test_infinities_of_other_sign_differ():
    assert not compare("y", np.array([np.inf], np.float32), np.array([-np.inf], np.float32)).within
    assert not compare("y", np.array([np.inf], np.float32), np.array([np.nan], np.float32)).within


def test_a_large_error_beside_an_infinity_is_seen():
    expected = np.array([np.inf, 1], np.float32)
    assert not compare("y", expected, np.array([np.inf, 2], np.float32)).within


def test_all_zero_outputs():
    zeros = np.zeros(3, np.float32)
    assert compare("y", zeros, zeros).within
    assert not compare("y", zeros, zeros + 1).within


def test_empty_outputs():
    assert compare("y", np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).within
    assert not compare("y", np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)).within


def test_scalars():
    assert compare("y", np.float32(1), np.float32(1)).within
    assert not compare("y", np.float32(1), np.float32(2)).within


def test_shapes_and_types_must_agree():
    wrong_shape = compare("y", np.zeros((2, 3)), np.zeros((3, 2)))
    assert not wrong_shape.within
    assert wrong_shape.reason == "shape (3, 2), expected (2, 3)"
    wrong_type = compare("y", np.zeros(2, np.int64), np.zeros(2, np.int32))
    assert not wrong_type.within
    assert wrong_type.reason == "type int32, expected int64"


def test_texts_are_exact():
    assert compare("y", np.array(["a"], object), np.array(["a"], object)).within
    assert not compare("y", np.array(["a"], object), np.array(["b"], object)).within


def test_a_missing_output_is_not_within():
    first, second = compare_outputs({"a": normal(), "b": normal()}, {"a": normal()})
    assert first.within
    assert not second.within
    assert "'b'" in second.reason


def test_json():
    written = json.loads(json.dumps(compare("y", normal(), normal()).to_json()))
    assert written["within"] is True
    assert written["shape"] == [4, 100]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_but_nan_proves_nothing(dtype):
    nothing = np.full((2, 3), np.nan, dtype)
    assert compare("y", nothing, nothing).reason.startswith("every expected value is NaN")
    assert compare("y", nothing[:0], nothing[:0]).within
