"""Compares the logs under two prefixes, and names the round and the record where they part. Never writes.

Two copies of one run have the same bytes in every commit that both have. A restored run has the records of its parent
under another nonce, so these are compared without nonce and digests.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.record_parsing import Record, digest_of
from skerry.runtime.log.records import Commit, Contribution, Decision
from skerry.runtime.log.run_record import Run
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.store import Store

R = TypeVar("R", bound=Record)
Relation: TypeAlias = Literal["equal", "older", "newer", "restored", "parted", "damaged", "other-run"]

# A restore changes these, because they are digests of records that have the nonce.
_RENAMED: Final = frozenset({"run", "base", "previous", "settings"})
_ABSENT: Final = "absent"


@dataclass(frozen=True, kw_only=True)
class LogComparison:
    """The relation of the first log to the second. ok: no record that both should have differs, and no two runs go on.

    rounds: closed in each. common: so many rounds are the same in both. round, key: of the first record that differs or
    is missing; None if there is none. text: the result and the next step.
    """

    ok: bool
    relation: Relation
    first: str
    second: str
    rounds: tuple[int, int]
    common: int
    round: int | None = None
    key: str | None = None
    text: str


class _Log(NamedTuple):
    store: Store
    run: Run
    closed: int


class _Difference(NamedTuple):
    """A record that differs. why: the fields, or in which log it is absent or damaged."""

    key: str
    why: str


def compare_logs(first: Store, second: Store) -> LogComparison:
    """Compare the commits of two logs, and in the first round that differs also the records that its commit names.

    Of a run and its restored continuation all records of all common rounds are read. Raises Invalid if a prefix has
    no run, and what the stores raise.
    """
    a, b = _open(first), _open(second)
    if a.run.nonce == b.run.nonce:
        return _compare_copies(a, b)
    fork = _fork_round(a.run, b.run)
    if fork is None:
        nonces = f"nonces {a.run.nonce} and {b.run.nonce}"
        text = f"these are two runs, {a.run.name} and {b.run.name}: {nonces}, and neither was restored from the other"
        return _comparison(a, b, 0, "other-run", f"{text}; compare copies of one run", ok=False)
    return _compare_fork(a, b, fork)


def _open(store: Store) -> _Log:
    data = store.read(keys.RUN)
    if data is None:
        raise Invalid(f"no run at {store.uri}; name the URI of a run's own prefix, or of a mirror")
    return _Log(store, Run.parse(data, keys.RUN), _closed(store))


def _closed(store: Store) -> int:
    """The first round after the last commit, of those before which at least half of the rounds have one.

    So a lost record does not hide the later ones, and stray commits do not make the comparison long.
    """
    numbers: list[int] = []
    for entry in store.list(keys.COMMITS):
        with suppress(Invalid):  # a foreign object
            numbers.append(keys.round_of(entry.key))
    return max((number + 1 for place, number in enumerate(numbers) if number <= 2 * place + 1), default=0)


def _fork_round(a: Run, b: Run) -> int | None:
    """The rounds that both logs have by their `parent`; None if they are not related."""
    if a.parent is not None and a.parent.run == b.nonce:
        return a.parent.round
    if b.parent is not None and b.parent.run == a.nonce:
        return b.parent.round
    if a.parent is not None and b.parent is not None and a.parent.run == b.parent.run:
        return min(a.parent.round, b.parent.round)
    return None


def _compare_copies(a: _Log, b: _Log) -> LogComparison:
    common = min(a.closed, b.closed)

    def is_same(number: int) -> bool:
        data = _commit(a, number)
        return data is not None and data == _commit(b, number)

    same = run_parallel(a.store, common, is_same, small=True)
    if all(same):
        if a.closed == b.closed:
            return _comparison(a, b, common, "equal", f"both are of one run and have the same {common} rounds")
        older, newer = (a, b) if a.closed < b.closed else (b, a)
        text = f"{older.store.uri} is an older copy: its {common} rounds are the first of the {newer.closed} rounds"
        relation: Relation = "older" if older is a else "newer"
        return _comparison(a, b, common, relation, f"{text} of {newer.store.uri}")
    number = same.index(False)
    damaged = _damaged_commit(a, b, number)
    if damaged is not None:
        return _comparison(a, b, number, "damaged", f"{damaged.key} {damaged.why}", number, damaged.key)
    different_bytes = _Difference(keys.commit(number), "differs")
    difference = _difference(a, b, number, frozenset()) or different_bytes
    text = (
        f"both are of one run, {a.run.name}, and part in round {number}: {difference.key} {difference.why}; replicas "
        "have gone on in two stores: end those of one, and keep the other"
    )
    return _comparison(a, b, number, "parted", text, number, difference.key)


def _damaged_commit(a: _Log, b: _Log, number: int) -> _Difference | None:
    """A commit that only one log has as the next commit, the same in both, names it; None if the logs part here."""
    key = keys.commit(number)
    for log, other in ((a, b), (b, a)):
        if (data := _commit(log, number)) is None:
            return _Difference(key, f"is missing in {log.store.uri}, which has later rounds; see `skerry doctor`")
        following = _commit(other, number + 1)
        if following is None or following != _commit(log, number + 1):
            continue
        try:
            named = Commit.parse(following, keys.commit(number + 1)).previous
        except Corrupt:
            continue
        if digest_of(data) != named:
            return _Difference(key, f"is damaged in {log.store.uri}: later rounds agree; `skerry doctor --repair`")
    return None


def _compare_fork(a: _Log, b: _Log, fork: int) -> LogComparison:
    shared = min(fork, a.closed, b.closed)
    for number in range(shared):
        difference = _difference(a, b, number, _RENAMED)
        if difference is None:
            continue
        text = f"round {number} should be the same, because it is older than the restore: {difference.key}"
        return _comparison(a, b, number, "parted", f"{text} {difference.why}", number, difference.key)
    names = {log.run.nonce: log for log in (a, b)}
    child = a if a.run.parent is not None and a.run.parent.run in names else b
    parent = None if child.run.parent is None else names.get(child.run.parent.run)
    if parent is None:
        text = f"both were restored from one run, and have its first {shared} rounds; both go on: end one of them"
        return _comparison(a, b, shared, "restored", text, ok=False)
    text = f"{child.store.uri} was restored from {parent.store.uri}, and goes on from round {fork}"
    text += f": it has {child.closed - fork} rounds of its own, the original {max(0, parent.closed - fork)}"
    mark = read_elsewhere(parent.store)
    if mark is None and parent.closed > fork:
        text += f"; no mark ends the replicas at {parent.store.uri}: stop them, or two runs go on"
        return _comparison(a, b, shared, "restored", text, ok=False)
    return _comparison(a, b, shared, "restored", text)


def _difference(a: _Log, b: _Log, number: int, renamed: frozenset[str]) -> _Difference | None:
    """The first record of a round that differs: a contribution before its decision before the commit.

    renamed: fields that are not compared; none for copies of one run.
    """
    key = keys.commit(number)
    left, right = _read(a, Commit, key), _read(b, Commit, key)
    if not isinstance(left, str) and not isinstance(right, str):
        for exchange in range(max(len(left.exchanges), len(right.exchanges))):
            if difference := _difference_of_exchange(a, b, number, exchange, renamed):
                return difference
    return _named(a, b, key, (left, right), renamed)


def _difference_of_exchange(
    a: _Log, b: _Log, number: int, exchange: int, renamed: frozenset[str]
) -> _Difference | None:
    """The first contribution in both decisions that differs, else the decision if that differs."""
    key = keys.decision(number, exchange)
    left, right = _read(a, Decision, key), _read(b, Decision, key)
    if not isinstance(left, str) and not isinstance(right, str):
        slots = {share.slot for share in left.members} & {share.slot for share in right.members}
        for slot in sorted(slots, key=keys.slot_order):
            at = keys.contribution(number, exchange, slot)
            contributions = _read(a, Contribution, at), _read(b, Contribution, at)
            if contributions == (_ABSENT, _ABSENT):
                continue
            if difference := _named(a, b, at, contributions, renamed):
                return difference
    return _named(a, b, key, (left, right), renamed)


def _named(a: _Log, b: _Log, key: str, records: tuple[R | str, R | str], renamed: frozenset[str]) -> _Difference | None:
    """The difference of two records, None for none; a text is the reason why one cannot be read."""
    for log, record in zip((a, b), records, strict=True):
        if isinstance(record, str):
            return _Difference(key, f"is {record} in {log.store.uri}; see `skerry doctor`")
    left, right = (_contents(record, renamed) for record in records if not isinstance(record, str))
    differing = [name for name in left if left[name] != right[name]]
    return _Difference(key, f"differs in {', '.join(differing)}") if differing else None


def _contents(record: Record, renamed: frozenset[str]) -> Mapping[str, object]:
    """The fields that are the same in a copy. Without the digests of other records if these are `renamed`."""
    document = record.model_dump(exclude=set(renamed))
    if renamed and isinstance(record, Commit):
        return document | {"exchanges": len(record.exchanges)}
    if renamed and isinstance(record, Decision):
        return document | {"members": [(share.slot, share.weight) for share in record.members]}
    return document


def _read(log: _Log, kind: type[R], key: str) -> R | str:
    """The record, or why there is none."""
    data = log.store.read(key)
    if data is None:
        return _ABSENT
    try:
        return kind.parse(data, key)
    except Corrupt:
        return "damaged"


def _commit(log: _Log, number: int) -> bytes | None:
    data = log.store.read(keys.commit(number))
    return None if data is None else bytes(data)


def _comparison(
    a: _Log,
    b: _Log,
    common: int,
    relation: Relation,
    text: str,
    number: int | None = None,
    key: str | None = None,
    *,
    ok: bool | None = None,
) -> LogComparison:
    return LogComparison(
        ok=number is None if ok is None else ok,
        relation=relation,
        first=a.store.uri,
        second=b.store.uri,
        rounds=(a.closed, b.closed),
        common=common,
        round=number,
        key=key,
        text=text,
    )
