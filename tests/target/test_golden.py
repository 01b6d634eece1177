"""Every command, script and manifest that is generated, held against a file and against the schema of who reads it.

``python -m tests.target.test_golden`` writes the files anew.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import RunFolder
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.container import DockerOptions
from sparsebp_cli.target.docker import DockerTarget
from sparsebp_cli.target.kubernetes import KubernetesTarget
from sparsebp_cli.target.manifest import KubernetesOptions, make_job, make_reader, to_text
from sparsebp_cli.target.slurm import SlurmTarget
from sparsebp_tools.export.scheduler import export_dstack, export_kubernetes, export_sbatch, export_sky

HERE = Path(__file__).parent
RUN = RunFolder(Path("/home/me/.local/share/sparsebp/runs/0123456789ab"))
RICH_POD = {
    "context": "lab",
    "namespace": "research",
    "claim": "runs",
    "gpus": 2,
    "cpus": "4",
    "memory": "16Gi",
    "node_selector": {"gpu": "a100"},
    "mounts": ["/srv/data:/srv/data"],
    "env": {"OMP_NUM_THREADS": "4"},
}
RICH_BATCH = {
    "host": "ssh://me@login:2222",
    "folder": "/scratch/me",
    "setup": ["module load python/3.12"],
    "partition": "gpu",
    "account": "lab",
    "timeout_min": 90,
    "gpus": "a100:2",
    "cpus": 8,
    "memory": "64g",
    "env": {"OMP_NUM_THREADS": "8"},
    "arguments": ["--constraint=nvlink", "--qos=normal"],
}


def make_plan(target: dict[str, Any] | None = None, run_id: str = "0123456789ab") -> Plan:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "golden",
            "model": {"name": "m"},
            "dataset": {"name": "d"},
            "target": target or {"kind": "local"},
        }
    )
    return Plan(run_id=run_id, created=0.0, recipe=recipe)


def show_docker(**options: Any) -> str:
    return shlex.join(DockerTarget(DockerOptions(**options)).command(RUN)).replace(" --", " \\\n  --") + "\n"


def show_slurm(**options: Any) -> str:
    target = SlurmTarget(SlurmOptions(**options))
    ((file, script),) = target.files(RUN).items()
    return f"$ {shlex.join(target.command(RUN))}\n--- {file}\n{script}"


def show_kubernetes(**options: Any) -> str:
    target = KubernetesTarget(KubernetesOptions(**options))
    return f"$ {shlex.join(target.command(RUN))}\n" + "".join(target.files(RUN).values())


def shorten_plan(text: str) -> str:
    """The plan itself follows the recipe's schema and is tested where that is."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.strip() == "{" and not inside:
            inside = True
            lines.append(line + " ...")
        if not inside:
            lines.append(line)
        if line.rstrip() == line[: len(line) - len(line.lstrip())] + "}" and inside and _is_outer(line, lines[-1]):
            inside = False
    return "\n".join(lines) + "\n"


def _is_outer(line: str, opening: str) -> bool:
    return len(line) - len(line.lstrip()) == len(opening) - len(opening.lstrip())


GOLDEN: dict[str, Callable[[], str]] = {
    "docker-plain.txt": show_docker,
    "docker-rich.txt": lambda: show_docker(
        host="ssh://me@gpu1:2222",
        image="registry.example.org/sparsebp@sha256:" + "0" * 64,
        gpus=["0", "GPU-1a"],
        mounts=["/srv/data:/srv/data", "/srv/out:/out:rw"],
        hub_cache="/srv/hub",
        network="none",
        memory="16g",
        shm_size="2g",
        env={"OMP_NUM_THREADS": "4"},
    ),
    "docker-context.txt": lambda: show_docker(context="lab", gpus="all"),
    "docker-cdi.txt": lambda: show_docker(command="podman", gpus=2),
    "podman.txt": lambda: show_docker(command="podman", context="gpu1", gpus="all"),
    "slurm-plain.txt": show_slurm,
    "slurm-rich.txt": lambda: show_slurm(**RICH_BATCH),
    "slurm-pyxis.txt": lambda: show_slurm(
        container="pyxis", image="sparsebp", mounts=["/data:/data:ro"], requeue=False
    ),
    "slurm-apptainer.txt": lambda: show_slurm(container="apptainer", image="/images/sparsebp.sif", gpus=1),
    "slurm-array.txt": lambda: render_script(SlurmOptions(), [f"/scratch/runs/{name}" for name in ("a", "b", "c")], 2),
    "slurm-nodes.txt": lambda: show_slurm(nodes=2, processes=8, gpus=4, cpus=16, container="apptainer"),
    "kubernetes-plain.txt": show_kubernetes,
    "kubernetes-rich.txt": lambda: show_kubernetes(**RICH_POD),
    "kubernetes-reader.txt": lambda: to_text(make_reader(KubernetesOptions(**RICH_POD), "0123456789ab")),
    "kubernetes-nodes.txt": lambda: show_kubernetes(nodes=2, processes=4, gpus=2, claim="runs", queue="team-a"),
    "export-k8s-nodes.txt": lambda: shorten_plan(
        export_kubernetes([make_plan({"kind": "kubernetes", "nodes": 2, "processes": 2, "claim": "runs"})])
    ),
    "export-sbatch.txt": lambda: shorten_plan(
        export_sbatch([make_plan({"kind": "slurm", **RICH_BATCH}, run_id) for run_id in ("a" * 12, "b" * 12)], 2)
    ),
    "export-k8s.txt": lambda: shorten_plan(export_kubernetes([make_plan({"kind": "kubernetes", **RICH_POD})])),
    "export-sky.txt": lambda: shorten_plan(export_sky([make_plan({"kind": "slurm", "gpus": "A100:2"})])),
    "export-dstack.txt": lambda: shorten_plan(export_dstack([make_plan({"kind": "docker", "gpus": 2})])),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_generated_is_what_is_kept(name: str) -> None:
    assert GOLDEN[name]() == (HERE / "golden" / name).read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in (HERE / "golden").iterdir()} == set(GOLDEN)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith(("slurm", "export-sbatch"))])
def test_every_script_is_one_that_bash_can_read(name: str) -> None:
    script = GOLDEN[name]()
    script = script[script.index("#!/bin/bash") :]
    subprocess.run(["bash", "-n"], input=script.replace("{ ...", "{}"), text=True, check=True)


def validate(document: object, file: str, definition: str = "") -> None:
    schema = json.loads((HERE / "schema" / file).read_text(encoding="utf-8"))
    if definition:
        pods = json.loads((HERE / "schema" / "kubernetes-1.20.json").read_text(encoding="utf-8"))["$defs"]
        schema = {"$defs": {**pods, **schema["$defs"]}, "$ref": f"#/$defs/{definition}"}
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("options", [{}, RICH_POD], ids=["plain", "rich"])
def test_manifests_keep_the_schema_of_kubernetes(options: dict[str, Any]) -> None:
    chosen = KubernetesOptions(**options)
    validate(make_job(chosen, "0123456789ab"), "kubernetes-1.20.json", "io.k8s.api.batch.v1.Job")
    validate(make_reader(chosen, "0123456789ab"), "kubernetes-1.20.json", "io.k8s.api.core.v1.Pod")
    plans = [make_plan({"kind": "kubernetes", **options}, run_id) for run_id in ("a" * 12, "b" * 12)]
    documents = list(yaml.safe_load_all(export_kubernetes(plans)))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Job"] * 2
    for document in documents:
        group = "core" if document["kind"] == "ConfigMap" else "batch"
        validate(document, "kubernetes-1.20.json", f"io.k8s.api.{group}.v1.{document['kind']}")


def test_manifests_of_several_nodes_keep_the_schema_but_for_what_is_newer() -> None:
    job = make_job(KubernetesOptions(nodes=2, processes=2, claim="runs"), "0123456789ab")
    assert job["spec"].pop("completionMode") == "Indexed"  # from Kubernetes 1.24 on; the schema is of 1.20
    validate(job, "kubernetes-1.20.json", "io.k8s.api.batch.v1.Job")


def test_a_queue_of_kueue_is_a_label_of_the_job_and_not_of_its_pods() -> None:
    label = "kueue.x-k8s.io/queue-name"
    for nodes in (1, 2):
        queued = make_job(KubernetesOptions(nodes=nodes, processes=nodes, claim="runs", queue="team-a"), "0123456789ab")
        assert queued["metadata"]["labels"][label] == "team-a"
        assert to_text(queued).count(label) == 1
        assert label not in to_text(
            make_job(KubernetesOptions(nodes=nodes, processes=nodes, claim="runs"), "0123456789ab")
        )


@pytest.mark.parametrize("queue", ["team a", "Team", "a.b", "x" * 64, ""])
def test_a_queue_that_no_label_can_name_is_refused(queue: str) -> None:
    with pytest.raises(ValueError, match="queue"):
        KubernetesOptions(queue=queue)


def test_an_exported_plan_keeps_its_processes_and_nodes() -> None:
    documents = yaml.safe_load_all(
        export_kubernetes([make_plan({"kind": "kubernetes", "nodes": 2, "processes": 4, "claim": "runs"})])
    )
    plan = Plan.model_validate_json(next(documents)["data"]["plan.json"])
    assert (plan.recipe.target.options["nodes"], plan.recipe.target.options["processes"]) == (2, 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [({}, "needs a volume claim"), ({"claim": "runs", "host_network": True}, "host_network"), ({"gpus": 8}, "got 8")],
)
def test_nodes_without_what_they_need_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        KubernetesOptions(nodes=2, processes=8, **options)


def test_the_schema_would_notice_a_wrong_manifest() -> None:
    wrong = make_job(KubernetesOptions(), "0123456789ab")
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        validate(wrong, "kubernetes-1.20.json", "io.k8s.api.batch.v1.Job")


def test_a_task_keeps_the_schema_of_skypilot() -> None:
    target = {"kind": "slurm", "gpus": "A100:2", "env": {"OMP_NUM_THREADS": "4"}}
    validate(yaml.safe_load(export_sky([make_plan(target)])), "sky-task.json")
    with pytest.raises(jsonschema.ValidationError):
        validate({"name": "a", "comands": "x"}, "sky-task.json")


@pytest.mark.parametrize("export", [export_sky, export_dstack])
def test_one_task_is_one_run(export: Callable[[list[Plan]], str]) -> None:
    with pytest.raises(UsageError, match="writes one run per file, got 2 runs"):
        export([make_plan(), make_plan()])


@pytest.mark.parametrize("export", [export_sky, export_dstack])
def test_an_exported_task_carries_the_plan_out_under_its_id(
    export: Callable[[list[Plan]], str], home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    worker = {"kind": "docker", "python": sys.executable, "worker": "sparsebp_cli.testing.worker"}
    task = yaml.safe_load(export([make_plan(worker)]))
    lines = task["run"] if "run" in task else "\n".join(task["commands"])
    for _ in range(2):  # the second time there is nothing to do
        subprocess.run(["sh", "-c", lines], check=True)
    run = RunFolder(home_folder / "runs" / "0123456789ab")
    assert str(run.state()) == "finished"
    assert Plan.load(run.plan_file).recipe.target.kind == "local"


if __name__ == "__main__":
    for file, make in GOLDEN.items():
        (HERE / "golden" / file).write_text(make(), encoding="utf-8")
