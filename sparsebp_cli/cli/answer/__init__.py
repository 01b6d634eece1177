"""What verbs answer with: typed records, from which the tables for people and the JSON for programs are made."""

from sparsebp_cli.cli.answer.record import Answer, Checked, ErrorAnswer, FieldChange, FileList, Problem
from sparsebp_cli.cli.answer.speech import speech, tell, wants_json, warn

__all__ = [
    "Answer",
    "Checked",
    "ErrorAnswer",
    "FieldChange",
    "FileList",
    "Problem",
    "speech",
    "tell",
    "wants_json",
    "warn",
]
