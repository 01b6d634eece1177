"""Policies and optimizers that were built in once, and are on the shelf now, a package of the same version.

Names alone: what is known of them is known of a policy of any package. A policy that is new on the shelf needs no line
here.
"""

from __future__ import annotations

from collections.abc import Collection

SHELF = "sparsebp-shelf"
_INSTALL = f"pip install {SHELF}, or plugins/{SHELF} of a checkout"
MOVED = frozenset(
    {
        "autofreeze",
        "backlite",
        "compact",
        "crs",
        "dither",
        "dropbp",
        "dropit",
        "evolved-pruning",
        "evolved-sampling",
        "freezeout",
        "gact",
        "grades",
        "grass",
        "greats",
        "importance",
        "infobatch",
        "layerdrop",
        "lcsb",
        "meprop",
        "mezo",
        "mvue",
        "pamm",
        "pld",
        "random-ltd",
        "rho",
        "rollouts",
        "selective-backprop",
        "sketch",
        "subnet",
        "vcas",
        "velora",
        "wta-crs",
    }
)
OPTIMIZERS = frozenset({"adalomo", "compact", "fira", "galore", "lora-fa", "muon"})


def tell_home(name: str, moved: Collection[str] = MOVED) -> str:
    """Return how to get a policy that is not installed; empty if it was never built in.

    Args:
        name: Name of a policy, as a recipe has it.
        moved: Names that were built in, ``OPTIMIZERS`` for an optimizer.

    Returns:
        The end of a sentence.
    """
    if name not in moved:
        return ""
    return f"it is in the package {SHELF}: {_INSTALL}"


def tell_shelf(distributions: Collection[str]) -> str:
    """Return where an unknown policy may be; empty if the shelf is installed, where it would be known.

    Args:
        distributions: Names of those that have policies.

    Returns:
        A further part of a sentence.
    """
    return "" if SHELF in distributions else f"; more are in the package {SHELF}: {_INSTALL}"
