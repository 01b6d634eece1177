"""Several gradient selectors in one model, each at sites of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import GradientSelector, Rows, Selection, Site, Step
from tests.selector import Promises

ASKED: list[tuple[str, str]] = []


class First(Promises):
    """Keeps the first row, and notes where it was asked."""

    budget = property(lambda self: 0.25)  # type: ignore[assignment]
    selection = property(lambda self: Rows)  # type: ignore[assignment]

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        ASKED.append((type(self).__name__, site.name))
        return Rows(torch.tensor([0]))


class Last(First):
    """Keeps the last row."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        super().select(grad_NO, site, step)
        return Rows(torch.tensor([len(grad_NO) - 1]))


@pytest.fixture(autouse=True)
def _forget() -> None:
    ASKED.clear()


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"up": nn.Linear(3, 4), "down": nn.Linear(4, 3)}) for _ in range(2)]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(3, 2)

        def forward(self, x_ND: Tensor) -> Tensor:
            for block in self.layers:
                x_ND = x_ND + block["down"](block["up"](x_ND).tanh())
            return self.head(x_ND)

    return Stack().double()


def gradients(policies: list[GradientSelector], **options: Any) -> dict[str, Tensor]:
    model = make()
    x_ND = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with sbp.attach(model, policies, **options) as engine:
        engine.backward(model(x_ND).square().sum())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_each_site_asks_its_own_selector_and_the_rest_is_dense() -> None:
    found = gradients([First(where=["*.up"]), Last(where=["*.down"], layers=[1])])
    assert set(ASKED) == {("First", "layers.0.up"), ("First", "layers.1.up"), ("Last", "layers.1.down")}
    reference = gradients([First(where=["*.up"]), Last(where=["*.down"], layers=[1])], execution="reference")
    assert found.keys() == reference.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, reference[name])
    dense = gradients([])
    assert torch.equal(found["head.weight"], dense["head.weight"])
    assert not torch.allclose(found["layers.1.down.weight"], dense["layers.1.down.weight"])


def test_one_selector_at_all_sites_is_two_at_halves_of_them() -> None:
    whole = gradients([sbp.make_policy("random", keep=0.5)])
    halves = [sbp.make_policy("random", keep=0.5, where=where) for where in (["*.up", "head"], ["*.down"])]
    for name, gradient in gradients(halves).items():
        assert torch.equal(gradient, whole[name])


@pytest.mark.parametrize(
    ("policies", "kind", "text"),
    [
        (
            [First(where=["*.up"]), Last()],
            UnsupportedError,
            "First and Last make the same decision .*limit each to its own sites by where or layers",
        ),
        (
            [First(where=["*.up"]), Last(layers=[1])],
            UsageError,
            "First and Last cannot both act at 'layers.1.up': separate them with where= or layers=",
        ),
        ([First(where=["*.upp"])], UsageError, r"where: '\*.upp' matches no site$"),
    ],
)
def test_sites_of_two_selectors_or_of_none_are_refused(policies: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        gradients(policies)


def test_nodes_have_one_selector() -> None:
    with pytest.raises(UnsupportedError, match="at sites='nodes' are not supported"):
        gradients([First(where=["*.up"]), Last(where=["*.down"])], sites="nodes")
