"""`skerry-replica check`: can this machine take part in a run? Looks at everything that a replica needs, and says it.

Writes and deletes two objects under probe/ of the run's prefix. Prints nothing: `report` and `lines` are for who does.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime import keys
from skerry.runtime.entry import machine
from skerry.runtime.entry.identity import Identity, identity
from skerry.runtime.entry.place import ML, job_of
from skerry.runtime.errors import SkerryError
from skerry.runtime.journal import read_run
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock
    from skerry.runtime.entry.machine import Machine, Torch
    from skerry.runtime.store import Store

# Enough for a link of 1 Gbit/s to get going, and half a minute on the slowest that is worth using.
_MEASURED_BYTES: Final = 32 << 20
# Signatures are refused beyond five to fifteen minutes; a minute is a clock that nobody sets.
_OFFSET_S: Final = 60.0
_SMALL_DISK_BYTES: Final = 1 << 30
# Of the driver, for CUDA 13, which torch 2.13 is built for.
_DRIVER: Final = 580


@dataclass(frozen=True, kw_only=True)
class Link:
    """The way to the store. offset_s: how much this clock is ahead of the store's; None where it has none."""

    up_mb_s: float
    down_mb_s: float
    offset_s: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found. error: why this machine cannot take part; warnings: what may hurt."""

    ok: bool
    store: str
    run: dict[str, object] | None
    job: str
    identity: Identity
    machine: Machine
    torch: Torch
    link: Link | None
    warnings: tuple[str, ...]
    error: str | None


def report(uri: str, environment: Mapping[str, str], clock: Clock) -> Report:
    """Look at everything. Raises nothing of ours: what is wrong is in the report."""
    error: str | None = None
    link: Link | None = None
    found: dict[str, object] | None = None
    name = uri
    try:
        store = open_store(uri, clock=clock)
        name = store.uri
        probe(store, clock)
        run = read_run(store)
        found = None if run is None else {"name": run.name, "rounds": run.rounds, "slots": list(run.slots)}
        link = _measured(store, clock)
    except SkerryError as wrong:
        error = f"{type(wrong).__name__}: {wrong}"
    here = machine.machine(environment, Path(tempfile.gettempdir()))
    torch = machine.torch_here(environment)
    return Report(
        ok=error is None,
        store=name,
        run=found,
        job=str(job_of(environment, ML)),
        identity=identity(uri, environment, clock),
        machine=here,
        torch=torch,
        link=link,
        warnings=tuple(warnings_of(here, torch, link)),
        error=error,
    )


def as_document(found: Report) -> dict[str, object]:
    """The report for programs."""
    return asdict(found)


def lines(found: Report) -> list[str]:
    """The report for people."""
    here, torch, who = found.machine, found.torch, found.identity
    gpus = [f"{gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}" for gpu in here.gpus]
    said = [
        ("store", found.store),
        ("run", "none yet" if found.run is None else f"{found.run['name']}, {found.run['rounds']} rounds"),
        ("who", f"{who.who or who.problem or 'not known'} (from {who.source})"),
        ("job", found.job),
        ("gpus", f"{here.n_gpus}" + "".join(f"; {text}" for text in gpus)),
        (
            "torch",
            torch.error or f"{torch.version}, CUDA {torch.cuda or 'none'}, {'usable' if torch.usable else 'CPU only'}",
        ),
        ("cores", f"{here.cores:g}"),
        ("memory", f"{here.memory_bytes >> 20} MB"),
        ("shm", f"{here.shm_bytes >> 20} MB"),
        ("disk", f"{here.disk_free_bytes >> 20} MB free"),
        ("user", f"uid {here.uid}"),
    ]
    if found.link is not None:
        offset = (
            "the store has no clock" if found.link.offset_s is None else f"{found.link.offset_s:+.1f} s to the store's"
        )
        said += [
            ("bandwidth", f"{found.link.up_mb_s:.0f} MB/s up, {found.link.down_mb_s:.0f} MB/s down"),
            ("clock", offset),
        ]
    told = [f"{name:10} {text}" for name, text in said]
    told += [f"warning    {text}" for text in found.warnings]
    return [*told, f"error      {found.error}" if found.error else "ok         this machine can take part"]


def warnings_of(here: Machine, torch: Torch, link: Link | None) -> list[str]:
    """What may hurt. Pure."""
    found: list[str] = []
    if torch.error is not None:
        found.append(f"torch cannot be imported: {torch.error}")
    if here.n_gpus and torch.error is None and not torch.usable:
        built = "was built without CUDA: this is the CPU image" if torch.cuda is None else "cannot use them"
        found.append(f"{here.n_gpus} GPUs, and torch {built}")
    old = [
        gpu.driver
        for gpu in here.gpus
        if gpu.driver.partition(".")[0].isdecimal() and int(gpu.driver.partition(".")[0]) < _DRIVER
    ]
    if old and torch.cuda is not None and torch.cuda.startswith("13"):
        found.append(f"driver {old[0]} is older than R{_DRIVER}, which CUDA 13 wants")
    if here.shm_bytes <= machine.SMALL_SHM_BYTES:
        found.append(
            f"{machine.SHARED_MEMORY} has {here.shm_bytes >> 20} MB: data loaders with workers need more "
            "(docker run --shm-size)"
        )
    if here.disk_free_bytes < _SMALL_DISK_BYTES:
        found.append(f"{here.disk_free_bytes >> 20} MB of disk are free")
    if link is not None and link.offset_s is not None and abs(link.offset_s) > _OFFSET_S:
        found.append(f"this clock is {link.offset_s:+.0f} s off the store's: signatures will be refused; set it by NTP")
    return found


def _measured(store: Store, clock: Clock) -> Link:
    key = f"{keys.PROBE}{clock.nonce()}"
    # Not zeros: a proxy or a file system may shrink those.
    block = bytes.fromhex(clock.nonce()) * (_MEASURED_BYTES // 16)
    began = clock.now()
    before = _utc_s(clock)
    store.create(key, block)
    wrote_s = max(1e-6, clock.now() - began)
    after = _utc_s(clock)
    try:
        modified = next((entry.modified for entry in store.list(key) if entry.key == key), 0.0)
        began = clock.now()
        store.read(key)
        read_s = max(1e-6, clock.now() - began)
    finally:
        store.delete(key)
    # Stores tell whole seconds; whatever lies within the write counts as no offset.
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
