"""Make the package of a new policy: a module, its entry point, a test that runs the conformance suite, and a README."""

from __future__ import annotations

import re

from sparsebp_cli.cli.starter.template import fill
from sparsebp_cli.errors import UsageError

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def make_package(name: str) -> dict[str, str]:
    """Return the files of a package that offers a policy with this name. Raise ``UsageError`` for an invalid name."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"the name of a policy must be lower-case words and digits, joined by single hyphens, got {name!r}"
        )
    words = {
        "name": name,
        "package": f"sparsebp-{name}",
        "module": f"sparsebp_{name.replace('-', '_')}",
        "title": "".join(word.capitalize() for word in name.split("-")),
        "function": name.replace("-", "_"),
    }
    return {
        "pyproject.toml": fill("policy/pyproject.toml", **words),
        f"{words['module']}.py": fill("policy/policy.py", **words),
        f"tests/test_{words['module']}.py": fill("policy/test_policy.py", **words),
        "README.md": fill("policy/README.md", **words),
    }
