"""Finds words and patterns that plain technical English does without.

List them with `python tests/contracts/language.py [PATH...]`.

The lists are short on purpose: each entry was a habit of this project once.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]

# Names of variables, functions and classes that do not name the thing.
BANNED_NAMES: Final = frozenset(
    [
        "one",
        "ones",
        "found",
        "told",
        "said",
        "there",
        "some",
        "made",
        "asked",
        "whoever",
        "somebody",
        "nobody",
        "theirs",
        "thereof",
    ]
)
# In docstrings, comments, messages and documents. The second part is what to write.
BANNED_PHRASES: Final = {
    r"\bwho(ever|m|mever)?\b": "the replica, the caller, the process",
    r"\b(nobody|somebody|anybody|everybody)\b": "no replica, another process, every caller",
    r"\bsomewhere\b": "the place",
    r"\bin vain\b": "timed out",
    r"\bnothing but\b": "only",
    r"\bbesides\b": "also",
    r"\bseen? off\b": "wait until the others have finished",
    r"\bat stake\b": "in flight",
    r"\b(is|are|was|were) no more\b": "does not exist any more",
    r"\bon (its|their) way\b": "in flight",
    r"\bat hand\b": "current",
    r"\bof (its|their|one's) own accord\b": "by itself",
    r"\bgood for\b": "valid for",
    r"\bbefall\w*\b": "happen",
    r"\bthe like\b": "similar",
    r"\b(comes|goes) by\b": "use",
    r"\bgives? (up|out)\b": "stop, abort, return",
    r"\bspeaks? for\b": "represent",
    r"\bstands? (for|at|in|there|already|alone)\b": "is",
}
# A first sentence that is no sentence: "What a replica keeps ...", "Whether the round is over".
HEADLESS: Final = re.compile(r"(What|Who|Whose|Whom|Whether|How|Where|Wherever|When|Which|Why|Whatever)\b(?![^.]*\?)")
LONGEST_TEST_NAME: Final = 70
# These two hold the banned words themselves.
_READ: Final = (
    "*.py",
    "*.md",
    "*.toml",
    "*Dockerfile",
    ":(glob)scripts/*",
    ".ci/run",
    ".github",
    "images/replica/layer",
)
_OWN: Final = frozenset({"tests/contracts/language.py", "tests/contracts/test_language.py"})
_BANNED_WORDS: Final = re.compile(r"(^|_)(who(ever|m|se)?|nobody|somebody|vain|besides|told|tells|said|says)(_|$)")
_PHRASE: Final = {re.compile(pattern, re.IGNORECASE): instead for pattern, instead in BANNED_PHRASES.items()}


class Violation(NamedTuple):
    """One place, and what to change there."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def in_python(path: str, source: str) -> Iterator[Violation]:
    """Violations of one Python file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED_NAMES:
            yield Violation(path, node.lineno, f"variable `{node.id}`: name the thing")
        elif isinstance(node, ast.arg) and node.arg in BANNED_NAMES:
            yield Violation(path, node.lineno, f"parameter `{node.arg}`: name the thing")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from in_text(path, node.lineno, node.value)
        if isinstance(node, ast.ExceptHandler) and node.name in BANNED_NAMES:
            yield Violation(path, node.lineno, f"exception `{node.name}`: name the thing")
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_definition(path, node)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from in_text(path, token.start[0], token.string)


def _in_definition(
    path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Violation]:
    docstring = ast.get_docstring(node)
    line = getattr(node, "lineno", 1)
    if docstring is not None and HEADLESS.match(docstring):
        yield Violation(path, line, f"headless first sentence: {docstring.splitlines()[0][:60]!r}")
    name = getattr(node, "name", "")
    if name.strip("_").lower() in BANNED_NAMES or _BANNED_WORDS.search(name):
        yield Violation(path, line, f"name of a function or class with a banned word: {name}")
    if name.startswith("test_") and len(name) > LONGEST_TEST_NAME:
        yield Violation(path, line, f"test name of {len(name)} characters: {name}")


def in_text(path: str, line: int, text: str) -> Iterator[Violation]:
    """Violations of a docstring, a comment, a message or a document."""
    for phrase, instead in _PHRASE.items():
        for match in phrase.finditer(text):
            number = line + text.count("\n", 0, match.start())
            yield Violation(path, number, f"{match.group(0)!r}: write {instead!r}")


def violations(prefixes: tuple[str, ...] = ()) -> list[Violation]:
    """All violations of the tracked files below the prefixes that people read; decisions are history and stay."""
    listed = subprocess.run(["git", "ls-files", *_READ], cwd=ROOT, capture_output=True, text=True, check=True)
    result: list[Violation] = []
    for path in listed.stdout.split():
        if not path.startswith(prefixes or ("",)) or "/decisions/" in path or path in _OWN:
            continue
        text = (ROOT / path).read_text()
        result += in_python(path, text) if path.endswith(".py") else in_text(path, 1, text)
    return result


if __name__ == "__main__":
    all_violations = violations(tuple(sys.argv[1:]))
    counts = Counter("/".join(violation.path.split("/")[:4]) for violation in all_violations)
    sys.stdout.write("\n".join([*map(str, all_violations), str(counts.most_common()), ""]))
