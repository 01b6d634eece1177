"""The table: every combination that is refused although each part of it is right by itself, and why.

A row is data. It speaks of the facts that a policy declares by its contract (its kind, whether its answer changes) and
of the options beside it, never of a policy by name. What no row refuses works; ``tests/composition`` holds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Match(Enum):
    """Conditions on a value that are no list of values."""

    GIVEN = "given"
    ABSENT = "null"
    SEVERAL = "2 or more"
    SAME = "the same"  # of another policy's fact


GIVEN, ABSENT, SEVERAL, SAME = Match
Condition = tuple[object, ...] | Match
Conditions = Mapping[str, Condition]


@dataclass(frozen=True)
class Row:
    """One combination that is refused.

    Args:
        text: The sentence. ``{policy}`` and ``{other}`` are the policies' names, ``{kind}`` the first one's kind;
            ``{sites}`` is an option as the reader wrote it, ``{sites:nodes}`` the same with another value, and
            ``{sites:=}`` the value alone.
        why: Why it is not built, for the page; empty where the sentence says it.
        policy: Facts that a policy has.
        other: Facts of another policy beside it, in either order; the later one is ``{policy}``.
        options: Options beside it, with the values that are refused.
        blame: The option at which a recipe is wrong; empty: the policy's name.
    """

    text: str
    why: str = ""
    policy: Conditions = field(default_factory=dict)
    other: Conditions = field(default_factory=dict)
    options: Conditions = field(default_factory=dict)
    blame: str = ""


KINDS = ("GradientSelector", "EdgeRouter", "TokenSelector", "ExampleSelector", "ParameterSelector")
_ROUTER: Conditions = {"kind": ("EdgeRouter",)}
_TOKENS: Conditions = {"kind": ("TokenSelector",)}
_CHOOSER: Conditions = {"kind": ("TokenSelector", "ExampleSelector")}
_TURNS: Conditions = {"kind": ("ParameterSelector",), "changes": (True,)}
_TURNING = "{policy} with another set of parameters each step"

_POLICY_ROWS = (
    Row(
        "{policy}: its kind is not built; built: " + ", ".join(KINDS),
        policy={"kind": ("",)},
    ),
    Row(
        "{other} and {policy} answer the same question ({kind}) at the same place: give one of them",
        policy={"kind": KINDS},
        other={"kind": SAME},
    ),
    Row(
        "{other} and {policy} in one backward is not built: give one of them",
        why="A router decides about nodes, a gradient selector about what arrives at them.",
        policy=_ROUTER,
        other={"kind": ("GradientSelector",)},
    ),
    Row(
        "{policy} compares with a reference: give its option reference, a model by name or path",
        policy={**_TOKENS, "compares": (True,), "reference": ABSENT},
        options={"loop": ("worker",)},
    ),
    Row(
        "{policy} routes at graph nodes: needs {sites:nodes}, got {sites:=}",
        policy=_ROUTER,
        options={"sites": ("linears", "branches")},
    ),
    Row(
        "{policy} works in one process, got {processes}",
        why="Each process would route its own gradient another way, and their sum would be no gradient of either.",
        policy=_ROUTER,
        options={"processes": SEVERAL},
    ),
    Row(
        "{policy} chooses tokens of a language model: needs {format:text} or completion, got {format:=}",
        policy=_TOKENS,
        options={"format": ("classification",)},
    ),
    Row(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="Branches and nodes hold on to tensors by their place among all positions.",
        policy=_TOKENS,
        options={"sites": ("branches", "nodes")},
    ),
    Row(
        "{policy} with {segments} is not built: it runs layers for some positions in its own way",
        policy=_TOKENS,
        options={"segments": GIVEN},
    ),
    Row(
        "{policy} needs {sharding:none}: weights that are cut into parts are not built for it",
        policy=_CHOOSER,
        options={"sharding": ("fsdp2",)},
    ),
    Row(
        f"{_TURNING} works in one process, got {{processes}}",
        why="DDP waits for the gradient of every parameter that required one when it was made.",
        policy=_TURNS,
        options={"processes": SEVERAL},
    ),
)
_OPTION_ROWS = (
    Row(
        "{sites} works in one process, got {processes}",
        why="Parameters' gradients are cut there before they are summed over the processes.",
        options={"sites": ("nodes",), "processes": SEVERAL, "loop": ("worker",)},
        blame="sites",
    ),
    Row(
        "{execution} at {sites} works in one process, got {processes}",
        why="The walk over the graph in Python runs no hooks, by which DDP sums.",
        options={"execution": ("reference",), "sites": ("nodes",), "processes": SEVERAL, "loop": ("own",)},
        blame="execution",
    ),
    Row(
        "{update} works in one process, got {processes}",
        why="A gradient is summed over the processes when it is no longer there.",
        options={"update": ("eager",), "processes": SEVERAL},
        blame="update",
    ),
    Row(
        "{independent_examples} works in one process, got {processes}",
        why="Each process has its own part of the step's examples, and none may be among the others.",
        options={"independent_examples": GIVEN, "processes": SEVERAL},
        blame="independent_examples",
    ),
    Row(
        "{eager_clip} needs {update:eager}, got {update:=}",
        options={"eager_clip": GIVEN, "update": ("deferred",)},
        blame="eager_clip",
    ),
    Row(
        "{max_grad_norm} needs {update:eager}, got {update:=}; else clip between engine.backward(loss) and "
        "optimizer.step()",
        options={"max_grad_norm": GIVEN, "update": ("deferred",), "loop": ("own",)},
        blame="max_grad_norm",
    ),
    Row(
        "{update} needs {eager_clip:parameter}, previous or exact, by which {max_grad_norm} can clip; or "
        "{max_grad_norm:null}",
        why="The norm of all gradients is not known when the first parameter is updated.",
        options={"update": ("eager",), "eager_clip": ABSENT, "max_grad_norm": GIVEN},
        blame="update",
    ),
    Row(
        "{eager_clip} clips nothing: {max_grad_norm}",
        options={"update": ("eager",), "eager_clip": GIVEN, "max_grad_norm": ABSENT},
        blame="eager_clip",
    ),
    Row(
        "{eager_clip} needs two passes over one graph, {sites} is made for one",
        options={"eager_clip": ("exact",), "sites": ("nodes",)},
        blame="eager_clip",
    ),
    Row(
        "{checkpointing} needs {sites:branches}, got {sites:=}",
        options={"checkpointing": ("sparse",), "sites": ("linears", "nodes")},
        blame="checkpointing",
    ),
    Row(
        "{segments} and {checkpointing} both compute layers again: keep one of them",
        options={"segments": GIVEN, "checkpointing": ("full",)},
        blame="segments",
    ),
    Row(
        "{segments} hides the nodes of its layers: needs {sites:linears} or branches, got {sites:=}",
        options={"segments": GIVEN, "sites": ("nodes",)},
        blame="segments",
    ),
    Row(
        "{segments} is not built with {sharding}; use {sharding:none}",
        why="A part of the weights is gathered for each layer's forward alone.",
        options={"segments": GIVEN, "sharding": ("fsdp2",)},
        blame="segments",
    ),
    Row(
        "{float8} with {sites} is not built; use {sites:linears}",
        why="Rows would be multiplied again on their own, with another scale than in the forward, which was that of "
        "all rows.",
        options={"float8": GIVEN, "sites": ("branches",)},
        blame="float8",
    ),
    Row(
        "{sharding} needs {processes:2} or more, got {processes:=}",
        options={"sharding": ("fsdp2",), "processes": (1,)},
        blame="sharding",
    ),
    Row(
        "{optim} is not built with {sharding}; use {sharding:none}",
        why="Its state is older than the parts, has not the shape of its parameter, or nobody has said that it goes.",
        options={"optim_is_sharded": (False,), "sharding": ("fsdp2",)},
        blame="optim",
    ),
)
# What a recipe cannot ask for: a model that the user wrapped, an optimizer that the user did not give.
_LOOP_ROWS = (
    Row(
        "{checkpointing} is what the user switches on: call model.gradient_checkpointing_enable() before attach",
        options={"checkpointing": ("full",), "loop": ("own", "trainer")},
        blame="checkpointing",
    ),
    Row(
        "{policy} under DDP: attach first, and wrap the model in DDP afterwards",
        why="DDP waits for the gradient of every parameter that required one when it was made.",
        policy={"kind": ("ParameterSelector",)},
        options={"wrapped": ("DDP",)},
    ),
    Row(
        f"{_TURNING} needs attach(optimizer=...): the set changes after the optimizer's step, which must find the "
        "gradients of the one before",
        policy=_TURNS,
        options={"optimizer": ABSENT, "loop": ("own",)},
    ),
    Row(
        f"{_TURNING} and torch.compile: each set would be compiled anew",
        policy=_TURNS,
        options={"wrapped": ("compiled",)},
    ),
    Row(
        "{update} needs optimizer=: the one that updates the model's parameters",
        options={"update": ("eager",), "optimizer": ABSENT, "loop": ("own",)},
        blame="update",
    ),
)
_TRAINER = "policies in a transformers.Trainer are not built with "
_TRAINER_CHOOSER = "{policy} in a transformers.Trainer is not built with "
_READS_LOGITS = "which reads the logits of all positions: let the model compute the loss"
_TRAINER_ROWS = (
    Row(
        "{update} in a transformers.Trainer is not built: it steps the optimizer itself; built: {update:deferred}",
        options={"update": ("eager",), "loop": ("trainer",)},
        blame="update",
    ),
    *(
        Row(f"{_TRAINER}{what}", options={name: (True,)}, blame=name)
        for name, what in {
            "deepspeed": "DeepSpeed: it runs the backward itself",
            "fsdp": "FSDP: it cuts the weights; DDP works",
            "loaded_sharded": "a model that is sharded when it is loaded",
            "parallelism": "parallelism_config: it cuts weights or sequences",
            "model_parallel": "a model on several devices; DDP works",
            "data_parallel": "DataParallel over several devices in one process: start one process a device (DDP)",
            "liger": "use_liger_kernel: its fused loss computes the head's gradient in the forward, where nothing can "
            "be selected",
        }.items()
    ),
    Row(f"{_TRAINER}{{lomo}}: it updates weights inside the backward", options={"lomo": GIVEN}, blame="lomo"),
    *(
        Row(f"{_TRAINER_CHOOSER}{what}", policy=_CHOOSER, options={name: condition})
        for name, condition, what in (
            (
                "fused_head",
                (True,),
                "trl's fused head: the trainer makes the loss out of the log-probabilities of all labels, whatever was "
                "chosen",
            ),
            ("torch_compile", (True,), "torch_compile: what the forward computes differs from step to step"),
            ("label_smoothing_factor", GIVEN, f"{{label_smoothing_factor}}, {_READS_LOGITS}"),
        )
    ),
    Row(
        f"{_TRAINER_CHOOSER}compute_loss_func, {_READS_LOGITS}, or override compute_loss",
        policy={**_CHOOSER, "sees_labels": (False,)},
        options={"compute_loss_func": (True,)},
    ),
)
ROWS = (*_POLICY_ROWS, *_OPTION_ROWS, *_LOOP_ROWS, *_TRAINER_ROWS)
