"""Copies of a run in other stores, from which it can go on when its own is lost.

    mirror           copies a run to another store, round by round
    restorable       the newest round from which a copy can go on
    ballots          votes of replicas on whether the run leaves its store
    failover_vote    when a replica votes, and what it does by the verdict
    run_from_copy    makes a run of its own from a copy

Every module works on stores and records alone; none needs torch.
"""
