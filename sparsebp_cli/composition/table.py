"""The table of combinations that are refused although each of their parts is valid by itself, and why.

What no rule refuses works; ``tests/composition`` checks both.
"""

from __future__ import annotations

from sparsebp_cli.composition.example_table import EXAMPLES
from sparsebp_cli.composition.loop_table import COMPILED, OWN_LOOP, TRAINER
from sparsebp_cli.composition.option_table import OPTIONS
from sparsebp_cli.composition.rule import (
    ABSENT,
    DROPPER,
    EPOCHS,
    ESTIMATOR,
    GIVEN,
    INFORMED,
    KINDS,
    LAYERS,
    PACKER,
    PARTS,
    ROUTER,
    SAME,
    SAVER,
    SEVERAL,
    SHORTENS,
    SKIPPER,
    TILES,
    TOKENS,
    TURNING,
    TURNS,
    Rule,
)

_POLICY_RULES = (
    Rule(
        "{policy}: its kind is not built; built: " + ", ".join(KINDS),
        policy={"kind": ("",)},
    ),
    Rule(
        "{policy} chooses the examples of an epoch: built for the worker of a recipe (sparsebp run) alone",
        why="The worker knows an example by its row in the training split, draws the order of an epoch and keeps the "
        "losses. A loop of your own and a Trainer have a data loader that SparseBP does not see.",
        policy=EPOCHS,
        options={"loop": ("own", "trainer")},
    ),
    Rule(
        "{other} and {policy} make the same decision ({kind}) at the same place: give one of them",
        policy={"kind": tuple(kind for kind in KINDS if kind != "GradientSelector")},
        other={"kind": SAME},
    ),
    Rule(
        "{other} and {policy} make the same decision ({kind}) at the same place: give one of them, or each its own "
        "sites by where or layers",
        policy={"kind": ("GradientSelector",), "placed": (False,)},
        other={"kind": SAME},
    ),
    Rule(
        "{other} and {policy} at {sites} are not built: give one of them",
        why="Nodes have no names before the first backward, so nothing could tell whose a node is.",
        policy={"kind": ("GradientSelector",)},
        other={"kind": SAME},
        options={"sites": ("nodes",)},
    ),
    Rule(
        "{policy} reads inputs and weights of linears: needs {sites:linears}, got {sites:=}",
        policy=INFORMED,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} with {float8} is not built: it reads inputs and weights, or selects dgrad and wgrad apart",
        policy=INFORMED,
        options={"float8": GIVEN},
    ),
    Rule(
        "{policy} needs {sharding:none}: it reads whole weights",
        policy=INFORMED,
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        "{policy} keeps a state from what it observes: it works in one process, got {processes}",
        why="Each process observes its own examples, and their states would part.",
        policy={"observes": (True,)},
        options={"processes": SEVERAL},
    ),
    Rule(
        "{policy} keeps a state, which a {kind} is not given",
        policy={"stateful": (True,), "kind": ("EdgeRouter", "BatchPacker", "TokenRouter", "TileSelector")},
    ),
    Rule(
        "{policy} asks for trial passes, which are built for block droppers, layer samplers, part selectors and input "
        "savers alone",
        policy={
            "has_trials": (True,),
            "samples_layers": (False,),
            "kind": tuple(kind for kind in KINDS if kind not in {"BlockDropper", "PartSelector", "InputSaver"}),
        },
    ),
    Rule(
        "{policy} chooses examples at the output of each layer, which is not built with {other}",
        why="Each row of a gradient must belong to a known example, and each linear's input be there.",
        policy={"samples_layers": (True,)},
        other={"kind": tuple(kind for kind in KINDS if kind not in {"GradientSelector", "ParameterSelector"})},
    ),
    Rule(
        "{policy} chooses examples at the output of each layer, which is not built with {segments}",
        policy={"samples_layers": (True,)},
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} observes gradients of parameters, which {update} frees during the backward; use {update:deferred}",
        policy={"reads_gradients": (True,)},
        options={"update": ("eager",)},
    ),
    Rule(
        "{policy} sets learning rates, which {update} reads before the backward; use {update:deferred}",
        policy={"sets_rates": (True,)},
        options={"update": ("eager",)},
    ),
    *EXAMPLES,
    Rule(
        "{other} and {policy} in one backward is not built: give one of them",
        why="A router decides about nodes, a gradient selector about the gradients that arrive at them.",
        policy=ROUTER,
        other={"kind": ("GradientSelector",)},
    ),
    Rule(
        "{policy} compares with a reference: give its option reference, a model by name or path",
        policy={"compares": (True,), "reference": ABSENT},
        options={"loop": ("worker",)},
    ),
    Rule(
        "{policy} compares with a reference language model: needs {format:text} or completion, got {format:=}",
        policy={"kind": ("ExampleSelector",), "compares": (True,)},
        options={"format": ("classification",)},
    ),
    Rule(
        "{other} and {policy} both compare with a reference: give one of them",
        policy={"kind": ("ExampleSelector",), "compares": (True,)},
        other={**TOKENS, "compares": (True,)},
    ),
    Rule(
        "{policy} routes at graph nodes: needs {sites:nodes}, got {sites:=}",
        policy=ROUTER,
        options={"sites": ("linears", "branches")},
    ),
    Rule(
        "{policy} works in one process, got {processes}",
        why="Each process would route its own gradient differently, and their sum would be the gradient of neither.",
        policy=ROUTER,
        options={"processes": SEVERAL},
    ),
    Rule(
        "{policy} chooses among the labels of tokens: needs {format:text} or completion, got {format:=}",
        why="A classification has one label an example. Without keep and a score other than mask, carry chooses the "
        "positions that carry gradient.",
        policy={**TOKENS, "trains_all": (False,)},
        options={"format": ("classification",)},
    ),
    Rule(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="Branches and nodes store tensors by their index among all positions.",
        policy=TOKENS,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} needs {sharding:none}: its score differentiates the last layer inside of the forward",
        policy={**TOKENS, "differentiates": (True,)},
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        "{policy} with {segments} is not built: it runs layers for some positions only",
        policy=TOKENS,
        options={"segments": GIVEN},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="A packed batch has rows instead of examples, and selectors decide by example and position.",
        policy=PACKER,
        other={"kind": ("GradientSelector", "EdgeRouter", "TokenSelector", "ExampleSelector")},
    ),
    Rule(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="Branches and nodes are known by the examples and positions of the plain forward.",
        policy=PACKER,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} with {segments} is not built: it changes the batch inside of the forward",
        policy=PACKER,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="A branch that recomputes rows runs its norm later than the forward does, and nodes are known by the graph "
        "of every block.",
        policy=DROPPER,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} needs {sharding:none}: it is not built for sharded weights",
        policy=DROPPER,
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="Positions are selected and packed through the attention of every layer, which may be left out.",
        policy=SKIPPER,
        other={"kind": ("TokenSelector", "BatchPacker")},
    ),
    Rule(
        "{policy} with {segments} is not built: segments run the layers without gradients first, where no block is "
        "left out",
        policy=SKIPPER,
        options={"segments": GIVEN},
    ),
    Rule(
        "{other} and {policy} in one backward is not built: give one of them",
        why="Both decide what the gradient of a weight is computed from.",
        policy=SAVER,
        other={"kind": ("GradientSelector",)},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="Selected positions and packed batches have rows of their own, and what is saved is drawn by row.",
        policy=SAVER,
        other={"kind": ("TokenSelector", "BatchPacker")},
    ),
    Rule(
        "{policy} saves inputs of linears: needs {sites:linears}, got {sites:=}",
        policy=SAVER,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} with {float8} is not built: float8 linears save their inputs in 8 bits themselves",
        policy=SAVER,
        options={"float8": GIVEN},
    ),
    Rule(
        "{policy} needs {sharding:none}: it is not built for sharded weights",
        policy=SAVER,
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        "{other} and {policy} in one training is not built: give one of them",
        why="Without a backward there are no gradients at sites and nodes, nothing is saved for them, and the losses "
        "are those of the model in evaluation mode.",
        policy=ESTIMATOR,
        other={"kind": tuple(kind for kind in KINDS if kind != "GradientEstimator")},
    ),
    Rule(
        "{other} and {policy} in one training is not built: give one of them",
        why="It replaces the forwards of linears, and the weights in the optimizer; all other parameters are frozen.",
        policy=PARTS,
        other={"kind": tuple(kind for kind in KINDS if kind not in {"PartSelector", "ExampleSelector"})},
    ),
    Rule(
        "{policy} trains parts of the weights of linears: needs {sites:linears}, got {sites:=}",
        policy=PARTS,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} needs {update:deferred}, got {update:=}: parts are written into the weights after a whole step",
        policy=PARTS,
        options={"update": ("eager",)},
    ),
    Rule(
        "{policy} with {segments} is not built: segments know the parameters of layers, and parts are none of them",
        policy=PARTS,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} works in one process, got {processes}",
        why="DDP and FSDP know the parameters of the model, and parts are none of them.",
        policy=PARTS,
        options={"processes": SEVERAL},
    ),
    Rule(
        "{policy} in a schedule of phases is not built: the optimizer's state of a part does not fit the whole weight",
        policy=PARTS,
        options={"phases": SEVERAL},
    ),
    Rule(
        "{policy} with {optim} is not built: this optimizer has state of whole weights before parts of them are chosen",
        policy=PARTS,
        options={"optim": ("adagrad",)},
    ),
    Rule(
        "{policy} with {float8} is not built: the product of a part would have another float8 scale",
        policy=PARTS,
        options={"float8": GIVEN},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="Sites, blocks and saved inputs are known by the rows of the whole batch, of which a layer gets some only.",
        policy=LAYERS,
        other={
            "kind": ("GradientSelector", "EdgeRouter", "TokenSelector", "BatchPacker", "BlockDropper", "InputSaver"),
        },
    ),
    Rule(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="Branches and nodes store tensors by their index among all positions.",
        policy=LAYERS,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} with {segments} is not built: segments run the layers without gradients first, where every position "
        "goes through",
        policy=LAYERS,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} routes tokens of a language model: needs {format:text} or completion, got {format:=}",
        policy=LAYERS,
        options={"format": ("classification",)},
    ),
    Rule(
        "{policy} needs {sharding:none}: it is not built for sharded weights",
        policy=LAYERS,
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        "{policy} keeps a state, which is not built for a policy that routes tokens",
        policy={**LAYERS, "stateful": (True,)},
    ),
    Rule(
        "{other} and {policy} in one forward is not built: give one of them",
        why="Tiles are those of an example's positions, and rows that are left out, packed or routed have others.",
        policy=TILES,
        other={"kind": ("EdgeRouter", "TokenSelector", "BatchPacker", "TokenRouter")},
    ),
    Rule(
        "{policy} needs {sites:linears}, got {sites:=}",
        why="Branches run attention again for the rows that they keep, and nodes are those of the model's backward.",
        policy=TILES,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} needs {attention:sdpa}, got {attention:=}",
        why="Eager attention keeps its weights for the backward, where tiles would be computed again.",
        policy=TILES,
        options={"attention": ("eager",)},
    ),
    Rule(
        "{policy} has no backward, and so no sites: needs {sites:linears}, got {sites:=}",
        policy=ESTIMATOR,
        options={"sites": ("branches", "nodes")},
    ),
    Rule(
        "{policy} has no backward: needs {update:deferred}, got {update:=}",
        policy=ESTIMATOR,
        options={"update": ("eager",)},
    ),
    Rule(
        "{policy} has no backward, for which {segments} computes layers again: leave it out",
        policy=ESTIMATOR,
        options={"segments": GIVEN},
    ),
    Rule(
        "{policy} has no backward, for which {checkpointing} computes layers again: needs {checkpointing:none}",
        policy=ESTIMATOR,
        options={"checkpointing": ("full", "sparse")},
    ),
    Rule(
        "{policy} with {float8} is not built: weights are shifted by less than float8 rounds",
        policy=ESTIMATOR,
        options={"float8": GIVEN},
    ),
    Rule(
        "{policy} works in one process, got {processes}",
        why="DDP and FSDP sum gradients inside of the backward.",
        policy=ESTIMATOR,
        options={"processes": SEVERAL},
    ),
    Rule(
        "{policy} keeps a state, which is not built for a policy that estimates gradients",
        policy={**ESTIMATOR, "stateful": (True,)},
    ),
    Rule(
        "{policy} needs {sharding:none}: it is not built for sharded weights",
        policy=SHORTENS,
        options={"sharding": ("fsdp2",)},
    ),
    Rule(
        f"{TURNING} works in one process, got {{processes}}",
        why="DDP waits for the gradient of every parameter that required one when DDP was created.",
        policy=TURNS,
        options={"processes": SEVERAL},
    ),
)
_PHASE_RULES = (
    Rule(
        "a schedule of phases needs {sharding:none}, got {sharding:=}",
        why="The modules of a sharded model are of other classes, to which no policy can be attached any more.",
        options={"phases": SEVERAL, "sharding": ("fsdp2",)},
        blame="sharding",
    ),
    Rule(
        "{policy} chooses the examples of an epoch: not built in a schedule, whose phases end within one",
        policy=EPOCHS,
        options={"phases": SEVERAL},
    ),
    Rule(
        "{policy} makes trial passes at a share of the whole training: not built in a schedule, whose phase may be "
        "another part of it",
        policy={"has_trials": (True,)},
        options={"phases": SEVERAL},
    ),
    Rule(
        "{policy} in a schedule works in one process, got {processes}",
        why="DDP waits for the gradient of every parameter that required one when DDP was created, which was in one "
        "phase.",
        policy={"kind": ("ParameterSelector",)},
        options={"phases": SEVERAL, "processes": SEVERAL},
    ),
    Rule(
        "{policy} in a phase after the first needs {mixed_precision:no}, got {mixed_precision:=}",
        why="It replaces the forward of the whole model, which autocast has wrapped when the training began: its own "
        "computation would be outside of autocast.",
        policy=SHORTENS,
        options={"is_later_phase": (True,), "mixed_precision": ("bf16",)},
    ),
    Rule(
        "{policy} compares with another reference than a policy of another phase: give one reference and one "
        "reference_scores in the whole schedule",
        policy={"compares": (True,)},
        options={"phases": SEVERAL, "references": SEVERAL},
    ),
    Rule(
        "a schedule of phases is not built with torch.compile: each phase would be compiled again",
        options={"phases": SEVERAL, "wrapped": ("compiled",)},
    ),
)
RULES = (*_POLICY_RULES, *_PHASE_RULES, *OPTIONS, *OWN_LOOP, *COMPILED, *TRAINER)
