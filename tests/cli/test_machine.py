"""The verbs about this machine: ``policies``, ``schema``, ``doctor``, ``sync``, ``ui``, and the shell's completion."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparsebp_cli.cli.checkup import check_notices
from sparsebp_cli.run import History

from .conftest import TESTS, Cli, Write, write_run

WIDTH = 100


def test_schema_is_json_with_the_options_of_policies(call: Cli) -> None:
    schema = json.loads(call("schema").stdout)
    assert "keep" in schema["$defs"]["policy.topk"]["properties"]


def test_policies_show_options_claims_and_broken_plugins(cli: Cli, tmp_path: Path) -> None:
    info = tmp_path / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparsebp.policies]\nlost = no_such_module:Lost\n")
    path = f"{tmp_path}{os.pathsep}{TESTS / 'cli'}{os.pathsep}{TESTS / 'target'}"
    shown = cli("policies", PYTHONPATH=path).stdout
    assert "memory, time" in shown
    assert "measured here: " in cli("policies", "topk", PYTHONPATH=path).stdout
    one = cli("policies", "topk", PYTHONPATH=path).stdout
    assert one.startswith("topk (GradientSelector, sparsebp")
    assert "number in (0, 1]" in one
    assert max(len(line.rstrip()) for line in one.splitlines()) <= WIDTH
    unknown = cli("policies", "topq", PYTHONPATH=path)
    assert (unknown.returncode, "did you mean topk?" in unknown.stderr) == (2, True)
    assert "varies: depends on an option" in shown
    assert "broken-plugin 1.0" in shown
    assert "lost of broken-plugin 1.0 is broken: ModuleNotFoundError: No module named 'no_such_module'\n" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= WIDTH
    found = {
        line["name"]: line for line in json.loads(cli("policies", "-o", "json", PYTHONPATH=path).stdout)["policies"]
    }
    assert [found[name]["exact"] for name in ("dense", "topk", "tokens")] == [True, False, None]
    assert found["lost"]["kind"] == "broken"


def test_doctor_finds_this_machine_well(cli: Cli) -> None:
    done = cli("doctor")
    assert done.returncode == 0, done.stdout
    found = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines() if line.startswith((" ok", " warn"))}
    assert set(found) >= {"python", "packages", "torch", "threads", "home", "disk", "tracking", "policies", "recipes"}
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= WIDTH


def test_settings_of_notifications_are_one_warning(
    cli: Cli, write_recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.yaml"
    monkeypatch.setenv("SPARSEBP_SETTINGS", str(settings))
    assert check_notices() == []
    settings.write_text("notify: [{command: [notify-send, done]}]\n")
    text = (
        f"{settings} has no effect: `notify` was removed after 0.5; instead, append `; notify-send done` to the command"
    )
    assert [(found.level, found.text) for found in check_notices()] == [("warn", text)]
    done = cli("run", write_recipe(), SPARSEBP_SETTINGS=str(settings))
    assert done.returncode == 0
    assert text in done.stderr.replace("\n", " ")


def test_doctor_fails_on_what_keeps_runs_from_working(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environ = {"SPARSEBP_HOME": str(tmp_path / "file" / "home"), "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    done = cli("doctor", "-o", "json", **environ)
    assert done.returncode == 1
    found = {finding["what"]: finding for finding in json.loads(done.stdout)["checks"]["this machine"]}
    assert (found["home"]["level"], found["tracking"]["level"]) == ("fail", "warn")
    assert found["home"]["hint"]


def test_sync_sends_what_was_not_sent_and_twice_sends_nothing(cli: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe(), "~tracking.uri")
    first, second = cli("sync", run.run_id), cli("sync", "--all")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    points = sum(len(points) for points in History.load(run.path).metrics.values())
    assert first.stdout.startswith(f"{run.run_id} fake: {points} points sent to sqlite:///")
    assert second.stdout.startswith(f"{run.run_id} fake: 0 points sent")


def test_sync_to_a_store_that_cannot_be_used_is_a_warning_and_no_success(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    done = call("sync", "--all")
    assert done.returncode == 100
    assert done.stderr.startswith(f"warning: {run.run_id}: tracking store sqlite:////dev/null/m.db: [Errno ")
    assert done.stderr.count("\n") == 1


def test_a_file_store_in_the_environment_is_refused_before_anything_is_trained(
    call: Cli, write_recipe: Write, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./mlruns")
    done = call("run", write_recipe(), "--set", "~tracking.uri")
    assert done.returncode == 100
    assert done.stderr.startswith("error: MLFLOW_TRACKING_URI must be a server (http, https) or a database (sqlite")
    assert not (home_folder / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "expected"), [("show topk", "topk-rows"), ("logs @", "@last"), ("run top", "topk-rows.yaml")]
)
def test_the_shell_completes_runs_and_recipes(cli: Cli, two_runs: None, typed: str, expected: str) -> None:
    environ = {"_SPARSEBP_COMPLETE": "complete_bash", "COMP_WORDS": f"sparsebp {typed}", "COMP_CWORD": "2"}
    assert expected in cli(real=True, **environ).stdout.split()
