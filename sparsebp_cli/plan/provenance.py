"""What was on the machine that made a plan: code version and changes, so that a number can be traced back."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

MAX_DIFF_CHARACTERS = 200_000


class Provenance(BaseModel):
    """Where a plan came from. Never holds remotes, environment variables or command lines: they carry secrets.

    Args:
        sparsebp_version: Of the package that made the plan.
        recipe_file: Name of the recipe's file, without its folder.
        git_sha: Commit of the working folder; empty outside git.
        git_diff: Uncommitted changes of tracked files, cut at 200,000 characters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sparsebp_version: str = ""
    recipe_file: str = ""
    git_sha: str = ""
    git_diff: str = ""


def find_provenance(recipe_file: Path) -> Provenance:
    """Describe the working folder that a recipe is run from.

    Args:
        recipe_file: The recipe.

    Returns:
        Its provenance; the git fields are empty where there is no git.
    """
    folder = recipe_file.resolve().parent
    return Provenance(
        sparsebp_version=version("sparsebp"),
        recipe_file=recipe_file.name,
        git_sha=_git(folder, "rev-parse", "HEAD").strip(),
        git_diff=_git(folder, "diff", "HEAD")[:MAX_DIFF_CHARACTERS],
    )


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
