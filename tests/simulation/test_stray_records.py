"""A compromised replica creates records of rounds far beyond the head, in runs with every other fault."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import TYPE_CHECKING

from tests.kit.records import commit
from tests.simulation.run import Simulation
from tests.simulation.scenario import draw
from tests.simulation.search import quiet

from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import CheckpointManifest

if TYPE_CHECKING:
    import pytest

SEEDS = range(40)
BEYOND = 10_000


def strand(simulation: Simulation, distance: int) -> None:
    """Create a commit of a round that no run here reaches, and after it a copy of the newest checkpoint."""
    engine = simulation.bucket.engine
    run = engine.read(keys.RUN)
    if run is None:
        return
    number = BEYOND + distance
    nonce = json.loads(bytes(run))["nonce"]
    engine.create(keys.commit(number), commit(number, run=nonce).to_bytes())
    manifests = [entry.key for entry in engine.list(keys.CHECKPOINTS) if entry.key.endswith(keys.MANIFEST)]
    if manifests:
        record = CheckpointManifest.model_validate_json(bytes(engine.read(manifests[-1]) or b""))
        for part in record.parts:
            body = engine.read(keys.checkpoint_part(keys.round_of(manifests[-1]), part.digest))
            engine.create(keys.checkpoint_part(number + 1, part.digest), body or b"")
        moved = record.model_copy(update={"round": number + 1, "seal": None}).sealed()
        engine.create(keys.checkpoint_manifest(number + 1), moved.to_bytes())
    simulation.world.fault("stray", "compromised", keys.commit(number))


def simulated(seed: int) -> tuple[int, list[str]]:
    """The number of times that stray records appeared, and the violations."""
    simulation = Simulation(draw(seed))
    chance = random.Random(f"stray {seed}")
    for distance in range(3):
        simulation.world.after(chance.uniform(0.0, 60.0), partial(strand, simulation, distance))
    result = simulation.run()
    return result.faults["stray"], list(result.violations)


def test_every_invariant_holds_while_stray_records_appear() -> None:
    with quiet():
        results = [simulated(seed) for seed in SEEDS]
    assert [violations for _, violations in results if violations] == []
    assert sum(appeared for appeared, _ in results) > len(SEEDS)


def test_search_sees_replicas_that_believe_a_stray_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLog, "is_backed", lambda *_: True)
    with quiet():
        assert any("gap" in text for seed in SEEDS for text in simulated(seed)[1])
