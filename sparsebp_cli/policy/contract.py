"""What a policy is: a frozen set of options, and one decision.

A policy never touches autograd, the optimizer, the device or the global random generators. The engine keeps all
state and hands a policy what it needs: the gradient, the :class:`Site` where it is asked, and the :class:`Step` when.
So the same seed gives the same decisions, and a resumed run decides as the uninterrupted one would have.

Shape letters: N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from sparsebp_cli.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from sparsebp_cli.policy.selection import Selection


@dataclass(frozen=True)
class Site:
    """Where a policy is asked.

    Args:
        name: The module's name in the model, ``model.layers.3.mlp.down_proj``.
        num_features: O, the width of the output whose gradient is shown.
        batch_shape: The output's shape without the feature dimension, usually (B, T); its product is N.
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of them.
        unknown: Why the example of a row is not known; empty where it is.
    """

    name: str
    num_features: int
    batch_shape: tuple[int, ...]
    layer: int | None = None
    unknown: str = ""

    @property
    def num_examples(self) -> int:
        """B, or 1 where the output has no dimension for examples. Rows lie by example.

        Raises:
            UnsupportedError: It is not known which rows are of one example.
        """
        if self.unknown:
            raise UnsupportedError(
                f"within: example needs to know the example of each row, and at {self.name!r} {self.unknown}; "
                "exclude it, or choose within the batch"
            )
        return self.batch_shape[0] if len(self.batch_shape) > 1 else 1


class Named(Protocol):
    """A place with a name that is the same in every step: a site, or an edge of the graph."""

    @property
    def name(self) -> str:
        """The name."""


@dataclass(frozen=True)
class Step:
    """When a policy is asked.

    Args:
        index: The optimizer step under way, counted from 0.
        micro_batch: Which backward of this step, counted from 0 (gradient accumulation).
        call: Which gradient of this site in this backward, counted from 0 (a shared layer is asked more than once).
        seed: The run's seed.
        draw: 0 in training; other numbers give independent draws for measuring a random policy.
        rank: Which of several processes that train together, from 0; each decides about examples of its own.
        num_steps: Optimizer steps of the whole training; None where nobody told.
    """

    index: int
    micro_batch: int = 0
    call: int = 0
    seed: int = 0
    draw: int = 0
    rank: int = 0
    num_steps: int | None = None

    def generator(self, site: Named, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh random generator that depends only on seed, step, draw, rank and site.

        Args:
            site: Where the decision is made.
            device: Where the random numbers are needed.

        Returns:
            A generator of its own; the global ones are not touched, and nothing needs to be saved to resume.
        """
        import torch

        key = f"{self.seed}/{self.index}/{self.micro_batch}/{self.call}/{self.draw}/{site.name}"
        key += f"/rank {self.rank}" if self.rank else ""  # no two draw the same rows, and the first as one alone would
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class Policy(BaseModel, ABC):
    """Options of a policy, checked before a run starts. Subclass a *kind* below, not this class.

    Options are pydantic fields with a description and a range; unknown ones are refused. Import torch inside the
    decision, not at the top of the file, so that recipes are checked without it.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether, with these options, every gradient equals the dense one. Tested by the conformance suite."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether, with these options, a site's selected gradient has the dense one as its mean over draws. Tested."""

    @property
    def control(self) -> Mapping[str, object] | None:
        """Name and options of a policy that chooses as much at random, as a recipe writes them under ``policy``; None:
        there is none, as for a policy that draws itself. A comparison asks for runs with it."""
        return None


class GradientSelector(Policy):
    """Answers: which part of this gradient goes on from this site? Asked inside the backward, at each site.

    The three options below are every selector's; the engine carries them out.
    """

    layers: list[int] | None = Field(
        None,
        description="Layers where it is asked, from 0, or from the end as -1; an encoder's come before a decoder's. "
        "null: everywhere.",
    )
    keep_warmup_steps: NonNegativeInt = Field(
        0, description="Optimizer steps over which the kept share falls from 1 to keep, by the same factor each step."
    )
    error_feedback: bool = Field(
        False, description="What was cut of a site's gradient is added to it at the next step, before the choice."
    )

    @abstractmethod
    def select(self, grad_NO: torch.Tensor, site: Site, step: Step) -> Selection | None:
        """Choose what is kept of the gradient of a site's output.

        Choose by count (top-k) rather than by threshold: counting on the host stalls a GPU.

        Args:
            grad_NO: Gradient of the site's output, all leading dimensions flattened to rows. Must not be changed.
            site: Where.
            step: When; ``step.generator(site, grad_NO.device)`` is the only source of randomness allowed.

        Returns:
            What is kept; None keeps everything.
        """

    @property
    @abstractmethod
    def selection(self) -> type[Selection] | None:
        """What ``select`` returns with these options, None if always None. The engine prepares for it, and computes
        from it and the budget what the policy claims to leave of the backward."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Share of the gradient's entries that is kept at each site, in (0, 1]. Held against what was kept."""

    @model_validator(mode="after")
    def _has_keep(self) -> Self:
        if self.keep_warmup_steps and "keep" not in type(self).model_fields:
            raise ValueError("keep_warmup_steps needs a policy with an option keep")
        return self
