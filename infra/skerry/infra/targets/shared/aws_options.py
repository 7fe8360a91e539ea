"""Types and checks of options that the targets on AWS have in common. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from skerry.infra.spec.section import shaped
from skerry.infra.targets.shared import check_bucket_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem

MOST_ROLES: Final = 200
"""The most roles for single replicas that one kind of target creates in a run (decision 0005)."""
_LONGEST_TAG: Final = 256

REGION: Final = shaped(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}", "a region of AWS")
Subnets = Annotated[
    tuple[Annotated[str, shaped(r"subnet-[0-9a-f]+", "the id of a subnet")], ...], Field(min_length=1, max_length=16)
]
SecurityGroups = Annotated[
    tuple[Annotated[str, shaped(r"sg-[0-9a-f]+", "the id of a security group")], ...], Field(min_length=1, max_length=5)
]


def store_problems(document: Document) -> Iterator[Problem]:
    """Jobs on AWS reach a bucket by their role: in S3, or in Cloud Storage by a trust between the clouds."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    bucket, example = rest.partition("/")[0], f"{scheme}://my-bucket/runs"
    if scheme == "gs":
        problem = check_bucket_name.gcs_problem(bucket)
    elif scheme == "s3":
        problem = check_bucket_name.s3_problem(bucket)
    else:
        problem, example = "jobs on AWS reach a store in S3 or Cloud Storage", "s3://my-bucket/runs"
    run_uri = f"{store}/{document.value(('run',))}"
    if problem is None and (not check_bucket_name.PREFIX.fullmatch(rest) or len(run_uri) > _LONGEST_TAG):
        problem = (
            f"the run's URI is a tag of all resources: letters, digits, '.', '_', '-' and '/', {_LONGEST_TAG} at most"
        )
    if problem is not None:
        yield document.problem(("store",), f"{problem}; write e.g. store: {example}")


def tag_problems(document: Document) -> Iterator[Problem]:
    """AWS reserves the names of tags that begin with `aws:`."""
    tags = document.value(("tags",))
    for name in tags if isinstance(tags, dict) else ():
        if name.lower().startswith("aws:"):
            text = f"must not begin with aws:, which AWS reserves ({name!r}); write e.g. tags: {{team: research}}"
            yield document.problem(("tags",), text)


def role_problems(document: Document, groups: Sequence[int], *, byo: str, default: str) -> Iterator[Problem]:
    """IAM allows 1,000 roles in an account, and other users of the account need some.

    byo: the name of the option with the user's own role. default: the default of the option `role`.
    """
    own_roles: list[tuple[int, int]] = []
    for index in groups:
        target = ("replicas", index, "target")
        count = document.integer(("replicas", index, "count"))
        one_each = (document.value((*target, "role")) or default) == "replica"
        if one_each and not document.value((*target, "byo", byo)) and count is not None:
            own_roles.append((index, count))
    total = sum(count for _, count in own_roles)
    if total > MOST_ROLES:
        index, _ = max(own_roles, key=lambda pair: pair[1])
        text = f"{total} replicas would need a role each, and IAM allows 1,000 in an account"
        yield document.problem(("replicas", index, "target", "role"), f"{text}; above {MOST_ROLES} write role: group")
