"""The user's settings, ``settings.yaml`` beside ``targets.yaml``; so far, notifications.

Only the client's machine reads them, and only for an event. No plan, event log or archive contains them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebp_cli.notify import settings_file
from sparsebp_cli.policy.field_error import describe_errors
from sparsebp_cli.recipe.check import find_place
from sparsebp_cli.recipe.document import Place, read_document
from sparsebp_cli.run.budget import read_bounded

LARGEST_BYTES = 64 * 1024
WEBHOOK = "was removed: use command, such as [curl, --silent, --data-binary, '@-', ADDRESS]"
USUAL = ("finished", "failed", "diverged", "interrupted", "unreachable", "judged")


class Notice(BaseModel):
    """A way to notify somebody."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    on: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        USUAL, description="Names of the events to send. A name that no command uses yet is allowed."
    )
    command: tuple[str, ...] = Field(
        min_length=1, description="A program with its arguments. It gets the event as JSON on standard input."
    )
    timeout_seconds: float = Field(10.0, gt=0.0, le=300.0, description="Seconds after which the program is ended.")


class Settings(BaseModel):
    """The user's settings."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    notify: tuple[Notice, ...] = Field((), description="Receivers of events; none by default.")


def load_settings() -> Settings:
    """Return the settings, with defaults for a missing file. Raise RecipeError with file, line and key for an invalid
    file."""
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
        found = describe_errors(error, Settings, tree.plain)
        first = next((one for one in found if "webhook" in one.location), found[0])
        # Another error's text may contain the value, and an address may be a secret.
        text = WEBHOOK if "webhook" in first.location else first.text
        raise find_place(tree, first).error(text, first.key) from None
