"""The documentation as a site, opened from the disk in a real Chromium."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site of the files that git knows, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("docs")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        target = folder / "outputs" / "docs" / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    subprocess.run(build, cwd=folder, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder / "outputs" / "docs" / "site"


@pytest.mark.parametrize("name", ["index.html", "docs/api/losses.html"])
def test_from_the_disk_the_search_finds_a_page_and_nothing_else_is_asked_for(page, site, name):
    page.open((site / name).as_uri())
    page.click(By.CSS_SELECTOR, ".md-search__input")
    page.press("phantom clipping")
    page.wait("document.querySelector('a.md-search-result__link') !== null")
    found = page.js("[...document.querySelectorAll('a.md-search-result__link')].map((link) => link.href)")
    assert any("phantom_clipping" in link for link in found) and page.errors() == []
    page.driver.get(found[0])
    page.wait("document.querySelector('article h1') !== null")
    assert all(url.startswith(site.as_uri()) for url in page.requests())
