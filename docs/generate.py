"""Writes the pages that are generated from the code: ``python docs/generate.py [--check]``.

With ``--check`` nothing is written; stale pages are listed, and the exit code is 1.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from generator import (
    architecture,
    audit,
    cause,
    command,
    comparison,
    composition,
    document,
    error,
    judge,
    metric,
    mixing,
    papers,
    peers,
    policy,
    promise,
    public,
    readme,
    recipe,
    shipped,
    study,
    timing,
    wins,
)

from sparsebp_cli.errors import SparseBPError

ROOT = Path(__file__).resolve().parent.parent

PAGES: dict[str, Callable[[Path], str]] = {
    "docs/reference/cli.md": command.page,
    "docs/reference/recipe.md": recipe.page,
    "docs/reference/policies.md": policy.page,
    "docs/reference/recipes.md": shipped.page,
    "docs/reference/composition.md": composition.page,
    "docs/reference/architectures.md": architecture.page,
    "docs/reference/metrics.md": metric.page,
    "docs/reference/errors.md": error.page,
    "docs/reference/documents.md": document.page,
    "docs/reference/promises.md": promise.page,
    "docs/reference/public.md": public.page,
    "docs/recipe.schema.json": recipe.schema,
    "docs/comparison.schema.json": comparison.schema,
    "docs/audit.schema.json": audit.schema,
    "docs/results/judge.md": judge.page,
    "docs/results/screening.md": cause.page,
    "docs/documents.schema.json": document.schemas,
    "docs/results/mixing.md": mixing.page,
    "benchmarks/results/mixing-upstream.md": mixing.upstream,
    "docs/reference/times.md": timing.policies_page,
    "docs/results/measurements.md": timing.measurements,
    "docs/results/papers.md": papers.page,
    "docs/results/peers.md": peers.page,
    "docs/results/studies.md": study.page,
    "docs/results/wins.md": wins.page,
    "README.md": readme.page,
    "docs/guide/quickstart.md": readme.quickstart,
}

# peft imports bitsandbytes, which says on some CPUs that it fetched no kernel from a hub.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def generate(root: Path = ROOT) -> dict[Path, str]:
    """Return every generated file with its content."""
    return {root / name: make(root) for name, make in PAGES.items()}


def find_stale(root: Path = ROOT) -> list[Path]:
    """Return the generated files whose content is out of date."""
    return [
        file for file, text in generate(root).items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str]) -> int:
    """Write the stale files, or with ``--check`` list them.

    Returns 1 when something is stale and nothing was written, 2 for a wrong argument or code that a page cannot
    describe, else 0.
    """
    if arguments not in ([], ["--check"]):
        print(f"error: --check is the only option, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    try:
        stale = find_stale()
    except SparseBPError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments:
        for file in stale:
            print(f"stale: {file.relative_to(ROOT)}; `make fix` writes it again", file=sys.stderr)
        return 1 if stale else 0
    for file, text in generate().items():
        if file in stale:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"written: {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
