"""SparseBP: try which gradients are worth computing when a transformer is fine-tuned.

    import sparsebp_cli as sbp

    policy = sbp.make_policy("topk", keep=0.1, along="rows")
    engine = sbp.attach(model, [policy], sites="linears", optimizer=optimizer)
    engine.backward(loss)      # replaces loss.backward()
    engine.report()
    engine.detach()

Importing this package is fast: modules that need torch are loaded on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from sparsebp_cli.entry_point import MovedModule
from sparsebp_cli.errors import (
    AbsentDataError,
    ChangedError,
    CheckpointError,
    DataError,
    DivergedError,
    PolicyError,
    RecipeError,
    RunBusyError,
    RunFailedError,
    RunNotFoundError,
    SparseBPError,
    TrackingError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)

__version__ = version("sparsebp")
__all__ = [
    "AbsentDataError",
    "BackwardOptions",
    "ChangedError",
    "CheckpointError",
    "DataError",
    "DivergedError",
    "Engine",
    "GradStore",
    "PolicyCallback",
    "PolicyError",
    "PolicyTrainer",
    "RecipeError",
    "RunBusyError",
    "RunFailedError",
    "RunNotFoundError",
    "SparseBPError",
    "TrackingError",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "attach",
    "find_policies",
    "make_policy",
    "segmented_backward",
]

# Type checkers see the names themselves. They must not see __getattr__, which would turn every typo into an Any.
if TYPE_CHECKING:
    from sparsebp_cli.backward import (
        Engine,
        GradStore,
        attach,
        segmented_backward,
    )
    from sparsebp_cli.policy import find_policies, make_policy
    from sparsebp_cli.policy.composition import BackwardOptions
    from sparsebp_cli.trainer import PolicyCallback, PolicyTrainer
else:
    # Modules of 0.5 that moved; the next release removes them. `import sparsebp_cli.memory` finds them in sys.modules.
    _MOVED = {
        "auditor": dict.fromkeys(("Audit", "audit"), "sparsebp_audit"),
        "memory": dict.fromkeys(("MemoryTrace", "memory_trace"), "sparsebp_tools.memory"),
    }
    for _name, _homes in _MOVED.items():
        globals()[_name] = sys.modules[f"{__name__}.{_name}"] = MovedModule(f"{__name__}.{_name}", _homes)

    _ROOMS = {
        "attach": "sparsebp_cli.backward",
        "audit": "sparsebp_cli.auditor",
        "BackwardOptions": "sparsebp_cli.policy.composition",
        "Engine": "sparsebp_cli.backward",
        "GradStore": "sparsebp_cli.backward",
        "PolicyCallback": "sparsebp_cli.trainer",
        "PolicyTrainer": "sparsebp_cli.trainer",
        "find_policies": "sparsebp_cli.policy",
        "make_policy": "sparsebp_cli.policy",
        "memory_trace": "sparsebp_cli.memory",
        "segmented_backward": "sparsebp_cli.backward",
    }

    def __getattr__(name):
        if name in _ROOMS:
            return getattr(import_module(_ROOMS[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
