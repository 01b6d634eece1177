"""Provide tools for finished trainings, such as evaluation and a model's folder with its card."""

from sparsebp_cli.cli.plugin import VerbEntry

TOOLS = "sparsebp_tools"
BENCH = VerbEntry(
    f"{TOOLS}.verb.bench:bench",
    "More: this machine and others",
    {"benchmark": (f"{TOOLS}.bench.result:Benchmark", 1)},
    example="bench topk --recipe topk-rows",
)
ASSETS = {"assets": (f"{TOOLS}.answer.fetched_record:AssetList", 1)}
DATASETS = VerbEntry(f"{TOOLS}.verb.assets:datasets", "More: write and check recipes", ASSETS, example="datasets")
MODELS = VerbEntry(f"{TOOLS}.verb.assets:models", "More: write and check recipes", ASSETS, example="models")
EVALUATE = VerbEntry(
    f"{TOOLS}.verb.evaluate:evaluate",
    "More: results",
    {"evaluation": (f"{TOOLS}.answer.evaluation_record:Evaluation", 1)},
    writes=True,
    example="evaluate @last --lm-eval hellaswag --limit 100",
)
# `sparsebp validate --memory` calls this entry.
FORECAST = VerbEntry(
    f"{TOOLS}.forecast.show:show_memory",
    "",
    {"forecast": (f"{TOOLS}.forecast.answer:ForecastAnswer", 1)},
    described=(f"{TOOLS}.forecast.record",),
)
EXPORT = VerbEntry(
    f"{TOOLS}.verb.export:export",
    "More: write and check recipes",
    {"export": (f"{TOOLS}.answer.export_record:ExportedRuns", 1)},
    example="export topk-rows --format sbatch",
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
RERUN = VerbEntry(f"{TOOLS}.verb.rerun:rerun", "More: runs", writes=True, example="rerun @last")
