"""Define the types of the event log's records, one for each kind. :mod:`sparsebp_cli.run.record` validates them.

A record of an unknown kind, which a newer version wrote, has only the common fields. Readers skip it.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class _Common(TypedDict):
    attempt: int
    time: float


class AttemptRecord(_Common):
    """A worker started."""

    kind: Literal["attempt"]
    from_step: int
    environment: dict[str, object]


class MetricsRecord(_Common):
    """Values of metrics at a step."""

    kind: Literal["metrics"]
    step: int
    values: dict[str, float]


class RecordedPolicy(TypedDict):
    """Part of what a run records about a policy."""

    exact: bool


class AcceptedChange(TypedDict):
    """An accepted change of the config fingerprint, and the step from which it holds."""

    field: str
    then: str
    now: str
    step: int


class Facts(TypedDict, total=False):
    """Facts that readers use. An event log may have others."""

    policies: list[RecordedPolicy]
    warmup_steps: int
    tokens_per_step: float | None
    eval_examples: float | None
    train_examples: object
    dataset_digest: str | None
    changes: list[AcceptedChange]
    repeats: str
    metrics: dict[str, dict[str, str]]  # by name: unit and direction of the recipe's own metrics
    device: object
    forms: object


class FactsRecord(_Common):
    """Facts that are constant in a run."""

    kind: Literal["facts"]
    values: Facts


class LayersRecord(_Common):
    """Layer or site to its metrics."""

    kind: Literal["layers"]
    step: int
    values: dict[str, dict[str, float | None]]


class ProofValues(TypedDict):
    """The columns, and the row of each module."""

    columns: list[str]
    modules: dict[str, list[float | None]]


class ProofRecord(_Common):
    """FLOPs that a step's backward executed, and what it stored."""

    kind: Literal["proof"]
    step: int
    values: ProofValues


class ExamplesRecord(_Common):
    """Loss, number of targets and document of every example of a split."""

    kind: Literal["examples"]
    step: int
    split: NotRequired[str]
    values: dict[str, list[float]]


class SamplesRecord(_Common):
    """The first texts of a generation."""

    kind: Literal["samples"]
    step: int
    split: str
    values: dict[str, list[str]]


class ScoresRecord(_Common):
    """What each example contributes to metrics that are means over examples."""

    kind: Literal["scores"]
    step: int
    values: dict[str, list[float]]


class SealRecord(_Common):
    """The config fingerprint of an attempt."""

    kind: Literal["seal"]
    values: dict[str, object]


class AllowRecord(_Common):
    """Fields of the config fingerprint that may change before the next attempt."""

    kind: Literal["allow"]
    fields: list[str]


class NoteRecord(_Common):
    """A message."""

    kind: Literal["note"]
    level: str
    text: str


class EndRecord(_Common):
    """How an attempt ended."""

    kind: Literal["end"]
    status: str
    step: int
    text: str
    cause: NotRequired[Literal["diverged", "limit", "paused"]]
    signal: NotRequired[int]  # the signal that stopped it
    changes: NotRequired[list[list[str]]]


Record = (
    AttemptRecord
    | MetricsRecord
    | FactsRecord
    | LayersRecord
    | ProofRecord
    | ExamplesRecord
    | SamplesRecord
    | ScoresRecord
    | SealRecord
    | AllowRecord
    | NoteRecord
    | EndRecord
)
