"""The better direction of a metric.

For SparseBP's metrics the table of metrics has it, for others the last word of the name, where it can mean one thing
only. Otherwise the user gives it: a wrong guess would turn "worse" into "better".
"""

from __future__ import annotations

import re
from typing import Literal

from sparsebp_cli.run.metric import METRICS

Way = Literal["lower", "higher", ""]

LOWER = {"loss", "perplexity", "ppl", "error", "wer", "cer", "mse", "rmse", "mae", "nll", "bpb", "bpc", "bpw"}
HIGHER = {"accuracy", "acc", "f1", "bleu", "chrf", "rouge", "auc", "auroc", "precision", "recall", "mcc", "iou"}
# Words that reverse or change the meaning: scikit-learn's neg_log_loss is better when higher, time_to_accuracy is a
# time, and the spread of a loss is not a loss.
TURNED = {
    "neg",
    "negative",
    "minus",
    "inverse",
    "one",
    "1",
    "time",
    "seconds",
    "steps",
    "to",
    "std",
    "sd",
    "var",
    "variance",
}
TURNED |= {"delta", "diff", "gap", "scale", "aux", "balance"}


def better(metric: str) -> Way:
    """Return ``lower``, ``higher``, or empty where the name does not tell.

    For a metric of another program the last word decides: ``eval_loss``, ``test/f1``, ``valWER``.
    """
    if metric in METRICS:
        return METRICS[metric].better
    *before, word = re.split(r"[/_.\- ]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", metric).lower())
    if TURNED.intersection(before):
        return ""
    return "lower" if word in LOWER else "higher" if word in HIGHER else ""
