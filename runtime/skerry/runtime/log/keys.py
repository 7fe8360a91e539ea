"""Every object key of a run, formatted and parsed here and nowhere else. Relative to the run's prefix.

Keys sort in round order as plain strings; a reader may rely on it. Does no I/O.

    run.json                                      create   nonce, rounds, expected slots
    members/{slot}/{incarnation}.json             create   fencing: the highest number owns the slot
    heartbeats/{slot}.json                        replace  liveness, progress, abstentions
    payloads/{round}/{slot}/{digest}              create   contribution bytes, content-addressed
    contributions/{round}-{exchange}/{slot}.json  create   what the slot offers
    exchanges/{round}-{exchange}.json             create   THE decision
    commits/{round}.json                          create   closes the round
    receipts/{round}/{slot}.json                  create   what one replica holds after the round
    checkpoints/{round}/{digest}                  create   state bytes, content-addressed
    checkpoints/{round}/manifest.json             create   last: a checkpoint is complete or invisible
    private/{slot}/{round}/{digest}               create   what only this slot has, content-addressed
    private/{slot}/{round}/manifest.json          create   last, as for a checkpoint
    private/{slot}/rank{rank}/{round}/...         create   the same of the further ranks of a replica
    unfinished/{slot}/{number}/...                create   what it has trained in the round at hand; as a checkpoint
    pins/{round}.json                             create   this round's checkpoint stays; deleted to let it go
    outcomes/{slot}/{incarnation}.json            create   how an incarnation ended
    code/{digest}.tar.gz                          create   the packed training code, content-addressed (sha256)
    probe/{nonce}                                 create   the start-up check of the store
    state/{serial}.json                           create   what `apply` made for the run, and who is at it
    state/{serial}/{number}.json                  create   what was done while that serial was held
"""

from __future__ import annotations

import re

from skerry.runtime.errors import Invalid

RUN = "run.json"
MEMBERS = "members/"
HEARTBEATS = "heartbeats/"
PAYLOADS = "payloads/"
CONTRIBUTIONS = "contributions/"
EXCHANGES = "exchanges/"
COMMITS = "commits/"
RECEIPTS = "receipts/"
CHECKPOINTS = "checkpoints/"
PRIVATE = "private/"
UNFINISHED = "unfinished/"
PINS = "pins/"
OUTCOMES = "outcomes/"
CODE = "code/"
PROBE = "probe/"
STATE = "state/"

MANIFEST = "/manifest.json"

# Eight digits of rounds and four of exchanges: a round of one second would take three years to overflow.
MAX_ROUND = 99_999_999
MAX_EXCHANGE = 9_999
MAX_INCARNATION = 999_999
MAX_SERIAL = 99_999_999
MAX_NOTE = 999_999

_A_SLOT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_A_DIGEST = r"[0-9a-f]{32}"
_SLOT = re.compile(_A_SLOT)
_NUMBER = re.compile(r"(\d+)")
# Whole keys, one group in each alternative.
_INCARNATION = re.compile(rf"(?:members|outcomes)/{_A_SLOT}/(\d{{6}})\.json", re.ASCII)
_OF_A_SLOT = re.compile(
    rf"(?:heartbeats|contributions/\d{{8}}-\d{{4}}|receipts/\d{{8}})/({_A_SLOT})\.json"
    rf"|payloads/\d{{8}}/({_A_SLOT})/{_A_DIGEST}"
    rf"|(?:members|outcomes)/({_A_SLOT})/\d{{6}}\.json",
    re.ASCII,
)
_SERIAL = re.compile(r"state/(\d{8})\.json", re.ASCII)
_OF_A_ROUND = re.compile(
    rf"(?:commits|pins)/(\d{{8}})\.json"
    rf"|exchanges/(\d{{8}})-\d{{4}}\.json"
    rf"|contributions/(\d{{8}})-\d{{4}}/{_A_SLOT}\.json"
    rf"|receipts/(\d{{8}})/{_A_SLOT}\.json"
    rf"|payloads/(\d{{8}})/{_A_SLOT}/{_A_DIGEST}"
    rf"|(?:checkpoints|private/{_A_SLOT}(?:/rank\d+)?|unfinished/{_A_SLOT}/rank\d+)"
    rf"/(\d{{8}})/(?:manifest\.json|{_A_DIGEST})",
    re.ASCII,
)
# How much is told of a key that is not ours: S3 allows 1,024 characters.
_TOLD = 200


def check_slot(slot: str) -> str:
    """The slot itself. Raises Invalid unless it is 1-63 of [A-Za-z0-9._-], starting with a letter or digit."""
    if not _SLOT.fullmatch(slot):
        raise Invalid(
            f"not a slot name: {slot!r}; use 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return slot


def slot_order(slot: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key of slots: numbers inside names count as numbers, so batch-2 comes before batch-10.

    The order of every member list, of every reduction, and of `participating_rank`.
    """
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in _NUMBER.split(slot) if part)


def member(slot: str, incarnation: int) -> str:
    """Key of one start of a replica."""
    return f"{members_of(slot)}{_within(incarnation, MAX_INCARNATION):06d}.json"


def members_of(slot: str) -> str:
    """Prefix of all incarnations of a slot."""
    return f"{MEMBERS}{check_slot(slot)}/"


def incarnation_of(key: str) -> int:
    """The incarnation in a key made by `member` or `outcome`."""
    return int(_parse(key, _INCARNATION))


def heartbeat(slot: str) -> str:
    """Key of a slot's heartbeat."""
    return f"{HEARTBEATS}{check_slot(slot)}.json"


def payload(round_number: int, slot: str, digest: str) -> str:
    """Key of one part of a contribution's bytes."""
    return f"{PAYLOADS}{_round(round_number)}/{check_slot(slot)}/{digest}"


def contribution(round_number: int, exchange: int, slot: str) -> str:
    """Key of what a slot offers to one exchange."""
    return f"{contributions_of(round_number, exchange)}{check_slot(slot)}.json"


def contributions_of(round_number: int, exchange: int) -> str:
    """Prefix of everything offered to one exchange."""
    return f"{CONTRIBUTIONS}{_round(round_number)}-{_within(exchange, MAX_EXCHANGE):04d}/"


def decision(round_number: int, exchange: int) -> str:
    """Key of an exchange's one decision."""
    return f"{EXCHANGES}{_round(round_number)}-{_within(exchange, MAX_EXCHANGE):04d}.json"


def decisions_of(round_number: int) -> str:
    """Prefix of all decisions of a round."""
    return f"{EXCHANGES}{_round(round_number)}-"


def commit(round_number: int) -> str:
    """Key of the record that closes a round."""
    return f"{COMMITS}{_round(round_number)}.json"


def receipt(round_number: int, slot: str) -> str:
    """Key of what one replica holds after a round."""
    return f"{RECEIPTS}{_round(round_number)}/{check_slot(slot)}.json"


def receipts_of(round_number: int) -> str:
    """Prefix of all receipts of a round."""
    return f"{RECEIPTS}{_round(round_number)}/"


def checkpoint_part(round_number: int, digest: str, folder: str = CHECKPOINTS) -> str:
    """Key of one part of a checkpoint's bytes. folder: CHECKPOINTS, or what `private_of` gives."""
    return f"{folder}{_round(round_number)}/{digest}"


def checkpoint_manifest(round_number: int, folder: str = CHECKPOINTS) -> str:
    """Key of the record that makes a checkpoint visible. folder: CHECKPOINTS, or what `private_of` gives."""
    return f"{folder}{_round(round_number)}{MANIFEST}"


def private_of(slot: str, rank: int = 0) -> str:
    """Prefix of what only this slot has, or a further rank of it: a folder of checkpoints."""
    return f"{PRIVATE}{check_slot(slot)}/" if rank == 0 else f"{PRIVATE}{check_slot(slot)}/rank{rank}/"


def unfinished_of(slot: str, rank: int = 0) -> str:
    """Prefix of what this slot, or a further rank of it, has trained in the round at hand: a folder of checkpoints."""
    return f"{UNFINISHED}{check_slot(slot)}/rank{rank}/"


def pin(round_number: int) -> str:
    """Key of what keeps a round's checkpoint from being deleted."""
    return f"{PINS}{_round(round_number)}.json"


def since(folder: str, round_number: int) -> str:
    """List a folder `after` this to see its rounds from this one on. folder: one whose keys begin with the round."""
    return f"{folder}{_round(round_number)}"


def outcome(slot: str, incarnation: int) -> str:
    """Key of how one incarnation ended."""
    return f"{OUTCOMES}{check_slot(slot)}/{_within(incarnation, MAX_INCARNATION):06d}.json"


def code(digest: str) -> str:
    """Key of a packed code folder, by the sha256 of the archive."""
    return f"{CODE}{digest}.tar.gz"


def state(serial: int) -> str:
    """Key of one serial of the state."""
    return f"{STATE}{_within(serial, MAX_SERIAL):08d}.json"


def serial_of(key: str) -> int | None:
    """The serial in a key made by `state`; None for any other."""
    match = _SERIAL.fullmatch(key)
    return None if match is None else int(match[1])


def state_notes(serial: int) -> str:
    """Prefix of what was done while this serial was held."""
    return f"{STATE}{_within(serial, MAX_SERIAL):08d}/"


def state_note(serial: int, number: int) -> str:
    """Key of one thing that was done while this serial was held."""
    return f"{state_notes(serial)}{_within(number, MAX_NOTE):06d}.json"


def slot_of(key: str) -> str:
    """The slot in a heartbeat, contribution, payload, receipt, member or outcome key. Raises Invalid for any other."""
    return _parse(key, _OF_A_SLOT)


def round_of(key: str) -> int:
    """The round in a decision, commit, contribution, payload, receipt, checkpoint, private or pin key; the number in an
    unfinished one. Raises Invalid for any other, also below those folders: what we did not write is not ours to delete.
    """
    return int(_parse(key, _OF_A_ROUND))


def _round(number: int) -> str:
    return f"{_within(number, MAX_ROUND):08d}"


def _within(number: int, limit: int) -> int:
    if not 0 <= number <= limit:
        raise Invalid(f"number does not fit its key: {number}, allowed 0 to {limit}")
    return number


def _parse(key: str, pattern: re.Pattern[str]) -> str:
    match = pattern.fullmatch(key)
    if match is None or match.lastindex is None:
        raise Invalid(f"not a key of this kind: {key[:_TOLD]!r}")
    return match[match.lastindex]
