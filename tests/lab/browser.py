"""A real Chromium for the tests of pages: found on the machine, never downloaded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "ANON_BROWSER_REQUIRED"
"""Set to 1 where a missing browser is a failure and not a reason to skip."""


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A running browser, or the reason why the test is skipped."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _give_up("playwright is not installed: pip install playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _give_up(f"no browser found: none of {', '.join(NAMES)} is on PATH")
    with sync_playwright() as playwright:
        # Root, as in most containers, may not use Chromium's sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


def until(page: "Page", condition: str) -> None:
    """Wait for it. Playwright's own wait evaluates text inside the page, which the page forbids."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never came true: {condition}")


def _give_up(reason: str) -> NoReturn:
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED} is 1, but {reason}")
    pytest.skip(reason)
