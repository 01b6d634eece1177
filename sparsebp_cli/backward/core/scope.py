"""The sites at which one policy decides, by its options ``where`` and ``layers``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from sparsebp_cli.errors import UnsupportedError, UsageError, did_you_mean


class Placed(Protocol):
    """A policy that may be restricted to some sites."""

    @property
    def where(self) -> list[str] | None:
        """Globs over names of sites; None: all sites."""

    @property
    def layers(self) -> list[int] | None:
        """Indices of layers, from 0, or from the end as -1; None: all layers."""


class Scope:
    """The sites of a policy. ``num_layers`` is 0 for a model without known layers.

    Raises :class:`UnsupportedError` for a layer that the model does not have.
    """

    def __init__(self, policy: Placed, num_layers: int) -> None:
        self._where = policy.where
        self._layers = None if policy.layers is None else _number(policy.layers, num_layers)

    def contains(self, name: str, layer: int | None) -> bool:
        """Return whether the policy decides at a site."""
        return (self._layers is None or layer in self._layers) and (
            self._where is None or any(fnmatchcase(name, pattern) for pattern in self._where)
        )

    def check_patterns(self, names: Sequence[str]) -> None:
        """Refuse a pattern that matches no site (:class:`UsageError`)."""
        for pattern in self._where or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"where: {pattern!r} matches no site{did_you_mean(pattern, names)}")


def _number(layers: list[int], num_layers: int) -> frozenset[int]:
    wrong = [layer for layer in layers if not -num_layers <= layer < num_layers]
    if wrong:
        allowed = f"{-num_layers} to {num_layers - 1}" if num_layers else "none, because SparseBP found no layers"
        raise UnsupportedError(f"layers: the model has no layer {wrong[0]}; allowed: {allowed}")
    return frozenset(layer % num_layers for layer in layers)
