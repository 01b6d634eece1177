"""Upload a model's folder with huggingface_hub, to the hub of the environment (``HF_ENDPOINT``) with its token."""

from __future__ import annotations

import shlex
from pathlib import Path

from sparsebp_cli.errors import RunFailedError, UsageError, first_line


def check_hub(name: str) -> None:
    """Raise ``UsageError`` for an invalid repository name, or without a token; ``RunFailedError`` if the hub does not
    answer, or refuses the token. Nothing is written."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"--push: {first_line(error)}") from None
    if get_token() is None:
        raise UsageError("--push needs a token of the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as error:  # a hub's errors come from many libraries
        raise RunFailedError(
            f"--push cannot use the Hugging Face hub, and nothing was written: {_describe(error)}"
        ) from None


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder to a repository and return its address. A missing repository is created, private unless
    ``public``. Raise ``RunFailedError`` if that fails; the folder stays."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    try:
        api = HfApi()
        place = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=place.repo_id, folder_path=folder, commit_message="Add a model trained by SparseBP")
    except Exception as error:
        again = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))} ." + ("" if public else " --private")
        raise RunFailedError(
            f"the model is in {folder}, but could not be uploaded: {_describe(error)}; `{again}` uploads it"
        ) from None
    return str(place)


def _describe(error: Exception) -> str:
    """Return the first line of an error, whichever library raised it."""
    return f"{type(error).__name__}: {first_line(error)}"
