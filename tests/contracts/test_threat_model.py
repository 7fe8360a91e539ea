"""The threat model's claims: each has tests that exist or says that it is accepted, and its links and commands are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from skerry.infra import targets
from skerry.infra.cli.fast_help_entry_point import COMMANDS
from skerry.infra.spec import model

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/threat-model.md"
ATTACKER: Final = "One compromised replica"
# By the beginning of a claim: the tests that fail if it stops being true. In the files that the claim links.
PROOFS: Final = {
    "contribute a poisoned pseudo-gradient": ("test_bad_contribution_is_refused_and_the_round_continues",),
    "contribute a payload that has not its digest": (
        "test_quarantine_moves_a_damaged_contribution_when_all_have_ended",
        "test_quarantine_moves_a_contribution_without_its_payload",
    ),
    "make its part of an average wrongly": (
        "test_unit_that_is_sound_and_wrong_is_found_with_its_maker",
        "test_dispute_in_a_receipt_is_reported_without_reading_bodies",
    ),
    "propose a decision before others": ("test_replica_joins_without_a_checkpoint_that_no_contributions_back",),
    "close rounds alone": (
        "test_replica_joins_without_a_checkpoint_that_no_contributions_back",
        "test_exported_model_is_of_a_round_that_replicas_have_closed",
    ),
    "create commits of rounds to come": (
        "test_commit_of_a_round_to_come_is_ignored_and_reported_once",
        "test_every_invariant_holds_while_stray_records_appear",
    ),
    "make others delete": ("test_every_invariant_holds_while_stray_records_appear",),
    "create the commit or decision of the open round wrongly": ("test_quarantine_ends_what_stops_the_run",),
    "overwrite or delete decisions": ("test_replica_permissions_allow_no_other_call",),
    "put another state into a checkpoint": (
        "test_replaced_checkpoint_is_skipped_and_the_log_followed",
        "test_members_that_a_checkpoint_names_do_not_vote",
    ),
    "delete payloads of other slots": ("test_replica_permissions_allow_no_other_call",),
    "delete every checkpoint": ("test_deleted_checkpoints_come_back_and_training_goes_on",),
    "slow the others down": ("test_straggler_with_too_long_inner_steps_costs_the_grace_window",),
    "write a log line": ("test_text_of_the_bucket_is_inert",),
    "reach other things in the account": (),
    "start jobs": (
        "test_role_names_its_own_jobs_of_any_number_and_marks_no_other",
        "test_account_without_the_right_to_act_as_itself_starts_nothing",
    ),
}
_LINK: Final = re.compile(r"\]\(([^)#]+)[^)]*\)")


def rows_of(section: str) -> list[list[str]]:
    """The rows of the section's table, without its header."""
    text = PAGE.read_text().split(f"## {section}\n")[1].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def linked(text: str) -> list[Path]:
    return [PAGE.parent / link for link in _LINK.findall(text) if "://" not in link]


def test_each_claim_has_a_test_or_is_accepted() -> None:
    claims = rows_of(ATTACKER)
    assert len(claims) > 15
    for cells in claims:
        proofs = next((names for start, names in PROOFS.items() if cells[0].startswith(start)), None)
        if proofs is None:
            assert re.search(r"\*\*accepted\*\*|no bound", cells[1]), f"neither bounded nor accepted: {cells[0]}"
            continue
        text = "".join(path.read_text() for path in linked(cells[2]))
        assert text, f"names no proof: {cells[0]}"
        assert [name for name in proofs if f"def {name}(" not in text] == [], cells[0]


def test_each_proof_belongs_to_a_claim() -> None:
    claims = [cells[0] for cells in rows_of(ATTACKER)]
    assert [start for start in PROOFS if sum(claim.startswith(start) for claim in claims) != 1] == []


def test_other_attackers_are_bounded_or_accepted() -> None:
    for section in ("An outsider", "One compromised operator's machine"):
        assert [cells[0] for cells in rows_of(section) if len(cells) < 2 or not cells[1]] == []


def test_links_of_the_threat_model_lead_to_files() -> None:
    files = linked(PAGE.read_text())
    assert len(files) > 20
    assert [str(path) for path in files if not path.exists()] == []


def test_commands_and_fields_of_the_threat_model_exist() -> None:
    text = PAGE.read_text()
    known = {name for names in COMMANDS.values() for name in names}
    assert {name for name in re.findall(r"`skerry ([a-z]+)", text) if name not in known} == set()
    schema = model.schema(targets.kinds())
    fields = {"min_replicas", "grace", "undelete_days", "failover", "max_cost_usd", "allowed_accounts", "init_from"}
    assert {name for name in fields if name not in text} == set()
    assert {name for name in fields if f'"{name}"' not in schema} == set()
