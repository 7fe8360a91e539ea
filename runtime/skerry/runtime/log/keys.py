"""Formats and parses every object key of a run, relative to the run's prefix.

Keys sort in round order as plain strings, and readers rely on it. A function named `..._prefix` returns the beginning
of several keys, to list them. Does no I/O.

    run.json                                      create   nonce, rounds, expected slots
    elsewhere.json                                create   this prefix is a mirror, or its run has moved
    members/{slot}/{incarnation}.json             create   fencing: the highest number owns the slot
    heartbeats/{slot}.json                        replace  liveness, progress, abstentions
    payloads/{round}/{slot}/{digest}              create   contribution bytes, content-addressed
    payloads/{round}/{slot}/reduced/{exchange}-{rank}-{unit}  create   a slot's part of the average of an exchange
    contributions/{round}-{exchange}/{slot}.json  create   a slot's contribution to an exchange
    exchanges/{round}-{exchange}.json             create   the decision of an exchange
    commits/{round}.json                          create   closes the round
    receipts/{round}/{slot}.json                  create   digests of a replica's averages and state after the round
    checkpoints/{round}/{digest}                  create   state bytes, content-addressed
    checkpoints/{round}/manifest.json             create   last: a checkpoint is complete or invisible
    initial/{round}/{digest}                      create   a copy of the checkpoint from which this run starts
    initial/{round}/manifest.json                 create   last, by the operator, before run.json
    private/{slot}/{round}/{digest}               create   local state of a slot, content-addressed
    private/{slot}/{round}/manifest.json          create   last, as for a checkpoint
    private/{slot}/rank{rank}/{round}/...         create   the same for the replica's ranks above 0
    unfinished/{slot}/rank{rank}/{number}/...     create   the steps trained in the current round; as a checkpoint
    local/{kind}/rank{rank}/{number}/...          create   on a machine of a replica, never in the bucket: its copies
    settings/{number}.json                        create   rounds and outer loop, changed after the start
    pins/{round}.json                             create   keeps this round's checkpoint until the pin is deleted
    outcomes/{slot}/{incarnation}.json            create   how an incarnation ended
    artifacts/{slot}/{round}-{number}/{name}      create   a file that the script saved; a large one in several objects
    rollups/{first}-{last}.json.gz                create   what readers need of so many closed rounds, in one object
    spent/{slot}.json                             replace  in a mirror with a limit: bytes that the slot has copied
    failover/{ballot}/votes/{slot}.json           create   in a mirror: a promise to add nothing to the store
    failover/{ballot}/verdict.json                create   in a mirror: the run stays in its store, or goes on elsewhere
    code/{digest}.tar.gz                          create   the packed training code, content-addressed (sha256)
    quarantine/{digest}/{key}                     create   a stray record, moved away by the operator
    probe/{nonce}                                 create   the start-up check of the store
    state/{serial}.json                           create   what `apply` created for the run, and the lock holder
    state/{serial}/{number}.json                  create   what was done while that serial was locked
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from skerry.runtime.contract import SLOT_PATTERN, check_slot
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = "run.json"
ELSEWHERE = "elsewhere.json"
MEMBERS = "members/"
HEARTBEATS = "heartbeats/"
PAYLOADS = "payloads/"
CONTRIBUTIONS = "contributions/"
EXCHANGES = "exchanges/"
COMMITS = "commits/"
RECEIPTS = "receipts/"
CHECKPOINTS = "checkpoints/"
INITIAL = "initial/"
PRIVATE = "private/"
UNFINISHED = "unfinished/"
LOCAL = "local/"
"""On a machine of a replica, never in the bucket."""
SETTINGS = "settings/"
PINS = "pins/"
OUTCOMES = "outcomes/"
ARTIFACTS = "artifacts/"
ROLL_UPS = "rollups/"
SPENT = "spent/"
"""In a mirror."""
FAILOVER = "failover/"
"""In a mirror."""
GOES_ON = "-failover"
"""After the URI of a mirror: the run that goes on there by itself."""
CODE = "code/"
QUARANTINE = "quarantine/"
PROBE = "probe/"
STATE = "state/"
STATE_ELSEWHERE = "state/elsewhere"
"""The URI of the state of a run whose spec stores it elsewhere."""

MANIFEST = "/manifest.json"

# Eight digits of rounds and four of exchanges: a round of one second would take three years to overflow.
MAX_ROUND = 99_999_999
MAX_EXCHANGE = 9_999
MAX_INCARNATION = 999_999
MAX_SETTINGS = 999_999
MAX_SERIAL = 99_999_999
MAX_NOTE = 999_999
MAX_SAVE = 9_999
MAX_PART = 99_999
MAX_UNIT = 99_999
MAX_BALLOT = 999_999

_DIGEST = r"[0-9a-f]{32}"
_PAYLOAD = rf"(?:{_DIGEST}|reduced/\d{{4}}-\d+-\d{{5}})"
_NUMBER = re.compile(r"(\d+)")
# Whole keys; one group in each alternative.
_INCARNATION_KEY = re.compile(rf"(?:members|outcomes)/{SLOT_PATTERN}/(\d{{6}})\.json", re.ASCII)
_SLOT_KEY = re.compile(
    rf"(?:heartbeats|contributions/\d{{8}}-\d{{4}}|receipts/\d{{8}})/({SLOT_PATTERN})\.json"
    rf"|payloads/\d{{8}}/({SLOT_PATTERN})/{_PAYLOAD}"
    rf"|(?:members|outcomes)/({SLOT_PATTERN})/\d{{6}}\.json",
    re.ASCII,
)
_UNIT_KEY = re.compile(rf"payloads/(\d{{8}})/{SLOT_PATTERN}/reduced/(\d{{4}})-\d+-\d{{5}}", re.ASCII)
_SERIAL_KEY = re.compile(r"state/(\d{8})\.json", re.ASCII)
_ROUND_KEY = re.compile(
    rf"(?:commits|pins)/(\d{{8}})\.json"
    rf"|exchanges/(\d{{8}})-\d{{4}}\.json"
    rf"|contributions/(\d{{8}})-\d{{4}}/{SLOT_PATTERN}\.json"
    rf"|receipts/(\d{{8}})/{SLOT_PATTERN}\.json"
    rf"|payloads/(\d{{8}})/{SLOT_PATTERN}/{_PAYLOAD}"
    rf"|(?:checkpoints|private/{SLOT_PATTERN}(?:/rank\d+)?|unfinished/{SLOT_PATTERN}/rank\d+|local/[a-z]+/rank\d+)"
    rf"/(\d{{8}})/(?:manifest\.json|{_DIGEST})",
    re.ASCII,
)
_ROLL_UP_KEY = re.compile(r"rollups/(\d{8})-(\d{8})\.json\.gz", re.ASCII)
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
# Part i of n of a file has this behind its name; files of one part have their names alone.
_PART = r"\.(\d{5})-of-(\d{5})"
_ARTIFACT_NAME = re.compile(rf"(?!.*{_PART}\Z){_NAME}", re.ASCII)
_ARTIFACT_KEY = re.compile(rf"artifacts/({SLOT_PATTERN})/(\d{{8}})-(\d{{4}})/({_NAME}?)(?:{_PART})?", re.ASCII)
# How many characters of a foreign key an error quotes: S3 allows 1,024.
_QUOTED = 200


def slot_order(slot: str) -> tuple[tuple[int, int | str], ...]:
    """The sort key of a slot: digits in names are compared as numbers, so batch-2 sorts before batch-10.

    The order of every member list, of every reduction, and of `participating_rank`.
    """
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in _NUMBER.split(slot) if part)


def member(slot: str, incarnation: int) -> str:
    """Key of one start of a replica."""
    return f"{members_prefix(slot)}{_within(incarnation, MAX_INCARNATION):06d}.json"


def members_prefix(slot: str) -> str:
    """Prefix of all incarnations of a slot."""
    return f"{MEMBERS}{check_slot(slot)}/"


def incarnation_of(key: str) -> int:
    """The incarnation in a member or outcome key."""
    return int(_parse(key, _INCARNATION_KEY))


def newest_incarnation(members: Sequence[str]) -> int:
    """The highest incarnation in the listed keys of a slot's starts, in their order; -1 without any."""
    for key in reversed(members):
        with suppress(Invalid):  # a foreign object
            return incarnation_of(key)
    return -1


def spent(slot: str) -> str:
    """Key of the bytes that a slot has copied to a mirror."""
    return f"{SPENT}{check_slot(slot)}.json"


def votes_prefix(ballot: int) -> str:
    """Prefix of the votes of a ballot, in a mirror."""
    return f"{FAILOVER}{_within(ballot, MAX_BALLOT):06d}/votes/"


def vote(ballot: int, slot: str) -> str:
    """Key of a slot's vote in a ballot, in a mirror."""
    return f"{votes_prefix(ballot)}{check_slot(slot)}.json"


def verdict(ballot: int) -> str:
    """Key of the verdict of a ballot, in a mirror."""
    return f"{FAILOVER}{_within(ballot, MAX_BALLOT):06d}/verdict.json"


def heartbeat(slot: str) -> str:
    """Key of a slot's heartbeat."""
    return f"{HEARTBEATS}{check_slot(slot)}.json"


def payload(round_number: int, slot: str, digest: str) -> str:
    """Key of one part of a contribution's bytes."""
    return f"{PAYLOADS}{_round(round_number)}/{check_slot(slot)}/{digest}"


def reduced_unit(round_number: int, exchange: int, slot: str, rank: int, unit: int) -> str:
    """Key of a unit of an exchange's average, as this slot has made it. Known before it exists."""
    place = f"{_within(exchange, MAX_EXCHANGE):04d}-{rank}-{_within(unit, MAX_UNIT):05d}"
    return f"{PAYLOADS}{_round(round_number)}/{check_slot(slot)}/reduced/{place}"


def exchange_of_unit(key: str) -> tuple[int, int] | None:
    """The round and exchange of a reduced unit's key; None for any other key."""
    match = _UNIT_KEY.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]))


def payloads_prefix(round_number: int) -> str:
    """Prefix of the payloads of one round."""
    return f"{PAYLOADS}{_round(round_number)}/"


def contribution(round_number: int, exchange: int, slot: str) -> str:
    """Key of a slot's contribution to one exchange."""
    return f"{contributions_prefix(round_number, exchange)}{check_slot(slot)}.json"


def contributions_prefix(round_number: int, exchange: int) -> str:
    """Prefix of all contributions to one exchange."""
    return f"{CONTRIBUTIONS}{_round(round_number)}-{_within(exchange, MAX_EXCHANGE):04d}/"


def decision(round_number: int, exchange: int) -> str:
    """Key of the decision of an exchange."""
    return f"{EXCHANGES}{_round(round_number)}-{_within(exchange, MAX_EXCHANGE):04d}.json"


def commit(round_number: int) -> str:
    """Key of the record that closes a round."""
    return f"{COMMITS}{_round(round_number)}.json"


def receipt(round_number: int, slot: str) -> str:
    """Key of a replica's receipt for a round."""
    return f"{RECEIPTS}{_round(round_number)}/{check_slot(slot)}.json"


def receipts_prefix(round_number: int) -> str:
    """Prefix of all receipts of a round."""
    return f"{RECEIPTS}{_round(round_number)}/"


def checkpoint_part(round_number: int, digest: str, folder: str = CHECKPOINTS) -> str:
    """Key of one part of a checkpoint's bytes. folder: CHECKPOINTS, INITIAL or a prefix of local state."""
    return f"{folder}{_round(round_number)}/{digest}"


def checkpoint_manifest(round_number: int, folder: str = CHECKPOINTS) -> str:
    """Key of the record that makes a checkpoint visible. folder: CHECKPOINTS, INITIAL or a prefix of local state."""
    return f"{folder}{_round(round_number)}{MANIFEST}"


def private_prefix(slot: str, rank: int = 0) -> str:
    """Prefix of the local state of one rank of a slot: a folder of checkpoints."""
    return f"{PRIVATE}{check_slot(slot)}/" if rank == 0 else f"{PRIVATE}{check_slot(slot)}/rank{rank}/"


def unfinished_prefix(slot: str, rank: int = 0) -> str:
    """Prefix of the unfinished rounds of one rank of a slot: a folder of checkpoints."""
    return f"{UNFINISHED}{check_slot(slot)}/rank{rank}/"


def local_prefix(kind: str, rank: int) -> str:
    """Prefix of one rank's saves of a kind on a machine: a folder of checkpoints."""
    return f"{LOCAL}{kind}/rank{rank}/"


def settings(number: int) -> str:
    """Key of the settings of this number; the first that follow run.json have 1."""
    return f"{SETTINGS}{_within(number, MAX_SETTINGS):06d}.json"


def pin(round_number: int) -> str:
    """Key of the pin that keeps a round's checkpoint."""
    return f"{PINS}{_round(round_number)}.json"


def start_after(folder: str, round_number: int) -> str:
    """The `after` for a listing that begins at this round. folder: with keys that begin with the round."""
    return f"{folder}{_round(round_number)}"


def outcome(slot: str, incarnation: int) -> str:
    """Key of the outcome of one incarnation."""
    return f"{OUTCOMES}{check_slot(slot)}/{_within(incarnation, MAX_INCARNATION):06d}.json"


def artifact(slot: str, round_number: int, number: int, name: str, part: int = 0, parts: int = 1) -> str:
    """Key of one object of a file that a slot saved. Raises Invalid for a name that is no plain file name."""
    if not _ARTIFACT_NAME.fullmatch(name):
        raise Invalid(
            f"not a name for a saved file: {name[:_QUOTED]!r}; use 1 to 128 letters, digits, '.', '_' or '-', the "
            "first a letter or digit, the end not like .00001-of-00002"
        )
    end = "" if parts == 1 else f".{_within(part, MAX_PART):05d}-of-{_within(parts, MAX_PART):05d}"
    return f"{artifacts_prefix(slot, round_number)}{_within(number, MAX_SAVE):04d}/{name}{end}"


def artifacts_prefix(slot: str, round_number: int) -> str:
    """Prefix of the files that a slot saved after so many rounds."""
    return f"{ARTIFACTS}{check_slot(slot)}/{_round(round_number)}-"


class ArtifactPlace(NamedTuple):
    """The parts of an artifact's key. part, parts: which object of how many holds the file."""

    slot: str
    round: int
    number: int
    name: str
    part: int
    parts: int


def artifact_of(key: str) -> ArtifactPlace | None:
    """The parts of an artifact's key; None for any other."""
    match = _ARTIFACT_KEY.fullmatch(key)
    if match is None:
        return None
    slot, round_number, number, name, part, parts = match.groups()
    return ArtifactPlace(slot, int(round_number), int(number), name, int(part or 0), int(parts or 1))


def roll_up(first: int, last: int) -> str:
    """Key of the roll-up of these rounds, both included."""
    return f"{ROLL_UPS}{_round(first)}-{_round(last)}.json.gz"


def roll_up_of(key: str) -> range | None:
    """The rounds in the key of a roll-up; None for any other key."""
    match = _ROLL_UP_KEY.fullmatch(key)
    return None if match is None or int(match[1]) > int(match[2]) else range(int(match[1]), int(match[2]) + 1)


def hundred(folder: str, round_number: int) -> str:
    """Prefix of the keys of a round in `folder`, and of all rounds that differ from it in the last two digits only."""
    return f"{folder}{_round(round_number)[:-2]}"


def code(digest: str) -> str:
    """Key of a packed code folder, by the sha256 of the archive."""
    return f"{CODE}{digest}.tar.gz"


def digest_of_code(key: str) -> str | None:
    """The digest in the key of a packed code folder; None for another object."""
    is_code = key.startswith(CODE) and key.endswith(".tar.gz")
    return key.removeprefix(CODE).removesuffix(".tar.gz") if is_code else None


def quarantined(key: str, digest: str) -> str:
    """Key of a stray record that was moved away, by the sha256 of its bytes."""
    return f"{QUARANTINE}{digest}/{key}"


def state(serial: int) -> str:
    """Key of one serial of the state."""
    return f"{STATE}{_within(serial, MAX_SERIAL):08d}.json"


def serial_of(key: str) -> int | None:
    """The serial in a state key; None for any other."""
    match = _SERIAL_KEY.fullmatch(key)
    return None if match is None else int(match[1])


def state_notes_prefix(serial: int) -> str:
    """Prefix of the notes of what was done while this serial was locked."""
    return f"{STATE}{_within(serial, MAX_SERIAL):08d}/"


def state_note(serial: int, number: int) -> str:
    """Key of one note of what was done while this serial was locked."""
    return f"{state_notes_prefix(serial)}{_within(number, MAX_NOTE):06d}.json"


def slot_of(key: str) -> str:
    """The slot in a heartbeat, contribution, payload, receipt, member or outcome key. Raises Invalid for any other."""
    return _parse(key, _SLOT_KEY)


def round_of(key: str) -> int:
    """The round in a decision, commit, contribution, payload, receipt, checkpoint, private or pin key.

    For an unfinished round, its number. Raises Invalid for any other key, also in these folders, because the garbage
    collector must not delete what skerry did not write.
    """
    return int(_parse(key, _ROUND_KEY))


def _round(number: int) -> str:
    return f"{_within(number, MAX_ROUND):08d}"


def _within(number: int, limit: int) -> int:
    if not 0 <= number <= limit:
        raise Invalid(f"number does not fit its key: number={number} limit={limit}")
    return number


def _parse(key: str, pattern: re.Pattern[str]) -> str:
    match = pattern.fullmatch(key)
    if match is None or match.lastindex is None:
        raise Invalid(f"not a key of this kind: {key[:_QUOTED]!r}")
    return match[match.lastindex]
