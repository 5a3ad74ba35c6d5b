"""Make the pictures of README and docs: the first screen of three reports, by chromium. Run it from the repository."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
TRACES = Path(__file__).parents[1] / "traces"
# The picture, its recording, the width and height of its window, and whether it is dark.
PICTURES = [
    ("report-gpu", "predicted/resnet50_a100_predicted", 1280, 800, False),
    ("report-gpu-dark", "predicted/resnet50_a100_predicted", 1280, 800, True),
    ("report-gpu-narrow", "predicted/resnet50_a100_predicted", 500, 900, False),
    ("report-loader", "resnet18_cifar_cpu_loader0", 1280, 800, False),
]


def main() -> None:
    """Write every picture into the folder of assets."""
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, trace, width, height, dark in PICTURES:
            page = Path(folder) / f"{Path(trace).name}.html"
            if not page.exists():
                command = [sys.executable, "-m", "whatif", "report", str(TRACES / f"{trace}.json.gz"), "-o", str(page)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            shown = page.with_suffix(".dark.html") if dark else page
            if dark:
                shown.write_text(page.read_text().replace('<html lang="en">', '<html lang="en" data-theme="dark">', 1))
            picture = ASSETS / f"{name}.png"
            flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            size = f"--window-size={width},{height}"
            subprocess.run(
                ["chromium", *flags, size, f"--screenshot={picture}", shown.as_uri()], check=True, capture_output=True
            )
            print(picture.name, picture.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
