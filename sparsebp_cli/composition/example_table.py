"""The rules about policies that choose examples: of an epoch, by weights, and by products of gradients."""

from __future__ import annotations

from sparsebp_cli.composition.rule import ABSENT, EPOCHS, GIVEN, PARTS, SEVERAL, TOKENS, VALIDATING, WEIGHING, Rule

EXAMPLES = (
    Rule(
        "{policy} works in one process, got {processes}",
        why="Each process would know the losses of its own examples only.",
        policy=EPOCHS,
        options={"processes": SEVERAL},
    ),
    Rule(
        "{other} and {policy} in one training is not built: give one of them",
        why="The loss of every example is read from the logits of all its positions.",
        policy=EPOCHS,
        other={"kind": ("TokenSelector", "ExampleSelector", "BatchPacker")},
    ),
    Rule(
        "{policy} with {segments} is not built: it weighs the losses of examples outside of the model",
        policy=EPOCHS,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} with {segments} is not built: it weighs the losses of examples outside of the model",
        policy=WEIGHING,
        options={"segments": GIVEN},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="The losses that are weighted are those of all positions of an example.",
        policy=WEIGHING,
        other=TOKENS,
    ),
    Rule(
        "{policy} compares gradients with those of validation examples: give {policy_validation_examples:32} or "
        "another number, which are set aside from the training examples",
        policy=VALIDATING,
        options={"policy_validation_examples": ABSENT},
    ),
    Rule(
        "{policy} needs {checkpointing:none}, got {checkpointing:=}: it differentiates a forward of its own, which "
        "stores everything",
        policy=VALIDATING,
        options={"checkpointing": ("full", "sparse")},
    ),
    Rule(
        "{policy} with {segments} is not built: it differentiates a forward of its own",
        policy=VALIDATING,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} with {float8} is not built: float8 rounds the gradients of weights that it compares",
        policy=VALIDATING,
        options={"float8": GIVEN},
    ),
    Rule(
        "{other} and {policy} in one training is not built: give one of them",
        why="Gradients of whole weights are compared, and parts of them are trained.",
        policy=VALIDATING,
        other=PARTS,
    ),
    Rule(
        "{policy} needs attach(optimizer=...): its second-order term has the learning rate",
        policy=VALIDATING,
        options={"optimizer": ABSENT, "loop": ("own",)},
    ),
    Rule(
        "{policy} needs validation examples, which a Trainer does not give; run a recipe, or your own loop with "
        "attach(validation=...)",
        policy=VALIDATING,
        options={"loop": ("trainer",)},
    ),
)
