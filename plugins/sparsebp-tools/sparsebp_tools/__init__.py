"""Tools for what follows a training: a trained model for others, with its card."""

from sparsebp_cli.cli.plugin import VerbEntry

TOOLS = "sparsebp_tools"
MODEL = VerbEntry(
    f"{TOOLS}.verb.model:model", "More: results", {"model": (f"{TOOLS}.answer.model_record:ModelFolder", 1)}
)
