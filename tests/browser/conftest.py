"""A real browser: Debian's chromium, driven by selenium with the system's own driver. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--disable-default-apps", "--disable-extensions",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A driver of a browser with an empty profile; skipped where there is none, unless nothing may be skipped."""
    webdriver = need("selenium.webdriver")
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "needs chromium and its driver: apt-get install chromium chromium-driver"
        if os.environ.get("WHATIF_STRICT") == "1":
            pytest.fail(f"{missing}; WHATIF_STRICT=1 allows no skip")
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1280,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=need("selenium.webdriver.chrome.service").Service(driver))
    found.set_page_load_timeout(120)
    found.set_script_timeout(120)
    yield found
    found.quit()


@pytest.fixture
def opened(browser: Any) -> Any:
    """A function that opens a page from disk and waits until its timeline is drawn."""

    def open_page(path: Path) -> Any:
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(path.as_uri())
        ready = "return document.getElementById('timeline-canvas').dataset.ready === 'yes'"
        wait = need("selenium.webdriver.support.ui").WebDriverWait
        wait(browser, 60, poll_frequency=0.05).until(lambda driver: driver.execute_script(ready))
        return browser

    return open_page
