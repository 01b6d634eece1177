"""Define the rules about policies that change in phases."""

from __future__ import annotations

from sparsebp_cli.policy.rule import SEVERAL, Conditions, Rule


def make_phase_rules(shortens: Conditions) -> tuple[Rule, ...]:
    """Return the rules. ``shortens`` are the kinds whose forward skips token positions or examples."""
    return (
        Rule(
            "a schedule of phases needs {sharding:none}, got {sharding:=}",
            why="Sharding replaces the classes of a model's modules, so the engine cannot attach a policy afterwards.",
            options={"phases": SEVERAL, "sharding": ("fsdp2",)},
            blame="sharding",
        ),
        Rule(
            "{policy} needs trial passes, which a schedule of phases does not support: leave the schedule out, or "
            "give another policy",
            policy={"has_trials": (True,)},
            options={"phases": SEVERAL},
        ),
        Rule(
            "{policy} in a phase after the first needs {mixed_precision:no}, got {mixed_precision:=}",
            why="The policy replaces the model's forward. Autocast wrapped the old forward when the training began, "
            "so the new one would run outside of autocast.",
            policy=shortens,
            options={"is_later_phase": (True,), "mixed_precision": ("bf16",)},
        ),
        Rule(
            "a schedule of phases is not supported with torch.compile: each phase would be compiled again",
            options={"phases": SEVERAL, "wrapped": ("compiled",)},
        ),
    )
