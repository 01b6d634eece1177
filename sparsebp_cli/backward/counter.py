"""What the engine counts while it works: host numbers, and tensors where reading them would stall a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sparsebp_cli.backward.linear import Needs
from sparsebp_cli.backward.report import Claim, SiteReport
from sparsebp_cli.policy import BackwardShare, Selection


@dataclass
class SiteCounter:
    """Totals of one site."""

    calls: int = 0
    rows: int = 0
    entries: int = 0
    kept: int | Tensor = 0
    dgrad_flops: float = 0.0
    wgrad_flops: float = 0.0

    def report(self, name: str, share: BackwardShare) -> SiteReport:
        """Return the totals as plain numbers.

        Args:
            name: The site's.
            share: What the policy claims.

        Returns:
            The report of this site.
        """
        return SiteReport(
            name=name,
            calls=self.calls,
            rows=self.rows,
            kept_share=float(self.kept) / self.entries if self.entries else None,
            dgrad_flops=self.dgrad_flops,
            wgrad_flops=self.wgrad_flops,
            claimed_dgrad_flops=self.dgrad_flops * share.dgrad,
            claimed_wgrad_flops=self.wgrad_flops * share.wgrad,
        )


@dataclass
class Counter:
    """Totals of all sites, of the last backward, and since the kept share was last taken."""

    sites: dict[str, SiteCounter]
    num_backwards: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # of this backward, by site
    last_dgrad_flops: float = 0.0
    last_wgrad_flops: float = 0.0
    taken_kept: float = 0.0
    taken_entries: int = 0

    def start_backward(self) -> None:
        """Forget the last backward's numbers."""
        self.calls = {}
        self.last_dgrad_flops = self.last_wgrad_flops = 0.0

    def next_call(self, name: str) -> int:
        """Return which gradient of this site this is in this backward, counted from 0.

        Args:
            name: The site's.

        Returns:
            The number.
        """
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        return call

    def add(self, name: str, grad_NO: Tensor, num_inputs: int, needs: Needs, selection: Selection | None) -> None:
        """Count one gradient.

        Args:
            name: The site's.
            grad_NO: The gradient that arrived.
            num_inputs: The layer's input width.
            needs: Which gradients autograd asked for.
            selection: What is kept.
        """
        site, flops = self.sites[name], 2.0 * grad_NO.numel() * num_inputs
        site.calls += 1
        site.rows += grad_NO.shape[0]
        site.entries += grad_NO.numel()
        site.kept = site.kept + (grad_NO.numel() if selection is None else selection.num_kept(grad_NO))
        site.dgrad_flops += flops * needs.dgrad
        site.wgrad_flops += flops * needs.wgrad
        self.last_dgrad_flops += flops * needs.dgrad
        self.last_wgrad_flops += flops * needs.wgrad

    def claim(self, share: BackwardShare) -> Claim:
        """Return the FLOPs of the last backward, dense and claimed.

        Args:
            share: What the policy claims.

        Returns:
            Both counts.
        """
        claimed = self.last_dgrad_flops * share.dgrad + self.last_wgrad_flops * share.wgrad
        return Claim(self.last_dgrad_flops + self.last_wgrad_flops, claimed)

    def kept(self) -> tuple[float, int]:
        """Return kept entries and all entries, over all sites; waits for the device.

        Returns:
            Both counts.
        """
        return sum(float(s.kept) for s in self.sites.values()), sum(s.entries for s in self.sites.values())

    def take_kept_share(self) -> float | None:
        """Return the kept share since the last call.

        Returns:
            The share; None when no gradient arrived since.
        """
        kept, entries = self.kept()
        new_kept, new_entries = kept - self.taken_kept, entries - self.taken_entries
        self.taken_kept, self.taken_entries = kept, entries
        return new_kept / new_entries if new_entries else None
