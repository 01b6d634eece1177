"""Verbs that keep house, on runs that are damaged, alive or elsewhere: one clear line, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.run import RunFolder, home

from .conftest import Cli, Write, write_run

Damage = Callable[[RunFolder], None]


def cut_journal(run: RunFolder) -> None:
    file = run.path / "journal.jsonl"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_journal(run: RunFolder) -> None:
    (run.path / "journal.jsonl").unlink()


def scramble_journal(run: RunFolder) -> None:
    (run.path / "journal.jsonl").write_bytes(bytes(range(256)) * 20)


def write_plan(content: bytes) -> Damage:
    return lambda run: [run.plan_file.write_bytes(content), None][1]


def change_plan(**changes: object) -> Damage:
    def change(run: RunFolder) -> None:
        plan = json.loads(run.plan_file.read_bytes())
        for path, value in changes.items():
            *parents, last = path.split("__")
            part = plan
            for key in parents:
                part = part[key]
            part[last] = value
        run.plan_file.write_text(json.dumps(plan))

    return change


def make_plan_a_folder(run: RunFolder) -> None:
    run.plan_file.unlink()
    run.plan_file.mkdir()


def keep_plan_alone(run: RunFolder) -> None:
    for path in run.path.iterdir():
        if path != run.plan_file:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def lose_plan(run: RunFolder) -> None:
    run.plan_file.unlink()


def scramble_small_files(run: RunFolder) -> None:
    for name in ("labels.json", "target.json", "outline.json", "tracking.json", "trial.json"):
        (run.path / name).write_bytes(b"\xff{")


DAMAGES: dict[str, Damage] = {
    "cut journal": cut_journal,
    "no journal": lose_journal,
    "scrambled journal": scramble_journal,
    "empty plan": write_plan(b""),
    "half a plan": write_plan(b'{"recipe": {"name": "fa'),
    "a list for a plan": write_plan(b"[]"),
    "bytes for a plan": write_plan(b"\xff\xfe\x00"),
    "a plan of one key": write_plan(b'{"recipe": {"training": {"max_steps": 3}}}'),
    "a plan with a policy of text": change_plan(recipe__policy="topk"),
    "a plan with odd steps": change_plan(recipe__training__max_steps="many"),
    "a plan with an odd date": change_plan(created="yesterday"),
    "a plan with an odd name": change_plan(recipe__name=["a"]),
    "a plan with an odd address": change_plan(recipe__tracking__uri=3),
    "a plan with an unknown target": change_plan(recipe__target__kind="nowhere"),
    "a deep plan": write_plan(b"[" * 100_000),
    "a folder for a plan": make_plan_a_folder,
    "no plan": lose_plan,
    "nothing but the plan": keep_plan_alone,
    "scrambled small files": scramble_small_files,
}
VERBS = (
    "archive ID --to a.tar.gz",
    "archive ID OTHER --to a.tar.gz",
    "diff ID OTHER",
    "diff OTHER ID",
    "note ID text",
    "prune",
    "prune --dry-run",
    "prune ID",
    "rerun ID",
    "rm ID --yes",
    "rm ID OTHER --yes",
    "runs",
    "runs --columns run,note,training.learning_rate",
    "runs --where eval/loss<9 --sort -eval/loss",
    "runs --where seed=0",
    "runs -o json",
    "show ID",
    "tag @2 good",
    "tag ID good",
)
MADE_BY_VERBS = {"labels.json", "outline.json"}
CRASHED = 100


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_verb_says_what_is_wrong_and_loses_nothing_of_others(call: Cli, write_recipe: Write, damage: str) -> None:
    for number, verb in enumerate(VERBS):
        other, run = (write_run(write_recipe(name=f"{kind}-{number}")) for kind in ("other", "damaged"))
        for made in (run, other):
            for name in ("checkpoints/step-00000003", "model"):
                (made.path / name).mkdir(parents=True)
                (made.path / name / "weights.bin").write_bytes(bytes(100))
        DAMAGES[damage](run)
        mine, theirs = _read(run), _read(other)
        done = call(*({"ID": run.run_id, "OTHER": other.run_id}.get(word, word) for word in verb.split()))
        assert done.returncode != CRASHED, (verb, done.stderr)
        assert done.returncode == 0 or done.stderr.startswith("error: "), (verb, done.stderr)
        lost = {
            file
            for before, now in ((mine, _read(run)), (theirs, _read(other)))
            for file in before.items() - now.items()
        }
        removes = verb.startswith(("rm", "prune")) and done.returncode == 0
        assert removes or not lost, verb
        for made in (run, other):
            shutil.rmtree(made.path, ignore_errors=True)
    assert not (home() / "error.log").exists()


def _read(run: RunFolder) -> dict[Path, bytes]:
    files = (file for file in run.path.rglob("*") if file.is_file() and file.suffix != ".lock")
    return {file: file.read_bytes() for file in files if file.name not in MADE_BY_VERBS}
