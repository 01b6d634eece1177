"""PUBLIC. Audits any training of this process: what its backward passes execute and store, and how much of it is
wasted.

    import sparsebp_audit

    with sparsebp_audit.audit(model, steps=3) as audit:
        ...                    # some steps of any PyTorch loop
    print(audit.report())

Importing this package is light: torch is imported with the first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["Audit", "audit"]

# Type checkers see the names themselves; with __getattr__ every typo would be an Any.
if TYPE_CHECKING:
    from sparsebp_audit.auditor import Audit, audit
else:

    def __getattr__(name):
        if name in __all__:
            return getattr(import_module("sparsebp_audit.auditor"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
