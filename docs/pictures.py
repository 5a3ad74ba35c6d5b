"""Make the pictures of README and docs: the first screen of reports, by chromium. Run it from the repository.

python docs/pictures.py

Needs selenium, chromium and its driver, and the public recordings in the folder that WHATIF_EXTRA_DATA names.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ASSETS = Path(__file__).parent / "assets"
TRACES = Path(__file__).parents[1] / "traces"
PUBLIC = Path(os.environ.get("WHATIF_EXTRA_DATA", "")) / "traces"
# What bounds the step, and its recording.
RECORDINGS = {
    "gpu": TRACES / "predicted" / "resnet50_a100_predicted.json.gz",
    "loader": TRACES / "campaign_cpu" / "gpt2-small--loader_0.trace.json.gz",
    "host": PUBLIC / "hta" / "v100_allreduce_rank1of2.json.gz",
    "ranks": PUBLIC / "param-dlrm-8xv100",
}
# Of a window, CSS pixels; a phone's screen is drawn with two pixels for each.
SCREENS = {"": (1280, 800, 1), "-narrow": (400, 800, 2)}
THEMES = {"": "light", "-dark": "dark"}
COLORS = 128


def main() -> None:
    """Write every picture into the folder of assets."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    # The system's own: without these paths selenium asks a network for others.
    options.binary_location = shutil.which("chromium") or ""
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    with tempfile.TemporaryDirectory() as folder:
        for name, recording in RECORDINGS.items():
            page = Path(folder) / f"{name}.html"
            command = [sys.executable, "-m", "whatif", "report", str(recording), "-o", str(page), "--quiet"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            for screen, size in SCREENS.items():
                for suffix, theme in THEMES.items():
                    picture = ASSETS / f"report-{name}{suffix}{screen}.png"
                    draw(driver, page, picture, size, theme)
                    print(picture.name, picture.stat().st_size // 1000, "kB")
    driver.quit()


def draw(driver: Any, page: Path, picture: Path, size: tuple[int, int, int], theme: str) -> None:
    """Write the first screen of a page as a PNG of few colours."""
    width, height, scale = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(page.as_uri())
    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
