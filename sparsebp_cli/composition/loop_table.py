"""The rules for a loop of the user's own and for a Trainer, which no recipe can break."""

from __future__ import annotations

from sparsebp_cli.composition.rule import (
    ABSENT,
    CHOOSER,
    DROPPER,
    ESTIMATOR,
    GIVEN,
    LAYERS,
    PACKER,
    PARTS,
    SEVERAL,
    SHORTENS,
    TURNING,
    TURNS,
    Rule,
)

# Combinations that no recipe can contain: a model that the user wrapped, an optimizer that the user did not give.
OWN_LOOP = (
    Rule(
        "{checkpointing} is for recipes: call model.gradient_checkpointing_enable() before attach instead",
        options={"checkpointing": ("full",), "loop": ("own", "trainer")},
        blame="checkpointing",
    ),
    Rule(
        "{policy} under DDP: attach first, and wrap the model in DDP afterwards",
        why="DDP waits for the gradient of every parameter that required one when DDP was created.",
        policy={"kind": ("ParameterSelector",)},
        options={"wrapped": ("DDP",)},
    ),
    Rule(
        f"{TURNING} needs attach(optimizer=...): the set changes after the optimizer's step, which needs the "
        "gradients of the previous set",
        policy=TURNS,
        options={"optimizer": ABSENT, "loop": ("own",)},
    ),
    Rule(
        "{policy} makes trial passes before a step, which a Trainer cannot; run a recipe, or your own loop with "
        "engine.run_trials",
        policy={"has_trials": (True,)},
        options={"loop": ("trainer",)},
    ),
    Rule(
        "{policy} keeps something for each example of the data, and a Trainer's batches do not say which these are; "
        "run a recipe, or your own loop with attach(num_examples=...)",
        policy={"reads_rows": (True,)},
        options={"loop": ("trainer",)},
    ),
    Rule(
        "{policy} estimates gradients without a backward, which a Trainer cannot; run a recipe, or your own loop with "
        "engine.estimate",
        policy=ESTIMATOR,
        options={"loop": ("trainer",)},
    ),
    Rule(
        "{policy} trains parts of weights, which a Trainer cannot: it clips the gradients of the model's parameters; "
        "run a recipe, or your own loop",
        policy=PARTS,
        options={"loop": ("trainer",)},
    ),
    Rule(
        "{policy} needs attach(optimizer=...): parts take the place of their weights in it",
        policy=PARTS,
        options={"optimizer": ABSENT, "loop": ("own",)},
    ),
    Rule(
        "{policy} under DDP is not built: DDP knows the parameters of the model, and parts are none of them",
        policy=PARTS,
        options={"wrapped": ("DDP",)},
    ),
    Rule(
        "{policy} is not built with torch.compile: compiled layers keep the forwards of their linears",
        policy=PARTS,
        options={"wrapped": ("compiled",)},
    ),
    Rule(
        f"{TURNING} is not built with torch.compile: each set would be compiled again",
        policy=TURNS,
        options={"wrapped": ("compiled",)},
    ),
    Rule(
        "{policy} needs attach(optimizer=...): one choice of blocks holds for all backward passes of a step",
        policy=DROPPER,
        options={"optimizer": ABSENT, "loop": ("own",)},
    ),
    Rule(
        "{policy} is not built with torch.compile: it chooses other examples at each layer and step",
        policy={"samples_layers": (True,)},
        options={"wrapped": ("compiled",)},
    ),
    Rule(
        "{policy} is not built with torch.compile: other blocks are dropped at each step, and each choice would be "
        "compiled again",
        policy=DROPPER,
        options={"wrapped": ("compiled",)},
    ),
    Rule(
        "{policy} is not built with torch.compile: other positions go through a layer at each step",
        policy=LAYERS,
        options={"wrapped": ("compiled",)},
    ),
    Rule(
        "{update} needs optimizer=: the one that updates the model's parameters",
        options={"update": ("eager",), "optimizer": ABSENT, "loop": ("own",)},
        blame="update",
    ),
)
# What a recipe compiles; what a user wraps is refused above, or where it fails.
COMPILED = (
    Rule(
        "{policy} is not built with {compile}: the forward's computation differs from step to step",
        policy=SHORTENS,
        options={"compile": (True,)},
    ),
    Rule(
        "{policy} is not built with {compile}: gradients are estimated without a backward, by forwards that are not "
        "compiled",
        policy=ESTIMATOR,
        options={"compile": (True,)},
    ),
    Rule(
        "{compile} is not built at {sites}: the nodes of a compiled graph are hidden",
        options={"compile": (True,), "sites": ("nodes",)},
        blame="compile",
    ),
    Rule(
        "{compile} with {checkpointing} is not built at {sites}: use {checkpointing:sparse}, which stores one input a "
        "branch",
        why="A graph that a layer's checkpointing repeats may change nothing outside of it, and a branch notes what "
        "its norm got.",
        options={"compile": (True,), "checkpointing": ("full",), "sites": ("branches",)},
        blame="compile",
    ),
    Rule(
        "{compile} is not built with {update}: a compiled backward returns all gradients at once, so none is freed "
        "before the next",
        options={"compile": (True,), "update": ("eager",)},
        blame="compile",
    ),
    Rule(
        "{compile} works in one process, got {processes}",
        why="Compiled graphs with an engine are not tested under DDP and FSDP2.",
        options={"compile": (True,), "processes": SEVERAL},
        blame="compile",
    ),
)
_TRAINER = "policies in a transformers.Trainer are not built with "
_TRAINER_CHOOSER = "{policy} in a transformers.Trainer is not built with "
_READS_LOGITS = "which reads the logits of all positions: let the model compute the loss"
TRAINER = (
    Rule(
        "{time_forms} in a transformers.Trainer is not built: it does not say before the first step how long its "
        "batches are; run a recipe, or your own loop",
        options={"time_forms": (True,), "loop": ("trainer",)},
        blame="time_forms",
    ),
    Rule(
        "{update} in a transformers.Trainer is not built: the trainer steps the optimizer itself; built: "
        "{update:deferred}",
        options={"update": ("eager",), "loop": ("trainer",)},
        blame="update",
    ),
    *(
        Rule(f"{_TRAINER}{what}", options={name: (True,)}, blame=name)
        for name, what in {
            "deepspeed": "DeepSpeed: it runs the backward itself",
            "fsdp": "FSDP: it shards the weights; DDP works",
            "loaded_sharded": "a model that is sharded when it is loaded",
            "parallelism": "parallelism_config: it shards weights or sequences",
            "model_parallel": "a model on several devices; DDP works",
            "data_parallel": "DataParallel over several devices in one process: start one process per device (DDP)",
            "liger": "use_liger_kernel: its fused loss computes the head's gradient in the forward, where nothing can "
            "be selected",
        }.items()
    ),
    Rule(f"{_TRAINER}{{lomo}}: it updates weights inside the backward", options={"lomo": GIVEN}, blame="lomo"),
    *(
        Rule(f"{_TRAINER_CHOOSER}{what}", policy=policy, options={name: condition})
        for name, condition, policy, what in (
            (
                "fused_head",
                (True,),
                CHOOSER,
                "trl's fused head: the trainer computes the loss from the log-probabilities of all labels, whatever "
                "was selected",
            ),
            ("torch_compile", (True,), SHORTENS, "torch_compile: the forward's computation differs from step to step"),
            ("label_smoothing_factor", GIVEN, CHOOSER, f"{{label_smoothing_factor}}, {_READS_LOGITS}"),
        )
    ),
    Rule(
        f"{_TRAINER_CHOOSER}torch_compile: other blocks are dropped at each step, and each choice would be compiled "
        "again",
        policy=DROPPER,
        options={"torch_compile": (True,)},
    ),
    Rule(
        f"{_TRAINER_CHOOSER}torch_compile: other positions go through a layer at each step",
        policy=LAYERS,
        options={"torch_compile": (True,)},
    ),
    Rule(
        f"{_TRAINER_CHOOSER}{{neftune_noise_alpha}}: the noise depends on how the batch is arranged",
        policy=PACKER,
        options={"neftune_noise_alpha": GIVEN},
    ),
    Rule(
        f"{_TRAINER_CHOOSER}compute_loss_func, {_READS_LOGITS}, or override compute_loss",
        policy={**CHOOSER, "sees_labels": (False,)},
        options={"compute_loss_func": (True,)},
    ),
)
