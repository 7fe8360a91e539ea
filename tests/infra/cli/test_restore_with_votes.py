"""`skerry restore` of a run with failover: its replicas go where the operator's order says, or where they voted."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from tests.infra.cli.test_replicate_restore_commands import ROUNDS, damage
from tests.kit.managers import begin_run, islands_of, train_all
from tests.support.command_line import invoke

from skerry.infra.cli import replicate_restore_commands
from skerry.infra.local.workspace import operator_name
from skerry.infra.run import restore_run
from skerry.infra.run.run_record import find_move
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.run_record import FailoverSettings, MirrorSettings
from skerry.runtime.mirrors.ballots import Ballots, read_verdict
from skerry.runtime.mirrors.failover_vote import go_on
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.runtime.log.run_record import Run, Verdict
    from skerry.runtime.store import Store


class Voting:
    """A run with failover whose store is away for good, and its two mirrors. votes: where its replicas vote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, west, south = ((folder / name).as_uri() for name in ("east/my-run", "west", "south"))
        self.votes, self.south = f"{west}/my-run", f"{south}/my-run"
        self.goes_on = f"{self.votes}-failover"
        settings = FailoverSettings(mirror=self.votes, uri=self.goes_on, after_s=60.0)
        kept = tuple(MirrorSettings(uri=uri, each_round=True) for uri in (self.votes, self.south))
        store = open_store(self.home)
        begin_run(store, "ab", minimum=2, store=self.home, mirrors=kept, failover=settings)
        train_all(islands_of(store, "ab", grace_s=60.0), ROUNDS, close=True)
        for to in (west, south):
            copied = invoke("replicate", self.home, "--to", to)
            assert copied.exit_code == 0, copied.output
        shutil.rmtree(folder / "east")

    def vote(self) -> Verdict:
        """All replicas vote; the verdict."""
        mirror = open_store(self.votes)
        run, verdict = read_run(mirror), None
        assert run is not None
        for slot in run.slots:
            ballots = Ballots(mirror, run, slot, SystemClock(), find_cut)
            verdict = ballots.read()
            if verdict is None:
                ballots.vote(0)
                verdict = ballots.move()
        assert verdict is not None
        return verdict

    def go_on(self, verdict: Verdict) -> Run:
        """The run in which the replicas go on."""
        assert verdict.uri is not None
        return go_on(open_store(self.votes), verdict, open_store(verdict.uri), SystemClock(), verdict.by)

    def read(self, uri: str) -> Run:
        run = read_run(open_store(uri))
        assert run is not None
        return run


@pytest.fixture
def voting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Voting:
    monkeypatch.setenv("SKERRY_FAILOVER", "as `skerry-replica run` sets it")
    return Voting(tmp_path)


def test_restore_from_another_mirror_is_the_verdict_for_replicas(voting: Voting) -> None:
    """Its replicas ask the mirror in which they vote, and no other."""
    done = invoke("restore", voting.south)
    assert done.exit_code == 0, done.output
    verdict = voting.vote()
    assert (verdict.uri, verdict.by, verdict.votes) == (voting.goes_on, operator_name(), ())
    assert voting.go_on(verdict).nonce == voting.read(voting.goes_on).nonce
    assert invoke("restore", voting.votes).exit_code == 0  # again


def test_verdict_without_its_run_is_completed_from_another_mirror(voting: Voting) -> None:
    verdict = voting.vote()
    damage(voting.folder / "west/my-run", keys.CHECKPOINTS)
    with pytest.raises(Corrupt, match="payload is damaged"):
        voting.go_on(verdict)
    assert invoke("restore", voting.votes).exit_code == 1
    elsewhere = invoke("restore", voting.south, "--to", f"{voting.south}-2")
    assert (elsewhere.exit_code, f"goes on at {voting.goes_on} from round {ROUNDS}" in elsewhere.output) == (1, True)
    done = invoke("restore", voting.south)
    assert done.exit_code == 0, done.output
    assert voting.go_on(verdict).nonce == voting.read(voting.goes_on).nonce
    again = invoke("restore", voting.south)
    assert again.exit_code == 2
    assert "the run was not lost: it goes on at" in again.output


def test_restore_refuses_another_run_where_the_replicas_go_on(voting: Voting) -> None:
    voting.vote()
    begin_run(open_store(voting.goes_on), "a")
    refused = invoke("restore", voting.votes)
    assert refused.exit_code == 2
    assert f"delete it with `skerry destroy {voting.goes_on}`" in refused.output


def test_no_verdict_leads_to_an_occupied_place(voting: Voting) -> None:
    """It is final, and replicas could never go on there."""
    occupied = f"{voting.south}-other"
    begin_run(open_store(occupied), "a")
    refused = invoke("restore", voting.votes, "--to", occupied)
    assert refused.exit_code == 1
    assert read_verdict(open_store(voting.votes)) is None
    assert invoke("restore", voting.votes).exit_code == 0


@pytest.mark.parametrize("mirror", ["votes", "south"])
def test_votes_are_not_lost_while_the_run_goes_on_by_them(
    voting: Voting, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    voting.go_on(voting.vote())

    def fail(*_: object) -> None:
        raise Retryable("a moment away")

    monkeypatch.setattr(restore_run, "read_verdict", fail)
    refused = invoke("restore", getattr(voting, mirror), "--votes-are-lost")
    assert refused.exit_code == 2, refused.output
    assert "leave out --votes-are-lost" in refused.output
    assert not (voting.folder / f"{'west' if mirror == 'votes' else 'south'}/my-run-restored").exists()


def test_restore_needs_the_mirror_with_the_votes(voting: Voting, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_all_but_one(uri: str, **more: object) -> Store:
        store = open_store(uri, **more)
        if uri == voting.votes:
            monkeypatch.setattr(type(store), "read", refuse_one(type(store).read))
        return store

    def refuse_one(read: Callable[..., object]) -> Callable[..., object]:
        def refuse(store: Store, *words: object, **more: object) -> object:
            if store.uri == voting.votes:
                raise Unauthorized("refused")
            return read(store, *words, **more)

        return refuse

    monkeypatch.setattr(replicate_restore_commands, "open_store", open_all_but_one)
    refused = invoke("restore", voting.south)
    assert refused.exit_code == 1
    assert f"by votes in {voting.votes}, which cannot be read" in refused.output
    done = invoke("restore", voting.south, "--votes-are-lost")
    assert done.exit_code == 0, done.output
    assert voting.read(f"{voting.south}-restored").parent is not None


def test_votes_that_can_be_read_are_not_lost(voting: Voting) -> None:
    """With a verdict they lead to a run; `restore` beside them would make a second one."""
    for _ in range(2):  # before the verdict and after it
        for mirror in (voting.votes, voting.south):
            refused = invoke("restore", mirror, "--votes-are-lost", "--auto-approve")
            assert refused.exit_code == 2
            assert "so they are not lost: leave out --votes-are-lost" in refused.output
            assert voting.votes in refused.output
        voting.vote()
    assert not list(voting.folder.rglob("*-restored"))


def test_order_after_a_replica_has_stayed_names_the_store(voting: Voting, monkeypatch: pytest.MonkeyPatch) -> None:
    read, replica = (
        Ballots.read,
        Ballots(open_store(voting.votes), voting.read(voting.votes), "r-0", SystemClock(), find_cut),
    )

    def stay_after_the_look(self: Ballots) -> Verdict | None:
        monkeypatch.setattr(Ballots, "read", read)
        verdict = self.read()
        replica.stay()
        return verdict

    monkeypatch.setattr(Ballots, "read", stay_after_the_look)
    refused = invoke("restore", voting.votes)
    assert refused.exit_code == 1
    assert f"stays in its store, {voting.home}: a replica that has reached it" in refused.output
    assert "repeat the command" in refused.output
    assert operator_name() not in refused.output
    assert invoke("restore", voting.votes).exit_code == 0


def test_restore_by_an_operator_is_the_verdict_for_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with failover: its replicas go where the operator says, and never to a second run."""
    monkeypatch.setenv("SKERRY_FAILOVER", "as `skerry-replica run` sets it")
    home, west = (tmp_path / "east/my-run").as_uri(), (tmp_path / "west").as_uri()
    mirror, store = f"{west}/my-run", open_store(home)
    settings = FailoverSettings(mirror=mirror, uri=f"{mirror}-failover", after_s=60.0)
    kept = MirrorSettings(uri=mirror, each_round=True)
    begin_run(store, "ab", minimum=2, store=home, mirrors=(kept,), failover=settings)
    train_all(islands_of(store, "ab", grace_s=60.0), ROUNDS, close=True)
    copied = invoke("replicate", home, "--to", west)
    assert copied.exit_code == 0, copied.output
    assert invoke("restore", mirror, "--rehearse").exit_code == 0
    assert find_move(open_store(mirror)) is None
    chosen = (tmp_path / "north/my-run").as_uri()
    for _ in range(2):  # a repeat completes it
        done = invoke("restore", mirror, "--to", chosen, "--auto-approve")
        assert done.exit_code == 0, done.output
    move = find_move(open_store(mirror))
    assert move is not None
    assert (move.uri, move.round, move.votes) == (chosen, ROUNDS, ())
    refused = invoke("restore", mirror, "--to", f"{chosen}-2", "--auto-approve")
    assert refused.exit_code == 1
    assert f"goes on at {chosen} from round {ROUNDS}" in refused.output
