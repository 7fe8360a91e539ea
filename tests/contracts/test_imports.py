"""Checks the cost and the effects of imports in fresh interpreters, because this one has loaded everything already."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import skerry.runtime.export

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "clock",
    "container.run",
    "contract",
    "errors",
    "structured_logging",
    "log.keys",
    "log.log",
    "log.records",
    "protocol.exchange",
    "protocol.slot_claim_and_heartbeats",
    "protocol.quorum",
    "replication.copy_placement",
    "store",
    "store.probe",
    "store.retrying",
    "training.catch_up_with_log",
    "training.early_round_end_check",
    "training.lifecycle",
    "training.unreadable_rounds",
    "training.round_runner",
    "training.early_round_end_policy",
    "training.trainer_interface",
)
HEAVY = {"torch", "torchft", "numpy"}
PRIVATE_OF_DILOCO = {"_fragments", "_model_fragment", "_outer_optimizer", "_model_fragments"}
SDKS = {
    *("boto3", "botocore", "google", "azure", "s3fs", "fsspec"),
    *("lightkube", "httpx2", "huggingface_hub", "modal", "modal_proto", "grpclib"),
}

# Prints what the imports loaded, and what they did that an import must not do.
PROBE = """
import json, logging, os, sys, threading
before = dict(os.environ), list(logging.getLogger().handlers)
opened = []
def hook(event, arguments):
    if event in ("socket.connect", "subprocess.Popen") or (event == "open" and set(str(arguments[1])) & set("wax+")):
        opened.append(f"{event} {arguments[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
for name in sys.argv[1:]:
    __import__(name)
after = dict(os.environ), list(logging.getLogger().handlers)
json.dump({
    # An installed SDK may begin its namespace at every start of the interpreter, without a module of it.
    "loaded": sorted({name.split(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}),
    "changed": before != after,
    "threads": threading.active_count(),
    "opened": opened,
}, sys.stdout)
"""


def after_importing(*modules: str, path: str = f"{ROOT / 'runtime'}:{ROOT / 'infra'}") -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, *modules],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


@pytest.mark.parametrize("modules", [[f"skerry.runtime.{name}" for name in TORCH_FREE], ["skerry.infra.cli.app"]])
def test_protocol_and_command_line_import_neither_torch_nor_an_sdk(modules: list[str]) -> None:
    assert not set(after_importing(*modules)["loaded"]) & (HEAVY | SDKS)


# The help must not wait for what commands need: of skerry only these, and of others what typer's own help loads.
HELP_MODULES = {
    "skerry.infra",
    "skerry.infra.cli",
    "skerry.infra.cli.common",
    "skerry.infra.cli.fast_help_entry_point",
    "skerry.infra.spec_and_store_errors",
    "skerry.runtime",
    "skerry.runtime.errors",
}
HELP_PACKAGES = {"annotated_doc", "attr", "click", "markdown_it", "mdurl", "pygments", "rich", "shellingham", "typer"}
HELP = """
import json, sys
from skerry.infra.cli.fast_help_entry_point import root
try:
    root(sys.argv[1:], prog_name="skerry")
except SystemExit:
    pass
print(json.dumps(sorted(name for name, module in sys.modules.items() if getattr(module, "__file__", None))))
"""


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--help"], "Start here"), (["--version"], "skerry "), ([], "Cloud")]
)
def test_help_and_version_load_no_command(arguments: list[str], shown: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELP, *arguments],
        env={"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'infra'}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    *_, last = ended.stdout.splitlines()
    assert shown in ended.stdout + ended.stderr
    loaded = set(json.loads(last))
    assert {name for name in loaded if name.startswith("skerry.")} == HELP_MODULES
    packages = {name.split(".")[0] for name in loaded} - {"skerry", "_distutils_hack"}
    assert packages - sys.stdlib_module_names <= HELP_PACKAGES


def private_torchft_names(source: str) -> list[str]:
    """Names with a leading underscore that a module imports from torchft, or reads of its DiLoCo."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    from_torchft = [node for node in imports if (node.module or "").split(".")[0] == "torchft"]
    imported = [alias.name for node in from_torchft for alias in node.names if alias.name.startswith("_")]
    return imported + [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_OF_DILOCO and ast.unparse(node.value) != "self"
    ]


@pytest.mark.parametrize("folder", ["runtime", "infra/skerry", "scripts"])
def test_no_module_uses_private_names_of_torchft(folder: str) -> None:
    adapter = ROOT / "runtime/skerry/runtime/training/torchft_fragments.py"
    paths = [path for path in (ROOT / folder).rglob("*.py") if path != adapter]
    assert len(paths) > 10
    assert {path.name: names for path in paths if (names := private_torchft_names(path.read_text()))} == {}


def test_imports_of_private_torchft_names_are_found() -> None:
    assert private_torchft_names("def f():\n    from torchft.local_sgd import DiLoCo, _Fragment\n") == ["_Fragment"]
    assert private_torchft_names("shared = diloco._fragments[0].original_parameters\n") == ["_fragments"]


def replaced_private_names(source: str) -> list[str]:
    """Private names in a `setattr` or an import; ruff finds all others. Capitals are limits that a test lowers."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "setattr":
            names += [str(argument.value) for argument in node.args[:2] if isinstance(argument, ast.Constant)]
    return [name for name in names if re.search(r"(^|\.)_(?!_)(?=\w*[a-z])", name)]


def test_tests_use_no_private_function_of_skerry() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if "simulation" not in path.parts]
    assert len(paths) > 300
    assert {path.name: names for path in paths if (names := replaced_private_names(path.read_text()))} == {}


def test_private_functions_that_a_test_replaces_are_found() -> None:
    assert replaced_private_names('patch.setattr(Ballots, "_end", end); patch.setattr(blocks, "_ROWS", 1)') == ["_end"]
    assert replaced_private_names('patch.setattr("a.b._Memory.c", 1)\nfrom a import _b, c') == ["_b", "a.b._Memory.c"]


@pytest.mark.parametrize("package", [skerry, skerry.runtime])
def test_load_is_imported_only_when_it_is_used(package: ModuleType) -> None:
    loaded = after_importing(package.__name__)["loaded"]
    assert not set(loaded) & {"torch", "safetensors", "skerry.runtime.export"}
    assert package.load is skerry.runtime.export.load
    with pytest.raises(AttributeError, match=rf"'{package.__name__}' has no attribute 'lod'"):
        _ = package.lod


def test_package_of_two_folders_is_found_in_both() -> None:
    assert {Path(folder).parent.name for folder in skerry.__path__} == {"infra", "runtime"}


def test_store_engine_is_imported_only_when_its_scheme_is_opened() -> None:
    assert "obstore" not in after_importing("skerry.runtime.store")["loaded"]


@pytest.mark.parametrize(
    "name",
    [
        "skerry.infra.cli.fast_help_entry_point",
        "skerry.infra.cli.app",
        "skerry.runtime.protocol.exchange",
        "skerry.runtime.store.obstore_clients",
    ],
)
def test_importing_has_no_effect(name: str) -> None:
    result = after_importing(name)
    assert (result["changed"], result["threads"], result["opened"]) == (False, 1, [])


def test_effects_of_an_import_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(
        f"import os, fractions\nopen({str(tmp_path / 'x')!r}, 'w')\nos.environ['A'] = 'b'\n"
    )
    result = after_importing("guilty", path=str(tmp_path))
    assert "fractions" in result["loaded"]
    assert result["changed"]
    assert result["opened"] == [f"open {tmp_path / 'x'}"]
