"""What the tests of pages ask a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALLEST_TEXT = """return Math.min(...[...document.querySelectorAll("main p, main td, main li, main dd")]
  .filter(e => e.textContent.trim()).map(e => parseFloat(getComputedStyle(e).fontSize)))"""
SMALLEST_IN_FIGURES = """return Math.min(...[...document.querySelectorAll("main svg text")].map(e =>
  parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getBoundingClientRect().width
  / e.ownerSVGElement.viewBox.baseVal.width))"""
"""As high as letters come out on the screen, in pixels."""
STICKING_OUT = """return [...document.querySelectorAll('main *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
"""What is wider than the screen."""


def sized(browser: Any, width: int, height: int = 800) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shown(browser: Any, page: Path, width: int, height: int = 800) -> None:
    """Open a page on a screen of this size; a narrow one is a phone's."""
    sized(browser, width, height)
    browser.get(page.resolve().as_uri())


def in_colours(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
