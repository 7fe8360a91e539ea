"""One run in six places, with one bucket between them: infra/examples/six-places.yaml with a replica in each.

Containers on AWS Batch, Vertex AI, Kubernetes, Hugging Face Jobs and Modal, whose control planes are sandboxes, and
processes on a real Slurm cluster of this machine. Those without an identity in AWS have the keys of a user that may do
what a replica may, and nothing else.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest
import yaml
from tests.e2e.conftest import ROOT, until
from tests.e2e.deployed import Deployed, check_nothing_was_lost, skerry, until_closed
from tests.support.slurmsite import SlurmSite, slurm_site

from skerry.infra.clouds.aws.policies import document, replica_policy, text_of
from skerry.runtime.store import open_store
from skerry.testing.huggingface import HuggingFaceSandbox
from skerry.testing.kubernetes import KubernetesSandbox
from skerry.testing.modal_cloud import ModalSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.testing.both_clouds import Clouds

EXAMPLE: Final = ROOT / "infra/examples/six-places.yaml"
BUCKET: Final = "skerry-e2e"
GUESTS: Final = ("cluster-0", "hpc-0", "hub-0", "modal-0")
"""Replicas with keys of the user."""
SLOTS: Final = ("batch-0", "vertex-0", *GUESTS)
ROUNDS: Final = 6
"""A round takes about a second here, and the last replica is killed after two of them."""


@dataclass(frozen=True, kw_only=True)
class Places:
    clouds: Clouds
    cluster: KubernetesSandbox
    slurm: SlurmSite
    hub: HuggingFaceSandbox
    modal: ModalSandbox

    def kill(self, engine: Engine, slot: str, job: str) -> None:
        """Kill a replica as a lack of memory does, without a warning."""
        if slot == "hpc-0":
            self.slurm.kill_replica(job)
            return
        jobs = {
            "batch-0": self.clouds.aws.batch,
            "vertex-0": self.clouds.google.jobs,
            "cluster-0": self.cluster.jobs,
            "hub-0": self.hub.jobs,
            "modal-0": self.modal.jobs,
        }
        engine.containers.signal(jobs[slot].container(job), "SIGKILL")

    def left(self) -> list[object]:
        """Return the names of everything that exists, for each place with something left."""
        sandboxes = (self.clouds.aws, self.clouds.google, self.cluster, self.hub, self.modal)
        queue = self.slurm.call("squeue", "--noheader").split()
        return [rest for rest in (*(sandbox.inventory() for sandbox in sandboxes), queue) if rest]


@pytest.fixture
def places(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    aws, google = clouds.aws, clouds.google
    keys = make_user(clouds)
    within = {
        **{name: aws.environment[name] for name in ("AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED")},
        "AWS_ENDPOINT_URL": google.within(aws.endpoint),
        "AWS_ALLOW_HTTP": "true",
    }
    with (
        KubernetesSandbox(containers=True, keys=keys) as cluster,
        slurm_site() as slurm,
        HuggingFaceSandbox(containers=True) as hub,
        ModalSandbox(containers=True, keys=keys) as modal,
    ):
        own = {"REPLICA_KEY_ID": keys["AWS_ACCESS_KEY_ID"], "REPLICA_SECRET_KEY": keys["AWS_SECRET_ACCESS_KEY"]}
        for environment in (cluster.environment, slurm.environment, hub.environment, modal.environment, own):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
        for sandbox in (cluster, hub, modal):
            sandbox.variables.update(within)
        lines = {**within, "AWS_ENDPOINT_URL": aws.endpoint, **keys}.items()
        file = slurm.folder / "home/store-keys"
        file.touch(0o600)
        file.write_text("".join(f"export {name}={value}\n" for name, value in lines))
        yield Places(clouds=clouds, cluster=cluster, slurm=slurm, hub=hub, modal=modal)
        assert (cluster.violations, hub.violations) == ([], [])


def make_user(clouds: Clouds) -> dict[str, str]:
    """Create the user for places without an identity in AWS, and return its keys."""
    iam = clouds.aws.client("iam")
    rights = replica_policy(bucket_arn=f"arn:aws:s3:::{BUCKET}", prefix="runs/tiny-gpt", slots=GUESTS, group=None)
    iam.create_user(UserName="guests")
    iam.put_user_policy(UserName="guests", PolicyName="run", PolicyDocument=text_of(document(rights)))
    key = iam.create_access_key(UserName="guests")["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


def write_spec(folder: Path, image: str, clouds: Clouds) -> Deployed:
    """The example with a replica in each place, a model that costs nothing, and machines that a sandbox has."""
    spec = yaml.safe_load(EXAMPLE.read_text())
    machines: Mapping[str, Mapping[str, object]] = {
        "batch": {"instance_types": ["c7i.2xlarge"], "gpus": 0, "memory": "3GiB", "shared_memory": "256MiB"},
        "vertex": {"project": clouds.google.project, "machine": "n2-standard-4", "accelerator": None},
        "cluster": {"gpus": 0, "memory": "3GiB", "shared_memory": "256MiB"},
        "hpc": {"partition": "main", "time": "1h", "gpus": 0, "python": sys.executable},
        "hub": {"flavor": "cpu-basic"},
        "modal": {"gpu": None, "cpu": 1},
    }
    spec |= {"store": f"s3://{BUCKET}/runs", "image": image}
    command = ["python", "train.py", "--width", "32", "--layers", "1", "--batch", "4"]
    spec["code"] = {"path": str(EXAMPLE.parent / spec["code"]["path"]), "command": command}
    spec["outer"] |= {"rounds": ROUNDS, "sync_every": 4}
    spec["faults"] |= {"min_replicas": len(SLOTS), "grace": "10s", "start_window": "120s"}
    for group in spec["replicas"]:
        group["count"] = 1
        group["target"] |= machines[group["name"]]
        if "image" in group:
            group["image"] = clouds.google.publish(image, "skerry/replica")
    path = folder / "six-places.yaml"
    path.write_text(yaml.safe_dump(spec))
    return Deployed(spec=path, slots=SLOTS, rounds=ROUNDS)


def test_run_in_six_places_survives_a_killed_replica_in_each(
    places: Places, image: str, engine: Engine, tmp_path: Path
) -> None:
    run = write_spec(tmp_path, image, places.clouds)
    store = open_store(f"s3://{BUCKET}/runs/tiny-gpt")
    with run.watched() as printed:
        until(lambda: "\ndone: " in printed())
        first = {slot: str(job["job"]) for slot, job in run.jobs().items()}
        until_closed(store, 1)
        # Those that their place starts again, then those that `up` starts again. The others wait meanwhile.
        for slot in ("batch-0", "cluster-0", "hpc-0"):
            places.kill(engine, slot, first[slot])
        until_closed(store, 2)
        for slot in ("vertex-0", "hub-0", "modal-0"):
            places.kill(engine, slot, first[slot])
    for slot in ("vertex-0", "hub-0", "modal-0"):
        assert re.search(rf"^  {slot}: \w+: .*exit code 137: killed", printed(), re.MULTILINE)
        assert f"{slot}: restarted (restart 1)" in printed()

    # After the last round a replica needs a moment for its end, and its place for noticing that.
    until(lambda: {job["condition"] for job in run.jobs().values()} == {"done"})
    check_nothing_was_lost(store, run, killed=SLOTS)
    jobs = run.jobs()
    assert {slot for slot in SLOTS if jobs[slot]["job"] != first[slot]} == {"vertex-0", "hub-0", "modal-0"}
    assert {slot: job["attempt"] for slot, job in jobs.items()} == dict.fromkeys(SLOTS, 2)
    summary = skerry("report", str(run.spec), "--json", "--output", str(tmp_path / "run.html"))
    facts = json.loads(summary.splitlines()[-1])["facts"]
    assert (facts["state"], facts["closed"], facts["complete"], facts["differing"]) == ("finished", ROUNDS, ROUNDS, [])
    assert {item["slot"]: item["starts"] for item in facts["replicas"]} == dict.fromkeys(SLOTS, 2)
    assert run.speakers().keys() == set(SLOTS)

    run.destroy()
    assert places.left() == [{"user": ("guests",)}]
