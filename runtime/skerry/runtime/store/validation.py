"""What every engine refuses before it does any I/O: keys that could escape, spans that run backwards. Does no I/O."""

from __future__ import annotations

import re

from skerry.runtime.errors import Invalid
from skerry.runtime.store.interface import Span

# No empty, `.` or `..` part: a key can neither escape a folder nor be spelled in two ways.
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._-]+"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*(?:[A-Za-z0-9._-]+)?")


def check_key(key: str) -> str:
    """The key itself. Raises Invalid unless it is `/`-separated names of [A-Za-z0-9._-], none of them `.` or `..`."""
    if not is_key(key):
        raise Invalid(f"not a key: {key!r}; use names of letters, digits, '.', '_' and '-' separated by single '/'")
    return key


def is_key(text: str) -> bool:
    """Whether `check_key` would accept it."""
    return _KEY.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """The prefix itself. Raises Invalid unless some key could start with it; the empty one starts all."""
    if _PREFIX.fullmatch(prefix) is None:
        raise Invalid(f"no key can start with {prefix!r}")
    return prefix


def check_span(span: Span | None) -> Span | None:
    """The span itself. Raises Invalid unless 0 <= start <= stop."""
    if span is not None and not 0 <= span.start <= span.stop:
        raise Invalid(f"not a span: {span.start} to {span.stop}; 0 <= start <= stop")
    return span


def clip(span: Span | None, size: int) -> Span:
    """The part of `span` that an object of `size` bytes has; the whole object without a span."""
    if span is None:
        return Span(0, size)
    start = min(span.start, size)
    return Span(start, max(start, min(span.stop, size)))


def room(into: memoryview | None, size_bytes: int) -> memoryview:
    """The first `size_bytes` of `into`, or of a new buffer. Raises Invalid if `into` is too small or read-only."""
    if into is None:
        return memoryview(bytearray(size_bytes))
    if into.readonly or into.nbytes < size_bytes:
        kind = "read-only" if into.readonly else f"{into.nbytes} bytes"
        raise Invalid(f"cannot read {size_bytes} bytes into this buffer: it is {kind}")
    return into[:size_bytes]


def land(body: memoryview, into: memoryview | None) -> memoryview:
    """`body` itself, or a view of `into` with the same bytes."""
    if into is None:
        return body
    view = room(into, body.nbytes)
    view[:] = body
    return view
