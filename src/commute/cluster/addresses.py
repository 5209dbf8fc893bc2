# SPDX-License-Identifier: Apache-2.0
"""Addresses: "host:port" as text, interfaces by name, and which address to listen on.

An address is chosen by the route: the local end of the connection to the coordinator is an
address that the coordinator's network can reach. Host names are never asked for it; on many
machines they resolve to loopback.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = [
    "choose_bind",
    "format_address",
    "interface_address",
    "is_loopback",
    "is_wildcard",
    "parse_address",
]

# linux/sockios.h: the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915


def parse_address(text: str) -> tuple[str, int]:
    """Split "host:port" or "[ipv6]:port"; raises ValueError with the expected form."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r} is ambiguous; write an IPv6 address as [address]:port")
    if not colon or not host:
        raise ValueError(f"expected an address as host:port, got {text!r}")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"expected a port from 1 to 65535 in {text!r}, got {port!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of parse_address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the host can be reached from this machine only; names are not resolved."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _numeric(host)
    return address is not None and address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether the host means "all interfaces", which nobody can dial."""
    address = _numeric(host)
    return address is not None and address.is_unspecified


def choose_bind(connection: socket.socket) -> str:
    """The local address of the route that the connection to the coordinator takes."""
    host = str(connection.getsockname()[0])
    # The zone of a link-local address names an interface of this machine; it means nothing to
    # the peers.
    return host.partition("%")[0]


def interface_address(text: str) -> str:
    """Turn an interface name into its address; addresses and host names pass unchanged.

    Raises:
        ValueError: the interface exists and has no address.
    """
    if _numeric(text) is not None or text not in {name for _, name in socket.if_nameindex()}:
        return text
    address = _interface_ipv4(text) or _interface_ipv6(text)
    if address is None:
        raise ValueError(f"interface {text!r} has no address; is it up?")
    return address


def _numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _interface_ipv4(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _interface_ipv6(name: str) -> str | None:
    # Each line: address in 32 hex digits, index, prefix, scope, flags, interface.
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.split()[-1:] == [name]]
    reachable = [fields for fields in found if fields[3] != "20"]  # 20 is link-local
    if not reachable:
        return None
    return str(ipaddress.IPv6Address(bytes.fromhex(reachable[0][0])))
