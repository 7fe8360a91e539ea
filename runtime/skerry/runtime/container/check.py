"""`skerry-replica check`: checks everything that a replica needs, to show whether this machine can take part in a run.

Writes and deletes two objects under probe/ of the run's prefix. Prints nothing: the caller prints `lines`.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.container import hardware
from skerry.runtime.container.identify_cloud_account import CloudIdentity, identify
from skerry.runtime.container.identify_replica import ML, detect_job
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.hardware import Hardware, Torch
    from skerry.runtime.store import Store

# Enough for a link of 1 Gbit/s to get going, and half a minute on the slowest that is worth using.
_MEASURED_BYTES: Final = 32 << 20
# Stores refuse signatures beyond five to fifteen minutes; an offset of a minute means a clock without NTP.
_OFFSET_S: Final = 60.0
_SMALL_DISK_BYTES: Final = 1 << 30
# The oldest driver that CUDA 13 supports, which torch 2.13 is built for.
_MIN_DRIVER: Final = 580


@dataclass(frozen=True, kw_only=True)
class Link:
    """The measured connection to the store. offset_s: this clock ahead of the store's; None if that has no clock."""

    up_mb_s: float
    down_mb_s: float
    offset_s: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check. error: why this machine cannot take part; warnings: possible problems."""

    ok: bool
    store: str
    run: dict[str, object] | None
    job: str
    identity: CloudIdentity
    machine: Hardware
    torch: Torch
    link: Link | None
    warnings: tuple[str, ...]
    error: str | None


def check_machine(uri: str, environment: Mapping[str, str], clock: Clock) -> Report:
    """Run all checks. Raises no SkerryError: the report contains it."""
    error: str | None = None
    link: Link | None = None
    run_facts: dict[str, object] | None = None
    name = uri
    try:
        store = open_store(uri, clock=clock)
        name = store.uri
        probe(store, clock)
        run = read_run(store)
        run_facts = None if run is None else {"name": run.name, "rounds": run.rounds, "slots": list(run.slots)}
        link = _measure_link(store, clock)
    except SkerryError as failure:
        error = f"{type(failure).__name__}: {failure}"
    machine = hardware.detect_hardware(environment, Path(tempfile.gettempdir()))
    torch = hardware.detect_torch(environment)
    return Report(
        ok=error is None,
        store=name,
        run=run_facts,
        job=str(detect_job(environment, ML)),
        identity=identify(uri, environment, clock),
        machine=machine,
        torch=torch,
        link=link,
        warnings=tuple(warnings_of(machine, torch, link)),
        error=error,
    )


def as_document(report: Report) -> dict[str, object]:
    """The report as JSON values, for programs."""
    document = asdict(report)
    identity = document["identity"]
    identity["who"] = identity.pop("principal")  # the key that programs read since the first version
    return document


def lines(report: Report) -> list[str]:
    """The report as text, for people."""
    machine, torch, identity = report.machine, report.torch, report.identity
    gpus = [f"{gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}" for gpu in machine.gpus]
    rows = [
        ("store", report.store),
        ("run", "none yet" if report.run is None else f"{report.run['name']}, {report.run['rounds']} rounds"),
        ("identity", f"{identity.principal or identity.problem or 'not known'} (from {identity.source})"),
        ("job", report.job),
        ("gpus", f"{machine.n_gpus}" + "".join(f"; {text}" for text in gpus)),
        (
            "torch",
            torch.error or f"{torch.version}, CUDA {torch.cuda or 'none'}, {'usable' if torch.usable else 'CPU only'}",
        ),
        ("cores", f"{machine.cores:g}"),
        ("memory", f"{machine.memory_bytes >> 20} MB"),
        ("shm", f"{machine.shm_bytes >> 20} MB"),
        ("disk", f"{machine.disk_free_bytes >> 20} MB free"),
        ("user", f"uid {machine.uid}"),
    ]
    if report.link is not None:
        offset = (
            "the store has no clock"
            if report.link.offset_s is None
            else f"{report.link.offset_s:+.1f} s to the store's"
        )
        rows += [
            ("bandwidth", f"{report.link.up_mb_s:.0f} MB/s up, {report.link.down_mb_s:.0f} MB/s down"),
            ("clock", offset),
        ]
    text_lines = [f"{name:10} {text}" for name, text in rows]
    text_lines += [f"warning    {text}" for text in report.warnings]
    return [*text_lines, f"error      {report.error}" if report.error else "ok         this machine can take part"]


def warnings_of(machine: Hardware, torch: Torch, link: Link | None) -> list[str]:
    """Problems that may hurt a run but do not prevent it. Pure."""
    warnings: list[str] = []
    if torch.error is not None:
        warnings.append(f"torch cannot be imported: {torch.error}")
    if machine.n_gpus and torch.error is None and not torch.usable:
        built = "was built without CUDA: this is the CPU image" if torch.cuda is None else "cannot use them"
        warnings.append(f"{machine.n_gpus} GPUs, and torch {built}")
    old = [
        gpu.driver
        for gpu in machine.gpus
        if gpu.driver.partition(".")[0].isdecimal() and int(gpu.driver.partition(".")[0]) < _MIN_DRIVER
    ]
    if old and torch.cuda is not None and torch.cuda.startswith("13"):
        warnings.append(f"driver {old[0]} is older than R{_MIN_DRIVER}, which CUDA 13 requires")
    if machine.shm_bytes <= hardware.SMALL_SHM_BYTES:
        warnings.append(
            f"{hardware.SHARED_MEMORY} has {machine.shm_bytes >> 20} MB: data loaders with workers need more "
            "(docker run --shm-size)"
        )
    if machine.disk_free_bytes < _SMALL_DISK_BYTES:
        warnings.append(f"{machine.disk_free_bytes >> 20} MB of disk space are free")
    if link is not None and link.offset_s is not None and abs(link.offset_s) > _OFFSET_S:
        warnings.append(
            f"this clock is {link.offset_s:+.0f} s off the store's: signatures will be refused; set it by NTP"
        )
    return warnings


def _measure_link(store: Store, clock: Clock) -> Link:
    key = f"{keys.PROBE}{clock.nonce()}"
    # Not zeros: a proxy or a file system may compress those.
    block = bytes.fromhex(clock.nonce()) * (_MEASURED_BYTES // 16)
    started = clock.now()
    before = _utc_s(clock)
    store.create(key, block)
    wrote_s = max(1e-6, clock.now() - started)
    after = _utc_s(clock)
    try:
        modified = next((entry.modified for entry in store.list(key) if entry.key == key), 0.0)
        started = clock.now()
        store.read(key)
        read_s = max(1e-6, clock.now() - started)
    finally:
        store.delete(key)
    # Stores report whole seconds; a time within the write counts as no offset.
    offset_s = (
        None if not modified else round(before - modified if modified < before else min(0.0, after - modified), 1)
    )
    return Link(
        up_mb_s=round(_MEASURED_BYTES / wrote_s / 1e6, 1),
        down_mb_s=round(_MEASURED_BYTES / read_s / 1e6, 1),
        offset_s=offset_s,
    )


def _utc_s(clock: Clock) -> float:
    return dt.datetime.fromisoformat(clock.utc_text()).timestamp()
