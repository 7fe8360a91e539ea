"""Tests the locked requirements of the image's variants, and that a machine without wheels is refused by name."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from scripts.image_lock import HERE, PINS, VARIANTS

if TYPE_CHECKING:
    from pathlib import Path

LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}  # [1-9]\d* [1-9]\d*")


def locked(name: str) -> dict[str, str]:
    """The versions of a lock; every line has the sha256 of a wheel and its two sizes."""
    lines = (HERE / f"{name}.lock").read_text().splitlines()[1:]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines[matches.index(None)]
    return {match[1]: match[2] for match in matches if match is not None}


@pytest.mark.parametrize(("variant", "cuda"), [("cpu", None), ("gpu", "13"), ("cu12", "12")])
def test_variant_is_locked_with_the_cuda_of_its_name(variant: str, cuda: str | None) -> None:
    torch, rest = locked(f"torch.{variant}"), locked("rest")
    assert f"torch=={torch['torch']}" == VARIANTS[variant].replace("===", "==")
    assert not torch.keys() & rest.keys()
    pins = dict(pin.split("==") for pin in PINS)
    assert {name: version for name, version in rest.items() if name in pins} == {
        name: pins[name] for name in rest if name in pins
    }
    libraries = {name for name in torch if name.startswith("nvidia-")}
    assert bool(libraries) == (cuda is not None)
    if cuda is not None:
        assert torch["cuda-bindings"].startswith(f"{cuda}.")
        assert {match[1] for name in libraries if (match := re.search(r"-cu(\d+)$", name))} <= {cuda}
        assert any("nccl" in name for name in libraries)


def test_every_variant_has_a_lock() -> None:
    assert {path.name for path in HERE.glob("torch.*.lock")} == {f"torch.{variant}.lock" for variant in VARIANTS}


def test_arm_machine_is_refused_by_name_before_anything_is_installed(tmp_path: Path) -> None:
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho aarch64\n")
    uname.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["sh", HERE / "layer"], env={"PATH": path}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    words = "no image for aarch64: torchft has wheels for x86-64 only; build with --platform linux/amd64\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", words)
