"""Convert a model's folder into a file for llama.cpp, with llama.cpp's own converter."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_cli.run import interpreter

SCRIPT = "convert_hf_to_gguf.py"
FOLDER = "LLAMA_CPP"  # environment variable with the checkout of llama.cpp
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # no rounding


def find_converter() -> list[str]:
    """Return the words that start the converter: the script in the folder that ``LLAMA_CPP`` names, run by this
    interpreter, or a program of this name on the path. Raise ``UsageError`` without either."""
    if (folder := os.environ.get(FOLDER)) is not None:
        script = Path(folder).expanduser().absolute() / SCRIPT
        if not script.is_file():
            raise UsageError(f"--gguf: {FOLDER} is {folder!r}, which has no {SCRIPT}")
        return [interpreter.PYTHON, str(script)]
    if (program := shutil.which(SCRIPT)) is not None:
        return [program]
    raise UsageError(
        f"--gguf: {SCRIPT} of llama.cpp is not on PATH: install llama.cpp's Python requirements in this environment, "
        f"and set {FOLDER} to its checkout"
    )


def convert(converter: Sequence[str], folder: Path, file: Path, name: str, dtype: str) -> None:
    """Convert a transformers folder into a file for a model ``name``, with the dtype of its weights. Raise
    ``RunFailedError`` with the converter's last line if it fails."""
    words = [*converter, str(folder), "--outfile", str(file), "--outtype", TYPES.get(dtype, "auto")]
    environment = interpreter.environment()
    del environment["PYTHONSAFEPATH"]  # the script imports neighbouring files
    words += ["--model-name", name]  # otherwise it takes the folder's name, which is temporary
    done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not file.is_file():
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        last = lines[-1] if lines else "it printed nothing"
        raise RunFailedError(f"{SCRIPT} ended with exit code {done.returncode}, and nothing was written: {last}")
