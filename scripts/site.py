"""Builds the documentation as a site: the pages of the checkout, and reference pages written from the code.

    scripts/site [FOLDER]

Sphinx renders the pages at the paths that they have in the checkout, so one link serves both. README.md is the home
page. A linked file that is no page, such as a spec or a test, is copied. The reference is written from the JSON Schema
of a spec, from the command line and from docstrings. A link without a target, a heading that does not exist and a page
that no menu lists are errors.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sphinx.application import Sphinx
from typer.main import get_group

from skerry.infra import targets
from skerry.infra.cli.app import app
from skerry.infra.cli.fast_help_entry_point import COMMANDS
from skerry.infra.spec import model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parents[1]
BUILT: Final = ROOT / "build/site"
MENU: Final = {
    "Tutorial": (
        "docs/tutorial-first-run",
        "docs/tutorial-language-model",
        "docs/tutorial-sandbox",
        "docs/tutorial-three-clouds",
    ),
    "How to": (
        "docs/recipes",
        "docs/your-data",
        "docs/watch",
        "docs/report",
        "docs/model",
        "docs/extend",
        "docs/serverless",
        "docs/restore",
    ),
    "Concepts": ("docs/concepts", "docs/threat-model", "docs/security-review"),
    "Reference": (
        "docs/reference/spec",
        "docs/reference/commands",
        "docs/reference/python",
        *(
            "infra/README",
            "infra/aws-batch",
            "infra/sagemaker",
            "infra/vertex",
            "infra/kubernetes",
            "infra/slurm",
            "infra/hf-jobs",
            "infra/modal",
            "infra/across-clouds",
        ),
        *("runtime/README", "images/README", "infra/skerry/testing/README", "infra/skerry/testing/google/README"),
    ),
    "Project": (
        *("CONTRIBUTING", "CHANGELOG", "CLEAN_SLATE", "docs/verified/README"),
        *sorted(f"docs/verified/{path.stem}" for path in ROOT.glob("docs/verified/[0-9]*.md")),
        *("runtime/decisions/index", "infra/decisions/index"),
    ),
}
LIMITS: Final = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}
API: Final = """
    autofunction skerry.runtime.replica.connect
    autoclass skerry.runtime.replica.Replica
    autoclass skerry.runtime.manager.ObjectStoreManager
    autoclass skerry.runtime.allreduce.ObjectStoreAllReduce
    autoclass skerry.serverless.fixed_ranks_manager.MockManager
    autofunction skerry.runtime.store.open_store
    autofunction skerry.load
"""
SETTINGS: Final = {
    "project": "skerry",
    "root_doc": "README",
    "extensions": ["myst_parser", "sphinx.ext.autodoc"],
    "myst_heading_anchors": 4,
    "default_role": "literal",  # docstrings have one backtick around code
    "autodoc_member_order": "bysource",
    "smartquotes": False,
    "html_theme": "furo",
    "html_title": "skerry",
    "html_copy_source": False,
}
PAGES: Final = ("*.md", "docs/**/*.md", "images/*.md", "runtime/**/*.md", "infra/**/*.md")
CODE: Final = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\]\(([^)#\s:]+)[^)\s]*\)")


def main() -> None:
    """Write the site, and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=BUILT)
    folder: Path = parser.parse_args().folder.resolve()
    pages = folder.with_name(f"{folder.name}-pages")
    for old in (folder, pages):
        shutil.rmtree(old, ignore_errors=True)
    collect(pages)
    site = Sphinx(pages, None, folder, pages / ".doctrees", "html", SETTINGS, status=None, warningiserror=True)
    site.build()
    if site.statuscode:
        sys.exit("the site has broken links; the warnings above name them")
    shutil.copy(folder / "README.html", folder / "index.html")
    print(f"{folder / 'index.html'}")


def collect(pages: Path) -> None:
    """Copy every page of the checkout and all that pages link to, and write the pages of the reference."""
    pages_of_checkout = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    for path in pages_of_checkout:
        text = path.read_text()
        if path == ROOT / "README.md":
            text += "".join(_toctree(":hidden:", f":caption: {part}", "", *names) for part, names in MENU.items())
        _write(pages / path.relative_to(ROOT), text)
        for linked in _linked(path):
            target = pages / linked.relative_to(ROOT)
            if linked.suffix != ".md":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(linked, target)
    _write(pages / "docs/reference/spec.md", spec_page())
    _write(pages / "docs/reference/commands.md", commands_page())
    _write(pages / "docs/reference/python.md", python_page())
    for side in ("runtime", "infra"):
        title = f"# Decisions of {side}\n"
        _write(pages / side / "decisions/index.md", title + _toctree(":glob:", "", "[0-9]*"))


def _toctree(*lines: str) -> str:
    return "\n".join(["", "```{toctree}", *lines, "```", ""])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _linked(page: Path) -> Iterator[Path]:
    """The files and folders of the checkout that a page links to."""
    for link in LINK.finditer("".join(CODE.split(page.read_text())[::2])):  # every second part is code
        target = (page.parent / link[1]).resolve()
        if target.exists():
            yield target


def spec_page() -> str:
    """Every field of a spec, from the JSON Schema: a table for each section."""
    schema = json.loads(model.schema(targets.kinds()))
    lines = ["# Every field of a spec", "", schema["description"], ""]
    lines += ["This page is written from the JSON Schema that `skerry schema` prints.", "", *_fields(schema)]
    for name, section in _sections(schema):
        lines += ["", f"## {name}", "", section.get("description", ""), "", *_fields(section)]
    return "\n".join(lines) + "\n"


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections in the order in which fields name them."""
    sections: dict[str, Mapping[str, Any]] = {}
    waiting = [schema]
    while waiting:
        for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(waiting.pop(0)["properties"])):
            if name not in sections:
                sections[name] = schema["$defs"][name]
                waiting.append(sections[name])
    return iter(sections.items())


def _fields(section: Mapping[str, Any]) -> list[str]:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section["properties"].items():
        default = "required" if name in section.get("required", ()) else _default(field.get("default", ""))
        rows.append(f"| `{name}` | {_type(field)} | {default} | {_cell(field.get('description'))} |")
    return rows


def _default(value: object) -> str:
    if value == "":
        return "empty"
    return "its own defaults" if isinstance(value, dict) and value else f"`{json.dumps(value)}`"


def _type(field: Mapping[str, Any]) -> str:
    choices: list[Any] = field.get("anyOf") or field.get("oneOf") or []
    kind = field.get("type", "value")
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        shown = f"[{name}](#{name.lower()})"
    elif choices:
        shown = " or ".join(_type(choice) for choice in choices)
    elif "const" in field or "enum" in field:
        shown = " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    elif kind == "array":
        shown = f"list of {_type(field['items'])}"
    elif kind == "object" and isinstance(field.get("additionalProperties"), dict):
        shown = f"map of {_type(field['additionalProperties'])}"
    else:
        shown = ", ".join([kind, *(f"{word} {field[key]}" for key, word in LIMITS.items() if key in field)])
    return shown


def commands_page() -> str:
    """Every command with its arguments and options, in the groups of `skerry --help`."""
    lines = ["# Every command", "", "This page is written from the help of the commands.", ""]
    commands: Mapping[str, Any] = get_group(app).commands
    for group, table in COMMANDS.items():
        lines += [f"## {group}", ""]
        for name in table:
            lines += _command(f"skerry {name}", commands[name])
            for verb, command in getattr(commands[name], "commands", {}).items():
                lines += _command(f"skerry {name} {verb}", command)
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """The names that a training script imports, from their docstrings."""
    lines = ["# Python", "", "This page is written from docstrings.", "", "```{eval-rst}"]
    for entry in API.split("\n"):
        directive, _, name = entry.strip().partition(" ")
        members = "   :members:" if directive == "autoclass" else ""
        lines += [f".. {directive}:: {name}", members, ""] if name else []
    return "\n".join([*lines, "```", ""])


def _command(name: str, command: Any) -> list[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(
        [name, *(_shown(argument) if argument.required else f"[{_shown(argument)}]" for argument in arguments)]
    )
    rows = [
        f"| `{_shown(parameter)}` | {_cell(parameter.help)} |"
        for parameter in command.params
        if parameter.name != "help"
    ]
    text = "\n".join(line.strip() for line in (command.help or "").replace("\b", "").strip().splitlines())
    return [f"### {name}", "", f"```\n{usage}\n```", "", text, "", *(["| | |", "|---|---|", *rows, ""] if rows else [])]


def _shown(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
