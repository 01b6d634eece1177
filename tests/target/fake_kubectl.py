"""Stands in for ``kubectl`` and a cluster: objects are files below ``$CLUSTER``, and pods are processes here.

Of a job's pods the first runs, with ``$CLUSTER/data`` in the place of ``/data``; the worker of these tests trains
nothing, and so needs no others. ``$CLUSTER/apis`` lists the groups that the server knows besides its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

CLUSTER = Path(os.environ.get("CLUSTER", "/nowhere"))
KINDS = {"Job": "job", "Service": "service", "Pod": "pod"}
INDEX = "batch.kubernetes.io/job-completion-index"
Manifest = dict[str, Any]


def refuse(reason: str, text: str) -> NoReturn:
    print(f"Error from server ({reason}): {text}", file=sys.stderr)
    raise SystemExit(1)


def place(kind: str, name: str) -> Path:
    group = kind.partition(".")[2]
    if group and group not in (CLUSTER / "apis").read_text():
        print(f'error: the server doesn\'t have a resource type "{kind.partition(".")[0]}"', file=sys.stderr)
        raise SystemExit(1)
    return CLUSTER / kind / f"{name}.json"


def load(kind: str, name: str) -> Manifest:
    file = place(kind, name)
    if not file.exists():
        refuse("NotFound", f'{kind} "{name}" not found')
    found: Manifest = json.loads(file.read_text())
    return found


def create(manifest: Manifest) -> str:
    kind, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
    file = place(kind, name)
    file.parent.mkdir(exist_ok=True)
    if file.exists():
        refuse("AlreadyExists", f'{kind} "{name}" already exists')
    manifest["metadata"]["uid"] = uuid.uuid4().hex
    file.write_text(json.dumps(manifest))
    if manifest["kind"] == "Job":
        start_pod(f"{name}-0", manifest["spec"])
    return str(manifest["metadata"]["uid"])


def start_pod(name: str, job: Manifest) -> None:
    (container,) = job["template"]["spec"]["containers"]
    words = [word.replace("$$", "$").replace("/data", str(CLUSTER / "data")) for word in container["command"]]
    # What the downward API would give, and the rest as it is written.
    values = {item["name"]: item.get("value", "0") for item in container["env"]}
    values = {key: value.replace("/data", str(CLUSTER / "data")) for key, value in values.items()}
    name = f"{name}-{uuid.uuid4().hex[:5]}"  # no two pods have one name
    code = CLUSTER / f"{name}.code"
    line = f'"$@"; echo $? > {code}.part; mv {code}.part {code}'
    none = subprocess.DEVNULL
    process = subprocess.Popen(
        ["sh", "-c", line, "pod", *words],
        env=os.environ | values,
        start_new_session=True,
        stdin=none,
        stdout=none,
        stderr=none,
    )
    labels = {**job["template"]["metadata"]["labels"], INDEX: "0"}
    metadata = {"name": name, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    (CLUSTER / "pod").mkdir(exist_ok=True)
    (CLUSTER / "pod" / f"{name}.json").write_text(json.dumps({"metadata": metadata, "process": process.pid}))


def list_pods(selector: str) -> Manifest:
    wanted = dict(part.split("=") for part in selector.split(","))
    pods = [json.loads(file.read_text()) for file in (CLUSTER / "pod").glob("*.json")]
    pods = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
    for pod in pods:
        code = CLUSTER / f"{pod['metadata']['name']}.code"
        number = int(code.read_text()) if code.exists() else None
        pod["status"] = {"phase": "Running" if number is None else "Failed" if number else "Succeeded"}
        if number is not None:
            pod["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": number}}}]
    return {"items": pods}


def delete(kind: str, name: str) -> None:
    place(kind, name).unlink(missing_ok=True)
    for file in (CLUSTER / "pod").glob(f"{name}-*.json") if kind != "service" else ():
        with suppress(ProcessLookupError):
            os.killpg(json.loads(file.read_text())["process"], signal.SIGTERM)
        file.unlink()


def main(words: list[str]) -> None:
    with (CLUSTER / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    match words:
        case ["create", "--filename", "-", *_]:
            print(create(json.load(sys.stdin)))
        case ["get", "--raw", "/version"]:
            print(json.dumps({"gitVersion": "v1.31.0"}))
        case ["get", "--raw", path]:
            if path.removeprefix("/apis/") not in (CLUSTER / "apis").read_text():
                refuse("NotFound", "the server could not find the requested resource")
            print("{}")
        case ["get", "nodes", *_]:
            print(json.dumps({"items": []}))
        case ["get", "pods", "--selector", selector, *_]:
            print(json.dumps(list_pods(selector)))
        case ["get", kind, name, *_]:
            print(json.dumps(load(kind, name)))
        case ["auth", "can-i", *_]:
            print("yes")
        case ["delete", kind, name, *_]:
            delete(kind, name)
        case ["exec", *rest]:
            inside = [word.replace("/data", str(CLUSTER / "data")) for word in rest[rest.index("--") + 1 :]]
            done = subprocess.run(inside, check=False)
            if done.returncode:
                print(f"command terminated with exit code {done.returncode}", file=sys.stderr)
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
