"""What a launcher promises a replica: the environment it finds and the exit codes it must end with.

Read once, here. Everything else about the run stands in run.json in the bucket. Does no I/O beyond os.environ's copy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid
from skerry.runtime.keys import check_slot

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_URI = "SKERRY_RUN"
"""The run's own prefix: s3://bucket/runs/tiny-gpt, gs://, az:// or file:///."""
SLOT = "SKERRY_SLOT"
"""The replica's name, stable over restarts."""
INDEX = "SKERRY_INDEX"
"""The replica's number, 0 to REPLICAS - 1, stable over restarts; which shard of the data is its own."""
REPLICAS = "SKERRY_REPLICAS"
"""How many replicas the spec asks for."""

# What `skerry-replica run` reads besides, in a container; a script started by hand needs none of them.
CODE = "SKERRY_CODE"
"""sha256 of the packed training code in the run's store; unset runs what is in the image."""
COMMAND = "SKERRY_COMMAND"
"""What to run, as a JSON list of words."""
RANKS = "SKERRY_RANKS"
"""How many processes one replica has; unset is one for each GPU."""
MAX_HOURS = "SKERRY_MAX_HOURS"
"""How long the run may take, in hours from the writing of run.json; then every replica stops. Unset is without end."""
GROUP = "SKERRY_GROUP"
"""The group of the spec that a platform's own numbers (an array index) are within."""

# What a replica is told whose store lies in the other cloud (`skerry.runtime.store.visiting`).
AWS_ROLE = "SKERRY_AWS_ROLE"
"""The ARN of the role to take in AWS; a job on Google is told it, with AWS_REGION, the bucket's."""
AWS_AUDIENCE = "SKERRY_AWS_AUDIENCE"
"""What the identity token must be made out for that the role trusts."""
GOOGLE_AUDIENCE = "SKERRY_GOOGLE_AUDIENCE"
"""The provider that lets a job of AWS in: //iam.googleapis.com/projects/NUMBER/.../providers/PROVIDER."""

# From the notice of a stop to the kill: Spot on AWS gives 120 s, Vertex and Batch 30 s; 25 s leaves room to flush.
STOP_BUDGET_S = 25.0


class ExitCode(enum.IntEnum):
    """How a replica ends, as its launcher must understand it."""

    DONE = 0
    RETRY = 10
    """Start me again: something outside broke (the store was away, a crash in a round), the incarnation that replaced
    this one does not live, or a signal stopped me, cleanly: whoever sent it knows whether I am wanted."""
    PERMANENT = 20
    """Do not start me again: the spec, the code or the rights are wrong, the log and I disagree, or the slot belongs
    to a newer incarnation that lives."""
    STOPPED = 30
    """Stopped, cleanly, by the script itself or because the run has had its hours; starting again continues."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One replica's place in its run."""

    run_uri: str
    slot: str
    index: int
    replicas: int

    def environment(self) -> dict[str, str]:
        """The variables to set for the replica; `read` gives the same contract back."""
        return {
            RUN_URI: self.run_uri,
            SLOT: self.slot,
            INDEX: str(self.index),
            REPLICAS: str(self.replicas),
        }


def read(environment: Mapping[str, str]) -> Contract:
    """The contract in `environment`. Raises Invalid naming every variable that is missing or wrong."""
    missing = [name for name in (RUN_URI, SLOT, INDEX, REPLICAS) if not environment.get(name)]
    if missing:
        raise Invalid(
            f"not started as a replica: {', '.join(missing)} not set; "
            "run this script through `skerry up`, or set them by hand (see runtime/README.md)"
        )
    index, replicas = (_number(environment, name) for name in (INDEX, REPLICAS))
    if not 0 <= index < replicas:
        raise Invalid(f"{INDEX}={index} is not below {REPLICAS}={replicas}")
    return Contract(run_uri=environment[RUN_URI], slot=check_slot(environment[SLOT]), index=index, replicas=replicas)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise Invalid(f"{name}={text!r} is not a whole number")
    return int(text)
