"""Counted FLOPs and saved bytes of a backward pass, by module, compared with the policy's estimate.

The dense pass and the policy's pass are counted on one batch. Their common work (the repeated forward of checkpointed
layers, layers without a site) cancels out, so the comparison judges only the saving.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from sparsebp_cli.backward.core.report import Report, SiteReport
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.linear.function import weight_of
from sparsebp_cli.backward.linear.site import find_linears
from sparsebp_cli.backward.observe.flops import FlopCount, PassEstimate
from sparsebp_cli.backward.observe.saved_bytes import SavedBytes


@dataclass(frozen=True)
class PassCount:
    """FLOPs and saved bytes of one forward and backward pass.

    Args:
        flops: FLOPs of forward and backward, by module.
        saved: Bytes that the forward saved for the backward, by module.
    """

    flops: FlopCount
    saved: SavedBytes

    @property
    def backward_flops(self) -> Counter[str]:
        """FLOPs executed inside the backward, by module, including repeated forwards."""
        return self.flops.backward + self.flops.recomputed


@dataclass(frozen=True)
class Overclaim:
    """A backward whose counted FLOPs exceed the policy's estimate. Fractions refer to the sites' dense backward FLOPs.

    Args:
        claimed_share: The estimated fraction.
        executed_share: The counted fraction, which is larger.
        sites: Sites whose counted FLOPs exceed their estimate, the largest excess first; empty if no single site does.
    """

    claimed_share: float
    executed_share: float
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """FLOPs and saved bytes of one batch, dense and with the policy.

    Args:
        dense: The dense pass.
        policy: The pass with the policy.
        report: The engine's report of the pass with the policy alone.
        row_flops: 2 D O of each linear, by name: the FLOPs of one row of one product.
        owners: The innermost module of each site, by the site's name.
        checkpointed: Modules of layers that the dense pass ran again inside the backward.
        claims: Estimates for the dense pass by policies that do not decide at sites. If there are any, fractions refer
            to the whole dense backward instead of the sites'.
    """

    dense: PassCount
    policy: PassCount
    report: Report
    row_flops: Mapping[str, float]
    owners: Mapping[str, str]
    checkpointed: frozenset[str] = frozenset()
    claims: tuple[PassEstimate, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dense: PassCount,
        policy: PassCount,
        report: Report,
        claims: Iterable[PassEstimate] = (),
    ) -> Proof:
        """Return the proof of two counted passes of a model.

        Args:
            model: The model that ran them.
            dense: The dense pass.
            policy: The pass with the policy.
            report: The engine's report of the pass with the policy alone.
            claims: Estimates for the dense pass by policies that do not decide at sites.

        Returns:
            The proof.
        """
        linears, layers = find_linears(model).covered, LayerNumbers(model)
        row_flops = {name: 2.0 * prod(form.sizes(weight_of(module))) for name, module, form in linears}
        again = {layers.part_of(name) for name in dense.flops.recomputed}
        checkpointed = frozenset(name for name in dense.flops.forward if layers.part_of(name) in again)
        owners = {site.name: layers.owner_of(site.name) for site in report.sites}
        # A router's lookahead runs through the whole graph, so estimates of other policies do not apply.
        held = () if report.route is not None else tuple(claims)
        return cls(dense, policy, report, row_flops, owners, checkpointed, held)

    @property
    def claimed_flops(self) -> float | None:
        """Estimated backward FLOPs under all policies together; None without estimates."""
        if not self._base:
            return None
        return sum(self.left_flops.values()) - self.report.arrived_flops + self.report.claimed_flops

    @property
    def claimed_forward_flops(self) -> float:
        """Estimated forward FLOPs under all policies together, plus FLOPs of scoring forwards."""
        left = sum(
            flops * prod(claim.forward.get(name, 1.0) for claim in self.claims)
            for name, flops in self.dense.flops.forward.items()
        )
        return left + (0 if self.report.chosen is None else self.report.chosen.scoring_flops)

    @property
    def claimed_share(self) -> float | None:
        """Estimated fraction of the sites' dense backward FLOPs under the policy; None if the sites have none."""
        if not self.claims:
            return claimed_share(self.report.sites)
        return None if self.claimed_flops is None else self.claimed_flops / self._base

    @property
    def executed_share(self) -> float | None:
        """Counted fraction of the sites' dense backward FLOPs; None if the sites have none."""
        saved = self.dense.backward_flops.total() - self.policy.backward_flops.total()
        return 1.0 - saved / self._base if self._base else None

    @property
    def excess_share(self) -> float | None:
        """Counted FLOPs beyond the estimate with its counts rounded up, as a fraction of the sites' dense backward
        FLOPs; 0 without an excess.

        The larger of the excess overall and the sum of excesses at single sites.
        """
        if not self._base:
            return None
        executed, before, dense = self.policy.backward_flops.total(), self._before(), self.report.arrived_flops
        allowed = sum(site.allowed_flops for site in self.report.sites)
        over_all = _excess(executed, sum(before.values()), dense, allowed)
        return max(over_all, sum(self._excess_by_site().values())) / self._base

    @property
    def _base(self) -> float:
        """The FLOPs to which fractions refer."""
        return float(self.dense.backward_flops.total()) if self.claims else self.report.arrived_flops

    @property
    def rows_share(self) -> float | None:
        """Rows that linears multiplied for dgrad and wgrad, over rows of the dense backward; None without linears."""
        rows = [sum(self.rows(name, count) or 0.0 for name in self.row_flops) for count in (self.policy, self.dense)]
        return rows[0] / rows[1] if rows[1] else None

    @property
    def left_flops(self) -> dict[str, float]:
        """Estimated backward FLOPs by module, under the policies that do not decide at sites."""
        shares = [(claim.backward, claim.recomputed) for claim in self.claims]
        return _times(self.dense.flops.backward, self.dense.flops.recomputed, shares)

    def rows(self, name: str, count: PassCount) -> float | None:
        """Return the rows that a linear, by name, multiplied for dgrad and wgrad together; None for another module."""
        row = self.row_flops.get(name)
        return count.flops.backward[name] / row if row else None

    def table(self) -> dict[str, list[float | None]]:
        """Return the proof by module, one row of ``COLUMNS`` each; see :func:`tabulate`."""
        return tabulate(self)

    def find_overclaim(self) -> Overclaim | None:
        """Compare counted FLOPs with the estimate, overall and at every site that is named like a module.

        Returns:
            The excess; None if there is none.
        """
        excess = self._excess_by_site()
        if not self.excess_share:
            return None
        sites = tuple(sorted((name for name in excess if excess[name] > 0), key=lambda name: -excess[name]))
        assert self.claimed_share is not None
        assert self.executed_share is not None
        return Overclaim(self.claimed_share, self.executed_share, sites)

    def _excess_by_site(self) -> dict[str, float]:
        executed, before = self.policy.backward_flops, self._before()
        return {
            site.name: _excess(
                _inside(site.name, executed), _inside(site.name, before), site.arrived_flops, site.allowed_flops
            )
            for site in self.report.sites
            if site.arrived_flops and _inside(site.name, before)
        }

    def _before(self) -> dict[str, float]:
        """Dense backward FLOPs by module, with the whole repeated forward of checkpointed layers.

        PyTorch ends such a forward once the last needed tensor exists, which depends on the tensors that linears save.
        """
        again = {
            name: max(self.dense.flops.recomputed[name], self.dense.flops.forward[name]) for name in self.checkpointed
        }
        allowed = [
            (claim.allowed_backward or claim.backward, claim.allowed_recomputed or claim.recomputed)
            for claim in self.claims
        ]
        return _times(self.dense.flops.backward, self.dense.flops.recomputed | Counter(again), allowed)


def _excess(executed: float, before: float, dense: float, allowed: float) -> float:
    """Return the FLOPs executed beyond the dense pass minus the estimated saving. Counts are exact integers."""
    beyond = executed - (before - dense + allowed)
    return beyond if beyond > 0.5 + 1e-9 * dense else 0.0  # estimates are sums of floats, so allow for rounding


def _times(
    backward: Mapping[str, int],
    recomputed: Mapping[str, int],
    shares: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """Return the remaining FLOPs by module after applying each policy's fractions of backward and repeated forward."""
    return {
        name: backward.get(name, 0) * prod(of_backward.get(name, 1.0) for of_backward, _ in shares)
        + recomputed.get(name, 0) * prod(of_recomputed.get(name, 1.0) for _, of_recomputed in shares)
        for name in dict.fromkeys([*backward, *recomputed])
    }


def _inside(site: str, count: Mapping[str, float]) -> float:
    return sum(flops for name, flops in count.items() if name == site or name.startswith(f"{site}."))


COLUMNS = (
    "forward_flops",
    "recomputed_flops",
    "backward_flops",
    "dense_backward_flops",
    "saved_bytes",
    "dense_saved_bytes",
    "rows",
    "dense_rows",
    "claimed_share",
    "kept_share",
)


def tabulate(proof: Proof) -> dict[str, list[float | None]]:
    """Return one row of ``COLUMNS`` for each module that computed or saved anything, or has sites.

    Args:
        proof: The counts of one batch.

    Returns:
        Rows by module name; empty for the model itself and work outside of modules.
    """
    counts = (proof.policy.flops.forward, proof.policy.flops.recomputed, proof.policy.flops.backward)
    columns = (*counts, proof.dense.flops.backward, proof.policy.saved.by_module, proof.dense.saved.by_module)
    sites: dict[str, list[SiteReport]] = {}
    for site in proof.report.sites:
        sites.setdefault(proof.owners[site.name], []).append(site)
    names = dict.fromkeys([*sites, *(name for column in columns for name in column)])
    left = proof.left_flops
    return {
        name: [
            *(float(column[name]) for column in columns),
            proof.rows(name, proof.policy),
            proof.rows(name, proof.dense),
            _claimed(proof, name, sites.get(name, []), left),
            kept_share(sites.get(name, [])),
        ]
        for name in names
    }


def _claimed(proof: Proof, name: str, sites: list[SiteReport], left: Mapping[str, float]) -> float | None:
    dense = proof.dense.backward_flops[name]
    if not proof.claims or name not in proof.row_flops or not dense:
        return claimed_share(sites)
    return (left[name] + sum(site.claimed_flops - site.arrived_flops for site in sites)) / dense


def claimed_share(sites: Iterable[SiteReport]) -> float | None:
    """Return the estimated fraction of some sites' dense backward FLOPs under a policy; None if they have none."""
    claims = [(site.claimed_flops, site.arrived_flops) for site in sites]
    dense = sum(dense for _, dense in claims)
    return sum(claimed for claimed, _ in claims) / dense if dense else None


def kept_share(sites: Iterable[SiteReport]) -> float | None:
    """Return the fraction of gradient entries kept at some sites; None if no gradient arrived."""
    counts = [(site.kept_share * site.entries, site.entries) for site in sites if site.kept_share is not None]
    entries = sum(entries for _, entries in counts)
    return sum(kept for kept, _ in counts) / entries if entries else None
