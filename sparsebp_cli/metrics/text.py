"""Compute the shipped metrics of generated texts. Libraries compute all but the two matches, with default settings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from sparsebp_cli.errors import DataError

Batch = Mapping[str, Sequence[object]]

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
# The mark before an answer in GSM8K (Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021,
# arXiv:2110.14168). Its grade_school_math/dataset.py takes the first number after the mark and strips its commas.
MARK = "####"
ANSWER = re.compile(r"answer", re.IGNORECASE)


def count_exact_matches(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the fraction of predictions that equal their reference, ignoring white space at both ends."""
    pairs = zip(predictions, references, strict=True)
    return {"exact_match": statistics.fmean(one.strip() == other.strip() for one, other in pairs)}


def count_numeric_matches(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the fraction of predictions whose answer is the same number as the reference's; 1,200 equals 1200.0. Raise
    DataError if a reference has no number."""
    right = []
    for place, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        wanted = find_answer(reference)
        if wanted is None:
            raise DataError(f"metric 'numeric_match': reference {place} has no number: {reference[:80]!r}")
        right.append(find_answer(prediction) == wanted)
    return {"numeric_match": statistics.fmean(right)}


def find_answer(text: str) -> Decimal | None:
    """Return the number in an answer; None if there is none. After ``####``, take the first number. Without this mark,
    take the last number after the last *answer* in its line, else the last number of the text. GSM8K's own rule counts
    a text without the mark as no answer; otherwise it is the same."""
    *_, rest = text.rpartition(MARK)
    if rest != text:
        found = NUMBER.findall(rest)[:1]
    else:
        *_, last = [match.end() for match in ANSWER.finditer(text)] or [0]
        line = text[last:].partition("\n")[0] if last else ""
        found = (NUMBER.findall(line) or NUMBER.findall(text))[-1:]
    if not found:
        return None
    try:
        return Decimal(found[0].replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def measure_bleu(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the BLEU of the whole corpus (0 to 100) by sacrebleu, with its 13a tokenizer and default smoothing."""
    from sacrebleu import corpus_bleu

    return {"bleu": corpus_bleu(list(predictions), [list(references)]).score}


def measure_rouge_l(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the mean ROUGE-L F-measure by rouge-score, without stemming. It knows only the letters a to z and digits,
    so other scripts have no tokens."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    pairs = zip(references, predictions, strict=True)
    return {"rouge_l": statistics.fmean(scorer.score(wanted, got)["rougeL"].fmeasure for wanted, got in pairs)}


def measure_cer(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the number of edits divided by the number of characters in all references, by jiwer."""
    from jiwer import cer

    return {"cer": float(cer(list(references), list(predictions)))}


def measure_wer(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the number of edits divided by the number of words in all references, by jiwer. Words are separated by
    white space; they may be phonemes."""
    from jiwer import wer

    return {"wer": float(wer(list(references), list(predictions)))}
