"""A policy that could remember something by itself is refused before anything starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ConfigDict, PrivateAttr
from torch import nn

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import GradientSelector, find_policies
from tests.selector import Given


class Private(Given):
    _past: dict[str, torch.Tensor] = PrivateAttr(default_factory=dict)


class Below(Private):
    """Its parent remembers."""


class Listed(Given):
    seen: ClassVar[list[int]] = []


class Tensors(Given):
    past: ClassVar[torch.Tensor] = torch.zeros(3)


class Counting(Given):
    number: ClassVar[Iterator[int]] = itertools.count()


class Cached(Given):
    @cached_property
    def first(self) -> int:
        return 0


class Mixin:
    table: ClassVar[dict[str, int]] = {}


class Mixed(Mixin, Given):
    pass


class Changeable(Given):
    model_config = ConfigDict(frozen=False)


class TakesMore(Given):
    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Private, "Private keeps state in its private attribute '_past', which no checkpoint saves"),
        (Below, "Below keeps state in its private attribute '_past'"),
        (Listed, r"Listed has a class attribute 'seen' that can change \(list\)"),
        (Tensors, r"Tensors has a class attribute 'past' that can change \(Tensor\)"),
        (Counting, r"Counting has a class attribute 'number' that can change \(count\)"),
        (Cached, r"Cached has a class attribute 'first' that can change \(cached_property\)"),
        (Mixed, r"Mixed has a class attribute 'table' that can change \(dict\)"),
        (Changeable, "Changeable allows changes of its options: set frozen=True"),
        (TakesMore, "TakesMore accepts unknown options: set extra='forbid'"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_policy_that_could_remember_is_refused_by_name(policy: type[GradientSelector], text: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PolicyError, match=text):
        attach(model, policy())
    assert "forward" not in vars(model)


def test_an_instance_with_an_attribute_of_its_own_is_refused() -> None:
    policy = Given()
    object.__setattr__(policy, "past", 1)
    with pytest.raises(PolicyError, match="Given keeps state in its attribute 'past'"):
        attach(nn.Linear(2, 2), policy)


class Constants(Given):
    names: ClassVar[tuple[str, ...]] = ("a", "b")
    table: ClassVar[MappingProxyType[str, int]] = MappingProxyType({"a": 1})
    given: Any = None


def test_constants_of_a_class_are_allowed() -> None:
    with attach(nn.Linear(2, 2), Constants()):
        pass


def test_no_installed_policy_is_refused() -> None:
    assert {name: found.problem for name, found in find_policies().items() if found.problem} == {}
