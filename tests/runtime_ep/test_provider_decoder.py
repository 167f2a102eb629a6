"""A small decoder, decoding with its caches in place on the device: the same tokens as on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest

import ascend_onnx
from models import small_decoder
from tests.oracles import Array

from .provider import is_built, provider

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")

STEPS = 32
FIRST_TOKEN = 1
OPERATORS = ["MlaPrologV2WeightNz", "SparseFlashAttention", "MoeInitRoutingV3"]


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    logits: Array
    caches: dict[str, Array]


def decode(session: ascend_onnx.Session) -> Decoded:
    """32 tokens, each the best one after the last, with every cache fed and written in one place."""
    caches = {name: session.to_device(cache) for name, cache in small_decoder.empty_caches().items()}
    into = {f"{name}_out": cache for name, cache in caches.items()}
    token = np.array([FIRST_TOKEN])
    tokens, logits = [], []
    for position in range(STEPS):
        feeds = {"token": token, "position": np.array([position]), **caches}
        token, scores = session.run(["next_token", "logits"], feeds, into=into)
        tokens.append(int(token[0]))
        logits.append(scores[0])
    return Decoded(tokens, np.array(logits), {name: session.to_host(cache) for name, cache in caches.items()})


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return small_decoder.build()


@pytest.fixture(scope="module")
def on_cpu(model: onnx.ModelProto) -> Decoded:
    return decode(ascend_onnx.create_session(model, device="cpu"))


def test_the_tokens_are_those_of_the_cpu(model: onnx.ModelProto, on_cpu: Decoded) -> None:
    with provider() as emulator:
        session = ascend_onnx.create_session(model, device="npu", require_npu=True)
        placed = [entry.operator for entry in session.placement() if entry.device == "npu"]
        emulator.reset_faults()
        on_npu = decode(session)
        launched = emulator.calls("aclnnMlaPrologV2WeightNz")
        del session
    assert sorted(placed) == sorted(OPERATORS * small_decoder.LAYERS)
    assert launched == STEPS * small_decoder.LAYERS
    assert on_npu.tokens == on_cpu.tokens
    two_best = np.sort(on_cpu.logits, axis=1)[:, -2:]
    gap = two_best[:, 1] - two_best[:, 0]
    difference = np.abs(on_npu.logits - on_cpu.logits).max(axis=1)
    assert (gap > 4 * difference).all()
    for name, cache in on_cpu.caches.items():
        written = cache.reshape(-1, cache.shape[-1])[:STEPS].astype(np.float32)
        actual = on_npu.caches[name].reshape(-1, cache.shape[-1])[:STEPS].astype(np.float32)
        assert np.abs(written).max() > 0
        np.testing.assert_allclose(actual, written, rtol=2**-5, atol=2**-4)


def test_the_tokens_depend_on_what_the_caches_hold(model: onnx.ModelProto, on_cpu: Decoded) -> None:
    """Without the caches of the steps before, other tokens come out: the comparison above can fail."""
    session = ascend_onnx.create_session(model, device="cpu")
    tokens = [FIRST_TOKEN]
    for position in range(STEPS):
        feeds = {"token": np.array(tokens[-1:]), "position": np.array([position]), **small_decoder.empty_caches()}
        (token,) = session.run(["next_token"], feeds)
        tokens.append(int(token[0]))
    assert tokens[1:] != on_cpu.tokens
