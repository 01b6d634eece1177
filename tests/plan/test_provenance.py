"""The commit and the changes of a folder are told, whatever the folder configures git to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan, find_provenance, repository
from sparsebp_cli.plan.provenance import UNKNOWN, Provenance
from sparsebp_cli.recipe.schema import Recipe

pytestmark = pytest.mark.promise("R20")

Git = Callable[..., str]
WHO = ("-c", "user.name=n", "-c", "user.email=e@example.invalid")


def run_git(folder: Path, *words: str) -> str:
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", "-C", str(folder), *WHO, *words], check=True, capture_output=True, text=True, env=environ
    )
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with one commit: a recipe, a module, settings."""
    folder = tmp_path / "project"
    folder.mkdir()
    run_git(folder, "init", "-q")
    for name, text in {"r.yaml": "version: 1\n", "plugin_of_mine.py": "x = 1\n", "settings.ini": "a = 1\n"}.items():
        (folder / name).write_text(text)
    run_git(folder, "add", ".")
    run_git(folder, "commit", "-qm", "m")
    return folder


def test_commit_and_digest_are_told_and_no_text_and_no_remote(folder: Path) -> None:
    run_git(folder, "remote", "add", "origin", "https://user:canary@example.invalid/x.git")
    clean = find_provenance(folder / "r.yaml")
    assert clean == Provenance(
        sparsebp_version=clean.sparsebp_version, recipe_file="r.yaml", git_sha=run_git(folder, "rev-parse", "HEAD")
    )
    assert not clean.dirty
    (folder / "settings.ini").write_text("password = canary\n")
    changed = find_provenance(folder / "r.yaml")
    assert len(changed.git_diff_sha256) == 64
    assert changed.dirty
    assert "canary" not in changed.model_dump_json()
    (folder / "settings.ini").write_text("password = other\n")
    assert find_provenance(folder / "r.yaml").git_diff_sha256 not in {"", changed.git_diff_sha256}
    (folder / "settings.ini").write_text("a = 1\n")
    assert find_provenance(folder / "r.yaml") == clean


@pytest.mark.parametrize("change", ["staged", "deleted", "mode", "new file staged"])
def test_every_kind_of_uncommitted_change_counts(folder: Path, change: str) -> None:
    file = folder / "settings.ini"
    match change:
        case "staged":
            file.write_text("a = 2\n")
            run_git(folder, "add", ".")
        case "deleted":
            file.unlink()
        case "mode":
            file.chmod(0o755)
        case _:
            (folder / "new.py").write_text("")
            run_git(folder, "add", ".")
    assert find_provenance(folder / "r.yaml").dirty


def test_untracked_files_are_nobodys_business(folder: Path) -> None:
    (folder / "notes.txt").write_text("secret")
    assert not find_provenance(folder / "r.yaml").dirty


def test_worktrees_packed_references_detached_heads_and_subfolders_are_read(folder: Path, tmp_path: Path) -> None:
    sha = run_git(folder, "rev-parse", "HEAD")
    run_git(folder, "pack-refs", "--all")
    run_git(folder, "gc", "-q")
    run_git(folder, "worktree", "add", "-q", str(tmp_path / "tree"))
    (folder / "deep" / "er").mkdir(parents=True)
    for place in (folder, tmp_path / "tree", folder / "deep" / "er"):
        assert find_provenance(place / "r.yaml").git_sha == sha
        assert not find_provenance(place / "r.yaml").dirty
    (tmp_path / "tree" / "settings.ini").write_text("b")
    assert find_provenance(tmp_path / "tree" / "r.yaml").dirty
    assert not find_provenance(folder / "r.yaml").dirty
    run_git(folder, "checkout", "-q", "--detach")
    assert find_provenance(folder / "r.yaml").git_sha == sha


def test_a_folder_without_git_without_commit_or_with_nonsense_for_git_has_no_commit(tmp_path: Path) -> None:
    assert find_provenance(tmp_path / "r.yaml").git_sha == ""
    run_git(tmp_path, "init", "-q")
    assert find_provenance(tmp_path / "r.yaml").git_sha == ""
    head = tmp_path / ".git" / "HEAD"
    for text in (
        "ref: ../../../etc/passwd",
        "ref: refs/../../x",
        "ref: refs/heads/x\nref",
        "zz",
        "",
        "ref: HEAD",
        "\0",
    ):
        head.write_text(text)
        assert find_provenance(tmp_path / "r.yaml").git_sha == ""
    head.unlink()
    os.mkfifo(head)
    assert find_provenance(tmp_path / "r.yaml").git_sha == ""
    head.unlink()
    head.symlink_to("/dev/zero")
    assert find_provenance(tmp_path / "r.yaml").git_sha == ""
    head.unlink()
    head.write_text("a" * 40)
    (tmp_path / ".git" / "index").write_bytes(b"DIRC nonsense")
    assert find_provenance(tmp_path / "r.yaml").git_diff_sha256 == UNKNOWN
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / ".git").write_text("gitdir: /dev")
    assert find_provenance(tmp_path / "file" / "r.yaml").git_sha == ""


def ways_in(folder: Path, canary: Path) -> dict[str, Callable[[], None]]:
    """Every way known to us in which a folder has git run something; each plants one."""
    git = folder / ".git"
    command = f"touch {canary}; cat"

    def configure(*pairs: tuple[str, str], attributes: str = "") -> None:
        for key, value in pairs:
            run_git(folder, "config", key, value)
        if attributes:
            (folder / ".gitattributes").write_text(attributes)
            (git / "info").mkdir(exist_ok=True)
            (git / "info" / "attributes").write_text(attributes)

    def script(file: Path, body: str = "") -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\ntouch {canary}\n{body}\n")
        file.chmod(0o755)
        return file

    def hooks() -> None:
        for hook in ("post-index-change", "post-checkout", "pre-commit", "fsmonitor-watchman", "reference-transaction"):
            script(git / "hooks" / hook)
        script(folder / "hooks" / "post-index-change")
        configure(("core.hooksPath", str(folder / "hooks")))

    def included() -> None:
        (folder / "more.cfg").write_text(f'[core]\n\tfsmonitor = "{command}"\n[diff]\n\texternal = "{command}"\n')
        configure(("include.path", "../more.cfg"), (f"includeIf.gitdir:{folder}/.path", "../more.cfg"))

    def submodule() -> None:
        inner = folder / "inner"
        inner.mkdir()
        run_git(inner, "init", "-q")
        (inner / "f").write_text("1")
        run_git(inner, "add", ".")
        run_git(inner, "commit", "-qm", "m")
        run_git(folder, "add", "inner")
        run_git(folder, "commit", "-qm", "sub")
        (inner / "f").write_text("2")
        run_git(inner, "config", "core.fsmonitor", command)
        run_git(inner, "config", "diff.external", command)
        run_git(folder, "config", "diff.ignoreSubmodules", "none")

    def moved_to_a_file() -> None:
        git.rename(folder / "elsewhere")
        git.write_text(f"gitdir: {folder}/elsewhere\n")
        run_git(folder, "config", "core.fsmonitor", command)

    def lazy_fetch() -> None:
        sha = run_git(folder, "rev-parse", "HEAD:settings.ini")
        (git / "objects" / sha[:2] / sha[2:]).unlink()
        configure(
            ("remote.origin.url", f"ext::sh -c touch% {canary}"), ("remote.origin.promisor", "true"),
            ("extensions.partialClone", "origin"), ("protocol.ext.allow", "always"), ("core.sshCommand", command),
            ("core.repositoryformatversion", "1"),
        )  # fmt: skip

    return {
        "core.fsmonitor": lambda: configure(("core.fsmonitor", command)),
        "core.fsmonitor of the other version": lambda: configure(
            ("core.fsmonitor", str(script(folder / "mon"))), ("core.fsmonitorHookVersion", "1")
        ),
        "diff.external": lambda: configure(("diff.external", command)),
        "diff driver": lambda: configure(("diff.x.command", command), attributes="* diff=x\n"),
        "textconv": lambda: configure(("diff.x.textconv", command), attributes="* diff=x\n"),
        "clean filter": lambda: configure(
            ("filter.x.clean", command), ("filter.x.smudge", command), ("filter.x.required", "true"),
            attributes="* filter=x\n",
        ),
        "filter process": lambda: configure(("filter.x.process", command), attributes="* filter=x\n"),
        "hooks": hooks,
        "core.pager": lambda: configure(
            ("core.pager", command), ("pager.diff", command), ("pager.diff-index", command), ("core.editor", command),
        ),
        "alias": lambda: configure(
            *((f"alias.{verb}", f"!{command}") for verb in ("diff", "diff-index", "rev-parse", "update-index"))
        ),
        "include.path": included,
        "worktree configuration": lambda: (
            configure(("extensions.worktreeConfig", "true"), ("core.repositoryformatversion", "1")),
            (git / "config.worktree").write_text(f'[core]\n\tfsmonitor = "{command}"\n'),
        )[0],
        "core.worktree": lambda: configure(("core.worktree", str(folder)), ("core.fsmonitor", command)),
        "submodule": submodule,
        "a file for .git": moved_to_a_file,
        "lazy fetch": lazy_fetch,
        "credential helper and gpg": lambda: configure(
            ("credential.helper", f"!{command}"), ("gpg.program", command), ("log.showSignature", "true"),
            ("core.askPass", command), ("core.gitProxy", command), ("uploadpack.packObjectsHook", command),
        ),
        "interactive.diffFilter": lambda: configure(("interactive.diffFilter", command), ("difftool.x.cmd", command)),
        "a program called git": lambda: [script(folder / name) for name in ("git", "git-diff-index", "sh")] and None,
    }  # fmt: skip


WAYS = list(ways_in(Path("/x"), Path("/y")))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_a_folder_configures_is_run(way: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    canary = tmp_path / "canary"
    ways_in(folder, canary)[way]()
    (folder / "settings.ini").write_text("changed = yes\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}::.")
    monkeypatch.syspath_prepend(str(folder))
    __import__("plugin_of_mine")
    (folder / "plugin_of_mine.py").write_text("x = 2\n")
    told = find_provenance(Path("r.yaml"))
    sys.modules.pop("plugin_of_mine")
    assert not canary.exists()
    assert told.dirty
    assert len(told.git_sha) == 40
    if way != "lazy fetch":
        assert len(told.git_diff_sha256) == 64


@pytest.mark.parametrize(
    "name",
    ["GIT_EXTERNAL_DIFF", "GIT_SSH_COMMAND", "GIT_PAGER", "PAGER", "GIT_EDITOR", "GIT_ASKPASS", "GIT_EXEC_PATH",
     "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_CONFIG", "GIT_CONFIG_GLOBAL",
     "GIT_CONFIG_SYSTEM", "GIT_CONFIG_PARAMETERS", "GIT_TEMPLATE_DIR", "GIT_TRACE", "GIT_TRACE2_EVENT"],
)  # fmt: skip
def test_no_variable_of_git_reaches_it(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    file = tmp_path / "tool"
    file.write_text(f"#!/bin/sh\ntouch {canary}\n")
    file.chmod(0o755)
    value = "'core.fsmonitor=" + str(file) + "'" if name == "GIT_CONFIG_PARAMETERS" else str(file)
    if name.startswith("GIT_TRACE"):
        value = str(canary)
    if name in {"GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG"}:
        (tmp_path / "cfg").write_text(f"[core]\n\tfsmonitor = {file}\n[diff]\n\texternal = {file}\n")
        value = str(tmp_path / "cfg")
    monkeypatch.setenv(name, value)
    (folder / "settings.ini").write_text("changed = yes\n")
    assert len(find_provenance(folder / "r.yaml").git_diff_sha256) == 64
    assert not canary.exists()


def test_the_users_own_configuration_is_not_read_either(folder: Path, tmp_path: Path, monkeypatch) -> None:
    canary = tmp_path / "canary"
    (tmp_path / ".gitconfig").write_text(f"[diff]\n\texternal = touch {canary}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (folder / "settings.ini").write_text("changed = yes\n")
    assert find_provenance(folder / "r.yaml").dirty
    assert not canary.exists()


def test_a_plan_of_an_earlier_version_is_read_and_still_dirty(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"version": 1, "name": "x", "model": {"name": "m"}, "dataset": {"name": "d"}})
    plan = Plan(recipe=recipe)
    old = plan.model_dump(mode="json")
    old["provenance"] = {"sparsebp_version": "0.1.0", "recipe_file": "r.yaml", "git_sha": "a" * 40, "git_diff": "+ 1"}
    read = Plan.model_validate(old)
    assert read.provenance.dirty
    assert read.group == plan.group


def test_a_git_that_does_not_end_is_waited_for_briefly(folder: Path, tmp_path: Path, monkeypatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "git").write_text("#!/bin/sh\nsleep 5\necho late\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert repository._ask(folder / ".git", folder, "status", timeout_seconds=0.2) is None
