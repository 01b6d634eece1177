"""The target ``docker``: a container for each run, through the command line of docker or podman.

The run's folder is copied in and out, so host and client need nothing in common but the engine's own connection. The
container is removed after everything was fetched, and found again by its name and label by whatever process asks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import append_lines, pack, receive, size_of, take_in
from sparsebp_cli.target.confinement import check_there, question
from sparsebp_cli.target.container import (
    DockerOptions,
    check_paths,
    container_name,
    create_words,
    engine_words,
    mounted_folders,
    run_folder,
    safe_words,
)
from sparsebp_cli.target.contract import Finding
from sparsebp_cli.target.engine import Engine, Phase, Sight
from sparsebp_cli.target.probe import SOURCE, compare
from sparsebp_cli.target.remote import RemoteTarget
from sparsebp_cli.target.shell import make_tool, shell_words
from sparsebp_cli.target.stamp import LogPosition
from sparsebp_cli.target.tool import Answer, Tool

PULL_SECONDS = 3600.0
HALF_MADE_SECONDS = 600.0  # a container that was made and not started for so long was forgotten
GONE = re.compile(r"no such (container|object)|no container with name", re.IGNORECASE)
# What only an engine says. Whatever else goes wrong is a connection, and says nothing of a run.
ANSWERS = re.compile(
    r"error response from daemon|no such (container|image|object)|is not running|^tail:|image not known",
    re.IGNORECASE | re.MULTILINE,
)


@final
class DockerEngine(Engine):
    """An engine of docker or podman, here or elsewhere."""

    def __init__(self, options: DockerOptions) -> None:
        """Take the options; nothing is run yet.

        Args:
            options: Of the target.
        """
        self._options = options
        self._words = engine_words(options)
        self._place = options.host or options.context or options.command
        local_podman = options.command == "podman" and options.context is None
        # podman without a connection is the engine itself: whatever it says is an answer.
        self._tool = Tool(self._place, _always if local_podman else _is_answer, (("DOCKER_CLI_HINTS", "false"),))
        self._token = secrets.token_hex(6)

    def command(self, run: RunFolder) -> list[str]:
        return create_words(self._options, run.run_id, self._options.image, {})

    def check_plan(self, plan: Plan) -> None:
        check_paths(plan, mounted_folders(self._options))

    def find(self, run: RunFolder) -> str | None:
        name = container_name(run.run_id)
        answer = self._run("container", "inspect", "--format", "{{json .}}", name)
        if answer.code != 0:
            self._absent(answer)
            return None
        found = json.loads(answer.text)
        if found["State"]["Status"] in {"created", "configured", "initialized"}:
            if found["Config"]["Labels"].get("sparsebp.start") != self._token and _age(found) < HALF_MADE_SECONDS:
                raise RunBusyError(f"run {run.run_id}: another dispatcher is starting it on {self._place}")
            self._run("rm", "--force", "--volumes", name)
            return None
        return f"{name} {self._engine_id()}"

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        (run,) = runs
        options, name = self._options, container_name(run.run_id)
        self._check_mounts_there()
        image, digest = self._resolve_image()
        labels = {"sparsebp.start": self._token, "sparsebp.image": digest or options.image}
        answer = self._tool.run(create_words(options, run.run_id, image, labels))
        if answer.code != 0:
            if "already in use" in answer.err:
                raise RunBusyError(f"run {run.run_id} is on {self._place} already, started by another dispatcher")
            raise self._refusal(answer)
        part = run.path / "image.json"
        part.write_text(json.dumps({"name": options.image, "id": image, "digest": digest}), encoding="utf-8")
        owner, group = (int(number) for number in options.user.split(":"))
        folder = run_folder(run.run_id).removeprefix("/")
        copied = self._tool.write(
            [*self._words, "cp", "-", f"{name}:/"], lambda stream: pack(stream, run, folder, owner, group)
        )
        begun = self._run("start", name) if copied.code == 0 else copied
        if begun.code != 0:
            self._run("rm", "--force", "--volumes", name)
            raise self._refusal(begun)
        return [f"{name} {self._engine_id()}"]

    def look(self, run: RunFolder, handle: str) -> Sight:
        name, _, engine_id = handle.partition(" ")
        answer = self._run("container", "inspect", "--format", "{{json .State}}", name)
        if answer.code != 0:
            self._absent(answer)
            if engine_id and self._engine_id() != engine_id:
                raise UnreachableError(f"{self._place} is another engine than the one that run {run.run_id} is on")
            return Sight(Phase.OVER, text=f"its container is gone from {self._place}", gone=True)
        return _see(json.loads(answer.text))

    def pull(self, run: RunFolder, handle: str) -> None:
        name = handle.partition(" ")[0]
        journal = run.path / JOURNAL
        tail = self._run("exec", name, "tail", "-c", f"+{size_of(journal) + 1}", f"{run_folder(run.run_id)}/{JOURNAL}")
        if tail.code == 0:  # else it is not there yet, or the worker has just ended
            append_lines(journal, tail.out)
        self._pull_output(run, name)

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        self._run("kill", "--signal", str(number), handle.partition(" ")[0])

    def fetch(self, run: RunFolder, handle: str) -> None:
        name = handle.partition(" ")[0]
        self._pull_output(run, name)
        with self._tool.read([*self._words, "cp", f"{name}:{run_folder(run.run_id)}", "-"]) as stream:
            part = receive(stream, run)
        take_in(part, run.run_id, run)

    def release(self, run: RunFolder, handle: str) -> None:
        answer = self._run("rm", "--force", "--volumes", handle.partition(" ")[0])
        if answer.code != 0:
            self._absent(answer)

    def check(self) -> Iterator[Finding]:
        options = self._options
        try:
            server = self._run(
                "version", "--format", "{{.Server.Version}}" if options.command == "docker" else "{{.Client.Version}}"
            )
            yield Finding("ok", "reachable", f"{options.command} {server.text} on {self._place}")
            yield Finding("ok", "image", " ".join(self._resolve_image()))
            words = [
                *self._words,
                "run",
                "--rm",
                *safe_words(options),
                "--workdir",
                "/",
                "--entrypoint",
                options.python,
                options.image,
            ]
            found = self._tool.run([*words, "-P", "-c", SOURCE, "/"])
        except (UnreachableError, RunFailedError, UsageError) as error:
            yield Finding("fail", "reachable" if isinstance(error, UnreachableError) else "image", str(error))
            return
        if found.code != 0:
            yield Finding("fail", "container", found.problem)
            return
        yield from compare(found.text, wants_gpus=options.gpus is not None)

    def _check_mounts_there(self) -> None:
        """Judge the mounts by how they resolve on the engine's host, where that can be asked."""
        host, mounts = self._options.host, [*self._options.mounts]
        if not mounts or not host or not host.startswith("ssh://"):
            return  # on this machine the options were judged already
        answer = make_tool(host, "").run(shell_words(host, question(mounts)))
        try:
            check_there(mounts, answer.text)
        except ValueError as error:
            raise UsageError(f"target.mounts on {self._place}: {error}") from None

    def _run(self, *words: str) -> Answer:
        return self._tool.run([*self._words, *words])

    def _absent(self, answer: Answer) -> None:
        """Make sure that an answer says "there is none": anything else is not known."""
        if not GONE.search(answer.err):
            raise UnreachableError(f"{self._place} does not answer as it should: {answer.problem}")

    def _refusal(self, answer: Answer) -> RunFailedError:
        return RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _engine_id(self) -> str:
        if self._options.command == "podman":
            return ""
        return self._run("info", "--format", "{{.ID}}").text

    def _resolve_image(self) -> tuple[str, str]:
        """Return the id of the image there, and its digest in the registry where it has one; pull it where allowed."""
        image, pull = self._options.image, self._options.pull
        words = ("image", "inspect", "--format", "{{.Id}} {{json .RepoDigests}}", image)
        answer = self._run(*words) if pull != "always" else None
        if answer is None or (answer.code != 0 and pull == "missing"):
            tool = Tool(self._place, self._tool.is_answer, self._tool.environment, PULL_SECONDS)
            pulled = tool.run([*self._words, "pull", "--quiet", image])
            if pulled.code != 0:
                raise RunFailedError(f"{self._place} has no image {image}, and cannot pull it: {pulled.problem}")
            answer = self._run(*words)
        if answer.code != 0:
            raise RunFailedError(f"{self._place} has no image {image}, and target.pull is {pull}")
        image_id, _, digests = answer.text.partition(" ")
        return image_id, next(iter(json.loads(digests) or []), "")

    def _pull_output(self, run: RunFolder, name: str) -> None:
        position = LogPosition.load(run)
        since = ["--since", position.stamp] if position.stamp else []
        answer = self._run("logs", "--timestamps", *since, name)
        if answer.code == 0:
            lines = (answer.out.decode(errors="replace") + answer.err).splitlines()
            position.append(run, lines)


@final
class DockerTarget(RemoteTarget):
    """A container of docker or podman."""

    options_class = DockerOptions

    def __init__(self, options: DockerOptions | None = None) -> None:
        """Choose where.

        Args:
            options: The recipe's; None: the defaults.
        """
        self.engine = DockerEngine(options or DockerOptions())


def _see(state: dict[str, Any]) -> Sight:
    if state["Status"] in {"running", "paused", "restarting", "removing", "stopping"}:
        return Sight(Phase.WORKING)
    if state["Status"] in {"created", "configured", "initialized"}:
        return Sight(Phase.WAITING)
    code = int(state["ExitCode"])
    if state.get("OOMKilled"):
        return Sight(Phase.OVER, -9, "killed for want of memory: see target.memory")
    if code > 128 and code not in {130, 143}:
        code = 128 - code
    error = " ".join(str(state.get("Error") or "").split())
    return Sight(Phase.OVER, code, f"the engine says: {error}" if error else "")


def _age(found: dict[str, Any]) -> float:
    made = datetime.fromisoformat(re.sub(r"\.\d+", "", str(found["Created"])))
    return (datetime.now(made.tzinfo) - made).total_seconds()


def _is_answer(_code: int, errors: str) -> bool:
    return bool(ANSWERS.search(errors))


def _always(_code: int, _errors: str) -> bool:
    return True
