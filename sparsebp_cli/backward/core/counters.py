"""The engine's counters outside of sites, and the report of all counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparsebp_cli.backward.core.decision import SiteCounters
from sparsebp_cli.backward.core.extension import SiteAdapter
from sparsebp_cli.backward.core.report import ChosenCounter, Report, Route, Short, Whole
from sparsebp_cli.backward.observe.dense_graph import CallShape
from sparsebp_cli.backward.observe.loss_graph import Products

CountDense = Callable[[CallShape], Products | None]
_UNTRACED = "a policy skipped work in the forward, so the FLOPs of the dense backward could not be counted"


@dataclass(frozen=True)
class ShortPass:
    """A pass in which a policy skipped work before the backward: the model's call, None if unknown, and the estimated
    FLOPs that remained of its backward, in total and at sites.
    """

    call: CallShape | None
    left: float
    left_at_sites: float


@dataclass
class Counter:
    """Totals of a training or a probe."""

    sites: SiteCounters
    num_backwards: int = 0
    route: Route | None = None
    untaken_route: Route | None = None
    chosen: ChosenCounter = field(default_factory=ChosenCounter)
    products: Products = field(default_factory=Products)
    products_at_sites: float = 0.0  # FLOPs at sites in the passes whose graph was read into `products`
    num_read: int = 0  # passes whose graph was read
    short: list[ShortPass] = field(default_factory=list)  # passes in which a policy skipped work before the backward

    def report(self, adapter: SiteAdapter, notes: Mapping[str, str], count: CountDense, *, freezes: bool) -> Report:
        """Return all counts as plain numbers; synchronises with the device. ``count`` returns the dense products of a
        call. ``freezes``: whether a policy chooses which parameters are trained.
        """
        kept, entries = self.sites.kept()
        whole = self._whole()
        short = None if self.products.unknown else self._find_short(adapter, count, freezes=freezes)
        unknown = self.products.unknown | ({_UNTRACED} if self.short and short is None else set())
        known = {*adapter.not_covered, *adapter.excluded}
        elsewhere = () if whole is None else (name for name, _ in whole.elsewhere)
        parameters = (name for name in elsewhere if name and name.rpartition(".")[0] not in known)
        return Report(
            sites=tuple(counter.report(name) for name, counter in self.sites.by_name.items()),
            not_covered=(*adapter.not_covered, *parameters),
            excluded=adapter.excluded,
            kept_share=kept / entries if entries else None,
            num_backwards=self.num_backwards,
            notes=tuple(notes.values()),
            route=self.route,
            chosen=self.chosen.total,
            whole=whole,
            whole_unknown=", ".join(sorted(unknown)),
            short=short,
        )

    def _find_short(self, adapter: SiteAdapter, count: CountDense, *, freezes: bool) -> Short | None:
        dense = dense_at_sites = left = left_at_sites = 0.0
        for each in self.short:
            products = None if each.call is None else count(each.call)
            if products is None or products.unknown or not products.total:
                return None
            dense, left, left_at_sites = dense + products.total, left + each.left, left_at_sites + each.left_at_sites
            parts = products.by_parameter.items()
            dense_at_sites += sum(flops for name, flops in parts if name.rpartition(".")[0] in adapter.names)
        if not dense:
            return None
        at_sites_share = left_at_sites / dense_at_sites if freezes and dense_at_sites else None
        return Short(left / dense, at_sites_share, len(self.short))

    def _whole(self) -> Whole | None:
        products = self.products
        if products.unknown or not products.total or not self.products_at_sites:
            return None
        ordered = sorted(products.by_parameter.items(), key=lambda pair: -pair[1])
        shares = ((name, flops / products.total) for name, flops in ordered)
        return Whole(self.products_at_sites / products.total, tuple(shares), self.num_read)

    def add_route(self, route: Route) -> None:
        """Add the route of one backward."""
        self.route = route if self.route is None else self.route + route
        self.untaken_route = route if self.untaken_route is None else self.untaken_route + route

    def take_route(self) -> Route | None:
        """Return the sum of the routes since the last call; None if there were none."""
        route, self.untaken_route = self.untaken_route, None
        return route
