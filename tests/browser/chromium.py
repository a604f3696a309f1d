"""A real Chromium without a window: Debian's packages, driven by selenium."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException as Covered
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

INSTALL = "apt-get install -y --no-install-recommends chromium chromium-driver"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--force-device-scale-factor=1",
)
SECONDS = 60  # the most that a test waits for something that comes within one on an idle machine


class Page:
    """The browser's one tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, scheme: str = "light") -> None:
        """Open an address afresh, in a window of this width and with this colour scheme."""
        self.driver.get("about:blank")
        self.look(width, scheme)
        self.driver.get_log("performance"), self.driver.get_log("browser")  # forget those of another test
        self.driver.get(url)

    def look(self, width: int, scheme: str) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": ""}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, expression: str, *arguments: object) -> object:
        """Return an expression's value; `arguments` are its arguments[0] and so on."""
        return self.driver.execute_script(f"return {expression}", *arguments)

    def wait(self, expression: str, *arguments: object) -> object:
        """Wait until an expression holds, and return its value."""
        wait = WebDriverWait(self.driver, SECONDS, poll_frequency=0.05)
        return wait.until(lambda _: self.js(expression, *arguments), f"never true: {expression} {arguments}")

    def click(self, by: str, value: str) -> None:
        """Click an element once it is there and nothing covers it; look again for one that is replaced meanwhile."""
        again = [NoSuchElementException, StaleElementReferenceException, Covered]
        wait = WebDriverWait(self.driver, SECONDS, 0.05, again)
        wait.until(lambda driver: driver.find_element(by, value).click() is None, f"not there: {value}")

    def press(self, *keys: str) -> None:
        """Send keys to whatever has the focus; `Keys.TAB` and the like."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for since it was opened, those inside itself left out."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if urlsplit(url).scheme not in ("data", "blob", "about")]

    def errors(self) -> list[str]:
        """Return the errors in the browser's console since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def missing() -> str:
    """Return in words what is not installed, and how to install it; empty where all is."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found; {INSTALL}" if absent else ""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Page]:
    """Start a browser that keeps all it writes in a folder, which is its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(SECONDS)
        yield Page(driver)
    finally:
        driver.quit()
