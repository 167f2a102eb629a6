"""Why a candidate did not fuse."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["CODES", "Miss", "miss"]

CODES: dict[str, str] = {
    "attention-unrecognised": "The values around a softmax do not form softmax(q k^T scale + mask) v.",
    "keys-not-latent": "Keys and values are not expanded from one latent: this is no multi-head latent attention.",
    "expanded-cache": "The cache holds keys and values per head: attending in the latent space would gain nothing.",
    "value-not-latent": "The values are not cut from the same latent expansion as the keys.",
    "query-unrecognised": "The query is not a per-head concatenation of an unrotated and a rotated part.",
    "no-query-low-rank": "The query projection has no low-rank pair (down, norm, up), which the operator computes.",
    "latent-unrecognised": "The latent is not the normed first part of one down projection, alone or behind a cache.",
    "key-rope-unrecognised": "The rotated key is not the rotary embedding of the last part of the down projection.",
    "rope-unrecognised": "A rotary embedding was expected and its arithmetic was not found.",
    "rope-differs": "Query and key are rotated by different angles.",
    "cache-mismatch": "Latent and rotated key are not cached alike.",
    "hidden-differs": "Query and key/value projections read different hidden states.",
    "split-sizes": "Latent, rope, or head sizes are not those the operator computes with.",
    "head-count": "Query and key/value expansions disagree about the number of heads.",
    "quantisation-unsupported": "Activations or weights are quantised in a way that no operator computes.",
    "quantisation-differs": "The down projections of query and key read rows quantised by different scales.",
    "query-not-absorbed": "The query is not multiplied by W_UK, so attention does not run in the latent space.",
    "cache-unrecognised": "New rows are not written into a cache at one slot for each token.",
    "slots-differ": "Latents and rotated keys are not written to the same slots.",
    "epsilon": "A norm adds another epsilon than the operator, which knows one only.",
    "bias": "A projection adds a bias, for which the operator has no input.",
    "dtype": "The element type is not one the operator takes.",
    "mask-unrecognised": "The mask's shape is not that of attention scores.",
    "selection-not-causal": "The mask that goes with a selection could not be proved causal from the graph.",
    "selection-unrecognised": "Keys are selected per token, but not as the operator's lists can say.",
    "selection-unsorted": "The selected positions do not come from a sorted top-k over causally masked scores.",
    "experts-missing": "The graph has fewer experts than its router knows: the export lost some.",
    "expert-count-unknown": "Nothing in the graph says how many experts there are.",
    "permutation-unrecognised": "The sorted expert ids are not used to gather rows of one hidden state.",
    "permutation-absent": "Expert results are put back in token order, but nothing in the graph sorted the tokens.",
    "experts-unrecognised": "The rows after routing do not run through one product per expert on consecutive slices.",
    "combine-unrecognised": "The expert results are not weighted and put back in token order as routing implies.",
    "merge-weights": "Two attentions are weighted by exponentials, but not by their shares of a common softmax sum.",
    "merge-maximum": "Softmax sums are merged, but not relative to the larger of both maxima.",
    "merge-layout": "The softmax statistics are not one per row of the attention, features being its last axis.",
    "function-body": "Model-local functions are not searched; inline them first (onnx.inliner.inline_local_functions).",
    "target": "The fused node would not launch on the requested product.",
    "validation-failed": "The replacement did not compute what the original subgraph computes.",
    "validation-error": "Original subgraph or replacement could not be run to compare them.",
    "assumption-off": "The match stands on a fact that the graph does not prove and that was not to be assumed.",
    "not-requested": "Another operator was asked for (--only).",
    "overlap": "A node of this candidate already belongs to another fusion.",
}
"""Every code a Miss can carry, with what it means."""


@dataclass(frozen=True)
class Miss:
    """A reason: `code` from `CODES`, the node where it was seen, what was expected there and what was found."""

    code: str
    message: str
    node: str
    expected: str
    got: str


def miss(code: str, where: ir.Value | ir.Node | None, expected: str, got: str) -> Miss:
    """A Miss at the node `where`, or at the producer of the value `where`."""
    node = where.producer() if isinstance(where, ir.Value) else where
    if node is not None:
        name = node.name or next((o.name for o in node.outputs if o.name), "")
    else:
        name = where.name if isinstance(where, ir.Value) and where.name else ""
    return Miss(code, f"{CODES[code]} Expected {expected}, found {got}.", name or "", expected, got)
