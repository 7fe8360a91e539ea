"""Removes debug symbol tables from shared libraries during a build, because the base has no `strip`.

All that the dynamic linker, a compiler's linker and unwinders read (.dynsym, .eh_frame, all other sections and the
section table) stays unchanged. Files with another layout are skipped. Argument: a folder.
Source: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html, 64-bit little-endian.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOLS, NO_BITS, IN_MEMORY, ALIGNMENT = 2, 8, 2, 8


def cut(path: Path) -> int:
    """Strip one file and return the bytes saved. Only a table at the end of the file is removed."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[:6] != b"\x7fELF\x02\x01":
            return 0
        fields = list(HEADER.unpack(header))
        entry_size, count, names_index = fields[11:14]
        if entry_size != SECTION.size or not 0 < names_index < count:
            return 0
        file.seek(fields[6])
        sections = [list(SECTION.unpack(file.read(SECTION.size))) for _ in range(count)]
        unread = {n for at, section in enumerate(sections) if section[1] == SYMBOLS for n in (at, section[6])}
        unread -= {names_index}
        if not unread or any(sections[n][2] & IN_MEMORY for n in unread):
            return 0
        kept = [s for n, s in enumerate(sections) if n not in {*unread, names_index} and s[1] not in {0, NO_BITS}]
        end = max((section[4] + section[5] for section in kept), default=0)
        if end > min(sections[n][4] for n in unread):
            return 0
        file.seek(sections[names_index][4])
        names = file.read(sections[names_index][5])
        for n in unread:
            # The entry stays, so that the numbers of other entries do not change.
            sections[n] = [0] * 10
        sections[names_index][4] = end
        fields[6] = -(-(end + len(names)) // ALIGNMENT) * ALIGNMENT
        file.seek(end)
        file.write(names.ljust(fields[6] - end, b"\0") + b"".join(SECTION.pack(*section) for section in sections))
        file.truncate()
        file.seek(0)
        file.write(HEADER.pack(*fields))
    return size - path.stat().st_size


if __name__ == "__main__":
    for library in (path for path in Path(sys.argv[1]).rglob("*.so*") if path.is_file() and not path.is_symlink()):
        cut(library)
