"""Finding subgraphs that operators of `ai.ascend` compute, and replacing them, provably equal."""

from __future__ import annotations

from fusion_patterns.explain import Explanation, explain
from fusion_patterns.fuse import FUSIONS, find, fuse
from fusion_patterns.report import Fused, KvCache, Missed, Report

__all__ = ["FUSIONS", "Explanation", "Fused", "KvCache", "Missed", "Report", "explain", "find", "fuse"]
