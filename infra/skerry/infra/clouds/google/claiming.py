"""Marks what is there as a run's own: `skerry import`. Labels where there are labels, a description elsewhere.

Jobs are left out: a job that carries no label of the run was not started for it. So are a bucket's bindings, which are
known by their own titles alone, and what is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.identity import path_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.handler import Seen, Wanted


def claim(google: Google, wanted: Wanted, seen: Seen) -> None:
    """Put this run's mark on what `wanted` names, beside what it has. seen: what was read of it."""
    del seen
    name = wanted.name
    match wanted.resource.KIND:
        case "google_bucket":
            # A patch of labels leaves those that it does not name.
            google.call(
                "storage", "PATCH", f"storage/v1/b/{quote(name, safe='')}", body={"labels": marks.labels(wanted)}
            )
        case "google_repository":
            place = f"projects/{google.project}/locations/{wanted.resource.region}/repositories/{name}"
            kept = google.call("artifactregistry", "GET", f"v1/{place}").get("labels", {})
            body = {"labels": {**kept, **marks.labels(wanted)}}
            google.call("artifactregistry", "PATCH", f"v1/{place}", body=body, query={"updateMask": "labels"})
        case "google_service_account":
            place = path_of(name, google.project)
            described = marks.description(wanted, str(google.call("iam", "GET", place).get("description", "")))
            body = {"serviceAccount": {"description": described}, "updateMask": "description"}
            google.call("iam", "PATCH", place, body=body)
        case "google_pool":
            _describe(google, wanted, f"workloadIdentityPools/{name}")
        case "google_pool_provider":
            pool, _, provider = name.partition("/")
            _describe(google, wanted, f"workloadIdentityPools/{pool}/providers/{provider}")
        case kind:
            raise Invalid(f"{kind} cannot be imported; `skerry apply` makes one")


def _describe(google: Google, wanted: Wanted, below: str) -> None:
    place = f"v1/projects/{google.project}/locations/global/{below}"
    described = marks.description(wanted, str(google.call("iam", "GET", place).get("description", "")))
    told = google.call("iam", "PATCH", place, body={"description": described}, query={"updateMask": "description"})
    google.finished("iam", told, f"{wanted.name} is marked")
