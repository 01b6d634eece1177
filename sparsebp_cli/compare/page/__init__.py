"""Provide the shell of every HTML page: head, base style, table macro, the check of a page's path, and the renderer.

jinja2 renders templates into self-contained pages that load nothing else. A page's template extends ``shell.html`` and
lies in the package that uses it, with the files that it embeds.
"""

from __future__ import annotations

from pathlib import Path

from sparsebp_cli.errors import UsageError
from sparsebp_cli.run.visible import make_visible

__all__ = ["check_path", "render"]


def check_path(path: Path) -> None:
    """Raise ``UsageError`` if the name does not end in ``.html`` or the folder does not exist."""
    if path.suffix.lower() not in {".html", ".htm"}:
        raise UsageError(f"a report's name must end in .html, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the report")


def render(package: str, template: str, **values: object) -> str:
    """Render a template of a package. Values are escaped unless they are ``Markup``. Characters that a browser would
    interpret are always shown as escapes."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(name, "") for name in (package, __package__)])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Embed style sheets and scripts literally: inside a template, jinja2 would interpret {{ or {# in them.
    environment.globals["embed"] = lambda name: Markup(loader.get_source(environment, name)[0])
    return make_visible(environment.get_template(template).render(**values)) + "\n"
