"""Loops over the experts that tracing unrolled: spellings that fuse, lost experts, and graphs that only look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fusion_patterns import fuse
from tests.fusion_patterns.moe_blocks import EXPERTS, MOE, ROUTER, block, codes, domain_node, fused, swap, tokens

VALUES = {f"e{expert}": expert for expert in range(EXPERTS)} | {
    "four_scalar": 4,
    "off_on": [0, 1],
    "each": [1, 1],
    "row_starts": [0, 0],
    "row_ends": [1, 2**63 - 1],
    "both": [0, 1],
    "half": 0.5,
    "pieces_4": [1, 1, 1, 1],
    "pieces_3": [1, 1, 1],
    "hit_axes": [1, 2],
}

ONE_HOT = " oh = OneHot<axis=-1>(ids, four_scalar, off_on) masks = Transpose<perm=[2, 0, 1]>(oh) "
ZEROS = "size = Shape(x) acc0 = ConstantOfShape(size) "


def mask_by_one_hot(e: int) -> str:
    return f"m{e} = Gather<axis=0>(masks, e{e}) b{e} = Cast<to=9>(m{e}) nz{e} = NonZero(b{e}) "


def mask_by_equal(e: int) -> str:
    return f"b{e} = Equal(ids, e{e}) nz{e} = NonZero(b{e}) "


def hits_by_split(e: int) -> str:
    return (
        f"nt{e} = Transpose(nz{e}) c0_{e}, c1_{e} = Split<axis=1>(nt{e}, each)"
        f" token{e} = Squeeze(c0_{e}, one) choice{e} = Squeeze(c1_{e}, one) "
    )


def hits_by_gather(e: int) -> str:
    return f"token{e} = Gather<axis=0>(nz{e}, zero_scalar) choice{e} = Gather<axis=0>(nz{e}, one_scalar) "


def only_tokens(e: int) -> str:
    return f"token{e} = Gather<axis=0>(nz{e}, zero_scalar) "


def weight_by_place(e: int) -> str:
    return (
        f"wf{e} = Flatten<axis=2>(chosen) ro{e} = Mul(token{e}, two) pl{e} = Add(choice{e}, ro{e})"
        f" wg{e} = Gather<axis=0>(wf{e}, pl{e}) wl{e} = Reshape(wg{e}, minus) w{e} = Unsqueeze(wl{e}, minus) "
    )


def weight_by_pairs(e: int) -> str:
    return (
        f"p0_{e} = Unsqueeze(token{e}, minus) p1_{e} = Unsqueeze(choice{e}, minus)"
        f" pp{e} = Concat<axis=-1>(p0_{e}, p1_{e}) wg{e} = GatherND(chosen, pp{e}) w{e} = Unsqueeze(wg{e}, minus) "
    )


def weight_by_transpose(e: int) -> str:
    return f"pt{e} = Transpose(nz{e}) wg{e} = GatherND(chosen, pt{e}) w{e} = Unsqueeze(wg{e}, minus) "


def expert(e: int) -> str:
    return (
        f"xe{e} = Gather<axis=0>(x, token{e}) ga{e} = MatMul(xe{e}, g{e}) sg{e} = Sigmoid(ga{e})"
        f" si{e} = Mul(ga{e}, sg{e}) up{e} = MatMul(xe{e}, u{e}) hi{e} = Mul(si{e}, up{e})"
        f" out{e} = MatMul(hi{e}, d{e}) z{e} = Mul(out{e}, w{e}) "
    )


def add_by_scatter_elements(e: int, after: int) -> str:
    """As TorchScript writes index_add_."""
    return (
        f"cut{e} = Slice(acc{e}, row_starts, row_ends, both) cs{e} = Shape(cut{e}) ex{e} = Expand(z{e}, cs{e})"
        f" tu{e} = Unsqueeze(token{e}, one) es{e} = Shape(ex{e}) ti{e} = Expand(tu{e}, es{e})"
        f" zs{e} = Shape(acc{e}) ze{e} = ConstantOfShape(zs{e})"
        f" sc{e} = ScatterElements<axis=0>(ze{e}, ti{e}, ex{e}) acc{after} = Add(acc{e}, sc{e}) "
    )


def add_by_scatter_nd(e: int, after: int) -> str:
    return f'tu{e} = Unsqueeze(token{e}, minus) acc{after} = ScatterND<reduction="add">(acc{e}, tu{e}, z{e}) '


def add_by_index_put(e: int, after: int) -> str:
    return (
        f"old{e} = Gather<axis=0>(acc{e}, token{e}) new{e} = Add(old{e}, z{e}) tu{e} = Unsqueeze(token{e}, minus)"
        f" acc{after} = ScatterND(acc{e}, tu{e}, new{e}) "
    )


Part = Callable[[int], str]


def loop(
    mask: Part = mask_by_one_hot,
    hits: Part = hits_by_split,
    weight: Part = weight_by_place,
    add: Callable[[int, int], str] = add_by_scatter_elements,
    order: Sequence[int] = (0, 1, 2, 3),
    before: str = ROUTER + ONE_HOT + ZEROS,
) -> str:
    """`order` is that of the experts in the loop; the accumulators are named after the expert that comes next."""
    steps = [*order[1:], 9]
    text = before.replace("acc0 ", f"acc{order[0]} ")
    for e, after in zip(order, steps, strict=True):
        text += mask(e) + hits(e) + weight(e) + expert(e) + add(e, after)
    return text + "y = Identity(acc9)"


TRACED = loop()
CHOICES_FIRST = ROUTER + ONE_HOT.replace("[2, 0, 1]", "[2, 1, 0]") + ZEROS


def swapped_hits(e: int) -> str:
    return f"choice{e} = Gather<axis=0>(nz{e}, zero_scalar) token{e} = Gather<axis=0>(nz{e}, one_scalar) "


SPELLINGS = {
    "TorchScript": TRACED,
    "Equal": loop(mask_by_equal, hits_by_gather),
    "pairs": loop(mask_by_equal, hits_by_gather, weight_by_pairs),
    "transposed hits as pairs": loop(mask_by_equal, only_tokens, weight_by_transpose),
    "ScatterND": loop(add=add_by_scatter_nd),
    "index_put": loop(mask_by_equal, hits_by_gather, add=add_by_index_put),
    "choices first": loop(hits=swapped_hits, before=CHOICES_FIRST),
    "backwards": loop(order=(3, 2, 1, 0)),
    "in any order": loop(mask_by_equal, add=add_by_scatter_nd, order=(2, 0, 3, 1)),
}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    model, report = fused(lambda: block(body, **VALUES), tokens(9), tokens(1, seed=1))
    assert (report.counts, codes(report)) == ({MOE: 1}, [])
    assert report.fused[0].assumed == []
    assert domain_node(model).attributes["expert_num"].value == EXPERTS
    assert not any(node.op_type in ("NonZero", "ScatterElements", "ScatterND") for node in model.graph)
    again = fuse(model, validate="none")
    assert (again.counts, codes(again)) == ({}, [])


@pytest.mark.parametrize("name", ["TorchScript", "index_put"])
def test_validation_agrees(name: str) -> None:
    report = fuse(block(SPELLINGS[name], **VALUES), validate="all")
    assert report.counts == {MOE: 1}
    assert report.fused[0].validated is not None
    assert report.fused[0].validated < 1e-6


# ------------------------------------------------------------------------------------------------------- lost experts


def over_hits(hit: int) -> str:
    """transformers 5's loop over the experts that were hit, traced with `hit` of them."""
    found = (
        "counts = ReduceSum<keepdims=0>(masks, hit_axes) more = Greater(counts, zero_scalar) hn = NonZero(more)"
        f" ht = Transpose(hn) {', '.join(f'h{e}' for e in range(hit))} = Split<axis=0>(ht, pieces_{hit}) "
    )

    def mask(e: int) -> str:
        return (
            f"hs{e} = Squeeze(h{e}) m{e} = Gather<axis=0>(masks, hs{e}) b{e} = Cast<to=9>(m{e}) nz{e} = NonZero(b{e}) "
        )

    return loop(mask, order=range(hit), before=ROUTER + ONE_HOT + ZEROS + found)


def test_a_loop_over_the_experts_that_the_example_hit_lost_the_others() -> None:
    report = fuse(block(over_hits(3), **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, ["experts-missing"])
    (missed,) = report.missed
    assert missed.expected == "the 4 experts of the router"
    assert missed.got.startswith("3: ")


def test_a_loop_whose_example_hit_every_expert_is_whole() -> None:
    """Where the graph runs at all, every expert is hit, and the i-th that is hit is expert i."""
    _, report = fused(lambda: block(over_hits(4), **VALUES), tokens(32))
    assert (report.counts, codes(report)) == ({MOE: 1}, [])


@pytest.mark.parametrize("order", [(0, 1, 3), (1, 2, 3), (0, 1, 2)])
def test_experts_that_no_example_token_chose(order: Sequence[int]) -> None:
    report = fuse(block(loop(mask_by_equal, order=order), **VALUES), validate="none")
    assert (report.counts, codes(report)) == ({}, ["experts-missing"])
    assert (report.missed[0].expected, report.missed[0].got) == ("the 4 experts of the router", "3")


# -------------------------------------------------------------------------------------------------------------- twins

TWINS = {
    "rows of the other half": (
        swap(TRACED, ("Gather<axis=0>(x, token1)", "Gather<axis=0>(x, token0)")),
        "experts-unrecognised",
    ),
    "added to other rows": (swap(TRACED, ("tu1 = Unsqueeze(token1, one)", "tu1 = Unsqueeze(token0, one)")), None),
    "weights of other tokens": (swap(TRACED, ("pl1 = Add(choice1, ro1)", "pl1 = Add(choice1, ro0)")), None),
    "weights of the first choice": (
        swap(TRACED, ("pl1 = Add(choice1, ro1)", "pl1 = Add(zero, ro1)")),
        "combine-unrecognised",
    ),
    "weights by choice and token": (
        swap(TRACED, ("ro1 = Mul(token1, two)", "ro1 = Mul(choice1, two)"), ("pl1 = Add(choice1", "pl1 = Add(token1")),
        "combine-unrecognised",
    ),
    "another stride": (swap(TRACED, ("ro1 = Mul(token1, two)", "ro1 = Mul(token1, one)")), "combine-unrecognised"),
    "not weighted": (swap(TRACED, ("z1 = Mul(out1, w1)", "z1 = Mul(out1, half)")), "combine-unrecognised"),
    "weighted twice": (
        swap(TRACED, ("z1 = Mul(out1, w1)", "zz = Mul(out1, w1) z1 = Mul(zz, w1)")),
        "experts-unrecognised",
    ),
    "from tokens, not zeros": (
        swap(TRACED, ("acc0 = ConstantOfShape(size)", "acc0 = Identity(x)")),
        "combine-unrecognised",
    ),
    "an expert twice": (
        swap(TRACED, ("m2 = Gather<axis=0>(masks, e2)", "m2 = Gather<axis=0>(masks, e1)")),
        "combine-unrecognised",
    ),
    "an expert of another activation": (swap(TRACED, ("sg2 = Sigmoid", "sg2 = Tanh")), "experts-unrecognised"),
    "weights of another expert": (swap(TRACED, ("MatMul(xe2, g2)", "MatMul(xe2, g1)")), None),
    "experts exchanged": (
        swap(TRACED, ("(masks, e1)", "(masks, e0x)"), ("(masks, e2)", "(masks, e1)"), ("e0x", "e2")),
        None,
    ),
    "multiplied, not added": (
        swap(loop(add=add_by_scatter_nd), ('ScatterND<reduction="add">(acc1', 'ScatterND<reduction="mul">(acc1')),
        None,
    ),
    "overwritten, not added": (
        swap(loop(add=add_by_scatter_nd), ('ScatterND<reduction="add">(acc1', "ScatterND(acc1")),
        None,
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_twins(name: str) -> None:
    body, code = TWINS[name]
    twins = block(body, **VALUES)
    report = fuse(twins, validate="none")
    if code is not None:
        assert (report.counts, codes(report)) == ({}, [code])
    elif report.counts:
        fused(lambda: block(body, **VALUES), tokens(8), tokens(16, seed=2))


def test_overwriting_needs_distinct_ids() -> None:
    """Of two updates of one row only one would count; a TopK proves that there is one."""
    given = VALUES | {"ids": "int64[N,2]", "chosen": "float[N,2]"}
    outside = TRACED.replace(ROUTER, "")
    report = fuse(block(outside, **given), validate="none")
    assert (report.counts, codes(report)) == ({}, ["combine-unrecognised"])
    adding = loop(add=add_by_scatter_nd).replace(ROUTER, "")
    feeds = tokens(3) | {
        "ids": np.array([[1, 1], [2, 0], [3, 3]]),
        "chosen": np.random.default_rng(0).random((3, 2), dtype=np.float32),
    }
    _, added = fused(lambda: block(adding, **given), feeds)
    assert (added.counts, added.fused[0].assumed) == ({MOE: 1}, ["expert-ids-in-range"])


@pytest.mark.parametrize("name", ["out1", "acc2", "token3", "hi0"])
def test_values_that_are_outputs(name: str) -> None:
    _, report = fused(lambda: block(TRACED, f"y {name}", **VALUES), tokens(7))
    assert report.counts == {MOE: 1}


def test_tokens_and_ids_of_other_sizes() -> None:
    """Rows of x that no id names stay zero in the graph."""
    body = TRACED.replace("(x, token", "(more, token").replace("Shape(x)", "Shape(more)")
    feeds = tokens(4) | {"more": np.random.default_rng(5).standard_normal((6, 6), dtype=np.float32)}
    _, report = fused(lambda: block(body, more="float[M,6]", **VALUES), feeds)
    assert (report.counts, codes(report)) == ({}, ["combine-unrecognised"])
