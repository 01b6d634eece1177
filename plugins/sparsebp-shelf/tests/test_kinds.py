"""Each kind of the shelf keeps what a kind promises."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from sparsebp_cli.policy.known_kind import KINDS, find_kinds
from sparsebp_cli.testing import check_kind
from tests.backward.families import tiny_decoder
from tests.test_check_kind import _loss

KINDS_HERE: dict[str, list[dict[str, Any]]] = {
    "BlockDropper": [{"name": "dropbp", "keep": 0.5}, {"name": "layerdrop", "keep": 0.5}],
    "ExampleSelector": [{"name": "uniform", "keep": 0.5}],
    "InputSaver": [{"name": "wta-crs", "keep": 0.5}],
    "PartSelector": [{"name": "subnet", "keep": 0.3, "by": "random"}],
}
INSTALLED = {kind.name: kind for kind in find_kinds().kinds if kind not in KINDS}


def test_no_kind_of_the_shelf_is_forgotten() -> None:
    assert {name for name, kind in INSTALLED.items() if "sparsebp_shelf" in kind.suite} == set(KINDS_HERE)


@pytest.mark.parametrize("name", KINDS_HERE)
def test_a_kind_of_the_shelf_keeps_every_promise(name: str) -> None:
    check_kind(
        INSTALLED[name], KINDS_HERE[name], make_model=partial(tiny_decoder, "llama", num_hidden_layers=3), loss=_loss
    )
