"""Records of ``sparsebp fetch``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer


class FetchedAsset(Answer):
    """A model or dataset that is here now."""

    name: str
    """As recipes write it."""
    folder: str
    """Where it is."""
    bytes: int
    """Bytes that were downloaded; 0 if it was here before."""


class FetchedAssets(Answer):
    """Models and datasets that are here now."""

    assets: list[FetchedAsset]
    """In the order in which they were named."""
