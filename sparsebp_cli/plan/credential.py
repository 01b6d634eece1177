"""Detection of likely credentials in a text before it is stored: formats that services publish, and assignments."""

from __future__ import annotations

import re

# Services document these prefixes so that scanners can find leaked credentials.
FORMS = {
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY",
    "a key of AWS": r"\b(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "a token of GitHub": r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a token of GitLab": r"\bgl(pat|ptt|dt|rt|soat|cbt|ft|agent)-[\w-]{20,}",
    "a token of Hugging Face": r"\b(hf|api_org)_[A-Za-z0-9]{20,}",
    "a key of an API": r"\b(sk|pk|rk)[-_]([a-z]+[-_])*[\w-]{16,}",
    "a key of Google": r"\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}",
    "a token of Slack": r"\bxox[abeoprs]-[\w-]{10,}",
    "a token of a package index": r"\b(pypi-[\w-]{16,}|npm_[A-Za-z0-9]{20,})",
    "a token of Weights & Biases": r"(?i)wandb.{0,40}\b[0-9a-f]{40}\b",
    "a JSON web token": r"\beyJ[\w-]{8,}\.[\w-]{8,}\.",
    "a login in an address": r"://[^/\s:@'\"]*:[^\s@'\"]+@",
    "a login of a .netrc": r"(?i)\bmachine\s+\S+\s+login\s+\S+|\bpassword\s+\S{6,}$",
    "a password": r"(?i)[\w.-]*(passw(or)?d|passphrase|pwd|secret|token|(api|access|private)_?key|credential)s?[\w.-]*"
    r"['\"]?\]?\s*(:\s*\w+\s*)?(=|:|=>)\s*(['\"][^'\"\s]{4,}['\"]|[^'\"\s()\[\]{},.=]{6,}\s*$)",
    "a bearer token": r"(?i)\b(bearer|basic)\s+[\w+/.=-]{16,}",
}
_FORMS = [(name, re.compile(form, re.MULTILINE)) for name, form in FORMS.items()]


def find_credential(text: str) -> str:
    """Return the kind of credential that a text may contain, such as ``a token of GitHub``; empty if nothing looks like
    one. In doubt the text counts as one."""
    return next((name for name, form in _FORMS if form.search(text)), "")
