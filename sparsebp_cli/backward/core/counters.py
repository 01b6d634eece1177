"""The engine's counters: numbers on the host, and tensors where reading them would synchronise with the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from sparsebp_cli.backward.core.extension import SiteAdapter
from sparsebp_cli.backward.core.report import Chosen, FlopEstimate, Report, Route, SiteReport, Whole
from sparsebp_cli.backward.observe.loss_graph import Products
from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection, Site


@dataclass
class SiteCounter:
    """Totals of one site."""

    layer: int | None = None
    calls: int = 0
    rows: int = 0
    entries: int = 0
    kept: int | Tensor = 0
    dense_flops: float = 0.0
    claimed_flops: float = 0.0
    allowed_flops: float = 0.0
    arrived_flops: float = 0.0

    def report(self, name: str) -> SiteReport:
        """Return the totals as plain numbers."""
        return SiteReport(
            name=name,
            layer=self.layer,
            calls=self.calls,
            rows=self.rows,
            entries=self.entries,
            kept_share=float(self.kept) / self.entries if self.entries else None,
            dense_flops=self.dense_flops,
            claimed_flops=self.claimed_flops,
            allowed_flops=self.allowed_flops,
            arrived_flops=self.arrived_flops,
        )


@dataclass
class ChosenCounter:
    """Total of :class:`Chosen`, and the part of it since it was last taken."""

    total: Chosen | None = None
    untaken: Chosen | None = field(default=None)

    def add(self, chosen: Chosen) -> None:
        """Count one forward."""
        # The first one is added as well, so that the first step after a resume holds as many tensors as any other.
        self.total = (self.total or Chosen()) + chosen
        self.untaken = chosen if self.untaken is None else self.untaken + chosen

    def take(self) -> Chosen | None:
        """Return what was counted since the last call; None if nothing was."""
        chosen, self.untaken = self.untaken, None
        return chosen


@dataclass
class Counter:
    """Totals of all sites, of the last backward, and since the kept share was last taken."""

    sites: dict[str, SiteCounter]
    num_backwards: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # of this backward, by site
    last_dense_flops: float = 0.0
    last_claimed_flops: float = 0.0
    taken_kept: float = 0.0
    taken_entries: int = 0
    route: Route | None = None
    untaken_route: Route | None = None
    chosen: ChosenCounter = field(default_factory=ChosenCounter)
    products: Products = field(default_factory=Products)
    products_at_sites: float = 0.0  # FLOPs at sites, of the passes whose graph was read into `products`
    num_read: int = 0  # passes whose graph was read

    @classmethod
    def of(cls, names: Iterable[str]) -> Counter:
        """Return a counter that lists these sites even if no gradient ever arrives at them."""
        return cls({name: SiteCounter() for name in names})

    def start_backward(self) -> None:
        """Reset the numbers of the last backward."""
        self.calls = {}
        self.last_dense_flops = self.last_claimed_flops = 0.0

    def next_call(self, name: str) -> int:
        """Return the index, from 0, of this gradient among those of the same site in this backward."""
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        return call

    def add(
        self,
        site: Site,
        grad_NO: Tensor,
        claim: FlopEstimate,
        allowed: float,
        selection: Selection | None,
        dense_rows: int | None = None,
    ) -> None:
        """Count one gradient.

        ``allowed`` is the claim with counts rounded up. ``dense_rows`` is the number of rows of the dense backward that
        the gradient stands for; None: its own.
        """
        arrived, dense_flops, num_entries = claim.dense_flops, claim.dense_flops, grad_NO.numel()
        if dense_rows is not None:
            dense_flops = arrived * dense_rows / max(1, grad_NO.shape[0])
            num_entries = dense_rows * grad_NO.shape[1]
        counter = self.sites.setdefault(site.name, SiteCounter())
        counter.layer = site.layer
        counter.calls += 1
        counter.rows += grad_NO.shape[0]
        counter.entries += num_entries
        counter.kept = counter.kept + (grad_NO.numel() if selection is None else selection.num_kept(grad_NO))
        counter.dense_flops += dense_flops
        counter.arrived_flops += arrived
        counter.claimed_flops += claim.claimed_flops
        counter.allowed_flops += allowed
        self.last_dense_flops += claim.dense_flops
        self.last_claimed_flops += claim.claimed_flops

    def kept(self) -> tuple[float, int]:
        """Return kept entries and all entries over all sites; synchronises with the device."""
        return sum(float(s.kept) for s in self.sites.values()), sum(s.entries for s in self.sites.values())

    def report(self, adapter: SiteAdapter, notes: Mapping[str, str]) -> Report:
        """Return everything as plain numbers; synchronises with the device."""
        kept, entries = self.kept()
        whole = self._whole()
        known = {*adapter.not_covered, *adapter.excluded}
        elsewhere = () if whole is None else (name for name, _ in whole.elsewhere)
        parameters = (name for name in elsewhere if name and name.rpartition(".")[0] not in known)
        return Report(
            sites=tuple(counter.report(name) for name, counter in self.sites.items()),
            not_covered=(*adapter.not_covered, *parameters),
            excluded=adapter.excluded,
            kept_share=kept / entries if entries else None,
            num_backwards=self.num_backwards,
            notes=tuple(notes.values()),
            route=self.route,
            chosen=self.chosen.total,
            whole=whole,
            whole_unknown=", ".join(sorted(self.products.unknown)),
        )

    def _whole(self) -> Whole | None:
        products = self.products
        if products.unknown or not products.total or not self.products_at_sites:
            return None
        ordered = sorted(products.by_parameter.items(), key=lambda pair: -pair[1])
        shares = ((name, flops / products.total) for name, flops in ordered)
        return Whole(self.products_at_sites / products.total, tuple(shares), self.num_read)

    def take_kept_share(self) -> float | None:
        """Return the kept share since the last call; None if no gradient arrived since."""
        kept, entries = self.kept()
        new_kept, new_entries = kept - self.taken_kept, entries - self.taken_entries
        self.taken_kept, self.taken_entries = kept, entries
        return new_kept / new_entries if new_entries else None

    def add_route(self, route: Route) -> None:
        """Add the route of one backward."""
        self.route = route if self.route is None else self.route + route
        self.untaken_route = route if self.untaken_route is None else self.untaken_route + route

    def take_route(self) -> Route | None:
        """Return the routes since the last call; None when there were none."""
        route, self.untaken_route = self.untaken_route, None
        return route


def allowed_share(budget: float, selection: Selection | None, grad_NO: Tensor, site: Site, *, pads: bool) -> float:
    """Return the share of a site's work that a policy may execute, with counts rounded up and examples padded.

    ``budget`` is the share that the policy claims to keep, in (0, 1]; the result is at least that. ``pads`` says that
    every example multiplies as many rows as the one that keeps most; reading that count synchronises with the device.
    """
    padded = pad_up(selection, len(grad_NO), site.num_examples) if pads else 0.0
    return max(padded, round_up(budget, selection, grad_NO))


def round_up(budget: float, selection: Selection | None, grad_NO: Tensor) -> float:
    """Return the share of a site's work that a policy may execute without breaking its claim; at least the budget.

    Entries that can only be kept together form a unit: a row (one of each example, where each has as many), a column, a
    block, an entry of each row. A share of n units is at most ``max(1, ceil(budget * n))`` of them, so at most one more
    than the budget. Blocks at the edge of a grid are multiplied whole, so the result may exceed 1. It never exceeds
    what was really kept, unless the budget does.
    """
    num_rows, num_columns = grad_NO.shape
    match selection:
        case Rows():
            kept, most = selection.index_K.numel() / num_rows, budget + selection.num_examples / num_rows
        case Columns():
            kept, most = selection.index_K.numel() / num_columns, budget + 1 / num_columns
        case Elements():
            kept, most = selection.index_K.numel() / grad_NO.numel(), budget + 1 / num_columns
        case Blocks():
            block = prod(selection.block_shape) / grad_NO.numel()
            kept, most = selection.index_K.numel() * block, (budget * prod(selection.grid(grad_NO)) + 1) * block
        case _:
            return budget
    return max(budget, min(kept, most))


def pad_up(selection: Selection | None, num_rows: int, num_examples: int) -> float:
    """Return the share of rows multiplied if every example is padded to the one that keeps most; in [0, 1].

    0 for a selection of anything but rows. Synchronises with the device.
    """
    if not isinstance(selection, Rows) or selection.index_K.numel() == 0:
        return 0.0
    example_K = selection.index_K.div(num_rows // num_examples, rounding_mode="floor")
    return int(example_K.bincount().max()) * num_examples / num_rows
