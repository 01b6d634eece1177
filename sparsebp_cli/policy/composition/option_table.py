"""Define the rules about execution options and optimizers that hold for all policies."""

from __future__ import annotations

from sparsebp_cli.policy.composition.adapter import READERS
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
        why="At nodes, a policy cuts the gradients of parameters before the processes sum them.",
        options={"sites": ("nodes",), "processes": SEVERAL, "loop": ("worker",)},
        blame="sites",
    ),
    Rule(
        "{execution} at {sites} works in one process, got {processes}",
        why="SparseBP then traverses the graph in Python, without the hooks in which DDP sums gradients.",
        options={"execution": ("reference",), "sites": ("nodes",), "processes": SEVERAL, "loop": ("own",)},
        blame="execution",
    ),
    Rule(
        "{update} works in one process, got {processes}",
        why="The engine frees each gradient before the processes could sum it.",
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
        "{update} with {max_grad_norm} needs {eager_clip:parameter}, previous or exact; {max_grad_norm:null} turns "
        "clipping off",
        why="The norm of all gradients is not known when the first parameter is updated.",
        options={"update": ("eager",), "eager_clip": ABSENT, "max_grad_norm": GIVEN},
        blame="update",
    ),
    Rule(
        "{eager_clip} has no effect with {max_grad_norm}: give a number, or leave eager_clip out",
        options={"update": ("eager",), "eager_clip": GIVEN, "max_grad_norm": ABSENT},
        blame="eager_clip",
    ),
    Rule(
        "{eager_clip} needs two backward passes over one graph, but {sites} supports only one",
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
        why="FSDP2 gathers sharded weights only for the forward of each layer.",
        options={"segments": GIVEN, "sharding": ("fsdp2",)},
        blame="segments",
    ),
    Rule(
        "{quantization} freezes the weights: also give model.lora, model.peft or model.adapter, or leave quantization "
        "out",
        options={"quantization": GIVEN, "lora": ABSENT},
        blame="quantization",
    ),
    *(
        Rule(
            "{peft} with {quantization} is not supported: this method cannot read quantised weights; use model.lora, "
            "or another type of model.peft",
            options={"peft": types, "quantization": (quantization,)},
            blame="peft",
        )
        for quantization, types in READERS.items()
    ),
    Rule(
        "{quantization} with {float8} is not supported: give only one of them",
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
        why="The optimizer creates its state before the weights are sharded, its state does not have the shape of the "
        "parameter, or it does not declare that it can be sharded.",
        options={"optim_is_sharded": (False,), "sharding": ("fsdp2",)},
        blame="optim",
    ),
    Rule(
        "{optim} trains the second factor (lora_B) of low-rank adapters: it needs model.lora, got null",
        options={"optim_of_adapters": (True,), "lora": ABSENT},
        blame="optim",
    ),
    Rule(
        "{optim} needs the initial first factor (lora_A) of each adapter: also give the policy frozen with freeze: "
        "['*lora_A*']",
        options={"optim_of_adapters": (True,), "chooses_parameters": (False,)},
        blame="optim",
    ),
    Rule(
        "{optim} keeps moments of projected gradients: also give a policy that projects features, and set its option "
        "interval",
        options={"optim_of_projections": (True,), "keeps_projections": (False,)},
        blame="optim",
    ),
)
