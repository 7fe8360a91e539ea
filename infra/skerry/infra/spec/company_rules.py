"""The sections `aws` and `google` of a spec: what a company demands of everything that is created in its accounts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from skerry.infra.spec.section import Section, shaped

_BOUNDARY_ARN = shaped(
    r"arn:aws[a-z-]*:iam::(aws|\d{12}):policy/[A-Za-z0-9_+=,.@/-]+",
    "the ARN of a policy, such as arn:aws:iam::123456789012:policy/boundary",
)
_KEY_ARN = shaped(
    r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+",
    "the ARN of a key, such as arn:aws:kms:us-east-1:123456789012:key/1234abcd",
)
_ROLE_ARN = shaped(
    r"arn:aws[a-z-]*:iam::\d{12}:role/[A-Za-z0-9_+=,.@/-]+",
    "the ARN of a role, such as arn:aws:iam::123456789012:role/deployer",
)
_ACCOUNT_ADDRESS = shaped(
    r"[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com",
    "the address of a service account, such as deployer@acme.iam.gserviceaccount.com",
)
_ROLE_PATH = shaped(r"/([A-Za-z0-9_+=,.@-]+/)*", "a path such as /teams/research/")
_KEY_NAME = shaped(
    r"projects/[a-z0-9-]+/locations/[a-z0-9-]+/keyRings/[A-Za-z0-9_-]+/cryptoKeys/[A-Za-z0-9_-]+",
    "the name of a key, such as projects/acme/locations/us/keyRings/runs/cryptoKeys/runs",
)


class AwsRules(Section):
    """The rules of a company for what a run creates in AWS, and the login of the commands that do so."""

    profile: Annotated[str, Field(min_length=1, examples=["prod"])] | None = None
    """The profile in `~/.aws/config` whose credentials commands with this spec use, instead of the environment's."""
    assume_role: Annotated[str, _ROLE_ARN, Field(examples=["arn:aws:iam::123456789012:role/deployer"])] | None = None
    """The role that commands with this spec assume, for all calls to AWS and for the store. Jobs have other roles."""
    permissions_boundary: (
        Annotated[str, _BOUNDARY_ARN, Field(examples=["arn:aws:iam::123456789012:policy/boundary"])] | None
    ) = None
    """The policy that bounds the rights of every role that is created; null sets none."""
    kms_key: Annotated[str, _KEY_ARN, Field(examples=["arn:aws:kms:us-east-1:123456789012:key/1234abcd"])] | None = None
    """The key that encrypts the bucket, which replicas may use through S3. Name it for a bucket of yours as well."""
    role_path: Annotated[str, _ROLE_PATH, Field(examples=["/teams/research/"])] = "/skerry/"
    """The path of the roles that are created."""
    allowed_accounts: tuple[Annotated[str, shaped(r"\d{12}", "the 12 digits of an account")], ...] = ()
    """The only accounts in which a command with this spec may look up or change anything; empty allows all."""
    undelete_days: Annotated[int, Field(ge=1, le=365, examples=[1])] | None = None
    """Keep what replicas delete or replace in the bucket for so many days; null keeps none. Costs its storage."""


class GoogleRules(Section):
    """The rules of a company for what a run creates in Google Cloud, and the login of the commands that do so."""

    impersonate: Annotated[str, _ACCOUNT_ADDRESS, Field(examples=["deployer@acme.iam.gserviceaccount.com"])] | None = (
        None
    )
    """The service account that commands with this spec act as, for all calls to Google Cloud and for the store."""
    kms_key: (
        Annotated[str, _KEY_NAME, Field(examples=["projects/acme/locations/us/keyRings/runs/cryptoKeys/runs"])] | None
    ) = None
    """The key that encrypts the bucket. The service agent of Cloud Storage must be allowed to use it."""
    allowed_projects: tuple[Annotated[str, shaped(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "the id of a project")], ...] = ()
    """The only projects in which a command with this spec may look up or change anything; empty allows all."""
    undelete_days: Annotated[int, Field(ge=7, le=90, examples=[7])] | None = None
    """Keep what replicas delete or replace in the bucket for so many days; null keeps none. Costs its storage."""
