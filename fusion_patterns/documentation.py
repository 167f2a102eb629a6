"""`docs/misses.md`: every reason that a candidate can have not to fuse, and what a user can do about it.

`python -m fusion_patterns.documentation docs/misses.md` writes the page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fusion_patterns.miss import CODES

__all__ = ["ADVICE", "EVERY_FUSION", "Advice", "misses_markdown"]


@dataclass(frozen=True)
class Advice:
    """Which fusions give a code (their names in a report), and what the user can do."""

    fusions: tuple[str, ...]
    remedy: str


EVERY_FUSION = ("every fusion",)
_ATTENTION = ("mla_prolog",)
_PROJECTIONS = ("mla_prolog", "mla_projection")
_ALL_PROJECTIONS = (*_PROJECTIONS, "mla_preprocess")
_PREPROCESS = ("mla_preprocess",)
_SPARSE = ("sparse_flash_attention",)
_MOE = ("moe_init_routing",)
_RING = ("ring_attention",)

_ANOTHER_NETWORK = "Nothing, if the network is built that way: no operator computes it."
_SPELLING = (
    "If the layer is a plain one, its spelling is not known yet: `explain` shows at which value recognition ended."
)
_ROUTER_BESIDE = "Export the router together with the experts, so that its width is in the graph."

ADVICE: dict[str, Advice] = {
    "attention-unrecognised": Advice(
        _ATTENTION, "Export attention as scaled dot product with one added mask, without softcap or dropout."
    ),
    "keys-not-latent": Advice(_ATTENTION, _ANOTHER_NETWORK),
    "expanded-cache": Advice(
        _ATTENTION, "Export with a cache of latents, as transformers 5 does; 4.57 caches keys and values per head."
    ),
    "value-not-latent": Advice(_ATTENTION, _SPELLING),
    "query-unrecognised": Advice(_PROJECTIONS, _SPELLING),
    "no-query-low-rank": Advice(
        _ALL_PROJECTIONS, "Nothing for models without a query low rank (q_lora_rank is None): no operator computes it."
    ),
    "latent-unrecognised": Advice(_ALL_PROJECTIONS, _SPELLING),
    "key-rope-unrecognised": Advice(_PROJECTIONS, _SPELLING),
    "rope-unrecognised": Advice(_ALL_PROJECTIONS, _SPELLING),
    "rope-differs": Advice(
        _ALL_PROJECTIONS, "Rotate query and key by the same cos and sin, into one order of features."
    ),
    "cache-mismatch": Advice(
        _ATTENTION, "Cache the latent and the rotated key alike: both as past and new, or neither."
    ),
    "hidden-differs": Advice(_PROJECTIONS, "Give both down projections the same normed hidden state."),
    "split-sizes": Advice(
        _ALL_PROJECTIONS, "Nothing for another latent, rope or head size: the operators are made for 512, 64 and 128."
    ),
    "head-count": Advice(_PROJECTIONS, "Nothing: query heads that share keys are not multi-head latent attention."),
    "quantisation-unsupported": Advice(
        _ALL_PROJECTIONS,
        "Quantise weights by column, rows by one constant scale or token by token, and leave results in real numbers.",
    ),
    "quantisation-differs": Advice(
        _ALL_PROJECTIONS, "Calibrate both down projections with one scale and zero point: they read the same rows."
    ),
    "query-not-absorbed": Advice(
        _PREPROCESS, "Export the absorbed form, the query times W_UK, or quantise after fusing."
    ),
    "cache-unrecognised": Advice(
        _PREPROCESS, "Write new rows by ScatterND or ScatterElements, one slot for each token."
    ),
    "slots-differ": Advice(_PREPROCESS, "Write latents and rotated keys by the same slot mapping."),
    "epsilon": Advice(_PREPROCESS, "Nothing: the device adds 1e-6 whatever the attribute says."),
    "bias": Advice(_ALL_PROJECTIONS, "Nothing for a network trained with that bias; drop it where it is zero."),
    "dtype": Advice(
        (*_ALL_PROJECTIONS, *_MOE, *_RING), "Convert the model to float32, float16 or bfloat16 before fusing."
    ),
    "mask-unrecognised": Advice(_ATTENTION, "Give the mask at most four axes, (B, N, S, T) or what broadcasts to it."),
    "selection-not-causal": Advice(
        _SPARSE, "If the mask you feed is causal, say so: `--assume causal-mask`. Else export the mask with the model."
    ),
    "selection-unrecognised": Advice(
        ("selected_attention",), "Gather keys, or mask scores, by one list of positions for each token and all heads."
    ),
    "selection-unsorted": Advice(
        _SPARSE, "Select by a sorted TopK of the largest scores, hidden ones masked before, or compact the list by -1."
    ),
    "experts-missing": Advice(
        _MOE, "Export again: tracing kept only the experts that the example input hit. Use a grouped or batched form."
    ),
    "expert-count-unknown": Advice(_MOE, f"{_ROUTER_BESIDE} Counting the tokens of each expert says it too."),
    "permutation-unrecognised": Advice(_MOE, _SPELLING),
    "permutation-absent": Advice(_MOE, "Export the sort of the expert ids in the same graph."),
    "experts-unrecognised": Advice(_MOE, _SPELLING),
    "combine-unrecognised": Advice(_MOE, _SPELLING),
    "merge-weights": Advice(_RING, _SPELLING),
    "merge-maximum": Advice(_RING, "Relate both sums to the larger maximum: exp(max - Max(max, other max))."),
    "merge-layout": Advice(_RING, "Keep one maximum and one sum (or equal lanes of them) per row and head."),
    "function-body": Advice(EVERY_FUSION, "Inline the functions: `onnx.inliner.inline_local_functions(model)`."),
    "target": Advice(
        EVERY_FUSION, "Fuse without `--target`, or change what the message names; `check` lists all limits."
    ),
    "validation-failed": Advice(
        EVERY_FUSION, "Please report it with the graph: the fusion was wrong here, and the model was left as it was."
    ),
    "validation-error": Advice(
        EVERY_FUSION, "See the runtime's own words in the message; `--validate none` fuses without running anything."
    ),
    "assumption-off": Advice(EVERY_FUSION, "Switch the assumption on with `--assume NAME` if your inputs keep it."),
    "not-requested": Advice(_SPARSE, "Leave out `--only`: this operator reads what the other one of the pair yields."),
    "overlap": Advice(EVERY_FUSION, "Nothing: the other fusion that replaces these nodes was found first."),
}
"""For every code: who gives it and what to do."""

_HEAD = """# Why a candidate did not fuse

A candidate is a place where a fusion starts to look: a softmax, a sort of expert ids, a sum of two weighted attentions.
One that does not fuse is listed by `ascend-onnx find` and in the report of `fuse`, with a code from this page, what was
expected, what was found, and at which node. `ascend-onnx explain MODEL --node ANCHOR` shows every step before that.

| Code | Meaning | Given by | What you can do |
| --- | --- | --- | --- |
"""


def misses_markdown() -> str:
    """The page: a row for every code of `CODES`."""
    return _HEAD + "".join(
        f"| `{code}` | {meaning} | {', '.join(ADVICE[code].fusions)} | {ADVICE[code].remedy} |\n"
        for code, meaning in CODES.items()
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(misses_markdown(), encoding="utf-8")
