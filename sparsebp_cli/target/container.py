"""Define the options of a run in a container, and build commands from them. This module runs nothing."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator, model_validator

from sparsebp_cli.errors import UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import find_sources
from sparsebp_cli.recipe.schema import PositiveInt, TargetOptions
from sparsebp_cli.target.confinement import NOBODY, check_user, read_mount

DATA = "/data"


def _check_mount(text: str) -> str:
    read_mount(text)
    return text


def _check_user(text: str) -> str:
    check_user(text)
    return text


Size = Annotated[str, Field(pattern=r"^[1-9][0-9]*[bkmgBKMG]?$")]
MountText = Annotated[
    str, AfterValidator(_check_mount), WithJsonSchema({"type": "string", "pattern": "^/[^:,]*:/[^:,]*(:(ro|rw))?$"})
]
UserText = Annotated[str, Field(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$"), AfterValidator(_check_user)]
Device = Annotated[str, Field(pattern=r"^[\w.:/-]+$")]
USER = "Ids USER:GROUP in the container: your own ids, or one unused id of at least 1000 for both. Never root."
GPUS = "GPUs of the container: all, a number, or a list of indices or UUIDs. null: none."


class ContainerOptions(TargetOptions):
    """Options of every target that runs containers."""

    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:/@-]*$")] = Field(
        "sparsebp:latest", description="Image that contains SparseBP, preferably with its digest: NAME@sha256:..."
    )
    python: Annotated[str, Field(min_length=1)] = Field("python", description="Command that starts Python for the run.")


class DockerOptions(ContainerOptions):
    """A docker or podman container, on this machine or on another one over SSH."""

    host: Annotated[str, Field(pattern=r"^(ssh://([\w.-]+@)?[\w.-]+(:[0-9]+)?|unix:///.+)$")] | None = Field(
        None,
        description="Address of the engine: ssh://[USER@]HOST[:PORT] or unix:///PATH. null: context, or DOCKER_HOST.",
    )
    context: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] | None = Field(
        None, description="Instead of host: a context of docker, or a connection of podman. null: the current one."
    )
    command: Literal["docker", "podman"] = Field("docker", description="Command line tool of the container engine.")
    pull: Literal["missing", "always", "never"] = Field("missing", description="When the engine pulls the image.")
    gpus: Literal["all"] | PositiveInt | list[Device] | None = Field(None, description=GPUS)
    mounts: list[MountText] = Field(
        default_factory=list, description="Folders of the host to mount: SOURCE:TARGET (read-only) or SOURCE:TARGET:rw."
    )
    hub_cache: Annotated[str, Field(pattern=r"^/[^:,]*$")] | None = Field(
        None,
        description="Folder of the host that caches downloads from the hub for later runs. null: no cache.",
    )
    network: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = Field(
        None, description="Network of the container: none, host, or a name; null: the engine's default."
    )
    memory: Size | None = Field(None, description="Memory limit, such as 16g; null: no limit.")
    shm_size: Size | None = Field(None, description="Size of /dev/shm, such as 2g; null: the engine's default.")
    user: UserText = Field(NOBODY, description=USER)

    @field_validator("hub_cache")
    @classmethod
    def _safe_cache(cls, folder: str | None) -> str | None:
        if folder is not None:
            read_mount(f"{folder}:{DATA}/hub:rw")
        return folder

    @model_validator(mode="after")
    def _consistent(self) -> DockerOptions:
        if self.host and self.context:
            raise ValueError("give either host or context, not both")
        if self.command == "podman" and self.host:
            raise ValueError("host is not for podman: run `podman system connection add`, and give its name as context")
        return self


def engine_command(options: DockerOptions) -> list[str]:
    """Return the command and global options that every call of the engine starts with."""
    words: list[str] = [options.command]
    if options.host:
        words += ["--host", options.host]
    if options.context:
        words += ["--connection" if options.command == "podman" else "--context", options.context]
    return words


def create_command(options: DockerOptions, run_id: str, image: str, labels: dict[str, str]) -> list[str]:
    """Return the command that creates a run's container, with labels in addition to ``sparsebp.run``."""
    words = [*engine_command(options), "create", "--name", container_name(run_id)]
    for name, value in {"sparsebp.run": run_id, **labels}.items():
        words += ["--label", f"{name}={value}"]
    words += confinement_options(options)
    # -P: import modules only from the image, never from a folder of the run. See decision 27.
    worker = [image, "-P", "-m", options.worker, f"{run_folder(run_id)}/plan.json"]
    return [*words, "--entrypoint", options.python, *worker]


def list_mounts(options: DockerOptions) -> list[str]:
    """Return every host folder that a container gets, in the form of ``mounts``."""
    return [*options.mounts, *([f"{options.hub_cache}:{DATA}/hub:rw"] if options.hub_cache else [])]


def confinement_options(options: DockerOptions) -> list[str]:
    """Return the options of every container: no root, no capabilities, an init process, and only the requested mounts
    and limits."""
    # Use an init, because process 1 gets no signal without a handler and does not reap zombies.
    words = ["--init", "--user", options.user, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    words += gpu_options(options)
    for name, value in (
        ("--network", options.network),
        ("--memory", options.memory),
        ("--shm-size", options.shm_size),
    ):
        words += [name, value] if value else []
    for text in list_mounts(options):
        try:  # check again: an earlier run may have replaced a folder by a link
            mount = read_mount(text)
        except ValueError as error:
            raise UsageError(f"target.mounts: {error}") from None
        end = "" if mount.writable else ",readonly"
        words += ["--mount", f"type=bind,source={mount.source},target={mount.target}{end}"]
    # An empty value keeps Python buffered. Unbuffered, it writes lines in pieces, and some engines stamp each piece.
    fixed = {"HOME": f"{DATA}/home", "SPARSEBP_HOME": DATA, "PYTHONUNBUFFERED": "", "USER": "sparsebp"}
    fixed |= {"HF_HOME": f"{DATA}/hub"} if options.hub_cache else {}
    for name, value in {**fixed, **options.env}.items():
        words += ["--env", f"{name}={value}"]
    return [*words, "--workdir", DATA]


def gpu_options(options: DockerOptions) -> list[str]:
    """Return the options that request GPUs."""
    if options.gpus is None:
        return []
    if options.command == "docker":
        wanted = options.gpus
        if isinstance(wanted, list):
            # docker parses this as a line of CSV, so a list needs its own quotes.
            return ["--gpus", '"device=' + ",".join(wanted) + '"']
        return ["--gpus", str(wanted)]
    names = ["all"] if options.gpus == "all" else options.gpus
    # Podman silently ignores --gpus. CDI addresses devices by name and has no option for their number.
    if isinstance(names, int):
        names = [str(number) for number in range(names)]
    return [word for name in names for word in ("--device", f"nvidia.com/gpu={name}")]


def check_gpus(options: TargetOptions, gpus: int | str | None) -> None:
    """Raise ValueError if each of several nodes has other numbers of GPUs and processes; each process takes one GPU.
    ``gpus`` is a number, or TYPE:NUMBER."""
    here = options.processes // options.nodes
    if gpus is not None and int(str(gpus).rpartition(":")[2]) != here:
        raise ValueError(
            f"gpus counts the GPUs of one node: {options.processes} processes on {options.nodes} nodes need {here} on "
            f"each, got {gpus}"
        )


def container_name(run_id: str) -> str:
    """Return the name of a run's container. Names are unique, so two remote runners cannot both create one."""
    return f"sparsebp-{run_id}"


def run_folder(run_id: str) -> str:
    """Return the path of a run's folder inside a container."""
    return f"{DATA}/runs/{run_id}"


def list_paths(plan: Plan) -> dict[str, str]:
    """Return the files and folders that a recipe reads, by key."""
    return {key: path for key, path in find_sources(plan.recipe).items() if path.startswith("/")}


def check_paths(plan: Plan, reached: list[str]) -> None:
    """Raise ``UsageError`` if the recipe reads a path outside the folders that the container can read."""
    for key, path in list_paths(plan).items():
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in reached):
            parent = PurePosixPath(path).parent
            raise UsageError(f"{key}: the container cannot see {path}; add '{parent}:{parent}' to target.mounts")


def mounted_folders(options: DockerOptions) -> list[str]:
    """Return the folders that a container has in addition to its image."""
    return [read_mount(mount).target for mount in options.mounts]
