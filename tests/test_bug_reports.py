"""docs/bug-reports.md names tests that exist, for every report."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_REPORTS = 34


def rows() -> dict[str, list[str]]:
    """The tests that each report names."""
    found = {}
    for line in (ROOT / "docs/bug-reports.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| (S\d\d) \|", line):
            found[match[1]] = re.findall(r"`(tests/[\w/]+\.py::\w+)`", line)
    return found


def functions(file: Path) -> set[str]:
    """Names of a test file's functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_report_names_tests_that_exist() -> None:
    reports = rows()
    assert list(reports) == [f"S{number:02}" for number in range(1, NUM_REPORTS + 1)]
    for report, tests in reports.items():
        assert tests, report
        for test in tests:
            file, _, name = test.partition("::")
            assert name in functions(ROOT / file), (report, test)
