"""Removes from a text what names an account, a project, a person or a machine, and checks that nothing of it is left.

An id becomes a placeholder such as <aws-account-1>, the same one wherever it occurs. Ids are known by their value, or
have a form of their own. Digests of images stay: they say what was run, and name no account.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import re
import socket
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_DIGEST: Final = "sha256:[0-9a-f]{64}"
_PROJECT: Final = "[a-z][a-z0-9-]{4,28}[a-z0-9]"
_BUCKET: Final = r"[a-z0-9][a-z0-9._-]+"
# In order: a form before a wider one. The id is the group of that name.
_FORMS: Final = tuple(
    (kind, re.compile(f"{_DIGEST}|{form}", re.DOTALL))
    for kind, form in (
        ("secret", "(?P<id>-----BEGIN [A-Z ]*KEY-----.*?-----END [A-Z ]*KEY-----)"),
        ("secret", r"(?P<id>\beyJ[\w-]{8,}(?:\.[\w-]+){1,2})"),
        ("secret", r"(?P<id>\bya29\.[\w.-]+|\bhf_[A-Za-z0-9]{16,}|\b[as][ks]-[A-Za-z0-9]{16,}|\bgh[a-z]_\w{20,})"),
        ("secret", r"X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)=(?P<id>[^&\s\"'<>]+)"),
        ("secret", r"(?i:bearer)\s+(?P<id>[\w.~+/=-]{16,})"),
        (
            "secret",
            r"(?<![\w/+=])(?P<id>(?=[\w/+]*[a-z])(?=[\w/+]*[A-Z])(?:(?=[\w/+]*\d)[\w/+]{40}|[\w/+]{64,}))(?![\w/+])",
        ),
        (
            "access-key",
            r"(?<![A-Za-z0-9])(?P<id>(?:A3T[A-Z0-9]|ABIA|ACCA|AGPA|AIDA|AKIA|ANPA|ANVA|APKA|AROA|ASIA)[A-Z0-9]{12,})",
        ),
        ("email", r"(?P<id>[\w.%+-]+(?:@|%40)[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+)"),
        ("run", "(?P<id>(?:skerry-)?skerry-cloud(?:-test)?(?:-[0-9a-f]{2,6})+)"),
        ("principal", r":(?:user|role|assumed-role|federated-user|group)/(?P<id>[\w+=,.@/-]+)"),
        ("bucket", rf"(?:\b(?:s3|gs|az|abfss?)://|:s3:::|storage\.googleapis\.com/|/b/)(?P<id>{_BUCKET})"),
        ("bucket", rf"(?<![\w.-])(?P<id>{_BUCKET})\.(?:s3[.-]|storage\.googleapis\.com|blob\.core\.windows\.net)"),
        ("bucket", rf"//s3[\w.-]*\.amazonaws\.com(?:\.cn)?/(?P<id>{_BUCKET})"),
        ("google-number", r"\bprojects/(?P<id>\d+)"),
        ("google-number", r"\bservice-(?P<id>\d+)"),
        ("google-project", rf"(?:\bprojects/|\bproject=|\bgcr\.io/|-docker\.pkg\.dev/)(?P<id>{_PROJECT})(?![\w-])"),
        ("google-project", rf"\"project(?:_?id)?\"\s*:\s*\"(?P<id>{_PROJECT})\""),
        ("google-project", rf"(?<![\w.-])(?P<id>{_PROJECT})\.(?:appspot\.com|svc\.id\.goog|iam\.gserviceaccount\.com)"),
        (
            "aws-id",
            r"(?<![\w-])(?P<id>(?:acl|ami|eipalloc|eni|i|igw|lt|nat|pl|r|rtb|sg|snap|subnet|vol|vpc)-[0-9a-f]{8,17})(?!\w)",
        ),
        ("id", r"(?P<id>\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b)"),
        ("id", r"(?<!\d)(?<!\d\.)(?P<id>\d{16,})(?!\d)"),
        ("aws-account", r"(?<!\d)(?<!\d\.)(?P<id>\d{12}|\d{4}-\d{4}-\d{4}|\d{4} \d{4} \d{4})(?!\d)"),
        ("host", r"(?<![\w.-])(?P<id>(?:ip|ec2)-\d+-\d+-\d+-\d+[\w.-]*\w)"),
        ("host", r"(?<![\w.-])(?P<id>[\w-]+(?:\.[\w-]+)*\.(?:internal|local|localdomain|lan|corp))(?![\w.-])"),
        ("host", r"(?<![\w.-])(?P<id>[0-9A-Fa-f]{32})\.\w+\.[a-z0-9-]+\.eks\.amazonaws\.com"),
        ("address", r"(?:https?://|\bhost=['\"]?)(?P<id>[\w-]+(?:\.[\w-]+)+)"),
        ("ip", r"(?<![\w.])(?P<id>\d{1,3}(?:\.\d{1,3}){3})(?![\w]|\.\d)"),
        ("ip", r"(?<![\w:.])(?P<id>[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w:])"),
        # As `doctor` says whose a token is.
        ("user", r"the token is of (?:the workspace |(?!the workspace ))(?P<id>[^\s<]+)"),
        ("namespace", r"write namespace: (?P<id>[^,\n<]+)"),
        ("user", r"/(?:home|Users)/(?P<id>[^/\s\"'<>:]+)"),
    )
)
# Names that say nothing about an account. A placeholder for them would hide words of the text.
_PUBLIC: Final = frozenset(
    re.split(
        " ",
        "root user ubuntu debian admin runner ec2-user operator localhost default main master prod dev test staging "
        "skerry none null true false yes no on off /dev/null / . aws google s3 gs us 127.0.0.1 0.0.0.0 :: ::1",
    )
)
# Addresses of vendors' services: what names an account in one of them has a form of its own.
_VENDORS: Final = re.compile(
    r"(?:.*\.)?(?:amazon\.com|amazonaws\.com(?:\.cn)?|google\.com|googleapis\.com|pkg\.dev|huggingface\.co|modal\.com|"
    r"kubernetes\.io|github\.com|ghcr\.io|pypi\.org|python\.org|pydantic\.dev)",
    re.IGNORECASE,
)
# Of variables whose values are ids or secrets, whichever tool reads them.
_VARIABLES: Final = re.compile(
    r"(?:^|_)(?P<kind>KEY|KEY_ID|SECRET|TOKEN|PASSWORD|CREDENTIALS|PROFILE|PROJECT|PROJECT_ID|ACCOUNT|ACCOUNT_ID|BUCKET|"
    r"NAMESPACE|ENVIRONMENT|HOSTNAME|HOST|USER|USERNAME|LOGNAME|EMAIL|ARN|SETUP|PYTHON|CONFIG|KUBECONFIG|HOME)$"
)
_KINDS: Final = {
    **dict.fromkeys(("PROJECT", "PROJECT_ID"), "google-project"),
    "BUCKET": "bucket",
    "EMAIL": "email",
    **dict.fromkeys(("USER", "USERNAME", "LOGNAME"), "user"),
    **dict.fromkeys(("HOST", "HOSTNAME"), "host"),
    **dict.fromkeys(("HOME", "CONFIG", "KUBECONFIG", "PYTHON", "CREDENTIALS"), "path"),
    **dict.fromkeys(("ACCOUNT", "ACCOUNT_ID"), "account"),
    **dict.fromkeys(("NAMESPACE", "ENVIRONMENT"), "namespace"),
    **dict.fromkeys(("ARN", "PROFILE"), "principal"),
}
# A shorter value is replaced only as a word of its own.
_LONG: Final = 6


class Id(NamedTuple):
    """A value that may not be published. kind: the first part of its placeholder."""

    kind: str
    value: str


def ids_of_environment(environment: Mapping[str, str]) -> list[Id]:
    """The ids and secrets in variables, this machine's user and host. Of an image: its repository."""
    ids = [Id("host", socket.gethostname()), Id("user", _user())]
    for name, text in environment.items():
        if name.endswith("_IMAGE"):
            ids.append(Id("image", text.partition("@")[0]))
        elif (match := _VARIABLES.search(name)) is not None:
            ids.append(Id(_KINDS.get(match["kind"], "secret"), text))
    return ids


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no entry for its user
        return ""


def remove_ids(text: str, known: Iterable[Id]) -> str:
    """Replace every known id, and everything that has the form of an id. Of two that overlap, both are replaced.

    Raises Invalid with kinds and lines, and no value, if something is left.
    """
    ids = _private(known)
    values = {spelling.lower(): item.value for item in ids for spelling in _spellings(item.value)}
    placeholders: dict[str, str] = {}
    counts: dict[str, int] = {}
    parts: list[str] = []
    end = 0
    for span in merged([*_known_spans(text, ids), *_spans_of_forms(text)]):
        value = text[span.start : span.end].lower()
        key = _digits(values.get(value, value))
        if key not in placeholders:
            counts[span.kind] = counts.get(span.kind, 0) + 1
            placeholders[key] = f"<{span.kind}-{counts[span.kind]}>"
        parts += [text[end : span.start], placeholders[key]]
        end = span.end
    result = "".join([*parts, text[end:]])
    if left := sorted(set(ids_left(result, ids))):
        raise Invalid(f"not written, because ids are left in it: {'; '.join(left)}")
    return result


class _Span(NamedTuple):
    start: int
    end: int
    kind: str


def _known_spans(text: str, ids: Iterable[Id]) -> Iterator[_Span]:
    for item in ids:
        for spelling in _spellings(item.value):
            for match in re.finditer(_pattern(spelling), text, re.IGNORECASE):
                yield _Span(*match.span(), item.kind)


def _spans_of_forms(text: str) -> Iterator[_Span]:
    for kind, form in _FORMS:
        for match in form.finditer(text):
            if _is_private(kind, match["id"]):
                yield _Span(*match.span("id"), kind)


def merged(spans: Iterable[_Span]) -> list[_Span]:
    """Spans that overlap as one, of the longest one's kind; of two with the same length, the first one's."""
    result: list[_Span] = []
    longest = 0
    for span in sorted(spans, key=lambda item: item.start):
        if not result or span.start >= result[-1].end:
            result.append(span)
            longest = span.end - span.start
            continue
        kind = result[-1].kind if longest >= span.end - span.start else span.kind
        longest = max(longest, span.end - span.start)
        result[-1] = _Span(result[-1].start, max(result[-1].end, span.end), kind)
    return result


def ids_left(text: str, known: Iterable[Id]) -> Iterator[str]:
    """The kinds of all ids that a text still has, with their lines; no values."""
    lower = text.lower()
    for item in _private(known):
        for spelling in _spellings(item.value):
            position = lower.find(spelling.lower())
            if len(spelling) < _LONG:
                match = re.search(_pattern(spelling), text, re.IGNORECASE)
                position = -1 if match is None else match.start()
            if position >= 0:
                yield f"{item.kind} in line {text.count(chr(10), 0, position) + 1}"
    for span in _spans_of_forms(text):
        yield f"{span.kind} in line {text.count(chr(10), 0, span.start) + 1}"


def _private(known: Iterable[Id]) -> list[Id]:
    return [item for item in known if len(item.value) > 1 and item.value.lower() not in _PUBLIC]


def _is_private(kind: str, value: str | None) -> bool:
    """A form of an id matches other things: a digest, a placeholder's number, a time of day."""
    if value is None or value.lower() in _PUBLIC:
        return False
    if kind == "address":
        return _VENDORS.fullmatch(value) is None
    if kind != "ip":
        return True
    try:
        return not ipaddress.ip_address(value).is_loopback
    except ValueError:
        return False


def _spellings(value: str) -> set[str]:
    """A value as it is, in a URL, in JSON, and an account's number with dashes."""
    spellings = {value, quote(value, safe=""), json.dumps(value)[1:-1]}
    if re.fullmatch(r"\d{12}", value):
        spellings.add("-".join((value[:4], value[4:8], value[8:])))
    return spellings


def _digits(value: str) -> str:
    """The number of an account without its dashes."""
    return re.sub("[- ]", "", value) if re.fullmatch(r"\d{4}[- ]\d{4}[- ]\d{4}", value) else value


def _pattern(value: str) -> str:
    escaped = re.escape(value)
    return escaped if len(value) >= _LONG else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
