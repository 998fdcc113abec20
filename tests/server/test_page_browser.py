"""The page in headless Chromium, over a server with fake workers. Needs Debian's chromium-driver and the extra
`browser`; skipped without them. JETSPEC_PAGE_URL and JETSPEC_SCREENSHOT take the README's picture of a real server."""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.server_process import LIMIT_S, ProcessFactory

DRIVER = shutil.which("chromedriver")
selenium = pytest.importorskip("selenium", reason="needs the extra 'browser'")
if DRIVER is None:
    pytest.skip("needs chromedriver", allow_module_level=True)

from selenium import webdriver  # noqa: E402 - only once it is known to be there
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

MARKUP = "<b>bold</b> <img src=x onerror=document.title='broken'> &amp; "


class Page:
    """What a user of the page sees and does."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.browser.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        """Text as it stands in the document, white space included."""
        return str(self.one(selector).get_property("textContent"))

    def wait_for(self, what: Callable[[], object]) -> None:
        WebDriverWait(self.browser, LIMIT_S, 0.05).until(lambda _: what())

    def open(self, url: str) -> None:
        self.browser.get(url)

    def connected(self, name: str) -> None:
        self.wait_for(lambda: self.text("#model") == name)

    def ask(self, text: str) -> None:
        """With the keyboard alone: the field has the focus."""
        self.browser.switch_to.active_element.send_keys(text, Keys.ENTER)

    def answered(self) -> None:
        self.wait_for(lambda: self.one("#stop").get_property("disabled"))

    def set_value(self, selector: str, value: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(value)

    @property
    def complaints(self) -> list[str]:
        """What the browser itself found wrong: scripts that failed, rules that were broken."""
        return [entry["message"] for entry in self.browser.get_log("browser") if "status of" not in entry["message"]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1000,900",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
async def page(browser: Any) -> AsyncIterator[Page]:
    browser.get_log("browser")
    page = Page(browser)
    yield page
    assert page.complaints == []
    browser.get("about:blank")


async def test_an_answer_is_streamed_and_tinted(page: Page, start: ProcessFactory) -> None:
    async with start(FAKE_TEXT=MARKUP) as server:
        await server.wait_until_ready()
        page.open(f"http://127.0.0.1:{server.port}/")
        page.connected("tiny")
        page.set_value("#max-tokens", "60")
        page.one("#prompt").click()
        page.ask("Tell me")
        page.answered()
        assert page.text("article.user") == "Tell me"
        assert page.text("article.assistant") == (MARKUP * 2)[:60] + " [cut at max tokens]"
        assert page.all("article b, article img") == [] and page.browser.title == "JetSpec++"
        blocks = [block.get_attribute("class") for block in page.all("article .block")]
        assert blocks[:2] == ["block prefill", "block first"]
        assert {"block hit", "block miss"} & set(blocks)
        hit = page.all("article .block.hit, article .block.miss")[0]
        assert [token.get_attribute("class") for token in hit.find_elements("css selector", "span")] == [
            "draft"
        ] * 3 + ["bonus"]
        assert "3 of 8 drafts accepted" in hit.get_attribute("title")
        assert page.text("#tau") == "4.00"
        assert page.text("#verify") == "6.0 ms"
        assert page.text("#hit-rate").endswith(" %")
        assert float(page.text("#speed")) > 0
        verifier, drafter = (page.all(f"#strip rect[y='{y}']") for y in (4, 25))
        assert len(verifier) > 5 and len(drafter) > 5
        assert page.browser.switch_to.active_element.get_attribute("id") == "prompt"
        page.one("#speculative").click()
        page.one("#prompt").click()
        page.ask("And now?")
        page.wait_for(lambda: len(page.all("article.assistant")) == 2)
        page.answered()
        assert (page.text("#tau"), page.text("#hit-rate")) == ("1.00", "–")
        page.one("#clear").click()
        assert page.all("article") == [] and page.text("#tau") == "–"


async def test_an_answer_can_be_stopped(page: Page, start: ProcessFactory) -> None:
    async with start(FAKE_ROUND_S="0.05") as server:
        await server.wait_until_ready()
        page.open(f"http://127.0.0.1:{server.port}/")
        page.connected("tiny")
        page.ask("Tell me")
        page.wait_for(lambda: len(page.all("article .block")) > 3)
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.answered()
        assert page.text("article.assistant").endswith(" [stopped]")
        await server.wait_for_metric("jetspec_client_disconnects_total 1.0")


async def test_a_missing_key_is_asked_for(page: Page, start: ProcessFactory) -> None:
    async with start("--api-key", "alpha") as server:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.wait_for(lambda: page.one("#key-form").is_displayed())
        assert page.text("#notice").startswith("This server needs an API key.")
        page.ask("wrong")
        page.wait_for(lambda: page.text("#notice") == "This key is not known to the server.")
        page.set_value("#key", "alpha")
        page.ask("")
        page.connected("tiny")
        assert not page.one("#key-form").is_displayed() and not page.one("#notice").is_displayed()
        page.one("#prompt").click()
        page.ask("Tell me")
        page.wait_for(lambda: page.all("article .block"))
        page.answered()


async def test_it_waits_for_a_model_that_loads(page: Page, start: ProcessFactory) -> None:
    async with start(FAKE_LOAD_S="2") as server:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.wait_for(lambda: "The model is loading." in page.text("#notice"))
        page.connected("tiny")
        assert not page.one("#notice").is_displayed()


async def test_a_full_queue_and_a_second_try(page: Page, start: ProcessFactory) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "0")
    async with start(*flags, FAKE_ROUND_S="0.05") as server:
        await server.wait_until_ready()
        page.open(f"http://127.0.0.1:{server.port}/")
        page.connected("tiny")
        page.set_value("#max-tokens", "4")
        page.one("#prompt").click()
        async with server.stream(max_tokens=400) as response:
            await anext(response.aiter_lines())
            page.ask("Tell me")
            page.wait_for(lambda: page.text("#notice").startswith("The server is busy: its queue is full."))
        assert page.all("article.assistant") == []
        await server.wait_for_metric("jetspec_client_disconnects_total 1.0")
        page.one("#retry").click()
        page.wait_for(lambda: page.all("article.assistant .block"))
        page.answered()
        assert page.text("article.assistant").startswith("abcd")
        assert not page.one("#retry").is_displayed()


async def test_a_failure_in_mid_stream_keeps_what_came(page: Page, start: ProcessFactory) -> None:
    async with start(FAKE_DIE_AFTER="5", FAKE_ROUND_S="0.05") as server:
        await server.wait_until_ready()
        page.open(f"http://127.0.0.1:{server.port}/")
        page.connected("tiny")
        page.ask("Tell me")
        page.wait_for(lambda: page.text("#notice").startswith("The server gave up: "))
        assert page.text("article.assistant").startswith("abcd")
        assert page.one("#retry").is_displayed()


async def test_colours_follow_the_system(page: Page, start: ProcessFactory) -> None:
    async with start() as server:
        page.open(f"http://127.0.0.1:{server.port}/")
        colours = []
        for scheme in ("dark", "light"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            colours.append([page.one("body").value_of_css_property(name) for name in ("color", "background-color")])
        assert colours[0] != colours[1]


@pytest.mark.skipif("JETSPEC_PAGE_URL" not in os.environ, reason="no JETSPEC_PAGE_URL")
async def test_a_real_server(page: Page) -> None:
    page.open(os.environ["JETSPEC_PAGE_URL"])
    page.wait_for(lambda: page.text("#model") not in ("connecting", "not connected"))
    page.set_value("#max-tokens", "160")
    page.one("#prompt").click()
    page.ask("Why is the sky blue? Answer in a few sentences.")
    page.wait_for(lambda: page.all("article.assistant .block.hit"))
    page.answered()
    assert float(page.text("#tau")) > 1
    if "JETSPEC_SCREENSHOT" in os.environ:
        assert page.browser.save_screenshot(str(Path(os.environ["JETSPEC_SCREENSHOT"]).resolve()))
