"""What the engine tells: per site, what was asked, kept and claimed. Plain numbers that outlive the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """Multiplications of the covered linears in one backward, as FLOPs (2 N D O each), from shapes alone.

    Args:
        dense_flops: Of dense dgrad and wgrad, counting only gradients that autograd asked for.
        claimed_flops: What the policy's ``backward_share`` claims to leave of it.
    """

    dense_flops: float
    claimed_flops: float


@dataclass(frozen=True)
class SiteReport:
    """What happened at one site since the model was attached.

    Args:
        name: The module's name.
        calls: How often a gradient arrived.
        rows: Rows of all these gradients together.
        kept_share: Kept entries over all entries; None when no gradient arrived.
        dgrad_flops: Of the dense gradients of the input that autograd asked for.
        wgrad_flops: Of the dense gradients of the weight that autograd asked for.
        claimed_dgrad_flops: What the policy claims to leave of ``dgrad_flops``.
        claimed_wgrad_flops: What the policy claims to leave of ``wgrad_flops``.
    """

    name: str
    calls: int
    rows: int
    kept_share: float | None
    dgrad_flops: float
    wgrad_flops: float
    claimed_dgrad_flops: float
    claimed_wgrad_flops: float


@dataclass(frozen=True)
class Report:
    """What happened since the model was attached.

    Args:
        sites: Every site, in the model's order.
        not_covered: Linears that compute in their own way (quantised, sharded): their backward is dense.
        excluded: Linears that the user left out.
        kept_share: Kept entries over all entries, over all sites; None when no gradient arrived.
        num_backwards: Backward passes that went through the engine.
    """

    sites: tuple[SiteReport, ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]
    kept_share: float | None
    num_backwards: int

    @property
    def never_called(self) -> tuple[str, ...]:
        """Sites that no gradient reached."""
        return tuple(site.name for site in self.sites if site.calls == 0)

    @property
    def dense_flops(self) -> float:
        """Of the dense backward of all sites."""
        return sum(site.dgrad_flops + site.wgrad_flops for site in self.sites)

    @property
    def claimed_flops(self) -> float:
        """What the policy claims to leave of ``dense_flops``."""
        return sum(site.claimed_dgrad_flops + site.claimed_wgrad_flops for site in self.sites)
