"""The picture of the report in chromium, as PNG.

`make screenshots`. It shows the study in `docs/results`, from its report, so that the picture is made again without
training anything. The report is in the history: first `git checkout a6c6be72 -- docs/results/quickstart.html`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPORT = HERE / "results" / "quickstart.html"
WIDTH, HEIGHT = 1280, 1200  # pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"]


def main() -> None:
    """Write the report's first screen as a PNG."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit("screenshots need chromium")
    target = HERE / "picture" / f"report-{WIDTH}.png"
    size = (f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={target}", "--blink-settings=preferredColorScheme=1")
    subprocess.run([browser, *FLAGS, *size, REPORT.resolve().as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
