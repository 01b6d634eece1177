"""Names of policies and optimizers that were once built in: they moved to the package sparsebp-shelf, or were removed.

A policy that is new in that package needs no line here.
"""

from __future__ import annotations

from collections.abc import Collection

from sparsebp_cli.entry_point import tell_home

SHELF = "sparsebp-shelf"
MOVED = frozenset(
    {
        "compact",
        "crs",
        "dither",
        "dropbp",
        "gact",
        "grades",
        "importance",
        "layerdrop",
        "mvue",
        "rho",
        "selective-backprop",
        "sketch",
        "subnet",
        "uniform",
        "vcas",
        "velora",
        "wta-crs",
    }
)
# Policies that were removed after 0.5, each with the reason or what to use in its place.
REMOVED = {
    "autofreeze": "use grades or frozen",
    "backlite": "it was never faster than dense training",
    "dropit": "use gact, wta-crs, velora or compact",
    "evolved-pruning": "use selective-backprop or uniform",
    "evolved-sampling": "use importance or selective-backprop",
    "freezeout": "use grades or frozen",
    "grass": "use frozen",
    "greats": "use rho",
    "infobatch": "use selective-backprop or uniform",
    "lcsb": "use dropbp",
    "meprop": "use topk",
    "mezo": "use dense with smaller batches",
    "pamm": "use gact, wta-crs, velora or compact",
    "partial-forward": "its effect was not shown",
    "pld": "use layerdrop",
    "random-ltd": "its effect was not shown",
    "rollouts": "use uniform",
    "schedule": "give an option a schedule (keep: {from: 1.0, to: 0.25}), or start two runs",  # a key of 0.5
    "sparse-lora": "its effect was not shown",
}
OPTIMIZERS = frozenset({"adalomo", "compact", "fira", "galore", "lora-fa"})
REMOVED_OPTIMIZERS = {"muon": "use adamw; torch.optim.Muon takes matrices only, in your own loop"}
# Public names of `sparsebp_cli.policy` in 0.5, and the modules of sparsebp-shelf that have them.
HOMES = {
    **dict.fromkeys(("BlockDropper", "DropDraw", "ResidualBlock"), "sparsebp_shelf.block"),
    **dict.fromkeys(("ExampleSelector", "Examples", "KeptExamples"), "sparsebp_shelf.example"),
    **dict.fromkeys(("ReadExamples", "WeightedExamples"), "sparsebp_shelf.example"),
    **dict.fromkeys(("LayerOutput", "LayerSampler"), "sparsebp_shelf.layer_sampler"),
    **dict.fromkeys(("InputSaver", "LinearInput", "ReaderGradients"), "sparsebp_shelf.saver"),
    **dict.fromkeys(("SavedDirection", "SavedProjection"), "sparsebp_shelf.saver"),
    **dict.fromkeys(("SavedRows", "SavedSketch"), "sparsebp_shelf.saver"),
    "SavedCodes": "sparsebp_shelf.policies.saved_codes",
    "sample_gradient": "sparsebp_shelf.gradient_sample",
    "sampling": "sparsebp_shelf",
}


def tell_moved(name: str, moved: Collection[str] = MOVED) -> str:
    """Return how to get a policy, or with ``moved=OPTIMIZERS`` an optimizer, that was built in before; else nothing."""
    if name not in moved:
        return ""
    return f"it is {tell_home(SHELF)}"


def tell_shelf(distributions: Collection[str]) -> str:
    """Return where an unknown policy may be found; empty if these distributions include sparsebp-shelf."""
    return "" if SHELF in distributions else f"; more are {tell_home(SHELF)}"
