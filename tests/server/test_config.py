"""Flags, environment and defaults; errors that name the setting; the workers' file."""

import argparse
import json

import pytest
from pydantic import ValidationError

from protocol.worker_config import WorkerConfig
from server.config import ArgumentParser, ConfigError, ServeConfig, add_flags, choose_cores, from_arguments


def parse(*arguments: str, environment: dict[str, str] | None = None) -> ServeConfig:
    parser = ArgumentParser()
    add_flags(parser)
    return from_arguments(vars(parser.parse_args(arguments)), environment or {})


def test_defaults() -> None:
    config = parse()
    assert config == ServeConfig()
    assert (config.model, config.port, config.max_num_seqs, config.num_speculative_tokens) == ("demo", 8000, 4, 4)
    assert config.cache_size is config.passes is config.refreshes is None


def test_flag_before_environment_before_default() -> None:
    environment = {"JETSPEC_PORT": "9000", "JETSPEC_MAX_NUM_SEQS": "7", "JETSPEC_STRICT_PARAMS": "1"}
    config = parse("--port", "9001", environment=environment)
    assert (config.port, config.max_num_seqs, config.strict_params) == (9001, 7, True)


def test_values_are_read() -> None:
    config = parse(
        *("--served-model-name", "a, b", "--cache-size", "4", "--passes", "auto", "--refreshes", "0"),
        *("--strict-params", "--seed", "5", "--verify-core", "none", "--cache-threshold", "0.1"),
    )
    assert config.served_model_name == ("a", "b")
    assert (config.cache_size, config.passes, config.refreshes) == (4, None, 0)
    assert (config.strict_params, config.seed, config.verify_core, config.cache_threshold) == (True, 5, "none", 0.1)
    assert parse("--strict-params", "false").strict_params is False


def test_lists_and_aliases() -> None:
    config = parse(
        *("--served-model-name", "a", "b", "--served-model-name", "c", "--api-key", "one", "--api-key", "two,three"),
        *("--allowed-origins", '["https://a.example", "https://b.example"]', "--uvicorn-log-level", "error"),
        environment={"JETSPEC_ALLOWED_METHODS": "GET,POST"},
    )
    assert config.served_model_name == ("a", "b", "c")
    assert config.api_key == ("one", "two", "three")
    assert config.allowed_origins == ("https://a.example", "https://b.example")
    assert (config.allowed_methods, config.log_level) == (("GET", "POST"), "error")
    assert "three" not in repr(config)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--allowed-origins", "[1]"], "--allowed-origins"),
        (["--allowed-origins", "[oops"], "--allowed-origins"),
        (["--allowed-origins", "*", "--allow-credentials"], "--allowed-origins"),
        (["--ssl-keyfile", "x"], "--ssl-certfile"),
        (["--ssl-certfile", "x", "--ssl-cert-reqs", "2"], "--ssl-ca-certs"),
        (["--api-key", ""], "--api-key"),
        (["--max-n", "0"], "--max-n"),
        (["--port", "x"], "--port"),
        (["--port", "70000"], "--port"),
        (["--dtype", "int8"], "--dtype"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--cache-size", "many"], "--cache-size"),
        (["--cache-threshold", "nan"], "--cache-threshold"),
        (["--method", "magic"], "--method"),
        (["--served-model-name", "a,,b"], "--served-model-name"),
        (["--model", ""], "--model"),
        (["--verify-core", "1", "--draft-core", "1"], "--draft-core"),
        (["--verify-core", "1", "--verify-threads", "2"], "--verify-core"),
        (["--method", "ar", "--draft-model", "x"], "--draft-model"),
        (["--nonsense", "1"], "--nonsense"),
    ],
)
def test_errors_name_the_flag(arguments: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse(*arguments)


def test_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match="JETSPEC_PORT"):
        parse(environment={"JETSPEC_PORT": "x"})


def test_cores() -> None:
    assert choose_cores(ServeConfig(), [3, 5, 7]) == cores(3, 5)
    assert choose_cores(ServeConfig(), [3]) == cores(None, None)
    assert choose_cores(ServeConfig(verify_device="cuda:0"), [0, 1]) == cores(None, 0)
    assert choose_cores(ServeConfig(draft_core=0), [0, 1]) == cores(1, 0)
    assert choose_cores(ServeConfig(verify_core="none", draft_core="none"), [0, 1]) == cores(None, None)
    assert choose_cores(ServeConfig(verify_threads=2), [3, 5, 7]) == cores(None, 7)
    assert choose_cores(ServeConfig(verify_threads=2), [3, 5]) == cores(None, None)
    with pytest.raises(ConfigError, match="--verify-core"):
        choose_cores(ServeConfig(verify_core=9), [0, 1])


def cores(verify: int | None, draft: int | None) -> object:
    from server.config import PinnedCores

    return PinnedCores(verify, draft)


def test_excluded_flags_are_not_offered() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, exclude=["port"])
    assert "--port" not in parser.format_help()
    assert "--model" in parser.format_help()


WORKER = {
    "run_id": "a" * 32,
    "model_path": "/m",
    "frontend_endpoint": "ipc:///f",
    "control_endpoint": "ipc:///c",
    "peer_endpoint": "ipc:///p",
    "parent_pid": 1,
}


def test_worker_config_survives_its_file() -> None:
    config = WorkerConfig.from_json(json.dumps({**WORKER, "cache_size": 4, "dtype": "float16"}))
    assert WorkerConfig.from_json(config.to_json()) == config
    assert config.fallback_timeout_s == 0.5


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int8"), ("max_num_seqs", 0), ("run_id", "x"), ("wibble", 1), ("cache_size", "4")]
)
def test_worker_config_refuses(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        WorkerConfig.from_json(json.dumps({**WORKER, field: value}))
