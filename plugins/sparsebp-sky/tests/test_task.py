"""The task that SkyPilot reads, and the options that it is made from."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError
from sparsebp_sky import SkyOptions
from sparsebp_sky.task import MOUNT, make_task, to_text

from sparsebp_cli.target import TargetOptions

# That of sky.utils.schemas, which this repository keeps for exported tasks.
SCHEMA = json.loads((Path(__file__).parents[3] / "tests/target/schema/sky-task.json").read_text(encoding="utf-8"))
NAME = "sparsebp-0123456789ab-00000000"
PLACE = {"bucket": "s3://runs", "remote": "s3:runs"}
RICH: dict[str, Any] = {
    "infra": ["aws/us-east-1", "k8s"],
    "gpus": ["L4:1", "A100:2"],
    "cpus": "8+",
    "memory": "32",
    "disk_gb": 100,
    "spot": True,
    "recovery": "FAILOVER",
    "image": "ghcr.io/me/sparsebp:latest",
    "setup": ["pip install sparsebp", "echo '$HOME'"],
    "mounts": {"/srv/data": "gs://sets/data"},
    "env": {"OMP_NUM_THREADS": "4"},
    "secrets": ["HF_TOKEN"],
}


def make(**options: Any) -> dict[str, Any]:
    task = make_task(SkyOptions(**{**PLACE, **options}), "0123456789ab", NAME)
    read: dict[str, Any] = yaml.safe_load(to_text(task))
    assert read == task, "what was written is what is read"
    return read


@pytest.mark.parametrize(
    "options", [{}, RICH, {"pool": "workers", "gpus": ["L4:1"], "secrets": ["HF_TOKEN"]}], ids=["plain", "rich", "pool"]
)
def test_a_task_keeps_the_schema_of_skypilot(options: dict[str, Any]) -> None:
    task = make(**options)
    jsonschema.Draft202012Validator(SCHEMA).validate(task)
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    task["resources"]["use_spots"] = True
    with pytest.raises(jsonschema.ValidationError, match="use_spots"):
        jsonschema.Draft202012Validator(SCHEMA).validate(task)


def test_a_task_asks_for_any_of_the_places_and_gpus() -> None:
    task = make(**RICH)
    assert task["resources"]["any_of"] == [
        {"infra": "aws/us-east-1", "accelerators": "L4:1"},
        {"infra": "aws/us-east-1", "accelerators": "A100:2"},
        {"infra": "k8s", "accelerators": "L4:1"},
        {"infra": "k8s", "accelerators": "A100:2"},
    ]
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"strategy": "FAILOVER"}
    assert task["file_mounts"]["~/sparsebp-bucket"] == {"source": "s3://runs", "mode": "MOUNT"}
    assert task["file_mounts"]["/srv/data"] == {"source": "gs://sets/data", "mode": "MOUNT"}
    assert task["secrets"] == {"HF_TOKEN": None}
    assert make(gpus=["L4:1"])["resources"] == {"use_spot": False, "accelerators": "L4:1"}


def test_a_task_for_a_pool_has_nothing_that_a_pool_would_ignore() -> None:
    task = make(pool="workers", gpus=["L4:1"])
    assert set(task) == {"name", "resources", "run"}
    assert task["resources"] == {"accelerators": "L4:1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": {"HF_TOKEN": "x"}}, "HF_TOKEN looks like a secret"),
        ({"env": {"A": "1"}, "secrets": ["A"]}, "secrets: A is also in env"),
        ({"secrets": ["HF_TOKEN=abc"]}, "secrets"),
        ({"setup": ["a\nb"]}, "write each line as a separate item"),
        ({"pool": "workers", "setup": ["true"]}, "setup: has no effect with pool"),
        ({"bucket": "runs"}, "bucket"),
        ({"remote": "--config=/tmp/x"}, "remote"),
        ({"gpus": ["L4 --foo"]}, "gpus"),
        ({"infra": ["aws us"]}, "infra"),
        ({"mounts": {"data": "s3://x"}}, "mounts"),
        ({"sync_seconds": 0}, "sync_seconds"),
        ({"python": ""}, "python"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SkyOptions(**{**PLACE, **options})


def test_words_of_a_recipe_stay_words_of_the_shell(tmp_path: Path) -> None:
    python = f"{tmp_path}/a b'; touch {tmp_path}/no; echo '"
    run = make(python=python)["run"]
    last = run.splitlines()[-1]
    subprocess.run(["bash", "-c", last], check=False, capture_output=True, env={"HOME": str(tmp_path)})
    assert not (tmp_path / "no").exists()


def test_the_blocks_of_the_readme_are_what_they_say() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    _, targets, pool = (block for block in re.findall(r"```text\n(.*?)```", readme, re.DOTALL))
    targets, pool = yaml.safe_load(targets), yaml.safe_load(pool)
    assert targets["cheap"].pop("kind") == "sky"
    options = SkyOptions(**targets["cheap"])
    jsonschema.Draft202012Validator(SCHEMA).validate(pool)
    place = f"~/{MOUNT}"
    assert pool["file_mounts"][place] == make_task(options, "0123456789ab", NAME)["file_mounts"][place]
    rows = re.findall(r"^\| (`.*?) \|", readme, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told == set(SkyOptions.model_fields) - set(TargetOptions.model_fields)
