"""The proof by module: what each executed and stored, beside what was claimed for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sparsebp_cli.backward.core.report import SiteReport

if TYPE_CHECKING:
    from sparsebp_cli.backward.proof.proof import Proof

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
        proof: Of one batch.

    Returns:
        By the module's name; empty for the model itself and what belongs to no module.
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
    """Return what a policy claims to leave of the dense backward FLOPs of some sites; None when they have none."""
    claims = [(site.claimed_flops, site.arrived_flops) for site in sites]
    dense = sum(dense for _, dense in claims)
    return sum(claimed for claimed, _ in claims) / dense if dense else None


def kept_share(sites: Iterable[SiteReport]) -> float | None:
    """Return the share of gradient entries that was kept at some sites; None when no gradient arrived."""
    counts = [(site.kept_share * site.entries, site.entries) for site in sites if site.kept_share is not None]
    entries = sum(entries for _, entries in counts)
    return sum(kept for kept, _ in counts) / entries if entries else None
