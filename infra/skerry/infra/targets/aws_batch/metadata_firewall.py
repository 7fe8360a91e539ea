"""The boot script with which a machine blocks its metadata service for all users but root. Pure.

Batch runs a job in its machine's own network, where the hop limit of the metadata service has no effect: a process that
can connect to it gets the machine's role. So the kernel drops packets to it from users other than root, and jobs do not
run as root (`USER`). The ECS agent and dockerd run as root and are not affected; a job gets its own role from
169.254.170.2. A machine that cannot set the rule shuts down before the agent starts, because otherwise its jobs could
get its role unnoticed, or it would be idle and cost as much as a working one.

iptables is on every machine image with an ECS agent, which needs it. As a boothook the script runs at every
boot, and early; ecs.service starts after cloud-init has ended. Batch adds its own part to the user data.
Sources: EC2 user guide, "Limit access to the Instance Metadata Service"; Batch user guide, "Networking modes", "Use
Amazon EC2 launch templates"; aws/amazon-ecs-agent: amazon-ecs-init.spec (Requires: iptables) and ecs.service
(After=cloud-final.service); cloud-init, "User data formats".
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

USER: Final = "10001:10001"
"""The user of the replica image, by number, because the user's own image may lack the name. Never root."""

_BOUNDARY: Final = "==SKERRY=="
# The agent is masked first, because a shutdown takes seconds. Without IPv6, /proc/net/if_inet6 does not exist.
SCRIPT: Final = """\
#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
only_root() {
    "$1" -w 60 -C OUTPUT -d "$2" -m owner ! --uid-owner 0 -j DROP 2> /dev/null ||
        "$1" -w 60 -I OUTPUT 1 -d "$2" -m owner ! --uid-owner 0 -j DROP
}
six() {
    test ! -e /proc/net/if_inet6 || only_root ip6tables fd00:ec2::254/128
}
only_root iptables 169.254.169.254/32 && six && exit 0
echo 'skerry: cannot shut jobs out of the metadata service; this machine goes down' | tee /dev/console
systemctl mask --runtime ecs.service
shutdown -h now || poweroff -f
exit 1
"""


def document() -> str:
    """Return the user data as a MIME multipart document, the only form that Batch accepts."""
    return "\n".join(
        (
            "MIME-Version: 1.0",
            f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"',
            "",
            f"--{_BOUNDARY}",
            'Content-Type: text/cloud-boothook; charset="us-ascii"',
            "",
            SCRIPT,
            f"--{_BOUNDARY}--",
            "",
        )
    )


def digest(text: str) -> str:
    """Return a short digest that represents user data in a plan."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encoded(text: str) -> str:
    """Return user data in the encoding of EC2."""
    return base64.b64encode(text.encode()).decode()


def decoded(user_data: str) -> str:
    """Return the text of encoded user data; a text that is not encoded is returned as it is."""
    try:
        return base64.b64decode(user_data, validate=True).decode()
    except ValueError:
        return user_data
