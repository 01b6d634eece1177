"""The user's settings, ``settings.yaml`` beside ``targets.yaml``: so far who is told of what.

They are read on the machine of the client alone, and only when something is told. No plan, journal or archive has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparsebp_cli.errors import UsageError
from sparsebp_cli.notify import settings_file
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.recipe.check import find_place
from sparsebp_cli.recipe.document import Place, read_document
from sparsebp_cli.run.budget import read_bounded

LARGEST_BYTES = 64 * 1024
ADDRESS = "must be an https:// or http:// address without user and password, or {env: NAME}, or {file: PATH}"
USUAL = ("finished", "failed", "diverged", "interrupted", "unreachable", "budget-spent", "judged")


class Secret(BaseModel):
    """Where a secret is; the settings do not have it themselves."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    env: str | None = Field(None, min_length=1, description="An environment variable.")
    file: str | None = Field(None, min_length=1, description="A file; blanks and line ends around it do not count.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("a secret is named by either env or file")
        return self

    def read(self) -> str:
        """Return the secret. Raise UsageError, without the secret, if it is not there."""
        if self.env is not None:
            found = os.environ.get(self.env, "")
        else:
            try:
                found = read_bounded(Path(str(self.file)).expanduser(), LARGEST_BYTES).decode().strip()
            except (OSError, ValueError) as error:
                raise UsageError(f"the secret's file {self.file} cannot be read: {type(error).__name__}") from None
        if not found:
            raise UsageError(f"the secret in {self.env or self.file} is empty or not set")
        return found


class Notice(BaseModel):
    """One way in which somebody is told."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    on: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        USUAL, description="Events; a name that no verb has yet is allowed."
    )
    command: tuple[str, ...] | None = Field(
        None, min_length=1, description="A program with its arguments; it gets the event as JSON on standard input."
    )
    webhook: str | Secret | None = Field(
        None, description="An address that gets the event as JSON by POST; one that is a secret itself is named."
    )
    secret: Secret | None = Field(None, description="Key of the webhook's signature.")
    attempts: int = Field(6, ge=1, le=20, description="How often a webhook is tried.")
    pause_seconds: float = Field(1.0, ge=0.0, le=60.0, description="Before the second attempt; it doubles with each.")
    timeout_seconds: float = Field(10.0, gt=0.0, le=300.0, description="Time for each attempt, or for the command.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.webhook is None):
            raise ValueError("give either command or webhook")
        if self.secret is not None and self.webhook is None:
            raise ValueError("secret signs what a webhook gets")
        if isinstance(self.webhook, str):
            check_address(self.webhook)
        return self


class Settings(BaseModel):
    """The user's settings."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    notify: tuple[Notice, ...] = Field((), description="Receivers of events; none by default.")


def check_address(address: str) -> str:
    """Return a webhook's address; raise ValueError, without the address, for one that cannot be used."""
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("a webhook is an address that begins with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a webhook's address has no user or password: name one that is a secret by env or file")
    return address


def load_settings() -> Settings:
    """Return the settings; those of a missing file are the defaults. Raise RecipeError with file, line and key for a
    file that is wrong."""
    file = settings_file()
    try:
        tree = read_document(read_bounded(file, LARGEST_BYTES).decode("utf-8-sig"), str(file))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise Place(str(file)).error(f"cannot be read: {error}") from None
    if tree is None:
        return Settings()
    try:
        return Settings.model_validate(tree.plain)
    except ValidationError as error:
        first = describe_errors(error, Settings, tree.plain)[0]
        # The text of any other error may have the value in it, and an address may be a secret.
        text = ADDRESS if "webhook" in first.location else first.text
        raise find_place(tree, first).error(text, first.key) from None
