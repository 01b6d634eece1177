"""Metrics of generated texts that ship. Libraries compute all but the two matches, with their default settings."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from sparsebp_cli.errors import DataError

Batch = Mapping[str, Sequence[object]]

NUMBER = re.compile(r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
# GSM8K writes its answers behind this (Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021,
# arXiv:2110.14168; grade_school_math/dataset.py takes the first number behind it and strips its commas).
MARK = "####"
ANSWER = re.compile(r"answer", re.IGNORECASE)


def count_exact_matches(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the share of predictions that equal their reference, apart from white space around either."""
    pairs = zip(predictions, references, strict=True)
    return {"exact_match": statistics.fmean(one.strip() == other.strip() for one, other in pairs)}


def count_numeric_matches(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the share of predictions whose answer is the same number as their reference's: 1,200 is 1200.0."""
    right = []
    for place, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        wanted = find_answer(reference)
        if wanted is None:
            raise DataError(f"metric 'numeric_match': reference {place} has no number: {reference[:80]!r}")
        right.append(find_answer(prediction) == wanted)
    return {"numeric_match": statistics.fmean(right)}


def find_answer(text: str) -> Decimal | None:
    """Return the number of an answer: the first behind ``####``; without that mark the last behind the last *answer*
    in its line; else the last of the text. None without one. We differ from GSM8K's own rule only where its mark is
    missing, which it counts as no answer."""
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
    """Return BLEU of the whole corpus by sacrebleu: 0 to 100, its 13a tokens, no smoothing of the corpus's counts
    beyond its default."""
    from sacrebleu import corpus_bleu

    return {"bleu": corpus_bleu(list(predictions), [list(references)]).score}


def measure_rouge_l(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return the mean F-measure of ROUGE-L by rouge-score, without stemming. It knows the letters a to z and digits;
    other scripts have no tokens there."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    pairs = zip(references, predictions, strict=True)
    return {"rouge_l": statistics.fmean(scorer.score(wanted, got)["rougeL"].fmeasure for wanted, got in pairs)}


def measure_cer(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return edits over characters of all references, by jiwer."""
    from jiwer import cer

    return {"cer": float(cer(list(references), list(predictions)))}


def measure_wer(predictions: Sequence[str], references: Sequence[str], _: Batch) -> dict[str, float]:
    """Return edits over words of all references, by jiwer: tokens between white space, such as phonemes."""
    from jiwer import wer

    return {"wer": float(wer(list(references), list(predictions)))}
