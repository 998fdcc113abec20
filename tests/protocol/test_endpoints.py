"""Endpoints: only this user, or the holder of a key, can reach them."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from protocol.channel import ZmqChannel, new_curve_keys
from protocol.endpoints import CurveKeys, check_endpoint, ipc_endpoint, runtime_directory
from protocol.errors import EndpointUnavailable, InsecureEndpoint, InsecureKeyFile
from protocol.messages import PEER_MESSAGES

RUN_ID = "a" * 32


@pytest.fixture
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="jetspec-test-", dir="/tmp") as name:
        yield Path(name)


def test_the_runtime_directory_is_private_whatever_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        made = runtime_directory(directory)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert made.parent == directory
    assert made != runtime_directory(directory)
    check_endpoint(ipc_endpoint(made, "peer"), curve=None)


def test_the_runtime_directory_lies_in_the_users_own_if_that_is_private(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    assert runtime_directory().parent == directory
    directory.chmod(0o755)
    made = runtime_directory()
    assert made.parent != directory
    made.rmdir()


def test_a_runtime_directory_that_cannot_be_made_is_reported(directory: Path) -> None:
    with pytest.raises(EndpointUnavailable):
        runtime_directory(directory / "missing")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_directory_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(InsecureEndpoint, match=f"{mode:04o}"):
        ZmqChannel.bind(f"ipc://{directory}/peer", RUN_ID, PEER_MESSAGES)
    assert not (directory / "peer").exists()


def test_a_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(InsecureEndpoint, match="another user"):
        ipc_endpoint(directory, "peer")


def test_a_link_to_a_private_directory_is_refused(directory: Path) -> None:
    (directory / "real").mkdir(mode=0o700)
    (directory / "link").symlink_to(directory / "real")
    ipc_endpoint(directory / "real", "peer")
    with pytest.raises(InsecureEndpoint, match="not a directory"):
        ipc_endpoint(directory / "link", "peer")


@pytest.mark.parametrize("endpoint", ["ipc://@abstract", "ipc://*", "ipc://peer", "ipc:///nowhere-at-all/peer"])
def test_sockets_outside_a_private_directory_are_refused(endpoint: str) -> None:
    with pytest.raises(InsecureEndpoint):
        check_endpoint(endpoint, curve=None)


@pytest.mark.parametrize("endpoint", ["inproc://peer", "udp://127.0.0.1:1", "peer", ""])
def test_other_transports_are_refused(endpoint: str) -> None:
    with pytest.raises(EndpointUnavailable):
        check_endpoint(endpoint, curve=None)


def test_a_socket_path_too_long_for_the_system_is_refused(directory: Path) -> None:
    with pytest.raises(EndpointUnavailable, match="107"):
        ipc_endpoint(directory, "x" * 107)


def test_tcp_is_refused_without_keys() -> None:
    for make in (ZmqChannel.bind, ZmqChannel.connect):
        with pytest.raises(InsecureEndpoint, match="CURVE"):
            make("tcp://127.0.0.1:5555", RUN_ID, PEER_MESSAGES)
    check_endpoint("tcp://127.0.0.1:5555", new_curve_keys()[0])


def test_keys_are_kept_in_a_private_file(directory: Path) -> None:
    keys, _ = new_curve_keys()
    path = directory / "keys.json"
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert CurveKeys.load(path) == keys
    with pytest.raises(FileExistsError):
        keys.save(path)
    path.chmod(0o640)
    with pytest.raises(InsecureKeyFile, match="0600"):
        CurveKeys.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"public_key": "x", "secret_key": "y", "peer_public_key": "z"}'])
def test_a_file_without_keys_is_refused(directory: Path, content: str) -> None:
    path = directory / "keys.json"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(InsecureKeyFile):
        CurveKeys.load(path)
    with pytest.raises(InsecureKeyFile):
        CurveKeys.load(directory / "missing")


def test_secret_keys_are_not_printed() -> None:
    keys, _ = new_curve_keys()
    assert keys.secret_key not in repr(keys)
    assert keys.public_key in repr(keys)
