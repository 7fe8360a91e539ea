"""Checks of keys, prefixes, spans and buffers that every store makes before any I/O. Does no I/O."""

from __future__ import annotations

import re

from skerry.runtime.errors import Invalid
from skerry.runtime.store.interface import Span

# No empty, `.` or `..` part, so that a key cannot leave its folder and has one spelling.
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*(?:[A-Za-z0-9._-]+)?")


def check_key(key: str) -> str:
    """Returns the key. Raises Invalid unless it is `/`-separated names of [A-Za-z0-9._-], none of them `.` or `..`."""
    if not is_key(key):
        raise Invalid(f"not a key: {key!r}; use names of letters, digits, '.', '_' and '-' separated by single '/'")
    return key


def is_key(text: str) -> bool:
    """True if `check_key` accepts the text."""
    return _KEY.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """Returns the prefix. Raises Invalid unless a key could start with it; the empty prefix matches every key."""
    if _PREFIX.fullmatch(prefix) is None:
        raise Invalid(f"not the prefix of a key: {prefix!r}")
    return prefix


def check_span(span: Span | None) -> Span | None:
    """Returns the span. Raises Invalid unless 0 <= start <= stop."""
    if span is not None and not 0 <= span.start <= span.stop:
        raise Invalid(f"not a span: start={span.start} stop={span.stop}; use 0 <= start <= stop")
    return span


def limit_span(span: Span | None, size: int) -> Span:
    """The part of `span` inside an object of `size` bytes; the whole object if `span` is None."""
    if span is None:
        return Span(0, size)
    start = min(span.start, size)
    return Span(start, max(start, min(span.stop, size)))


def reserve(into: memoryview | None, size_bytes: int) -> memoryview:
    """The first `size_bytes` of `into`, or a new buffer. Raises Invalid if `into` is too small or read-only."""
    if into is None:
        return memoryview(bytearray(size_bytes))
    if into.readonly or into.nbytes < size_bytes:
        kind = "read-only" if into.readonly else f"{into.nbytes} bytes"
        raise Invalid(f"cannot read {size_bytes} bytes into this buffer: it is {kind}")
    return into[:size_bytes]


def write_into(into: memoryview | None, body: memoryview) -> memoryview:
    """Copies `body` into `into` and returns that part of it; returns `body` itself if `into` is None."""
    if into is None:
        return body
    view = reserve(into, body.nbytes)
    view[:] = body
    return view
