"""Maps AWS error codes to the caller's next step, and operations to the names of their IAM permissions. Does no I/O.

Sources: each service's "Common errors" and API reference; botocore's own list of what is throttling.
"""

from __future__ import annotations

import enum
import re
from typing import Final


class Kind(enum.Enum):
    """The caller's next step."""

    BUSY = "busy"
    DENIED = "denied"
    EXPIRED = "expired"
    ABSENT = "absent"
    TAKEN = "taken"
    REFUSED = "refused"


THROTTLED: Final = frozenset(
    {
        "BandwidthLimitExceeded",
        "EC2ThrottledException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
"""Rejected before anything was done: too many requests."""
_BUSY: Final = THROTTLED | {
    "ConcurrentModification",
    "ConcurrentModificationException",
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "OperationAborted",
    "OperationAbortedException",
    "PriorRequestNotComplete",
    "RequestTimeout",
    "ServerException",
    "ServiceUnavailable",
    "ServiceUnavailableException",
    "TransactionInProgressException",
}
_DENIED: Final = frozenset(
    {
        "403",
        "AccessDenied",
        "AccessDeniedException",
        "AllAccessDisabled",
        "Forbidden",
        "NotAuthorized",
        "UnauthorizedAccess",
        "UnauthorizedOperation",
    }
)
_EXPIRED: Final = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "MissingAuthenticationToken",
        "OptInRequired",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)
_ABSENT: Final = frozenset(
    {
        "404",
        "ImageNotFoundException",
        "LayersNotFoundException",
        "LifecyclePolicyNotFoundException",
        "NoSuchBucket",
        "NoSuchBucketPolicy",
        "NoSuchEntity",
        "NoSuchKey",
        "NoSuchLifecycleConfiguration",
        "NoSuchPublicAccessBlockConfiguration",
        "NoSuchTagSet",
        "NoSuchUpload",
        "NotFound",
        "OwnershipControlsNotFoundError",
        "RepositoryNotFoundException",
        "ResourceNotFoundException",
        "ServerSideEncryptionConfigurationNotFoundError",
    }
)
_TAKEN: Final = frozenset(
    {
        "BucketAlreadyExists",
        "BucketAlreadyOwnedByYou",
        "BucketNotEmpty",
        "DeleteConflict",
        "DependencyViolation",
        "EntityAlreadyExists",
        "InvalidGroup.Duplicate",
        "InvalidLaunchTemplateName.AlreadyExistsException",
        "InvalidPermission.Duplicate",
        "PreconditionFailed",
        "RepositoryAlreadyExistsException",
        "RepositoryNotEmptyException",
        "ResourceAlreadyExistsException",
        "ResourceInUse",
        "ResourceInUseException",
    }
)
# InvalidGroup.NotFound, InvalidLaunchTemplateId.NotFound: EC2 has one for each of its kinds.
_EC2_ABSENT: Final = re.compile(r"Invalid\w+\.NotFound\w*")

# Operations that need a permission with another name (Service Authorization Reference).
_ACTIONS: Final = {
    ("s3", "head_bucket"): "s3:ListBucket",
    ("s3", "list_objects_v2"): "s3:ListBucket",
    ("s3", "list_object_versions"): "s3:ListBucketVersions",
    ("s3", "list_multipart_uploads"): "s3:ListBucketMultipartUploads",
    ("s3", "delete_objects"): "s3:DeleteObject",
    ("s3", "get_bucket_encryption"): "s3:GetEncryptionConfiguration",
    ("s3", "put_bucket_encryption"): "s3:PutEncryptionConfiguration",
    ("s3", "get_bucket_lifecycle_configuration"): "s3:GetLifecycleConfiguration",
    ("s3", "put_bucket_lifecycle_configuration"): "s3:PutLifecycleConfiguration",
    ("s3", "get_public_access_block"): "s3:GetBucketPublicAccessBlock",
    ("s3", "put_public_access_block"): "s3:PutBucketPublicAccessBlock",
}


def kind_of(code: str, status: int, message: str) -> Kind:
    """The kind of an error with this code, HTTP status and message."""
    # IAM and S3 use one code for a busy service and for a limit of the account; only the text tells them apart.
    if code in _BUSY or status == 429 or status >= 500 or (code == "Throttling" or "Rate exceeded" in message):
        return Kind.BUSY
    if code in _EXPIRED:
        return Kind.EXPIRED
    if code in _DENIED or (status == 403 and code not in _TAKEN | _ABSENT):
        return Kind.DENIED
    if code in _ABSENT or _EC2_ABSENT.fullmatch(code) or status == 404:
        return Kind.ABSENT
    return Kind.TAKEN if code in _TAKEN else Kind.REFUSED


def action_of(service: str, operation: str) -> str:
    """The permission that an operation in boto3's spelling needs: iam:CreateRole."""
    plain = f"{service}:{''.join(part.capitalize() for part in operation.split('_'))}"
    return _ACTIONS.get((service, operation), plain)
