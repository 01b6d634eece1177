"""The plan: the resolved recipe and where it came from. ``plan.json`` is all that crosses to the machine."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.recipe.earlier import rename_in_plan
from sparsebp_cli.recipe.schema import Recipe

# Two runs that differ only in these belong to one group.
OUTSIDE_GROUP = {"name": True, "target": True, "tracking": True, "checkpoint": True, "training": {"seed"}}


class Plan(BaseModel):
    """One run, ready to be executed anywhere.

    Args:
        format: Version of this file.
        run_id: 12 hexadecimal digits; kept through every resume.
        created: Seconds since 1970, UTC.
        recipe: Resolved: base, overrides, seed and every policy option's default filled in.
        provenance: What was on the machine that made the plan.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    run_id: str = Field(default_factory=lambda: secrets.token_hex(6), pattern=r"^[0-9a-f]{12}$")
    created: float = Field(default_factory=time.time)
    recipe: Recipe
    provenance: Provenance = Field(default_factory=Provenance)

    @property
    def group(self) -> str:
        """Content hash of all that decides the result but the seed: runs of one group are repetitions."""
        content = self.recipe.model_dump(mode="json", exclude=OUTSIDE_GROUP)  # type: ignore[arg-type]
        if (processes := self.recipe.target.options.get("processes", 1)) > 1:  # they see as many examples a step
            content["target"] = {"processes": processes}
        return content_hash(content)

    def save(self, run_folder: Path) -> Path:
        """Write ``plan.json`` into the run's folder, atomically.

        Args:
            run_folder: The run's folder; it must exist.

        Returns:
            The file's path.
        """
        file = run_folder / "plan.json"
        part = file.with_suffix(".part")
        part.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        part.replace(file)
        return file

    @classmethod
    def load(cls, file: Path) -> Plan:
        """Read a plan.

        Args:
            file: A ``plan.json``.

        Returns:
            The plan.

        Raises:
            RunNotFoundError: There is no such file, or it is not a plan.
        """
        try:
            return cls.model_validate_json(rename_in_plan(file.read_bytes()))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            told = f"{place}: {first['msg']}" if place else first["msg"]
            raise RunNotFoundError(f"{file} is not a plan for this version: {told}{_tell_version(file)}") from None
        except (OSError, ValueError) as error:
            raise RunNotFoundError(f"{file} is not a plan: {str(error).splitlines()[0]}") from None


def _tell_version(file: Path) -> str:
    """Name the two versions where another one made the plan: an image of a worker may be older than its client."""
    mine = version("sparsebp")
    try:
        theirs = json.loads(file.read_bytes())["provenance"]["sparsebp_version"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return f"; sparsebp {theirs} made it, this is {mine}" if theirs and theirs != mine else ""


def content_hash(content: Any) -> str:
    """Return 12 hexadecimal digits that depend on the JSON content only, not on the order of keys.

    Args:
        content: Anything that JSON can hold.

    Returns:
        The first 12 digits of a sha256.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
