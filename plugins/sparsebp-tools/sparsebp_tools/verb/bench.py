"""``sparsebp bench``: time every form of a policy against dense, on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_policy
from sparsebp_cli.cli.option import resolve_one
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.run import durable

if TYPE_CHECKING:
    from sparsebp_tools.bench import BenchForm, Benchmark, Request

WHAT, HOW, FILE = "What is measured", "How", "Result"


def bench(  # noqa: PLR0913, PLR0917 - one parameter an option
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="Name of a policy that `sparsebp policies` lists.", autocompletion=complete_policy
        ),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE",
            help="Use model, threads, batch size and length of this recipe.",
            callback=resolve_one,
            rich_help_panel=WHAT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Use this model: an installed one's name, a hub id or a folder (default: austen-llama).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUE",
            help="Set an option of the policy, such as within=example (KEY=VALUE). Can be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Fractions of the gradient to keep (default: 0.5,0.25,0.1; for single entries, down to 0.005).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=(
                "Where the policy acts: linears (linear layers), nodes (of PyTorch's autograd graph), or "
                "linears,nodes. Default: where the policy can be faster than dense."
            ),
            rich_help_panel=WHAT,
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of rounds. In each round, the time of each setting is measured once.",
            rich_help_panel=HOW,
        ),
    ] = 9,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Examples in a pass (default: the recipe's batch size, or 16).",
            rich_help_panel=HOW,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=8, metavar="N", help="Tokens in an example (default: the recipe's length, or 128).", rich_help_panel=HOW
        ),
    ] = None,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="A table for people, or JSON for programs.", rich_help_panel=FILE)
    ] = Output.TABLE,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the results to a file, as JSON.", rich_help_panel=FILE),
    ] = None,
) -> None:
    """Compare the speed of each form of a policy (such as blocks of 32) with dense training on this machine. Print the
    speed-up and the largest possible one, the memory, and the fractions `keep` at which the form is faster."""
    if recipe is not None and model is not None:
        raise UsageError("give either --recipe or --model, not both")
    from sparsebp_tools.bench import find_forms

    forms = find_forms(policy, sites=_read_sites(sites), keeps=_read_keeps(keep), options=_read_options(options or []))
    changes = {"batch": batch, "length": length, "rounds": rounds}
    request = _make_request(policy, forms, recipe, model)
    request = request.model_copy(update={key: value for key, value in changes.items() if value is not None})
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"the folder {str(out.parent)!r} for the JSON does not exist")
    from sparsebp_cli.cli.worker_process import measure_apart
    from sparsebp_tools.bench import Benchmark

    found = Benchmark.model_validate(measure_apart("sparsebp_tools.bench", request.model_dump_json()))
    found = found.model_copy(update={"command": shlex.join(["sparsebp", *sys.argv[1:]])})
    _write_results(found, output, out)


def _write_results(found: Benchmark, output: Output, out: Path | None) -> None:
    """Print a benchmark, and write the file that was requested."""
    if out is not None:  # before printing, because a closed pipe must not lose minutes of measuring
        durable.write_file(out, found.model_dump_json(indent=1) + "\n")
    from sparsebp_tools.bench.table import print_benchmark

    tell(found, output, print_benchmark)
    if out is not None:
        print_line(f"JSON: {out}", stderr=True)


def _make_request(policy: str, forms: tuple[BenchForm, ...], recipe: Path | None, model: str | None) -> Request:
    from sparsebp_cli.recipe.schema import ModelSection
    from sparsebp_tools.bench import Request
    from sparsebp_tools.bench.request import MODEL

    if recipe is None:
        return Request(policy=policy, forms=forms, model=ModelSection(name=model or MODEL))
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import load_recipe

    return Request.of_recipe(make_plan(load_recipe(recipe, []), recipe).recipe, policy, forms)


def _read_sites(text: str | None) -> list[str] | None:
    from sparsebp_tools.bench.form import SITES

    if text is None:
        return None
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in SITES:
            raise UsageError(f"--sites: got {name!r}, allowed: {', '.join(SITES)}{did_you_mean(name, SITES)}")
    return names


def _read_keeps(text: str | None) -> list[float] | None:
    if text is None:
        return None
    found = []
    for part in text.split(","):
        try:
            share = float(part)
        except ValueError:
            share = 0.0
        if not 0.0 < share < 1.0:
            hint = ": 1.0 is dense, which is always measured" if part.strip() in ("1", "1.0") else ""
            raise UsageError(f"--keep: each fraction must be in (0, 1), got {part.strip()!r}{hint}")
        found.append(share)
    return sorted(set(found), reverse=True)


def _read_options(texts: list[str]) -> dict[str, object]:
    from sparsebp_cli.recipe.document import read_document

    found: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UsageError(f"--set must be OPTION=VALUE, such as within=example, got {text!r}")
        node = read_document(value, f"--set {text}", [key.strip()])
        found[key.strip()] = None if node is None else node.plain
    return found
