"""Settings of the cloud tests: the accounts they may use and their limits, from variables SKERRY_CLOUD_*.

Credentials are found as every other command finds them; that some are there is no leave to use them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.clocks import FastClock

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from skerry.runtime.clock import Clock

PREFIX: Final = "SKERRY_CLOUD_"
AWS_REGION: Final = "SKERRY_CLOUD_AWS_REGION"
AWS_BUCKET: Final = "SKERRY_CLOUD_AWS_BUCKET"
AWS_IMAGE: Final = "SKERRY_CLOUD_AWS_IMAGE"
SAGEMAKER_USD: Final = "SKERRY_CLOUD_SAGEMAKER_USD"
GOOGLE_PROJECT: Final = "SKERRY_CLOUD_GOOGLE_PROJECT"
GOOGLE_REGION: Final = "SKERRY_CLOUD_GOOGLE_REGION"
GOOGLE_BUCKET: Final = "SKERRY_CLOUD_GOOGLE_BUCKET"
GOOGLE_IMAGE: Final = "SKERRY_CLOUD_GOOGLE_IMAGE"
IMAGE: Final = "SKERRY_CLOUD_IMAGE"
KEY_ID: Final = "SKERRY_CLOUD_KEY_ID"
SECRET_KEY: Final = "SKERRY_CLOUD_SECRET_KEY"  # noqa: S105  the name of a variable
KUBERNETES_NAMESPACE: Final = "SKERRY_CLOUD_KUBERNETES_NAMESPACE"
KUBERNETES_SECRET: Final = "SKERRY_CLOUD_KUBERNETES_SECRET"  # noqa: S105  the name of a variable
SLURM_PYTHON: Final = "SKERRY_CLOUD_SLURM_PYTHON"
SLURM_SETUP: Final = "SKERRY_CLOUD_SLURM_SETUP"
HF_NAMESPACE: Final = "SKERRY_CLOUD_HF_NAMESPACE"
MODAL_ENVIRONMENT: Final = "SKERRY_CLOUD_MODAL_ENVIRONMENT"
MODAL_SECRET: Final = "SKERRY_CLOUD_MODAL_SECRET"  # noqa: S105  the name of a variable
MAX_USD: Final = "SKERRY_CLOUD_MAX_USD"
FOLDER: Final = "SKERRY_CLOUD_FOLDER"
HASTE: Final = "SKERRY_CLOUD_HASTE"
SAGEMAKER: Final = "ml.m5.large"
MEANINGS: Final[Mapping[str, str]] = {
    AWS_REGION: "a region, us-east-1: in it things are made in AWS",
    AWS_BUCKET: "a bucket that is there, in that region; without it one is made",
    AWS_IMAGE: "the replica image for CPUs in ECR, by its digest",
    SAGEMAKER_USD: f"what an hour of {SAGEMAKER} costs in that region: 0.115; no table has it",
    GOOGLE_PROJECT: "a project by its id: in it things are made in Google Cloud",
    GOOGLE_REGION: "a region, us-central1, for what is made in Google Cloud",
    GOOGLE_BUCKET: "a bucket that is there; without it one is made",
    GOOGLE_IMAGE: "the replica image for CPUs in Artifact Registry, by its digest",
    IMAGE: "the replica image for CPUs in a public registry, by its digest",
    KEY_ID: "the id of a key that opens the bucket in S3, for jobs of Hugging Face",
    SECRET_KEY: "the key with that id",
    KUBERNETES_NAMESPACE: "a namespace of the current cluster: in it jobs are made",
    KUBERNETES_SECRET: "a Secret in that namespace with keys that open the bucket in S3",
    SLURM_PYTHON: "a Python with skerry[runtime] that all nodes see; jobs are submitted on this machine",
    SLURM_SETUP: "a line of bash that exports keys of the bucket in S3: . ~/store-keys",
    HF_NAMESPACE: "a user or an organization of Hugging Face: in it jobs are made",
    MODAL_ENVIRONMENT: "an environment of Modal, main: in it sandboxes are made",
    MODAL_SECRET: "a Secret of that environment with keys that open the bucket in S3",
    MAX_USD: "what jobs may cost in all, in US dollars: 40",
    FOLDER: "a folder for the specs of what is not gone yet; without it the one for temporary files",
    HASTE: "for a rehearsal in which no machine has to start: how many times as fast to wait",
}
# Three suites of executors, and the runs that have prices: one in each service, in the clouds together, and on spot.
SHARES: Final = 9
# SageMaker takes three to ten minutes to start a job, Batch and Vertex AI about as long; some are started twice.
PATIENCE: Final = timedelta(minutes=40)
_LOOKS: Final = Backoff(first=1.0, cap=15.0)


@dataclass(frozen=True)
class Settings:
    """given: the variables that are set, and not empty."""

    given: Mapping[str, str]

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Raises Invalid for a name that is none: what it asks for would not be heard."""
        given = {name: text for name, text in environment.items() if name.startswith(PREFIX) and text}
        if unknown := sorted(given.keys() - MEANINGS.keys()):
            raise Invalid(f"no such setting: {', '.join(unknown)}; there are {', '.join(MEANINGS)}")
        return cls(given)

    def need(self, name: str) -> str:
        """Skips the test, and says what to set."""
        if name not in self.given:
            pytest.skip(f"set {name} to {MEANINGS[name]}")
        return self.given[name]

    @property
    def share_usd(self) -> float:
        """The budget of each part of these tests that starts jobs."""
        return float(self.need(MAX_USD)) / SHARES

    def write_prices(self, path: Path) -> None:
        """Write a file with the price that the table lacks, for `prices.VARIABLE`."""
        usd, region = self.given.get(SAGEMAKER_USD), self.given.get(AWS_REGION)
        machines = {} if usd is None or region is None else {region: {"machines": {SAGEMAKER: float(usd)}}}
        path.write_text(json.dumps({"format": 1, "cloud": "aws", "regions": machines}))

    def clock(self) -> Clock:
        """The clock of all waits here."""
        return FastClock(float(self.given[HASTE])) if HASTE in self.given else SystemClock()


def suffix() -> str:
    """Return the suffix that makes a run of these tests unique."""
    return SystemClock().nonce()[:6]


def until(clock: Clock, look: Callable[[], object]) -> None:
    """Stay until it is so, for as long as a cloud may need."""
    wait_until(clock, lambda: look() or None, clock.now() + PATIENCE.total_seconds(), _LOOKS)
