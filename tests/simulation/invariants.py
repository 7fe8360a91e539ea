"""Checks the invariants after every event, looking behind the store's back.

Nothing of the bucket changes but by a write, and nothing of a replica's shared state but by an applied round: so a
look at every effective write and at every applied round is a look after every event. Reads raw JSON and raw payloads,
never the runtime's own records, and keeps its own fold of the log.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, cast

import xxhash
from tests.simulation.ledger import Ledger
from tests.simulation.operator import ChangedSettings
from tests.simulation.session import EXCHANGES
from tests.simulation.training import averaged, fault_of, floats_of, folded, header_bytes, shared_in, state_of
from tests.simulation.wrong_checkpoints import WrongCheckpoints

from skerry.runtime.checkpointing.checkpoint import state_digest
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.session import Mode
    from tests.simulation.training import Document, Floats, Shared
    from tests.simulation.world import Process, World

    from skerry.runtime.checkpointing.garbage_collector import Retention
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store.memory import MemoryStore

REPLACEABLE = (keys.HEARTBEATS,)


class Listed(NamedTuple):
    """One member of a decision, as it is in the bucket."""

    slot: str
    weight: float
    content: Floats


class BucketReader:
    """Reads raw records and payloads from the bucket, behind the store's back. rotten: payloads, as they were."""

    def __init__(self) -> None:
        self.rotten: dict[str, bytes] = {}
        self._store: MemoryStore | None = None

    def watch(self, store: MemoryStore) -> None:
        """Look into this store from now on."""
        self._store = store

    def _content(self, offer: Document, read_by: str | None = None) -> Floats | None:
        """The tensors of a contribution; None if its payload is not there, or not what its record says.

        read_by: the slot that is about to propose it. A rotten payload counts as it was, unless its header shows the
        rot; its author does not read the header.
        """
        bodies: list[bytes] = []
        for part in offer["parts"]:
            key = keys.payload(offer["round"], offer["slot"], part["digest"])
            body = self._read(key)
            fault = "absent" if body is None else fault_of(body, part, offer["index"])
            if key in self.rotten and (fault == "body" or read_by in {None, offer["slot"]}):
                body, fault = self.rotten[key], None
            if body is None or fault is not None:
                return None
            bodies.append(body)
        return floats_of(bodies, offer["parts"])

    def _members_of(self, decision: Document) -> list[Listed]:
        members: list[Listed] = []
        for share in decision["members"]:
            body = self._read(keys.contribution(decision["round"], decision["exchange"], share["slot"]))
            content = self._content(json.loads(body or b""))
            if content is None:
                raise KeyError(f"payload of {share['slot']} in round {decision['round']}")
            members.append(Listed(share["slot"], share["weight"], content))
        return members

    def _state_in(self, manifest: Document) -> Shared | None:
        """The state in a checkpoint, if its part exists and matches its digests, and it has every fragment."""
        (part,) = manifest["parts"]
        body = self._read(keys.checkpoint_part(manifest["round"], part["digest"]))
        sound = body is not None and fault_of(body, part, manifest["index"]) is None
        return shared_in(body, part) if body is not None and sound else None

    def _read(self, key: str) -> bytes | None:
        assert self._store is not None
        body = self._store.read(key)
        return None if body is None else bytes(body)


class PayloadWrites:
    """Checks the bytes of payload objects: they are under their digest, or a unit that is the same for every slot."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, str], bytes] = {}

    def fault(self, key: str, body: bytes) -> tuple[str, str] | None:
        """The invariant that this write breaks, and what is wrong; None if it breaks none."""
        folder, reduced, unit = key.partition("/reduced/")
        if reduced:
            same = self._units.setdefault((folder.split("/")[1], unit), body) == body
            return None if same else ("agreement", "another reduced unit")
        named = xxhash.xxh3_128_hexdigest(body[: header_bytes(body)]) == key.rsplit("/", 1)[1]
        return None if named else ("write-once", "bytes under another name")


class Checker(BucketReader):
    """Sees every write of a run and every applied round; collects what is broken, and stops the world."""

    def __init__(
        self, world: World, run: Run, *, spares: bool, mode: Mode = "diloco", retention: Retention | None = None
    ) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.states: dict[int, Shared] = {}
        self.commits: dict[int, str] = {}
        self.decisions: defaultdict[int, list[str]] = defaultdict(list)  # of each round, by exchange
        self._averages: defaultdict[int, list[bytes]] = defaultdict(list)
        self.members: dict[int, tuple[str, ...]] = {}
        # What was trained for each decided round, in rounds of one replica, and for all rounds that are closed.
        self._trained: dict[int, float] = {}
        self.work = 0.0
        garbage = () if retention is None else (keys.PAYLOADS, keys.CHECKPOINTS)
        self._may_delete = (keys.PROBE, *garbage)
        self._keep_last = 1 if retention is None else retention.last
        # Rounds that have, or had, a complete checkpoint.
        self._complete: set[int] = set()
        self.wrong = WrongCheckpoints()
        self._world = world
        self._run = run
        self._min_replicas = run.min_replicas
        self._spares = spares
        self._mode: Mode = mode
        self.settings = ChangedSettings(run.slots, run.rounds or 0, run.work, self.broken)
        self._by_tokens = run.weighting == "tokens"
        # Which incarnation made the contribution of a slot to a round.
        self.authors: dict[tuple[int, str], int] = {}
        # Processes that hold something else than the log says, until they take a checkpoint; and slots that knew it of
        # themselves when they came to a round's exchange.
        self.flipped: set[str] = set()
        # What such processes hold after which round: it is still written in the background when they hold the right.
        self._held_wrong: set[tuple[str, int]] = set()
        self.quarantined: set[tuple[str, int]] = set()
        # Attempts at rounds in which a process has abstained, by when they began, in events of the world.
        self.abstained: set[tuple[str, int]] = set()
        self._unread: dict[tuple[int, int, str], Document] = {}
        self.ledger = Ledger(
            self.broken,
            fragments=run.fragments,
            mode=mode,
            sync_every=run.sync_every,
            min_replicas=run.min_replicas,
        )
        self._payloads = PayloadWrites()
        # When each incarnation was claimed, in events of the world, and by which process.
        self._claimed: dict[tuple[str, int], int] = {}
        self._claimer: dict[tuple[str, int], str] = {}
        self.checks: dict[str, Callable[[Process, int, str, bytes], None]] = {
            "members": self._member,
            "payloads": self._payload,
            "contributions": self._contribution,
            "exchanges": self._decision,
            "commits": self._commit,
            "checkpoints": self._checkpoint,
            "receipts": self._receipt,
        }

    def watch_records(self, folder: str, check: Callable[[Process, int, str, bytes], None]) -> None:
        """Call `check` for every object that is created in a folder."""
        self.checks[folder] = check

    @property
    def head(self) -> int:
        return len(self.commits)

    @property
    def is_over(self) -> bool:
        """All rounds of the run are closed, and what it must come to was trained for them."""
        return self._reached(self.settings.rounds, self.settings.work)

    @property
    def was_over(self) -> bool:
        """The run is over, or was over for a replica that has not seen an extension."""
        return any(self._reached(rounds, work) for rounds, work in self.settings.ends)

    def _reached(self, rounds: int, work: float | None) -> bool:
        return self.head >= rounds and (work is None or self.work > work - 1e-6)

    @property
    def newest(self) -> int:
        """The round of the newest complete checkpoint."""
        return max(self._complete, default=0)

    # What happens.

    def created(self, by: Process, began: int, key: str, body: bytes) -> None:
        check = self.checks.get(key.split("/", 1)[0])
        if check is not None:
            check(by, began, key, body)

    def replaced(self, by: Process, key: str) -> None:
        if not key.startswith(REPLACEABLE):
            self.broken("write-once", f"{by.name} replaced {key}")

    def forged(self, round_number: int) -> None:
        """The checkpoint of so many rounds holds another state from now on."""
        self._complete.discard(round_number)
        self.wrong.add(round_number)

    def deleted(self, by: Process, key: str) -> None:
        """Only garbage goes: nothing that a joining replica needs, whichever of the newest checkpoints it finds."""
        is_wrong = self.wrong.take(by.slot, key)
        if not is_wrong and not key.startswith((*self._may_delete, keys.unfinished_prefix(by.slot))):
            self.broken("write-once", f"{by.name} deleted {key}")
        if is_wrong or key.startswith((keys.PROBE, keys.UNFINISHED)):
            return
        self._world.facts["objects deleted"] += 1
        round_number = keys.round_of(key)
        if round_number >= self._needed():
            self.broken("durability", f"{by.name} deleted {key}; needed is everything from round {self._needed()} on")
        if key == keys.checkpoint_manifest(round_number):
            self._complete.discard(round_number)
        elif key.startswith(keys.CHECKPOINTS):
            manifest = self._read(keys.checkpoint_manifest(round_number))
            # A replica that lost the race to make checkpoint 0 has left parts that no manifest names.
            if manifest is not None and key.rsplit("/", 1)[1].encode() in bytes(manifest):
                self._may_be_seen(by, key, round_number)

    def _may_be_seen(self, by: Process, key: str, round_number: int) -> None:
        """A part may go from under a manifest only if that was made by a writer that came too late."""
        if round_number in self._complete and not self._world.faults["hidden"]:
            self.broken("durability", f"{by.name} deleted {key} while its checkpoint is visible")
        self._complete.discard(round_number)

    def _needed(self) -> int:
        """The oldest of the newest complete checkpoints that are kept: everything from there on stays."""
        # A store that hides objects from listings lets a collector keep fewer of them, and never none.
        keep = 1 if self._world.faults["hidden"] else self._keep_last
        return min(sorted(self._complete)[-keep:], default=0)

    def applied(self, by: Process, round_number: int, after: Shared) -> None:
        """A replica applied a round: each of its fragments must be what the log says, and so what all others have."""
        expected = self.states.get(round_number + 1)
        if by.name in self.flipped:
            self._held_wrong.add((by.name, round_number))
        if expected != after and by.name not in self.flipped:
            self.broken("agreement", f"{by.name} after round {round_number}: {_difference(after, expected)}")
        if round_number not in self.commits:
            self.broken("agreement", f"{by.name} applied round {round_number}, which is not closed")

    def broken(self, invariant: str, what: str) -> None:
        """Remember a violation and stop."""
        self.violations.append(f"{invariant}: {what}")
        self._world.note("CHECKER", "BROKEN", invariant, what)
        self._world.broken = True

    # Each kind of record, when it appears.

    def _member(self, by: Process, began: int, key: str, body: bytes) -> None:
        del began
        slot, incarnation = keys.slot_of(key), keys.incarnation_of(key)
        self._claimed[slot, incarnation] = self._world.events
        self._claimer[slot, incarnation] = by.name
        if incarnation and (slot, incarnation - 1) not in self._claimed:
            self.broken("fencing", f"{by.name} left a gap before incarnation {incarnation} of {slot}")
        if json.loads(body)["slot"] != slot:
            self.broken("fencing", f"{by.name} claimed {key} for another slot")

    def _fenced(self, by: Process, began: int, key: str) -> None:
        """A replaced incarnation may end the exchange that it is in; in a later one it writes nothing."""
        if by.incarnation is None:
            return
        if self._claimer[by.slot, by.incarnation] != by.name:
            self.broken("fencing", f"{by.name} created {key} as incarnation {by.incarnation}, which is not its own")
        successor = self._claimed.get((by.slot, by.incarnation + 1))
        if successor is not None and successor < began:
            self.broken("fencing", f"{by.name}, incarnation {by.incarnation} and replaced, created {key}")

    def healed(self, by: Process) -> None:
        """The process has the state of the others again, and may contribute to the current round."""
        self.quarantined = {(slot, number) for slot, number in self.quarantined if slot != by.slot}

    def _payload(self, by: Process, began: int, key: str, body: bytes) -> None:
        self._fenced(by, began, key)
        if (fault := self._payloads.fault(key, body)) is not None:
            self.broken(fault[0], f"{by.name} wrote {fault[1]}: {key}")

    def _contribution(self, by: Process, began: int, key: str, body: bytes) -> None:
        self._fenced(by, began, key)
        record = json.loads(body)
        round_number = keys.round_of(key)
        if record["slot"] != by.slot or record["incarnation"] != by.incarnation or keys.slot_of(key) != by.slot:
            self.broken("fencing", f"{by.name} contributed as {record['slot']}/{record['incarnation']} at {key}")
        if record["round"] != round_number or record["base"] != self._base(round_number):
            self.broken("chain", f"{by.name} contributed on another base: {key}")
        if (by.slot, round_number) in self.quarantined:
            self.broken("quarantine", f"{by.name} contributed {key} although it knows that its state is another")
        if (by.name, began) in self.abstained:
            self.broken("veto", f"{by.name} contributed {key} after it abstained from this attempt at the round")
        self.authors[round_number, by.slot] = record["incarnation"]
        self.ledger.contribution_created(record)
        content = self._content(record)
        faults = self._world.faults
        # A process that slept may contribute to a round whose payloads are collected: old, and in no decision.
        is_old = round_number < self._needed()
        if content is None and not is_old and not faults["poison"] and not faults["vanished"]:
            self.broken("durability", f"{by.name} contributed {key} before its payload")
        if content is not None:
            self.ledger.contribution_stored(record, content)
        else:
            self._unread[round_number, record["exchange"], by.slot] = record

    def _decision(self, by: Process, began: int, key: str, body: bytes) -> None:
        self._fenced(by, began, key)
        record = json.loads(body)
        round_number, exchange = keys.round_of(key), record["exchange"]
        done = self.decisions[round_number]
        if record["base"] != self._base(round_number) or (record["round"], exchange) != (round_number, len(done)):
            self.broken("chain", f"{by.name} decided on another base: {key}")
            return
        slots = [share["slot"] for share in record["members"]]
        if len(slots) < self._min_replicas or (self._spares and len(slots) != self._min_replicas):
            self.broken("quorum", f"{by.name} decided with {slots}, min_replicas={self._min_replicas}")
        if slots != sorted(set(slots), key=keys.slot_order):
            self.broken("agreement", f"{by.name} decided with members out of order: {slots}")
        members = self._listed(by, record)
        if members is None:
            return
        for slot in slots:  # a payload that was gone, and has come after all
            late = self._unread.pop((round_number, exchange, slot), None)
            if late is not None and (content := self._content(late)) is not None:
                self.ledger.contribution_stored(late, content)
        self.ledger.decision_stored(round_number, exchange, slots)
        if exchange == 0:
            self.settings.decided(round_number, record.get("settings"))
        done.append(hashlib.sha256(body).hexdigest())
        self.members[round_number] = min(self.members.get(round_number, tuple(slots)), tuple(slots), key=len)
        averages = self._averages[round_number]
        averages.append(averaged([member.weight for member in members], [member.content for member in members]))
        if len(averages) == EXCHANGES[self._mode]:
            outer = self._outer(record)
            self.states[round_number + 1] = folded(self.states[round_number], round_number, *averages, outer=outer)

    def _outer(self, decision: Document) -> bytes:
        """The outer step after a decision; LocalSGD and DDP have none."""
        return self.settings.outer(decision.get("settings")) if self._mode == "diloco" else b""

    def _listed(self, by: Process, record: Document) -> list[Listed] | None:
        """Read the members of a decision from the bucket; None, and a violation, if something is missing."""
        round_number = record["round"]
        members: list[Listed] = []
        tokens: list[int] = []
        shares: list[float] = []
        for share in record["members"]:
            slot = share["slot"]
            body = self._read(keys.contribution(round_number, record["exchange"], slot))
            if body is None or hashlib.sha256(body).hexdigest() != share["contribution"]:
                self.broken("durability", f"{by.name} listed a contribution of {slot} that is not there")
                return None
            offer = json.loads(body)
            if offer["base"] != record["base"] or offer["index"] != record["index"] or offer["slot"] != slot:
                self.broken("chain", f"{by.name} listed a contribution of {slot} that does not fit")
            content = self._content(offer, read_by=by.slot)
            if content is None:
                self.broken("durability", f"{by.name} listed {slot} in round {round_number}; it cannot be averaged")
                return None
            tokens.append(offer["tokens"])
            shares.append(offer["share"])
            members.append(Listed(slot, share["weight"], content))
        self._trained[round_number] = min(self._trained.get(round_number, math.inf), math.fsum(shares))
        weights = [float(count) for count in tokens] if self._by_tokens and all(tokens) else shares
        if (given := [member.weight for member in members]) != weights:
            self.broken("agreement", f"{by.name} decided with weights {given}, due are {weights}")
        return members

    def _commit(self, by: Process, began: int, key: str, body: bytes) -> None:
        self._fenced(by, began, key)
        record = json.loads(body)
        round_number = keys.round_of(key)
        if record["round"] != round_number or record["previous"] != self._base(round_number):
            self.broken("chain", f"{by.name} closed round {round_number} on another base")
        averages = list(map(xxhash.xxh3_128_hexdigest, self._averages[round_number]))
        decisions = self.decisions[round_number]
        if (record["exchanges"], record["averages"], len(decisions)) != (decisions, averages, EXCHANGES[self._mode]):
            self.broken("agreement", f"{by.name} closed round {round_number} without its decisions or averages")
        elif record["participants"] != len(self.members[round_number]):
            self.broken("agreement", f"{by.name} closed round {round_number} with {record['participants']} members")
        elif record["work"] != self.work + self._trained[round_number]:
            self.broken("agreement", f"{by.name} closed round {round_number} with work {record['work']}")
        if self.is_over:
            self.broken("end", f"{by.name} closed round {round_number} of a run that was over")
        self.work = record["work"]
        self.commits[round_number] = hashlib.sha256(body).hexdigest()

    def _checkpoint(self, by: Process, began: int, key: str, body: bytes) -> None:
        del began
        if not key.endswith("/manifest.json"):
            return
        record = json.loads(body)
        round_number = keys.round_of(key)
        state = self._state_in(record)
        if round_number == 0 and state is not None:
            self.states.setdefault(0, state)
        self._world.facts["checkpoints out of turn"] += round_number > 0 and not self._is_turn(round_number, by.slot)
        if state is None:
            # A writer that slept may finish what was collected meanwhile: old, incomplete, and passed over.
            if round_number >= self._needed():
                self.broken("durability", f"{by.name} made checkpoint {round_number} visible before its parts")
        elif state == self.states.get(round_number) and record["commit"] == self._base(round_number):
            self._complete.add(round_number)
        elif (by.name, round_number - 1) in self._held_wrong and record["commit"] == self._base(round_number):
            self.wrong.add(round_number, by.slot)
        else:
            self.broken("agreement", f"{by.name} wrote checkpoint {round_number} of another state")

    def _receipt(self, by: Process, began: int, key: str, body: bytes) -> None:
        del began
        record = json.loads(body)
        round_number = keys.round_of(key)
        state = state_of(self.states.get(round_number + 1, ()), has_fragments=self._mode == "diloco")
        if self._mode != "diloco":  # then receipts cover parameters, each by its place
            state = {repr((key, "shared")): cast("Document", value)["shared"] for key, value in state.items()}
        right = None if record["scope"] == "average" else state_digest(state)
        if record["state"] != right and (by.name, round_number) not in self._held_wrong:
            self.broken("agreement", f"{by.name} left a receipt of another state: {key}")
        if record["commit"] != self.commits.get(round_number) or "disputed" in record:
            self.broken("agreement", f"{by.name} left a receipt of another commit, or disputes a right unit: {key}")

    def _is_turn(self, round_number: int, slot: str) -> bool:
        """This slot is to write the checkpoint of so many rounds."""
        every, members = self._run.checkpoint_every, self.members[round_number - 1]
        is_due = round_number % every == 0 or self.is_over
        return is_due and members[(round_number // every) % len(members)] == slot

    # The whole, from the store alone.

    def rebuild(self, when: str) -> None:
        """Compute the state at the head as a new replica would have to, and compare."""
        try:
            state = self.rebuilt(self.head)
        except (KeyError, ValueError, TypeError) as error:
            self.broken("durability", f"the head cannot be rebuilt {when}: {error!r}")
            return
        if state is not None and state != self.states[self.head]:
            self.broken("durability", f"the head, rebuilt {when}: {_difference(state, self.states[self.head])}")

    def rebuilt(self, head: int) -> Shared | None:
        """The state after so many rounds; None before there is any. Raises KeyError if it does not follow."""
        if not self.states:
            return None
        round_number, state = self._newest_checkpoint(head)
        while round_number < head and (commit := self._read(keys.commit(round_number))) is not None:
            averages: list[bytes] = []
            outer = b""
            for exchange, digest in enumerate(json.loads(commit)["exchanges"]):
                decision = self._read(keys.decision(round_number, exchange))
                if decision is None or hashlib.sha256(decision).hexdigest() != digest:
                    raise KeyError(f"decision of round {round_number}")
                members = self._members_of(json.loads(decision))
                averages.append(averaged([member.weight for member in members], [member.content for member in members]))
                outer = self._outer(json.loads(decision))
            state = folded(state, round_number, *averages, outer=outer)
            round_number += 1
        if round_number != head:
            raise KeyError(f"commit of round {round_number}")
        return state

    def _newest_checkpoint(self, head: int) -> tuple[int, Shared]:
        """The newest complete one of at most so many rounds."""
        for round_number in range(head, -1, -1):
            manifest = self._read(keys.checkpoint_manifest(round_number))
            if manifest is None or round_number in self.wrong:
                continue
            state = self._state_in(json.loads(manifest))
            if state is not None:
                return round_number, state
        raise KeyError("no complete checkpoint")

    def _base(self, round_number: int) -> str | None:
        """Digest of the commit before a round; None if that is not closed."""
        return GENESIS if round_number == 0 else self.commits.get(round_number - 1)


def _difference(held: Shared, expected: Shared | None) -> str:
    """For a report: the fragments that differ from the state that follows from the log."""
    if expected is None or len(held) != len(expected):
        return f"{len(held)} fragments where the log gives {expected}"
    pairs = enumerate(zip(held, expected, strict=True))
    return "; ".join(f"fragment {n} is {a[:12]}, the log says {b[:12]}" for n, (a, b) in pairs if a != b)
