"""The image on a real engine: it does what it promises, is reproducible, can be built on, and is shipped."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.docker.conftest import ROOT

from skerry.infra.engine import Recipe, Wanted

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.engine import Engine

DERIVED: Final = """
FROM skerry:cpu
COPY extra-1.0-py3-none-any.whl /tmp/
RUN pip install --no-index --no-cache-dir /tmp/extra-1.0-py3-none-any.whl
COPY own.py /opt/own/own.py
RUN echo 'trainer:x:4242:4242::/home/trainer:/bin/sh' >> /etc/passwd && mkdir -m 0777 /home/trainer
ENV SKERRY_RUN_AS=trainer
WORKDIR /opt/own
"""


def skerry(*words: str, timeout: float = 500) -> str:
    """What `skerry image` printed."""
    ended = subprocess.run(
        [sys.executable, "-c", "from skerry.infra.cli import main; main()", "image", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_the_image_does_what_it_promises(image: str) -> None:
    assert image
    tried = json.loads(skerry("smoke", "--json").splitlines()[-1])
    assert [one["problem"] for one in tried] == [None] * 6


def test_it_is_as_small_as_promised_and_says_what_it_is(engine: Engine, image: str) -> None:
    found = engine.images.inspect(image)
    assert found["Size"] <= 900e6
    layers = [int(one["Size"]) for one in engine.images.history(image)]
    assert layers[0] <= 20e6, "our own layer"
    labels = found["Config"]["Labels"]
    names = {"title", "version", "revision", "base.name", "base.digest", "licenses", "source"}
    assert {f"org.opencontainers.image.{name}" for name in names} <= labels.keys()
    assert "unknown" not in labels.values()
    assert found["Config"]["Healthcheck"]["Test"][0] == "CMD-SHELL"


def test_two_builds_of_the_same_files_are_the_same_image(engine: Engine, image: str) -> None:
    first = json.loads(skerry("build", "--variant", "cpu", "--json").splitlines()[-1])
    again = json.loads(skerry("build", "--variant", "cpu", "--no-cache", "--json").splitlines()[-1])
    assert engine.images.has(image)
    assert again["id"] == first["id"]


def test_a_bill_of_materials_lists_python_and_debian(image: str, tmp_path: Path) -> None:
    assert image
    skerry("sbom", "--output", str(tmp_path / "bill.json"))
    bill = json.loads((tmp_path / "bill.json").read_text())
    names = {one["name"] for one in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert {"torch", "torchft", "obstore", "skerry", "libc6", "python3.11-minimal"} <= names
    assert "cyclonedx-bom" not in names


def test_an_image_of_ones_own_is_a_few_lines(engine: Engine, image: str) -> None:
    assert image
    own = b"import os, pwd, extra\nprint('OWN', extra.WORD, pwd.getpwuid(os.getuid()).pw_name, os.getcwd())\n"
    context = folder({"Dockerfile": DERIVED.encode(), "extra-1.0-py3-none-any.whl": wheel(), "own.py": own})
    recipe = Recipe(context=context, tag="skerry-derived:test", arguments={}, network="none")
    try:
        engine.images.build(recipe, lambda _: None)
        found = Wanted(image="skerry-derived:test", command=["check", "file:///tmp/run"], network="none")
        code, said = engine.containers.run(found)
        assert code == 0, said
        direct = Wanted(image="skerry-derived:test", entrypoint=["python", "own.py"], user="4242", network="none")
        code, said = engine.containers.run(direct)
        assert (code, said.strip()) == (0, "OWN here trainer /opt/own")
    finally:
        engine.images.remove("skerry-derived:test")


def test_it_is_pushed_and_runs_by_its_digest(engine: Engine, image: str, registry: str) -> None:
    assert image
    told = json.loads(skerry("push", f"{registry}/team/skerry", "--variant", "cpu", "--allow-dirty", "--json"))
    assert told["reference"] == f"{registry}/team/skerry@{told['digest']}"
    assert engine.images.digest_in_registry(told["tag"]) == told["digest"]
    engine.images.pull(told["reference"], None, lambda _: None)
    try:
        wanted = Wanted(image=told["reference"], command=["check", "--json", "file:///tmp/run"], network="none")
        code, said = engine.containers.run(wanted)
        assert (code, json.loads(said)["ok"]) == (0, True)
    finally:
        engine.images.remove(told["reference"])


def test_a_changed_checkout_is_not_pushed_unless_told(engine: Engine, registry: str) -> None:
    context = folder(
        {
            "Dockerfile": b"FROM skerry:cpu\nLABEL org.opencontainers.image.revision=abc-dirty\n",
        }
    )
    before = engine.images.inspect("skerry:cpu")["Id"]
    engine.images.tag(before, "skerry:kept-by-test")
    try:
        engine.images.build(Recipe(context=context, tag="skerry:cpu", arguments={}), lambda _: None)
        with pytest.raises(AssertionError, match="--allow-dirty"):
            skerry("push", f"{registry}/team/skerry", "--variant", "cpu")
    finally:
        engine.images.tag("skerry:kept-by-test", "skerry:cpu")
        engine.images.remove("skerry:kept-by-test")


def folder(files: dict[str, bytes]) -> io.BytesIO:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    archive.seek(0)
    return archive


def wheel() -> bytes:
    """A package of one module, as a wheel made by hand: nothing is fetched for it."""
    files = {
        "extra.py": b"WORD = 'here'\n",
        "extra-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n",
        "extra-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(data)}\n" for name, data in files.items())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("extra-1.0.dist-info/RECORD", f"{record}extra-1.0.dist-info/RECORD,,\n")
    return made.getvalue()
