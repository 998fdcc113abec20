"""Real clients against a real server: `make test-clients`. Nothing here leaves this machine."""

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.servers import Server, demo_server

# Set before any client is imported. No proxy listens at the address, so that a client that calls home gets nowhere.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "DO_NOT_TRACK": "1",
    "SCHEMATHESIS_REPORT": "false",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "OPENAI_API_KEY": "EMPTY",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ.update(OFFLINE | {name.lower(): value for name, value in OFFLINE.items() if name.endswith("_PROXY")})

CLIENTS = {
    "test_curl": "curl",
    "test_openai": "openai",
    "test_langchain": "langchain-openai",
    "test_litellm": "litellm",
    "test_llm": "llm",
    "test_lm_eval": "lm-eval",
    "test_schemathesis": "schemathesis",
    "test_locust": "locust",
    "test_vllm_bench": "vllm bench serve (what it sends and reads)",
}


class LinePerClient:
    """Collects outcomes, and prints a line for each client at the end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: as what its call was, or as what kept it from being called."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(Path(report.location[0]).stem, Counter())[report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The lines."""
        terminalreporter.section("clients")
        for module, client in CLIENTS.items():
            if module in self.outcomes:
                outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes[module].items()))
                terminalreporter.write_line(f"{client} {version(client)}: {outcomes}".replace(" :", ":"))


def version(client: str) -> str:
    """The installed version of a client from PyPI; empty for the others."""
    try:
        return importlib.metadata.version(client)
    except importlib.metadata.PackageNotFoundError:
        return ""


def pytest_configure(config: pytest.Config) -> None:
    """Adds the lines."""
    config.pluginmanager.register(LinePerClient())


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo target with its drafter, started once."""
    with demo_server() as running:
        yield running
