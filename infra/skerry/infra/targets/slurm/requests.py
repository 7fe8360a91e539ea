"""Builds the options and the script with which sbatch submits a job. Pure. Golden files show both.

The name of a job is that of its slot, so that `--dependency=singleton` lets Slurm run one job of a slot at a time. The
comment holds the run, the address, the generation and a digest of the settings, by which a job is found again.
The script starts the replica, and requeues its own job after an error or before the time limit. Its last act is a file
beside the log, because Slurm forgets an ended job after minutes (MinJobAge).
Sources: sbatch(1), scancel(1), scontrol(1).
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.graph import as_json
from skerry.infra.targets.shared.resolve_refs import environment_list

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Json, Value
    from skerry.infra.provision.handler import Desired

WARNING_S: Final = 60
"""The time before the limit at which Slurm signals the script, or a minute earlier. A replica stops within 30 s."""
_DIGITS: Final = 16
# Slurm stops the script when it has requeued its job, within seconds.
_REQUEUED_S: Final = 300
_OPTIONS: Final = {
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "minutes": "--time",
    "gpus": "--gres",
}

# SIGCONT, which Slurm sends before SIGTERM, has no trap: bash 5.2 loses a second signal while it handles the first.
_START: Final = """\
#!/bin/bash -l
again= stopped= work=$(mktemp -d)
ending={ending}
rm -f "$ending"
trap 'again=1; {stop}' USR1
trap 'stopped=1' TERM
"""
# A signal interrupts `wait`, and bash may lose the code of a replica that ends in that moment. So a subshell waits for
# it in the foreground, where nothing interrupts.
# A code that no start can mend is final: done, permanent, stopped by its script, and no such program.
_END: Final = """\
(
    trap : TERM
    bash -c 'echo $$ > "$1/pid"; shift; exec "$@"' start "$work" {command}
    echo "$?" > "$work/code"
) &
child=$!
while wait "$child"; kill -0 "$child" 2> /dev/null; do :; done
code=$(cat "$work/code" 2> /dev/null || echo 137)
rm -rf "$work"
start=${{SLURM_RESTART_COUNT:-0}}
printf '{{"job": "%s", "start": %s, "code": %s, "stopped": %s}}\\n' \\
    "$SLURM_JOB_ID" "$start" "$code" "${{stopped:-0}}" > "$ending.new" && mv -f "$ending.new" "$ending"
case "${{stopped:+stopped}}$code" in
    stopped* | 0 | 20 | 30 | 126 | 127) ;;
    *)
        if [ -n "$again" ] || [ "$((start + 1))" -lt {attempts} ]; then
            echo "skerry: exit code $code of start $start; the job is requeued"
            scontrol requeue "$SLURM_JOB_ID" && sleep {requeued_s}
        fi
        ;;
esac
exit "$code"
"""


def sbatch(desired: Desired) -> list[str]:
    """Return the command that submits a job; its script goes to standard input."""
    settings = desired.settings
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={desired.resource.name}",
        "--dependency=singleton",
        f"--comment={comment(desired)}",
        f"--output={log_file(desired)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{WARNING_S}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={settings['cpus']}",
    ]
    words += [f"{option}={settings[name]}" for name, option in _OPTIONS.items() if settings[name] is not None]
    if settings["memory_mib"] is not None:
        words.append(f"--mem={settings['memory_mib']}M")
    return [*words, *_texts(settings["extra"])]


def script(desired: Desired) -> str:
    """Return the script of a job."""
    settings = desired.settings
    variables = environment_list(settings["environment"])
    pairs = [(each["name"], each["value"]) for each in variables if isinstance(each, Mapping)]
    exports = "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in pairs)
    setup = "".join(f"{line}\n" for line in _texts(settings["setup"]))
    # Slurm passes a signal on to the tasks of srun, but not to srun itself.
    stop = (
        'scancel --signal=TERM "$SLURM_JOB_ID"'
        if settings["container"] == "pyxis"
        else 'kill -TERM "$(cat "$work/pid")"'
    )
    ending = shlex.quote(ending_file(desired))
    start = _START.format(ending=ending if ending_file(desired).startswith("/") else f'"$PWD"/{ending}', stop=stop)
    end = _END.format(command=shlex.join(_command(settings)), attempts=settings["attempts"], requeued_s=_REQUEUED_S)
    return f"{start}{exports}{setup}{end}"


def comment(desired: Desired) -> str:
    """Return the comment that identifies a job: JSON without spaces, because scontrol separates fields by them."""
    mark = {
        "run": desired.run,
        "address": desired.resource.address,
        "generation": desired.generation,
        "spec": spec_digest(desired.settings),
    }
    return json.dumps(mark, separators=(",", ":"))


def spec_digest(settings: Mapping[str, Value]) -> str:
    """Return the digest of the settings that a job is created with."""
    text = json.dumps({name: as_json(value) for name, value in settings.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def log_file(desired: Desired) -> str:
    """Return the path of the log of a job's starts, for sbatch, in which % has a meaning."""
    return path_of(desired.settings, desired.name, "log").replace("%", "%%")


def ending_file(desired: Desired) -> str:
    """Return the path of the file with the end of the last start."""
    return path_of(desired.settings, desired.name, "ending")


def path_of(settings: Mapping[str, Value] | Mapping[str, Json], name: str, kind: str) -> str:
    """Return the path of a file of the job `name`, absolute or in the home folder. kind: log or ending."""
    return f"{str(settings['folder']).rstrip('/')}/{name}.{kind}"


def _command(settings: Mapping[str, Value]) -> list[str]:
    mounts = _texts(settings["mounts"])
    match settings["container"]:
        case "apptainer":
            gpus = [] if settings["gpus"] is None else ["--nv"]
            binds = [word for mount in mounts for word in ("--bind", mount)]
            return ["apptainer", "exec", *gpus, *binds, str(settings["image"]), "skerry-replica", "run"]
        case "pyxis":
            binds = [f"--container-mounts={','.join(f'{mount}:{mount}' for mount in mounts)}"] if mounts else []
            image = f"--container-image={settings['image']}"
            return ["srun", "--ntasks=1", "--export=ALL", image, *binds, "skerry-replica", "run"]
        case _:
            return [str(settings["python"]), "-m", "skerry.runtime", "run"]


def _texts(value: Value) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []
