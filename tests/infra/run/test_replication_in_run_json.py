"""`replication:` of a spec in run.json, which replicas read, and as a part of what a run was started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import write_spec
from tests.support.clocks import FakeClock

from skerry.infra import targets
from skerry.infra.run.run_record import check_not_lost, create_or_load_run
from skerry.infra.spec import model
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.store import Store

LINE = "{to: gs://acme-dr/runs, every: 10, log: every round, private: false, max_usd: 50}"
MIRROR = "gs://acme-dr/runs/test-run"


def load(folder: Path, *overrides: str, line: str = LINE) -> SpecFile:
    path = write_spec(folder)
    path.write_text(f"{path.read_text()}replication: [{line}]\n")
    return model.load(path, targets.kinds(), overrides)


def test_lines_of_the_spec_are_in_run_json(tmp_path: Path) -> None:
    spec = load(tmp_path)
    run, _ = create_or_load_run(open_store(spec.run_uri), spec, FakeClock(), usd_per_gb={MIRROR: 0.09})
    expected = MirrorSettings(uri=MIRROR, every=10, each_round=True, private=False, max_usd=50, usd_per_gb=0.09)
    assert run.mirrors == (expected,)
    assert run.peers is None


def test_other_price_continues_the_run_and_another_line_does_not(tmp_path: Path) -> None:
    spec = load(tmp_path)
    store = open_store(spec.run_uri)
    create_or_load_run(store, spec, FakeClock(), usd_per_gb={MIRROR: 0.09})
    _, existed = create_or_load_run(store, load(tmp_path, "replication[0].region=europe-west1"), FakeClock())
    assert existed
    with pytest.raises(Invalid) as caught:
        create_or_load_run(store, load(tmp_path, "replication[0].every=5"), FakeClock())
    before, after = (
        f"{{uri: {MIRROR}, every: {every}, each_round: true, private: false, max_usd: 50}}" for every in (10, 5)
    )
    assert f"  replication: {before} -> {after} (" in str(caught.value)
    assert "fixed when the run starts" in str(caught.value)
    with pytest.raises(Invalid, match=r"replication: .* -> null"):
        create_or_load_run(store, model.load(write_spec(tmp_path), targets.kinds()), FakeClock())


def test_new_run_is_refused_while_a_mirror_has_it(tmp_path: Path) -> None:
    spec, mirror = load(tmp_path), MemoryStore()
    check_not_lost(spec, lambda _: mirror)
    other, _ = create_or_load_run(open_store(spec.run_uri), spec, FakeClock())
    mirror.create(keys.RUN, other.to_bytes())
    with pytest.raises(Invalid, match=f"its mirror {MIRROR} has one; continue it with `skerry restore`"):
        check_not_lost(spec, lambda _: mirror)


def test_mirror_that_cannot_be_read_does_not_stop_a_new_run(tmp_path: Path) -> None:
    tried: list[str] = []

    def unreachable(uri: str) -> Store:
        tried.append(uri)
        raise Unauthorized(uri)

    check_not_lost(load(tmp_path), unreachable)
    assert tried == [MIRROR]
