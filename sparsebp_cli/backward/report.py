"""What the engine tells: per site, what was asked, kept and claimed. Plain numbers that outlive the model."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebp_cli.backward.score.chosen import Chosen


@dataclass(frozen=True)
class Claim:
    """Multiplications of the sites in one backward as FLOPs, from shapes alone.

    Args:
        dense_flops: Of the dense backward, counting only gradients that autograd asked for.
        claimed_flops: What the policy claims to leave of it; what is computed again in the backward is added.
    """

    dense_flops: float
    claimed_flops: float


@dataclass(frozen=True)
class Route:
    """Where a router let the gradient go; those of several backward passes can be added.

    Args:
        num_backwards: Backward passes.
        num_nodes: Nodes of their graphs.
        num_nodes_reached: Nodes that a gradient arrived at; the others did nothing.
        parameters: Names of the parameters that a gradient arrived at.
        num_decisions: Nodes with two or more edges to choose from.
        num_judged: Of these, choices that were compared with a full backward (lookahead).
        num_misses: Of these, choices that led away from the largest gradient among the parameters behind the node.
        num_largest_reached: Passes, of those with lookahead, that reached the parameter of largest gradient of all.
    """

    num_backwards: int
    num_nodes: int
    num_nodes_reached: int
    parameters: frozenset[str]
    num_decisions: int
    num_judged: int
    num_misses: int
    num_largest_reached: int

    @property
    def miss_rate(self) -> float | None:
        """Misses over choices that were compared; None without lookahead."""
        return self.num_misses / self.num_judged if self.num_judged else None

    @property
    def nodes_reached(self) -> float:
        """Nodes that a gradient arrived at, a backward pass."""
        return self.num_nodes_reached / self.num_backwards

    def __add__(self, other: Route) -> Route:
        """Return both together."""
        mine, theirs = vars(self), vars(other)
        parameters = self.parameters | other.parameters
        return Route(**{key: mine[key] + theirs[key] for key in mine if key != "parameters"}, parameters=parameters)


@dataclass(frozen=True)
class SiteReport:
    """What happened at one site since the model was attached.

    Args:
        name: The site's name.
        layer: Number of its decoder layer, from 0; None outside of the layers.
        calls: How often a gradient arrived.
        rows: Rows of all these gradients together.
        entries: Entries of all these gradients together.
        kept_share: Kept entries over all entries; None when no gradient arrived.
        dense_flops: Of the dense backward of this site.
        claimed_flops: What the policy claims to leave of ``dense_flops``.
        allowed_flops: The same, in a probe with counts rounded up to whole rows, columns or blocks and examples padded
            to the longest: what is executed beyond that was not claimed.
    """

    name: str
    layer: int | None
    calls: int
    rows: int
    entries: int
    kept_share: float | None
    dense_flops: float
    claimed_flops: float
    allowed_flops: float


@dataclass(frozen=True)
class Report:
    """What happened since the model was attached.

    Args:
        sites: Every site, in the model's order.
        not_covered: Places that compute in their own way (quantised, sharded): their backward is dense.
        excluded: Places that the user left out.
        kept_share: Kept entries over all entries, over all sites; None when no gradient arrived.
        num_backwards: Backward passes that went through the engine.
        notes: How the engine carries the policy out, where that is its own choice; one sentence each.
        route: Where a router let the gradient go; None without a router, and before the first backward.
        chosen: What was chosen of the batches before their forward, and what that cost; None where nothing was.
    """

    sites: tuple[SiteReport, ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]
    kept_share: float | None
    num_backwards: int
    notes: tuple[str, ...] = ()
    route: Route | None = None
    chosen: Chosen | None = None

    @property
    def never_called(self) -> tuple[str, ...]:
        """Sites that no gradient reached."""
        return tuple(site.name for site in self.sites if site.calls == 0)

    @property
    def dense_flops(self) -> float:
        """Of the dense backward of all sites."""
        return sum(site.dense_flops for site in self.sites)

    @property
    def claimed_flops(self) -> float:
        """What the policy claims to leave of ``dense_flops``."""
        return sum(site.claimed_flops for site in self.sites)
