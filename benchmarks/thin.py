"""Keeps the values of an archive from which pages and statistics are rebuilt, and makes an archive of them again.

    python benchmarks/thin.py docs/results/wins/genre.tar.gz -o docs/results/wins/genre.parquet --keep report
    python benchmarks/thin.py docs/results/wins/genre.parquet -o genre.tar.gz   # for compare --from genre.tar.gz
    python benchmarks/thin.py study.json -o docs/results/study.csv              # of a comparison without an archive

A parquet file has one row a record of a journal, in its order: a column a metric, all else as text. Plans, and what was
evaluated, are as they were archived; FLOPs are whole, and times are rounded. The file has the digest of the archive.
Whole event logs stay in the history, at commit a6c6be72.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

ENDING, WHOLE = ".parquet", ".tar.gz"
JOURNAL = "journal.jsonl"
BUILT = ROOT / "build" / "values"  # archives that were made of values
TIME, TICKS = "time/", 10**7  # what begins the names of times, which are whole numbers of these parts of a second
EVALUATED = ("eval/*", "test/*")
COMMON = ("run", "kind", "attempt", "time", "step", "text")  # columns beside those of metrics
ENCODINGS = ("RLE_DICTIONARY", "PLAIN", "BYTE_STREAM_SPLIT")


@dataclass(frozen=True)
class Kept:
    """What a kind of page reads: patterns of metrics, and kinds of other records."""

    metrics: tuple[str, ...]
    tuning: tuple[str, ...] = EVALUATED  # of runs of tuning, which decide by their evaluations
    records: tuple[str, ...] = ("attempt", "seal", "facts", "end")
    dropped: tuple[str, ...] = ()  # of these metrics
    digits: Mapping[str, int] = field(default_factory=dict)  # of a time that is not kept whole

    def has(self, name: str, role: str) -> bool:
        """Whether a metric of a run of a study's role is kept."""
        patterns = self.tuning if role == "tune" else PRICES + EVALUATED if role == "rehearse" else self.metrics
        return any(fnmatch(name, one) for one in patterns) and not any(fnmatch(name, one) for one in self.dropped)


PRICES = ("flops/step", "flops/step_dense", "flops/update", "flops/update_dense")
DROPPED = ("train/loss", "train/grad_norm", "train/learning_rate", "throughput/*", "choice/seconds_ratio")
KEPT = {
    "losses": Kept(EVALUATED),
    # CPU seconds are summed alone; of the others is read when a step ended. The load says that the machine was busy.
    "board": Kept(
        (*EVALUATED, "flops/step", "time/step*_seconds", "host/load", "memory/step_peak_bytes"),
        digits={"time/step_cpu_seconds": 3, "time/step_seconds": 2},
    ),
    "page": Kept(("*",), records=("attempt", "seal", "facts", "note", "end"), dropped=DROPPED),
    "report": Kept(("*",), records=("attempt", "seal", "facts", "note", "end", "examples"), dropped=DROPPED),
}


def has_archive(place: Path) -> bool:
    """Whether a place, a path without an ending, has a whole archive or its values."""
    return any(place.with_name(f"{place.name}{ending}").exists() for ending in (WHOLE, ENDING))


def find_archive(place: Path) -> Path:
    """Return the archive of a place: the whole one if it is there, else one made of the values beside it."""
    whole, values = (place.with_name(f"{place.name}{ending}") for ending in (WHOLE, ENDING))
    if whole.exists() or not values.exists():
        return whole
    made = BUILT / f"{place.name}-{digest(values)[:12]}{WHOLE}"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        restore(values, made)
    return made


def digest(file: Path) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def thin(archive: Path, file: Path, kept: Kept) -> None:
    """Write the values of an archive."""
    with tarfile.open(archive) as packed:
        members = {one.name: packed.extractfile(one).read() for one in packed if one.isreg()}  # type: ignore[union-attr]
    trials = [one for name in members if name.startswith("studies/") for one in json.loads(members[name])["trials"]]
    roles = {one["run_id"]: one["role"] for one in trials}
    rows = list(_list_rows(members, kept, roles))
    names = sorted({name for row in rows for name in row["values"]})
    table = pa.table(
        {column: pa.array([row.get(column) for row in rows], TYPES[column]) for column in COMMON}
        | {name: _make_column([row["values"].get(name) for row in rows]) for name in names},
        metadata={"archive": archive.name, "sha256": digest(archive)},
    )
    _write(table, file)


TYPES = {
    "run": pa.string(),
    "kind": pa.string(),
    "attempt": pa.int32(),
    "time": pa.int64(),  # seconds since 1970
    "step": pa.int32(),
    "text": pa.string(),
}


def _list_rows(members: Mapping[str, bytes], kept: Kept, roles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name, content in members.items():
        folder, run, part = (*PurePosixPath(name).parts, "", "")[:3]
        if folder == "studies" or (folder == "runs" and part != JOURNAL):
            yield {"run": name, "kind": "file", "text": content.decode(), "values": {}}
        elif folder == "runs":
            yield from _list_records(run, content, kept, roles.get(run, "report"))


def _list_records(run: str, journal: bytes, kept: Kept, role: str) -> Iterator[dict[str, Any]]:
    lines = [(json.loads(line), line.decode()) for line in journal.splitlines()]
    last = max((record["step"] for record, _ in lines if record["kind"] == "metrics"), default=0)
    evaluated = {r["step"] for r, _ in lines if r["kind"] == "metrics" and any(_is_evaluation(n) for n in r["values"])}
    for record, text in lines:
        common = {"run": run, "kind": record["kind"], "attempt": record["attempt"]}
        if record["kind"] == "metrics":
            exact = {name: value for name, value in record["values"].items() if kept.has(name, role)}
            if role == "rehearse" and exact:  # the budget, to its last bit, is in the recipes that follow from it
                yield common | {"text": json.dumps(record | {"values": exact}), "values": {}}
                continue
            values = {name: _round(name, value, kept.digits.get(name, 9)) for name, value in exact.items()}
            if record["step"] not in evaluated:  # a curve reads the tokens until an evaluation
                values.pop("train/tokens", None)
            if values:
                yield common | {"time": round(record["time"]), "step": record["step"], "values": values}
        elif record["kind"] in kept.records and (record["kind"] != "examples" or _is_compared(record, role, last)):
            yield common | {"text": text, "values": {}}


def _is_evaluation(name: str) -> bool:
    return any(fnmatch(name, one) for one in EVALUATED)


def _is_compared(record: Mapping[str, Any], role: str, last: int) -> bool:
    """Whether a comparison reads the losses of a record of examples: those of validation after the last step."""
    return role == "report" and record["step"] == last and record.get("split", "validation") == "validation"


def _round(name: str, value: Any, digits: int) -> float | None:
    if value is None:
        return None
    if name.startswith("flops/"):
        return float(round(float(value)))
    return float(round(TICKS * float(f"{value:.{digits}g}"))) if name.startswith(TIME) else float(value)


def _make_column(values: Sequence[float | None]) -> pa.Array:
    """Return a column, of integers where all values are: FLOPs take half of the bytes so."""
    is_whole = all(value is None or value.is_integer() for value in values)
    return pa.array(values, pa.float64()).cast(pa.int64()) if is_whole else pa.array(values, pa.float64())


def _write(table: pa.Table, file: Path) -> None:
    """Write a table, each column in the encoding that is the smallest."""
    floats = table.column_names[len(COMMON) :]
    best: dict[str, tuple[int, str]] = {}
    for encoding in ENCODINGS:
        _write_encoded(table, file, dict.fromkeys(floats, encoding))
        columns = pq.read_metadata(file).row_group(0)
        for place in range(len(COMMON), columns.num_columns):
            found = columns.column(place)
            size = (found.total_compressed_size, encoding)
            best[found.path_in_schema] = min(best.get(found.path_in_schema, size), size)
    _write_encoded(table, file, {name: encoding for name, (_, encoding) in best.items()})


def _write_encoded(table: pa.Table, file: Path, encodings: Mapping[str, str]) -> None:
    counted = dict.fromkeys(("attempt", "time", "step"), "DELTA_BINARY_PACKED")
    is_dictionary = [name for name, encoding in encodings.items() if encoding == ENCODINGS[0]]
    plain = {name: encoding for name, encoding in encodings.items() if encoding != ENCODINGS[0]}
    pq.write_table(
        table,
        file,
        row_group_size=len(table),
        data_page_size=1 << 26,
        dictionary_pagesize_limit=1 << 26,
        compression="zstd",
        compression_level=19,
        use_dictionary=[*COMMON[:2], *is_dictionary],
        column_encoding=counted | plain,
        write_statistics=False,
    )


def restore(values: Path, archive: Path) -> None:
    """Write an archive of the runs of which the values are kept."""
    from sparsebp_cli.compare.archive import write_archive

    table = pq.read_table(values)
    files: dict[str, bytes] = {}
    journals: dict[str, list[str]] = {}
    metrics = table.column_names[len(COMMON) :]
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    for place, (run, kind, text) in enumerate(zip(columns["run"], columns["kind"], columns["text"], strict=True)):
        if kind == "file":
            files[run] = text.encode()
            continue
        line = text
        if line is None:
            found = {name: _give_back(name, value) for name in metrics if (value := columns[name][place]) is not None}
            common = {"kind": kind, "attempt": columns["attempt"][place], "time": float(columns["time"][place])}
            line = json.dumps(common | {"step": columns["step"][place], "values": found})
        journals.setdefault(run, []).append(line)
    made = {run: ("\n".join(lines) + "\n").encode() for run, lines in journals.items()}
    files |= {f"runs/{run}/{JOURNAL}": content for run, content in made.items()}
    digests = {run: hashlib.sha256(content).hexdigest() for run, content in made.items()}
    for name in files:
        if name.startswith("studies/"):  # whose digests are those of the whole journals
            content = json.loads(files[name]) | {"digests": digests}
            files[name] = (json.dumps(content, indent=1) + "\n").encode()
    write_archive(archive, sorted(files.items(), reverse=True))


def _give_back(name: str, value: float) -> float:
    return value / TICKS if name.startswith(TIME) else float(value)


RUN_COLUMNS = ("label", "seed", "run_id", "state", "counts", "steps", "quality", "step_seconds")
TRAINING = ("per_device_train_batch_size", "learning_rate", "max_steps")


def list_runs(comparison: Path, file: Path) -> None:
    """Write the runs of a comparison of ``compare -o json``, one a row, with their validation losses by step."""
    text = comparison.read_text(encoding="utf-8")
    found = json.loads(text)
    training = {group["group"]: group["recipe"]["training"] for group in found["groups"]}
    with file.open("w", encoding="utf-8", newline="") as out:
        print(f"# {comparison.name}, sha256 {digest(comparison)}; quality: {found['metric']}", file=out)
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*RUN_COLUMNS, *TRAINING, "evaluations"])
        for run in found["runs"]:
            curve = " ".join(f"{step}:{value!r}" for step, *_, value in run["curves"]["eval/loss"])
            numbers = [training[run["group"]][key] for key in TRAINING]
            writer.writerow([*(run[column] for column in RUN_COLUMNS), *numbers, curve])


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="an archive or a comparison; or values, of which an archive is made")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--keep", choices=KEPT, default="report", help="what the pages of this archive read")
    arguments = parser.parse_args()
    if arguments.file.suffix == ENDING:
        restore(arguments.file, arguments.output)
    elif arguments.file.suffix == ".json":
        list_runs(arguments.file, arguments.output)
    else:
        thin(arguments.file, arguments.output, KEPT[arguments.keep])
    print(f"{os.path.relpath(arguments.output)}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
