"""The engine's counters: what it counts beside the sites, and the report of everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparsebp_cli.backward.core.decision import SiteCounters
from sparsebp_cli.backward.core.extension import SiteAdapter
from sparsebp_cli.backward.core.report import ChosenCounter, Report, Route, Whole
from sparsebp_cli.backward.observe.loss_graph import Products


@dataclass
class Counter:
    """Totals of a training or a probe."""

    sites: SiteCounters
    num_backwards: int = 0
    route: Route | None = None
    untaken_route: Route | None = None
    chosen: ChosenCounter = field(default_factory=ChosenCounter)
    products: Products = field(default_factory=Products)
    products_at_sites: float = 0.0  # FLOPs at sites, of the passes whose graph was read into `products`
    num_read: int = 0  # passes whose graph was read

    def report(self, adapter: SiteAdapter, notes: Mapping[str, str]) -> Report:
        """Return everything as plain numbers; synchronises with the device."""
        kept, entries = self.sites.kept()
        whole = self._whole()
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
            whole_unknown=", ".join(sorted(self.products.unknown)),
        )

    def going_on(self, following: Counter) -> Counter:
        """Return these totals as the start of those of another engine of the same training, which lists its sites."""
        self.sites.by_name = {**following.sites.by_name, **self.sites.by_name}
        return self

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
        """Return the routes since the last call; None when there were none."""
        route, self.untaken_route = self.untaken_route, None
        return route
