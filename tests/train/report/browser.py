"""Starts a headless Chromium, driven by selenium."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

#: Without a network, and without anything that a browser does in the background.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=127.0.0.1:9",
)


class Browser:
    """A browser window of any size, with one page."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver

    def open(self, page: Path, *, width: int = 1400, height: int = 1000, dark: bool = False):
        """Open a page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page, and return its result."""
        return self.driver.execute_script(script, *arguments)

    def messages(self) -> list[str]:
        """Return the errors and warnings that the page has logged since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skip the test if it is not installed (`make setup-browser`)."""
    program = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs Chromium and chromedriver: make setup-browser")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = Service(driver, log_output=os.devnull)
        window = webdriver.Chrome(options=options, service=service)
        try:
            yield Browser(window)
        finally:
            window.quit()
