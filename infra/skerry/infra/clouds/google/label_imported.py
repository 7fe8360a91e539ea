"""Labels existing Google resources as a run's own, for `skerry import`; those without labels in their description.

Jobs cannot be imported: a job without the run's label was not started for it. Neither can a bucket's bindings, which
are identified by their titles only, and shared resources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.service_accounts import path_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import Desired, Observed


def claim(google: Google, desired: Desired, observed: Observed) -> None:
    """Add this run's labels to the resource that `desired` names."""
    del observed
    name = desired.name
    match desired.resource.KIND:
        case "google_bucket":
            # A patch of labels keeps those that it does not name.
            google.call(
                "storage",
                "PATCH",
                f"storage/v1/b/{quote(name, safe='')}",
                body={"labels": owner_labels.labels(desired)},
            )
        case "google_repository":
            place = f"projects/{google.project}/locations/{desired.resource.region}/repositories/{name}"
            existing = google.call("artifactregistry", "GET", f"v1/{place}").get("labels", {})
            body = {"labels": {**existing, **owner_labels.labels(desired)}}
            google.call("artifactregistry", "PATCH", f"v1/{place}", body=body, query={"updateMask": "labels"})
        case "google_service_account":
            place = path_of(name, google.project)
            described = owner_labels.description(desired, str(google.call("iam", "GET", place).get("description", "")))
            body = {"serviceAccount": {"description": described}, "updateMask": "description"}
            google.call("iam", "PATCH", place, body=body)
        case "google_pool":
            _describe(google, desired, f"workloadIdentityPools/{name}")
        case "google_pool_provider" | "google_pool_oidc_provider":
            pool, _, provider = name.partition("/")
            _describe(google, desired, f"workloadIdentityPools/{pool}/providers/{provider}")
        case kind:
            raise Invalid(f"{kind} cannot be imported; `skerry apply` creates one")


def _describe(google: Google, desired: Desired, below: str) -> None:
    place = f"v1/projects/{google.project}/locations/global/{below}"
    described = owner_labels.description(desired, str(google.call("iam", "GET", place).get("description", "")))
    operation = google.call("iam", "PATCH", place, body={"description": described}, query={"updateMask": "description"})
    google.finished("iam", operation, f"{desired.name} is labelled")
