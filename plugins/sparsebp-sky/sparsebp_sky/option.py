"""The options of a managed job of SkyPilot."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sparsebp_cli.target import TargetOptions

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Url = Annotated[str, Field(pattern=r"^[a-z0-9]+://[^\s]+$")]
# SkyPilot reads $NAME in file_mounts as a variable.
Place = Annotated[str, Field(pattern=r"^/[\w./@+-]+$")]
Amount = Annotated[str, Field(pattern=r"^[1-9][0-9]*(\.[0-9]+)?\+?$")]
Infra = Annotated[str, Field(pattern=r"^[\w*][\w.:/*@-]*$")]
Accelerators = Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*(:[1-9][0-9]*)?$")]


class SkyOptions(TargetOptions):
    """A managed job of SkyPilot, on any cloud, that reads and writes a bucket."""

    bucket: Url = Field(
        description="The bucket as SkyPilot names it, such as s3://my-bucket. The whole bucket is mounted."
    )
    remote: Annotated[str, Field(pattern=r"^[^\s-][^\s]*$")] = Field(
        description="The same bucket as rclone names it on this machine, such as s3:my-bucket."
    )
    infra: list[Infra] = Field(
        default_factory=list,
        description=(
            "Clouds or regions where the run may train, such as aws, gcp/us-central1 or k8s; empty: anywhere."
        ),
    )
    gpus: list[Accelerators] = Field(
        default_factory=list,
        description="GPUs, such as [L4:1, A100:1]; SkyPilot chooses one of the items. Empty: no GPU.",
    )
    cpus: Amount | None = Field(
        None, description="Number of CPUs, such as 8, or 8+ for at least 8; null: SkyPilot's default."
    )
    memory: Amount | None = Field(
        None, description="Memory in GiB, such as 32, or 32+ for at least 32; null: SkyPilot's default."
    )
    disk_gb: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Size of the machine's disk in GB; null: SkyPilot's default."
    )
    spot: bool = Field(
        False,
        description="Whether to use spot instances, which cost less, but which the cloud may take away at any time.",
    )
    recovery: Literal["EAGER_NEXT_REGION", "FAILOVER"] | None = Field(
        None, description="How SkyPilot recovers a run whose machine is lost; null: SkyPilot's default."
    )
    pool: Annotated[str, Field(pattern=r"^[a-zA-Z]([\w.-]*[a-zA-Z0-9])?$")] | None = Field(
        None,
        description=(
            "Name of a SkyPilot pool whose workers run already. The pool's own YAML must mount the bucket. null: "
            "start a new machine."
        ),
    )
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:/@-]*$")] | None = Field(
        None,
        description="Docker image that contains SparseBP; null: SkyPilot's own machine image, which setup prepares.",
    )
    setup: list[str] = Field(
        default_factory=list, description="Shell commands that prepare the machine, such as pip install sparsebp."
    )
    python: Annotated[str, Field(min_length=1)] = Field(
        "python3", description="Command that runs Python 3.11.4 or newer on the machine."
    )
    mounts: dict[Place, Url] = Field(
        default_factory=dict,
        description=(
            "Data that a recipe reads: map from its path on the cloud machine to the bucket, or the folder in a "
            "bucket, that contains it."
        ),
    )
    secrets: list[Variable] = Field(
        default_factory=list,
        description="Names of environment variables of this machine that the worker gets as SkyPilot secrets.",
    )
    sync_seconds: Annotated[float, Field(gt=0, le=600)] = Field(
        10.0,
        description=(
            "Seconds between two uploads to the bucket. If the machine is lost, the run repeats about this much "
            "training."
        ),
    )
    poll_seconds: Annotated[float, Field(gt=0, le=600)] = Field(
        20.0, description="Longest pause, in seconds, between two queries to SkyPilot and the bucket."
    )

    @field_validator("setup")
    @classmethod
    def _one_line_each(cls, setup: list[str]) -> list[str]:
        if any("\n" in line or "\r" in line for line in setup):
            raise ValueError(
                "each item must be one shell line, but an item contains a line break: write each line as a separate "
                "item"
            )
        return setup

    @model_validator(mode="after")
    def _consistent(self) -> SkyOptions:
        twice = set(self.env) & set(self.secrets)
        if twice:
            raise ValueError(f"secrets: {min(twice)} is also in env; give it in only one of them")
        ignored = [name for name in ("image", "setup", "mounts", "disk_gb") if getattr(self, name)]
        if self.pool and ignored:
            raise ValueError(
                f"{ignored[0]}: has no effect with pool, whose machines exist already; set it in the YAML of the pool"
            )
        return self
