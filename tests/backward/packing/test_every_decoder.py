"""Every language model of the installed transformers that can be made tiny is packed exactly, or refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import nn

from sparsebp_cli.errors import UnsupportedError
from tests import architectures
from tests.backward.token.test_every_decoder import every_model

from .case import ALL, errors, gradients, make_batch

# Padding, labels and prefixes at once; every decoder in all 48 arrangements is a long test.
ONE = (("left", "scattered", "tree"),)


NUM_PARTS = 12  # in every arrangement, the models of one part take a minute or two


def _judge(
    implementation: str, arrangements: Any, every: int = 1, first: int = 0
) -> tuple[dict[str, str], dict[str, str]]:
    """Return each model that was tried with why it is refused, empty where it is packed; and those that are wrong.

    Of the models that can be made tiny, one of ``every`` is tried, beginning with number ``first``.
    """
    found: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for name, model in itertools.islice(every_model(), first, None, every):
        try:
            model.set_attn_implementation(implementation)
            gradients(model, None, make_batch("right", "completion", "none"))
        except Exception:  # without this attention, or no batch of this length trains it anyway
            continue
        kind = type(model).__name__
        try:
            found[kind] = ""
            bad = errors(model, arrangements)
            if bad:
                wrong[name] = str(bad)
        except UnsupportedError as error:
            found[kind] = str(error)
            if "\n" in str(error):
                wrong[name] = str(error)
        except Exception as error:  # all of them are told together
            wrong[name] = f"{type(error).__name__}: {error}"
        assert not any("forward" in vars(module) for module in model.modules() if isinstance(module, nn.Module)), name
    return found, wrong


@pytest.mark.filterwarnings("ignore")  # what transformers says while it makes them
@pytest.mark.always("sdpa-6")
@pytest.mark.parametrize(("implementation", "every"), [("sdpa", 6), ("sdpa", 1), ("eager", 1)])
def test_every_decoder_is_packed_exactly_or_refused_by_name(
    implementation: str, every: int, request: pytest.FixtureRequest
) -> None:
    found, wrong = _judge(implementation, ONE, every)
    assert wrong == {}
    assert list(found.values()).count("") >= 40 // every
    if implementation == "sdpa":
        architectures.hold(request.config, "lossless", found, is_whole=every == 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_decoder_is_packed_exactly_in_every_arrangement(implementation: str, part: int) -> None:
    found, wrong = _judge(implementation, ALL, NUM_PARTS, part)
    assert wrong == {}
    assert "" in found.values()
