"""Hosts on one machine: network namespaces behind a switch, each link with a bandwidth of its own.

A host is a network namespace with one interface and an address; whoever lives there has its host name too
(`enter`). Needs root and iproute2. Nothing is made outside of the namespaces, so deleting them is all
the cleaning there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
from types import TracebackType

__all__ = ["Network", "enter", "problem"]

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_BURST_BYTES = 1 << 18  # more than the largest train of segments, which would be cut into packets
_LATENCY = "20ms"
_INTERFACE = "eth0"


def problem() -> str | None:
    """Why there can be no such network here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"iproute2 is not installed: no {', '.join(missing)}" if missing else None


def enter(host: str) -> None:
    """Make the calling thread, and the threads and processes that it starts from now on, live on `host`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}", encoding="ascii") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter {host}: {os.strerror(number)}")
    socket.sethostname(host)
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE  # for torch.distributed's own groups


class Network:
    """`hosts` hosts behind one switch. Use it in a `with`: it removes what it made, also after an error.

    Attributes:
        hosts: their names.
        addresses: their IP addresses.
    """

    def __init__(self, hosts: int, mtu: int = 1500) -> None:
        tag = f"rx{os.getpid()}"
        self._switch = f"{tag}s"
        self.hosts = [f"{tag}h{i}" for i in range(hosts)]
        self.addresses = [f"10.77.{os.getpid() % 250}.{i + 1}" for i in range(hosts)]
        self._mtu = mtu

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _make(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "mtu", str(self._mtu), "up")
        for i, (host, address) in enumerate(zip(self.hosts, self.addresses, strict=True)):
            port = f"port{i}"
            _run("ip", "netns", "add", host)
            _run(
                *("ip", "-n", switch, "link", "add", port, "mtu", str(self._mtu), "type", "veth"),
                *("peer", "name", _INTERFACE, "mtu", str(self._mtu), "netns", host),
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            _run("ip", "-n", host, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", _INTERFACE)
            _run("ip", "-n", host, "route", "add", "default", "dev", _INTERFACE)

    def _remove(self) -> None:
        for name in (*self.hosts, self._switch):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)

    def shape(self, bits_per_second: int) -> None:
        """Both directions of every link."""
        ends = [(host, _INTERFACE) for host in self.hosts]
        ends += [(self._switch, f"port{i}") for i in range(len(self.hosts))]
        for name, interface in ends:
            _run(
                *("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf"),
                *("rate", f"{bits_per_second}bit", "burst", str(_BURST_BYTES)),
                *("latency", _LATENCY),
            )

    def received_bytes(self) -> list[int]:
        """What each host's interface has received so far, from its own counter."""
        return [self._counter(host, "rx") for host in self.hosts]

    def sent_bytes(self) -> list[int]:
        """What each host's interface has sent so far."""
        return [self._counter(host, "tx") for host in self.hosts]

    @staticmethod
    def _counter(host: str, way: str) -> int:
        text = _run("ip", "-n", host, "-s", "-j", "link", "show", "dev", _INTERFACE)
        return int(json.loads(text)[0]["stats64"][way]["bytes"])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
