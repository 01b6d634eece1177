"""Write files for users who use their own scheduler: a plan and the lines that run it. This module runs nothing.

The plan keeps its run id, so a file that is submitted again resumes the run while its folder exists. ``sparsebp sync``
sends the metrics from any machine that reaches a tracking store.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.policy.option import validate_options
from sparsebp_cli.recipe.schema import TargetOptions, TargetSection
from sparsebp_cli.run import home
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.confinement import read_mount
from sparsebp_cli.target.container import ContainerOptions, check_paths, container_name, list_paths, run_folder
from sparsebp_cli.target.manifest import KubernetesOptions, as_literal, make_job, make_service

END = "END_OF_PLAN"
NOTE = """# Each node must reach this folder, and have this Python with SparseBP. The keys folder and python of a slurm
# target in targets.yaml, given by --target NAME, change them.
"""
SHARED = set(TargetOptions.model_fields) - {"worker"}  # the target's options that the worker reads


def export_sbatch(plans: Sequence[Plan], max_parallel: int) -> str:
    """Return a Slurm batch script; several plans become an array, with the first plan's ``slurm`` options."""
    options = validate_options(SlurmOptions, _options(plans[0], "slurm"))
    folder = options.folder or str(home())
    runs = [f"{folder}/runs/{plan.run_id}" for plan in plans]
    reached = [read_mount(mount).target for mount in options.mounts]
    wanted: dict[str, str] = {}
    for plan in plans:
        if options.container == "none":
            wanted |= {path: key for key, path in list_paths(plan).items()}
        else:
            check_paths(plan, reached)
    before = "\n".join(_write_plan(plan, shlex.quote(run)) for plan, run in zip(plans, runs, strict=True))
    before = "".join(_require(key, path) for path, key in wanted.items()) + before
    return render_script(options, runs, max_parallel, before=NOTE + before)


def export_kubernetes(plans: Sequence[Plan]) -> str:
    """Return a ConfigMap and a Job for each plan, and for several nodes a Service, as YAML for ``kubectl apply``.
    Without a claim, the run's files are lost with its pod."""
    documents = []
    for plan in plans:
        options = validate_options(KubernetesOptions, _options(plan, "kubernetes"))
        check_paths(plan, [read_mount(mount).target for mount in options.mounts])
        name, folder = container_name(plan.run_id), run_folder(plan.run_id)
        job = make_job(options, plan.run_id)
        pod = job["spec"]["template"]["spec"]
        python = shlex.quote(options.python)
        worker = f"{python} -P -m {options.worker} {folder}/plan.json"
        write = f"mkdir -p {folder} && cp /plan/plan.json {folder}/"
        if options.nodes > 1:  # one pod writes the whole plan, and the others wait for it
            wait = f"until [ -e {folder}/plan.json ]; do sleep 1; done"
            move = f"mv {folder}/plan.json.part {folder}/plan.json"
            write = f'if [ "$SPARSEBP_NODE" = 0 ]; then {write}plan.json.part && {move}; else {wait}; fi'
        line = f"{write} && exec {worker}"
        pod["containers"][0]["command"] = ["sh", "-c", as_literal(line)]
        pod["containers"][0]["volumeMounts"].append({"name": "plan", "mountPath": "/plan", "readOnly": True})
        pod["volumes"].append({"name": "plan", "configMap": {"name": name}})
        metadata = {"name": name, "labels": job["metadata"]["labels"]}
        text = _plan_text(plan)
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"plan.json": text}})
        documents += [*([make_service(plan.run_id)] if options.nodes > 1 else []), job]
    # So wide that YAML folds no shell line.
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=10**6)


def export_sky(plans: Sequence[Plan]) -> str:
    """Return a SkyPilot task as YAML for ``sky launch``; it takes exactly one plan."""
    plan = _only(plans, "sky")
    options, section = _container(plan), plan.recipe.target.options
    resources: dict[str, Any] = {"image_id": f"docker:{options.image}"}
    if isinstance(section.get("gpus"), str) and ":" in section["gpus"]:
        resources["accelerators"] = section["gpus"]
    task = {"name": container_name(plan.run_id), "resources": resources, "envs": dict(options.env)}
    return yaml.dump(task | {"run": _lines(plan, options)}, Dumper=_Plain, sort_keys=False, width=10**6)


def export_dstack(plans: Sequence[Plan]) -> str:
    """Return a dstack task as YAML for ``dstack apply``; it takes exactly one plan."""
    plan = _only(plans, "dstack")
    options, section = _container(plan), plan.recipe.target.options
    task: dict[str, Any] = {"type": "task", "name": container_name(plan.run_id), "image": options.image}
    task |= {"env": dict(options.env), "commands": [_lines(plan, options)]}
    if isinstance(section.get("gpus"), int):
        task["resources"] = {"gpu": section["gpus"]}
    return yaml.dump(task, Dumper=_Plain, sort_keys=False, width=10**6)


class _Plain(yaml.SafeDumper):
    """A YAML dumper that writes multi-line texts as blocks, and no aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _represent)


def _options(plan: Plan, kind: str) -> dict[str, Any]:
    return plan.recipe.target.options if plan.recipe.target.kind == kind else {}


def _container(plan: Plan) -> ContainerOptions:
    known = {
        key: plan.recipe.target.options[key]
        for key in ContainerOptions.model_fields
        if key in plan.recipe.target.options
    }
    return validate_options(ContainerOptions, known)


def _only(plans: Sequence[Plan], form: str) -> Plan:
    if len(plans) != 1:
        raise UsageError(
            f"--format {form} writes one run per file, got {len(plans)} runs; give one recipe and one seed"
        )
    return plans[0]


def _plan_text(plan: Plan) -> str:
    """Return the plan with the target ``local``, for its new machine, and without the text of uncommitted changes."""
    target = plan.recipe.target
    shared = {name: value for name, value in target.options.items() if name in SHARED}
    local = TargetSection(kind="local", threads=target.threads, device=target.device, **shared)
    provenance = plan.provenance.model_copy(update={"git_diff": "", "ledger": None})
    recipe = plan.recipe.model_copy(update={"target": local})
    changed = plan.model_copy(update={"recipe": recipe, "provenance": provenance})
    return json.dumps(changed.model_dump(mode="json"), indent=1) + "\n"


def _require(key: str, path: str) -> str:
    """Return a script line that ends a job with a message if a path that its recipe reads is missing."""
    said = shlex.quote(f"{key}: {path} is not on this node: copy it to the same path")
    return f"[ -e {shlex.quote(path)} ] || {{ echo {said} >&2; exit 2; }}\n"


def _write_plan(plan: Plan, folder: str) -> str:
    text = _plan_text(plan)
    # Keep an existing plan: if the file is submitted again, it resumes its run.
    return f"mkdir -p {folder}\n[ -e {folder}/plan.json ] || cat > {folder}/plan.json <<'{END}'\n{text}{END}"


def _lines(plan: Plan, options: ContainerOptions) -> str:
    python = shlex.quote(options.python)
    return (
        f'run="${{SPARSEBP_HOME:-$HOME/.local/share/sparsebp}}/runs/{plan.run_id}"\n'
        + _write_plan(plan, '"$run"')
        + f'\nexec {python} -P -m {options.worker} "$run/plan.json"\n'
    )
