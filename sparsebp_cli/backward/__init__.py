"""PUBLIC. The engine that carries policies' decisions out in a model's backward, and what measures it."""

from sparsebp_cli.backward.engine import Engine, attach
from sparsebp_cli.backward.report import Claim, Report, SiteReport

__all__ = ["Claim", "Engine", "Report", "SiteReport", "attach"]
