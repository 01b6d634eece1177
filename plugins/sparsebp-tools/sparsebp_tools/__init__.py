"""Tools for what follows a training: tasks that judge a model, and the folder of a model for others, with its card."""

from sparsebp_cli.cli.plugin import VerbEntry

TOOLS = "sparsebp_tools"
EVALUATE = VerbEntry(
    f"{TOOLS}.verb.evaluate:evaluate",
    "More: results",
    {"evaluation": (f"{TOOLS}.answer.evaluation_record:Evaluation", 1)},
    writes=True,
    example="evaluate @last --lm-eval hellaswag --limit 100",
)
# What `sparsebp validate --memory` calls.
FORECAST = VerbEntry(
    f"{TOOLS}.forecast.show:show_memory",
    "",
    {"forecast": (f"{TOOLS}.forecast.answer:ForecastAnswer", 1)},
    described=(f"{TOOLS}.forecast.record",),
)
FETCH = VerbEntry(
    f"{TOOLS}.verb.fetch:fetch",
    "More: write and check recipes",
    {"fetched": (f"{TOOLS}.answer.fetched_record:FetchedAssets", 1)},
    writes=True,
    example="fetch minilm-l6 movie-snippets",
)
MODEL = VerbEntry(
    f"{TOOLS}.verb.model:model",
    "More: results",
    {"model": (f"{TOOLS}.answer.model_record:ModelFolder", 1)},
    example="model @last --to mine",
)
