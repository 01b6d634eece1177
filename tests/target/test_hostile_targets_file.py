"""Hostile values at every text of `targets.yaml`: refused in one line, or one word of the engine's command line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.recipe.target import find_target, named_target_section
from sparsebp_cli.run import create_run
from sparsebp_cli.target import make_target

from .test_injection import HOSTILE

# Programs of engines, which note that they were called; ssh gives its last word to a shell, as the real one does.
STUB = """#!/bin/sh
printf '%s\\n' "$0" >> "$CALLED"
[ "${0##*/}" != ssh ] || { for word; do last=$word; done; cd "$PLACE" && exec /bin/sh -c "$last"; }
exit 1
"""
ENGINES = ("docker", "podman", "ssh", "sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "kubectl")
CANARIES = ("touch", "sh-canary", "curl")
KINDS = {"docker": {}, "slurm": {"host": "ssh://there", "folder": "/there"}, "kubernetes": {}}
SHELL = {"setup"}  # whose lines are commands, as its description says


MORE = ["ssh://-oProxyCommand=touch", "ssh://-F", "ssh://a;touch pwned", "/a:/b;touch pwned"]


def hostile_options(kind: str, values: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a hostile value in each option of a kind that may hold text, by itself, in a list and in a mapping."""
    for name, field in find_target(kind).options_class.model_fields.items():
        if name in SHELL:
            continue
        shape = str(field.annotation)
        for value in values:
            if "dict" in shape:
                yield name, {name: {"A": value}}
                yield name, {name: {value: "a"}}
            if "list" in shape:
                yield name, {name: [value]}
            if "str" in shape or not get_args(field.annotation):
                yield name, {name: value}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of every engine, and nothing else but what scripts of ours use."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "place").mkdir()
    for name in (*ENGINES, *CANARIES):
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("cat", "mkdir", "rm", "tar", "mv"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CALLED", str(tmp_path / "called"))
    monkeypatch.setenv("PLACE", str(tmp_path / "place"))
    monkeypatch.setenv("SPARSEBP_TARGETS", str(tmp_path / "targets.yaml"))
    monkeypatch.chdir(tmp_path / "place")


def try_all(kind: str, values: Sequence[str], tmp_path: Path) -> tuple[int, int]:
    """Submit a run with each value in each option; return how many were tried and how many of these were accepted."""
    trials, accepted, refused = 0, 0, list[str]()
    for name, options in hostile_options(kind, values):
        trials += 1
        (tmp_path / "targets.yaml").write_text(yaml.safe_dump({"mine": {"kind": kind} | KINDS[kind] | options}))
        try:
            section = named_target_section("mine")
        except SparseBPError as error:
            refused.append(str(error))
            continue
        accepted += 1
        recipe = {
            "version": 1,
            "name": "x",
            "model": {"name": "m"},
            "dataset": {"name": "d"},
            "target": section.model_dump(mode="json"),
        }
        plan = Plan(recipe=Recipe.model_validate(recipe))
        run = create_run(plan.run_id)
        plan.save(run.path)
        with pytest.raises(SparseBPError):  # no engine is here
            make_target(section).engine.start([run], 1)  # type: ignore[attr-defined]
        called = {Path(line).name for line in (tmp_path / "called").read_text().splitlines()}
        assert called.isdisjoint(CANARIES), (name, options)
        assert not [path for path in (tmp_path / "place").rglob("*") if "pwned" in path.name], (name, options)
    assert accepted > 5
    assert not [line for line in refused if "\n" in line]
    return trials, accepted


@pytest.mark.promise("R19")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("engines")
def test_no_text_of_targets_yaml_is_taken_for_a_command(kind: str, tmp_path: Path, record_property) -> None:
    record_property("trials", try_all(kind, [*HOSTILE[:6:3], *MORE], tmp_path)[0])


@pytest.mark.chaos
@pytest.mark.promise("R19")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("engines")
def test_no_hostile_text_in_any_option_is_taken_for_a_command(kind: str, tmp_path: Path, record_property) -> None:
    trials, accepted = try_all(kind, HOSTILE, tmp_path)
    record_property("trials", trials)
    record_property("of which", ("options taken as one word", accepted))
