"""The largest speed-up that a policy could give, and the share of it that was realised. Pure arithmetic."""

from __future__ import annotations


def ceiling(
    forward_flops: float,
    backward_flops: float,
    claimed_backward_flops: float,
    claimed_forward_flops: float | None = None,
) -> float:
    """Return the largest speed-up of forward plus backward if time were proportional to FLOPs.

    With F for the forward, 2F for the backward and a share p claimed of all of it, this is 3 / (1 + 2p).

    Args:
        forward_flops: Of one dense forward pass.
        backward_flops: Of one dense backward pass.
        claimed_backward_flops: What the policy claims to leave of the backward pass.
        claimed_forward_flops: What it claims to leave of the forward, with what it computes to choose; None: all.

    Returns:
        Dense over claimed, at least 1 for a policy that claims no more than dense.

    Raises:
        ValueError: A count is negative, or there is no work at all.
    """
    forward = forward_flops if claimed_forward_flops is None else claimed_forward_flops
    if min(forward_flops, backward_flops, claimed_backward_flops, forward) < 0 or forward + claimed_backward_flops == 0:
        raise ValueError("FLOP counts must be positive")
    return (forward_flops + backward_flops) / (forward + claimed_backward_flops)


def realised_share(dense_seconds: float, policy_seconds: float, ceiling_speedup: float) -> float | None:
    """Return which share of the theoretical saving in time was realised.

    Args:
        dense_seconds: Forward plus backward, dense.
        policy_seconds: The same on the same batch with the policy.
        ceiling_speedup: See :func:`ceiling`.

    Returns:
        1.0 when the whole saving was realised, 0.0 when nothing, negative when it became slower; None when the
        policy claims no saving (a ceiling under 1.001).
    """
    if ceiling_speedup < 1.001:
        return None
    return (1.0 - policy_seconds / dense_seconds) / (1.0 - 1.0 / ceiling_speedup)
