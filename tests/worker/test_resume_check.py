"""A run goes on under the recipe, the code and the data that its checkpoint was made under, or says what changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sparsebp_cli.plan.seal import Seal, is_free
from sparsebp_cli.run import History, JournalWriter, RunFolder, State, home
from tests.worker.conftest import TEXT, work

pytestmark = pytest.mark.promise("R17")

Edit = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "policy": (lambda r: r.update(policy=[{"name": "frozen", "freeze": ["*norm*"]}]), "policy.0.name"),
    "seed": (lambda r: r["training"].update(seed=7), "training.seed"),
    "batch size": (
        lambda r: r["training"].update(per_device_train_batch_size=2),
        "training.per_device_train_batch_size",
    ),
    "max_steps": (lambda r: r["training"].update(max_steps=12), "training.max_steps"),
    "dataset": (lambda r: r["dataset"].update(max_seq_length=24), "dataset.max_seq_length"),
    "optim": (lambda r: r["training"].update(optim="sgd"), "training.optim"),
    "lora": (lambda r: r["model"].update(lora={"r": 2}), "model.lora.r"),
    "hidden_size": (lambda r: r["model"]["config"].update(hidden_size=48), "model.config.hidden_size"),
    "learning rate": (lambda r: r["training"].update(learning_rate=1e-3), "training.learning_rate"),
}


@pytest.fixture
def killed(tiny_recipe, prepared, tmp_path_factory) -> RunFolder:
    """A run that was killed after step 9 and has a checkpoint of step 8; made once, copied for each test."""
    kept = tmp_path_factory.getbasetemp() / "killed-run"
    if not kept.exists():
        run = prepared(tiny_recipe(dataset={"name": str(_text(kept.parent))}))
        assert work(run) == 0
        journal = run.path / "journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(line for line in lines if json.loads(line).get("step", 0) < 10))
        shutil.rmtree(run.path / "model")
        shutil.copytree(run.path, kept)
    run = RunFolder(home() / "runs" / json.loads((kept / "plan.json").read_bytes())["run_id"])
    shutil.copytree(kept, run.path, dirs_exist_ok=True)
    assert run.state() is State.INTERRUPTED
    return run


def _text(folder: Path) -> Path:
    file = folder / "text-of-the-killed-run.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def edit_plan(run: RunFolder, edit: Edit) -> None:
    plan = json.loads(run.plan_file.read_bytes())
    edit(plan["recipe"])
    run.plan_file.write_text(json.dumps(plan))


def allow(run: RunFolder, *fields: str) -> None:
    with JournalWriter(run.path) as journal:
        journal.attempt -= 1
        journal.write("allow", fields=list(fields))


@pytest.mark.parametrize(("edit", "field"), EDITS.values(), ids=EDITS)
def test_an_edited_plan_is_refused_before_anything_is_trained(killed: RunFolder, edit: Edit, field: str) -> None:
    edit_plan(killed, edit)
    before = History.load(killed.path)
    assert work(killed) == 2
    history = History.load(killed.path)
    end = history.ends[-1]
    assert field in [change[0] for change in end["changes"]]
    assert "changed since the checkpoint of step 8: " in end["text"]
    assert f"--allow-change {field}" in end["text"]
    assert history.metrics == before.metrics
    assert history.warm == before.warm  # it did not count as an attempt
    assert killed.state() is State.FAILED
    assert not (killed.path / "model").exists()
    assert "Traceback" not in killed.log_file.read_text()


def test_a_changed_data_file_is_refused_and_an_allowed_one_is_recorded(killed: RunFolder) -> None:
    recipe = json.loads(killed.plan_file.read_bytes())["recipe"]
    file = Path(recipe["dataset"]["name"])
    digest = History.load(killed.path).facts["dataset_digest"]
    try:
        file.write_text(TEXT.replace("lazy dog", "lazy cat"), encoding="utf-8")
        assert work(killed) == 2
        history = History.load(killed.path)
        assert [change[0] for change in history.ends[-1]["changes"]] == ["data"]
        assert history.facts["dataset_digest"] == digest
        allow(killed, "data")
        assert work(killed) == 0
        history = History.load(killed.path)
        (change,) = history.facts["changes"]
        assert (change["field"], change["then"], change["step"]) == ("data", json.dumps(digest), 8)
        assert any("allowed: data" in text for _, level, text in history.notes if level == "warning")
    finally:
        file.write_text(TEXT, encoding="utf-8")


def test_an_allowed_change_goes_on_is_recorded_and_is_asked_for_once(killed: RunFolder) -> None:
    edit_plan(killed, EDITS["seed"][0])
    allow(killed, "training")  # the whole section
    assert work(killed) == 0
    history = History.load(killed.path)
    assert [change["field"] for change in history.facts["changes"]] == ["training.seed"]
    assert max(history.series("train/loss")) == 10
    shutil.rmtree(killed.path / "model")
    journal = killed.path / "journal.jsonl"  # killed again behind the same checkpoint: asked once, not twice
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    assert work(killed) == 0


@pytest.mark.parametrize(
    ("name", "words"), [("optim", "another optimizer"), ("hidden_size", "shape"), ("lora", "lora")]
)
def test_an_allowed_change_that_does_not_fit_is_one_line(killed: RunFolder, name: str, words: str) -> None:
    edit, _ = EDITS[name]
    edit_plan(killed, edit)
    allow(killed, "training", "model")
    assert work(killed) == 2
    text = History.load(killed.path).ends[-1]["text"]
    assert text.startswith("the checkpoint of step 8 does not fit this run's recipe: ")
    assert words in text
    assert "Traceback" not in killed.log_file.read_text()


def test_what_no_number_depends_on_may_change_and_is_told(killed: RunFolder) -> None:
    def edit(recipe: dict[str, Any]) -> None:
        recipe["name"] = "another"
        recipe["checkpoint"]["every"] = 5
        recipe["tracking"]["tags"] = {"figure": "one"}

    edit_plan(killed, edit)
    assert work(killed) == 0
    told = [text for _, level, text in History.load(killed.path).notes if "without effect on any result" in text]
    assert [text.rpartition(": ")[2].partition(" ")[0] for text in told] == [
        "name",
        "checkpoint.every",
        "tracking.tags.figure",
    ]
    assert "changes" not in History.load(killed.path).facts


def test_a_checkpoint_of_an_older_version_says_that_nothing_was_compared(killed: RunFolder) -> None:
    for seal in (killed.path / "checkpoints").glob("*/seal.json"):
        seal.unlink()
        manifest = json.loads((seal.parent / "manifest.json").read_bytes())
        del manifest["sha256"]["seal.json"]
        (seal.parent / "manifest.json").write_text(json.dumps(manifest))
    assert work(killed) == 0
    assert any("changes since then are unknown" in text for _, _, text in History.load(killed.path).notes)


def test_without_a_checkpoint_the_journal_has_what_the_run_began_under(killed: RunFolder) -> None:
    shutil.rmtree(killed.path / "checkpoints")
    edit_plan(killed, EDITS["seed"][0])
    assert work(killed) == 2
    assert "changed since the start of the run: training.seed" in History.load(killed.path).ends[-1]["text"]


def test_other_versions_of_the_code_are_changes() -> None:
    then, now = (Seal({}, {"sparsebp": number, "torch": "2.13.0"}, "d") for number in ("0.1.0", "0.2.0"))
    assert [tuple(change) for change in then.changes(now)] == [("code.sparsebp", '"0.1.0"', '"0.2.0"')]


def test_a_key_that_a_later_version_added_with_a_default_is_no_change(tiny_recipe) -> None:
    now = tiny_recipe().model_dump(mode="json")
    then = json.loads(json.dumps(now))
    del then["training"]["mixed_precision"]
    assert Seal(then, {}).changes(Seal(now, {})) == []


def test_the_number_of_processes_is_not_free(tiny_recipe) -> None:
    then = tiny_recipe().model_dump(mode="json")
    changes = Seal(then, {}).changes(Seal(then | {"target": then["target"] | {"processes": 2, "threads": 2}}, {}))
    assert {change.field: is_free(change) for change in changes} == {
        "target.processes": False,
        "target.threads": True,
    }


def test_a_run_that_began_on_faulty_texts_goes_on_and_a_new_one_does_not_start(
    tiny_recipe, prepared, tiny_folder: Path, tmp_path: Path
) -> None:
    end = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer").eos_token
    file = tmp_path / "rows.jsonl"

    def write(tail: str) -> None:
        rows = ({"prompt": f"the fox {n}", "completion": f" jumps {n}{tail}"} for n in range(30))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows = {"name": str(file), "format": "completion", "max_seq_length": 64}
    recipe = tiny_recipe(dataset=rows, checkpoint={"stop_at": 4})
    begun, new = prepared(recipe), prepared(recipe)
    write("")  # a release before this one took what follows, too
    assert work(begun) == 0
    write(f"{end}\n")
    edit_plan(begun, lambda r: r["checkpoint"].update(stop_at=None))
    allow(begun, "data")
    assert work(begun) == 0
    assert begun.state() is State.FINISHED
    told = [text for _, level, text in History.load(begun.path).notes if level == "warning" and "twice" in text]
    assert len(told) == 2  # of training and held-out rows
    assert work(new) == 2
    assert "end or beginning of sequence twice" in History.load(new.path).ends[-1]["text"]


@pytest.mark.parametrize(
    ("key", "value", "is_scaled"),
    [("learning_rate", 1e-5, True), ("weight_decay", 0.9, False), ("optim_args", {"betas": [0.5, 0.6]}, False)],
)
def test_an_allowed_change_of_the_optimizer_acts(killed: RunFolder, key: str, value: object, is_scaled: bool) -> None:
    before = History.load(killed.path).series("train/learning_rate")
    copy = killed.path.parent / "0123456789ab"
    shutil.copytree(killed.path, copy)
    edit_plan(killed, lambda recipe: recipe["training"].update({key: value}))
    allow(killed, "training")
    assert work(killed) == work(RunFolder(copy)) == 0
    changed, same = (History.load(folder) for folder in (killed.path, copy))
    rates = changed.series("train/learning_rate"), same.series("train/learning_rate")
    assert rates[0][8] == before[8]
    factor = 1e-5 / json.loads((copy / "plan.json").read_bytes())["recipe"]["training"]["learning_rate"]
    assert rates[0][10] == pytest.approx(rates[1][10] * (factor if is_scaled else 1.0))
    assert changed.last("eval/loss") != same.last("eval/loss")
    assert changed.series("train/loss")[9] == same.series("train/loss")[9]  # computed before the first changed update
