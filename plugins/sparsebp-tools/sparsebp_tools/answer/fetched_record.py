"""Records of ``sparsebp fetch``, ``models`` and ``datasets``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer


class FetchedAsset(Answer):
    """A fetched model or dataset."""

    name: str
    """Name in recipes."""
    folder: str
    """Its folder."""
    bytes: int
    """Downloaded bytes; 0 if it was already here."""


class FetchedAssets(Answer):
    """Fetched models and datasets."""

    assets: list[FetchedAsset]
    """Assets in the order of the command line."""


class AssetLine(Answer):
    """A model or dataset that recipes can name without a path or a hub."""

    name: str
    """Name in recipes."""
    where: str
    """``package``, ``here``, ``to fetch``, or the name of the package that has it."""
    bytes: int | None
    """Size on disk, or of the download; null if unknown."""
    licence: str | None
    """Its licence; null if unknown."""
    summary: str | None
    """Short description; null if unknown."""


class AssetList(Answer):
    """Models or datasets."""

    group: str
    """``models`` or ``datasets``."""
    assets: list[AssetLine]
    """Assets by name."""
