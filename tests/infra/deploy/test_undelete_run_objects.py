"""A replica deletes every checkpoint and payload; the operator brings them back, and training goes on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from moto.s3 import models as s3_models
from tests.infra.deploy.account import skerry, write_spec
from tests.kit.managers import Island, assert_same_parameters, wait_until_saved

from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

URI = "s3://acme-skerry/runs/tiny"


@pytest.mark.usefixtures("skerry_sandbox")
def test_deleted_checkpoints_come_back_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_spec(tmp_path, count=1)
    path.write_text(path.read_text() + "aws: {undelete_days: 2}\n")
    skerry("apply", str(path), "--auto-approve")
    assert "unchanged" in skerry("plan", str(path), "--detailed-exitcode").output
    with monkeypatch.context() as patch:
        earlier = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=3)
        patch.setattr(s3_models, "utcnow", lambda: earlier)
        store = open_store(URI)
        trained = Island(store, "b-0", minimum=1).train(3, close=False)
        wait_until_saved(trained)
        trained.stop()
    kept = {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}
    tensors = [key for key in kept if key.startswith((keys.PAYLOADS, keys.CHECKPOINTS))]
    for key in tensors:
        store.delete(key)
    assert skerry("doctor", str(path), code=1).output.count("missing-payload") > 0
    assert f"brought back: {len(tensors)} objects" in skerry("doctor", str(path), "--undelete", "1h").output
    assert {key: bytes(store.read(key) or b"") for key in tensors} == {key: kept[key] for key in tensors}
    again = Island(store, "b-0", minimum=1, seed=9)
    again.join()
    assert again.manager.current_step() == 3
    assert_same_parameters([again, trained])
    again.train(4)


def test_folder_and_address_without_a_spec_are_refused(tmp_path: Path) -> None:
    refused = skerry("doctor", tmp_path.as_uri(), "--undelete", "1h", code=2)
    assert "needs the spec of a run in a cloud" in refused.output + refused.stderr


@pytest.mark.usefixtures("skerry_sandbox")
def test_bucket_keeps_nothing_unless_the_spec_asks(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", str(write_spec(tmp_path, count=1)), "--auto-approve")
    versioning = skerry_sandbox.client("s3").get_bucket_versioning(Bucket="acme-skerry")
    assert versioning.get("Status") != "Enabled"
