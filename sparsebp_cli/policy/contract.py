"""What a policy is: a frozen set of options, and one decision.

A policy never touches autograd, the optimizer, the device or the global random generators. The engine keeps all
state and hands a policy what it needs: the gradient, the :class:`Site` where it is asked, and the :class:`Step` when.
So the same seed gives the same decisions, and a resumed run decides as the uninterrupted one would have.

Shape letters: N rows (= B*T), O output width, D input width.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict

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
    """

    name: str
    num_features: int
    batch_shape: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """When a policy is asked.

    Args:
        index: The optimizer step under way, counted from 0.
        micro_batch: Which backward of this step, counted from 0 (gradient accumulation).
        call: Which gradient of this site in this backward, counted from 0 (a shared layer is asked more than once).
        seed: The run's seed.
        draw: 0 in training; other numbers give independent draws for measuring a random policy.
    """

    index: int
    micro_batch: int = 0
    call: int = 0
    seed: int = 0
    draw: int = 0

    def generator(self, site: Site, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh random generator that depends only on seed, step, draw and site.

        Args:
            site: Where the decision is made.
            device: Where the random numbers are needed.

        Returns:
            A generator of its own; the global ones are not touched, and nothing needs to be saved to resume.
        """
        import torch

        key = f"{self.seed}/{self.index}/{self.micro_batch}/{self.call}/{self.draw}/{site.name}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class BackwardShare(NamedTuple):
    """The share of a site's dense backward work that a policy asks for, each in [0, 1].

    Args:
        dgrad: Multiplications for the gradient of the input.
        wgrad: Multiplications for the gradient of the weight.
    """

    dgrad: float
    wgrad: float


class Policy(BaseModel, ABC):
    """Options of a policy, checked before a run starts. Subclass a *kind* below, not this class.

    Options are pydantic fields with a description and a range; unknown ones are refused. Import torch inside the
    decision, not at the top of the file, so that recipes are checked without it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether, with these options, every gradient equals the dense one. Tested by the conformance suite."""

    @property
    @abstractmethod
    def unbiased(self) -> bool:
        """Whether, with these options, a site's selected gradient has the dense one as its mean over draws. Tested."""


class GradientSelector(Policy):
    """Answers: which part of this gradient goes on from this site? Asked inside the backward, at each site."""

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
    def backward_share(self) -> BackwardShare:
        """What this policy claims to leave of a site's dense backward work. The ceiling is computed from it, and the
        executed work is held against it."""

    @property
    @abstractmethod
    def budget(self) -> float:
        """Share of the gradient's entries that is kept at each site, in (0, 1]. Held against what was kept."""
