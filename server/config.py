"""The server's settings: one frozen object, parsed once from flags, environment and defaults.

The command line is generated from the fields below: a field's name is its flag and its `JETSPEC_*` variable. Knows
nothing of sockets, models or workers, and imports only the standard library so that `--help` is quick.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field, as `field` does

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args
from urllib.parse import urlsplit

DEMO_MODEL = "demo"
MAX_LOGPROBS = 20
"""What the wire takes (`protocol.fields`), which this module does not import: `--help` must be quick."""
ENVIRONMENT_PREFIX = "JETSPEC_"

CoreChoice = int | Literal["auto", "none"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
MethodChoice = Literal["ar", "dflash", "jetspec", "dspark", "domino", "ssd", "jetspec++"]
QuantizationChoice = Literal["auto", "none", "int8"]
LogLevelChoice = Literal["debug", "info", "warning", "error"]


NUM_DRAFT_TOKENS: dict[MethodChoice, int] = {
    "ar": 4,
    "dflash": 4,
    "jetspec": 4,
    "dspark": 4,
    "domino": 4,
    "ssd": 4,
    "jetspec++": 4,
}
"""Default γ by method. For `ar` it only bounds the rows whose kernels must agree."""


class ConfigError(Exception):
    """A setting that cannot be used; the message names it."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints become `ConfigError`, so that every bad input leaves by the same door."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected a whole number, got {text!r}") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"must be between {minimum} and {maximum}, got {value}")
        return value

    return parse


def _integer_or_auto(minimum: int, maximum: int) -> Callable[[str], int | None]:
    parse_integer = _integer(minimum, maximum)

    def parse(text: str) -> int | None:
        return None if text == "auto" else parse_integer(text)

    return parse


def _number(minimum: float, maximum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {text!r}") from None
        if not minimum <= value <= maximum:  # also refuses NaN, which compares false
            raise ValueError(f"must be between {minimum:g} and {maximum:g}, got {text}")
        return value

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _http_address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected an address like http://host:4318, got {text!r}")
    _ = parts.port  # raises ValueError for one that is none
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError("expected one or more names separated by commas")
    return names


def _items(text: str) -> tuple[str, ...]:
    """A JSON list of strings, as vLLM's flags take it, or items separated by commas."""
    if not text.lstrip().startswith("["):
        return _names(text)
    try:
        items = json.loads(text)
    except ValueError:
        raise ValueError("expected a JSON list of strings, or items separated by commas") from None
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError("expected a JSON list of strings, or items separated by commas")
    return tuple(items)


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be true or false, got {text!r}")


def _core(text: str) -> CoreChoice:
    if text == "auto":
        return "auto"
    return "none" if text == "none" else _integer(0, 4095)(text)


def setting(
    default: Any,
    parse: Callable[[str], Any],
    description: str,
    *,
    is_http: bool = False,
    is_secret: bool = False,
    is_repeatable: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field of `ServeConfig`: its default, how its text is read, and what `--help` says about it.

    `is_http`: only the HTTP server uses it. A repeatable one is a tuple, whose flag takes several values and may come
    several times. Secrets are left out of the settings' own text.
    """
    metadata = {
        "parse": parse,
        "description": description,
        "is_http": is_http,
        "is_repeatable": is_repeatable,
        "aliases": aliases,
    }
    return field(default=default, metadata=metadata, repr=not is_secret)


def http_setting(default: Any, parse: Callable[[str], Any], description: str, **options: Any) -> Any:
    """A setting that only the HTTP server uses."""
    return setting(default, parse, description, is_http=True, **options)


@dataclass(frozen=True)
class ServeConfig:
    """Everything the server is told at start; `None` means "not given", and `auto` for the plan numbers."""

    model: str = setting(DEMO_MODEL, _text, "folder or hub id of the target model")
    served_model_name: tuple[str, ...] | None = http_setting(
        None, _names, "name or names clients may ask for", is_repeatable=True
    )
    revision: str | None = setting(None, _text, "hub revision of the target model")
    host: str = http_setting("127.0.0.1", _text, "address to listen on")
    port: int = http_setting(8000, _integer(0, 65535), "port to listen on (0: any free one)")
    dtype: DtypeChoice = setting("auto", _one_of(*get_args(DtypeChoice)), "number format of the target")
    max_model_len: int | None = setting(None, _integer(2), "longest sequence, prompt and answer together")
    max_num_seqs: int = setting(4, _integer(1, 256), "sequences decoded at the same time")
    max_num_queued_reqs: int = http_setting(256, _integer(0), "requests that may wait before new ones get a 429")
    draft_model: str | None = setting(None, _text, "folder of the draft model", aliases=("--speculative-model",))
    adapter: str | None = setting(None, _text, "file or folder of the adapter")
    calibration: str | None = setting(None, _text, "JSON file of the score calibration")
    draft_quantization: QuantizationChoice = setting(
        "auto", _one_of(*get_args(QuantizationChoice)), "weights of the drafting networks: int8 where the CPU has VNNI"
    )
    method: MethodChoice = setting("jetspec++", _one_of(*get_args(MethodChoice)), "decoding method")
    num_speculative_tokens: int = setting(
        NUM_DRAFT_TOKENS["jetspec++"], _integer(1, 63), "draft tokens in a block; the default depends on the method"
    )
    cache_size: int | None = setting(None, _integer_or_auto(1, 256), "outcomes drafted ahead per round, or auto")
    passes: int | None = setting(None, _integer_or_auto(0, 16), "refinement passes, or auto")
    refreshes: int | None = setting(None, _integer_or_auto(0, 16), "context refreshes, or auto")
    cache_threshold: float | None = setting(None, _number(0.0, 1.0), "smallest outcome score that is drafted")
    fallback_timeout: float = setting(0.5, _number(0.001, 60.0), "seconds the verifier waits for a drafted block")
    prefill_chunk: int = setting(64, _integer(1, 8192), "prompt tokens processed between two rounds")
    verify_device: str = setting("cpu", _text, "device of the verifier")
    draft_device: str = setting("cpu", _text, "device of the drafter")
    verify_core: CoreChoice = setting("auto", _core, "CPU core of the verifier: a number, auto or none")
    draft_core: CoreChoice = setting("auto", _core, "CPU core of the drafter: a number, auto or none")
    verify_threads: int = setting(1, _integer(1, 256), "CPU threads of the verifier; more than one are not pinned")
    seed: int | None = setting(None, _integer(0, 2**63 - 1), "makes the seeds of unseeded requests repeatable")
    strict_params: bool = http_setting(False, _switch, "answer 400 to unknown request fields instead of a warning")
    max_body_bytes: int = http_setting(4 * 1024 * 1024, _integer(1024, 2**31 - 1), "largest request body")
    max_num_prompts: int = http_setting(128, _integer(1), "prompts in one request")
    max_n: int = http_setting(16, _integer(1), "largest n and best_of")
    max_num_choices: int = http_setting(256, _integer(1), "prompts times n (or best_of) in one request")
    max_total_prompt_tokens: int = http_setting(
        2**18, _integer(1), "prompt tokens in one request, all prompts together"
    )
    max_total_new_tokens: int = http_setting(2**20, _integer(1), "max_tokens of all choices of one request together")
    max_logprobs: int = http_setting(
        20, _integer(0, MAX_LOGPROBS), "largest logprobs, top_logprobs and prompt_logprobs"
    )
    h11_max_incomplete_event_size: int = http_setting(
        65536, _integer(1024), "largest request line and headers, in bytes"
    )
    h11_max_header_count: int = http_setting(128, _integer(1), "most headers of a request")
    timeout_keep_alive: int = http_setting(5, _integer(1, 3600), "seconds an idle connection stays open")
    request_read_timeout: float = http_setting(60.0, _number(0.1, 3600.0), "seconds a client may take to send a body")
    api_key: tuple[str, ...] = http_setting(
        (), _names, "key that clients must send as a bearer token", is_secret=True, is_repeatable=True
    )
    api_key_file: str | None = http_setting(None, _text, "file with such keys, one a line")
    metrics_require_auth: bool = http_setting(False, _switch, "/metrics needs a key, too")
    allowed_origins: tuple[str, ...] = http_setting(
        (), _items, "origins of web pages that may call (CORS); default: none"
    )
    allowed_methods: tuple[str, ...] = http_setting(("*",), _items, "methods such pages may use")
    allowed_headers: tuple[str, ...] = http_setting(("*",), _items, "headers such pages may send")
    allow_credentials: bool = http_setting(False, _switch, "such pages may send cookies")
    ssl_keyfile: str | None = http_setting(None, _text, "private key of the TLS certificate")
    ssl_certfile: str | None = http_setting(None, _text, "TLS certificate; with it the server speaks HTTPS only")
    ssl_ca_certs: str | None = http_setting(None, _text, "certificates that client certificates are checked against")
    ssl_cert_reqs: int = http_setting(0, _integer(0, 2), "client certificates: 0 not asked for, 1 optional, 2 required")
    enable_request_id_headers: bool = http_setting(True, _switch, "answer with the X-Request-Id of the request, or one")
    disable_fastapi_docs: bool = http_setting(False, _switch, "no /docs and no /openapi.json")
    disable_page: bool = http_setting(False, _switch, "no chat page at /")
    vllm_metrics: bool = http_setting(False, _switch, "show the metrics under vLLM's names, too")
    otlp_traces_endpoint: str | None = http_setting(
        None, _http_address, "OpenTelemetry collector that gets a span per request, over HTTP (needs the extra otel)"
    )
    shutdown_timeout: float = http_setting(30.0, _number(0.0, 3600.0), "seconds running requests get after SIGTERM")
    startup_timeout: float = setting(900.0, _number(1.0, 86400.0), "seconds the workers may take to load")
    watchdog_timeout: float = setting(30.0, _number(0.1, 3600.0), "seconds without progress before a worker is stuck")
    trace_dir: str | None = setting(None, _text, "folder for a trace of every round (Chrome trace events)")
    log_level: LogLevelChoice = setting(
        "info", _one_of(*get_args(LogLevelChoice)), "how much is logged", aliases=("--uvicorn-log-level",)
    )

    def __post_init__(self) -> None:
        both_pinned = isinstance(self.verify_core, int) and isinstance(self.draft_core, int)
        if self.method == "ar" and self.draft_model is not None:
            raise ConfigError("--draft-model: the method ar uses no draft model")
        for name in ("adapter", "calibration"):
            if self.method != "jetspec++" and getattr(self, name) is not None:
                raise ConfigError(f"{flag_of(name)}: only the method jetspec++ uses it, not {self.method}")
        if both_pinned and self.verify_core == self.draft_core:
            raise ConfigError("--draft-core: must differ from --verify-core")
        if isinstance(self.verify_core, int) and self.verify_threads > 1:
            raise ConfigError("--verify-core: several --verify-threads do not fit on one core; choose none")
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs) and self.ssl_certfile is None:
            raise ConfigError("--ssl-certfile: is needed for TLS")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("--ssl-ca-certs: is needed to check client certificates")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allowed-origins: must name the origins when credentials are allowed")


def flag_of(name: str) -> str:
    """The command line flag of a field."""
    return "--" + name.replace("_", "-")


def http_flags() -> list[str]:
    """Names of the settings that only the HTTP server uses."""
    return [item.name for item in fields(ServeConfig) if item.metadata["is_http"]]


def add_flags(parser: argparse.ArgumentParser, exclude: Sequence[str] = ()) -> None:
    """Add one flag per field of `ServeConfig` except the excluded ones. Values stay text until `from_arguments`."""
    for item in fields(ServeConfig):
        if item.name in exclude:
            continue
        names = [flag_of(item.name), *item.metadata["aliases"]]
        description = item.metadata["description"]
        if item.default not in (None, ()) and not isinstance(item.default, bool):
            shown = ",".join(item.default) if isinstance(item.default, tuple) else item.default
            description += f" (default: {shown})"
        if item.default is True:
            description += " (default: true)"
        if item.metadata["parse"] is _switch:
            parser.add_argument(*names, dest=item.name, nargs="?", const="true", metavar="BOOL", help=description)
        elif item.metadata["is_repeatable"]:
            parser.add_argument(
                *names, dest=item.name, nargs="+", action="extend", metavar="VALUE", help=f"{description}; repeatable"
            )
        else:
            parser.add_argument(*names, dest=item.name, metavar="VALUE", help=description)


def from_arguments(arguments: Mapping[str, object], environment: Mapping[str, str], **overrides: Any) -> ServeConfig:
    """Build the configuration: overrides, else flags, else `JETSPEC_*` variables, else defaults."""
    values: dict[str, Any] = {}
    for item in fields(ServeConfig):
        given = arguments.get(item.name)
        source = flag_of(item.name)
        if item.name in overrides:
            values[item.name] = overrides[item.name]
            continue
        if given is None:
            source = ENVIRONMENT_PREFIX + item.name.upper()
            given = environment.get(source)
        if given is None:
            continue
        parse = item.metadata["parse"]
        try:
            if isinstance(given, list):
                values[item.name] = tuple(value for text in given for value in parse(str(text)))
            else:
                values[item.name] = parse(str(given))
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
    if "method" in values:
        values.setdefault("num_speculative_tokens", NUM_DRAFT_TOKENS[values["method"]])
    return ServeConfig(**values)


@dataclass(frozen=True)
class PinnedCores:
    """The CPU cores of the two workers; None leaves a worker to the operating system."""

    verify: int | None
    draft: int | None


def choose_cores(config: ServeConfig, allowed: Sequence[int] | None = None) -> PinnedCores:
    """Default: the first and the second core this process may use, when there are two and the device is the CPU.

    A verifier with several threads is left to the operating system; the drafter then gets the core after so many.
    """
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    for name, choice in (("verify_core", config.verify_core), ("draft_core", config.draft_core)):
        if isinstance(choice, int) and choice not in cores:
            raise ConfigError(f"{flag_of(name)}: core {choice} is not one of those this process may use: {cores}")
    free = [core for core in cores if core not in (config.verify_core, config.draft_core)]

    def resolve(choice: CoreChoice, device: str) -> int | None:
        if isinstance(choice, int):
            return choice
        return free.pop(0) if choice == "auto" and device == "cpu" and len(cores) >= 2 and free else None

    if config.verify_threads > 1:
        free = free[config.verify_threads :]
        return PinnedCores(verify=None, draft=resolve(config.draft_core, config.draft_device))
    verify = resolve(config.verify_core, config.verify_device)
    return PinnedCores(verify=verify, draft=resolve(config.draft_core, config.draft_device))
