"""Records about recipes, and about what recipes can name."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from sparsebp_cli.cli.answer.record import Answer, Problem


class ShippedLine(Answer):
    """A recipe that ships."""

    name: str
    """Full name, with its folder. Every command that reads recipes accepts it."""
    short_name: str
    """Name without the folder."""
    summary: str
    """What the recipe shows."""
    file: str
    """Path of its file."""


class ShippedList(Answer):
    """The recipes that ship."""

    recipes: list[ShippedLine]
    """In alphabetical order."""


class CheckedRecipe(Answer):
    """A recipe that was checked."""

    file: str
    """File as given on the command line."""
    is_right: bool
    """true: the recipe can run, and ``error`` is null. false: the facts about the recipe are null."""
    error: Problem | None = None
    """What is wrong."""
    name: str | None = None
    """Name of the recipe."""
    model: str | None = None
    """Name of its model."""
    dataset: str | None = None
    """Name of its data."""
    policy: str | None = None
    """Its policies and their options, in one line."""
    max_steps: int | None = None
    """Number of optimizer steps of a run."""
    num_runs: int | None = None
    """Number of runs that ``--seeds`` would make."""
    unknown: list[str] = field(default_factory=list)
    """What this machine cannot check."""
    notes: list[str] = field(default_factory=list)
    """Problems of the resulting data, and the results of ``--probe``."""


class CheckedStudy(Answer):
    """A checked and valid study, or its small form."""

    file: str
    """File as given on the command line."""
    is_scaled: bool
    """true: these facts are about the small version of the study, from its key ``scale``."""
    study: str
    """Name of the study."""
    arms: list[str]
    """Names of its variants, in the order of the file."""
    model: str
    """Model of the first variant."""
    dataset: str
    """Name of its data."""
    max_steps: int
    """Number of optimizer steps of one of its runs."""
    seeds: list[int]
    """Seeds of the reported runs."""
    unknown: list[str] = field(default_factory=list)
    """What this machine cannot check."""


class CheckedRecipes(Answer):
    """Recipes and studies that were checked."""

    recipes: list[CheckedRecipe]
    """All recipes and the invalid studies, in the given order."""
    studies: list[CheckedStudy] = field(default_factory=list)
    """The valid studies."""


class DataAnswer(Answer):
    """The data that result from a recipe."""

    splits: dict[str, dict[str, Any]]
    """By split: rows, examples, tokens, targets, lengths, classes, and what was dropped and cut, with reasons."""
    shared: dict[str, int]
    """By pair of splits: number of rows in both."""
    warnings: list[tuple[str, str]]
    """Pairs of level and text."""
    first: dict[str, list[dict[str, Any]]]
    """By split: the first examples, with token ids and trained parts."""


class PolicyOption(Answer):
    """An option of a policy."""

    name: str
    """Key in a recipe."""
    allowed: str
    """Range and default, in one line."""
    range: str
    """Allowed values."""
    required: bool
    """Whether a recipe must give it."""
    common: bool
    """Whether every policy of the kind has it."""
    default: Any
    """Value if a recipe does not give it."""
    description: str
    """Meaning of the option."""


class PolicyLine(Answer):
    """An installed policy."""

    name: str
    """Name in recipes."""
    kind: str
    """Kind of the policy."""
    source: str
    """Package that provides it, and its version."""
    problem: str
    """Why it is broken; empty if it works."""
    summary: str = ""
    """Description in one line."""
    options: list[PolicyOption] = field(default_factory=list)
    """Options of the policy."""
    exact: bool | None = None
    """Whether its gradient equals the dense one; null if this depends on options, or the policy is broken."""
    unbiased: bool | None = None
    """Whether its gradient equals the dense one on average; null in the same cases as ``exact``."""
    card: dict[str, Any] | None = None
    """When to use it, what it saves, what was claimed and measured."""


class PolicyList(Answer):
    """Installed policies."""

    policies: list[PolicyLine]
    """Policies, sorted by name."""


class SchemaList(Answer):
    """All schemas, and other facts that programs need."""

    documents: dict[str, dict[str, Any]]
    """By ``kind``: JSON schema of a document of ``-o json``."""
    verbs: dict[str, list[str]]
    """By command: kinds of its answers, in addition to ``error``."""
    files: dict[str, dict[str, Any]]
    """By kind of user file: JSON schema of recipes and of studies."""
    exit_codes: dict[str, str]
    """By exit code: its meaning."""
