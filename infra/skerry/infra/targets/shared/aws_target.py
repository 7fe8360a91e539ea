"""Implements the part of Target that the targets on AWS have in common. Imports no SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.run_bucket_and_image_repository import image_checks
from skerry.infra.clouds.aws.s3 import Buckets
from skerry.infra.clouds.aws.secret_and_data_policies import buckets_of
from skerry.infra.clouds.aws.session import Account
from skerry.infra.clouds.aws.tag_imported import claim
from skerry.infra.clouds.bucket_and_image_checks import data_checks
from skerry.infra.clouds.cross_cloud import google_store
from skerry.infra.clouds.google import run_bucket_and_image_repository as google_home
from skerry.infra.clouds.handler_helpers import BucketLook
from skerry.infra.cost import prices
from skerry.infra.targets.shared.aws_replica_roles import is_in_google, is_in_s3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.clouds.cross_cloud import GoogleStore
    from skerry.infra.clouds.google.run_bucket_and_image_repository import GoogleHome
    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.cost.prices import Prices
    from skerry.infra.provision.handler import Desired, Observed
    from skerry.infra.provision.target_and_store_interfaces import Check, RunContext
    from skerry.infra.spec.model import Replicas


class AwsTarget:
    """See Target.

    own_prices: the user's file of prices. google: the cloud of a store in Cloud Storage.
    """

    def __init__(
        self,
        aws: Aws,
        own_prices: Path | None = None,
        google: GoogleHome | None = None,
    ) -> None:
        self.aws = aws
        self._own_prices = own_prices
        self._google = google

    @classmethod
    def open(cls, access: OperatorAccess) -> Self:
        """Open the target. Does no I/O."""
        return cls(access.aws, prices.own_file(access.environment), google_home.open_home(access))

    def identity(self) -> Mapping[str, str]:
        """See Target.identity."""
        return {"aws": self.aws.identity().account}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        claim(self.aws, desired, observed)

    def _account(self) -> Account:
        caller = self.aws.identity()
        return Account(number=caller.account, partition=caller.partition)

    def _prices(self) -> Prices:
        return prices.load("aws", self._own_prices)

    def _image_checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """Check the images of the groups, unless the store is in S3: then the store's cloud checks them."""
        if not is_in_s3(context):
            yield from image_checks(self.aws, context.images_of(groups))

    def _data_checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """Check the buckets in S3 with data of the groups."""

        def look(bucket: str, region: str) -> BucketLook | None:
            bucket_region = Buckets(self.aws).region_of(bucket, region)
            return None if bucket_region is None else BucketLook(region=bucket_region, owner=None)

        yield from data_checks(context, groups, buckets_of, look)

    def _google_store(self, context: RunContext) -> GoogleStore | None:
        """Return the store and the mirrors that are in Cloud Storage; None without any."""
        if not is_in_google(context) or self._google is None:
            return None
        return google_store(self._google, context)
