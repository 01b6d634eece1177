"""The target ``kubernetes``: run each run as a Job, on several nodes as an Indexed Job, through ``kubectl``.

``kubectl exec`` copies the run's folder into the pod and out of it, so the cluster needs no storage. With a
PersistentVolumeClaim, a replacement pod continues from the last checkpoint.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, final

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.budget import size_of
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.target.archive import append_lines, merge_into_run, pack, receive
from sparsebp_cli.target.confinement import read_mount
from sparsebp_cli.target.container import check_paths, container_name, run_folder
from sparsebp_cli.target.contract import CheckResult
from sparsebp_cli.target.engine import Phase, TargetEngine, WorkerStatus, read_exit_code
from sparsebp_cli.target.manifest import (
    GPU,
    INDEX,
    KubernetesOptions,
    make_job,
    make_reader,
    make_service,
    to_text,
)
from sparsebp_cli.target.remote import RemoteTarget
from sparsebp_cli.target.tool import CommandResult, Tool, matching

REFUSALS = re.compile(
    r"error from server|command terminated with exit code|^tail:|^The Job.* is invalid|no matches for kind",
    re.IGNORECASE | re.MULTILINE,
)
NOT_FOUND = re.compile(r"\(NotFound\)")
HANDLE = re.compile(r"(jobset/)?sparsebp-\S+ [\w-]{32,36}")  # ends in its uid; see _make_handle
SIGNALS = {9: "KILL", 15: "TERM"}
READER_SECONDS = 120.0
JOB, JOB_SET = "job", "jobsets.jobset.x-k8s.io"  # their kubectl names
SET_MARK = "jobset/"  # prefix of the handle of a JobSet, which 0.5 made and which may still run
QUEUES = "localqueues.kueue.x-k8s.io"


@final
class KubernetesEngine(TargetEngine):
    """A Kubernetes cluster."""

    fastest_seconds: ClassVar[float] = 0.5
    slowest_seconds: ClassVar[float] = 10.0

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._words = ["kubectl"]
        self._words += ["--context", options.context] if options.context else []
        self._words += ["--namespace", options.namespace] if options.namespace else []
        self._place = options.context or "the cluster"
        self._tool = Tool(self._place, matching(REFUSALS))

    def command(self, run: RunFolder) -> list[str]:
        files = [word for name in self.files(run) for word in ("--filename", name)]
        return [*self._words, "create", *files]

    def files(self, run: RunFolder) -> dict[str, str]:
        if self._options.nodes == 1:
            return {"job.json": to_text(make_job(self._options, run.run_id))}
        service = to_text(make_service(run.run_id))
        return {"service.json": service, "job.json": to_text(make_job(self._options, run.run_id))}

    def check_plan(self, plan: Plan) -> None:
        check_paths(plan, [read_mount(mount).target for mount in self._options.mounts])

    def find(self, run: RunFolder) -> str | None:
        job = self._get(JOB, container_name(run.run_id))
        return None if job is None else _make_handle(job["metadata"]["name"], job["metadata"]["uid"])

    def start(self, runs: Sequence[RunFolder], max_parallel: int) -> list[str]:
        (run,) = runs
        if self._options.nodes > 1:
            # Create the Service before the job, whose pods need it to find each other. A failed start may have left
            # one.
            made = self._run("create", "--filename", "-", given=to_text(make_service(run.run_id)).encode())
            if made.code != 0 and "(AlreadyExists)" not in made.err:
                raise RunFailedError(f"{self._place} refused the run: {made.problem}")
        words = [*self._words, "create", "--filename", "-", "--output", "jsonpath={.metadata.uid}"]
        answer = self._tool.run(words, given=to_text(make_job(self._options, run.run_id)).encode())
        if "(AlreadyExists)" in answer.err:
            raise RunBusyError(
                f"run {run.run_id} was already started on {self._place}, by another command: wait until it ends"
            )
        if answer.code != 0:
            raise RunFailedError(f"{self._place} refused the run: {answer.problem}")
        handle = _make_handle(container_name(run.run_id), answer.text)
        if not self.is_handle(handle):
            raise UnreachableError(f"{self._place} did not return the uid of the new job, got {shorten(answer.text)!r}")
        return [handle]

    def is_handle(self, text: str) -> bool:
        return HANDLE.fullmatch(text) is not None

    def status(self, run: RunFolder, handle: str) -> WorkerStatus:
        kind, name, uid = _read_handle(handle)
        job = self._get(kind, name)
        if job is None or job["metadata"]["uid"] != uid:
            return WorkerStatus(Phase.OVER, text=f"its job is gone from {self._place}", gone=True)
        pod = self._newest_pod(run)
        if pod is not None and pod["status"].get("phase") == "Running":
            return self._status_inside(run, pod["metadata"]["name"])
        conditions = job.get("status", {}).get("conditions", [])  # a new job has no status
        failed = [c for c in conditions if c["type"] == "Failed" and c["status"] == "True"]
        if pod is not None and (failed or pod["status"].get("phase") == "Succeeded"):
            return _read_end(pod, has_claim=self._options.claim is not None)
        if failed:
            return WorkerStatus(Phase.OVER, text=f"Kubernetes: {failed[0].get('message', 'the job failed')}", gone=True)
        return WorkerStatus(Phase.WAITING)

    def pull(self, run: RunFolder, handle: str) -> None:
        pod = self._running_pod(run)
        for file in (run.path / JOURNAL, run.log_file):
            words = ["tail", "-c", f"+{size_of(file) + 1}", f"{run_folder(run.run_id)}/{file.name}"]
            answer = self._exec(pod, *words) if pod else None
            if answer is not None and answer.code == 0:
                append_lines(file, answer.out)

    def signal(self, run: RunFolder, handle: str, number: int) -> None:
        pod = self._running_pod(run)
        state = self._exec(pod, "cat", f"{run_folder(run.run_id)}/.state").text if pod else ""
        if pod and state == "working":
            # Signal only the worker: its pod stays, so that the results can be fetched.
            self._exec(pod, "sh", "-c", f"kill -{SIGNALS[number]} $(cat {run_folder(run.run_id)}/.pid)")
        elif not state.startswith("over"):
            # Before the worker starts there is nothing to fetch.
            self._delete(*_read_handle(handle)[:2])

    def fetch(self, run: RunFolder, handle: str) -> None:
        pod, reader = self._running_pod(run), ""
        if pod is None:
            pod = reader = self._start_reader(run)
        else:
            self.pull(run, handle)
        words = ["exec", pod, "--", "tar", "-C", run_folder(run.run_id) + "/..", "-cf", "-", run.run_id]
        with self._tool.read([*self._words, *words]) as stream:
            part = receive(stream, run)
        merge_into_run(part, run.run_id, run)
        if reader:
            self._delete("pod", reader)

    def release(self, run: RunFolder, handle: str) -> None:
        pod = self._running_pod(run)
        if pod is not None:
            folder = run_folder(run.run_id)
            # Remove the state too: the next pod on the claim would find it before its relay writes one.
            names = "plan.json checkpoints model .go .state .pid"
            self._exec(pod, "sh", "-c", f"cd {folder} && rm -rf {names} && touch .fetched")
        kind, name, _ = _read_handle(handle)
        self._delete(kind, name)
        if self._options.nodes > 1 and kind == JOB:  # a JobSet deletes its own Service
            self._delete("service", container_name(run.run_id))

    def check(self) -> Iterator[CheckResult]:
        options = self._options
        try:
            version = json.loads(self._run("get", "--raw", "/version").text)
            yield CheckResult("ok", "reachable", f"Kubernetes {version['gitVersion']} at {self._place}")
            yield from self._check_jobs()
            nodes = json.loads(self._run("get", "nodes", "--output", "json").text or '{"items": []}')["items"]
            gpus = sum(int(node["status"]["allocatable"].get(GPU, 0)) for node in nodes)
            enough = not options.gpus or gpus >= options.gpus
            yield CheckResult("ok" if enough else "warn", "GPUs", f"{gpus} of {GPU} on {len(nodes)} nodes")
            if options.claim:
                claim = self._get("pvc", options.claim)
                phase = claim["status"].get("phase", "?") if claim else "there is none"
                yield CheckResult("ok" if claim else "fail", "claim", f"{options.claim}: {phase}")
        except (UnreachableError, RunFailedError, ValueError, KeyError) as error:
            yield CheckResult("fail", "reachable", f"{self._place}: {error}")

    def _check_jobs(self) -> Iterator[CheckResult]:
        options = self._options
        allowed = self._run("auth", "can-i", "create", "jobs").text or "no"
        yield CheckResult("ok" if allowed == "yes" else "fail", "rights", f"create jobs: {allowed}")
        if options.queue:
            # Without Kueue, kubectl does not know this resource, and its error looks like a broken connection.
            known = self._lists("kueue.x-k8s.io") and self._get(QUEUES, options.queue) is not None
            hint = "" if known else f"kubectl get {QUEUES}"
            text = f"{options.queue}: {'a LocalQueue of Kueue' if known else 'there is no such LocalQueue'}"
            yield CheckResult("ok" if known else "fail", "queue", text, hint)

    def _lists(self, group: str) -> bool:
        """Return whether the server lists an API group."""
        answer = self._run("get", "--raw", f"/apis/{group}")
        if answer.code != 0 and not NOT_FOUND.search(answer.err):
            raise UnreachableError(f"{self._place} gave an unexpected answer: {answer.problem}")
        return answer.code == 0

    def _run(self, *words: str, given: bytes = b"") -> CommandResult:
        return self._tool.run([*self._words, *words], given=given)

    def _exec(self, pod: str, *words: str) -> CommandResult:
        return self._run("exec", pod, "--", *words)

    def _get(self, kind: str, name: str) -> dict[str, Any] | None:
        answer = self._run("get", kind, name, "--output", "json")
        if answer.code == 0:
            found: dict[str, Any] = self._tool.read_json(answer)
            return found
        if NOT_FOUND.search(answer.err):
            return None
        raise UnreachableError(f"{self._place} gave an unexpected answer: {answer.problem}")

    def _newest_pod(self, run: RunFolder) -> dict[str, Any] | None:
        """Return the newest pod of a run; with several nodes, that of the first node."""
        first = f",{INDEX}=0" if self._options.nodes > 1 else ""
        answer = self._run("get", "pods", "--selector", f"sparsebp.run={run.run_id}{first}", "--output", "json")
        if answer.code != 0:
            raise UnreachableError(f"{self._place} gave an unexpected answer: {answer.problem}")
        pods = self._tool.read_json(answer)["items"]
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]) if pods else None

    def _running_pod(self, run: RunFolder) -> str | None:
        pod = self._newest_pod(run)
        return str(pod["metadata"]["name"]) if pod and pod["status"].get("phase") == "Running" else None

    def _status_inside(self, run: RunFolder, pod: str) -> WorkerStatus:
        state, _, code = self._exec(pod, "cat", f"{run_folder(run.run_id)}/.state").text.partition(" ")
        if state == "over":
            return WorkerStatus(Phase.OVER, read_exit_code(int(code)))
        if state == "working":
            return WorkerStatus(Phase.WORKING)
        if state == "waiting":
            self._deliver(run, pod)
        return WorkerStatus(Phase.WAITING)

    def _deliver(self, run: RunFolder, pod: str) -> None:
        folder = run_folder(run.run_id)
        lines = f"tar -C {folder}/.. -xf - && mkdir -p {folder}/../../home && touch {folder}/.go"
        words = [*self._words, "exec", "--stdin", pod, "--", "sh", "-c", lines]
        user, group = (int(number) for number in self._options.user.split(":"))
        # Send the log too: its size here decides what is fetched later, so both copies must begin with the same bytes.
        answer = self._tool.write(
            words, lambda stream: pack(stream, run, run.run_id, user, group, more=("worker.log",))
        )
        if answer.code != 0:
            raise UnreachableError(f"{self._place}: the run's folder could not be sent: {answer.problem}")

    def _start_reader(self, run: RunFolder) -> str:
        manifest = make_reader(self._options, run.run_id)
        name = str(manifest["metadata"]["name"])
        answer = self._run("create", "--filename", "-", given=to_text(manifest).encode())
        # An interrupted fetch may have left its pod.
        if answer.code != 0 and "(AlreadyExists)" not in answer.err:
            raise UnreachableError(f"{self._place}: the results cannot be read: {answer.problem}")
        deadline = time.monotonic() + READER_SECONDS
        while (pod := self._get("pod", name)) is None or pod["status"].get("phase") != "Running":
            if time.monotonic() > deadline:
                raise UnreachableError(f"{self._place}: the pod that reads the results does not start")
            time.sleep(1.0)
        return name

    def _delete(self, kind: str, name: str) -> None:
        # A pod may use its whole grace period to end.
        answer = self._run("delete", kind, name, "--wait=false", "--ignore-not-found")
        if answer.code != 0:
            raise UnreachableError(f"{self._place} gave an unexpected answer: {answer.problem}")


@final
class KubernetesTarget(RemoteTarget):
    """A Job of Kubernetes."""

    options_class: ClassVar[type[TargetOptions]] = KubernetesOptions
    engine_class = KubernetesEngine


def _make_handle(name: str, uid: str) -> str:
    return f"{name} {uid}"  # with the uid, because a later job may have the same name


def _read_handle(handle: str) -> tuple[str, str, str]:
    """Return kind, name and uid of a handle's job."""
    name, _, uid = handle.removeprefix(SET_MARK).partition(" ")
    return JOB_SET if handle.startswith(SET_MARK) else JOB, name, uid


def _read_end(pod: dict[str, Any], *, has_claim: bool) -> WorkerStatus:
    """Return the final status of a pod in which nothing can be executed any more."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    ended = statuses[0].get("state", {}).get("terminated", {})
    code = ended.get("exitCode")
    reason = ended.get("reason") or pod["status"].get("reason") or ""
    if reason == "OOMKilled":
        return WorkerStatus(Phase.OVER, -9, "killed because memory ran out: see target.memory", gone=not has_claim)
    if code is None:
        return WorkerStatus(Phase.OVER, text=f"Kubernetes: {reason}", gone=not has_claim)
    return WorkerStatus(Phase.OVER, read_exit_code(code), gone=not has_claim)
