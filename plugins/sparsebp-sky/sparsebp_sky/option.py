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

    bucket: Url = Field(description="The bucket as SkyPilot names it, such as s3://my-bucket; mounted as a whole.")
    remote: Annotated[str, Field(pattern=r"^[^\s-][^\s]*$")] = Field(
        description="The same bucket as rclone names it on this machine, such as s3:my-bucket."
    )
    infra: list[Infra] = Field(
        default_factory=list, description="Where it may run, such as aws, gcp/us-central1 or k8s; empty: anywhere."
    )
    gpus: list[Accelerators] = Field(
        default_factory=list, description="Any one of these, such as [L4:1, A100:1]; empty: none."
    )
    cpus: Amount | None = Field(None, description="CPUs, such as 8, or 8+ for at least 8; null: SkyPilot's default.")
    memory: Amount | None = Field(None, description="GiB of memory, such as 32+; null: SkyPilot's default.")
    disk_gb: Annotated[int, Field(ge=1)] | None = Field(
        None, description="GB of the machine's disk; null: the default."
    )
    spot: bool = Field(False, description="Whether to take spot instances, which are cheaper and may be taken away.")
    recovery: Literal["EAGER_NEXT_REGION", "FAILOVER"] | None = Field(
        None, description="SkyPilot's strategy when a machine is lost; null: its default."
    )
    pool: Annotated[str, Field(pattern=r"^[a-zA-Z]([\w.-]*[a-zA-Z0-9])?$")] | None = Field(
        None, description="A pool of workers that is up already; its own YAML mounts the bucket. Null: a new machine."
    )
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:/@-]*$")] | None = Field(
        None, description="Docker image with SparseBP in it; null: SkyPilot's own machine image, see setup."
    )
    setup: list[str] = Field(
        default_factory=list, description="Shell lines that prepare a machine, such as pip install sparsebp."
    )
    python: Annotated[str, Field(min_length=1)] = Field("python3", description="Python there, 3.11.4 or newer.")
    mounts: dict[Place, Url] = Field(
        default_factory=dict, description="Data that a recipe reads: the path there, and a bucket or a folder of one."
    )
    secrets: list[Variable] = Field(
        default_factory=list, description="Names of variables of this machine that the worker gets as secrets."
    )
    sync_seconds: Annotated[float, Field(gt=0, le=600)] = Field(
        10.0, description="Seconds between writes of the machine to the bucket; a run repeats as many after a loss."
    )
    poll_seconds: Annotated[float, Field(gt=0, le=600)] = Field(
        20.0, description="Longest pause, in seconds, between two queries to SkyPilot and the bucket."
    )

    @field_validator("setup")
    @classmethod
    def _one_line_each(cls, setup: list[str]) -> list[str]:
        if any("\n" in line or "\r" in line for line in setup):
            raise ValueError("write each line as a separate item")
        return setup

    @model_validator(mode="after")
    def _consistent(self) -> SkyOptions:
        twice = set(self.env) & set(self.secrets)
        if twice:
            raise ValueError(f"secrets: {min(twice)} is in env, too; give it once")
        ignored = [name for name in ("image", "setup", "mounts", "disk_gb") if getattr(self, name)]
        if self.pool and ignored:
            raise ValueError(
                f"{ignored[0]}: has no effect with pool, whose machines exist already; set it in the YAML of the pool"
            )
        return self
