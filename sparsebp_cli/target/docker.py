"""The target ``docker``: run each run in a container, through the command line of docker or podman.

The run's folder is copied in and out, so host and client share only the engine's connection. The container is removed
after everything was fetched. Until then any process finds it by its name and label.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Self, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, durable
from sparsebp_cli.run.budget import LARGEST_SMALL, open_to_append, read_json, size_of
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import append_lines, merge_into_run, pack, receive
from sparsebp_cli.target.confinement import check_remote_mounts, mount_query
from sparsebp_cli.target.container import (
    DockerOptions,
    check_paths,
    confinement_options,
    container_name,
    create_command,
    engine_command,
    list_mounts,
    mounted_folders,
    run_folder,
)
from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.engine import Phase, TargetEngine, WorkerStatus, read_exit_code
from sparsebp_cli.target.engine_word import ARCHITECTURE, explain
from sparsebp_cli.target.probe import SOURCE, compare_environment
from sparsebp_cli.target.remote import RemoteTarget
from sparsebp_cli.target.shell import Shell
from sparsebp_cli.target.tool import CommandResult, Tool, always, matching

PULL_SECONDS = 3600.0
HALF_MADE_SECONDS = 600.0  # a container created longer ago and never started was left by a dead remote runner
ENGINE_ID = re.compile(r"[\w:-]+")
HANDLE = re.compile(rf"sparsebp-\S+( ({ENGINE_ID.pattern})?)?")
GONE = re.compile(r"no such (container|object)|no container with name", re.IGNORECASE)
# Messages of the engine itself. Other errors come from the connection and say nothing about the run.
REFUSALS = re.compile(
    r"error response from daemon|no such (container|image|object)|is not running|^tail:|image not known",
    re.IGNORECASE | re.MULTILINE,
)


@final
class DockerEngine(TargetEngine):
    """A docker or podman engine, on this machine or elsewhere."""

    def __init__(self, options: DockerOptions) -> None:
        self._options = options
        self._words = engine_command(options)
        self._place = options.host or options.context or options.command
        local_podman = options.command == "podman" and options.context is None
        # Podman without a connection is the engine itself, so all its errors are refusals. Docker prints hints among
        # its errors, so disable them.
        self._tool = Tool(self._place, always if local_podman else matching(REFUSALS), (("DOCKER_CLI_HINTS", "false"),))
        # The token identifies a container that we created but never started.
        self._token = secrets.token_hex(6)

    def command(self, run: RunFolder) -> list[str]:
        return create_command(self._options, run.run_id, self._options.image, {})

    def check_plan(self, plan: Plan) -> None:
        check_paths(plan, mounted_folders(self._options))

    def find(self, run: RunFolder) -> str | None:
        name = container_name(run.run_id)
        answer = self._run("container", "inspect", "--format", "{{json .}}", name)
        if answer.code != 0:
            self._require_absent(answer)
            return None
        found = self._tool.read_json(answer)
        if found["State"]["Status"] in {"created", "configured", "initialized"}:
            if found["Config"]["Labels"].get("sparsebp.start") != self._token and _age(found) < HALF_MADE_SECONDS:
                raise RunBusyError(f"another command is starting run {run.run_id} on {self._place}: wait until it ends")
            self._run("rm", "--force", "--volumes", name)
            return None
        # Add the engine's id: a container counts as gone only on the engine that had it. See decision 9.
        return f"{name} {self._engine_id()}"

    def is_handle(self, text: str) -> bool:
        return HANDLE.fullmatch(text) is not None

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        (run,) = runs
        options, name = self._options, container_name(run.run_id)
        self._check_remote_mounts()
        # Use the image's id, so that moving its tag meanwhile changes nothing.
        image, digest = self._resolve_image()
        labels = {"sparsebp.start": self._token, "sparsebp.image": digest or options.image}
        answer = self._tool.run(create_command(options, run.run_id, image, labels))
        if answer.code != 0:
            if "already in use" in answer.err:
                raise RunBusyError(
                    f"run {run.run_id} was already started on {self._place}, by a command that still runs: wait for it"
                )
            raise self._refused(answer)
        found = {"name": options.image, "id": image, "digest": digest}
        durable.write_file(run.path / "image.json", json.dumps(found))
        owner, group = (int(number) for number in options.user.split(":"))
        folder = run_folder(run.run_id).removeprefix("/")
        # Copy between create and start: so the worker finds its plan, and no host folder is mounted for it.
        copied = self._tool.write(
            [*self._words, "cp", "-", f"{name}:/"], lambda stream: pack(stream, run, folder, owner, group)
        )
        begun = self._run("start", name) if copied.code == 0 else copied
        if begun.code != 0:
            # Otherwise its name would stay taken.
            self._run("rm", "--force", "--volumes", name)
            raise self._refused(begun)
        return [f"{name} {self._engine_id()}"]

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        name, _, engine_id = handle.partition(" ")
        answer = self._run("container", "inspect", "--format", "{{json .State}}", name)
        if answer.code != 0:
            self._require_absent(answer)
            if engine_id and self._engine_id() != engine_id:
                where = f"{self._place} is not the Docker engine on which run {run.run_id} was started"
                raise UnreachableError(f"{where}: connect to that docker or podman again")
            return WorkerStatus(Phase.OVER, text=f"its container is gone from {self._place}", gone=True)
        return _read_state(self._tool.read_json(answer))

    def pull(self, run: RunFolder, handle: str) -> None:
        name = handle.partition(" ")[0]
        journal = run.path / JOURNAL
        # Only complete lines are appended, so the rest of a line is read again.
        tail = self._run("exec", name, "tail", "-c", f"+{size_of(journal) + 1}", f"{run_folder(run.run_id)}/{JOURNAL}")
        if tail.code == 0:  # otherwise the log does not exist yet, or the worker has just ended
            append_lines(journal, tail.out)
        self._pull_output(run, name)

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        self._run("kill", "--signal", str(number), handle.partition(" ")[0])

    def fetch(self, run: RunFolder, handle: str) -> None:
        name = handle.partition(" ")[0]
        self._pull_output(run, name)
        with self._tool.read([*self._words, "cp", f"{name}:{run_folder(run.run_id)}", "-"]) as stream:
            part = receive(stream, run)
        merge_into_run(part, run.run_id, run)

    def release(self, run: RunFolder, handle: str) -> None:
        answer = self._run("rm", "--force", "--volumes", handle.partition(" ")[0])
        if answer.code != 0:
            self._require_absent(answer)

    def check(self) -> Iterator[CheckResult]:
        options = self._options
        try:
            # The command line of podman is its engine.
            side, system = (
                ("Server", ".Os}}/{{.Server.Arch}}") if options.command == "docker" else ("Client", ".OsArch}}")
            )
            version = self._run("version", "--format", f"{{{{.{side}.Version}}}} {{{{.{side}{system}").text
            number, _, machine = version.partition(" ")
            yield CheckResult("ok", "reachable", f"{options.command} {number} on {self._place}")
            yield from self._check_shell()
            yield CheckResult("ok", "image", " ".join(self._resolve_image()))
            made_for = self._run("image", "inspect", "--format", "{{.Os}}/{{.Architecture}}", options.image).text
        except (UnreachableError, RunFailedError, UsageError) as error:
            yield CheckResult("fail", "reachable" if isinstance(error, UnreachableError) else "image", str(error))
            return
        if made_for != machine:
            yield CheckResult(
                "warn", "architecture", f"the image is for {made_for}, but {self._place} is {machine}", ARCHITECTURE
            )
        words = [*self._words, "run", "--rm", *confinement_options(options), "--workdir", "/"]
        # The engine has answered before, so any error now is the container's own.
        tool = Tool(self._place, always, self._tool.environment)
        try:
            found = tool.run([*words, "--entrypoint", options.python, options.image, "-P", "-c", SOURCE, "/"])
        except UnreachableError as error:  # it took too long
            yield CheckResult("fail", "container", str(error))
            return
        if found.code != 0:
            yield CheckResult("fail", "container", found.problem)
            return
        yield from compare_environment(found.text, num_gpus=_count_gpus(options))

    def _check_shell(self) -> Iterator[CheckResult]:
        """Yield a warning if a login shell prints text, which can break docker's connection over SSH."""
        host = self._options.host
        if host and host.startswith("ssh://"):
            shell = Shell(host, "")
            shell.run("true")
            yield from shell.check()

    def _check_remote_mounts(self) -> None:
        """Check how the mounts resolve on the engine's host, if it can be reached over SSH."""
        host, mounts = self._options.host, list_mounts(self._options)
        if not mounts or not host or not host.startswith("ssh://"):
            return  # on this machine the options were already checked
        answer = Shell(host, "").run(mount_query(mounts))
        try:
            check_remote_mounts(mounts, answer.text)
        except ValueError as error:
            raise UsageError(f"target.mounts on {self._place}: {error}") from None

    def _run(self, *words: str) -> CommandResult:
        return self._tool.run([*self._words, *words])

    def _require_absent(self, answer: CommandResult) -> None:
        """Raise ``UnreachableError`` unless the result says that the container does not exist."""
        if not GONE.search(answer.err):
            raise UnreachableError(f"{self._place} gave an unexpected answer: {answer.problem}")

    def _refused(self, answer: CommandResult) -> RunFailedError:
        return RunFailedError(f"{self._place} refused the run: {answer.problem}")

    def _engine_id(self) -> str:
        if self._options.command == "podman":
            return ""
        answer = self._run("info", "--format", "{{.ID}}")
        if not ENGINE_ID.fullmatch(answer.text):
            raise UnreachableError(f"{self._place} gave an unexpected answer: {shorten(answer.text)!r}")
        return answer.text

    def _resolve_image(self) -> tuple[str, str]:
        """Return the image's id on the engine and its registry digest, empty if none. Pull the image if allowed."""
        image, pull = self._options.image, self._options.pull
        words = ("image", "inspect", "--format", "{{.Id}} {{json .RepoDigests}}", image)
        answer = self._run(*words) if pull != "always" else None
        if answer is None or (answer.code != 0 and pull == "missing"):
            tool = Tool(self._place, self._tool.is_refusal, self._tool.environment, PULL_SECONDS)
            pulled = tool.run([*self._words, "pull", "--quiet", image])
            if pulled.code != 0:
                raise RunFailedError(f"{self._place} has no image {image}, and cannot pull it: {pulled.problem}")
            answer = self._run(*words)
        if answer.code != 0:
            raise RunFailedError(f"{self._place} has no image {image}: load it there, or set 'target.pull: missing'")
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

    options_class: ClassVar[type[TargetOptions]] = DockerOptions
    engine_class = DockerEngine


def _count_gpus(options: DockerOptions) -> int:
    """Return how many GPUs a run requests; ``all`` counts as one."""
    if isinstance(options.gpus, list):
        return len(options.gpus)
    return 1 if options.gpus == "all" else options.gpus or 0


def _read_state(state: dict[str, Any]) -> WorkerStatus:
    if state["Status"] in {"running", "paused", "restarting", "removing", "stopping"}:
        return WorkerStatus(Phase.WORKING)
    if state["Status"] in {"created", "configured", "initialized"}:
        return WorkerStatus(Phase.WAITING)
    if state.get("OOMKilled"):
        return WorkerStatus(Phase.OVER, -9, "killed because memory ran out: see target.memory")
    code = read_exit_code(int(state["ExitCode"]))
    error = " ".join(str(state.get("Error") or "").split())
    return WorkerStatus(Phase.OVER, code, f"the engine says: {explain(error)}" if error else "")


def _age(found: dict[str, Any]) -> float:
    made = datetime.fromisoformat(re.sub(r"\.\d+", "", str(found["Created"])))
    return (datetime.now(made.tzinfo) - made).total_seconds()


FILE = ".output-position"
STAMPED = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) (.*)$", re.DOTALL)


@dataclass
class LogPosition:
    """The position of the last log line that was copied."""

    stamp: str = ""  # its time stamp; empty: no line was copied yet
    key: int = 0  # the time stamp in nanoseconds

    @classmethod
    def load(cls, run: RunFolder) -> Self:
        """Read the position from a run's folder."""
        try:
            return cls(**read_json(run.path / FILE, LARGEST_SMALL))
        except (OSError, ValueError, TypeError):
            return cls()

    def append(self, run: RunFolder, lines: Iterable[str]) -> None:
        """Append the new lines to ``worker.log``, ordered by the time stamp before each; drop lines without one. If the
        log's beginning was truncated in the meantime, lines are lost but none is repeated."""
        found = [(match, _nanoseconds(match)) for line in lines if (match := STAMPED.match(line))]
        new = sorted((item for item in found if item[1] > self.key), key=lambda item: item[1])
        if not new:
            return
        with open_to_append(run.log_file) as log:
            log.write("".join(match[4] + "\n" for match, _ in new).encode())
        last, self.key = new[-1]
        self.stamp = last[0].partition(" ")[0]
        durable.write_file(run.path / FILE, json.dumps({"stamp": self.stamp, "key": self.key}))


def _nanoseconds(match: re.Match[str]) -> int:
    seconds = int(datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).timestamp())
    return seconds * 10**9 + int((match[2] or "0").ljust(9, "0")[:9])
