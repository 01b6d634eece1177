"""Ceiling and realised share: the largest speed-up that a policy could give, and how much of it was realised."""

from __future__ import annotations


def ceiling(
    forward_flops: float,
    backward_flops: float,
    claimed_backward_flops: float,
    claimed_forward_flops: float | None = None,
) -> float:
    """Return the largest speed-up of forward plus backward if time were proportional to FLOPs, at least 1 unless the
    policy claims more than dense. With F for the forward, 2F for the backward and a claimed share p of all of it, this
    is 3 / (1 + 2p). The claimed forward includes the FLOPs of the selection itself; None: the dense forward."""
    forward = forward_flops if claimed_forward_flops is None else claimed_forward_flops
    if min(forward_flops, backward_flops, claimed_backward_flops, forward) < 0 or forward + claimed_backward_flops == 0:
        raise ValueError("FLOP counts must be positive")
    return (forward_flops + backward_flops) / (forward + claimed_backward_flops)


def realised_share(dense_seconds: float, policy_seconds: float, ceiling_speedup: float) -> float | None:
    """Return the realised share of the theoretical saving in time: 1.0 for all of it, 0.0 for none, negative if the
    policy is slower. None if the policy claims no saving (a ceiling below 1.001)."""
    if ceiling_speedup < 1.001:
        return None
    return (1.0 - policy_seconds / dense_seconds) / (1.0 - 1.0 / ceiling_speedup)
