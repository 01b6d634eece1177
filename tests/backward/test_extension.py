"""Hooks of an engine's extensions: those that a class marks, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from sparsebp_cli import PolicyError, attach
from sparsebp_cli.backward import EngineExtension
from sparsebp_cli.backward.core.extension import HOOKS, PassRunner
from sparsebp_cli.policy import known_kind
from sparsebp_shelf.block import DropBP
from tests.backward.eager_case import MODELS


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_helper_with_the_name_of_a_hook_is_refused(name: str) -> None:
    """It would be taken for the hook."""
    for helper in (lambda self: 0.5, property(lambda self: False), 3):
        with pytest.raises(TypeError, match=rf"Own.{name} has the name of a hook .* or rename it"):
            type("Own", (EngineExtension,), {name: helper})


def test_a_class_has_the_hooks_that_it_and_its_bases_mark() -> None:
    class First(EngineExtension):
        @property
        @override
        def frozen(self) -> frozenset[str]:
            return frozenset({"a"})

        def start_step(self, step: Any) -> None:
            """Prepare nothing: one of the four that every author writes."""

    class Second(First):
        @override
        def check_called(self) -> None:
            """Refuse nothing."""

        def helper(self) -> None:
            """Have a name of its own."""

    assert First.hooks == {"frozen"}
    assert Second.hooks == {"frozen", "check_called"}
    assert EngineExtension.hooks == frozenset()
    assert PassRunner.hooks == frozenset()


def test_an_extension_without_hooks_changes_nothing() -> None:
    class Plain(EngineExtension):
        pass

    plain = Plain()
    plain.set_columns(a=1)  # type: ignore[arg-type]
    plain.check_arguments({})
    plain.check_called()
    plain.finish_pass()
    plain.load_state_dict({})
    with plain.reading_by(None, "labels"):
        pass
    assert not plain.expect([])
    assert (plain.frozen, plain.work_shares, plain.state_dict()) == (frozenset(), (), {})
    assert (plain.gradient_bytes, plain.trains_frozen) == (None, False)


class Structural:
    """What a package of an earlier version brought: the methods, and no base class."""

    def __init__(self, policy: object, model: nn.Module, given: object) -> None:
        """Take what a kind's extension takes."""


def test_an_extension_without_the_base_class_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = DropBP(keep=0.5)
    kind = known_kind.find_kind(policy)
    changed = replace(kind, extensions=((10, f"{__name__}:Structural"),))
    monkeypatch.setattr("sparsebp_cli.backward.attachment.find_kind", lambda _: changed)
    expected = r"^DropBP: .*Structural must return a sparsebp_cli.backward.EngineExtension, got Structural$"
    model = MODELS["llama"]()
    with pytest.raises(PolicyError, match=expected):
        attach(model, [policy], num_steps=2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
