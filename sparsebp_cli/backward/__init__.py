"""PUBLIC. The engine that applies policies to a model's backward pass, and the tools that measure it."""

from sparsebp_cli.backward.attachment import attach
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, EngineView, refuse_uncalled
from sparsebp_cli.backward.core.given import Given
from sparsebp_cli.backward.core.report import Chosen, FlopEstimate, Report, Route, SiteReport
from sparsebp_cli.backward.decoder.decoder import find_reentrant
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import AttentionLayout, BranchLayout, find_layouts
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.backward.execution.segment.chain import segmented_backward
from sparsebp_cli.backward.kind.required_grads import claim_needed
from sparsebp_cli.backward.kind.token.layer_positions import LayerPositions
from sparsebp_cli.backward.observe.flops import DensePass, FlopCount, PassEstimate, count_flops
from sparsebp_cli.backward.observe.internals import find_attentions, misses_gradients
from sparsebp_cli.backward.observe.module_trace import ModuleTrace, is_in_backward
from sparsebp_cli.backward.observe.saved_bytes import SavedBytes, saved_bytes, tensor_bytes
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, uncompiled
from sparsebp_cli.backward.phase import Phase, PhasedEngine, attach_phases
from sparsebp_cli.backward.proof.fidelity import Fidelity, GradientComparison, compare_gradients
from sparsebp_cli.backward.proof.movement import Moved, Movement
from sparsebp_cli.backward.proof.proof import Overclaim, PassCount, Proof

__all__ = [
    "AttentionLayout",
    "BranchLayout",
    "Chosen",
    "DensePass",
    "Engine",
    "EngineExtension",
    "EngineView",
    "Fidelity",
    "FlopCount",
    "FlopEstimate",
    "ForwardOverride",
    "ForwardPatches",
    "Given",
    "GradStore",
    "GradientComparison",
    "LayerNumbers",
    "LayerPositions",
    "ModuleTrace",
    "Moved",
    "Movement",
    "Overclaim",
    "PassCount",
    "PassEstimate",
    "Phase",
    "PhasedEngine",
    "Proof",
    "Report",
    "Route",
    "SavedBytes",
    "SiteReport",
    "attach",
    "attach_phases",
    "claim_needed",
    "compare_gradients",
    "count_flops",
    "find_attentions",
    "find_layouts",
    "find_reentrant",
    "is_in_backward",
    "misses_gradients",
    "refuse_uncalled",
    "saved_bytes",
    "segmented_backward",
    "tensor_bytes",
    "uncompiled",
]
