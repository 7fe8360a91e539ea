"""The script that machines run before they take jobs: as user data, as a setting, and when something is amiss.

What its rule does to packets is tried in tests/e2e/batch/test_metadata.py.
"""

from __future__ import annotations

import email
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.targets.aws_batch.kit import Scene, context_of

from skerry.infra.targets.aws_batch import metadata_firewall
from skerry.infra.targets.aws_batch.resource_types import LaunchTemplate

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws

OPTIONS: Final = "instance_types: [g5.xlarge], gpus: 1"
TEMPLATE: Final = "aws_launch_template.batch"
REAL_PATH: Final = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"


def run(folder: Path, **failing: str) -> tuple[int, list[str]]:
    """Its exit code and what it called, on a machine whose every program is a line in a file. failing: when they do."""
    calls = folder / "calls"
    for name in ("iptables", "ip6tables", "systemctl", "shutdown", "poweroff", "tee"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {calls}\ncase "$*" in {failing.get(name, "none")}) exit 1;; esac\n'
        )
        program.chmod(0o755)
    assert metadata_firewall.SCRIPT.count(REAL_PATH) == 1
    script = metadata_firewall.SCRIPT.replace(REAL_PATH, f"PATH={folder}\n")
    ended = subprocess.run(["/bin/sh", "-c", script], check=False, timeout=300, capture_output=True)
    assert ended.stderr == b""
    return ended.returncode, [line.split(" -m ")[0] for line in calls.read_text().splitlines()]


def test_user_data_is_mime_with_one_boothook() -> None:
    message = email.message_from_string(metadata_firewall.document())
    assert message.is_multipart()
    assert message.defects == []
    (part,) = message.walk() if not message.is_multipart() else message.get_payload()
    assert part.get_content_type() == "text/cloud-boothook"
    assert part.get_payload() == metadata_firewall.SCRIPT
    # Anything before the shebang, and the kernel runs it with no interpreter.
    assert part.get_payload().startswith("#!/bin/sh\n")
    assert (
        metadata_firewall.decoded(metadata_firewall.encoded(metadata_firewall.document()))
        == metadata_firewall.document()
    )
    assert metadata_firewall.document().isascii()
    assert metadata_firewall.decoded("no base64 of ours\xff") == "no base64 of ours\xff"


def test_second_boot_adds_no_second_rule(tmp_path: Path) -> None:
    assert run(tmp_path) == (
        0,
        ["iptables -w 60 -C OUTPUT -d 169.254.169.254/32", "ip6tables -w 60 -C OUTPUT -d fd00:ec2::254/128"],
    )


def test_new_machine_inserts_the_rule_first(tmp_path: Path) -> None:
    code, calls = run(tmp_path, iptables='*" -C "*')
    assert (code, calls[1]) == (0, "iptables -w 60 -I OUTPUT 1 -d 169.254.169.254/32")


@pytest.mark.parametrize("program", ["iptables", "ip6tables"])
def test_machine_without_the_rule_shuts_down_before_the_agent(tmp_path: Path, program: str) -> None:
    code, calls = run(tmp_path, **{program: "*"})
    assert code == 1
    assert calls[-3:] == ["tee /dev/console", "systemctl mask --runtime ecs.service", "shutdown -h now"]


def test_failed_shutdown_powers_the_machine_off(tmp_path: Path) -> None:
    code, calls = run(tmp_path, iptables="*", systemctl="*", shutdown="*")
    assert (code, calls[-1]) == (1, "poweroff -f")


def test_changed_script_changes_the_template(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, OPTIONS))
    scene.make()
    assert scene.differing(TEMPLATE) == set()
    template = scene.graph.get(TEMPLATE)
    assert isinstance(template, LaunchTemplate)
    assert (
        template.boot
        == metadata_firewall.digest(metadata_firewall.document())
        != metadata_firewall.digest(metadata_firewall.document().replace("-w 60", "-w 61"))
    )
    assert "boot" in LaunchTemplate.FIXED
    seen = scene.seen(TEMPLATE)
    assert seen is not None
    assert seen.settings["boot"] != replace(template, boot=metadata_firewall.digest("")).boot


def test_removed_script_is_seen(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, OPTIONS))
    scene.make()
    state_record = scene.record(TEMPLATE)
    aws.call(
        "ec2",
        "us-east-1",
        "create_launch_template_version",
        LaunchTemplateId=state_record.outputs["id"],
        LaunchTemplateData={"UserData": metadata_firewall.encoded("#!/bin/sh\n")},
    )
    aws.call(
        "ec2", "us-east-1", "modify_launch_template", LaunchTemplateId=state_record.outputs["id"], DefaultVersion="2"
    )
    assert "boot" in scene.differing(TEMPLATE)
