"""PUBLIC. The engine that applies policies to a model's backward pass, and the tools that measure it."""

from sparsebp_cli.backward.attachment import attach
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.extension import EngineExtension, EngineView, refuse_uncalled
from sparsebp_cli.backward.core.given import Given
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.report import Chosen, FlopEstimate, Report, Route, SiteReport
from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.backward.core.trial import TrialExtension
from sparsebp_cli.backward.decoder.decoder import bind_arguments, find_reentrant
from sparsebp_cli.backward.decoder.kv_cache import find_cache, is_filled
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import AttentionLayout, BranchLayout, find_layouts
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.backward.execution.segment.chain import segmented_backward
from sparsebp_cli.backward.kind.fused_head import has_fused_head
from sparsebp_cli.backward.kind.model_output import with_changes
from sparsebp_cli.backward.kind.required_grads import claim_needed
from sparsebp_cli.backward.kind.score.cost import ScoringCost
from sparsebp_cli.backward.kind.score.scorer import (
    HasLogits,
    Scorer,
    draw_like,
    evaluating,
    gradient_norm,
    is_known,
    next_tokens,
)
from sparsebp_cli.backward.kind.score.token_scores import check_vocabulary, score_reference
from sparsebp_cli.backward.kind.transfer import upload
from sparsebp_cli.backward.linear.function import autocast, weight_of
from sparsebp_cli.backward.linear.input_saver import SavedInput, SavesInputs
from sparsebp_cli.backward.observe.flops import DensePass, FlopCount, PassEstimate, count_flops
from sparsebp_cli.backward.observe.internals import find_attentions, misses_gradients, version_of
from sparsebp_cli.backward.observe.module_trace import ModuleTrace, is_in_backward
from sparsebp_cli.backward.observe.saved_bytes import SavedBytes, saved_bytes, tensor_bytes
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches, uncompiled
from sparsebp_cli.backward.proof.fidelity import Fidelity, GradientComparison, compare_gradients
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
    "HasLogits",
    "LayerNumbers",
    "ModuleTrace",
    "Overclaim",
    "PassCount",
    "PassEstimate",
    "PolicyStates",
    "Proof",
    "Report",
    "Route",
    "SavedBytes",
    "SavedInput",
    "SavesInputs",
    "Scope",
    "Scorer",
    "ScoringCost",
    "SiteReport",
    "TrialExtension",
    "attach",
    "autocast",
    "bind_arguments",
    "check_vocabulary",
    "claim_needed",
    "compare_gradients",
    "count_flops",
    "draw_like",
    "evaluating",
    "find_attentions",
    "find_cache",
    "find_layouts",
    "find_reentrant",
    "gradient_norm",
    "has_fused_head",
    "is_filled",
    "is_in_backward",
    "is_known",
    "misses_gradients",
    "next_tokens",
    "refuse_uncalled",
    "saved_bytes",
    "score_reference",
    "segmented_backward",
    "tensor_bytes",
    "uncompiled",
    "upload",
    "version_of",
    "weight_of",
    "with_changes",
]
