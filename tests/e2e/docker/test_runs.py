"""Real runs in containers: the quickstart with a `docker kill`, an S3 server, a clean stop, a lost `up`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.e2e.conftest import DEADLINE_S, ROOT, until

from skerry.infra.local.container_starts import remove_containers
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

TRAIN: Final = ("python", "train.py", "--width", "32", "--layers", "1")
SPEC: Final = """
run: tried
store: {store}
image: skerry:cpu
code: {{path: {root}/runtime/examples/tiny_gpt, command: {command}}}
outer: {{rounds: {rounds}, sync_every: 4}}
faults: {{min_replicas: 2, grace: 10s, start_window: 60s}}
replicas: [{{name: c, count: 2, target: {{kind: docker, network: {network}}}}}]
"""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `skerry up --json` on a spec; whatever is left at the end is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        store: str,
        *,
        rounds: int = 3,
        network: str = "bridge",
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = TRAIN,
        more: str = "",
    ) -> subprocess.Popen[bytes]:
        spec = tmp_path / "skerry.yaml"
        words = json.dumps(list(command))
        spec.write_text(SPEC.format(store=store, root=ROOT, command=words, rounds=rounds, network=network) + more)
        program = [sys.executable, "-c", "from skerry.infra.cli.app import main; main()", "up", str(spec), "--json"]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
            process = subprocess.Popen(program, stdout=out, stderr=err, env={**os.environ, **(environment or {})})
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def result_of(folder: Path) -> dict[str, object]:
    lines = (folder / "out").read_text().splitlines()
    assert lines, (folder / "err").read_text()[-4000:]
    return json.loads(lines[-1])


def test_the_quickstart_in_containers_loses_nothing_when_one_is_killed(engine: Engine, image: str) -> None:
    assert image
    program = [sys.executable, str(ROOT / "scripts/quickstart.py"), "--docker", "--rounds", "4", "--replicas", "3"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    verdict = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert (verdict["kills"], verdict["lost_rounds"], verdict["digests_equal"]) == (1, 0, True)
    assert engine.containers.labelled({"dev.skerry.run": verdict["store"]}) == []


def test_a_store_behind_s3s_protocol_on_this_machines_loopback(
    image: str, tmp_path: Path, up: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert image
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106  moto takes any
        ).create_bucket(Bucket="bucket")
        process = up("s3://bucket/runs", network="host", environment=environment)
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "err").read_text()[-4000:]
        assert result_of(tmp_path)["digests_equal"] is True
    finally:
        server.stop()


def test_container_gets_its_inputs_and_only_reads_its_data(
    image: str, tmp_path: Path, up: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert image
    value = "kaffee-und-kuchen-4711"
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("words")
    inputs = "env: {COLOUR: green}\nsecrets: {TOKEN: {environment: HF_TOKEN}}\ndata: {corpus: corpus}\n"
    script = (
        'echo GOT $COLOUR $(printf %s "$TOKEN" | sha256sum | cut -c1-64) $(cat "$SKERRY_DATA_CORPUS/a.txt"); '
        'touch "$SKERRY_DATA_CORPUS/b.txt" || echo READONLY'
    )
    process = up(
        (tmp_path / "store").as_uri(), command=["sh", "-c", script], more=inputs, environment={"HF_TOKEN": value}
    )
    process.wait(DEADLINE_S)
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert f"GOT green {hashlib.sha256(value.encode()).hexdigest()} words" in logs, logs
    assert "READONLY" in logs
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]


def test_stop_and_kill_of_up_leave_no_container(
    engine: Engine, image: str, tmp_path: Path, up: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert image
    store = open_store((tmp_path / "store" / "tried").as_uri())
    process = up((tmp_path / "store").as_uri(), rounds=100_000)
    until(lambda: store.list(keys.COMMITS))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1
    outcomes = [Outcome.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(keys.OUTCOMES)]
    assert {(outcome.slot, outcome.status) for outcome in outcomes} == {("c-0", "stopped"), ("c-1", "stopped")}
    assert engine.containers.labelled({"dev.skerry.run": store.uri}) == []
    # The same run continues; this time the containers are not told to stop.
    closed = len(store.list(keys.COMMITS))
    process = up((tmp_path / "store").as_uri(), rounds=100_000)
    until(lambda: len(store.list(keys.COMMITS)) > closed)
    process.kill()
    process.wait()
    left = engine.containers.labelled({"dev.skerry.run": store.uri})
    until(lambda: not any(engine.containers.inspect(item)["State"]["Running"] for item in left))
    assert len(left) == 2
    assert sorted(remove_containers(engine, store.uri)) == sorted(left)
    assert engine.containers.labelled({"dev.skerry.run": store.uri}) == []
