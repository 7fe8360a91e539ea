"""Runs the handler suite of all clouds against a Google project."""

from __future__ import annotations

from typing import ClassVar

from tests.infra.clouds.google.kit import OTHER, REGION, RUN
from tests.infra.handlers import HandlerSuite

from skerry.infra.clouds.google.session import Google


class GoogleHandlerSuite(HandlerSuite[Google]):
    RUN: ClassVar = RUN
    OTHER: ClassVar = OTHER
    # A run's groups may be in several clouds.
    REGIONS: ClassVar = (REGION, "eu-central-1")
    # A label has no room for a run's whole address.
    STRANGER: ClassVar = "with the label other-.*"
    EXTRA: ClassVar = {"team": "Research & Co"}
