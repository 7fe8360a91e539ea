"""Services are enabled, waited for, and never disabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.google.kit import RUN, check_golden, check_request, wanted
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.service_accounts import ServiceAccounts
from skerry.infra.clouds.google.services import Services, enable_request, service
from skerry.infra.clouds.google.session import Disabled, Google
from skerry.infra.provision.graph import Life

if TYPE_CHECKING:
    from tests.infra.kit import Listener

    from skerry.testing.google import GoogleSandbox

STS = service("sts", "lets jobs of AWS in")
ONE = wanted(STS)


def off(google: Google, name: str) -> None:
    google.call("serviceusage", "POST", f"v1/projects/{google.project}/services/{name}.googleapis.com:disable", body={})


def test_disabled_service_is_enabled_and_stays_enabled(google: Google, sandbox: GoogleSandbox) -> None:
    off(google, "sts")
    services = Services(google)
    assert list(services.read([ONE])) == [None]
    sandbox.settling = 3
    outputs = services.create(ONE)
    assert services.create(ONE) == services.update(ONE, ()) == outputs == {"name": "sts.googleapis.com"}
    services.delete(ONE.to_record(outputs))
    (seen,) = services.read([ONE])
    assert seen is not None
    assert (seen.outputs, seen.owner, dict(seen.settings)) == (outputs, None, {"region": ""})
    assert list(services.list_owned(RUN, ["us-east1"])) == []
    assert STS.LIFE is Life.SHARED


def test_services_are_read_with_one_request(google: Google, listener: Listener) -> None:
    names = ("iam", "sts", "logging", "nothing")
    read = Services(google).read([wanted(service(name, "x")) for name in names])
    assert [seen is not None for seen in read] == [True, True, True, False]
    assert len(listener.calls) == 1


def test_calls_to_a_newly_enabled_service_are_repeated(
    google: Google, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    off(google, "iam")
    Services(google).create(wanted(service("iam", "x")))
    off(google, "iam")
    clock = google.clock
    assert isinstance(clock, FakeClock)

    def enable() -> None:
        if len(clock.pauses) == 7:
            sandbox.enable("iam.googleapis.com")

    monkeypatch.setattr(clock, "on_pause", enable)
    assert ServiceAccounts(google).create(wanted(ACCOUNT))["email"]
    assert len(clock.pauses) == 7


def test_calls_to_a_disabled_service_are_not_repeated_forever(google: Google, sandbox: GoogleSandbox) -> None:
    off(google, "iam")
    google.enabled("iam")
    began = google.clock.now()
    with pytest.raises(Disabled, match="is not enabled in the project"):
        google.call("iam", "GET", f"v1/projects/{sandbox.project}/serviceAccounts")
    assert 200 < google.clock.now() - began < 400


def test_request_equals_the_golden_file() -> None:
    request = enable_request(ONE)
    check_request("serviceusage", "POST", "v1/projects/acme/services:batchEnable", request)
    check_golden("service", request)
