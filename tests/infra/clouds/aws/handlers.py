"""Runs the handler suite of all clouds against an AWS account."""

from __future__ import annotations

import re
from typing import ClassVar

from tests.infra.clouds.aws.account import OTHER, REGION, RUN
from tests.infra.handlers import HandlerSuite

from skerry.infra.clouds.aws.session import Aws


class AwsHandlerSuite(HandlerSuite[Aws]):
    RUN: ClassVar = RUN
    OTHER: ClassVar = OTHER
    REGIONS: ClassVar = (REGION,)
    STRANGER: ClassVar = re.escape(OTHER)
    EXTRA: ClassVar = {"team": "Research: A+B"}
