"""Cases of SparseFlashAttention.

Head sizes are small and free, except in the cases called `real_*`. `value` equals `key` in every case, because the
device reads one or the other depending on the block size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles import Array

from .case import BFLOAT16, FLOAT16, FLOAT32, FLOAT_TYPES, Case, normal

__all__ = ["CASES"]

OPERATOR = "SparseFlashAttention"
LAYOUTS = (("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND"))
Inputs = dict[str, Array]
Lists = Callable[[np.random.Generator, int, int], list[int]]
"""(generator, number of blocks with a visible key, K) -> the entries of one list, padded by the caller with -1."""


def packed(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    """Distinct visible blocks in random order, sometimes fewer than there is room for."""
    return [int(e) for e in rng.permutation(blocks)[: int(rng.integers(1, size + 1))]]


def full(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    """As many distinct visible blocks as fit."""
    return [int(e) for e in rng.permutation(blocks)[:size]]


def future(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    """Distinct visible blocks, then blocks that lie past the limit: the order of a top-k over masked scores."""
    return [*full(rng, blocks, size), *range(blocks, blocks + size)][:size]


def only_future(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    return list(range(blocks, blocks + size))


def nothing(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    return []


def ended_early(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    """-1 in the second place ends the list, whatever follows it."""
    entries = full(rng, blocks, size)
    return [*entries[:1], -1, *entries[1:]][:size]


def ended_at_once(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    return [-1, *full(rng, blocks, size)][:size]


def repeated(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    """The same block twice: its tokens count twice."""
    entries = full(rng, blocks, size)
    return [*entries[:1], *entries][:size]


def first_two(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    return full(rng, min(blocks, 2), size)


def not_the_first(rng: np.random.Generator, blocks: int, size: int) -> list[int]:
    return [1 + entry for entry in full(rng, blocks - 1, size)]


@dataclass(frozen=True)
class Attention:
    """The sizes and layouts of one call.

    `query_lengths` and `kv_lengths` are the actual lengths per batch entry; `query_size` and `kv_size` the padded sizes
    of BSND, the longest length when None. `lists` fills the selection of every query token.
    """

    query_lengths: tuple[int, ...] = (3, 2)
    kv_lengths: tuple[int, ...] = (11, 7)
    query_size: int | None = None
    kv_size: int | None = None
    heads: int = 4
    kv_heads: int = 1
    width: int = 16
    rope: int | None = 8
    selected: int = 4
    block: int = 1
    page: int = 16
    spare_pages: int = 1
    layout_query: str = "BSND"
    layout_kv: str = "BSND"
    mode: int = 3
    dtype: np.dtype[Any] = FLOAT32
    lists: Lists = packed
    scores: float = 1.0

    @property
    def padded_query(self) -> int:
        return max(self.query_lengths) if self.query_size is None else self.query_size

    @property
    def padded_kv(self) -> int:
        return max(self.kv_lengths) if self.kv_size is None else self.kv_size


def build(attention: Attention, rng: np.random.Generator) -> Inputs:
    """Inputs of one call; every padded row, unused page and key is filled with finite values of its own."""
    batch = len(attention.query_lengths)
    query_rows = rows_of(attention.layout_query, attention.query_lengths, attention.padded_query)
    inputs: Inputs = {"query": normal(rng, (*query_rows, attention.heads, attention.width), attention.dtype)}
    table = None
    if attention.layout_kv == "PA_BSND":
        columns = -(-attention.padded_kv // attention.page)
        pages = rng.permutation(batch * columns + attention.spare_pages)
        table = pages[: batch * columns].reshape(batch, columns).astype(np.int32)
        kv_rows: tuple[int, ...] = (batch * columns + attention.spare_pages, attention.page)
    else:
        kv_rows = rows_of(attention.layout_kv, attention.kv_lengths, attention.padded_kv)
    inputs["key"] = normal(rng, (*kv_rows, attention.kv_heads, attention.width), attention.dtype, attention.scores)
    inputs["value"] = inputs["key"].copy()
    inputs["sparse_indices"] = selection(attention, rng)
    if table is not None:
        inputs["block_table"] = table
    inputs["actual_seq_lengths_query"] = lengths_of(attention.layout_query, attention.query_lengths)
    inputs["actual_seq_lengths_kv"] = lengths_of(attention.layout_kv, attention.kv_lengths)
    if attention.rope is not None:
        inputs["query_rope"] = normal(rng, (*query_rows, attention.heads, attention.rope), attention.dtype)
        inputs["key_rope"] = normal(rng, (*kv_rows, attention.kv_heads, attention.rope), attention.dtype)
    return inputs


def rows_of(layout: str, lengths: tuple[int, ...], padded: int) -> tuple[int, ...]:
    return (sum(lengths),) if layout == "TND" else (len(lengths), padded)


def lengths_of(layout: str, lengths: tuple[int, ...]) -> NDArray[np.int32]:
    """Prefix sums without a leading 0 in TND, lengths otherwise."""
    return np.array(np.cumsum(lengths) if layout == "TND" else lengths, np.int32)


def selection(attention: Attention, rng: np.random.Generator) -> NDArray[np.int32]:
    """`sparse_indices`: a list for every query token, padded rows of BSND included (they must not be read)."""
    rows = []
    padded = attention.padded_query if attention.layout_query == "BSND" else 0
    for length, kv_length in zip(attention.query_lengths, attention.kv_lengths, strict=True):
        for token in range(max(length, padded)):
            limit = kv_length if attention.mode == 0 else kv_length - length + token + 1
            blocks = -(-max(limit, 0) // attention.block)
            for _ in range(attention.kv_heads):
                entries = attention.lists(rng, blocks, attention.selected)[: attention.selected]
                rows.append(entries + [-1] * (attention.selected - len(entries)))
    leading = rows_of(attention.layout_query, attention.query_lengths, attention.padded_query)
    return np.array(rows, np.int32).reshape(*leading, attention.kv_heads, attention.selected)


def case(
    name: str,
    attention: Attention,
    *,
    edit: Callable[[Inputs], None] | None = None,
    absent: tuple[str, ...] = (),
    statistics: bool = True,
    outputs: tuple[str, ...] = (),
    scale: float = 0.25,
) -> Case:
    """A case; `edit` changes the inputs that `build` made, `absent` leaves some out."""

    def make(rng: np.random.Generator) -> Mapping[str, Array]:
        inputs = build(attention, rng)
        if edit is not None:
            edit(inputs)
        return {input_name: array for input_name, array in inputs.items() if input_name not in absent}

    attributes = {
        "scale_value": scale,
        "sparse_block_size": attention.block,
        "layout_query": attention.layout_query,
        "layout_kv": attention.layout_kv,
        "sparse_mode": attention.mode,
        "return_softmax_lse": int(statistics),
    }
    return Case(name, OPERATOR, make, attributes, outputs)


def keys_after_two_are_nan(inputs: Inputs) -> None:
    """Keys that no list names may hold anything."""
    for name in ("key", "value", "key_rope"):
        inputs[name][:, 2:] = np.nan


def first_key_is_infinite(inputs: Inputs) -> None:
    """No list names token 0: the padding of a list must not read it as a stand-in."""
    for name in ("key", "value", "key_rope"):
        inputs[name][:, 0] = np.inf


def unused_pages_are_nan(inputs: Inputs) -> None:
    """Pages outside the block table, and the rows of the last page past the length, were never written."""
    used = np.zeros(inputs["key"].shape[:2], np.bool_)
    page = inputs["key"].shape[1]
    for row, length in zip(inputs["block_table"], inputs["actual_seq_lengths_kv"], strict=True):
        for token in range(length):
            used[row[token // page], token % page] = True
    for name in ("key", "value", "key_rope"):
        inputs[name][~used] = np.nan


def unused_table_entries(inputs: Inputs) -> None:
    """Table columns behind the last page of a short sequence are -1, as serving frameworks leave them."""
    page = inputs["key"].shape[1]
    for row, length in zip(inputs["block_table"], inputs["actual_seq_lengths_kv"], strict=True):
        row[-(-length // page) :] = -1


def shared_page(inputs: Inputs) -> None:
    """Both sequences begin with the same page, a common prefix."""
    inputs["block_table"][1, 0] = inputs["block_table"][0, 0]


def one_length_for_all(name: str) -> Callable[[Inputs], None]:
    def edit(inputs: Inputs) -> None:
        inputs[name] = inputs[name][:1]

    return edit


def padded_queries_are_nan(inputs: Inputs) -> None:
    for batch, length in enumerate(inputs["actual_seq_lengths_query"]):
        inputs["query"][batch, length:] = np.nan
        inputs["query_rope"][batch, length:] = np.nan


def layouts() -> list[Case]:
    found = []
    for type_name, dtype in FLOAT_TYPES.items():
        for layout_query, layout_kv in LAYOUTS:
            for mode in (0, 3):
                attention = Attention(layout_query=layout_query, layout_kv=layout_kv, mode=mode, dtype=dtype)
                name = f"{type_name}_{layout_query.lower()}_{layout_kv.lower()}_mode{mode}"
                found.append(case(name, attention))
    return found


def blocks() -> list[Case]:
    """Block sizes from 1 to 128, with lengths that end inside a block."""
    found = []
    for block in (1, 2, 4, 8, 16, 32, 64, 128):
        for layout_query, layout_kv in LAYOUTS:
            lengths = (2 * block + 3, block)
            for mode in (0, 3):
                attention = Attention(
                    layout_query=layout_query,
                    layout_kv=layout_kv,
                    mode=mode,
                    block=block,
                    page=max(16, block),
                    kv_lengths=lengths,
                    query_lengths=(3, 1),
                    selected=3,
                    width=8,
                    rope=4,
                )
                found.append(case(f"block_{block}_{layout_query.lower()}_{layout_kv.lower()}_mode{mode}", attention))
    return found


def sizes() -> list[Case]:
    long = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)
    tnd = Attention(layout_query="TND", layout_kv="TND", heads=2)
    tokens = [case(f"query_tokens_{t}", replace(tnd, query_lengths=(t,), kv_lengths=(t + 4,))) for t in long]
    batches = [
        case(f"batch_{b}_by_{s}", Attention(query_lengths=(s,) * b, kv_lengths=(s + 3,) * b, heads=2))
        for b, s in ((1, 1), (32, 1), (33, 1), (4, 8), (3, 11), (2, 32), (2, 33), (1, 7), (7, 1))
    ]
    paged = [
        case(
            f"paged_batch_{b}_by_{s}",
            Attention(query_lengths=(s,) * b, kv_lengths=(s + 17,) * b, heads=2, layout_kv="PA_BSND"),
        )
        for b, s in ((1, 1), (33, 1), (3, 11), (2, 33))
    ]
    heads = [case(f"heads_{n}", Attention(heads=n)) for n in (1, 2, 3, 5, 7, 8, 9, 17, 64, 128)]
    widths = [case(f"width_{d}", Attention(width=d)) for d in (1, 2, 3, 5, 7, 15, 17)]
    ropes = [case(f"rope_{d}", Attention(rope=d)) for d in (1, 2, 3, 5, 7, 64)]
    selected = [
        case(f"selected_{k}", Attention(selected=k, kv_lengths=(40, 33))) for k in (1, 2, 3, 5, 7, 8, 9, 31, 32, 33)
    ]
    keys = [
        case(f"keys_{s}", Attention(kv_lengths=(s,), query_lengths=(1,), mode=mode))
        for s, mode in ((1, 3), (2, 0), (3, 3), (5, 0), (7, 3), (63, 0), (64, 3), (65, 0))
    ]
    more_than_keys = [
        case(f"selected_16_of_{s}_{fill.__name__}", Attention(selected=16, kv_lengths=(s, s + 1), lists=fill))
        for s in (3, 5, 9)
        for fill in (full, future)
    ]
    pages = [
        case(f"page_{p}", Attention(page=p, layout_kv="PA_BSND", kv_lengths=(33, 16)))
        for p in (1, 2, 3, 5, 7, 16, 32, 128)
    ]
    return tokens + batches + paged + heads + widths + ropes + selected + keys + more_than_keys + pages


def selections() -> list[Case]:
    found = []
    for layout_query, layout_kv in LAYOUTS:
        short = f"{layout_query.lower()}_{layout_kv.lower()}"
        for block in (1, 4):
            attention = Attention(
                layout_query=layout_query, layout_kv=layout_kv, block=block, kv_lengths=(22, 9), selected=5
            )
            for lists in (full, future, only_future, nothing, ended_early, ended_at_once, repeated):
                name = f"{lists.__name__}_{short}_block{block}"
                found.append(case(name, replace(attention, lists=lists)))
    whole = Attention(lists=full, selected=12, query_lengths=(4,), kv_lengths=(12,), mode=0)
    found.append(case("every_key_selected", whole))
    return found


def lengths() -> list[Case]:
    ragged = Attention(query_lengths=(5, 1, 3), kv_lengths=(13, 2, 30), query_size=6, kv_size=32)
    found = [
        case("ragged_bsnd", ragged),
        case("ragged_mode0", replace(ragged, mode=0)),
        case("ragged_tnd", replace(ragged, layout_query="TND", layout_kv="TND")),
        case("ragged_tnd_paged", replace(ragged, layout_query="TND", layout_kv="PA_BSND")),
        case("ragged_paged", replace(ragged, layout_kv="PA_BSND")),
        case("ragged_padding_is_nan", ragged, edit=padded_queries_are_nan),
        case("longer_table", replace(ragged, layout_kv="PA_BSND", kv_size=64), edit=unused_table_entries),
        case("unused_pages_are_nan", replace(ragged, layout_kv="PA_BSND"), edit=unused_pages_are_nan),
        case("shared_page", replace(ragged, layout_kv="PA_BSND"), edit=shared_page),
    ]
    for layout_query, layout_kv in LAYOUTS:
        short = f"{layout_query.lower()}_{layout_kv.lower()}"
        for mode in (0, 3):
            base = Attention(layout_query=layout_query, layout_kv=layout_kv, mode=mode)
            found += [
                case(f"no_query_{short}_mode{mode}", replace(base, query_lengths=(2, 0, 3), kv_lengths=(7, 5, 9))),
                case(f"no_keys_{short}_mode{mode}", replace(base, query_lengths=(2, 1, 3), kv_lengths=(7, 0, 9))),
                case(f"fewer_keys_{short}_mode{mode}", replace(base, query_lengths=(5, 3), kv_lengths=(2, 8))),
            ]
    equal = Attention(query_lengths=(3, 3), kv_lengths=(9, 9))
    shorter = replace(equal, query_size=5, kv_size=12)
    query, kv = "actual_seq_lengths_query", "actual_seq_lengths_kv"
    found += [
        case("no_lengths", equal, absent=(query, kv)),
        case("no_lengths_mode0", replace(equal, mode=0), absent=(query, kv)),
        case("no_query_lengths", replace(equal, kv_size=12), absent=(query,)),
        case("no_kv_lengths", replace(equal, query_size=5), absent=(kv,)),
        case("no_query_lengths_paged", replace(equal, layout_kv="PA_BSND"), absent=(query,)),
        case("one_query_length", shorter, edit=one_length_for_all(query)),
        case("one_kv_length", shorter, edit=one_length_for_all(kv)),
        case("one_kv_length_paged", replace(shorter, layout_kv="PA_BSND"), edit=one_length_for_all(kv)),
        case(
            "one_kv_length_tnd_paged",
            replace(equal, layout_query="TND", layout_kv="PA_BSND"),
            edit=one_length_for_all(kv),
        ),
    ]
    return found


def numerics() -> list[Case]:
    base = Attention(kv_lengths=(30, 20), selected=6)
    paged = replace(base, layout_kv="PA_BSND")
    found = [
        case("large_scores", replace(base, scores=300.0)),
        case("negative_scale", base, scale=-0.5),
        case("zero_scale", base, scale=0.0),
        case("unselected_keys_are_nan", replace(base, lists=first_two), edit=keys_after_two_are_nan),
        case("first_key_is_infinite", replace(base, lists=not_the_first), edit=first_key_is_infinite),
        case("no_rope", base, absent=("query_rope", "key_rope")),
        case("no_rope_paged", replace(paged, dtype=BFLOAT16), absent=("query_rope", "key_rope")),
        case("no_statistics", base, statistics=False),
        case("no_statistics_paged", replace(paged, dtype=FLOAT16), statistics=False),
        case("only_sum_listed", base, outputs=("attention_out", "softmax_sum")),
        case("only_output_listed", base, outputs=("attention_out",)),
        case("two_kv_heads", replace(base, kv_heads=2)),
        case("two_kv_heads_tnd", replace(base, kv_heads=2, layout_query="TND", layout_kv="TND")),
        case("float16_large_scores", replace(base, dtype=FLOAT16, scores=300.0)),
    ]
    real = Attention(width=512, rope=64, heads=16, selected=24, kv_lengths=(70, 40))
    for type_name, dtype in FLOAT_TYPES.items():
        found += [
            case(f"real_{type_name}", replace(real, dtype=dtype), scale=576**-0.5),
            case(f"real_{type_name}_paged", replace(real, dtype=dtype, layout_kv="PA_BSND"), scale=576**-0.5),
        ]
    return found


CASES = layouts() + blocks() + sizes() + selections() + lengths() + numerics()
