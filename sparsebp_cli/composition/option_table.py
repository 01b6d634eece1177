"""Define the rules about execution options and optimizers that hold for all policies."""

from __future__ import annotations

from sparsebp_cli.composition.adapter import READERS
from sparsebp_cli.policy.rule import ABSENT, GIVEN, SEVERAL, Rule

OPTIONS = (
    Rule(
        "{attention} computes in 16 bits: it needs {mixed_precision:bf16}, or {dtype:bfloat16}",
        options={
            "attention": ("flash_attention_2", "flash_attention_3"),
            "dtype": ("float32",),
            "mixed_precision": ("no",),
        },
        blame="attention",
    ),
    Rule(
        "{sites} works in one process, got {processes}",
        why="A policy cuts the gradients of parameters there before they are summed over the processes.",
        options={"sites": ("nodes",), "processes": SEVERAL, "loop": ("worker",)},
        blame="sites",
    ),
    Rule(
        "{execution} at {sites} works in one process, got {processes}",
        why="The traversal of the graph in Python runs no hooks, and DDP sums gradients in hooks.",
        options={"execution": ("reference",), "sites": ("nodes",), "processes": SEVERAL, "loop": ("own",)},
        blame="execution",
    ),
    Rule(
        "{update} works in one process, got {processes}",
        why="Gradients are freed before they would be summed over the processes.",
        options={"update": ("eager",), "processes": SEVERAL},
        blame="update",
    ),
    Rule(
        "{eager_clip} needs {update:eager}, got {update:=}",
        options={"eager_clip": GIVEN, "update": ("deferred",)},
        blame="eager_clip",
    ),
    Rule(
        "{max_grad_norm} needs {update:eager}, got {update:=}; otherwise clip between engine.backward(loss) and "
        "optimizer.step()",
        options={"max_grad_norm": GIVEN, "update": ("deferred",), "loop": ("own",)},
        blame="max_grad_norm",
    ),
    Rule(
        "{update} needs {eager_clip:parameter}, previous or exact, by which {max_grad_norm} can clip; or "
        "{max_grad_norm:null}",
        why="The norm of all gradients is not known when the first parameter is updated.",
        options={"update": ("eager",), "eager_clip": ABSENT, "max_grad_norm": GIVEN},
        blame="update",
    ),
    Rule(
        "{eager_clip} clips nothing: {max_grad_norm}",
        options={"update": ("eager",), "eager_clip": GIVEN, "max_grad_norm": ABSENT},
        blame="eager_clip",
    ),
    Rule(
        "{eager_clip} needs two passes over one graph, {sites} supports one",
        options={"eager_clip": ("exact",), "sites": ("nodes",)},
        blame="eager_clip",
    ),
    Rule(
        "{segments} and {checkpointing} both recompute layers: keep one of them",
        options={"segments": GIVEN, "checkpointing": ("full",)},
        blame="segments",
    ),
    Rule(
        "{segments} hides the nodes of its layers: needs {sites:linears}, got {sites:=}",
        options={"segments": GIVEN, "sites": ("nodes",)},
        blame="segments",
    ),
    Rule(
        "{segments} is not supported with {sharding}; use {sharding:none}",
        why="Sharded weights are gathered for each layer's forward only.",
        options={"segments": GIVEN, "sharding": ("fsdp2",)},
        blame="segments",
    ),
    Rule(
        "{quantization} freezes the weights: train model.lora, model.peft or model.adapter, or leave it out",
        options={"quantization": GIVEN, "lora": ABSENT},
        blame="quantization",
    ),
    *(
        Rule(
            "{peft} with {quantization} is not supported: this method reads the weights as plain numbers; use "
            "model.lora, or another type",
            options={"peft": types, "quantization": (quantization,)},
            blame="peft",
        )
        for quantization, types in READERS.items()
    ),
    Rule(
        "{quantization} with {float8} is not supported: give one of them",
        options={"quantization": GIVEN, "float8": GIVEN},
        blame="quantization",
    ),
    Rule(
        "{quantization} is not supported with torch.compile",
        why="The forward of a quantised linear is the library's own function, which a compiled graph cannot contain.",
        options={"quantization": GIVEN, "wrapped": ("compiled",)},
        blame="quantization",
    ),
    Rule(
        "{quantization} is not supported with {sharding}; use {sharding:none}",
        why="A sharded weight is gathered as numbers, and its scales lie beside it.",
        options={"quantization": GIVEN, "sharding": ("fsdp2",)},
        blame="quantization",
    ),
    Rule(
        "{sharding} needs {processes:2} or more, got {processes:=}",
        options={"sharding": ("fsdp2",), "processes": (1,)},
        blame="sharding",
    ),
    Rule(
        "{optim} is not supported with {sharding}; use {sharding:none}",
        why="Its state exists before the weights are sharded, does not have the shape of its parameter, or the "
        "optimizer does not declare that it can be sharded.",
        options={"optim_is_sharded": (False,), "sharding": ("fsdp2",)},
        blame="optim",
    ),
    Rule(
        "{optim} updates the second factor of each low-rank adapter: needs model.lora, got null",
        options={"optim_of_adapters": (True,), "lora": ABSENT},
        blame="optim",
    ),
    Rule(
        "{optim} needs the initial first factor (lora_A) of each adapter: give a policy that freezes *lora_A*, a "
        "ParameterSelector",
        options={"optim_of_adapters": (True,), "chooses_parameters": (False,)},
        blame="optim",
    ),
    Rule(
        "{optim} keeps moments in the projection of an input saver: give a policy that projects features, and set its "
        "option interval",
        options={"optim_of_projections": (True,), "keeps_projections": (False,)},
        blame="optim",
    ),
)
