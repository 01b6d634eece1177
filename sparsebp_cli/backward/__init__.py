"""PUBLIC. The engine that applies policies to a model's backward pass, and the tools that measure it."""

from sparsebp_cli.backward.attachment import attach
from sparsebp_cli.backward.core.engine import Engine
from sparsebp_cli.backward.core.report import Chosen, FlopEstimate, Report, Route, SiteReport
from sparsebp_cli.backward.decoder.layout import AttentionLayout, BranchLayout
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.backward.execution.segment.chain import segmented_backward
from sparsebp_cli.backward.linear.form_choice import time_forms
from sparsebp_cli.backward.observe.flops import FlopCount, count_flops
from sparsebp_cli.backward.observe.module_trace import ModuleTrace
from sparsebp_cli.backward.observe.saved_bytes import SavedBytes, saved_bytes, tensor_bytes
from sparsebp_cli.backward.phase import Phase, PhasedEngine, attach_phases
from sparsebp_cli.backward.proof.fidelity import Fidelity, GradientComparison, compare_gradients
from sparsebp_cli.backward.proof.movement import Moved, Movement
from sparsebp_cli.backward.proof.proof import Overclaim, PassCount, Proof

__all__ = [
    "AttentionLayout",
    "BranchLayout",
    "Chosen",
    "Engine",
    "Fidelity",
    "FlopCount",
    "FlopEstimate",
    "GradStore",
    "GradientComparison",
    "ModuleTrace",
    "Moved",
    "Movement",
    "Overclaim",
    "PassCount",
    "Phase",
    "PhasedEngine",
    "Proof",
    "Report",
    "Route",
    "SavedBytes",
    "SiteReport",
    "attach",
    "attach_phases",
    "compare_gradients",
    "count_flops",
    "saved_bytes",
    "segmented_backward",
    "tensor_bytes",
    "time_forms",
]
