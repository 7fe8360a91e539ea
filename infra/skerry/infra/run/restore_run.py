"""Restores a run from a mirror: what is lost, the new run, and the end of the original where it can be reached."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from skerry.infra.run.run_record import Move, load_run
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Conflict, Corrupt, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.find_moved_run import read_elsewhere
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.records import Member, Outcome
from skerry.runtime.log.run_record import Elsewhere, Run
from skerry.runtime.mirrors.ballots import Ballots, read_verdict
from skerry.runtime.mirrors.checked_cut import CheckedCuts, check_free
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import MirrorSettings, Verdict
    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store import Store

RESTORED = "-restored"

FindCut: TypeAlias = "Callable[[Store, int | None], Cut]"
"""Finds the newest cut of a mirror, or the one of so many rounds. Raises as `find_cut`."""


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """The effect of a restore. original: the URI of the run that is mirrored, None for a copy made by hand.

    closed: rounds of the original, None if it cannot be reached or is no such run any more; then `unreachable` has the
    reason. target: the URI of the restored run if none is named. votes: the mirror in which the replicas of a run with
    failover look where it goes on. passed: other mirrors that could not be used, with the reason.
    """

    cut: Cut
    uri: str
    original: str | None
    closed: int | None
    unreachable: str = ""
    target: str
    votes: Store | None = None
    passed: tuple[str, ...] = ()

    @property
    def not_used(self) -> tuple[str, ...]:
        """Mirrors, checkpoints, rounds and records that are passed over, with the reason."""
        return (*self.passed, *self.cut.skipped)

    def after(self, run: Run) -> RestorePlan:
        """The plan that an earlier restore has carried out: `run` is its result."""
        number = self.cut.round if run.parent is None else run.parent.round
        return replace(self, cut=replace(self.cut, round=number, checkpoint=min(number, self.cut.checkpoint)))

    @property
    def lost(self) -> int:
        """The closed rounds that are known and not in the restored run."""
        return max(self.cut.logged, self.closed or 0) - self.cut.round


def finder_of_cuts(
    clock: Clock, open_at: Callable[[str], Store], to: str | None, *, reads_bytes: bool, may_be_done: bool
) -> FindCut:
    """reads_bytes: every byte of a cut, each once, so that a restore of it cannot meet damage; else records alone.

    may_be_done: records are enough if the run was restored already at `to`, or where it is without that.
    """
    if not reads_bytes:
        return find_cut
    cuts = CheckedCuts(clock)

    def find(store: Store, at: int | None) -> Cut:
        if may_be_done:
            # What is wrong with the mirror is reported by `cuts`, with the target by the first request there.
            with suppress(SkerryError, OSError):
                cut = find_cut(store, at)
                target = open_at((to or _default_target(store, cut.run)).rstrip("/"))
                if find_restored(target, cut.run, at) is not None:
                    return cut
        return cuts.find(store, at)

    return find


def _default_target(mirror: Store, run: Run) -> str:
    """The URI at which a run is restored if no verdict and no operator has named one."""
    return mirror.uri.rstrip("/") + RESTORED if run.failover is None else run.failover.uri


def plan_restore(
    mirror: Store,
    at: int | None,
    open_at: Callable[[str], Store],
    find: FindCut,
    *,
    votes_are_lost: bool = False,
) -> RestorePlan:
    """Look at a mirror, and at its original if that can be reached. open_at: opens a store that answers soon or fails.

    find: the cut to restore. votes_are_lost: the mirror with the votes of a run with failover is lost for good.
    Raises Invalid, with what there is, if nothing can be restored, if the run goes on by itself, and if votes that are
    said to be lost can be read.
    """
    if votes_are_lost:
        _check_votes_are_lost(mirror, open_at)
    votes = None if votes_are_lost else _find_votes(mirror, open_at)
    verdict = None if votes is None else _read_verdict(votes, mirror)
    if verdict is not None and verdict.uri is not None:
        _check_not_on(verdict, open_at(verdict.uri))
    cut = find(mirror, at if at is not None or verdict is None else verdict.round)
    if verdict is not None and (verdict.round, verdict.commit) != (cut.round, cut.commit):
        raise Conflict(
            f"run {cut.run.name} goes on at {verdict.uri} from round {verdict.round}, by a verdict of {verdict.by}, "
            f"which round {cut.round} of {mirror.uri} is not; leave out --at, or restore from another mirror"
        )
    try:
        mark = read_elsewhere(mirror)
    except Corrupt:  # `find` has named it
        mark = None
    if mark is not None and mark.why == "moved":
        raise Invalid(f"run {cut.run.name} was restored already: it goes on at {mark.uri}")
    target = mirror.uri.rstrip("/") + RESTORED if votes is None else _default_target(mirror, cut.run)
    if verdict is not None and verdict.uri is not None:
        target = verdict.uri
    original = cut.run.store if mark is None else mark.uri
    if original is None or original.rstrip("/") == mirror.uri.rstrip("/"):
        return RestorePlan(cut=cut, uri=mirror.uri, original=None, closed=None, target=target, votes=votes)
    try:
        store = open_at(original)
        closed = find_closed(store, 0) if _is_run(store, cut.run.nonce) else None
        reason = "" if closed is not None else "no such run is there any more"
    except (SkerryError, OSError) as error:
        closed, reason = None, str(error)
    return RestorePlan(
        cut=cut, uri=mirror.uri, original=original, closed=closed, unreachable=reason, target=target, votes=votes
    )


def _find_votes(mirror: Store, open_at: Callable[[str], Store]) -> Store | None:
    """The only mirror that has the votes of the run; None for a run without failover."""
    run = load_run(mirror)
    if run is None or run.failover is None:
        return None
    uri = run.failover.mirror
    return mirror if uri.rstrip("/") == mirror.uri.rstrip("/") else open_at(uri)


def _read_verdict(votes: Store, mirror: Store) -> Verdict | None:
    run = load_run(mirror)
    try:
        return read_verdict(votes, None if run is None else run.nonce)
    except (SkerryError, OSError) as error:
        raise Conflict(
            f"the replicas may go on by votes in {votes.uri}, which cannot be read: {in_short(error)}; try again. If "
            "that mirror is lost for good, stop all replicas, and add --votes-are-lost"
        ) from error


def _check_votes_are_lost(mirror: Store, open_at: Callable[[str], Store]) -> None:
    """Raise Invalid if the votes can be read, or the run goes on by them: it would be restored twice."""
    run = load_run(mirror)
    if run is None or run.failover is None:
        return
    if run.failover.mirror.rstrip("/") == mirror.uri.rstrip("/"):
        raise Invalid(f"the votes are in {mirror.uri} itself, so they are not lost: leave out --votes-are-lost")
    try:
        moved = load_run(open_at(run.failover.uri))
    except (SkerryError, OSError):
        moved = None
    if moved is not None and moved.parent is not None and moved.parent.run == run.nonce:
        raise Invalid(f"run {run.name} goes on at {run.failover.uri} already, by votes: leave out --votes-are-lost")
    try:
        votes = open_at(run.failover.mirror)
        _read_verdict(votes, mirror)
    except (SkerryError, OSError):
        return
    raise Invalid(f"the votes in {votes.uri} can be read, so they are not lost: leave out --votes-are-lost")


def _check_not_on(verdict: Verdict, target: Store) -> None:
    """Raise Invalid if the run goes on there by votes already, or if another run is in its place.

    A verdict whose run was never completed can be: `restore` makes the same run.
    """
    run = load_run(target)
    if run is None:
        return
    if not verdict.leads_to(run):
        raise Invalid(
            f"by a verdict of {verdict.by} the run goes on at {target.uri}, but that has another run, {run.name}; "
            f"delete it with `skerry destroy {target.uri}`, and repeat"
        )
    if verdict.votes:
        raise Invalid(f"the run was not lost: {Move(uri=target.uri, round=verdict.round, votes=verdict.votes)}")


def best_mirror(
    uris: Sequence[str], open_at: Callable[[str], Store], at: int | None, find: FindCut
) -> tuple[Store, tuple[str, ...]]:
    """The mirror from which most rounds can go on, the first of equal ones; and why others were passed over.

    open_at: may raise for a mirror whose place is away. A mirror is read whole only if it promises more rounds than
    those that have been read. Raises Invalid, with reasons, if none can be restored.
    """
    promised: list[tuple[int, Store]] = []
    runs: dict[str, str] = {}
    passed: list[str] = []
    best: tuple[int, Store] | None = None
    for uri in uris:
        try:
            store = open_at(uri)
            cut = find_cut(store, at)
        except (SkerryError, OSError) as error:
            passed.append(f"{uri}: {in_short(error)}")
            continue
        promised.append((cut.round, store))
        runs.setdefault(cut.run.nonce, f"{uri} (started {cut.run.created})")
    if len(runs) > 1:
        raise Invalid(
            f"the mirrors hold different runs of one name: {', '.join(runs.values())}; name the mirror to restore, as "
            "in `skerry restore URI`"
        )
    for rounds, store in sorted(promised, key=lambda pair: -pair[0]):
        if best is not None and best[0] >= rounds:
            break
        try:
            cut = find(store, at)
        except (SkerryError, OSError) as error:
            passed.append(f"{store.uri}: {in_short(error)}")
            continue
        if cut.round < rounds:
            passed.append(f"{store.uri}, after round {cut.round}: {'; '.join(cut.skipped)}")
        if best is None or cut.round > best[0]:
            best = cut.round, store
    if best is None:
        raise Invalid("\n".join(("no mirror of the spec can be restored", *passed)))
    return best[1], tuple(passed)


def mirrors_of_fork(lines: Sequence[MirrorSettings], lost: Run, target_uri: str) -> tuple[MirrorSettings, ...]:
    """The mirrors of a restored run: those of the spec in other buckets than its own, under its own name.

    lines: of the spec. lost: the run that is restored, whose prices stay. Raises Invalid if both have one name.
    """
    name = target_uri.rstrip("/").rpartition("/")[2]
    if any(line.uri.rpartition("/")[2] == name for line in lines):
        raise Invalid(
            f"the mirrors of run {name} hold the lost run; give the new one another name: --to {target_uri}-2"
        )
    prices = {_bucket_of(mirror.uri): mirror.usd_per_gb for mirror in lost.mirrors or ()}
    return tuple(
        line.model_copy(
            update={
                "uri": f"{line.uri.rpartition('/')[0]}/{name}",
                "usd_per_gb": prices.get(_bucket_of(line.uri), line.usd_per_gb),
            }
        )
        for line in lines
        if _bucket_of(line.uri) != _bucket_of(target_uri)
    )


def restore(
    mirror: Store,
    plan: RestorePlan,
    target: Store,
    clock: Clock,
    mirrors: Sequence[MirrorSettings] | None = None,
    *,
    by: str | None,
    on_round: Callable[[int], None] | None = None,
) -> Run:
    """Make the run in `target`; its name is the last part of the URI. mirrors: of that run. Raises as `fork`.

    by: the operator by whose order the replicas of a run with failover go there, for which every byte of the cut must
    have been read; None for a rehearsal. Raises Conflict if they are elsewhere.
    """
    if by is not None and plan.votes is not None:
        verdict = read_verdict(plan.votes, plan.cut.run.nonce)
        if verdict is None or verdict.uri is None:  # it is final: before it, the place must be free and writable
            check_free(target)
            probe(target, clock)
        ballots = Ballots(plan.votes, plan.cut.run, by, clock, find_cut)
        verdict = ballots.order(target.uri, plan.cut)
        if verdict is None:
            raise Conflict(
                f"run {plan.cut.run.name} stays in its store, {plan.cut.run.store}: a replica that has reached it "
                "ended the ballot a moment earlier; if the store is lost, repeat the command"
            )
        if (verdict.uri, verdict.round, verdict.commit) != (target.uri, plan.cut.round, plan.cut.commit):
            raise Conflict(
                f"run {plan.cut.run.name} goes on at {verdict.uri} from round {verdict.round}, "
                f"by a verdict of {verdict.by}"
            )
    return fork(mirror, plan.cut, target, clock.utc_text(), on_round, mirrors)


def find_restored(target: Store, lost: Run, at: int | None) -> Run | None:
    """The run that an earlier restore has made of `lost` in `target`, from round `at` if that is named; None without.

    The original may have come back since, and have closed more rounds, which its mirrors have, too.
    """
    run = load_run(target)
    if run is None or run.parent is None or run.parent.run != lost.nonce or at not in {None, run.parent.round}:
        return None
    return run


def end_original(original: Store, restored: Run, clock: Clock, by: str) -> list[str]:
    """End the replicas of the original with exit code 30 at their next look, and let no other start there.

    Returns their slots. Raises Conflict if it was restored elsewhere before.
    """
    parent, uri = restored.parent, restored.store
    if parent is None or uri is None or not _is_run(original, parent.run):
        return []
    mark = Elsewhere(why="moved", uri=uri, run=parent.run, round=parent.round, by=by, created=clock.utc_text())
    if not original.create(keys.ELSEWHERE, mark.to_bytes()):
        existing = read_elsewhere(original)
        if existing is None or existing.uri != uri:
            at = "another URI" if existing is None else existing.uri
            raise Conflict(f"{original.uri} says that the run goes on at {at}: two runs continue it now; keep one")
    newest: dict[str, int] = {}
    for entry in original.list(keys.MEMBERS):
        try:
            newest[keys.slot_of(entry.key)] = keys.incarnation_of(entry.key)
        except Invalid:  # a foreign object
            continue
    for slot, incarnation in newest.items():
        _claim(original, parent.run, slot, incarnation + 1, uri, clock)
    return sorted(newest, key=keys.slot_order)


def _claim(store: Store, run: str, slot: str, incarnation: int, restored_uri: str, clock: Clock) -> None:
    """Take over a slot of the original: its replica looks for that before it contributes."""
    now = clock.utc_text()
    member = Member(
        run=run,
        slot=slot,
        incarnation=incarnation,
        nonce=clock.nonce(),
        host=socket.gethostname(),
        process=os.getpid(),
        created=now,
    )
    store.create(keys.member(slot, incarnation), member.to_bytes())
    outcome = Outcome(
        run=run,
        slot=slot,
        incarnation=incarnation,
        status="stopped",
        exit_code=int(ExitCode.STOPPED),
        reason=f"the run goes on at {restored_uri}",
        round=0,
        inner_step=0,
        tokens=0,
        loss_first=None,
        loss_last=None,
        ended=now,
    )
    store.create(keys.outcome(slot, incarnation), outcome.to_bytes())


def _bucket_of(uri: str) -> str:
    """The bucket of a URI; of a folder, the one above the run's own."""
    scheme, _, rest = uri.rstrip("/").partition("://")
    return f"{scheme}://{rest.rpartition('/')[0] if scheme == 'file' else rest.partition('/')[0]}"


def _is_run(store: Store, nonce: str) -> bool:
    run = load_run(store)
    return run is not None and run.nonce == nonce
