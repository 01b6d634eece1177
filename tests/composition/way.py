"""What goes with what, for that which acts on a whole step and not at sites. The test and the page both read this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsebp_cli.policy import ParameterGradient, Policy, Stateful, make_policy
from sparsebp_cli.policy.discovery import find_policy
from tests.composition.matrix import AT_SITES
from tests.guess import guess_required
from tests.plugin import find_ours

Options = dict[str, Any]
_CHOICE = {"keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0}


@dataclass(frozen=True)
class Way:
    """One policy that is not asked at sites, or one way to carry a step out.

    Args:
        label: Name in the table.
        policy: Its name and options; empty where there is no policy.
        options: Further options of ``attach``.
        form: Without a policy, what it is a form of.
    """

    label: str
    policy: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    form: str = ""

    @property
    def question(self) -> str:
        """What it answers, a policy its kind: no two with the same one are given together."""
        return find_policy(str(self.policy["name"])).kind if self.policy else self.form

    @property
    def made(self) -> Policy | None:
        """The policy, if there is one."""
        options = {key: value for key, value in self.policy.items() if key != "name"}
        return make_policy(self.policy["name"], **options) if self.policy else None

    def declares(self, name: str) -> bool:
        """Whether the policy says of itself that it is or does something that only some kinds know."""
        return bool(getattr(self.made, name, False))


def _tokens(mode: str) -> Way:
    options = {"name": "tokens", "score": "random", "keep": 0.4, "mode": mode}
    return Way(f"tokens (mode: {mode})", options)


# Policies whose own defaults would do nothing in two steps, with options that do something, and ways of other kinds.
_NAMED = (
    _tokens("exact"),
    _tokens("detach"),
    Way("selective-backprop", {"name": "selective-backprop", **_CHOICE}),
    Way("importance", {"name": "importance", "keep": 0.5, "threshold": 0.0}),
    Way("rho", {"name": "rho", "keep": 0.5}, {"reference": "batch"}),
    Way("uniform", {"name": "uniform", **_CHOICE}),
    Way("frozen (freeze)", {"name": "frozen", "freeze": ["*.layers.0.*"]}),
    Way("frozen (turn: layers)", {"name": "frozen", "turn": "layers"}),
    Way("grades", {"name": "grades", "threshold": 1e9, "grace": 0.0}),
    Way("wta-crs", {"name": "wta-crs", "keep": 0.3}),
    Way("sketch", {"name": "sketch", "keep": 0.5}),
    Way("compact", {"name": "compact", "keep": 0.5}),
    Way("velora", {"name": "velora", "group": 4}),
    Way("subnet", {"name": "subnet", "keep": 0.3, "by": "random"}),
)


def _make_others() -> Iterator[Way]:
    """Yield a way of each policy that nobody named and that is not asked at sites, with the options it requires."""
    named = {way.policy["name"] for way in _NAMED}
    for name, found in find_ours().items():
        if found.kind not in AT_SITES and name not in named:
            yield Way(name, {"name": name, **guess_required(found.policy_class)})


WAYS = (
    *_NAMED,
    *_make_others(),
    Way("update: eager", options={"update": "eager"}, form="update"),
    Way("segments: 2", options={"segments": 2}, form="segments"),
)

_REENTRANT = (
    "a policy cannot freeze parameters under reentrant checkpointing (at 'model'), which runs the backward of every "
    "layer: enable checkpointing with use_reentrant=False"
)
_DROPPED = (
    "{name} does not support reentrant checkpointing (at 'model'), which runs the backward of every layer: enable "
    "checkpointing with use_reentrant=False"
)
_QUANTIZED = (
    "{name} with quantised linear layers (at 'base_model.model.model.layers.0.self_attn.q_proj.base_layer') is not "
    "supported: quantised weights cannot be trained in part"
)
_PARTS = (
    "parts of weights cannot be trained with reentrant checkpointing (at 'model'): enable checkpointing with "
    "use_reentrant=False"
)
_CHECKPOINTED = (
    "segments do not support activation checkpointing (at 'model') in the same model: switch checkpointing off, "
    "since segments also recompute layers"
)


def _class_of(way: Way) -> str:
    return type(way.made).__name__ if way.made else ""


def find_refusal(way: Way, composition: str, wrapped: str = "after") -> str:
    """Return the one line that is raised; empty where the two go together.

    Args:
        way: One of :data:`WAYS`.
        composition: A way of training of the other table.
        wrapped: ``before`` attaching or ``after`` it: when DDP wraps the model.
    """
    if composition == "DDP" and isinstance(way.made, Stateful) and not way.made.is_identical:
        text = "keeps a state from what it observes: it works in one process, got several (DDP or FSDP)"
        return f"{_class_of(way)} {text}"
    if way.question == "ParameterSelector" and composition == "DDP":
        if "turn" in way.policy:
            return (
                f"{_class_of(way)} with a set of trained parameters that changes works in one process, got several "
                "(DDP or FSDP)"
            )
        if wrapped == "before":
            return f"{_class_of(way)} got a model in DDP: call attach before you wrap the model in DDP"
    return {
        ("PartSelector", "reentrant checkpointing"): _PARTS,
        ("PartSelector", "QLoRA"): _QUANTIZED.format(name=_class_of(way)),
        ("ParameterSelector", "reentrant checkpointing"): _REENTRANT,
        ("BlockDropper", "reentrant checkpointing"): _DROPPED.format(name=_class_of(way)),
        ("segments", "checkpointing"): _CHECKPOINTED,
        ("segments", "reentrant checkpointing"): _CHECKPOINTED,
        ("update", "DDP"): "update='eager' works in one process, got several (DDP or FSDP)",
    }.get((way.question, composition), "")


def _find_skipping_refusal(first: Way, second: Way) -> str:
    if second.question == "segments":
        return f"{_class_of(first)} with segments=2 is not supported: segments first run all blocks, without gradients"
    return f"{_class_of(first)} and {_class_of(second)} in one forward is not supported: give only one of them"


def _find_eager_refusal(way: Way) -> str:
    if not isinstance(way.made, Stateful) or ParameterGradient not in way.made.observes:
        return ""
    does = "observes gradients of parameters, which update='eager' frees during the backward"
    return f"{_class_of(way)} {does}; use update='deferred'"


def _find_part_refusal(other: Way, way: Way, second: Way) -> str:
    name = _class_of(way)
    if other.policy:
        names = [_class_of(other), name] if second is way else [name, _class_of(other)]
        beside = f"{' and '.join(names)} in one training is not supported: give only one of them"
        return "" if other.question == "ExampleSelector" else beside
    return {
        "update": f"{name} needs update='deferred', got 'eager': SparseBP writes the parts into the "
        "weights only after a whole step",
        "segments": f"{name} with segments=2 is not supported: segments support whole parameters, "
        "but not parts of weights",
    }[other.question]


def _find_weighing_refusal(first: Way, second: Way) -> str:
    if "TokenSelector" in (first.question, second.question):
        return f"{_class_of(first)} and {_class_of(second)} in one forward is not supported: give only one of them"
    if second.question == "segments":
        policy = _class_of(first)
        return f"{policy} with segments=2 is not supported: it weights the losses of examples outside of the model"
    return ""


def find_pair_refusal(first: Way, second: Way) -> str:
    """Return the one line that is raised; empty where the two go together.

    Args:
        first: One of :data:`WAYS`.
        second: Another one of :data:`WAYS`.
    """
    if (first.declares("weighs") or second.declares("weighs")) and (refusal := _find_weighing_refusal(first, second)):
        return refusal
    if "PartSelector" in (first.question, second.question):
        return _find_part_refusal(*sorted((first, second), key=lambda way: way.question == "PartSelector"), second)
    return _find_other_refusal(first, second)


def _find_other_refusal(first: Way, second: Way) -> str:
    questions = {first.question, second.question}
    skips = first.declares("skips_forward") or second.declares("skips_forward")
    if skips and questions & {"TokenSelector", "BatchPacker", "segments"}:
        return _find_skipping_refusal(first, second)
    if "segments" in questions and questions & {"TokenSelector", "BatchPacker"}:
        return {
            "TokenSelector": f"{_class_of(first)} with segments=2 is not supported: it runs layers only for some "
            "positions",
            "BatchPacker": f"{_class_of(first)} with segments=2 is not supported: it rearranges the batch inside the "
            "forward",
        }[first.question]
    if "update" in questions and (refusal := _find_eager_refusal(first) or _find_eager_refusal(second)):
        return refusal
    if "InputSaver" in questions and questions & {"TokenSelector", "BatchPacker", "GradientSelector"}:
        shown = " and ".join(map(_class_of, (first, second)))
        both = "change the weight gradients of the same linear layers"
        return f"{shown} " + (
            f"both {both}: give one of them, or give each its own layers by where or layers"
            if "GradientSelector" in questions
            else "in one forward is not supported: give only one of them"
        )
    if "BatchPacker" in questions and questions & {"TokenSelector", "ExampleSelector", "GradientSelector"}:
        return _find_packing_refusal(first, second)
    return ""


def _find_packing_refusal(first: Way, second: Way) -> str:
    other = first if second.question == "BatchPacker" else second
    both = f"{_class_of(first)} and {_class_of(second)} in one forward"
    if other.question != "TokenSelector":
        return f"{both} is not supported: give only one of them"
    if other.policy["mode"] == "exact":
        return ""
    return f"{both} need mode: exact: set this mode, or give only one of them"
