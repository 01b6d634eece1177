"""Define the rules that no recipe can break: for a user's own training loop, for a Trainer, and for compiled models."""

from __future__ import annotations

from sparsebp_cli.policy.rule import ABSENT, GIVEN, SEVERAL, Conditions, Rule

# Combinations that no recipe can contain: the user wrapped the model, or gave no optimizer.
OWN_LOOP = (
    Rule(
        "{checkpointing} works only in recipes: call model.gradient_checkpointing_enable() before attach instead",
        options={"checkpointing": ("full",), "loop": ("own", "trainer")},
        blame="checkpointing",
    ),
    Rule(
        "{policy} needs trial passes before a step, which a Trainer cannot run; use a recipe, or your own loop with "
        "engine.run_trials",
        policy={"has_trials": (True,)},
        options={"loop": ("trainer",)},
    ),
    Rule(
        "{update} needs the argument optimizer=, the optimizer of the model's parameters",
        options={"update": ("eager",), "optimizer": ABSENT, "loop": ("own",)},
        blame="update",
    ),
)


def make_compiled_rules(shortens: Conditions) -> tuple[Rule, ...]:
    """Return the rules for models that a recipe compiles. Models compiled by the user are refused above or later."""
    return (
        Rule(
            "{policy} is not supported with {compile}: the policy changes the forward from step to step",
            policy=shortens,
            options={"compile": (True,)},
        ),
        Rule(
            "{compile} is not supported at {sites}: torch.compile hides the nodes of its graph",
            options={"compile": (True,), "sites": ("nodes",)},
            blame="compile",
        ),
        Rule(
            "{compile} is not supported with {update}: a compiled backward returns all gradients at once, so no "
            "gradient can be freed early",
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


_TRAINER = "policies in a transformers.Trainer are not supported with "
_TRAINER_CHOOSER = "{policy} in a transformers.Trainer is not supported with "
_READS_LOGITS = "which reads the logits of all positions: let the model compute the loss"


def make_trainer_rules(shortens: Conditions, chooses: Conditions) -> tuple[Rule, ...]:
    """Return the rules for a Trainer. ``chooses`` are the kinds that choose the tokens or examples of the loss."""
    return (
        Rule(
            "{update} in a transformers.Trainer is not supported: the trainer steps the optimizer itself; use "
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
                "liger": "use_liger_kernel: its fused loss computes the head's gradient in the forward, where "
                "policies cannot select",
            }.items()
        ),
        Rule(f"{_TRAINER}{{lomo}}: it updates weights inside the backward", options={"lomo": GIVEN}, blame="lomo"),
        *(
            Rule(f"{_TRAINER_CHOOSER}{what}", policy=policy, options={name: condition})
            for name, condition, policy, what in (
                (
                    "fused_head",
                    (True,),
                    {**chooses, "fits_head": (False,)},
                    "trl's fused head, whose loss uses all labels; use a policy that chooses examples without a score. "
                    "A trl trainer leaves this head on the model: before your own loop, run `del model.forward`",
                ),
                (
                    "torch_compile",
                    (True,),
                    shortens,
                    "torch_compile: the policy changes the forward from step to step",
                ),
                ("label_smoothing_factor", GIVEN, chooses, f"{{label_smoothing_factor}}, {_READS_LOGITS}"),
            )
        ),
        Rule(
            f"{_TRAINER_CHOOSER}compute_loss_func, {_READS_LOGITS}, or override compute_loss",
            policy={**chooses, "sees_labels": (False,)},
            options={"compute_loss_func": (True,)},
        ),
    )
