from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from skerry.infra.run import code_archive
from skerry.runtime.container import code_archive as runtime_archive
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def archive(*entries: tarfile.TarInfo, body: bytes = b"") -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for entry in entries:
            entry.size = len(body) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(body))
    return gzip.compress(plain.getvalue())


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def unpack(data: bytes, into: Path) -> None:
    code_archive.unpack(data, hashlib.sha256(data).hexdigest(), into)


def test_equal_code_has_equal_bytes(tmp_path: Path) -> None:
    first = make(tmp_path / "1", {"a.py": "1", "sub/b.py": "2"})
    second = make(tmp_path / "2", {"sub/b.py": "2", "a.py": "1"})
    os.utime(second / "a.py", (1, 1))
    (second / "a.py").chmod(0o600)
    assert code_archive.pack(first) == code_archive.pack(second)
    assert code_archive.pack(make(first, {"a.py": "3"})).digest != code_archive.pack(second).digest


def test_unpack_restores_packed_files(tmp_path: Path) -> None:
    code = make(tmp_path / "code", {"train.py": "print()", "sub/run.sh": "#!/bin/sh", "sub/deep/x": ""})
    (code / "sub/run.sh").chmod(0o755)
    packed = code_archive.pack(code)
    code_archive.unpack(packed.data, packed.digest, tmp_path / "out")
    assert code_archive.files_of(tmp_path / "out") == ["sub/deep/x", "sub/run.sh", "train.py"]
    assert (tmp_path / "out/train.py").read_text() == "print()"
    assert os.access(tmp_path / "out/sub/run.sh", os.X_OK)
    assert not os.access(tmp_path / "out/train.py", os.X_OK) or os.geteuid() == 0
    assert (tmp_path / "out/train.py").stat().st_mode & 0o111 == 0


def test_caches_repositories_and_ignored_files_are_not_packed(tmp_path: Path) -> None:
    names = [
        ".git/HEAD",
        "__pycache__/a.pyc",
        "a.pyc",
        ".venv/bin/python",
        ".skerry/x",
        "data/big.bin",
        "notes.txt",
        "keep.py",
    ]
    code = make(tmp_path, dict.fromkeys(names, "x"))
    make(code, {".skerryignore": "# not needed\n*.txt\ndata/\n\n"})
    assert code_archive.files_of(code) == [".skerryignore", "keep.py"]


def test_too_large_code_is_rejected_with_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_BYTES", 1 << 20)
    make(tmp_path, {"small.py": "x", "weights.bin": "x" * (1 << 20)})
    with pytest.raises(
        Invalid, match=r"too much to pack: 2 files, 1\.0 MiB; .*largest: weights\.bin \(1\.0 MiB\), small"
    ):
        code_archive.pack(tmp_path)


def test_links_inside_are_followed_and_links_outside_are_rejected(tmp_path: Path) -> None:
    code = make(tmp_path / "code", {"a.py": "1"})
    (code / "b.py").symlink_to("a.py")
    assert code_archive.files_of(code) == ["a.py", "b.py"]
    (code / "c").symlink_to("/etc/hostname")
    with pytest.raises(Invalid, match="link leaves the code folder: c"):
        code_archive.pack(code)
    (code / "c").unlink()
    (code / "d").symlink_to(".")
    with pytest.raises(Invalid, match="link to a folder: d"):
        code_archive.pack(code)
    (code / "d").unlink()
    os.mkfifo(code / "e")
    with pytest.raises(Invalid, match="not a file: e"):
        code_archive.pack(code)


def test_unreadable_files_are_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = make(tmp_path, {"a.py": "1"})
    (code / "loop").symlink_to("loop")
    with pytest.raises(Invalid, match="broken link: loop"):
        code_archive.files_of(code)
    (code / "loop").unlink()
    (code / ".skerryignore").write_bytes(b"\xff\n")
    with pytest.raises(Invalid, match=r"\.skerryignore is unreadable: .*; write it as UTF-8"):
        code_archive.files_of(code)
    (code / ".skerryignore").unlink()
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != "a.py")
    with pytest.raises(Invalid, match=r"unreadable: a\.py; change its rights"):
        code_archive.files_of(code)


def device(name: str) -> tarfile.TarInfo:
    return link(name, tarfile.CHRTYPE, "")


HOSTILE = {
    "an absolute path": archive(tarfile.TarInfo("/tmp/escaped-by-skerry-test"), body=b"x"),  # noqa: S108  must not be made
    "a path that escapes": archive(tarfile.TarInfo("../evil"), body=b"x"),
    "an absolute link": archive(link("l", tarfile.SYMTYPE, "/etc/passwd")),
    "a link inside": archive(tarfile.TarInfo("a"), link("l", tarfile.SYMTYPE, "a")),
    "a hard link": archive(link("l", tarfile.LNKTYPE, "/etc/passwd")),
    "a device": archive(device("null")),
    "a pipe": archive(link("fifo", tarfile.FIFOTYPE, "")),
    "no tar": gzip.compress(b"not a tar" * 100),
    "no gzip": b"not a gzip",
    "half a gzip": gzip.compress(b"x" * 1000)[:20],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archive_is_rejected_and_writes_no_file(tmp_path: Path, case: str) -> None:
    with pytest.raises(Corrupt, match="packed code"):
        unpack(HOSTILE[case], tmp_path / "in" / "out")
    assert not (tmp_path / "in" / "out").exists()
    assert not (tmp_path / "in" / "evil").exists()
    assert list(tmp_path.rglob("*")) == [] or list((tmp_path / "in").iterdir()) == []


def test_archive_with_too_large_content_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_archive, "MAX_BYTES", 1000)
    monkeypatch.setattr(runtime_archive, "MAX_FILES", 1)
    with pytest.raises(Corrupt, match="is more than"):
        unpack(archive(tarfile.TarInfo("bomb"), body=bytes(1 << 20)), tmp_path / "out")
    monkeypatch.setattr(runtime_archive, "MAX_BYTES", 1 << 20)
    with pytest.raises(Corrupt, match="more than 1 files"):
        unpack(archive(tarfile.TarInfo("a"), tarfile.TarInfo("b")), tmp_path / "out")


def test_archive_with_another_digest_is_rejected(tmp_path: Path) -> None:
    packed = code_archive.pack(make(tmp_path / "code", {"a": "1"}))
    with pytest.raises(Corrupt, match="is damaged"):
        code_archive.unpack(packed.data + b"\0", packed.digest, tmp_path / "out")
