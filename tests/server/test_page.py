"""The page at `/`: how it is served, and what must not be in it. What it does is in test_page_browser.py."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from server.page import MEDIA_TYPES
from tests.server.conftest import Stack, StackFactory

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "server" / "static"
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
NODE = shutil.which("node")


class Links(HTMLParser):
    """What a page loads, and whether anything in it needs a laxer policy than its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.faults: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value and tag != "a"]
        self.faults += [name for name in values if name == "style" or name.startswith("on")]
        self.faults += [tag] if tag == "style" or (tag == "script" and "src" not in values) else []
        if values.get("id"):
            self.ids.add(str(values["id"]))


async def test_page_and_its_files_are_served(stack: Stack) -> None:
    for path, kind in {"/": "text/html", **{f"/static/{name}": kind for name, kind in MEDIA_TYPES.items()}}.items():
        response = await stack.client.get(path)
        assert response.status_code == 200, path
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert (await stack.client.head(path)).headers["content-length"] == str(len(response.content))
    assert (await stack.client.get("/")).content == (FOLDER / "index.html").read_bytes()
    for path in ("/static/nothing", "/static/../page.py", "/static/"):
        assert (await stack.client.get(path)).status_code == 404


async def test_page_is_open_where_the_api_needs_a_key(make_stack: StackFactory) -> None:
    async with make_stack(api_key=("alpha",)) as stack:
        for path in ("/", "/static/page.mjs", "/static/page.css"):
            assert (await stack.client.get(path)).status_code == 200
        for path in ("/static/nothing", "/v1/models"):
            assert (await stack.client.get(path)).status_code == 401


@pytest.mark.parametrize("api_key", [(), ("alpha",)])
async def test_page_can_be_switched_off(make_stack: StackFactory, api_key: tuple[str, ...]) -> None:
    async with make_stack(disable_page=True, api_key=api_key) as stack:
        for path in ("/", "/static/page.mjs"):
            assert (await stack.client.get(path)).status_code == (401 if api_key else 404)


async def test_page_is_there_while_the_model_loads(stack: Stack) -> None:
    stack.state.is_ready = False
    assert (await stack.client.get("/v1/models")).status_code == 503
    assert (await stack.client.get("/")).status_code == 200


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(MEDIA_TYPES)
    page = Links((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert page.loaded == ["data:,", "static/page.css", "static/page.mjs"]
    assert page.faults == []
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
        assert not re.search(r"https?:|//[\w-]+\.\w|@import|url\(", text), path.name


def test_text_reaches_the_page_as_text_only() -> None:
    for name in ("page.mjs", "rounds.mjs"):
        script = (FOLDER / name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc", script)


def test_every_element_the_script_asks_for_exists() -> None:
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', (FOLDER / "page.mjs").read_text(encoding="utf-8")))
    assert asked
    assert asked <= Links((FOLDER / "index.html").read_text(encoding="utf-8")).ids


def test_every_outcome_has_its_colours() -> None:
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for outcome in ("prefill", "first", "hit", "late_hit", "miss", "autoregressive"):
        assert f"--{outcome}:" in light and f"--{outcome}:" in dark and f".{outcome} {{" in dark


@pytest.mark.skipif(NODE is None, reason="no node")
@pytest.mark.parametrize("name", ["page.mjs", "rounds.mjs"])
def test_scripts_parse(name: str) -> None:
    subprocess.run([str(NODE), "--check", str(FOLDER / name)], check=True, stdin=subprocess.DEVNULL, timeout=60)


@pytest.mark.skipif(NODE is None, reason="no node")
def test_what_the_page_computes() -> None:
    command = [str(NODE), "--test", str(ROOT / "tests" / "server" / "rounds_test.mjs")]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert run.returncode == 0, run.stdout
    found = re.search(r"^# pass (\d+)$", run.stdout, re.MULTILINE)
    assert found is not None and int(found[1]) >= 8
