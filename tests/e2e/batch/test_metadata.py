"""Tests the firewall rule of a machine's boot script, in a separate network: root reaches the metadata service only.

The script is run as it is, but for its path: on a machine that cannot set the rule it would go on to switch it off.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.e2e.conftest import lacking

from skerry.infra.targets.aws_batch import metadata_firewall

METADATA: Final = "169.254.169.254"
METADATA_6: Final = "fd00:ec2::254"
CREDENTIALS: Final = "169.254.170.2"
REPLICA: Final = 10001
IPV6: Final = Path("/proc/net/if_inet6")
TOOLS: Final = ("iptables", "ip6tables", "ip", "unshare")
NETWORK: Final = f"""
ip link set lo up
ip addr add {METADATA}/32 dev lo
ip addr add {CREDENTIALS}/32 dev lo
test ! -e /proc/net/if_inet6 || ip -6 addr add {METADATA_6}/128 dev lo nodad
"""
# Forks instead of starting anything: another user may not be able to read this Python.
PROBE: Final = """
import json, os, socket, sys
def reaches(uid, address, family):
    child = os.fork()
    if not child:
        answer = 2
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with socket.socket(family) as asking:
                asking.settimeout(1)
                answer = 1 if asking.connect_ex((address, 80)) else 0
        finally:
            os._exit(answer)
    return (True, False)[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
told = {}
for address in sys.argv[1:]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 80), family=family)
    told[address] = [reaches(uid, address, family) for uid in (0, 10001)]
    listener.close()
print(json.dumps(told))
"""
# Users: root, a replica.
BOTH, ROOT_ALONE = [True, True], [True, False]


@pytest.fixture(scope="module")
def tools() -> None:
    if os.geteuid() != 0:
        lacking("needs root, for a network of its own")
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        lacking(f"no {', '.join(missing)}; as root: apt-get install --no-install-recommends iptables iproute2")
    tried = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True, text=True, timeout=30)
    if tried.returncode:
        lacking(f"no network of its own can be had here: {tried.stderr.strip()}")


def probed(folder: Path, *, script: str) -> dict[str, list[bool]]:
    """Return the addresses that root and a replica's user reach after a boot with this script."""
    for name in ("iptables", "ip6tables"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name in ("systemctl", "shutdown", "poweroff", "tee"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
    assert path in script or not script
    booting = folder / "boot"
    booting.write_text(script.replace(path, f"PATH={folder}\n"))
    addresses = [METADATA, CREDENTIALS, *([METADATA_6] if socket.has_ipv6 and IPV6.exists() else [])]
    # Booted twice, as boothooks are run at every boot.
    booted = ("sh", "-ec", f'{NETWORK}sh "$0"; sh "$0"; exec "$@"', str(booting))
    ended = subprocess.run(
        ["unshare", "--net", *booted, sys.executable, "-c", PROBE, *addresses],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.usefixtures("tools")
def test_a_replica_cannot_ask_for_the_machines_role_and_gets_its_own(tmp_path: Path) -> None:
    response = probed(tmp_path, script=metadata_firewall.SCRIPT)
    assert response.pop(METADATA) == ROOT_ALONE
    assert response.pop(CREDENTIALS) == BOTH
    assert response.pop(METADATA_6, ROOT_ALONE) == ROOT_ALONE
    assert int(metadata_firewall.USER.partition(":")[0]) == REPLICA


@pytest.mark.usefixtures("tools")
def test_without_the_script_everybody_could(tmp_path: Path) -> None:
    assert set(map(tuple, probed(tmp_path, script="").values())) == {tuple(BOTH)}
