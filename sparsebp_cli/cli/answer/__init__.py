"""The answers of commands: typed records, from which tables for people and JSON for programs are made."""

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
