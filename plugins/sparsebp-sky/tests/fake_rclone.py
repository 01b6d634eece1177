"""Stands in for ``rclone`` with a remote on this disk: four verbs, with the exit codes of rclone 1.60.

``$BUCKET.down`` cuts the line.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

MISSING = 3


def end(text: str, code: int = 1) -> NoReturn:
    print(f"2026/01/01 00:00:00 Failed: {text}", file=sys.stderr)
    raise SystemExit(code)


def show(folder: Path, *, deep: bool) -> None:
    if not folder.is_dir():
        end("error in ListJSON: directory not found", MISSING)
    for path in sorted(folder.rglob("*") if deep else folder.iterdir()):
        if path.is_file():
            print(f"{path.stat().st_size};{path.relative_to(folder)}")
        elif not deep:
            print(f"-1;{path.name}/")


def main(words: list[str]) -> None:
    print("NOTICE: Config file not found - using defaults", file=sys.stderr)
    if Path(f"{os.environ['BUCKET']}.down").exists():
        end("couldn't list files: RequestError: send request failed: connection refused")
    place = Path(words[-1])
    match words[:-1]:
        case ["lsf", "--format", "sp", "--separator", ";", *rest]:
            show(place, deep=rest == ["--recursive", "--files-only"])
        case ["cat", *rest]:
            if not place.is_file():
                end("last error was: directory not found", MISSING)
            options = dict(zip(rest[::2], rest[1::2], strict=True))
            with place.open("rb") as stream:
                stream.seek(int(options.get("--offset", 0)))
                sys.stdout.buffer.write(stream.read(int(options.get("--count", -1))))
        case ["rcat"]:
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f"{place.name}.{os.getpid()}")
            with part.open("wb") as stream:
                shutil.copyfileobj(sys.stdin.buffer, stream)
            part.replace(place)
        case ["purge"]:
            if not place.is_dir():
                end("directory not found", MISSING)
            shutil.rmtree(place, ignore_errors=True)
        case _:
            end(f"unknown command: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
