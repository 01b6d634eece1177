"""Check a submission's policies: those of its own package must pass the conformance suite, in a separate process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from sparsebp_cli import interpreter
from sparsebp_cli.policy import find_policies
from sparsebp_cli.policy.shelf import SHELF
from sparsebp_lab.leaderboard.finding import FAIL, OK, RuleFinding
from sparsebp_lab.leaderboard.submission import Submission
from sparsebp_lab.study.loader import LoadedStudy

OURS = ("sparsebp", SHELF)  # packages whose policies this project tests
# In a separate process, because the suite needs torch and runs foreign code.
SUITE = """import json, sys
from sparsebp_cli.testing import check_policy
check_policy(sys.argv[1], **json.loads(sys.argv[2]))"""
SECONDS = 600.0


def check_policies(mine: LoadedStudy, submission: Submission) -> Iterator[RuleFinding]:
    """Yield the finding for each policy of a study's methods that does not ship with SparseBP."""
    found, seen = find_policies(), set[str]()
    about = submission.about
    for arm, variant in mine.firsts.items():
        for entry in variant.recipe.policies:
            package = found[entry.name].source.partition(" ")[0] if entry.name in found else ""
            options = json.dumps(entry.options, sort_keys=True)
            if package in OURS or f"{entry.name} {options}" in seen:
                continue
            seen.add(f"{entry.name} {options}")
            if about is not None and about.package != package:
                text = f"{entry.name} is of the package {package}, and submission.yaml names {about.package or 'none'}"
                yield RuleFinding(FAIL, "package", text, f"package: {package}")
            yield _run_suite(arm, entry.name, options)
    if not seen:
        yield RuleFinding(OK, "policies", "all of them ship with SparseBP")


def _run_suite(arm: str, name: str, options: str) -> RuleFinding:
    try:
        done = subprocess.run(
            interpreter.command("-c", SUITE, name, options),
            env=interpreter.environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return RuleFinding(FAIL, "policies", f"{arm}: check_policy of {name} took more than {SECONDS:.0f} seconds")
    if done.returncode:
        line = next(iter(done.stderr.strip().splitlines()[-1:]), "no output")
        return RuleFinding(FAIL, "policies", f"{arm}: check_policy of {name}: {line.removeprefix('AssertionError: ')}")
    return RuleFinding(OK, "policies", f"{arm}: {name} keeps every promise of check_policy")
