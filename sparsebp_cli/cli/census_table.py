"""Show data statistics as a table, and examples with their trained parts marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsebp_cli.cli.screen import console, make_table
from sparsebp_cli.run.census import Census, find_warnings

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MOST_CLASSES = 20  # rows of the table; JSON has all classes
MOST_CHARACTERS = 1200  # of an example on the screen; JSON has the whole example
LENGTHS = {"shortest": "shortest", "quarter": "first quartile", "median": "median", "three_quarters": "third quartile"}
LENGTHS |= {"longest": "longest"}


def census_table(census: Census) -> Table:
    """Return the statistics, with a column for each split."""
    splits: Mapping[str, Any] = census["splits"]
    table = make_table("", *splits, numbers=list(splits))
    for title, values in _rows(splits):
        table.add_row(title, *values)
    return table


def print_warnings(census: Census) -> None:
    """Print the findings about the data, one line each."""
    for level, text in find_warnings(census):
        console().print(f"{level}: {text}")


def _rows(splits: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    def row(key: str) -> list[str]:
        return [f"{split[key]:,}" for split in splits.values()]

    def reasons(key: str, word: str) -> Iterator[tuple[str, list[str]]]:
        for reason in dict.fromkeys(reason for split in splits.values() for reason in split[key]):
            yield f"  {word}: {reason}", [f"{split[key].get(reason, 0):,}" for split in splits.values()]

    yield "rows read", row("rows")
    yield from reasons("dropped", "dropped")
    yield from reasons("cut_reasons", "cut")
    yield "  duplicates of an earlier row", row("duplicates")
    yield "examples", row("examples")
    for key, word in (("unused_examples", "not used (max_train_examples)"), ("left_over_tokens", "tokens left over")):
        if any(split[key] for split in splits.values()):
            yield f"  {word}", row(key)
    if all("texts" in split for split in splits.values()):  # runs of 0.5 have no "texts"
        looked = [split["texts"] for split in splits.values()]
        yield "  with a fault in their text", [f"{one['affected']:,} of {one['rows']:,} rows" for one in looked]
    yield "tokens", row("tokens")
    yield "targets", row("targets")
    yield "  share of tokens", [f"{split['target_share']:.1%}" for split in splits.values()]
    for key, word in LENGTHS.items():
        yield f"length: {word}", [f"{split['lengths'][key]:,}" for split in splits.values()]
    classes = list(dict.fromkeys(name for split in splits.values() for name in split["classes"]))
    for name in classes[:MOST_CLASSES]:
        yield f"class {name}", [f"{split['classes'].get(name, 0):,}" for split in splits.values()]
    if len(classes) > MOST_CLASSES:
        yield f"and {len(classes) - MOST_CLASSES} more classes", [""] * len(splits)


def print_examples(first: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print examples as readable text. Trained tokens are green, or without colours in double brackets."""
    from rich.text import Text

    screen = console()
    has_colour = screen.color_system is not None and not screen.no_color
    mark = "green" if has_colour else "in [[ ]]"
    for split, examples in first.items():
        for number, example in enumerate(examples, start=1):
            label = (
                f", label {example['label']}" if "label" in example else f", {sum(example['trained'])} trained ({mark})"
            )
            screen.print()
            screen.print(Text(f"{split}, example {number}: {len(example['ids'])} tokens{label}", style="bold"))
            screen.print(_mark(example["parts"], has_colour=has_colour))


def _mark(parts: Sequence[tuple[str, bool]], *, has_colour: bool) -> Text:
    from rich.text import Text

    text = Text()
    for words, is_trained in parts:
        room = MOST_CHARACTERS - len(text)
        shown = words if len(words) <= room else words[: max(0, room)] + " ..."
        if is_trained and not has_colour:
            shown = f"[[{shown}]]"
        text.append(shown, style="green" if is_trained else "")
        if len(words) > room:
            break
    return text
