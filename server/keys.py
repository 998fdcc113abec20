"""Who may use the server: API keys, read once at start and kept as digests.

Knows how a key is sent and compared, not what it opens.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.config import ConfigError, ServeConfig

BEARER = "bearer "


class ApiKeys:
    """A set of keys. Compared as digests and all of them, so that the time taken says nothing about any key."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def are_required(self) -> bool:
        """Whether there is any key; without one the server is open."""
        return bool(self._digests)

    def admit(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether `Authorization: Bearer KEY` or `X-Api-Key: KEY` among the raw headers holds one of the keys."""
        offered = [key for name, value in headers if (key := _offered_key(name, value)) is not None]
        return sum(self._holds(key) for key in offered) > 0  # `any` would stop at the first

    def _holds(self, key: bytes) -> bool:
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def load_keys(config: ServeConfig) -> ApiKeys:
    """The keys of `--api-key` and of `--api-key-file` (one a line); raises `ConfigError` for a file without any."""
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _read_keys(Path(config.api_key_file).expanduser())
    return ApiKeys(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys


def _offered_key(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value.strip()
    if name == b"authorization" and value[: len(BEARER)].lower() == BEARER.encode():
        return value[len(BEARER) :].strip()
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
