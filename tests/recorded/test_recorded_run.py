"""Behaviour stays as it was recorded: all records and digests of scripted runs, and an old run's bucket is continued.

To write the recordings anew, but for the old bucket: `python -m tests.recorded.test_recorded_run`.
The old bucket holds late work, which newer versions drop (decision 0017); late.json was recorded since.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tarfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.recorded.replicas import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HERE: Final = Path(__file__).parent
OLD_BUCKET: Final = HERE / "old_run.tar.gz"
OLD_ROUNDS: Final = 7  # closed in the old bucket; the next one is half trained
ROUNDS: Final = 10
SLOTS: Final = ("r-0", "r-1", "r-2")
NOT_FIXED: Final[Mapping[str, tuple[str, ...]]] = {
    "members": ("host", "process"),  # of this machine
    "heartbeats": ("sequence", "uploaded_bytes", "downloaded_bytes"),  # quick changes share a beat; see receipts
    "receipts": ("requests", "uploaded_bytes", "downloaded_bytes"),  # they count polls and heartbeats
    "events": ("why",),  # words for people
}
RENAMED_EVENTS: Final[Mapping[str, str]] = {  # new names, by the recorded ones
    "drifted": "rounding_drift",
    "garbage_failed": "garbage_collection_failed",
    "private_failed": "local_state_failed",
    "private_fresh": "local_state_missing",
    "private_loaded": "local_state_loaded",
    "private_saved": "local_state_saved",
    "round_cut_short": "round_ended_early",
    "unfinished_dropped": "unfinished_round_dropped",
    "unfinished_failed": "unfinished_round_failed",
    "unfinished_resumed": "unfinished_round_resumed",
    "unfinished_saved": "unfinished_round_saved",
}

compact = partial(json.dumps, separators=(",", ":"), ensure_ascii=False)


def close(run: Run, rounds: int = 1, slots: tuple[str, ...] = SLOTS) -> Run:
    for _ in range(rounds):
        run.close_round(*slots)
    return run


def kills(uri: str) -> Run:
    """Killed in a round and back in it, killed after its contribution, and away for two rounds."""
    run = close(Run(uri, every=4).start(*SLOTS), 2)
    run.step("r-2")
    run.step("r-2")
    run.save("r-2")
    run.kill("r-2")
    close(run.start("r-2"))
    run.contribute_and_die("r-1")
    close(run.start("r-1"))
    run.step("r-2")
    run.kill("r-2")
    close(run, 2, ("r-0", "r-1"))
    return close(run.start("r-2"), 2)


def late(uri: str) -> Run:
    """r-2 comes late three times. All save the round after OLD_ROUNDS."""
    run = Run(uri, spread=0).start(*SLOTS)
    for _ in range(3):
        run.step("r-2")
        run.close_round("r-0", "r-1")
    close(run, OLD_ROUNDS - 3)
    run.step(*SLOTS)
    run.step(*SLOTS)
    run.save(*SLOTS)
    return run


def short(uri: str) -> Run:
    """r-2 ends a round early, with one of its steps, because the others wait."""
    run = close(Run(uri).start(*SLOTS))
    run.step("r-2")
    run.close_round(*SLOTS, short="r-2")
    return close(run)


def ranks(uri: str) -> Run:
    """Two replicas of two ranks; one replica is killed as a whole."""
    run = close(Run(uri, fragments=1, ranks=2).start(*SLOTS[:2]), 3, SLOTS[:2])
    run.step("r-1")
    run.kill("r-1")
    return close(run.start("r-1"), 2, SLOTS[:2])


SCRIPTS: Final[Mapping[str, Callable[[str], Run]]] = {
    "kills": kills,
    "late": lambda uri: close(late(uri), ROUNDS - OLD_ROUNDS),
    "short": short,
    "ranks": ranks,
    "local_sgd": lambda uri: close(Run(uri, fragments=0, codec="bf16").start(*SLOTS), 4),
}


def fixed(fields: Mapping[str, Any], names: tuple[str, ...] = ()) -> dict[str, object]:
    """Without these fields, and with five digits of a norm: it is a sum whose order depends on the processor."""
    # What was recorded has no `software` of a start and no `memory` of a heartbeat, which are of this machine, and no
    # seal, which is of other fields.
    recorded = fields.keys() - {"software", "memory", "seal"}
    result = {name: "not fixed" if name in names else fields[name] for name in fields if name in recorded}
    return result | ({"norm": float(f"{fields['norm']:.5g}")} if fields.get("norm") else {})


def shown(objects: Mapping[str, bytes]) -> dict[str, object]:
    """Records as JSON if that determines all of their bytes; else a digest."""
    texts: dict[str, object] = {key: hashlib.sha256(data).hexdigest() for key, data in objects.items()}
    for key, data in objects.items():
        if key.endswith(".json") and compact(record := json.loads(data)) == data.decode():
            texts[key] = fixed(record, NOT_FIXED.get(key.split("/")[0], ()))
    return texts


def bucket(run: Run) -> dict[str, bytes]:
    return {entry.key: bytes(run.store.read(entry.key) or b"") for entry in run.store.list("")}


def record(script: Callable[[str], Run], uri: str) -> dict[str, object]:
    """Every object at the end of the run, the events by name, and the parameters that each rank holds."""
    logger, handler, events = logging.getLogger("skerry"), logging.Handler(), list[tuple[str, str]]()
    handler.emit = lambda entry: events.append((entry.event, compact(fixed(entry.fields, NOT_FIXED["events"]))))  # type: ignore[attr-defined]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run = script(uri)
        recording: dict[str, Any] = {**run.end(), **shown(bucket(run))}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for name, fields in sorted(events):  # the order in which threads log is not fixed
        recording.setdefault(f"events/{name}", []).append(json.loads(fields))
    return recording


def ending(recording: Mapping[str, Any]) -> dict[str, object]:
    """The results of the rounds after the old bucket, and the parameters at the end."""
    first, names = f"receipts/{OLD_ROUNDS:08d}/", ("averages", "state", "norm", "contributed")
    receipts = [key for key in recording if key.startswith("receipts/") and key > first]
    ends = {key: recording[key] for key in recording if key.startswith("parameters/")}
    return {key: {name: recording[key][name] for name in names} for key in receipts} | ends


def recorded(name: str) -> dict[str, object]:
    recording = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    names = {f"events/{old}": f"events/{new}" for old, new in RENAMED_EVENTS.items()}
    return {names.get(key, key): value for key, value in recording.items()}


def first_difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """The earliest record that differs, and its first field. Records that only one side has come last."""
    keys = [key for key in before | now if compact(before.get(key)) != compact(now.get(key))]
    keys.sort(key=lambda key: (re.findall(r"^\w+/(\d{8})", key) or ["no round"], "commits" in key, key))
    key = min(keys, key=lambda key: (key in before) != (key in now), default=None)
    if key is None:
        return None
    old, new = before.get(key), now.get(key)
    if isinstance(old, dict) and isinstance(new, dict):
        field = next(
            (name for name in old | new if compact(old.get(name)) != compact(new.get(name))), "order of fields"
        )
        return f"{key}: {field}: was {compact(old.get(field, list(old)))}, is {compact(new.get(field, list(new)))}"
    if isinstance(old, list) and isinstance(new, list):
        gone, come = [entry for entry in old if entry not in new], [entry for entry in new if entry not in old]
        return f"{key}: {len(old)}, now {len(new)}; gone: {gone[:1]}, new: {come[:1]}"
    return f"{key}: was {compact(old)}, is {compact(new)}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_recorded_run_reproduces_every_record(name: str, tmp_path: Path) -> None:
    now = record(SCRIPTS[name], f"memory://{tmp_path}/unnamed")
    assert (difference := first_difference(recorded(name), now)) is None, difference


def test_old_bucket_is_continued_to_the_end_of_the_run(tmp_path: Path) -> None:
    with tarfile.open(OLD_BUCKET) as archive:
        archive.extractall(tmp_path, filter="data")
    run = Run(tmp_path.as_uri(), spread=0)
    before = bucket(run)
    parameters = close(run.start(*SLOTS), ROUNDS - OLD_ROUNDS).end()
    after = bucket(run)
    now = ending(shown(after) | parameters)
    assert (difference := first_difference(recorded("old_run"), now)) is None, difference
    changed = [key for key in before if before[key] != after.get(key) and not key.startswith("heartbeats/")]
    assert not [key for key in changed if key in after or not re.match("checkpoints|payloads|private|unfinished", key)]


def main() -> None:
    recordings = {name: record(script, f"memory://{name}/unnamed") for name, script in SCRIPTS.items()}
    for name, recording in recordings.items():
        lines = ",\n".join(f"{json.dumps(key)}: {compact(recording[key])}" for key in sorted(recording))
        (HERE / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
