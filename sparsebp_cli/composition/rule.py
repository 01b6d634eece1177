"""A rule of the table of combinations: what it refuses, and the conditions that several rules share.

A rule is data. It refers to facts that a policy declares by its contract (its kind, whether its selection changes) and
to options, never to a policy by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Match(Enum):
    """Conditions on a value other than a list of values."""

    GIVEN = "given"
    ABSENT = "null"
    SEVERAL = "2 or more"
    SAME = "the same"  # as the other policy's fact


GIVEN, ABSENT, SEVERAL, SAME = Match
Condition = tuple[object, ...] | Match
Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class Rule:
    """One combination that is refused."""

    # {policy} and {other} are the policies' names, {kind} the first one's kind; {sites} is an option in the reader's
    # notation, {sites:nodes} the same with another value, {sites:=} the value alone
    text: str
    why: str = ""  # why it is not supported, for the documentation; empty if the text says it
    policy: Conditions = field(default_factory=dict)  # facts of a policy
    # facts of another policy, in either order; the later one is {policy}
    other: Conditions = field(default_factory=dict)
    options: Conditions = field(default_factory=dict)  # options with the values that are refused
    blame: str = ""  # the option at which a recipe is wrong; empty: the policy's name


KINDS = (
    "GradientSelector",
    "EdgeRouter",
    "TokenSelector",
    "ExampleSelector",
    "EpochSelector",
    "ParameterSelector",
    "BatchPacker",
    "BlockDropper",
    "InputSaver",
    "GradientEstimator",
    "TokenRouter",
    "PartSelector",
    "TileSelector",
)
INFORMED: Conditions = {"kind": ("GradientSelector",), "informed": (True,)}
ROUTER: Conditions = {"kind": ("EdgeRouter",)}
TOKENS: Conditions = {"kind": ("TokenSelector",)}
CHOOSER: Conditions = {"kind": ("TokenSelector", "ExampleSelector")}
WEIGHING: Conditions = {"kind": ("ExampleSelector",), "weighs": (True,)}  # returns weights of examples
VALIDATING: Conditions = {"kind": ("ExampleSelector",), "validates": (True,)}  # compares gradients
EPOCHS: Conditions = {"kind": ("EpochSelector",)}
PACKER: Conditions = {"kind": ("BatchPacker",)}
DROPPER: Conditions = {"kind": ("BlockDropper",)}
SKIPPER: Conditions = {**DROPPER, "skips": (True,)}  # leaves blocks out of the forward, too
SAVER: Conditions = {"kind": ("InputSaver",)}
ESTIMATOR: Conditions = {"kind": ("GradientEstimator",)}
PARTS: Conditions = {"kind": ("PartSelector",)}
TILES: Conditions = {"kind": ("TileSelector",)}
LAYERS: Conditions = {"kind": ("TokenRouter",)}
SHORTENS: Conditions = {"kind": ("TokenSelector", "ExampleSelector", "BatchPacker")}
TURNS: Conditions = {"kind": ("ParameterSelector",), "changes": (True,)}
TURNING = "{policy} with another set of parameters each step"
