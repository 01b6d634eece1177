"""How ``resume`` refuses, and what the end of a run shows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sparsebp_cli.cli.follow import print_end
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.run import JournalWriter, RunFolder, State, read
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.local import LocalJob
from sparsebp_cli.worker.policy import make_policies

from .conftest import Cli, Write, write_run


@pytest.fixture
def run(write_recipe: Write) -> RunFolder:
    return write_run(write_recipe())


def end(run: RunFolder, status: State, **fields: object) -> None:
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=3, environment={})
        journal.write("end", status=status, step=3, text="it says why", **fields)


def test_a_cancelled_run_is_not_resumed_without_saying_so(call: Cli, run: RunFolder) -> None:
    end(run, State.CANCELLED)
    before = sorted(run.path.iterdir())
    done = call("resume", run.run_id)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {run.run_id} was cancelled; `sparsebp resume {run.run_id} --cancelled` also continues cancelled runs\n"
    )
    assert sorted(run.path.iterdir()) == before


def test_what_changed_is_a_table_and_exit_code_2(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    end(run, State.FAILED, changes=[["training.seed", "0", "7"], ["data", '"ab"', '"cd"']])
    assert print_end(LocalJob(run)) == 2
    shown = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["field", "then", "now"] in shown
    assert ["training.seed", "0", "7"] in shown
    assert ["data", '"ab"', '"cd"'] in shown


def test_what_changed_is_shown_as_it_was_written() -> None:
    then, now = Seal({"dataset": {"name": "h\u00f6ren.txt"}}, {}), Seal({"dataset": {"name": "sehen.txt"}}, {})
    assert [(change.then, change.now) for change in then.changes(now)] == [('"h\u00f6ren.txt"', '"sehen.txt"')]


def test_show_tells_how_the_last_attempt_ended_and_not_an_earlier_one(call: Cli, run: RunFolder) -> None:
    end(run, State.FAILED)
    assert "failed: it says why" in call("show", run.run_id).stdout
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=3, environment={})
    assert "it says why" not in call("show", run.run_id).stdout


def test_cancel_of_a_run_whose_target_does_not_answer_does_not_end_with_0(
    call: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "journal.jsonl").write_text("")
    job = SimpleNamespace(cancel=lambda _: State.UNREACHABLE)
    monkeypatch.setattr("sparsebp_cli.cli.control.reattach", lambda _: job)
    done = call("cancel", run.run_id)
    assert done.returncode == 101
    assert done.stdout == (
        f"{run.run_id} is unreachable: its target does not answer; the run stops when the target answers again\n"
    )


def test_an_allowed_change_is_written_for_the_next_attempt(
    call: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(run, State.INTERRUPTED)
    submitted: list[list[RunFolder]] = []

    def submit_none(folders: list[RunFolder]) -> list[LocalJob]:
        submitted.append(folders)
        return []

    monkeypatch.setattr("sparsebp_cli.cli.control.submit_all", submit_none)
    call("resume", run.run_id, "--detach", "--allow-change", "training.seed", "--allow-change", "data")
    (record,) = (record for record, _ in read(run.path) if record["kind"] == "allow")
    assert (record["fields"], record["attempt"]) == (["training.seed", "data"], 2)
    assert submitted == [[run]]


def test_a_detached_resume_of_which_nothing_lives_says_so_and_does_not_end_with_0(
    call: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(run, State.INTERRUPTED)
    monkeypatch.setattr("sparsebp_cli.cli.control.submit_all", lambda folders: [LocalJob(run) for run in folders])
    done = call("resume", run.run_id, "--detach")
    assert done.returncode == 101
    assert f"error: run {run.run_id} interrupted: it says why" in done.stderr


def test_the_summary_has_the_command_that_sends_what_was_not_sent(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"the tracking store took longer than 30 s; `sparsebp sync {run.run_id}` sends it later"
    Launch(0, 1, warning=line).save(run)
    assert print_end(LocalJob(run)) == 0
    out, errors = capsys.readouterr()
    assert line in " ".join(out.split())
    assert errors == f"warning: {line}\n"


def test_a_run_with_phases_is_shown_and_compared_and_does_not_go_on(call: Cli, run: RunFolder) -> None:
    plan = json.loads(run.plan_file.read_text())
    entry = plan["recipe"].pop("policy")
    plan["recipe"]["schedule"] = [{"until": 0.5, "policy": [{"name": "dense"}]}, {"until": None, "policy": entry}]
    run.plan_file.write_text(json.dumps(plan))
    for words in (["runs"], ["show", run.run_id], ["compare", run.run_id, "-o", "json", "--all"]):
        done = call(*words)
        assert done.returncode == 0, done.stderr
        assert "topk" in done.stdout
    assert "schedule of dense until 0.5, topk" in call("show", run.run_id).stdout
    with pytest.raises(
        PolicyError, match=r"^policy 'schedule' was removed after version 0.5: give an option a schedule \(keep: "
    ):
        make_policies(Plan.load(run.plan_file).recipe)


PHASES = {"schedule": [{"until": 0.5, "policy": [{"name": "dense"}]}, {"until": None, "policy": [{"name": "dense"}]}]}
OF_0_5 = {
    "policy 'schedule' was removed": PHASES,
    "policy 'infobatch' was removed": {"policy": [{"name": "infobatch"}]},
    "keep_warmup_steps": {"policy": [{"name": "tokens", "score": "loss", "keep": 0.3, "keep_warmup_steps": 3}]},
    "mode: got 'stop'": {"policy": [{"name": "tokens", "score": "random", "keep": 0.3, "mode": "stop"}]},
    "training.max_cost: 2.0 was removed": {"training": {"max_cost": 2.0}},
    "training.optim: 'muon' was removed": {"training": {"optim": "muon"}},
    "measure.generate.metrics: unknown metric 'of-a-package', allowed": {
        "measure": {"generate": {"metrics": ["of-a-package"]}},
        "dataset": {"format": "completion"},
    },
    "dataset.name: no file or folder /none/rows.jsonl; searched in": {"dataset": {"name": "/none/rows.jsonl"}},
    "model.adapter: no file or folder /none/adapter; searched in": {
        "model": {"name": "austen-llama", "adapter": "/none/adapter"}
    },
    "model.name: no file or folder /none/model/large; searched in": {"model": {"name": "/none/model/large"}},
}


@pytest.mark.parametrize("told", OF_0_5)
def test_a_run_of_another_version_is_refused_before_anything_changes(call: Cli, run: RunFolder, told: str) -> None:
    end(run, State.INTERRUPTED)
    plan = json.loads(run.plan_file.read_text())
    recipe = plan["recipe"]
    for key, value in OF_0_5[told].items():
        recipe[key] = {**recipe[key], **value} if isinstance(value, dict) else value
    recipe["checkpoint"]["stop_at"] = 3  # would be written as passed
    plan["provenance"]["sparsebp_version"] = "0.5.0"
    run.plan_file.write_text(json.dumps(plan))
    before = {file: file.read_bytes() for file in run.path.iterdir() if file.is_file()}
    done = call("resume", run.run_id, "--allow-change", "code")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {run.run_id} was begun by sparsebp 0.5.0, and cannot continue here: ")
    assert told in done.stderr
    assert {file: file.read_bytes() for file in run.path.iterdir() if file.is_file()} == before
