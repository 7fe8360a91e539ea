"""The contract between launchers and replicas: environment variables and exit codes.

All other settings of a run are in run.json in the bucket. Does no I/O.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_URI = "SKERRY_RUN"
"""The run's own prefix: s3://bucket/runs/tiny-gpt, gs://, az:// or file:///."""
SLOT = "SKERRY_SLOT"
"""The replica's name, stable over restarts."""
INDEX = "SKERRY_INDEX"
"""The replica's number, 0 to REPLICAS - 1; it selects its data. `skerry-replica run` sets it by the run's log."""
REPLICAS = "SKERRY_REPLICAS"
"""The number of replicas when this one was started; the log may say another later. Set in the same way."""

# Also read by `skerry-replica run` in a container; a script that is started by hand needs none of them.
CODE = "SKERRY_CODE"
"""sha256 of the packed training code, which a container unpacks from the run's store; unset: that of the image."""
COMMAND = "SKERRY_COMMAND"
"""The command to run, as a JSON list of words."""
RANKS = "SKERRY_RANKS"
"""The number of processes of one replica; unset: one per GPU."""
MAX_HOURS = "SKERRY_MAX_HOURS"
"""The limit of the run in hours since run.json was written; then every replica stops. Unset: no limit."""
FAILOVER = "SKERRY_FAILOVER"
"""The mirror in which `skerry-replica run` looks if the run goes on elsewhere; unset: only its store says so."""
GROUP = "SKERRY_GROUP"
"""The group of the spec to which a platform's own numbers (an array index) refer."""
REVIVE = "SKERRY_REVIVE"
"""A `Revival` as JSON: the replicas of the group start each other's lost jobs again; unset: they do not."""

# For a replica with its store in another cloud (`skerry.runtime.store.credentials`).
AWS_ROLE = "SKERRY_AWS_ROLE"
"""The ARN of the AWS role that a job on Google Cloud assumes. AWS_REGION is then the bucket's."""
AWS_AUDIENCE = "SKERRY_AWS_AUDIENCE"
"""The audience of the identity token that the role trusts."""
TOKEN_VARIABLE = "SKERRY_TOKEN_VARIABLE"  # noqa: S105  the name of a variable
"""The name of the variable with the platform's identity token, which AWS exchanges for keys of AWS_ROLE_ARN."""
GOOGLE_AUDIENCE = "SKERRY_GOOGLE_AUDIENCE"
"""The workload identity provider for a job on AWS: //iam.googleapis.com/projects/NUMBER/.../providers/PROVIDER."""

BUCKET_REGION = "SKERRY_BUCKET_REGION_"
"""Followed by a number: `bucket=region` of a bucket in S3 that is not in AWS_REGION, such as that of a mirror."""

SECRET = "SKERRY_SECRET_"  # noqa: S105  the start of a name
"""Followed by a variable's name: the reference of a secret that `skerry-replica run` fetches and sets as that variable.
`aws_secretsmanager:ARN`, `aws_ssm:ARN` or `google_secret:projects/P/secrets/S/versions/V`; with `#KEY`, the text at
that key of the secret's JSON object. A value is never in a variable of the job, only in the command's."""
DATA = "SKERRY_DATA_"
"""Followed by a name in capitals: the URI or the folder of that data of the spec."""
PLACE = "SKERRY_PLACE"
"""The machine of the replica, as JSON with the fields of `records.Place`; unset: unknown. For people."""

# Tags and labels of jobs.
RUN_TAG = "skerry:run"
"""The URI of the run that owns the resource."""
GENERATION_TAG = "skerry:generation"
"""The number of the job of its slot, from 0."""
REVIVED_TAG = "skerry:revived"
"""Of a job that another replica has started: the name of the lost job that it follows."""
REVIVED_LABEL = "skerry-revived"
"""The same as a label: the number of that job."""
CANCELLED_TAG = "skerry:cancelled"
"""Of a job that the operator has cancelled: no replica starts it again."""

# From the stop notice to the kill, AWS Spot gives 120 s, Vertex and Batch 30 s; 25 s leave time to flush.
STOP_BUDGET_S = 25.0


class ExitCode(enum.IntEnum):
    """The exit code of a replica, by which launchers decide about a restart."""

    DONE = 0
    RETRY = 10
    """Restart the replica: an external failure (the store was unreachable, a crash in a round), the incarnation that
    replaced this one is dead, or a signal stopped it cleanly; the sender of the signal knows if a restart is useful."""
    PERMANENT = 20
    """Do not restart the replica: the spec, the code or the rights are wrong, the replica and the log differ, or the
    slot belongs to a newer, live incarnation."""
    STOPPED = 30
    """Stopped cleanly by the script or by the run's time limit; a restart continues the run."""


def may_succeed_again(code: int) -> bool:
    """True if another start of a replica that ended with this code may succeed."""
    return code not in {ExitCode.PERMANENT, ExitCode.STOPPED}


@dataclass(frozen=True, kw_only=True)
class Revival:
    """The rules by which the replicas of a group start each other's lost jobs again.

    after_s: for how long a heartbeat does not change before the others look at its job. limit, window_s: at most so
    many restarts of one replica in so many seconds; None counts those of the whole run.
    """

    after_s: float
    limit: int
    window_s: float | None

    def to_text(self) -> str:
        """As JSON, for `REVIVE`."""
        return json.dumps({"after_s": self.after_s, "max": self.limit, "window_s": self.window_s})

    @staticmethod
    def of_text(text: str | None) -> Revival | None:
        """From the text of `REVIVE`; None if it is unset. Raises Invalid for any other text."""
        if not text:
            return None
        try:
            document = json.loads(text)
            window = document["window_s"]
            after_s, limit = float(document["after_s"]), int(document["max"])
            return Revival(after_s=after_s, limit=limit, window_s=None if window is None else float(window))
        except (ValueError, KeyError, TypeError) as error:
            raise Invalid(f"{REVIVE} is not the JSON of after_s, max and window_s: {text[:80]!r}") from error


SLOT_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
"""A slot name, as a regular expression."""


def check_slot(slot: str) -> str:
    """Returns the slot name. Raises Invalid unless it is 1-63 of [A-Za-z0-9._-], starting with a letter or digit."""
    if not re.fullmatch(SLOT_PATTERN, slot):
        raise Invalid(
            f"not a slot name: {slot!r}; use 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return slot


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One replica's slot in its run."""

    run_uri: str
    slot: str
    index: int
    replicas: int

    def environment(self) -> dict[str, str]:
        """The variables to set for the replica, from which `read` returns the same contract."""
        return {
            RUN_URI: self.run_uri,
            SLOT: self.slot,
            INDEX: str(self.index),
            REPLICAS: str(self.replicas),
        }


def read_data(environment: Mapping[str, str]) -> dict[str, str]:
    """The URIs and folders of the run's data in `environment`, by their names in the spec."""
    names = sorted(name for name in environment if name.startswith(DATA))
    return {name.removeprefix(DATA).lower(): environment[name] for name in names}


def read(environment: Mapping[str, str]) -> Contract:
    """The contract in `environment`. Raises Invalid with every variable that is missing or wrong."""
    missing = [name for name in (RUN_URI, SLOT, INDEX, REPLICAS) if not environment.get(name)]
    if missing:
        raise Invalid(
            f"not started as a replica, variables missing: {', '.join(missing)}; "
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
