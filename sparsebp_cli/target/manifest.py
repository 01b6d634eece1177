"""Define the options of a Kubernetes run, and build the manifest from them. This module runs nothing."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from sparsebp_cli.recipe.schema import Name, PositiveInt
from sparsebp_cli.target.confinement import NOBODY, read_mount
from sparsebp_cli.target.container import (
    DATA,
    USER,
    ContainerOptions,
    MountText,
    UserText,
    check_gpus,
    container_name,
    run_folder,
)

Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]  # fits into a label's 63 characters
INDEX = "batch.kubernetes.io/job-completion-index"  # label (since Kubernetes 1.28) and annotation of a pod
NODE_PORT = 29400  # port of the first pod's launcher
GRACE_SECONDS = 120  # for a checkpoint when a pod must end
QUEUE = "kueue.x-k8s.io/queue-name"  # label that assigns a job to a Kueue queue
GPU = "nvidia.com/gpu"  # resource name of a GPU
RESTARTS = 2  # lost pods to replace, after growing pauses


class KubernetesOptions(ContainerOptions):
    """A Kubernetes Job, through kubectl."""

    context: Annotated[str, Field(pattern=r"^[\w.:/@-]+$")] | None = Field(
        None, description="Context of kubectl's configuration; null: the current one."
    )
    namespace: DnsName | None = Field(None, description="Namespace of the pods. null: the namespace of the context.")
    pull: Literal["missing", "always", "never"] = Field("missing", description="When a node pulls the image.")
    claim: DnsName | None = Field(
        None,
        description="PersistentVolumeClaim that stores runs, so that a new pod can continue the run of a lost pod. "
        "With several nodes, all pods must be able to mount it (ReadWriteMany). null: none.",
    )
    gpus: PositiveInt | None = Field(None, description="GPUs of each pod; each node has one pod. null: none.")
    cpus: Quantity | None = Field(
        None, description="CPUs of each pod, as request and limit; null: the namespace's default."
    )
    memory: Quantity | None = Field(
        None, description="Memory of each pod, such as 16Gi, as request and limit; null: the namespace's default."
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that a node must have.")
    queue: DnsLabel | None = Field(
        None, description="Kueue's LocalQueue in the namespace: Kueue decides when the run starts. null: no Kueue."
    )
    hold_min: PositiveInt = Field(60, description="Minutes that a pod keeps its results after training.")
    mounts: list[MountText] = Field(
        default_factory=list, description="Folders of the node to mount: SOURCE:TARGET (read-only) or SOURCE:TARGET:rw."
    )
    host_network: bool = Field(False, description="Whether pods use the node's network.")
    user: UserText = Field(NOBODY, description=USER)
    spans_nodes: ClassVar[bool] = True

    @model_validator(mode="after")
    def _several_pods(self) -> KubernetesOptions:
        if self.nodes > 1:
            check_gpus(self, self.gpus)
            if self.claim is None:
                raise ValueError(f"'nodes: {self.nodes}' needs a volume claim (ReadWriteMany) that all pods mount")
            if self.host_network:
                raise ValueError(f"'nodes: {self.nodes}' needs 'host_network: false', because pods connect by name")
        return self


def make_job(options: KubernetesOptions, run_id: Name) -> dict[str, Any]:
    """Return the ``batch/v1`` Job of a run; with several nodes, an Indexed Job with one pod a node."""
    name, hold = container_name(run_id), str(60 * options.hold_min)
    words = [options.python, "-P", "-m", "sparsebp_cli.target.relay", options.worker, run_folder(run_id), hold]
    pod = _make_pod(options, words)
    several: dict[str, Any] = {}
    if options.nodes > 1:
        pod["subdomain"] = name  # the name of make_service: pods are NAME-0.NAME, NAME-1.NAME, ...
        several = {"completionMode": "Indexed", "completions": options.nodes, "parallelism": options.nodes}
        pod["containers"][0]["env"] += [
            {"name": "SPARSEBP_NODE", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
            {"name": "SPARSEBP_FIRST_NODE", "value": f"{name}-0.{name}:{NODE_PORT}"},
        ]
    # Kueue needs its label on the job, and not on the pods.
    labels = {**_labels(run_id), **({QUEUE: options.queue} if options.queue else {})}
    template = {"metadata": {"labels": _labels(run_id)}, "spec": pod}
    spec = {**several, "backoffLimit": RESTARTS, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": spec}


def make_service(run_id: Name) -> dict[str, Any]:
    """Return the headless Service by which the pods of several nodes find each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": container_name(run_id), "labels": _labels(run_id)},
        "spec": {
            "clusterIP": "None",
            # Pods look each other up before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"sparsebp.run": run_id},
            "ports": [{"name": "nodes", "port": NODE_PORT}],
        },
    }


def make_reader(options: KubernetesOptions, run_id: str) -> dict[str, Any]:
    """Return the manifest of a pod that gives access to a run's folder on the claim."""
    pod = _make_pod(options, ["sleep", "600"], reader=True)
    labels = {"app.kubernetes.io/name": "sparsebp", "sparsebp.reader": run_id}
    name = f"{container_name(run_id)}-reader"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": pod}


def _labels(run_id: Name) -> dict[str, str]:
    return {"app.kubernetes.io/name": "sparsebp", "sparsebp.run": run_id}


def to_text(manifest: dict[str, Any]) -> str:
    """Return a manifest as JSON text for kubectl."""
    return json.dumps(manifest, indent=2) + "\n"


def as_literal(text: str) -> str:
    """Escape text in commands and environments, where Kubernetes would replace ``$(NAME)``."""
    return text.replace("$", "$$")


def _make_pod(options: KubernetesOptions, words: list[str], *, reader: bool = False) -> dict[str, Any]:
    user, group = (int(number) for number in options.user.split(":"))
    fixed = {"HOME": f"{DATA}/home", "SPARSEBP_HOME": DATA, "PYTHONUNBUFFERED": "", "USER": "sparsebp"}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0 if reader else GRACE_SECONDS,
        # The worker never calls the cluster's API, so it gets no credentials for it.
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": group, "fsGroup": group},
        "containers": [
            {
                "name": "worker",
                "image": options.image,
                "imagePullPolicy": {"missing": "IfNotPresent", "always": "Always", "never": "Never"}[options.pull],
                "command": [as_literal(word) for word in words],
                "env": [{"name": name, "value": as_literal(value)} for name, value in {**fixed, **options.env}.items()],
                "resources": {} if reader else _make_resources(options),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "data", "mountPath": DATA}],
            }
        ],
        "volumes": [_make_data(options)],
    }
    for number, mount in enumerate(options.mounts):
        source, target, writable = read_mount(mount)
        name = f"mount-{number}"
        pod["volumes"].append({"name": name, "hostPath": {"path": source}})
        inside = {"name": name, "mountPath": target, "readOnly": not writable}
        pod["containers"][0]["volumeMounts"].append(inside)
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.host_network:
        pod["hostNetwork"] = True
    return pod


def _make_data(options: KubernetesOptions) -> dict[str, Any]:
    if options.claim:
        return {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}}
    return {"name": "data", "emptyDir": {}}


def _make_resources(options: KubernetesOptions) -> dict[str, Any]:
    wanted = {"cpu": options.cpus, "memory": options.memory}
    amounts = {name: value for name, value in wanted.items() if value}
    if options.gpus:
        amounts[GPU] = str(options.gpus)
    return {"limits": amounts, "requests": amounts} if amounts else {}
