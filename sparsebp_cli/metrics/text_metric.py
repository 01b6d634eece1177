"""Define the contract of metrics of generated texts, and find the plug-ins that offer them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from sparsebp_cli.entry_point import entry_points, find_source
from sparsebp_cli.errors import DataError, UsageError, did_you_mean

GROUP = "sparsebp.metrics"
FIGURE_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
# Returns a finite number for each declared name. The arguments are the generated texts, the texts of the data in the
# same order, and the columns of the rows by name, with the prompts under `prompt`.
Compute = Callable[[Sequence[str], Sequence[str], Mapping[str, Sequence[object]]], Mapping[str, float]]


@dataclass(frozen=True)
class Figure:
    """One number of a metric: its better direction and its unit.

    Args:
        better: Direction in which the number improves.
        unit: Unit of the number; empty for a pure number.
        is_mean: Whether it is the mean of the values for single texts. If so, models can also be compared text by text.
    """

    better: Literal["lower", "higher"]
    unit: str = ""
    is_mean: bool = False


@dataclass(frozen=True)
class TextMetric:
    """A metric of generated texts: a function, and the numbers that it returns.

    Args:
        compute: Function that computes all figures of a list of texts at once.
        figures: Figures that the function returns, by name: lower-case letters, digits and underscores. A run logs each
            as ``eval/NAME`` and ``test/NAME``.
        package: Module that the function needs in addition to the package that offers it; None if none.
    """

    compute: Compute
    figures: Mapping[str, Figure]
    package: str | None = None

    def measure(
        self,
        name: str,
        predictions: Sequence[str],
        references: Sequence[str],
        batch: Mapping[str, Sequence[object]],
    ) -> dict[str, float]:
        """Compute all numbers of the metric.

        Args:
            name: Name of the metric in recipes, for errors.
            predictions: Generated texts, as for ``compute``.
            references: Texts of the data, as for ``compute``.
            batch: Columns of the rows, as for ``compute``.

        Returns:
            The numbers by name.

        Raises:
            DataError: The function fails, or returns something else than a finite number for each declared name.
        """
        try:
            found = dict(self.compute(predictions, references, batch))
            values = {key: float(value) for key, value in found.items()}
        except DataError:
            raise
        except Exception as error:  # a plugin may fail in any way
            text = str(error).partition("\n")[0]
            raise DataError(f"metric {name!r} fails: {type(error).__name__}: {text}") from error
        if values.keys() != self.figures.keys():
            raise DataError(
                f"metric {name!r} must return values of {', '.join(self.figures)}, got {', '.join(values) or 'none'}"
            )
        for key, value in values.items():
            if not math.isfinite(value):
                raise DataError(f"metric {name!r} must return finite numbers, got {value} for {key}")
        return values

    def measure_each(
        self,
        name: str,
        predictions: Sequence[str],
        references: Sequence[str],
        batch: Mapping[str, Sequence[object]],
    ) -> dict[str, list[float]]:
        """Compute the numbers that are means over texts, for each text separately.

        Args:
            name: Name of the metric in recipes, for errors.
            predictions: Generated texts, as for ``compute``.
            references: Texts of the data, as for ``compute``.
            batch: Columns of the rows, as for ``compute``.

        Returns:
            One value for each text, by the name of the number; empty if no number is a mean.

        Raises:
            DataError: As :meth:`measure`, or a number declared as mean is not the mean over texts.
        """
        means = [key for key, figure in self.figures.items() if figure.is_mean]
        found: dict[str, list[float]] = {key: [] for key in means}
        for place, pair in enumerate(zip(predictions, references, strict=True)) if means else ():
            alone = {column: cells[place : place + 1] for column, cells in batch.items()}
            values = self.measure(name, pair[:1], pair[1:], alone)
            for key in means:
                found[key].append(values[key])
        whole = self.measure(name, predictions, references, batch) if means else {}
        for key in means:
            mean = math.fsum(found[key]) / len(found[key])
            if not math.isclose(mean, whole[key], rel_tol=1e-6, abs_tol=1e-9):
                raise DataError(
                    f"metric {name!r} declares {key} as a mean over texts, but the mean of its values for single "
                    f"texts is {mean:.6g}, and its value for all texts is {whole[key]:.6g}"
                )
        return found

    def require(self, name: str) -> None:
        """Raise DataError if the required module is not installed. ``name`` is the metric's name in recipes."""
        if self.package is not None and find_spec(self.package) is None:
            raise DataError(f"metric {name!r} needs {self.package}: pip install 'sparsebp[generation]'")


def list_text_metrics() -> list[str]:
    """Return the names of all installed metrics of generated texts, sorted."""
    return sorted(set(entry_points(group=GROUP).names))


def find_text_metric_sources(names: Sequence[str]) -> list[str]:
    """Return the packages of the named metrics with their versions, such as ``sparsebp 0.3.0``."""
    entries = entry_points(group=GROUP)
    return [find_source(entry) for name in names for entry in entries.select(name=name)]


def find_text_metric(name: str) -> TextMetric:
    """Return a metric of generated texts by its name.

    Args:
        name: Name of the entry point, as in recipes.

    Returns:
        The metric.

    Raises:
        UsageError: No package offers it, several do, or its entry is broken.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP).select(name=name)}
    if not found:
        names = list_text_metrics()
        raise UsageError(f"unknown metric {name!r}, allowed: {', '.join(names)}{did_you_mean(name, names)}")
    if len(found) > 1:
        raise UsageError(f"metric {name!r} is registered more than once, by {' and '.join(sorted(found))}")
    (entry,) = found.values()
    broken = f"metric {name!r} of {find_source(entry)} is broken"
    try:
        metric = entry.load()
    except Exception as error:  # a plugin may fail in any way
        text = str(error).partition("\n")[0]
        raise UsageError(f"{broken}: {type(error).__name__}: {text}") from None
    if not isinstance(metric, TextMetric):
        raise UsageError(f"{broken}: {entry.value} must be a TextMetric")
    for figure, declared in metric.figures.items():
        if not FIGURE_NAME.fullmatch(figure):
            raise UsageError(f"{broken}: {figure!r} must be lower-case letters, digits and underscores")
        if declared.better not in ("lower", "higher"):
            raise UsageError(f"{broken}: {figure}: better must be lower or higher, got {declared.better!r}")
    if not metric.figures:
        raise UsageError(f"{broken}: the metric must declare at least one number that it returns")
    return metric
