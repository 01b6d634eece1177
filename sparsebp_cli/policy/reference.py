"""The base class of policies that compare the model's losses with the losses of a reference model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, Self

from pydantic import Field, model_validator

from sparsebp_cli.policy.contract import Policy
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.rule import ABSENT, Rule

REFERENCE_COLUMN = "reference_loss"  # (B, T) float32: the loss of the token that each position predicts


class ReferenceReader(Policy):
    """A policy that may compare with a reference model: derive from the kind and from this class. The engine implements
    the two options. In your own training loop, pass the reference model as ``attach(reference=...)``."""

    reference: str | None = Field(
        None, description="Name or path of the reference model whose losses the policy compares with; null: none."
    )
    reference_scores: Literal["cached", "fly"] = Field(
        "cached",
        description="cached: the reference model computes the losses of all training data once, and they are stored "
        "on disk. fly: it computes the losses of each batch just before the training step.",
    )

    @property
    @abstractmethod
    def reads_reference(self) -> bool:
        """Whether the policy reads the losses of the reference with these options."""

    @model_validator(mode="after")
    def _has_reference(self) -> Self:
        if self.reference is not None and not self.reads_reference:
            raise ValueError("the other options do not use reference: leave reference out")
        return self


REFERENCE_READER = Kind(
    ReferenceReader,
    fact="may_compare",
    facts=lambda policy: {"compares": policy.reads_reference, "reference": policy.reference},
    limits=(
        Rule(
            "{policy} needs a reference model: set its option reference to the name or path of a model",
            policy={"compares": (True,), "reference": ABSENT},
            options={"loop": ("worker",)},
        ),
    ),
)
