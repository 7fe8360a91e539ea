"""A slow link for each replica, on this machine: a network namespace behind two TUN devices, and a process between.

The process delays each packet by half of the round trip, and sends no more than the rate in either direction. Needs
root, /dev/net/tun and `ip`. No packet leaves the machine; everything ends with the context.
"""
# ruff: noqa: S603, S607  `ip` of the system, with arguments of this module

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.synchronize import Event

_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TUN_WITHOUT_INFO_WITH_OFFLOAD: Final = 0x0001 | 0x1000 | 0x4000
_CHECKSUM_AND_SEGMENTATION: Final = 1 | 2 | 4
_NEW_NETWORK: Final = 0x40000000
_OFFLOAD_HEADER: Final = 10
_LARGEST: Final = 65_600
_SEGMENT: Final = 1448
_FRAME: Final = 38
"""Bytes of Ethernet around a segment, the gap between frames included."""
_QUEUE_S: Final = 0.1
"""A packet that would wait longer is dropped, which is how TCP finds the rate."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Of each direction of a link."""

    mbit: float
    rtt_s: float


def hub(number: int) -> str:
    """The address of this machine at the end of a replica's link."""
    return f"10.77.{number}.1"


def address(number: int) -> str:
    """The address of a replica."""
    return f"10.77.{number}.2"


def enter(number: int) -> None:
    """Move this thread, and the threads that it starts, to the namespace of a replica."""
    _set_namespace(f"/run/netns/skerry{number}")


@contextmanager
def links(count: int, rate: Rate) -> Generator[None]:
    """So many replicas have links."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        for number in range(count):
            subprocess.run(["ip", "netns", "add", f"skerry{number}"], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", f"skerry{number}"], check=False)
            ready = context.Event()
            process = context.Process(target=_carry, args=(number, rate, ready), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            if not ready.wait(30):
                raise RuntimeError(f"no link for replica {number}; are you root, and is there a /dev/net/tun?")
        yield


def _carry(number: int, rate: Rate, ready: Event) -> None:
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    outside = _tun(f"skerry{number}")
    _up(f"skerry{number}", hub(number))
    enter(number)
    inside = _tun("wan")
    _up("wan", address(number))
    _ip("link", "set", "lo", "up")
    _ip("route", "add", "default", "via", hub(number))
    if ctypes.CDLL(None).setns(here, _NEW_NETWORK):
        raise OSError("cannot return from a namespace")
    threading.Thread(target=_forward, args=(inside, outside, rate), daemon=True).start()
    ready.set()
    _forward(outside, inside, rate)


def _forward(source: int, target: int, rate: Rate) -> None:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    queue: deque[tuple[float, bytes]] = deque()
    free_at = 0.0
    while True:
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            os.write(target, queue.popleft()[1])
        poll.poll(None if not queue else max(0.0, queue[0][0] - now) * 1000)
        for _ in range(64):
            try:
                packet = os.read(source, _LARGEST)
            except BlockingIOError:
                break
            now = time.monotonic()
            size = len(packet) - _OFFLOAD_HEADER
            begin = max(free_at, now)
            if begin - now > _QUEUE_S:
                continue
            free_at = begin + (size + (size // _SEGMENT + 1) * _FRAME) * 8 / (rate.mbit * 1e6)
            queue.append((free_at + rate.rtt_s / 2, packet))


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_INFO_WITH_OFFLOAD))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM_AND_SEGMENTATION)
    return device


def _up(name: str, own: str) -> None:
    _ip("addr", "add", f"{own}/30", "dev", name)
    _ip("link", "set", name, "mtu", "1500", "txqueuelen", "2000", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _set_namespace(path: str) -> None:
    namespace = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns", path)
    os.close(namespace)
