"""A question from its first run to its answer; trained in this process by a worker that trains nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_cli.run import durable, list_runs
from sparsebp_lab.judge.answer import JudgeAnswer
from sparsebp_lab.judge.ledger import Ledger
from sparsebp_lab.judge.session import TEST_PAIRS, JudgeSession

from .here import make_session, tell, write_recipe

BETTER, WORSE, NULL = "training.learning_rate=0.7", "training.learning_rate=1.5", "training.weight_decay=0.03"


def answer(session: JudgeSession) -> JudgeAnswer:
    question = session.run()
    return JudgeAnswer(session.proposal, question, session.book, session.ledger, session.terms)


@pytest.fixture(autouse=True)
def draw_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all ledgers one salt, because with some salts a better candidate loses its first pairs."""
    monkeypatch.setattr("sparsebp_lab.judge.ledger.secrets", SimpleNamespace(token_hex="5a".__mul__))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def test_a_better_candidate_is_kept_and_its_gain_measured_apart(file: Path) -> None:
    found = answer(make_session(file, BETTER))
    assert (found.outcome, found.exit_code, found.question.place) == ("better", 0, 1)
    assert found.evidence is not None
    assert found.evidence >= 120.0  # one over the level of the first place
    assert found.gain is not None
    assert found.gain.pairs == 2
    assert abs(found.gain.mean - 0.3) < 0.2
    stages = {stage: {look.runs for look in some} for stage, some in found.question.looks.items()}
    assert stages["gain"].isdisjoint(stages["pairs"])
    assert stages["pairs"].isdisjoint(stages["screen"])
    assert found.question.spent["runs"] == len(list_runs())
    assert "better" in found.lines()[0]


def test_the_same_question_is_answered_again_without_a_run(file: Path, tmp_path: Path) -> None:
    first = answer(make_session(file, BETTER))
    runs = len(list_runs())
    renamed = write_recipe(tmp_path, "another")
    again = answer(make_session(renamed, BETTER, "name=yet-another"))
    assert again.question.digest == first.question.digest
    assert tell(again.question) == tell(first.question)
    assert (len(list_runs()), len(again.book.questions)) == (runs, 1)


def test_candidates_of_one_baseline_share_its_screen(file: Path) -> None:
    first = answer(make_session(file, WORSE))
    second = answer(make_session(file, "training.learning_rate=1.6"))
    assert (first.outcome, second.outcome) == ("not shown", "not shown")
    assert second.question.spent["runs"] == 1  # the candidate's alone
    assert second.question.place is None
    assert "dropped in the screening" in second.reason
    assert second.exit_code == 11


def test_a_null_is_not_kept_and_a_margin_shows_that_both_are_equal(file: Path) -> None:
    assert answer(make_session(file, NULL)).outcome == "not shown"
    equal = make_session(file, "training.weight_decay=0.04", margin=0.2)
    found = answer(equal)
    assert (found.outcome, found.exit_code) == ("equal within the margin", 10)
    assert "screen" not in found.question.looks
    worse = answer(make_session(file, WORSE, margin=0.2, worst=1.0))
    assert (worse.outcome, worse.exit_code) == ("worse", 12)


def test_a_candidate_that_diverges_is_worse(file: Path) -> None:
    found = answer(make_session(file, "training.weight_decay=0.5"))
    assert (found.outcome, found.reason) == ("worse", "a run of the candidate diverged")


def test_a_budget_ends_it_early_and_a_larger_one_goes_on(file: Path) -> None:
    run = 20e9  # FLOPs: 20 steps of 1e9 each
    found = answer(make_session(file, BETTER, budget=f"{14 * run:g}"))
    assert found.outcome == "not shown"
    assert found.question.outcome is None
    assert found.more_seeds is not None
    assert found.more_seeds > 0
    assert 0 < found.question.spent["flops"] <= 14 * run
    assert "is spent" in found.reason
    looks = tell(found.question)
    more = answer(make_session(file, BETTER))
    assert more.outcome == "better"
    after = tell(more.question)
    assert all(after[stage][: len(some)] == some for stage, some in looks.items())
    assert more.to_facts()["answered"] is True


def test_the_estimate_of_more_seeds_uses_the_worst_case_that_will_be_staked(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[float] = []

    def forecast(gains: object, worst: float, *_: object) -> None:
        used.append(worst)

    monkeypatch.setattr("sparsebp_lab.judge.answer.forecast", forecast)
    found = answer(make_session(file, BETTER, budget=f"{6 * 20e9:g}", effect=0.2, worst=None))
    assert found.question.bar is None  # still screening
    assert found.more_seeds is None
    assert found.question.aim is not None
    assert found.question.aim.run_spread != found.question.aim.effect
    assert used == [pytest.approx(20 * found.question.aim.run_spread)]  # standard deviations of a run, not effects


def test_a_signal_that_leaves_a_question_open_gives_the_exit_code(file: Path) -> None:
    session = make_session(file, BETTER)
    session.is_stopped = True
    parts = (session.proposal, session.run(), session.book, session.ledger, session.terms)
    assert [JudgeAnswer(*parts).exit_code, JudgeAnswer(*parts, 143).exit_code] == [11, 143]
    decided = make_session(file, BETTER)
    parts = (decided.proposal, decided.run(), decided.book, decided.ledger, decided.terms)
    assert JudgeAnswer(*parts, 143).exit_code == 0


def test_another_effect_margin_or_worst_case_is_refused_once_asked(file: Path) -> None:
    answer(make_session(file, WORSE))
    with pytest.raises(UsageError, match=r"this comparison began with --effect none"):
        make_session(file, WORSE, effect=0.1).run()
    with pytest.raises(UsageError, match=r"this comparison began with --margin none"):
        make_session(file, WORSE, margin=0.1).run()
    with pytest.raises(UsageError, match=r"this comparison began with --worst 0.5"):
        make_session(file, WORSE, worst=0.6).run()


def test_sides_that_are_one_or_validated_differently_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="are identical"):
        make_session(file, "name=other")
    with pytest.raises(UsageError, match=r"make dataset\.max_seq_length the same"):
        make_session(file, "dataset.max_seq_length=64")
    with pytest.raises(UsageError, match=r"make measure\.eval_examples the same"):
        make_session(file, "measure.eval_examples=3")


def test_the_test_split_opens_once_and_for_a_kept_candidate_alone(file: Path) -> None:
    with pytest.raises(UsageError, match="run judge without --final first"):
        make_session(file, BETTER).open_test()
    kept = make_session(file, BETTER, gain=0)
    kept.run()
    assert all("test/loss" not in run.journal_file.read_text() for run in list_runs())
    question = kept.open_test()
    found = JudgeAnswer(kept.proposal, question, kept.book, kept.ledger, None)
    assert (found.outcome, found.test is not None and found.test.pairs) == ("better", TEST_PAIRS)
    runs = len(list_runs())
    assert tell(make_session(file, BETTER).open_test()) == tell(question)
    assert len(list_runs()) == runs
    other = make_session(file, "training.learning_rate=0.6", gain=0)
    other.run()
    with pytest.raises(UsageError, match="has used these data's test split"):
        other.open_test()


def test_a_run_without_a_result_stops_the_judge_and_is_no_look(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(file, BETTER)
    monkeypatch.setattr(session.arms, "read", lambda trial, metric="": None)
    with pytest.raises(RunFailedError, match="has no value of eval/loss after its last step"):
        session.run()
    assert session.book.questions[session.proposal.digest].looks == {}
    assert answer(make_session(file, BETTER)).outcome == "better"


def _die_at(number: int, how: str) -> Callable[[Path, bytes], None]:
    """Return an ``append`` that kills this process at its nth call: before, in the middle of, or after the write."""
    count, real = 0, durable.append

    def append(path: Path, content: bytes) -> None:
        nonlocal count
        count += path.name == "ledger.jsonl"
        if count == number and how != "after":
            if how == "half":
                with path.open("ab") as stream:
                    stream.write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, content)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return append


def _judge(file: Path, number: int, how: str) -> None:
    durable.append = _die_at(number, how)
    make_session(file, BETTER).run()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_killed_at_every_write_it_loses_no_look_and_counts_none_twice(
    file: Path, how: str, home_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_session(file, BETTER)
    asked.ask()  # the first line holds what seeds follow from, so both stores begin with this ledger
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SPARSEBP_HOME", str(tmp_path / "undisturbed"))
        (tmp_path / "undisturbed" / "judge").mkdir(parents=True)
        (tmp_path / "undisturbed" / "judge" / "ledger.jsonl").write_bytes(asked.ledger.file.read_bytes())
        undisturbed = answer(make_session(file, BETTER))
    context, kills = multiprocessing.get_context("fork"), 0
    while True:
        # The second write of each attempt: one look is made, and the next dies.
        judge = context.Process(target=_judge, args=(file, 2, how))
        judge.start()
        judge.join()
        if judge.exitcode == 0:
            break
        assert judge.exitcode == -signal.SIGKILL
        kills += 1
    found = Ledger().read().questions[undisturbed.question.digest]
    assert kills >= 5
    assert tell(found) == tell(undisturbed.question)
    assert (found.outcome, found.place, found.spent["runs"]) == (
        undisturbed.outcome, undisturbed.question.place, undisturbed.question.spent["runs"],
    )  # fmt: skip
