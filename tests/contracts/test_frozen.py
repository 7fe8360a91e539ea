"""Names that others rely on. A change here is a change of a promise: it needs a decision (CONTRIBUTING.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer.main

from skerry.infra.cli import common, fast_help_entry_point
from skerry.infra.cli.app import app
from skerry.runtime import contract, structured_logging
from skerry.runtime.log import keys
from skerry.runtime.log.records import PROTOCOL
from skerry.runtime.log.run_record import Run

if TYPE_CHECKING:
    import click

COMMANDS = {
    "init": {"--target", "--from"},
    "validate": {"--set", "--json"},
    "schema": set(),
    "up": {"--set", "--json", "--quiet", "--verbose", "-v", "--auto-approve", "--take-over"},
    "status": {"--set", "--json"},
    "watch": {"--set", "--once", "--every", "--json"},
    "report": {"--set", "--output", "-o", "--export", "--full", "--parameters", "--json"},
    "doctor": {"--set", "--deep", "--repair", "--from", "--quarantine", "--undelete", "--json"},
    "pin": {"--set", "--reason", "--list", "--json"},
    "unpin": {"--set", "--json"},
    "export": {"--set", "--output", "-o", "--round", "--force", "--json"},
    "artifacts": {"--set", "--output", "-o", "--replica", "--round", "--force", "--json"},
    "logs": {"--set", "--follow", "-f", "--replica", "--verbose", "-v"},
    "runs": {"--json"},
    "replicate": {
        "--set",
        "--to",
        "--every",
        "--payloads",
        "--no-payloads",
        "--private",
        "--no-private",
        "--follow",
        "--json",
    },
    "restore": {"--set", "--to", "--at", "--dry-run", "--rehearse", "--votes-are-lost", "--auto-approve", "--json"},
    "sandbox": {"--aws", "--google", "--run-jobs", "--json"},
    "extend": {"--set", "--rounds", "--outer-lr", "--outer-momentum", "--at", "--json"},
    "destroy": {"--set", "--yes", "--data", "--json"},
    "plan": {
        "--set",
        "--out",
        "--target",
        "--replace",
        "--parallelism",
        "--destroy",
        "--refresh-only",
        "--detailed-exitcode",
        "--verbose",
        "-v",
        "--json",
    },
    "show": {"--verbose", "-v", "--json"},
    "apply": {"--set", "--target", "--replace", "--parallelism", "--auto-approve", "--take-over", "--json"},
    "output": {"--set", "--name", "--json"},
    "graph": {"--set", "--planned"},
    "state": set(),
    "estimate": {"--set", "--parameters", "--prices", "--json"},
    "unlock": {"--set", "--auto-approve"},
    "cancel": {"--set", "--replica", "--auto-approve", "--json"},
    "import": {"--set", "--auto-approve"},
    "image": set(),
}
EVENTS = """
    abstained always_late artifact_saved catch_up_missing caught_up checkpoint_failed checkpoint_loaded
    checkpoint_saved contributed contribution_refused decided diverged rounding_drift ended healed garbage_collected
    garbage_collection_failed heartbeat_failed initial_model_loaded joined
    local_copy_failed local_copy_saved local_state_failed local_state_missing
    local_state_loaded local_state_saved
    mirror_behind mirrored payload_mended payload_not_mended payload_read_from_copy
    mount_remembers_absence receipt_failed receipts_differ reduced_unit_refused round_closed round_ended_early
    round_failed stop_requested
    store_recovered settings_applied slots_changed early_contribution_failed
    rolled_up roll_up_failed
    averages_differ unit_check_failed unit_disputed stray_records
    store_retry unfinished_round_dropped unfinished_round_failed unfinished_round_resumed unfinished_round_saved
"""
RUN_FIELDS = (
    "protocol nonce name spec slots rounds sync_every fragments outer_lr outer_momentum min_replicas grace_s "
    "start_window_s checkpoint_every keep_checkpoints keep_every keep_unfinished_s codec weighting max_norm "
    "work created init_from reduction store parent layout peers mirrors reduce_in failover links"
)


def test_keys_of_a_run_are_frozen() -> None:
    digest = "0123456789abcdef" * 2
    assert keys.RUN == "run.json"
    assert keys.STATE_ELSEWHERE == "state/elsewhere"
    assert keys.member("local-0", 7) == "members/local-0/000007.json"
    assert keys.heartbeat("local-0") == "heartbeats/local-0.json"
    assert keys.payload(12, "local-0", digest) == f"payloads/00000012/local-0/{digest}"
    assert keys.contribution(12, 3, "local-0") == "contributions/00000012-0003/local-0.json"
    assert keys.decision(12, 3) == "exchanges/00000012-0003.json"
    assert keys.commit(12) == "commits/00000012.json"
    assert keys.receipt(12, "local-0") == "receipts/00000012/local-0.json"
    assert keys.checkpoint_part(12, digest) == f"checkpoints/00000012/{digest}"
    assert keys.checkpoint_manifest(12) == "checkpoints/00000012/manifest.json"
    assert keys.checkpoint_manifest(12, keys.private_prefix("local-0")) == "private/local-0/00000012/manifest.json"
    assert keys.checkpoint_part(12, digest, keys.INITIAL) == f"initial/00000012/{digest}"
    assert keys.checkpoint_manifest(12, keys.INITIAL) == "initial/00000012/manifest.json"
    assert keys.quarantined("commits/00000012.json", "a" * 64) == f"quarantine/{'a' * 64}/commits/00000012.json"
    assert keys.settings(12) == "settings/000012.json"
    assert keys.pin(12) == "pins/00000012.json"
    assert keys.outcome("local-0", 7) == "outcomes/local-0/000007.json"
    assert keys.artifact("local-0", 12, 3, "a.txt") == "artifacts/local-0/00000012-0003/a.txt"
    assert keys.artifact("local-0", 12, 3, "a.bin", 1, 2) == "artifacts/local-0/00000012-0003/a.bin.00001-of-00002"
    assert keys.roll_up(100, 199) == "rollups/00000100-00000199.json.gz"
    assert keys.code(digest) == f"code/{digest}.tar.gz"
    assert keys.PROBE == "probe/"
    assert keys.spent("local-0") == "spent/local-0.json"
    assert keys.vote(12, "local-0") == "failover/000012/votes/local-0.json"
    assert keys.verdict(12) == "failover/000012/verdict.json"
    assert keys.state(12) == "state/00000012.json"
    assert keys.state_note(12, 3) == "state/00000012/000003.json"


def test_run_json_is_frozen_per_protocol() -> None:
    assert PROTOCOL == 1
    assert " ".join(Run.model_fields) == RUN_FIELDS


def test_event_names_are_frozen() -> None:
    assert set(structured_logging.NAMES) == set(EVENTS.split())


def test_contract_with_launchers_is_frozen() -> None:
    place = contract.Contract(run_uri="file:///run", slot="local-1", index=1, replicas=4)
    assert place.environment() == {
        "SKERRY_RUN": "file:///run",
        "SKERRY_SLOT": "local-1",
        "SKERRY_INDEX": "1",
        "SKERRY_REPLICAS": "4",
    }
    codes = {code.name: code.value for code in contract.ExitCode}
    assert codes == {"DONE": 0, "RETRY": 10, "PERMANENT": 20, "STOPPED": 30}


def test_commands_and_their_options_are_frozen() -> None:
    group = typer.main.get_group(app)
    result = {name: options(command) for name, command in group.commands.items()}
    assert result == COMMANDS


def test_help_of_skerry_lists_every_command_with_its_first_sentence() -> None:
    commands = typer.main.get_group(app).commands
    shown = {name: text for texts in fast_help_entry_point.COMMANDS.values() for name, text in texts.items()}
    assert shown.keys() == commands.keys(), "a new command needs a line in cli/fast_help_entry_point.py"
    assert shown == {name: first_sentence(commands[name]) for name in shown}
    assert list(fast_help_entry_point.COMMANDS) == [common.START, common.WATCH, common.CLOUD_PANEL, common.CARE]


def first_sentence(command: click.Command) -> str:
    return re.split(r"(?<=\.)\s", command.help or "", maxsplit=1)[0]


def test_exit_codes_of_skerry_are_frozen() -> None:
    codes = (common.FAILED, common.BAD_USAGE, common.NOT_BY_ALL, common.PUSH_FIRST)
    assert codes == (1, 2, 3, 4)


def options(command: click.Command) -> set[str]:
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return {flag for flag in flags if flag.startswith("-")} - {"--help"}
