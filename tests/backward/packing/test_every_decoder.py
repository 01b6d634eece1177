"""Every language model of the installed transformers that can be made tiny is packed exactly, or refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests.backward.token.test_every_decoder import every_model

from .case import ALL, SOME, errors, gradients, make_batch


def _judge(implementation: str, arrangements: Any) -> tuple[Counter[str], dict[str, str]]:
    found, wrong = Counter[str](), {}
    for name, model in every_model():
        try:
            model.set_attn_implementation(implementation)
            gradients(model, None, make_batch("right", "completion", "none"))
        except Exception:  # without this attention, or no batch of this length trains it anyway
            found["not made"] += 1
            continue
        try:
            with sbp.attach(model, "lossless"):
                pass
        except UnsupportedError as error:
            found["refused"] += 1
            if "\n" in str(error):
                wrong[name] = str(error)
            continue
        found["packed"] += 1
        try:
            bad = errors(model, arrangements)
            if bad:
                wrong[name] = str(bad)
        except UnsupportedError as error:  # found out by its first batch
            found["refused"] += 1
            if "\n" in str(error):
                wrong[name] = str(error)
        except Exception as error:  # all of them are told together
            wrong[name] = f"{type(error).__name__}: {error}"
        assert not any("forward" in vars(module) for module in model.modules() if isinstance(module, nn.Module)), name
    return found, wrong


@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
def test_every_decoder_is_packed_exactly_or_refused_by_name(implementation: str) -> None:
    found, wrong = _judge(implementation, SOME)
    print(f"{implementation}: {dict(found)}", *wrong.items(), sep="\n")
    assert wrong == {}
    assert found["packed"] >= 40


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_decoder_is_packed_exactly_in_every_arrangement(implementation: str) -> None:
    found, wrong = _judge(implementation, ALL)
    assert wrong == {}
    assert found["packed"] >= 40
