"""Metrics of generated texts equal what the libraries and the data sets that define them say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import SimpleNamespace

import jiwer
import pytest
from rouge_score import rouge_scorer
from sacrebleu.metrics import BLEU

from sparsebp_cli.errors import DataError, UsageError
from sparsebp_cli.metrics import Figure, TextMetric, find_text_metric, list_text_metrics
from sparsebp_cli.metrics import text_metric as module
from sparsebp_cli.metrics.text import find_answer

PREDICTIONS = ["the cat sat on the mat", "a dog ran", "It is guacamole , isn't it ?", ""]
REFERENCES = ["the cat is on the mat", "a dog ran far away", "It's guacamole, isn't it?", "something"]


def measure(name: str, predictions: list[str] = PREDICTIONS, references: list[str] = REFERENCES) -> dict[str, float]:
    return find_text_metric(name).measure(name, predictions, references, {})


def test_bleu_is_what_sacrebleu_says() -> None:
    assert measure("bleu") == {"bleu": BLEU().corpus_score(PREDICTIONS, [REFERENCES]).score}
    # From sacrebleu's own documentation, README: 48.53 for this system and the first of its two references.
    system = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    refs = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
    other = ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]
    assert round(BLEU().corpus_score(system, [refs, other]).score, 2) == 48.53
    assert measure("bleu", system, refs)["bleu"] == BLEU().corpus_score(system, [refs]).score < 48.53


def test_rouge_l_is_the_mean_f_measure_of_rouge_score_and_of_its_definition() -> None:
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    each = [scorer.score(r, p)["rougeL"].fmeasure for r, p in zip(REFERENCES, PREDICTIONS, strict=True)]
    assert measure("rouge_l")["rouge_l"] == pytest.approx(sum(each) / 4)
    # Five of six words in common, in order, on both sides: precision and recall are 5/6.
    assert measure("rouge_l", PREDICTIONS[:1], REFERENCES[:1])["rouge_l"] == pytest.approx(5 / 6)


def test_error_rates_are_edits_over_the_length_of_all_references() -> None:
    assert measure("wer")["wer"] == jiwer.wer(REFERENCES, PREDICTIONS)
    assert measure("cer")["cer"] == jiwer.cer(REFERENCES, PREDICTIONS)
    # By hand: one substitution in two words; one in three phonemes and an insertion.
    assert measure("wer", ["a c"], ["a b"])["wer"] == 0.5
    assert measure("wer", ["K AE P S"], ["K AE T"])["wer"] == pytest.approx(2 / 3)
    assert measure("cer", ["abd"], ["abc"])["cer"] == pytest.approx(1 / 3)


def test_an_exact_match_ignores_white_space_around_it_and_nothing_else() -> None:
    assert measure("exact_match", [" four\n", "Four", "four."], ["four"] * 3) == {"exact_match": pytest.approx(1 / 3)}


def gsm8k(text: str) -> str:
    """grade_school_math/dataset.py of openai/grade-school-math: ``extract_answer``."""
    match = re.compile(r"#### (\-?[0-9\.\,]+)").search(text)
    return match.group(1).strip().replace(",", "") if match else "[invalid]"


@pytest.mark.parametrize(
    "text",
    [
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
        "#### 1,200",
        "#### -3",
        "#### 0.5",
        "It costs $5.\n#### 70000\n\nQuestion: 4 more?",
    ],
)
def test_numbers_behind_the_mark_are_those_of_gsm8k(text: str) -> None:
    assert find_answer(text) == Decimal(gsm8k(text))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.", "1234"),
        ("The answer is 3 * 4 = 12.\nSo 5 of them", "12"),
        ("2 + 2 = 4", "4"),
        ("She pays $18.00", "18"),
        ("answer: x\n7", "7"),
        ("#### none", None),
        ("no number", None),
        ("", None),
    ],
)
def test_without_the_mark_the_last_number_counts(text: str, number: str | None) -> None:
    assert find_answer(text) == (None if number is None else Decimal(number))


def test_numeric_matches_compare_values_and_need_a_number_as_reference() -> None:
    found = measure("numeric_match", ["so 1,200", "#### 12", "none"], ["#### 1200.0", "#### 13", "#### 1"])
    assert found == {"numeric_match": pytest.approx(1 / 3)}
    with pytest.raises(DataError, match="reference 0 has no number: 'none'"):
        measure("numeric_match", ["1"], ["none"])


def test_every_metric_that_ships_declares_what_it_returns() -> None:
    assert list_text_metrics() == ["bleu", "cer", "exact_match", "numeric_match", "rouge_l", "wer"]
    ways = {name: one.better for key in list_text_metrics() for name, one in find_text_metric(key).figures.items()}
    assert {name for name, way in ways.items() if way == "lower"} == {"cer", "wer"}
    with pytest.raises(UsageError, match=r"unknown metric 'blue', allowed: bleu, .*did you mean"):
        find_text_metric("blue")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"other": 1.0}, "must return values of pass_rate, got other"),
        ({"pass_rate": float("nan")}, "must return finite numbers, got nan for pass_rate"),
        (3, "fails: TypeError"),
    ],
)
def test_a_plugin_that_breaks_its_declaration_is_named(returned: object, message: str) -> None:
    metric = TextMetric(lambda *_: returned, {"pass_rate": Figure("higher")})  # type: ignore[arg-type,return-value]
    with pytest.raises(DataError, match=f"metric 'mine' {message}"):
        metric.measure("mine", [""], [""], {})


@pytest.mark.parametrize("name", ["exact_match", "numeric_match", "rouge_l", "bleu", "cer", "wer"])
def test_a_metric_that_is_a_mean_over_texts_is_known_for_each_of_them(name: str) -> None:
    references = ["4 cats", "#### 12", "no more than 3 words", "answer 7"]
    predictions = ["4 cats", "#### 11", "no less than 3 words", "7"]
    found = find_text_metric(name).measure_each(name, predictions, references, {"row": list("abcd")})
    if name in {"bleu", "cer", "wer"}:  # of the whole corpus: its length is in the denominator
        assert found == {}
        return
    alone = [measure(name, [p], [r])[name] for p, r in zip(predictions, references, strict=True)]
    assert found == {name: alone}
    assert sum(alone) / 4 == pytest.approx(measure(name, predictions, references)[name])


def test_a_metric_that_is_wrongly_declared_a_mean_is_refused() -> None:
    def compute(
        predictions: Sequence[str], _: Sequence[str], batch: Mapping[str, Sequence[object]]
    ) -> dict[str, float]:
        assert len(batch["row"]) == len(predictions)
        return {"longest": float(max(map(len, predictions)))}

    metric = TextMetric(compute, {"longest": Figure("lower", is_mean=True)})
    with pytest.raises(
        DataError,
        match="the mean of its values for single texts is 3, and its value for all texts is 4",
    ):
        metric.measure_each("mine", ["four", "ab"], ["", ""], {"row": [1, 2]})


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (len, "must be a TextMetric"),
        (TextMetric(len, {"Pass@1": Figure("higher")}), "'Pass@1' must be lower-case"),  # type: ignore[arg-type]
        (TextMetric(len, {"one": Figure("up")}), "better must be lower or higher, got 'up'"),  # type: ignore[arg-type]
        (TextMetric(len, {}), "must declare at least one number"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_entry_is_refused(monkeypatch: pytest.MonkeyPatch, offered: object, message: str) -> None:
    entry = SimpleNamespace(value="mine:METRIC", dist=None, load=lambda: offered)
    points = SimpleNamespace(names=["mine"], select=lambda name: [entry])
    monkeypatch.setattr(module, "entry_points", lambda group: points)
    with pytest.raises(UsageError, match=message):
        find_text_metric("mine")
