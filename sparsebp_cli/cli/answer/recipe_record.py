"""Records of recipes, and of what recipes can name."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sparsebp_cli.cli.answer.record import Answer, Problem


class ShippedLine(Answer):
    """A recipe that ships."""

    name: str
    """Full name, with its folder; every verb that reads recipes accepts it."""
    short_name: str
    """The same without the folder."""
    summary: str
    """What it shows."""
    file: str
    """Where it is."""


class ShippedList(Answer):
    """The recipes that ship."""

    recipes: list[ShippedLine]
    """In alphabetical order."""


class CheckedRecipe(Answer):
    """A recipe that was checked."""

    file: str
    """As it was given."""
    is_right: bool
    """Whether it can run; then ``error`` is null, else the facts of the recipe are."""
    error: Problem | None = None
    """What is wrong."""
    name: str | None = None
    """Name of the recipe."""
    model: str | None = None
    """Its model."""
    dataset: str | None = None
    """Its data."""
    policy: str | None = None
    """Its policies and their options, in one line."""
    max_steps: int | None = None
    """Optimizer steps of a run."""
    num_runs: int | None = None
    """Runs that ``--seeds`` would make."""
    unknown: list[str] = Field(default_factory=list)
    """What cannot be checked from this machine."""
    notes: list[str] = Field(default_factory=list)
    """What is wrong with what the data become, and what ``--probe`` measured."""


class CheckedStudy(Answer):
    """A study that was checked and is right, or its small form."""

    file: str
    """As it was given."""
    is_scaled: bool
    """Whether it is the small study of its key ``scale``."""
    study: str
    """Name of the study."""
    arms: list[str]
    """Its arms, in the order of the file."""
    model: str
    """Model of the first arm."""
    dataset: str
    """Its data."""
    max_steps: int
    """Optimizer steps of a run of it."""
    seeds: list[int]
    """Seeds that are reported."""
    unknown: list[str] = Field(default_factory=list)
    """What cannot be checked from this machine."""


class CheckedRecipes(Answer):
    """Recipes and studies that were checked."""

    recipes: list[CheckedRecipe]
    """In the order in which they were given, with the studies that are wrong."""
    studies: list[CheckedStudy] = Field(default_factory=list)
    """The studies that are right."""


class DataAnswer(Answer):
    """What a recipe's data become."""

    splits: dict[str, dict[str, Any]]
    """By split: rows, examples, tokens, targets, lengths, classes, and what was dropped and cut, with reasons."""
    shared: dict[str, int]
    """By pair of splits: rows that stand in both."""
    warnings: list[tuple[str, str]]
    """Level and text."""
    first: dict[str, list[dict[str, Any]]]
    """By split: the first examples, with token ids and what is trained."""


class ExportedRuns(Answer):
    """Runs for another scheduler."""

    format: str
    """``sbatch``, ``k8s``, ``sky`` or ``dstack``."""
    text: str
    """The script, manifest or task, with the plans in it."""
    runs: list[str]
    """Ids that the runs will have."""


class PolicyOption(Answer):
    """An option of a policy."""

    name: str
    """Key in a recipe."""
    allowed: str
    """Range, and the default, in one line."""
    range: str
    """What is allowed."""
    required: bool
    """Whether it must be given."""
    common: bool
    """Whether every policy of the kind has it."""
    default: Any
    """What it is if it is not given."""
    description: str
    """What it means."""


class PolicyLine(Answer):
    """An installed policy."""

    name: str
    """As recipes write it."""
    kind: str
    """Its kind."""
    source: str
    """Package and version that has it."""
    problem: str
    """Why it is broken; empty if it works."""
    summary: str = ""
    """One line."""
    options: list[PolicyOption] = Field(default_factory=list)
    """Its options."""
    exact: bool | None = None
    """Whether its gradient is the dense one; null where options decide, or it is broken."""
    unbiased: bool | None = None
    """Whether its gradient is the dense one on average; null as above."""
    card: dict[str, Any] | None = None
    """When to use it, what it saves, what was claimed and measured."""


class PolicyList(Answer):
    """Installed policies."""

    policies: list[PolicyLine]
    """By name."""


class AssetLine(Answer):
    """A model or dataset that recipes can name without a path or a hub."""

    name: str
    """As recipes write it."""
    where: str
    """``package``, ``here``, ``to fetch``, or the package that has it."""
    bytes: int | None
    """Its size, or that of the download; null where unknown."""
    licence: str | None
    """Its licence; null where unknown."""
    summary: str | None
    """What it is; null where unknown."""


class AssetList(Answer):
    """Models or datasets."""

    group: str
    """``models`` or ``datasets``."""
    assets: list[AssetLine]
    """By name."""


class SchemaList(Answer):
    """Every schema, and what else a program needs."""

    documents: dict[str, dict[str, Any]]
    """By ``kind``: JSON schema of a document of ``-o json``."""
    verbs: dict[str, list[str]]
    """By verb: kinds of the documents that it answers with, besides ``error``."""
    files: dict[str, dict[str, Any]]
    """By kind of file that users write: JSON schema of recipes and of studies."""
    exit_codes: dict[str, str]
    """By exit code: its meaning."""
