"""One Chromium for each test process.

Where there is none these tests are skipped; with CHROMIUM=required, which `.ci/run` says, they fail.
"""

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import chromium
import pytest


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    if absent := chromium.missing():
        (pytest.fail if os.environ.get("CHROMIUM") == "required" else pytest.skip)(absent)
    with chromium.started(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: chromium.Page) -> Iterator[chromium.Page]:
    """The browser, whose page must have asked for nothing but this machine when a test ends."""
    yield browser
    asked = map(urlsplit, browser.requests())
    away = [url.geturl() for url in asked if url.scheme != "file" and url.hostname != "127.0.0.1"]
    assert not away, "a request left the machine"
    browser.driver.get("about:blank")
