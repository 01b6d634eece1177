"""The engine's report: calls, kept entries and estimated FLOPs of every site, as numbers that outlive the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from torch import Tensor

from sparsebp_cli.backward.core.device_seconds import DeviceSeconds

Number = int | float | Tensor  # tensors stay on their device until something reads them


@dataclass(frozen=True)
class FlopEstimate:
    """FLOPs of the multiplications at the sites in one backward, from shapes alone.

    Args:
        dense_flops: FLOPs of the dense backward, counting only gradients that autograd requires.
        claimed_flops: Estimated FLOPs under the policy, including recomputation of the forward.
    """

    dense_flops: float
    claimed_flops: float


@dataclass(frozen=True)
class Route:
    """Counts of a router's choices in a backward. Routes of several backward passes can be added.

    Args:
        num_backwards: Number of backward passes.
        num_nodes: Nodes of their graphs.
        num_nodes_reached: Nodes that a gradient reached; the others computed nothing.
        parameters: Names of the parameters that a gradient reached.
        num_decisions: Nodes with two or more edges to choose from.
        num_judged: Decisions that lookahead compared with a dense backward.
        num_misses: Compared decisions that excluded the largest gradient among the parameters behind the node.
        num_largest_reached: Passes with lookahead that reached the parameter with the largest gradient in the model.
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
        """Fraction of the compared decisions that were misses; None without lookahead."""
        return self.num_misses / self.num_judged if self.num_judged else None

    @property
    def nodes_reached(self) -> float:
        """Mean number of nodes that a gradient reached per backward."""
        return self.num_nodes_reached / self.num_backwards

    def __add__(self, other: Route) -> Route:
        """Return the sum of both."""
        mine, theirs = vars(self), vars(other)
        parameters = self.parameters | other.parameters
        return Route(**{key: mine[key] + theirs[key] for key in mine if key != "parameters"}, parameters=parameters)


@dataclass(frozen=True, repr=False)
class Chosen:
    """Counts of tokens and examples chosen in one or more forwards. Counts can be added.

    Args:
        targets: Predictions with a label; in a classification, examples.
        trained: Targets whose loss counts.
        real: Positions that are not padding.
        carried: Real positions that carry gradient.
        examples: Examples to choose from.
        chosen_examples: Examples that were backpropagated.
        scoring_seconds: Wall time of scoring forwards, including the reference model's. ``float()`` of it synchronises
            with the device.
        scoring_flops: FLOPs of scoring forwards; 0 unless they ran under :func:`~sparsebp_cli.backward.count_flops`.
    """

    targets: Number = 0
    trained: Number = 0
    real: Number = 0
    carried: Number = 0
    examples: int = 0
    chosen_examples: int = 0
    scoring_seconds: float | DeviceSeconds = 0.0
    scoring_flops: int = 0

    @property
    def trained_share(self) -> float | None:
        """Fraction of the targets that are trained; None without targets. Synchronises with the device."""
        return float(self.trained) / float(self.targets) if float(self.targets) else None

    @property
    def carried_share(self) -> float | None:
        """Fraction of the real positions that carry gradient; None if not counted. Synchronises with the device."""
        return float(self.carried) / float(self.real) if float(self.real) else None

    def describe(self) -> str:
        """Return the counts as a phrase. Synchronises with the device."""
        trained, carried = self.trained_share, self.carried_share
        parts = (
            []
            if trained is None
            else [f"{int(self.trained):,} of {int(self.targets):,} label positions trained ({trained:.2%})"]
        )
        if carried is not None:
            parts.append(f"{int(self.carried):,} of {int(self.real):,} positions with a gradient ({carried:.2%})")
        if self.examples:
            parts.append(f"{self.chosen_examples:,} of {self.examples:,} examples")
        return ", ".join(parts)

    def __repr__(self) -> str:
        """Return all counts as plain numbers. Synchronises with the device."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        counts["scoring_seconds"] = float(self.scoring_seconds)
        plain = (f"{name}={value.item() if isinstance(value, Tensor) else value}" for name, value in counts.items())
        return f"Chosen({', '.join(plain)})"

    def __add__(self, other: Self) -> Self:
        """Return the sum of both."""
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class ChosenCounter:
    """Total of :class:`Chosen`, and the part since the last ``take``."""

    total: Chosen | None = None
    untaken: Chosen | None = field(default=None)

    def add(self, chosen: Chosen) -> None:
        """Count one forward."""
        # Add even the first one, so that the first step after a resume allocates as many tensors as any other.
        self.total = (self.total or Chosen()) + chosen
        self.untaken = chosen if self.untaken is None else self.untaken + chosen

    def take(self) -> Chosen | None:
        """Return the counts since the last call; None if there are none."""
        chosen, self.untaken = self.untaken, None
        return chosen


@dataclass(frozen=True)
class EagerReport:
    """The last pass that updated parameters eagerly.

    Args:
        num_early: Parameters that were updated during the pass.
        waited: Names of parameters that were updated after the pass.
        gradient_bytes: Peak bytes of gradients in memory: gradients that had arrived at parameters, or all gradients
            that one graph node produces together, such as a segment's. Partial sums are not included; use
            ``sparsebp_tools.memory`` for all memory.
        gradient_norm: 2-norm of all gradients together before clipping.
    """

    num_early: int
    waited: tuple[str, ...]
    gradient_bytes: int
    gradient_norm: float


@dataclass(frozen=True)
class SiteReport:
    """Counts of one site since the model was attached.

    Args:
        name: The site's name.
        layer: Index of its layer, from 0; an encoder's layers come before a decoder's. None outside of layers.
        calls: Gradients that arrived.
        rows: Rows of all these gradients.
        entries: Entries of these gradients in the dense backward, including skipped positions and examples.
        kept_share: Kept entries over all entries; None if no gradient arrived.
        dense_flops: FLOPs of this site's dense backward, including skipped positions and examples.
        claimed_flops: Estimated FLOPs under the policies, as a part of ``dense_flops``.
        allowed_flops: In a probe, ``claimed_flops`` with counts rounded up to whole rows, columns or blocks, and
            examples padded to the longest. A policy that executes more exceeds its estimate.
        arrived_flops: The part of ``dense_flops`` whose gradients arrived.
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
    """The whole dense backward: every product in the autograd graphs of passes 1, 2, 4, 8 ...

    It does not include forward work that a checkpointed layer repeats.

    Args:
        sites_share: Fraction of its FLOPs at sites, in [0, 1].
        elsewhere: Fraction of its FLOPs for each parameter that is not at a site, the largest first. The empty name is
            for products without a parameter, such as queries times keys.
        num_passes: Passes whose graph was read.
    """

    sites_share: float
    elsewhere: tuple[tuple[str, float], ...]
    num_passes: int


@dataclass(frozen=True)
class Short:
    """The remaining fraction of the dense backward in passes 1, 2, 4, 8 ..., if a policy skips work before it.

    A forward on tensors without values counts the dense backward of the same batches.

    Args:
        whole_share: Estimated fraction of the FLOPs of the whole dense backward that remained.
        claimed_share: The same fraction for the sites alone, if a policy chooses which parameters are trained.
            Gradients that do not arrive count, too. None for other policies.
        num_passes: Passes that were counted.
    """

    whole_share: float
    claimed_share: float | None
    num_passes: int


@dataclass(frozen=True, repr=False)
class Report:
    """Counts of the work that policies kept and skipped since attach. ``print(report)`` shows a short table.

    Args:
        sites: Every site, in the model's order.
        not_covered: Modules with a custom forward (quantised, sharded), and parameters that are multiplied outside of
            sites, such as experts. Their backward is dense.
        excluded: Modules that the user excluded.
        kept_share: Kept entries over all entries, over all sites; None if no gradient arrived.
        num_backwards: Backward passes that the engine ran.
        notes: One sentence for each choice that the engine made itself when it executed the policies.
        route: Nodes and parameters to which a router sent the gradient; None without a router, and before the first
            backward.
        chosen: Examples or positions chosen before the forward, and the cost of choosing; None without a choice.
        whole: The whole dense backward; None if unknown.
        whole_unknown: Why ``whole`` is unknown; empty if it is known.
        short: The remaining fraction of the backward if policies skip work before it; None without such a policy, and
            if unknown.
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
    short: Short | None = None

    @property
    def never_called(self) -> tuple[str, ...]:
        """Sites that no gradient reached."""
        return tuple(site.name for site in self.sites if site.calls == 0)

    @property
    def dense_flops(self) -> float:
        """Dense backward FLOPs of all sites, which is not the whole model."""
        return sum(site.dense_flops for site in self.sites)

    @property
    def arrived_flops(self) -> float:
        """The part of ``dense_flops`` whose gradients arrived: without skipped positions and examples."""
        return sum(site.arrived_flops for site in self.sites)

    @property
    def claimed_flops(self) -> float:
        """Estimated FLOPs of all sites under the policies, as a part of ``dense_flops``."""
        return sum(site.claimed_flops for site in self.sites)

    @property
    def claimed_share(self) -> float | None:
        """Estimated fraction of the *sites'* dense backward under the policies; None if no gradient arrived."""
        if self.short is not None and self.short.claimed_share is not None:
            return self.short.claimed_share
        return self.claimed_flops / self.dense_flops if self.dense_flops else None

    @property
    def whole_share(self) -> float | None:
        """Estimated fraction of the *whole* dense backward under the policies; None if unknown."""
        if self.short is not None:
            return self.short.whole_share
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
        """Return the table, every name in it, and a line for each site."""
        lines = [str(self)]
        for title, names in (("not covered", self.not_covered), ("never called", self.never_called)):
            lines += [f"{title}:", *(f"  {name}" for name in names)] if names else []
        if self.whole is not None and self.whole.elsewhere:
            lines += ["FLOPs outside of sites, as fractions of the whole backward:"]
            lines += [f"  {share:7.2%}  {name or _OTHERS}" for name, share in self.whole.elsewhere]
        lines += ["notes:", *(f"  {note}" for note in self.notes)] if self.notes else []
        width = max((len(site.name) for site in self.sites), default=0)
        lines += [f"{'site':<{width}}  {'calls':>7}  {'kept':>7}  {'remain':>7}  {'dense FLOPs':>11}"]
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
                f"{self.whole_share:.1%} of the dense FLOPs remain (estimated); "
                f"sites have {self.whole.sites_share:.1%} of the dense FLOPs",
            )
        elif self.short is not None:
            yield "whole backward", f"{self.short.whole_share:.1%} of the dense FLOPs remain (estimated)"
        elif self.num_backwards:
            yield "whole backward", f"not known{f': {self.whole_unknown}' if self.whole_unknown else ''}"
        if self.claimed_share is not None:
            yield (
                "sites' backward",
                f"{self.claimed_share:.1%} of the dense FLOPs remain (estimated); "
                f"{_percent(self.kept_share)} of gradient entries are kept",
            )
        if self.chosen is not None:
            yield "chosen", self.chosen.describe()
        if self.route is not None:
            nodes = f"{self.route.nodes_reached:.1f} of {self.route.num_nodes / self.route.num_backwards:.1f}"
            yield "route", f"gradients reach {nodes} nodes per pass, {_count(len(self.route.parameters), 'parameter')}"
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
_OTHERS = "products without a parameter, such as queries times keys"


def _digits(share: float | None) -> str:
    return "None" if share is None else f"{share:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _name(names: Sequence[str], shares: Mapping[str, float] | None = None) -> str:
    """Return the names with the largest fractions of the whole backward. One name in several layers counts once."""
    together: dict[str, float] = {}
    for name in names:
        known, pattern = {} if shares is None else shares, _NUMBER.sub(".*", name)
        together[pattern] = together.get(pattern, 0.0) + known.get(name, known.get(f"{name}.weight", 0.0))
    largest = sorted(together.items(), key=lambda pair: -pair[1])[:3]
    shown = [f"{name} ({share:.1%})" if share else name for name, share in largest]
    more = len(together) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
