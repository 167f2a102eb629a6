"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import corpus_model


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`corpus(name)` is the path of that graph of `models/`, its seeded weights beside it.

    All worker processes of a session share one folder, so each weight file is made once. Treat it as read-only.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "corpus"
    return lambda name: corpus_model(name, folder)
