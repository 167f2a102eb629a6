"""Threads that share a session, and sessions that share a device, give what one alone gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.oracles import Array

from .provider import is_built, npu_session, provider, ring_chain, ring_feeds

pytestmark = pytest.mark.skipif(not is_built(), reason="the provider is not built")

THREADS, RUNS = 8, 40


def assert_same(results: list[list[Array]], expected: list[list[Array]]) -> None:
    for got, wanted in zip(results, expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sessions", [1, 2])
def test_eight_threads(sessions: int) -> None:
    model = ring_chain(6, between="Neg")
    feeds = [ring_feeds(seed) for seed in range(RUNS)]
    with provider(DELAY_US="50"):
        shared = [npu_session(model, require_npu=True) for _ in range(sessions)]
        expected = [shared[0].run(None, feed) for feed in feeds]
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(lambda i: shared[i % sessions].run(None, feeds[i]), range(RUNS)))
        again = [shared[-1].run(None, feed) for feed in feeds[:4]]
        shared.clear()
    assert_same(results, expected)
    assert_same(again, expected[:4])


def test_two_sessions_one_behind_the_other_leave_nothing() -> None:
    feeds = ring_feeds()
    with provider() as emulator:
        for _ in range(3):
            session = npu_session(ring_chain(3), require_npu=True)
            session.run(None, feeds)
            del session
        assert emulator.ledger() == {}
