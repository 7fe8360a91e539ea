from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skerry.infra.run import code_archive
from skerry.runtime.container import code_archive as runtime_archive
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable

BASE64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def files_of(folder: Path) -> list[str]:
    return list(code_archive.select(folder).files)


def git(folder: Path, *command: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, *names: str) -> Path:
    git(folder, "init")
    git(folder, "add", *names)
    git(folder, "commit", "-m", "all")
    return folder


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
    assert files_of(tmp_path / "out") == ["sub/deep/x", "sub/run.sh", "train.py"]
    assert (tmp_path / "out/train.py").read_text() == "print()"
    assert os.access(tmp_path / "out/sub/run.sh", os.X_OK)
    assert not os.access(tmp_path / "out/train.py", os.X_OK) or os.geteuid() == 0
    assert (tmp_path / "out/train.py").stat().st_mode & 0o111 == 0


def test_caches_repositories_and_ignored_files_are_not_packed(tmp_path: Path) -> None:
    always = [".hg/x", ".pytest_cache/.gitignore", "__pycache__/a.pyc", "a.pyc", ".venv/bin/python", ".skerry/x"]
    code = make(tmp_path, dict.fromkeys([*always, "data/big.bin", "notes.txt", "keep.py"], "x"))
    make(code, {".skerryignore": "# not needed\n*.txt\ndata/\n\n"})
    assert files_of(code) == [".skerryignore", "keep.py"]


def test_only_files_that_git_tracks_are_packed_with_their_present_content(tmp_path: Path) -> None:
    code = make(tmp_path / "code", dict.fromkeys(["a.py", "deleted.py", "new.py", "weights.ckpt", "sub/b.py"], "old"))
    make(code, {".gitignore": "*.ckpt\n"})
    git(tmp_path, "init")
    git(tmp_path, "add", "code/a.py", "code/deleted.py", "code/sub", "code/.gitignore")
    make(code, {"a.py": "new"})
    (code / "deleted.py").unlink()
    packed = code_archive.pack(code)
    assert packed.files == {".gitignore": 7, "a.py": 3, "sub/b.py": 3}
    assert packed.untracked == ["new.py"]


def test_gitignore_is_honoured_without_a_repository(tmp_path: Path) -> None:
    make(tmp_path, dict.fromkeys(["a.py", "big.ckpt", "kept.ckpt", "sub/out/log", "sub/b.py"], "x"))
    make(tmp_path, {".gitignore": "*.ckpt\n!kept.ckpt\n", "sub/.gitignore": "/out/\n"})
    assert files_of(tmp_path) == [".gitignore", "a.py", "kept.ckpt", "sub/.gitignore", "sub/b.py"]


def test_gitignore_without_git_is_an_error_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(make(tmp_path / "no programs", {})))
    code = make(tmp_path / "code", {"a.py": "x", ".pytest_cache/.gitignore": "*"})
    assert files_of(code) == ["a.py"]
    make(code, {"sub/.gitignore": "*.ckpt", "sub/b.py": "x"})
    with pytest.raises(Invalid, match=r"code/sub/\.gitignore: git is not installed; install git, or remove it"):
        code_archive.select(code)


def test_gitignore_outside_of_a_repository_applies_to_pack(tmp_path: Path) -> None:
    packed = code_archive.pack(make(tmp_path, {".gitignore": "*.log\n", "a.py": "x", "a.log": "x"}))
    assert (list(packed.files), packed.note) == ([".gitignore", "a.py"], None)


def test_relative_folder_is_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "code", {".gitignore": "*.log\n", "a.py": "x", "a.log": "x"})
    monkeypatch.chdir(tmp_path)
    assert files_of(Path("code")) == [".gitignore", "a.py"]


def test_nothing_is_packed_if_git_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = make(tmp_path / "code", {"a.py": "x", "secret.txt": "x"})
    make(tmp_path, {".gitignore": "secret.txt\n"})
    commit(tmp_path, "code/a.py")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(make(tmp_path / "no programs", {})))
        with pytest.raises(Invalid, match=r"/\.git: git is not installed"):
            code_archive.pack(code)
    (tmp_path / ".git" / "index").write_bytes(b"junk" * 100)
    with pytest.raises(Invalid, match=r"/\.git: git reports: .*index file corrupt; repair it"):
        code_archive.pack(code)
    make(tmp_path / "other", {"a.py": "x", ".git": "junk"})
    with pytest.raises(Invalid, match=r"other/\.git: git reports: fatal: invalid gitfile"):
        code_archive.pack(tmp_path / "other")


def test_nested_repository_goes_with_the_files_that_it_tracks(tmp_path: Path) -> None:
    for place in ("plain/dep", "outer/dep", "outer/ignored", "outer/linked"):
        commit(make(tmp_path / place, {"d.py": "x", ".gitignore": "*.log\n", "a.log": "x"}), "d.py", ".gitignore")
        make(tmp_path / place, {"new.py": "x"})
    plain = make(tmp_path / "plain", {"train.py": "x"})
    selected = code_archive.select(plain)
    assert (list(selected.files), selected.untracked) == (["dep/.gitignore", "dep/d.py", "train.py"], ["dep/new.py"])
    outer = make(tmp_path / "outer", {"train.py": "x", ".gitignore": "ignored/\n"})
    commit(outer, "train.py", "linked")
    selected = code_archive.select(outer)
    assert list(selected.files) == ["dep/.gitignore", "dep/d.py", "linked/.gitignore", "linked/d.py", "train.py"]
    assert selected.untracked == [".gitignore", "dep/new.py", "linked/new.py"]


def test_submodule_without_its_files_is_refused_unless_ignored(tmp_path: Path) -> None:
    commit(make(tmp_path / "dep", {"d.py": "x"}), "d.py")
    commit(make(tmp_path, {"train.py": "x"}), "train.py", "dep")
    shutil.rmtree(tmp_path / "dep")
    with pytest.raises(Invalid, match=r"submodule without its files: dep/; run `git submodule update --init`"):
        code_archive.pack(tmp_path)
    make(tmp_path, {".skerryignore": "dep/\n"})
    assert files_of(tmp_path) == ["train.py"]


def test_link_that_git_ignores_is_not_refused(tmp_path: Path) -> None:
    make(tmp_path, {"a.py": "x", ".gitignore": "data\n"})
    (tmp_path / "data").symlink_to("/")
    assert files_of(tmp_path) == [".gitignore", "a.py"]


def test_empty_code_is_refused_with_the_next_step(tmp_path: Path) -> None:
    git(make(tmp_path, {"a.py": "x"}), "init")
    with pytest.raises(
        Invalid, match=r"no files to pack in .*: git tracks none of its files \(a\.py\); `git add` them"
    ):
        code_archive.pack(tmp_path)
    with pytest.raises(Invalid, match=r"no files to pack in .*: write the code"):
        code_archive.pack(make(tmp_path / "new", {"x.pyc": ""}))


def test_later_line_takes_back_what_an_earlier_one_left_out(tmp_path: Path) -> None:
    make(tmp_path, {"a.py": "x", "a.txt": "x", "keep.txt": "x", ".skerryignore": "*.txt\n!keep.txt\n"})
    assert files_of(tmp_path) == [".skerryignore", "a.py", "keep.txt"]


def test_store_is_taken_unless_git_or_a_rule_ignores_it(tmp_path: Path) -> None:
    assert code_archive.takes(tmp_path, tmp_path / "store/x")
    make(tmp_path, {".gitignore": "store/\n", "a.py": "x"})
    assert not code_archive.takes(tmp_path, tmp_path / "store/x")
    git(tmp_path, "init")
    assert not code_archive.takes(tmp_path, tmp_path / "store/x")
    assert code_archive.takes(tmp_path, tmp_path / "other/x")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=1"),
        ("conf/.env.prod", "A=1"),
        (".ssh/known_hosts", "x"),
        ("keys/id_rsa", "x"),
        (".aws/credentials", "x"),
        ("infra/main.tfstate", "{}"),
        ("infra/main.tfstate.backup", "{}"),
        ("server.pem", f"-----BEGIN RSA PRIVATE KEY-----\n{BASE64}"),
        ("encrypted.pem", f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{BASE64}"),
        ("account.json", f'{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{BASE64}'),
    ],
)
def test_file_that_looks_like_a_secret_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    make(tmp_path, {"a.py": "1", ".env.example": "A=", "ca.pem": "-----BEGIN CERTIFICATE-----"})
    assert files_of(tmp_path) == [".env.example", "a.py", "ca.pem"]
    make(tmp_path, {name: text})
    with pytest.raises(Invalid, match=f"looks like a secret: {re.escape(name)}; .*list it in .skerryignore"):
        code_archive.pack(tmp_path)
    make(tmp_path, {".skerryignore": name})
    assert name not in code_archive.pack(tmp_path).files
    make(tmp_path, {".skerryignore": f"!{name}"})
    assert name in code_archive.pack(tmp_path).files


def test_text_about_private_keys_is_no_secret(tmp_path: Path) -> None:
    text = 'KEY = b"PRIVATE KEY-----"\nFIRST = "-----BEGIN PRIVATE KEY-----"\nraise ValueError("no key")\n'
    assert files_of(make(tmp_path, {"check.py": text})) == ["check.py"]


def test_too_large_code_is_rejected_with_its_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_archive, "MAX_BYTES", 1 << 20)
    make(tmp_path, {"small.py": "x", "weights.bin": "x" * (1 << 20)})
    with pytest.raises(
        Invalid, match=r"too much to pack: 2 files, 1\.0 MiB; .*largest: weights\.bin \(1\.0 MiB\), small"
    ):
        code_archive.pack(tmp_path)


def add_binary_ignore_file(code: Path) -> None:
    (code / ".skerryignore").write_bytes(b"\xff\n")


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (lambda code: (code / "c").symlink_to("/etc/hostname"), "link leaves the code folder: c"),
        (lambda code: (code / "c").symlink_to("."), "link to a folder: c"),
        (lambda code: (code / "c").symlink_to("c"), "broken link: c"),
        (lambda code: os.mkfifo(code / "c"), "not a file: c"),
        (add_binary_ignore_file, r"\.skerryignore is unreadable: .*; write it as UTF-8"),
    ],
)
def test_links_out_and_unreadable_files_are_rejected(tmp_path: Path, add: Callable[[Path], None], error: str) -> None:
    code = make(tmp_path, {"a.py": "1"})
    (code / "b.py").symlink_to("a.py")
    assert files_of(code) == ["a.py", "b.py"]
    add(code)
    with pytest.raises(Invalid, match=error):
        code_archive.pack(code)


def test_file_without_read_rights_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != "a.py")
    with pytest.raises(Invalid, match=r"unreadable: a\.py; change its rights"):
        code_archive.select(make(tmp_path, {"a.py": "1"}))


# More hostile archives, and the digest, are in tests/runtime/container/test_run.py.


def archive(*entries: tarfile.TarInfo, kind: bytes = tarfile.REGTYPE) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for entry in entries:
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    return gzip.compress(plain.getvalue())


@pytest.mark.parametrize(
    "data",
    [
        archive(tarfile.TarInfo("x"), kind=tarfile.LNKTYPE),
        archive(tarfile.TarInfo("x"), kind=tarfile.CHRTYPE),
        archive(tarfile.TarInfo("x"), kind=tarfile.FIFOTYPE),
        archive(tarfile.TarInfo("a"), tarfile.TarInfo("b")),
        gzip.compress(b"not a tar" * 100),
        gzip.compress(b"x" * 1000)[:20],
    ],
    ids=["hard link", "device", "pipe", "too many files", "no tar", "half a gzip"],
)
def test_hostile_archive_is_rejected_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(runtime_archive, "MAX_FILES", 1)
    with pytest.raises(Corrupt, match="packed code"):
        code_archive.unpack(data, hashlib.sha256(data).hexdigest(), tmp_path / "in" / "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]
