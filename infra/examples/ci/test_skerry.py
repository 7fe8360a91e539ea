"""Tests skerry.yaml without a cloud: planned, applied, trained by real containers, destroyed.

SKERRY_IMAGE names the image of the replicas, which this machine's Docker has.
"""

import json
import os
import subprocess

SPEC = "skerry.yaml"
ROUNDS = 2


def skerry(*words):
    return subprocess.run(["skerry", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_spec_trains_in_containers_and_leaves_nothing(skerry_containers):
    image = skerry_containers.publish(os.environ["SKERRY_IMAGE"], "skerry")
    settings = (f"--set=image={image}", f"--set=outer.rounds={ROUNDS}")

    skerry("plan", SPEC, *settings, "--out", "run.plan")
    assert skerry_containers.calls.writes == []

    skerry("apply", "run.plan")
    jobs = json.loads(skerry("status", SPEC, "--json"))["jobs"]
    assert [skerry_containers.batch.wait(job["job"], within_s=300) for job in jobs] == ["SUCCEEDED"] * len(jobs)
    assert json.loads(skerry("status", SPEC, "--json"))["run"]["closed"] == ROUNDS

    skerry("destroy", SPEC, "--yes", "--data")
    assert skerry_containers.inventory() == {}
