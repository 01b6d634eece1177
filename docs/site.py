"""The documentation of every released version and of main, as one site: `make site`.

Each tag `v*` and the branch main is checked out to a folder and built there from its own pages and docstrings, with the
Sphinx and the requirements of this environment. The first page of the site lists them, newest first, and the sidebar of
each page links to the others. The first argument is the folder of the site.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx_polyversion.builder import BuildError
from sphinx_polyversion.driver import DefaultDriver
from sphinx_polyversion.environment import Environment
from sphinx_polyversion.git import Git, GitRef
from sphinx_polyversion.sphinx import CommandBuilder, Placeholder

HERE = Path(__file__).parent
BUILD = (sys.executable, "-m", "sphinx", "-q", "-b", "html", Placeholder.SOURCE_DIR, Placeholder.OUTPUT_DIR)


class Revision(Environment):
    """Builds with the package of the revision, not with the one that is installed."""

    async def run(self, *cmd: str, **options: Any) -> tuple[str | bytes | None, str | bytes | None, int]:
        """Run a command in the revision's folder, from where ``python -m`` imports first."""
        return await super().run(*cmd, cwd=self.path, **options)


class Site(DefaultDriver[GitRef, Revision, Any]):
    """A site with nothing missing: a revision that cannot be built ends the command."""

    @property
    def versions(self) -> list[str]:
        """The names of all revisions, main first, then from the newest to the oldest."""
        return newest_first([revision.name for revision in self.targets])

    def build_failed(self, rev: GitRef, exc_info: Any) -> None:
        """Raise what went wrong."""
        raise BuildError(f"{rev.name} cannot be built") from exc_info[1]


def newest_first(names: list[str]) -> list[str]:
    """Return main, then the versions: v0.10.0 before v0.9.0."""
    versions = sorted(set(names) - {"main"}, key=lambda name: [int(part) for part in name[1:].split(".")])
    return (["main"] if "main" in names else []) + versions[::-1]


def build_site(root: Path, out: Path) -> list[str]:
    """Build all versions of a checkout into a folder, and return their names. Raise BuildError."""
    site = Site(
        root,
        out,
        vcs=Git(branch_regex=r"main", tag_regex=r"v\d+(\.\d+)*"),
        builder=CommandBuilder("docs", BUILD),
        env=Revision.factory(),
        template_dir=HERE / "_templates" / "site",
        data_factory=lambda site, revision, _: {"versions": site.versions, "shown": revision.name},
        root_data_factory=lambda site: {"versions": site.versions},
    )
    site.run(sequential=True)  # each build imports PyTorch
    return site.versions


if __name__ == "__main__":
    print("\n".join(build_site(HERE.parent, Path(sys.argv[1]))))
