"""Dashboard, rules and alerts against the metrics that the server really shows."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import Metrics

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "jetspecpp.json"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here (Debian: package prometheus)")

NAME = re.compile(r"\b(?:jetspec[_:]|process_|vllm:)[a-z0-9_:]+")
LABELS = {"job", "instance", "le"}
"""Labels that Prometheus adds, or that every histogram has."""


def exposition() -> str:
    """What `/metrics` shows once the model is loaded."""
    metrics = Metrics(8)
    names = "version git_sha target_model target_revision draft_model draft_revision dtype method block_size"
    metrics.set_build_info(dict.fromkeys(names.split(), "x"))
    metrics.add_vllm_names("demo")
    return metrics.render().decode()


def shown() -> dict[str, set[str]]:
    """Labels by sample name."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def rules(name: str) -> list[dict[str, Any]]:
    loaded = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return loaded


def dashboard_expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", []):
            yield target["expr"]


def expressions() -> list[str]:
    """Every query of the dashboard, of the rules and of the alerts."""
    ruled = [rule["expr"] for name in ("rules.yml", "alerts.yml") for rule in rules(name)]
    return [*ruled, *dashboard_expressions()]


def test_every_metric_that_is_asked_for_exists() -> None:
    known = set(shown()) | {rule["record"] for rule in rules("rules.yml")}
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(asked) > 30
    assert asked <= known, asked - known


def test_every_label_that_is_asked_for_exists() -> None:
    labels = shown()
    num_checked = 0
    for expression in expressions():
        for name, selectors in re.findall(r"\b((?:jetspec_|process_)[a-z0-9_]+)\{([^}]*)\}", expression):
            asked = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", selectors))
            assert asked <= labels[name] | LABELS, (name, asked - labels[name])
            num_checked += 1
    assert num_checked > 50


def test_label_values_that_are_asked_for_exist() -> None:
    values: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    for expression in expressions():
        for label, pattern in re.findall(r"(outcome|finished_reason|reason|worker)\s*=~?\s*\"([^\"]*)\"", expression):
            assert set(pattern.split("|")) <= values[label], expression


def test_every_native_metric_has_a_place_on_the_dashboard_or_in_an_alert() -> None:
    families = {
        family.name for family in text_string_to_metric_families(exposition()) if family.name.startswith("jetspec_")
    }
    text = " ".join(expressions())
    unused = {name for name in families if not re.search(rf"\b{name}(_total|_bucket|_sum|_count)?\b", text)}
    assert not unused


def test_dashboard_is_well_formed() -> None:
    loaded = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in loaded["panels"]]
    assert len(ids) == len(set(ids))
    variables = {item["name"] for item in loaded["templating"]["list"]} | {"__rate_interval"}
    places: set[tuple[int, int]] = set()
    for panel in loaded["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
        assert (panel["type"] == "row") != bool(panel.get("targets"))
    assert set(re.findall(r"\$(\w+)", " ".join(dashboard_expressions()))) <= variables


def test_alerts_say_what_to_do_and_rules_follow_the_naming_convention() -> None:
    for rule in rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    for rule in rules("rules.yml"):
        assert re.fullmatch(r"jetspec:[a-z_]+:[a-z0-9_]+", rule["record"])  # level:metric:operations


def test_configuration_names_files_that_exist() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert all((PROMETHEUS / name).is_file() for name in config["rule_files"])
    assert config["scrape_configs"][0]["metrics_path"] == "/metrics"
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/jetspecpp.yaml").read_text(encoding="utf-8"))
    assert provider["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"


def promtool(*arguments: str, text: str | None = None) -> None:
    assert PROMTOOL is not None
    run = subprocess.run([PROMTOOL, *arguments], input=text, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_promtool_accepts_configuration_rules_and_metrics() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("test", "rules", str(PROMETHEUS / "tests.yml"))
    native = "".join(line for line in exposition().splitlines(keepends=True) if "vllm:" not in line)
    promtool("check", "metrics", text=native)


@needs_promtool
def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    plain = [
        re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m")) for expression in dashboard_expressions()
    ]
    group = {"name": "dashboard", "rules": [{"record": f"q{index}", "expr": expr} for index, expr in enumerate(plain)]}
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [group]}), encoding="utf-8")
    promtool("check", "rules", "--lint=none", str(file))
