# SPDX-License-Identifier: Apache-2.0
"""Addresses as text, interfaces by name, and the choice by route."""

import socket

import pytest

from commute.cluster import addresses
from commute.cluster.addresses import (
    choose_bind,
    format_address,
    interface_address,
    is_loopback,
    is_wildcard,
    parse_address,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("node-7.cluster:65535", "node-7.cluster", 65535),
        ("[::1]:1", "::1", 1),
        ("[fe80::1%eth0]:9", "fe80::1%eth0", 9),
    ],
)
def test_parse_and_format_are_inverse(text: str, host: str, port: int) -> None:
    """IPv4, names and IPv6 in brackets."""
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosta", "expected an address as host:port, got 'hosta'"),
        (":80", "expected an address as host:port"),
        ("[]:80", "expected an address as host:port"),
        ("::1:80", r"ambiguous; write an IPv6 address as \[address\]:port"),
        ("hosta:http", "expected a port from 1 to 65535 in 'hosta:http', got 'http'"),
        ("hosta:0", "expected a port from 1 to 65535"),
        ("hosta:65536", "expected a port from 1 to 65535"),
        ("hosta:-1", "expected a port from 1 to 65535"),
        ("hosta:٣", "expected a port from 1 to 65535"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    """The message says which form is expected."""
    with pytest.raises(ValueError, match=message):
        parse_address(text)


def test_is_loopback() -> None:
    """By number or by the reserved name; other names are not resolved."""
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost"]))
    assert is_loopback("::ffff:127.0.0.1")
    assert not any(map(is_loopback, ["10.0.0.1", "0.0.0.0", "::", "hosta", "localhost.org"]))


def test_is_wildcard() -> None:
    """All interfaces, in both families."""
    assert is_wildcard("0.0.0.0")
    assert is_wildcard("::")
    assert not is_wildcard("10.0.0.1")


def test_choose_bind_follows_the_route() -> None:
    """The local end of a connection, here a datagram socket that sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("127.0.0.1", 9))

        assert choose_bind(route) == "127.0.0.1"


def test_interface_address() -> None:
    """An interface stands for its address; everything else passes."""
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("10.1.2.3") == "10.1.2.3"
    assert interface_address("::1") == "::1"
    assert interface_address("node-7") == "node-7"


def test_interface_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists, and has nothing to listen on."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(7, "down7")])

    with pytest.raises(ValueError, match="interface 'down7' has no address; is it up"):
        interface_address("down7")


def test_interface_with_ipv6_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback's IPv6 address is found where there is one."""
    if not socket.has_ipv6 or addresses._interface_ipv6("lo") is None:
        pytest.skip("loopback has no IPv6 address here")
    monkeypatch.setattr(addresses, "_interface_ipv4", lambda name: None)

    assert interface_address("lo") == "::1"
