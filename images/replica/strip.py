"""Removes debug symbol tables from shared libraries during a build, because the base has no `strip`.

All that the dynamic linker, a compiler's linker and unwinders read (.dynsym, .eh_frame, all other sections and the
section table) stays unchanged. Files with another layout are skipped. Argument: a folder.
Source: https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html, 64-bit little-endian.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOLS, STRINGS, NOTHING, NO_BITS = 2, 3, 0, 8
IN_MEMORY = 2
ALIGNMENT = 8


def main() -> int:
    """Strip every library below the folder, and print the bytes saved."""
    saved = sum(
        cut(path) for path in sorted(Path(sys.argv[1]).rglob("*.so*")) if path.is_file() and not path.is_symlink()
    )
    sys.stderr.write(f"removed {saved / 1e6:.0f} MB of debug symbols\n")
    return 0


def cut(path: Path) -> int:
    """Strip one file and return the bytes saved. Only a table at the end of the file is removed."""
    with path.open("r+b") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or header[:6] != b"\x7fELF\x02\x01":
            return 0
        fields = list(HEADER.unpack(header))
        table_at, entry_size, count, names_index = fields[6], fields[11], fields[12], fields[13]
        if entry_size != SECTION.size or not 0 < names_index < count:
            return 0
        file.seek(table_at)
        sections = [list(SECTION.unpack(file.read(SECTION.size))) for _ in range(count)]
        symbols = [n for n, section in enumerate(sections) if section[1] == SYMBOLS]
        unread = {n for at in symbols for n in (at, sections[at][6])} - {names_index}
        if not symbols or any(sections[n][2] & IN_MEMORY for n in unread):
            return 0
        kept = [n for n, section in enumerate(sections) if n not in unread and section[1] not in {NOTHING, NO_BITS}]
        end = max((sections[n][4] + sections[n][5] for n in kept if n != names_index), default=0)
        if end > min(sections[n][4] for n in unread):
            return 0
        size = os.fstat(file.fileno()).st_size
        file.seek(sections[names_index][4])
        names = file.read(sections[names_index][5])
        for n in unread:
            # The entry stays, so that the numbers of other entries do not change.
            sections[n] = [0] * 10
        sections[names_index][4] = end
        fields[6] = -(-(end + len(names)) // ALIGNMENT) * ALIGNMENT
        file.seek(end)
        file.write(names.ljust(fields[6] - end, b"\0"))
        file.write(b"".join(SECTION.pack(*section) for section in sections))
        file.truncate()
        file.seek(0)
        file.write(HEADER.pack(*fields))
        return size - os.fstat(file.fileno()).st_size


if __name__ == "__main__":
    sys.exit(main())
