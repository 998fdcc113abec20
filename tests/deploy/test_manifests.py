"""The deployment files against the server they start: flags, probes, ports, volumes and metrics must exist."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.app import create_app
from server.cli import build_parser
from server.config import ServeConfig, from_arguments
from server.metrics import Metrics
from server.state import ServerState

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def manifest(name: str) -> dict[str, Any]:
    return documents(KUBERNETES / name)[0]


def server_container() -> dict[str, Any]:
    container: dict[str, Any] = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    return container


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def commands() -> Iterator[list[str]]:
    yield server_container()["args"]
    for service in compose()["services"].values():
        if str(service["image"]).startswith("jetspecpp"):
            yield service["command"]


@pytest.mark.parametrize("command", list(commands()), ids=str)
def test_every_flag_in_a_manifest_is_one_of_the_server(command: list[str]) -> None:
    parsed = build_parser().parse_args([argument.replace("$(MODEL)", "demo") for argument in command])
    assert isinstance(from_arguments(vars(parsed), {}), ServeConfig)


def test_environment_variables_in_compose_are_settings() -> None:
    names = {f"JETSPEC_{name.upper()}" for name in ServeConfig.__dataclass_fields__}
    for service in compose()["services"].values():
        given = {name for name in service.get("environment", {}) if name.startswith("JETSPEC_")}
        assert given <= names


def test_kustomization_lists_every_manifest() -> None:
    listed = set(manifest("kustomization.yaml")["resources"])
    assert listed == {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}


def test_probes_ask_for_paths_the_server_has() -> None:
    paths = create_app(ServerState(ServeConfig(), Metrics(4))).openapi()["paths"]
    container = server_container()
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    probes += [endpoint["path"] for endpoint in manifest("servicemonitor.yaml")["spec"]["endpoints"]]
    assert set(probes) <= set(paths)


def test_ports_lead_from_the_service_to_the_container() -> None:
    port = server_container()["ports"][0]
    assert f"--port={port['containerPort']}" in server_container()["args"]
    assert manifest("service.yaml")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert manifest("networkpolicy.yaml")["spec"]["ingress"][0]["ports"][0]["port"] == port["containerPort"]


def test_selectors_match_the_pods() -> None:
    labels = manifest("deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert manifest("service.yaml")["spec"]["selector"].items() <= labels.items()
    for name, key in (("networkpolicy.yaml", "podSelector"), ("disruption.yaml", "selector")):
        assert manifest(name)["spec"][key]["matchLabels"].items() <= labels.items()


def test_a_pod_has_time_to_drain() -> None:
    container = server_container()
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    flag = next(argument for argument in container["args"] if argument.startswith("--shutdown-timeout="))
    shutdown_s = float(flag.partition("=")[2])
    assert (
        sleep_s + shutdown_s < manifest("deployment.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )


def test_the_file_system_is_read_only_but_for_mounted_folders() -> None:
    container = server_container()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/cache", "/tmp"}
    assert "XDG_CACHE_HOME=/cache" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_scaling_asks_for_a_metric_the_server_has() -> None:
    query = manifest("scaledobject.yaml")["spec"]["triggers"][0]["metadata"]["query"]
    name = query.partition("(")[2].partition("{")[0]
    assert f"\n{name} ".encode() in Metrics(4).render()


def test_compose_mounts_files_that_exist() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = str(volume).partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / "deploy" / source).exists(), source
            else:
                assert source in compose()["volumes"]
