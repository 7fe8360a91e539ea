"""`skerry doctor --deep` on a real run's folder: payloads and checkpoints, sound and with each damage made by hand."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash
from rich.console import Console
from tests.infra.test_cli import skerry
from tests.support.clocks import FakeClock
from tests.support.logs import policy, start
from tests.support.managers import manager_of, together
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.infra.observe import showing
from skerry.infra.observe.doctor import visit
from skerry.infra.observe.findings import Bodies, Examination, Finding
from skerry.runtime import keys
from skerry.runtime.codec.container import seal
from skerry.runtime.codec.layout import BLOCK_BYTES, MAX_SLICES, Index, TensorSpec
from skerry.runtime.exchange import Load
from skerry.runtime.records import Contribution
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.records import Part
    from skerry.runtime.store import Data, Profile, Span

ROUNDS = 3
SLOTS = ("a", "b")
# Of the three rounds the last is in no checkpoint: its payloads are still needed.
LAST = ROUNDS - 1


def train(store: DirectoryStore, slot: str) -> None:
    """A replica of a model whose payload is of two blocks; its inner optimizer is saved as its own."""
    torch.manual_seed(0)
    model = nn.Linear(600, 512)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = manager_of(
        store, slot, state_dict=model.state_dict, load_state_dict=model.load_state_dict, checkpoint_every=ROUNDS - 1
    )
    manager.register_private_state("inner", inner.load_state_dict, inner.state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    generator = torch.Generator().manual_seed(ord(slot))
    with DiLoCo(manager, [model], inner, [outer], sync_every=2):
        while manager.current_step() < ROUNDS:
            manager.catch_up(inner)
            if manager.current_step() < ROUNDS:
                inner.zero_grad()
                (model(torch.randn(2, 600, generator=generator)) ** 2).mean().backward()
                inner.step()
    manager.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas, three rounds, checkpoints of rounds 0 and 2."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    store = DirectoryStore(folder)
    together([lambda slot=slot: train(store, slot) for slot in SLOTS])
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> None:
    """Bodies are a megabyte each and most tests change one of them: `rewrite` gives it bytes of its own."""
    if Path(source).stat().st_size > BLOCK_BYTES // 2:
        os.link(source, target)
    else:
        shutil.copy(source, target)


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def deep(folder: Path) -> Examination:
    return visit(DirectoryStore(folder), heedless)


def heedless(done: Bodies, whole: Bodies) -> None:
    """Progress that nobody looks at."""


def one(found: Examination) -> Finding:
    assert len(found.findings) == 1, found.findings
    return found.findings[0]


def places(found: Examination) -> list[tuple[str, int | None, str | None]]:
    return [(finding.kind, finding.round, finding.slot) for finding in found.findings]


def payload(folder: Path, number: int, slot: str) -> Path:
    (path,) = (folder / keys.PAYLOADS / f"{number:08d}" / slot).iterdir()
    return path


def part(folder: Path, number: int) -> Path:
    (path,) = saved(folder / keys.checkpoint_manifest(number))
    return path


def saved(manifest: Path) -> list[Path]:
    """The parts that a manifest names: who lost the race for checkpoint 0 has left others there."""
    return [manifest.with_name(part["digest"]) for part in json.loads(manifest.read_text())["parts"]]


def bodies(folder: Path) -> list[Path]:
    payloads = [path for path in (folder / keys.PAYLOADS).rglob("*") if path.is_file()]
    manifests = [path for name in (keys.CHECKPOINTS, keys.PRIVATE) for path in (folder / name).rglob("manifest.json")]
    return sorted([*payloads, *(path for manifest in manifests for path in saved(manifest))])


def key_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def flip(path: Path, offset: int) -> None:
    """One bit; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    rewrite(path, data)


def cut(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-100])


# What is sound.


def test_every_byte_of_a_healthy_run_is_read(run: Path) -> None:
    told: list[tuple[Bodies, Bodies]] = []
    found = visit(DirectoryStore(run), lambda done, whole: told.append((done, whole)))
    paths = bodies(run)
    assert len(paths) == 2 * ROUNDS + 2 + 2
    whole = Bodies(objects=len(paths), size_bytes=sum(path.stat().st_size for path in paths))
    assert (found.findings, found.bodies) == ((), whole)
    assert told[0] == (Bodies(objects=0, size_bytes=0), whole)
    assert told[-1] == (whole, whole)
    assert len(told) == len(paths) + 1


def test_without_being_asked_nothing_of_a_body_is_read(run: Path) -> None:
    flip(payload(run, LAST, "b"), -1)
    found = visit(DirectoryStore(run))
    assert (found.findings, found.bodies) == ((), None)


class Watched(DirectoryStore):
    """Remembers how much was read at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read_bytes: list[int] = []

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        found = super().read(key, span, into)
        self.read_bytes.append(0 if found is None else len(found))
        return found


def test_bodies_are_read_in_pieces_into_kept_memory(run: Path) -> None:
    store = Watched(run)
    assert visit(store, heedless).ok
    header = 4096
    assert max(path.stat().st_size for path in bodies(run)) > 2 * BLOCK_BYTES
    assert max(store.read_bytes) < store.profile.piece_bytes + header


# What is damaged.


def last_bit(path: Path) -> None:
    flip(path, -1)


def bit_of_the_first_block(path: Path) -> None:
    flip(path, BLOCK_BYTES // 2)


def bit_of_the_header(path: Path) -> None:
    flip(path, 40)


def emptied(path: Path) -> None:
    rewrite(path, b"")


def of_another_slot(path: Path) -> None:
    rewrite(path, payload(path.parents[3], LAST, "a").read_bytes())


def of_a_checkpoint(path: Path) -> None:
    rewrite(path, part(path.parents[3], 0).read_bytes())


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (last_bit, "slot=b block=1 digest="),
        (bit_of_the_first_block, "slot=b block=0 digest="),
        (bit_of_the_header, "header is damaged"),
        (cut, "slot=b block=1 truncated to"),
        (emptied, "header is truncated"),
        (of_another_slot, "header is damaged"),
        (of_a_checkpoint, "header is damaged"),
    ],
)
def test_a_damaged_payload_is_named_by_slot_and_round(run: Path, damage: Callable[[Path], None], text: str) -> None:
    path = payload(run, LAST, "b")
    damage(path)
    found = deep(run)
    assert not found.ok
    assert (one(found).severity, one(found).kind, one(found).round, one(found).slot, one(found).key) == (
        "error",
        "damaged-payload",
        LAST,
        "b",
        key_of(run, path),
    )
    assert text in one(found).text


def test_a_missing_payload_is_named_by_slot_and_round(run: Path) -> None:
    payload(run, LAST, "b").unlink()
    found = deep(run)
    assert places(found) == [("missing-payload", LAST, "b")]
    assert not found.ok


def test_damage_that_a_checkpoint_covers_is_a_warning(run: Path) -> None:
    flip(payload(run, 0, "a"), -1)
    found = deep(run)
    assert (one(found).severity, places(found), found.ok) == ("warning", [("damaged-payload", 0, "a")], True)


class Remote(DirectoryStore):
    """A folder that likes to be asked for several things at once, as a bucket does."""

    @property
    def profile(self) -> Profile:
        return replace(super().profile, streams=4)


@pytest.mark.parametrize("kind", [DirectoryStore, Remote])
def test_every_damaged_object_is_named_whatever_comes_before_it(run: Path, kind: type[DirectoryStore]) -> None:
    assert visit(kind(run), heedless).findings == ()
    for path in bodies(run):
        flip(path, -1)
    found = visit(kind(run), heedless)
    assert sorted(finding.key for finding in found.findings) == [key_of(run, path) for path in bodies(run)]
    whole = Bodies(objects=len(bodies(run)), size_bytes=sum(path.stat().st_size for path in bodies(run)))
    assert found.bodies == whole


@pytest.mark.parametrize("position", range(2 * ROUNDS + 2 + 2))
def test_one_damaged_object_is_the_only_one_that_is_named(run: Path, position: int) -> None:
    path = bodies(run)[position]
    flip(path, 40)
    assert one(deep(run)).key == key_of(run, path)


@pytest.mark.parametrize("number", [0, LAST])
@pytest.mark.parametrize("damage", [last_bit, bit_of_the_header, cut])
def test_a_damaged_checkpoint_is_named_by_round_and_writer(
    run: Path, number: int, damage: Callable[[Path], None]
) -> None:
    path = part(run, number)
    damage(path)
    finding = one(deep(run))
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert (finding.severity, finding.kind, finding.round, finding.slot, finding.key) == (
        "error",
        "damaged-checkpoint",
        number,
        manifest["writer"],
        key_of(run, path),
    )


def test_a_payload_that_only_a_damaged_checkpoint_covers_is_still_needed(run: Path) -> None:
    payload(run, 1, "a").unlink()
    assert deep(run).findings == ()
    flip(part(run, LAST), -1)
    assert places(deep(run))[0] == ("missing-payload", 1, "a")


def test_what_is_damaged_of_a_replicas_own_is_a_warning_with_its_slot(run: Path) -> None:
    (path,) = [path for path in bodies(run) if key_of(run, path).startswith(keys.private_of("b"))]
    flip(path, -1)
    found = deep(run)
    assert (one(found).severity, places(found), found.ok) == ("warning", [("damaged-private", LAST, "b")], True)
    (path.parent / "manifest.json").write_bytes(b"{}")
    assert places(deep(run)) == [("damaged-private", None, "b")]


def test_a_payload_of_other_tensors_than_its_record_says_is_damaged(run: Path) -> None:
    path = run / keys.contribution(LAST, 0, "b")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index": "7" * 32}))
    found = deep(run)
    # The record is another one too, then.
    assert sorted(places(found)) == [("damaged-payload", LAST, "b"), ("replaced-record", LAST, "b")]
    (wrong,) = [finding for finding in found.findings if finding.kind == "damaged-payload"]
    assert f"its tensors are not those of {keys.contribution(LAST, 0, 'b')}" in wrong.text


def parts_of(index: Index) -> tuple[list[Part], list[Data]]:
    """The parts of a contribution of these tensors, all zeros."""
    parts: list[Part] = []
    data: list[Data] = []
    for layout in index.parts:
        body = bytes(layout.body_bytes)
        assert layout.blocks == 1
        head, sealed = seal(index, layout, [xxhash.xxh3_128_hexdigest(body)])
        parts.append(sealed)
        data.append([head, body])
    return parts, data


def offer(store: DirectoryStore, offered: Sequence[int], ranks: tuple[int, ...] = ()) -> list[str]:
    """Contribute these of the two parts of a list of tensors, and upload both; their keys."""
    replica = start(store, FakeClock(), "a", policy(min_replicas=1))
    index = Index(tuple(TensorSpec(f"t{number}", "float32", (1,)) for number in range(MAX_SLICES + 1)))
    parts, data = parts_of(index)
    load = Load(
        index=index.digest,
        parts=tuple(parts[number] for number in offered),
        data=lambda number: data[offered[number]],
        tokens=0,
        inner_steps=1,
        ranks=ranks,
    )
    replica.exchange.contribute(replica.place, load)
    names = [keys.payload(0, "a", part.digest) for part in parts]
    for key, body in zip(names, data, strict=True):  # those of other ranks have uploaded theirs themselves
        store.create(key, body)
    return names


@pytest.mark.parametrize(
    ("offered", "ranks", "expected"),
    [
        ((0, 1), (), None),
        ((0,), (), "tensors do not match their digest"),
        ((1, 0), (), "slices do not join"),
        ((0, 1, 0, 1), (2, 2), None),
        ((0, 1, 1), (2, 1), "slices do not join"),
    ],
)
def test_parts_that_are_sound_and_not_those_of_one_list_of_tensors_are_damaged(
    tmp_path: Path, offered: Sequence[int], ranks: tuple[int, ...], expected: str | None
) -> None:
    store = DirectoryStore(tmp_path)
    offer(store, offered, ranks)
    found = visit(store, heedless)
    assert places(found) == ([] if expected is None else [("damaged-payload", 0, "a")])
    assert expected is None or expected in one(found).text


def test_a_sound_part_beside_a_damaged_or_missing_one_is_not_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    key = offer(store, (0, 1))[1]
    flip(tmp_path / key, -1)
    assert one(visit(store, heedless)).key == key
    store.delete(key)
    assert [(finding.kind, finding.key) for finding in visit(store, heedless).findings] == [("missing-payload", key)]


def test_a_record_with_sizes_that_no_object_has_makes_nobody_read_it(run: Path) -> None:
    path = run / keys.contribution(LAST, 0, "b")
    record = Contribution.parse(path.read_bytes(), "key")
    for changed in ({"header_bytes": 1 << 40, "total_bytes": 1 << 41}, {"header_bytes": 1 << 20, "total_bytes": 64}):
        wrong = record.parts[0].model_copy(update=changed)
        path.write_bytes(record.model_copy(update={"parts": (wrong,)}).to_bytes())
        store = Watched(run)
        found = visit(store, heedless)
        assert ("damaged-payload", LAST, "b") in places(found)
        assert "bad size of" in next(one for one in found.findings if one.kind == "damaged-payload").text
        assert max(store.read_bytes) < 2 * BLOCK_BYTES


# A run that goes on.


class Vanishing(DirectoryStore):
    """An object is deleted when it is read for the first time, as a collector may do that."""

    def __init__(self, folder: Path, key: str) -> None:
        super().__init__(folder)
        self.key = key

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        if key == self.key:
            self.delete(key)
        return super().read(key, span, into)


@pytest.mark.parametrize("folder", [keys.PAYLOADS, keys.PRIVATE])
def test_what_is_deleted_before_it_is_read_is_no_damage(run: Path, folder: str) -> None:
    key = next(key for path in bodies(run) if (key := key_of(run, path)).startswith(folder))
    assert visit(Vanishing(run, key), heedless).findings == ()
    assert not (run / key).exists()


def test_damage_that_is_deleted_before_the_end_is_no_damage(run: Path) -> None:
    path = payload(run, 0, "b")
    flip(path, -1)

    def collect(done: Bodies, whole: Bodies) -> None:
        if done == whole:
            path.unlink()

    assert visit(DirectoryStore(run), collect).findings == ()


# The command.


def test_the_command_says_what_was_read_and_what_is_damaged(run: Path) -> None:
    uri = DirectoryStore(run).uri
    healthy = skerry("doctor", uri, "--deep")
    count, size = len(bodies(run)), sum(path.stat().st_size for path in bodies(run)) / 1e6
    assert healthy.exit_code == 0
    assert healthy.stdout.startswith("unnamed: healthy; 3 rounds closed")
    assert f"records and {count} payloads and checkpoint parts ({size:.1f} MB) read at {uri}" in healthy.stdout
    assert healthy.stderr.splitlines() == [
        f"read 0 of {count} payloads and checkpoint parts, 0.0 of {size:.1f} MB",
        f"read {count} of {count} payloads and checkpoint parts, {size:.1f} of {size:.1f} MB",
    ]
    flip(payload(run, LAST, "b"), -1)
    damaged = skerry("doctor", uri, "--deep")
    assert damaged.exit_code == 1
    first, last = damaged.stdout.splitlines()
    assert first.startswith(f"error: damaged-payload round={LAST} replica=b key={key_of(run, payload(run, LAST, 'b'))}")
    assert last.startswith("unnamed: 1 error; 3 rounds closed")


def test_the_command_as_json(run: Path) -> None:
    ran = skerry("doctor", DirectoryStore(run).uri, "--deep", "--json")
    said = json.loads(ran.stdout)
    assert (ran.exit_code, said["ok"]) == (0, True)
    assert said["bodies"]["objects"] == len(bodies(run))
    assert json.loads(skerry("doctor", DirectoryStore(run).uri, "--json").stdout)["bodies"] is None


def test_progress_is_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere() -> None:
    clock = FakeClock()
    whole = Bodies(objects=1000, size_bytes=2_000_000)
    console = Console(force_terminal=True, color_system=None, width=120)
    with console.capture() as captured, showing.reading(console, clock) as tell:
        tell(Bodies(objects=500, size_bytes=1_000_000), whole)
    assert "reading payloads and checkpoints" in captured.get()
    assert "2.0 MB" in captured.get()
    console = Console(force_terminal=False, width=40)
    with console.capture() as captured, showing.reading(console, clock) as tell:
        for number in range(1001):
            tell(Bodies(objects=number, size_bytes=number * 2000), whole)
            clock.advance(0.05)
    lines = captured.get().splitlines()
    assert len(lines) == 6
    assert lines[0] == "read 0 of 1000 payloads and checkpoint parts, 0.0 of 2.0 MB"
    assert lines[-1] == "read 1000 of 1000 payloads and checkpoint parts, 2.0 of 2.0 MB"
