"""Cutting symbol tables out of a real library: it is smaller, loads, and is cut once."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import pytest

if TYPE_CHECKING:
    from types import ModuleType

PROGRAM = Path(__file__).parents[3] / "images/replica/strip.py"


@pytest.fixture(scope="module")
def strip() -> ModuleType:
    spec = importlib.util.spec_from_file_location("strip", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of a library that was shipped with its symbols."""
    (path,) = Path(obstore.__file__).parent.glob("*.so")
    return Path(shutil.copy(path, tmp_path / path.name))


def sections(strip: ModuleType, path: Path) -> dict[str, bytes]:
    """Returns the content of every named section, but for the names themselves."""
    data = path.read_bytes()
    header = strip.HEADER.unpack_from(data)
    table = [strip.SECTION.unpack_from(data, header[6] + n * strip.SECTION.size) for n in range(header[12])]
    names = data[table[header[13]][4] :]
    contents = {
        names[section[0] : names.index(b"\0", section[0])].decode(): b""
        if section[1] == strip.NO_BITS
        else data[section[4] :][: section[5]]
        for section in table
    }
    return {name: content for name, content in contents.items() if name not in {"", ".shstrtab"}}


def test_strip_removes_debug_symbols_and_the_library_loads(strip: ModuleType, library: Path) -> None:
    size, before = library.stat().st_size, sections(strip, library)
    saved = strip.cut(library)
    after = sections(strip, library)
    assert saved > 500_000
    assert library.stat().st_size == size - saved
    assert before.keys() - after.keys() == {".symtab", ".strtab"}
    assert all(after[name] == before[name] for name in after)
    assert {".dynsym", ".eh_frame", ".text"} <= after.keys()
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).PyInit__obstore"
    subprocess.run([sys.executable, "-c", load, str(library)], check=True)


def test_strip_is_idempotent_and_ignores_other_files(strip: ModuleType, library: Path) -> None:
    strip.cut(library)
    once = library.read_bytes()
    assert strip.cut(library) == 0
    assert library.read_bytes() == once
    for content in (b"", b"INPUT(libtorch.so)", b"\x7fELF\x01\x01" + bytes(200), b"\x7fELF\x02\x01" + bytes(58)):
        library.write_bytes(content)
        assert strip.cut(library) == 0
        assert library.read_bytes() == content
