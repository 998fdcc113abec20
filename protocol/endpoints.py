"""Where a channel may listen: private directories for ipc, CURVE keys for everything that leaves the machine.

Knows nothing of sockets. Raises `InsecureEndpoint` or `InsecureKeyFile` before anything is bound or connected.
"""

import json
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import EndpointUnavailable, InsecureEndpoint, InsecureKeyFile

IPC_SCHEME = "ipc://"
TCP_SCHEME = "tcp://"
MAX_SOCKET_PATH_BYTES = 107
CURVE_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One side's keys, in Z85: its own pair, and the public key of the only peer it talks to."""

    public_key: str
    secret_key: str = field(repr=False)
    peer_public_key: str

    @classmethod
    def load(cls, path: Path) -> "CurveKeys":
        """Keys from a JSON file that only its owner can read; raises `InsecureKeyFile`."""
        try:
            status = path.stat()
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InsecureKeyFile(path, f"cannot be read ({type(error).__name__})") from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InsecureKeyFile(path, "must be owned by this user, with mode 0600")
        expected = {"public_key", "secret_key", "peer_public_key"}
        if not isinstance(fields, dict) or set(fields) != expected:
            raise InsecureKeyFile(path, f"must hold exactly {', '.join(sorted(expected))}")
        if not all(isinstance(key, str) and len(key) == CURVE_KEY_CHARACTERS for key in fields.values()):
            raise InsecureKeyFile(path, f"every key has {CURVE_KEY_CHARACTERS} characters")
        return cls(**fields)

    def save(self, path: Path) -> None:
        """Write the file that `load` reads; it is private from the moment it exists, and never replaces another."""
        fields = {
            "public_key": self.public_key,
            "secret_key": self.secret_key,
            "peer_public_key": self.peer_public_key,
        }
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(fields, file)


def runtime_directory(base: Path | None = None) -> Path:
    """A new directory of mode 0700 for the sockets and configs of one run; the caller removes it at the end.

    It lies in `base`, by default `$XDG_RUNTIME_DIR` if that is private, else the temporary directory.
    """
    if base is None:
        candidate = os.environ.get("XDG_RUNTIME_DIR", "")
        usable = candidate and os.access(candidate, os.W_OK) and _why_not_private(Path(candidate)) is None
        base = Path(candidate) if usable else Path(tempfile.gettempdir())
    try:
        return Path(tempfile.mkdtemp(prefix="jetspec-", dir=base))
    except OSError as error:
        raise EndpointUnavailable(str(base), f"no directory can be made in it ({error.strerror})") from None


def ipc_endpoint(directory: Path, name: str) -> str:
    """Endpoint of the socket `name` in a private directory; raises as `check_endpoint` does."""
    endpoint = f"{IPC_SCHEME}{directory / name}"
    check_endpoint(endpoint, curve=None)
    return endpoint


def check_endpoint(endpoint: str, curve: CurveKeys | None) -> None:
    """Raise unless only this user, or the holder of the right key, can reach `endpoint`."""
    if endpoint.startswith(IPC_SCHEME):
        _check_socket_path(endpoint)
    elif endpoint.startswith(TCP_SCHEME):
        if curve is None:
            raise InsecureEndpoint(endpoint, "tcp needs CURVE keys")
    else:
        raise EndpointUnavailable(endpoint, "neither ipc:// nor tcp://")


def _check_socket_path(endpoint: str) -> None:
    path = Path(endpoint.removeprefix(IPC_SCHEME))
    if not path.is_absolute():
        raise InsecureEndpoint(endpoint, "needs an absolute path; abstract and wildcard sockets are open to every user")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise EndpointUnavailable(endpoint, f"socket paths have at most {MAX_SOCKET_PATH_BYTES} bytes")
    reason = _why_not_private(path.parent)
    if reason is not None:
        raise InsecureEndpoint(endpoint, reason)


def _why_not_private(directory: Path) -> str | None:
    """What is wrong with `directory`, or None. A symbolic link is refused: its owner could point it elsewhere later."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        return f"its directory cannot be used ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "its directory is not a directory"
    if status.st_uid != os.geteuid():
        return "its directory belongs to another user"
    if status.st_mode & 0o077:
        return f"its directory has mode {stat.S_IMODE(status.st_mode):04o} instead of 0700"
    return None
