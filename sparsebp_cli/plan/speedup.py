"""Compute the largest speed-up of a policy, and the fraction of it that was reached."""

from __future__ import annotations


def speedup_limit(
    forward_flops: float,
    backward_flops: float,
    claimed_backward_flops: float,
    claimed_forward_flops: float | None = None,
) -> float:
    """Return the largest speed-up of forward plus backward, as if time were proportional to FLOPs. It is at least 1
    unless the policy claims more than dense. With F for the forward, 2F for the backward and a claimed fraction p of
    the backward, it is 3 / (1 + 2p). The claimed forward includes the FLOPs of the selection itself; None means the
    dense forward. Raise ValueError for negative counts, or if the policy claims none."""
    forward = forward_flops if claimed_forward_flops is None else claimed_forward_flops
    if min(forward_flops, backward_flops, claimed_backward_flops, forward) < 0 or forward + claimed_backward_flops == 0:
        raise ValueError("FLOP counts must be positive")
    return (forward_flops + backward_flops) / (forward + claimed_backward_flops)


def reached_share(dense_seconds: float, policy_seconds: float, limit: float) -> float | None:
    """Return the fraction of the theoretical time saving that was reached: 1.0 for all of it, 0.0 for none, negative if
    the policy is slower. None if the policy claims no saving (a limit below 1.001)."""
    if limit < 1.001:
        return None
    return (1.0 - policy_seconds / dense_seconds) / (1.0 - 1.0 / limit)
