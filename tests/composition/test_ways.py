"""What acts on a whole step goes with every way of training, and with each other, as the table says."""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import pytest

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.policy.known_kind import find_kinds
from tests.plugin import find_ours

from .matrix import AT_SITES, COMPOSITIONS
from .step import difference, train, train_by_hand, untrained
from .training import RESTORED
from .way import WAYS, Way, find_pair_refusal, find_refusal

LABELS = [way.label for way in WAYS]
PAIRS = [pair for pair in itertools.combinations(WAYS, 2) if pair[0].question != pair[1].question]
# Double precision throughout, but the loss is a mean in float32, as transformers computes it: with rows left out, or
# weights of examples, its sum has another order. bfloat16 has 8 bits.
EXACT, ROUNDED, SINGLE, COARSE = 1e-12, 1e-6, 1e-4, 0.05
KINDS = find_kinds().kinds
LEAVES_ROWS_OUT = tuple(kind.name for kind in KINDS if kind.shortens and not kind.weighs_examples)


def test_the_table_has_every_policy_that_is_not_asked_at_sites() -> None:
    beside = {found.name: found.kind for found in find_ours().values() if found.kind not in AT_SITES}
    assert {way.policy["name"]: way.question for way in WAYS if way.policy} == beside


# Compiling takes 15 seconds a cell; one in the forward and one in the backward show it, `make test-long` the others.
COMPILED = ("tokens (mode: exact)", "wta-crs")


def _cells() -> list[Any]:
    return [
        pytest.param(
            composition,
            way,
            id=f"{composition}-{label}",
            marks=pytest.mark.long
            if composition == "compile" and label not in COMPILED and not find_refusal(way, composition)
            else (),
        )
        for composition, (label, way) in product(COMPOSITIONS, zip(LABELS, WAYS, strict=True))
        if composition != "DDP"
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.compiles
@pytest.mark.parametrize(("composition", "way"), _cells())
def test_a_cell_is_what_the_table_says(composition: str, way: Way) -> None:
    refusal = find_refusal(way, composition)
    if refusal:
        _check_refused(composition, (way,), refusal)
        return
    assert _judge(composition, (way,)) <= _tolerance(composition, way)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " + ".join(way.label for way in pair))
def test_two_at_once_are_what_the_table_says(pair: tuple[Way, Way]) -> None:
    refusal = find_pair_refusal(*pair)
    if refusal:
        _check_refused("nothing", pair, refusal)
    else:
        assert _judge("nothing", pair) <= (ROUNDED if any(map(_sums_anew, pair)) else EXACT)


@pytest.mark.parametrize("way", WAYS, ids=LABELS)
def test_a_gradient_policy_at_linears_goes_with_each(way: Way) -> None:
    """One that keeps everything changes nothing; one that does not is asked, and changes what is trained."""
    alone, without = train("nothing", (way,)), untrained("nothing")
    everything, some = (Way("topk", {"name": "topk", "keep": keep}) for keep in (1.0, 0.3))
    refusal = find_pair_refusal(way, everything)
    if refusal:
        _check_refused("nothing", (way, everything), refusal)
        return
    assert difference(train("nothing", (way, everything)), alone, without) <= EXACT
    assert difference(train("nothing", (way, some)), alone, without) > 1e-3


def _tolerance(composition: str, way: Way) -> float:
    if composition == "autocast" and (_sums_anew(way) or way.label in ("sketch", "compact", "velora")):
        return COARSE  # their product is rounded twice, and in another order than its reference
    return SINGLE if composition == "QLoRA" else ROUNDED if _sums_anew(way) else EXACT


def _sums_anew(way: Way) -> bool:
    """Whether the losses of a batch are added up in another order than transformers'."""
    return way.question in LEAVES_ROWS_OUT or way.declares("weighs")


def _judge(composition: str, ways: tuple[Way, ...]) -> float:
    """Return how far a training is from its reference."""
    without_stop = "nothing" if composition in ("resume", "compile") else composition
    without_stop = RESTORED if composition == "QLoRA" else without_stop
    if any(way.question == "TokenSelector" for way in ways):
        reference = train(without_stop, ways, tokens_by_reference=True)
    else:
        reference = train_by_hand(without_stop, ways)
    return difference(train(composition, ways), reference, untrained(composition))


def _check_refused(composition: str, ways: tuple[Way, ...], refusal: str) -> None:
    with pytest.raises(SparseBPError) as raised:
        train(composition, ways)
    assert str(raised.value) == refusal


def test_each_way_does_something() -> None:
    """Else a table of equal trainings would prove nothing."""
    dense: Any = train_by_hand("nothing", ())
    for way in WAYS:
        change = difference(train("nothing", (way,)), dense, untrained("nothing"))
        assert (change > 1e-3) == (bool(way.policy) and way.question != "BatchPacker"), way.label
        assert (change > 0.0) == bool(way.policy), way.label  # rows in another order round otherwise
