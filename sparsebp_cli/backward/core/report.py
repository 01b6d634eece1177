"""What the engine tells: per site, what was asked, kept and claimed. Plain numbers that outlive the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from torch import Tensor

Number = int | float | Tensor  # tensors stay on their device until somebody reads them


@dataclass(frozen=True)
class FlopEstimate:
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


@dataclass(frozen=True, repr=False)
class Chosen:
    """Counts of one or more forwards; two can be added.

    Args:
        targets: Predictions that the labels train; examples, in a classification.
        trained: Of these, those whose loss counts.
        real: Positions that are no padding.
        carried: Of these, those that carry gradient.
        examples: Examples that there was a choice among.
        chosen_examples: Of these, those that were backpropagated.
        scoring_seconds: Wall time of the forwards that were run for scores, the reference model's included.
        scoring_flops: Their FLOPs; 0 unless they ran under :func:`~sparsebp_cli.backward.count_flops`.
    """

    targets: Number = 0
    trained: Number = 0
    real: Number = 0
    carried: Number = 0
    examples: int = 0
    chosen_examples: int = 0
    scoring_seconds: float = 0.0
    scoring_flops: int = 0

    @property
    def trained_share(self) -> float | None:
        """Trained over targets; None without targets. Waits for the device."""
        return float(self.trained) / float(self.targets) if float(self.targets) else None

    @property
    def carried_share(self) -> float | None:
        """Carried over real; None where nobody counted positions. Waits for the device."""
        return float(self.carried) / float(self.real) if float(self.real) else None

    def describe(self) -> str:
        """Return the counts in words, as plain numbers. Waits for the device."""
        trained, carried = self.trained_share, self.carried_share
        parts = (
            []
            if trained is None
            else [f"{int(self.trained):,} of {int(self.targets):,} targets trained ({trained:.2%})"]
        )
        if carried is not None:
            parts.append(f"{int(self.carried):,} of {int(self.real):,} positions carried ({carried:.2%})")
        if self.examples:
            parts.append(f"{self.chosen_examples:,} of {self.examples:,} examples")
        return ", ".join(parts)

    def __repr__(self) -> str:
        """Return all counts as plain numbers. Waits for the device."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = (f"{name}={value.item() if isinstance(value, Tensor) else value}" for name, value in counts.items())
        return f"Chosen({', '.join(plain)})"

    def __add__(self, other: Self) -> Self:
        """Return both together."""
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class EagerReport:
    """What happened in the last pass that updated.

    Args:
        num_early: Parameters that were updated while the pass ran.
        waited: Names of those that were updated when it had ended.
        gradient_bytes: Most bytes of gradients that were there at a time: those that had arrived at parameters, or all
            that one node of the graph gives at once (a segment gives those of all its layers). What has not all its
            parts yet is not counted; ``sbp.memory_trace`` sees everything.
        gradient_norm: 2-norm of all gradients together, before they were clipped.
    """

    num_early: int
    waited: tuple[str, ...]
    gradient_bytes: int
    gradient_norm: float


@dataclass(frozen=True)
class SiteReport:
    """What happened at one site since the model was attached.

    Args:
        name: The site's name.
        layer: Number of its layer, from 0, an encoder's before a decoder's; None outside of the layers.
        calls: How often a gradient arrived.
        rows: Rows of all these gradients together.
        entries: Entries of these gradients in the dense backward, positions and examples that were left out included.
        kept_share: Kept entries over all entries; None when no gradient arrived.
        dense_flops: Of the dense backward of this site, positions and examples that were left out included.
        claimed_flops: What the policies claim to leave of ``dense_flops``.
        allowed_flops: The same, in a probe with counts rounded up to whole rows, columns or blocks and examples padded
            to the longest: what is executed beyond that was not claimed.
        arrived_flops: Of ``dense_flops``, those of gradients that arrived.
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
    arrived_flops: float


@dataclass(frozen=True)
class Whole:
    """The whole dense backward: every product in the autograd graphs of the first, second, fourth, eighth ... pass.

    A forward that a checkpointed layer runs again is no part of it.

    Args:
        sites_share: Of its FLOPs, those at sites, in [0, 1].
        elsewhere: Of its FLOPs, the share with each parameter that is not at a site, the largest first; an empty name
            is for products with no parameter, as those of queries and keys.
        num_passes: Passes whose graph was read.
    """

    sites_share: float
    elsewhere: tuple[tuple[str, float], ...]
    num_passes: int


@dataclass(frozen=True, repr=False)
class Report:
    """What happened since the model was attached. ``print(report)`` shows a short table.

    Args:
        sites: Every site, in the model's order.
        not_covered: Places that compute in their own way (quantised, sharded), and parameters that the backward was
            seen to multiply with elsewhere, such as those of experts: their backward is dense.
        excluded: Places that the user left out.
        kept_share: Kept entries over all entries, over all sites; None when no gradient arrived.
        num_backwards: Backward passes that went through the engine.
        notes: How the engine carries the policy out, where that is its own choice; one sentence each.
        route: Where a router let the gradient go; None without a router, and before the first backward.
        chosen: What was chosen of the batches before their forward, and what that cost; None where nothing was.
        whole: The whole dense backward; None where it is not known.
        whole_unknown: Why it is not known; empty where it is.
    """

    sites: tuple[SiteReport, ...]
    not_covered: tuple[str, ...]
    excluded: tuple[str, ...]
    kept_share: float | None
    num_backwards: int
    notes: tuple[str, ...] = ()
    route: Route | None = None
    chosen: Chosen | None = None
    whole: Whole | None = None
    whole_unknown: str = ""

    @property
    def never_called(self) -> tuple[str, ...]:
        """Sites that no gradient reached."""
        return tuple(site.name for site in self.sites if site.calls == 0)

    @property
    def dense_flops(self) -> float:
        """Of the dense backward of all sites, and not of the whole model."""
        return sum(site.dense_flops for site in self.sites)

    @property
    def arrived_flops(self) -> float:
        """Of ``dense_flops``, those of gradients that arrived: not of positions or examples that were left out."""
        return sum(site.arrived_flops for site in self.sites)

    @property
    def claimed_flops(self) -> float:
        """What the policy claims to leave of ``dense_flops``."""
        return sum(site.claimed_flops for site in self.sites)

    @property
    def claimed_share(self) -> float | None:
        """What the policies claim to leave of the *sites'* dense backward; None when no gradient arrived at one."""
        return self.claimed_flops / self.dense_flops if self.dense_flops else None

    @property
    def whole_share(self) -> float | None:
        """What the policies claim to leave of the *whole* dense backward; None where that is not known."""
        if self.whole is None or self.claimed_share is None:
            return None
        return 1.0 - (1.0 - self.claimed_share) * self.whole.sites_share

    def __repr__(self) -> str:
        """Return the main figures in one line."""
        shares = f"whole_share={_digits(self.whole_share)}, kept_share={_digits(self.kept_share)}"
        return f"Report(num_backwards={self.num_backwards}, sites={len(self.sites)}, {shares})"

    def __str__(self) -> str:
        """Return a table of about ten lines; :meth:`details` has every site."""
        heading = f"{_count(self.num_backwards, 'backward pass', 'es')}, {_count(len(self.sites), 'site')}"
        rows = [(name, text) for name, text in self._rows() if text]
        width = max(len(name) for name, _ in rows)
        return "\n".join([heading, *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def details(self) -> str:
        """Return the table, every name in it, and a line for each site.

        Returns:
            Text of several lines.
        """
        lines = [str(self)]
        for title, names in (("not covered", self.not_covered), ("never called", self.never_called)):
            lines += [f"{title}:", *(f"  {name}" for name in names)] if names else []
        if self.whole is not None and self.whole.elsewhere:
            lines += ["of the whole backward, not at sites:"]
            lines += [f"  {share:7.2%}  {name or _OTHERS}" for name, share in self.whole.elsewhere]
        lines += ["notes:", *(f"  {note}" for note in self.notes)] if self.notes else []
        width = max((len(site.name) for site in self.sites), default=0)
        lines += [f"{'site':<{width}}  {'calls':>7}  {'kept':>7}  {'claimed':>7}  {'dense FLOPs':>11}"]
        for site in self.sites:
            claimed = site.claimed_flops / site.dense_flops if site.dense_flops else None
            figures = (
                f"{site.calls:>7}  {_percent(site.kept_share):>7}  {_percent(claimed):>7}  {site.dense_flops:>11.4g}"
            )
            lines.append(f"{site.name:<{width}}  {figures}")
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.whole is not None and self.whole_share is not None:
            yield (
                "whole backward",
                f"{self.whole_share:.1%} of its FLOPs remain, as claimed; "
                f"sites have {self.whole.sites_share:.1%} of the dense ones",
            )
        elif self.num_backwards:
            yield "whole backward", f"not known{f': {self.whole_unknown}' if self.whole_unknown else ''}"
        if self.claimed_share is not None:
            yield (
                "sites' backward",
                f"{self.claimed_share:.1%} of its FLOPs remain, as claimed; "
                f"{_percent(self.kept_share)} of gradient entries are kept",
            )
        if self.chosen is not None:
            yield "chosen", self.chosen.describe()
        if self.route is not None:
            nodes = (
                f"{self.route.nodes_reached:.1f} of {self.route.num_nodes / self.route.num_backwards:.1f} nodes a pass"
            )
            yield "route", f"{nodes}, {_count(len(self.route.parameters), 'parameter')}"
        shares = {} if self.whole is None else dict(self.whole.elsewhere)
        yield "not covered", _name(self.not_covered, shares)
        yield "never called", _name(self.never_called if self.num_backwards else ())
        yield "excluded", _name(self.excluded, shares)
        for note in self.notes[:2]:
            yield "note", note
        if len(self.notes) > 2:
            yield "note", f"and {len(self.notes) - 2} more"
        yield "every site", "report.details()"


_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_OTHERS = "with no parameter, such as queries times keys"


def _digits(share: float | None) -> str:
    return "None" if share is None else f"{share:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _name(names: Sequence[str], shares: Mapping[str, float] | None = None) -> str:
    """Return the names of the largest shares of the whole backward, with those of all layers as one."""
    together = Counter[str]()
    for name in names:
        known = {} if shares is None else shares
        together[_NUMBER.sub(".*", name)] += known.get(name, known.get(f"{name}.weight", 0.0))  # type: ignore[assignment]
    shown = [f"{name} ({share:.1%})" if share else name for name, share in together.most_common(3)]
    more = len(together) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
