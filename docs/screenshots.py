"""Pictures of what a person sees: the terminal at three widths as SVG, the report in chromium as PNG.

`make screenshots`. Everything shown is of the study in `docs/results`, read back from its archive and its report, so
that the pictures are made again without training anything. Both are in the history: first
`git checkout a6c6be72 -- docs/results/quickstart.tar.gz docs/results/quickstart.html`.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
PICTURES = HERE / "picture"
STUDY = HERE / "results" / "quickstart"
COLUMNS = (60, 80, 100)
PIXELS = (390, 820, 1280)
HEIGHT = 1200
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]


def draw_terminal(columns: int, words: list[str]) -> None:
    """Run a command as in a terminal of so many columns, and write what it prints as an SVG."""
    with tempfile.TemporaryDirectory() as home:  # no run of this machine is in the picture
        environ = os.environ | {"COLUMNS": str(columns), "FORCE_COLOR": "1", "SPARSEBP_HOME": home}
        done = subprocess.run(
            [Path(sys.executable).with_name("sparsebp"), *words],
            capture_output=True,
            text=True,
            env=environ,
            cwd=HERE.parent,
            check=True,
        )
    page = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    page.print(Text.from_ansi(done.stdout.rstrip()))
    command = " ".join(["sparsebp", *words])
    page.save_svg(str(PICTURES / f"compare-{columns}.svg"), title=command, unique_id=f"compare-{columns}")


def photograph_report(width: int, *, dark: bool) -> None:
    """Write the report's first screen, in a window so many pixels wide, as a PNG."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("screenshots need chromium")
    target = PICTURES / f"report-{width}{'-dark' if dark else ''}.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    page = STUDY.with_suffix(".html").resolve().as_uri()
    command = [browser, *FLAGS, scheme, f"--window-size={width},{HEIGHT}", f"--screenshot={target}", page]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """Make all pictures."""
    archive = STUDY.with_suffix(".tar.gz").relative_to(HERE.parent)
    for columns in COLUMNS:
        draw_terminal(columns, ["compare", "dense", "lossless", "--from", str(archive)])
    for width in PIXELS:
        photograph_report(width, dark=False)
    photograph_report(PIXELS[-1], dark=True)


if __name__ == "__main__":
    main()
