"""What tests in several files need: a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from rowprop import page

QUIET = ("--disable-quic", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium or Chrome, without a window, driven by selenium; its log is kept."""
    webdriver, driver = pytest.importorskip("selenium.webdriver"), shutil.which("chromedriver")
    binary = next(filter(None, map(shutil.which, page.BROWSERS)), None)
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*page.FLAGS, *QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()
