"""`skerry doctor --deep` on a real run's folder: payloads and checkpoints, valid and with each damage."""

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
from tests.kit.managers import begin_run, manager_of, together
from tests.kit.protocol import policy, start_replica
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.infra.cli import doctor_text
from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.observe.doctor.findings import Examination, Finding, PayloadAmount
from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution
from skerry.runtime.protocol.exchange import ContributionDraft
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, MAX_SLICES, Index, TensorSpec
from skerry.runtime.tensors.payload_format import build_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Data, Profile, Span

ROUNDS = 3
SLOTS = ("a", "b")
# Of the three rounds the last is in no checkpoint: its payloads are still needed.
LAST = ROUNDS - 1


def train(store: DirectoryStore, slot: str) -> None:
    """Train a model whose payload has two blocks; its inner optimizer is private state."""
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
    begin_run(store, SLOTS, layout=None, name="run")  # so that a payload is one object with several blocks
    together([lambda slot=slot: train(store, slot) for slot in SLOTS])
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> None:
    """Link payloads, of a megabyte each: tests change at most a few of them, with `rewrite`."""
    if Path(source).stat().st_size > BLOCK_BYTES // 2:
        os.link(source, target)
    else:
        shutil.copy(source, target)


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def ignore_progress(done: PayloadAmount, whole: PayloadAmount) -> None:
    """Ignores the progress."""


def deep(folder: Path, store: type[DirectoryStore] = DirectoryStore) -> Examination:
    return examine_store(store(folder), ignore_progress)


def places(examination: Examination) -> list[tuple[str, str, int | None, str | None]]:
    return [(finding.severity, finding.kind, finding.round, finding.slot) for finding in examination.findings]


def only_finding(examination: Examination) -> Finding:
    assert len(examination.findings) == 1, examination.findings
    return examination.findings[0]


def payload(folder: Path, number: int, slot: str) -> Path:
    (path,) = (folder / keys.PAYLOADS / f"{number:08d}" / slot).iterdir()
    return path


def part(folder: Path, number: int) -> Path:
    (path,) = saved(folder / keys.checkpoint_manifest(number))
    return path


def saved(manifest: Path) -> list[Path]:
    """The parts in a manifest. The replica that lost the race for checkpoint 0 has left others in its folder."""
    return [manifest.with_name(part["digest"]) for part in json.loads(manifest.read_text())["parts"]]


def bodies(folder: Path) -> list[Path]:
    payloads = [path for path in (folder / keys.PAYLOADS).rglob("*") if path.is_file()]
    manifests = [path for name in (keys.CHECKPOINTS, keys.PRIVATE) for path in (folder / name).rglob("manifest.json")]
    return sorted([*payloads, *(path for manifest in manifests for path in saved(manifest))])


def key_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def whole_amount(folder: Path) -> PayloadAmount:
    paths = bodies(folder)
    return PayloadAmount(objects=len(paths), size_bytes=sum(path.stat().st_size for path in paths))


def flip(path: Path, offset: int) -> None:
    """One bit; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    rewrite(path, data)


# A healthy run.


def test_every_byte_of_a_healthy_run_is_read(run: Path) -> None:
    calls: list[tuple[PayloadAmount, PayloadAmount]] = []
    examination = examine_store(DirectoryStore(run), lambda done, whole: calls.append((done, whole)))
    whole = whole_amount(run)
    assert whole.objects == 2 * ROUNDS + 2 + 2
    assert (examination.findings, examination.bodies) == ((), whole)
    assert calls[0] == (PayloadAmount(objects=0, size_bytes=0), whole)
    assert calls[-1] == (whole, whole)
    assert len(calls) == whole.objects + 1


def test_bodies_are_read_only_on_request(run: Path) -> None:
    flip(payload(run, LAST, "b"), -1)
    examination = examine_store(DirectoryStore(run))
    assert (examination.findings, examination.bodies) == ((), None)


class WatchedStore(DirectoryStore):
    """Records the size of each read. deleted: deleted before its first read, as garbage collection may."""

    def __init__(self, folder: Path, deleted: str = "") -> None:
        super().__init__(folder)
        self.read_bytes: list[int] = []
        self.deleted = deleted

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        if key == self.deleted:
            self.delete(key)
        data = super().read(key, span, into)
        self.read_bytes.append(0 if data is None else len(data))
        return data


def test_bodies_are_read_in_pieces_of_bounded_size(run: Path) -> None:
    store = WatchedStore(run)
    assert examine_store(store, ignore_progress).ok
    header = 4096
    assert max(path.stat().st_size for path in bodies(run)) > 2 * BLOCK_BYTES
    assert max(store.read_bytes) < store.profile.piece_bytes + header


# Damage.


def flip_last_bit(path: Path) -> None:
    flip(path, -1)


def flip_header(path: Path) -> None:
    flip(path, 40)


def cut(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (flip_last_bit, "slot=b block=1 digest="),
        (lambda path: flip(path, BLOCK_BYTES // 2), "slot=b block=0 digest="),
        (flip_header, "header is damaged"),
        (cut, "slot=b block=1 truncated to"),
        (lambda path: rewrite(path, b""), "header is truncated"),
        (lambda path: rewrite(path, payload(path.parents[3], LAST, "a").read_bytes()), "header is damaged"),
        (lambda path: rewrite(path, part(path.parents[3], 0).read_bytes()), "header is damaged"),
    ],
    ids=["last bit", "first block", "header", "cut", "empty", "payload of another slot", "part of a checkpoint"],
)
def test_damaged_payload_is_reported_with_slot_and_round(run: Path, damage: Callable[[Path], None], text: str) -> None:
    path = payload(run, LAST, "b")
    damage(path)
    examination = deep(run)
    assert places(examination) == [("error", "damaged-payload", LAST, "b")]
    assert not examination.ok
    assert only_finding(examination).key == key_of(run, path)
    assert text in only_finding(examination).text


def test_damaged_payload_that_a_checkpoint_covers_is_a_warning(run: Path) -> None:
    flip(payload(run, 0, "a"), -1)
    examination = deep(run)
    assert places(examination) == [("warning", "damaged-payload", 0, "a")]
    assert examination.ok


class ParallelStore(DirectoryStore):
    """A directory that prefers several parallel reads, as a bucket does."""

    @property
    def profile(self) -> Profile:
        return replace(super().profile, streams=4)


@pytest.mark.parametrize("kind", [DirectoryStore, ParallelStore])
def test_every_damaged_object_is_reported(run: Path, kind: type[DirectoryStore]) -> None:
    assert deep(run, kind).findings == ()
    for path in bodies(run):
        flip_last_bit(path)
    examination = deep(run, kind)
    assert sorted(finding.key for finding in examination.findings) == [key_of(run, path) for path in bodies(run)]
    assert examination.bodies == whole_amount(run)


def test_single_damaged_object_is_the_only_finding(run: Path) -> None:
    for path in bodies(run):
        flip_header(path)
        assert only_finding(deep(run)).key == key_of(run, path)
        flip_header(path)


@pytest.mark.parametrize("number", [0, LAST])
@pytest.mark.parametrize("damage", [flip_last_bit, flip_header, cut])
def test_damaged_checkpoint_is_reported_with_round_and_writer(
    run: Path, number: int, damage: Callable[[Path], None]
) -> None:
    path = part(run, number)
    damage(path)
    examination = deep(run)
    writer = json.loads((path.parent / "manifest.json").read_text())["writer"]
    assert places(examination) == [("error", "damaged-checkpoint", number, writer)]
    assert only_finding(examination).key == key_of(run, path)


def test_damaged_checkpoint_covers_no_payload(run: Path) -> None:
    payload(run, 1, "a").unlink()
    assert deep(run).findings == ()
    flip(part(run, LAST), -1)
    assert places(deep(run))[0] == ("error", "missing-payload", 1, "a")


def test_damaged_private_checkpoint_is_a_warning_with_its_slot(run: Path) -> None:
    (path,) = [path for path in bodies(run) if key_of(run, path).startswith(keys.private_prefix("b"))]
    flip(path, -1)
    assert places(deep(run)) == [("warning", "damaged-private", LAST, "b")]
    (path.parent / "manifest.json").write_bytes(b"{}")
    assert places(deep(run)) == [("warning", "damaged-private", None, "b")]


def test_payload_with_other_tensors_than_its_record_is_damaged(run: Path) -> None:
    path = run / keys.contribution(LAST, 0, "b")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"index": "7" * 32}))
    examination = deep(run)
    # The changed record has another digest, too.
    wrong, replaced = sorted(examination.findings, key=lambda finding: finding.kind)
    assert (wrong.kind, wrong.round, wrong.slot) == ("damaged-payload", LAST, "b")
    assert f"its tensors are not those of {keys.contribution(LAST, 0, 'b')}" in wrong.text
    assert (replaced.kind, replaced.round, replaced.slot) == ("replaced-record", LAST, "b")


def contribute_zeros(store: DirectoryStore, chosen: Sequence[int], ranks: tuple[int, ...] = ()) -> list[str]:
    """Contribute the chosen ones of the two parts of a list of tensors, and upload both; their keys."""
    replica = start_replica(store, FakeClock(), "a", policy(min_replicas=1))
    index = Index(tuple(TensorSpec(f"t{number}", "float32", (1,)) for number in range(MAX_SLICES + 1)))
    bodies = [bytes(layout.body_bytes) for layout in index.parts]
    headers = [
        build_header(index, layout, [xxhash.xxh3_128_hexdigest(body)])
        for layout, body in zip(index.parts, bodies, strict=True)
    ]
    parts = [part for _, part in headers]
    data: list[Data] = [[header, body] for (header, _), body in zip(headers, bodies, strict=True)]
    draft = ContributionDraft(
        index=index.digest,
        parts=tuple(parts[number] for number in chosen),
        data=lambda number: data[chosen[number]],
        tokens=0,
        inner_steps=1,
        ranks=ranks,
    )
    replica.exchange.contribute(replica.exchange_id, draft)
    names = [keys.payload(0, "a", part.digest) for part in parts]
    for key, body in zip(names, data, strict=True):
        store.create(key, body)
    return names


@pytest.mark.parametrize(
    ("chosen", "ranks", "expected"),
    [
        ((0, 1), (), None),
        ((0,), (), "tensors do not match their digest"),
        ((1, 0), (), "slices do not join"),
        ((0, 1, 0, 1), (2, 2), None),
        ((0, 1, 1), (2, 1), "slices do not join"),
    ],
)
def test_valid_parts_that_form_no_tensor_list_are_damaged(
    tmp_path: Path, chosen: Sequence[int], ranks: tuple[int, ...], expected: str | None
) -> None:
    store = DirectoryStore(tmp_path)
    contribute_zeros(store, chosen, ranks)
    examination = examine_store(store, ignore_progress)
    assert places(examination) == ([] if expected is None else [("warning", "damaged-payload", 0, "a")])
    assert expected is None or expected in only_finding(examination).text


def test_valid_part_beside_a_damaged_one_is_not_reported(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    key = contribute_zeros(store, (0, 1))[1]
    flip(tmp_path / key, -1)
    assert only_finding(examine_store(store, ignore_progress)).key == key
    store.delete(key)
    missing = only_finding(examine_store(store, ignore_progress))
    assert (missing.kind, missing.key) == ("missing-payload", key)


def test_payload_with_impossible_sizes_is_not_read(run: Path) -> None:
    path = run / keys.contribution(LAST, 0, "b")
    record = Contribution.parse(path.read_bytes(), "key")
    for changed in ({"header_bytes": 1 << 40, "total_bytes": 1 << 41}, {"header_bytes": 1 << 20, "total_bytes": 64}):
        wrong = record.parts[0].model_copy(update=changed)
        path.write_bytes(record.model_copy(update={"parts": (wrong,)}).to_bytes())
        store = WatchedStore(run)
        examination = examine_store(store, ignore_progress)
        (damaged,) = [finding for finding in examination.findings if finding.kind == "damaged-payload"]
        assert (damaged.round, damaged.slot) == (LAST, "b")
        assert "size of" in damaged.text
        assert max(store.read_bytes) < 2 * BLOCK_BYTES


# A live run.


@pytest.mark.parametrize("folder", [keys.PAYLOADS, keys.PRIVATE])
def test_object_deleted_before_it_is_read_is_no_damage(run: Path, folder: str) -> None:
    key = next(key for path in bodies(run) if (key := key_of(run, path)).startswith(folder))
    assert examine_store(WatchedStore(run, key), ignore_progress).findings == ()
    assert not (run / key).exists()


def test_damaged_object_deleted_before_the_end_is_no_damage(run: Path) -> None:
    path = payload(run, 0, "b")
    flip(path, -1)

    def collect(done: PayloadAmount, whole: PayloadAmount) -> None:
        if done == whole:
            path.unlink()

    assert examine_store(DirectoryStore(run), collect).findings == ()


# The command.


def test_command_prints_the_amount_read(run: Path) -> None:
    uri = DirectoryStore(run).uri
    healthy = invoke("doctor", uri, "--deep")
    count, size = whole_amount(run).objects, whole_amount(run).size_bytes / 1e6
    assert healthy.exit_code == 0
    assert healthy.stdout.startswith("run: healthy; 3 rounds; all ")
    assert f"records and {count} payloads and checkpoint parts ({size:.1f} MB) read at {uri}" in healthy.stdout
    assert healthy.stderr.splitlines() == [
        f"read 0 of {count} payloads and checkpoint parts, 0.0 of {size:.1f} MB",
        f"read {count} of {count} payloads and checkpoint parts, {size:.1f} of {size:.1f} MB",
    ]
    document = json.loads(invoke("doctor", uri, "--deep", "--json").stdout)
    assert (document["ok"], document["bodies"]["objects"]) == (True, count)
    assert json.loads(invoke("doctor", uri, "--json").stdout)["bodies"] is None


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    clock = FakeClock()
    whole = PayloadAmount(objects=1000, size_bytes=2_000_000)
    console = Console(force_terminal=True, color_system=None, width=120)
    with console.capture() as captured, doctor_text.showing_progress(console, clock) as report:
        report(PayloadAmount(objects=500, size_bytes=1_000_000), whole)
    assert "reading payloads and checkpoints" in captured.get()
    assert "2.0 MB" in captured.get()
    console = Console(force_terminal=False, width=40)
    with console.capture() as captured, doctor_text.showing_progress(console, clock) as report:
        for number in range(1001):
            report(PayloadAmount(objects=number, size_bytes=number * 2000), whole)
            clock.advance(0.05)
    lines = captured.get().splitlines()
    assert len(lines) == 6
    assert lines[0] == "read 0 of 1000 payloads and checkpoint parts, 0.0 of 2.0 MB"
    assert lines[-1] == "read 1000 of 1000 payloads and checkpoint parts, 2.0 of 2.0 MB"
