"""A SkyPilot and a bucket on this disk, and runs for the worker that trains nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_rclone
import fake_sky
import pytest
from sparsebp_sky import SkyEngine, SkyOptions

from sparsebp_cli.target import Plan, RunFolder, Target, make_target

WORKER = "sparsebp_cli.testing.worker"


class Sky:
    """The SkyPilot of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bucket = folder / "sky", folder / "bucket"
        self.options = {
            "bucket": "s3://runs",
            "remote": str(self.bucket),
            "python": sys.executable,
            "sync_seconds": 0.1,
            "poll_seconds": 0.1,
        }

    def tell(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.folder / name).unlink()

    def jobs(self) -> list[dict[str, Any]]:
        records = (self.folder / "jobs").glob("*/record.json")  # a launch makes the folder before its record
        found = [json.loads(record.read_text()) for record in records]
        return sorted(found, key=lambda job: job["job_id"])

    def statuses(self) -> list[str]:
        return [job["status"] for job in self.jobs()]

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def engine(self, **options: object) -> SkyEngine:
        return SkyEngine(SkyOptions(worker=WORKER, **{**self.options, **options}))


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sky:
    made = Sky(tmp_path)
    made.folder.mkdir()
    made.bucket.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("sky", fake_sky), ("rclone", fake_rclone)):
        if name == "rclone" and os.environ.get("WITH_RCLONE"):
            continue  # the one of this machine, on the same folder
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module.__file__} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SKY", str(made.folder))
    monkeypatch.setenv("BUCKET", str(made.bucket))
    monkeypatch.setenv("SPARSEBP_HOME", str(tmp_path / "home"))
    return made


def prepare(sky: Sky, fake: str = "slow", **options: object) -> tuple[RunFolder, Target]:
    recipe = {
        "version": 1,
        "name": f"sky-{fake}",
        "model": {"name": "none"},
        "dataset": {"name": "none"},
        "training": {"max_steps": 12},
        "tracking": {"uri": "file:///nowhere", "tags": {"fake": fake}},
        "target": {"kind": "sky", "worker": WORKER, **sky.options, **options},
    }
    plan = Plan.model_validate({"recipe": recipe})
    run = RunFolder(Path(os.environ["SPARSEBP_HOME"]) / "runs" / plan.run_id)
    run.path.mkdir(parents=True)
    plan.save(run.path)
    return run, make_target(plan.recipe.target)


def records(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    lines = run.journal_file.read_text().splitlines() if run.journal_file.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def steps(run: RunFolder) -> list[int]:
    return [record["step"] for record in records(run, "metrics")]


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
