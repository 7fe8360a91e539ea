"""What a machine does before it takes jobs: it shuts everybody but root out of the metadata service. Pure.

Batch runs a job in its machine's own network, where the hop limit of the metadata service stops nothing: whoever may
connect to it gets the machine's role. So the kernel drops what anybody but root sends there, and jobs do not run as
root (`USER`). The ECS agent and dockerd are root, and go on as before; a job's own role comes from 169.254.170.2.
A machine that cannot set the rule goes down before the agent starts: one that did jobs all the same would be open and
nobody would know, one that stood idle would cost as much as one that works.

iptables is on every machine image with an ECS agent, which needs it itself. As a boothook the script runs at every
boot, and early; ecs.service starts after cloud-init has ended. Batch puts its own part beside this one.
Sources: EC2 user guide, "Limit access to the Instance Metadata Service"; Batch user guide, "Networking modes", "Use
Amazon EC2 launch templates"; aws/amazon-ecs-agent: amazon-ecs-init.spec (Requires: iptables) and ecs.service
(After=cloud-final.service); cloud-init, "User data formats".
"""

from __future__ import annotations

import base64
import hashlib
from typing import Final

USER: Final = "10001:10001"
"""The user of the replica image, by number: an image of somebody's own may not have the name. Never root."""

_BOUNDARY: Final = "==SKERRY=="
# The agent is masked first: shutting down takes seconds. /proc/net/if_inet6 is not there without IPv6, nor is the rule.
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
    """The user data: MIME of several parts, which is the only form that Batch takes."""
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
    """What stands for user data in a plan: short, and another one for another script."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encoded(text: str) -> str:
    """As EC2 takes user data."""
    return base64.b64encode(text.encode()).decode()


def decoded(user_data: str) -> str:
    """The reverse of `encoded`; what nobody could have made with it is no text of ours."""
    try:
        return base64.b64decode(user_data, validate=True).decode()
    except ValueError:
        return user_data
