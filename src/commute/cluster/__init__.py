# SPDX-License-Identifier: Apache-2.0
"""How the processes of a job find each other, and learn that one of them is gone.

Deciding (pure; no socket, no clock, no thread):
    coordinator   who is a member of which world; who left, who is lost
    observers     who is a client of `commute serve`
    control       the bytes of joining and of control frames
    auth          the handshake every connection begins with
    addresses     "host:port", interfaces, which address to listen on

Moving:
    gate          both ends of a connection up to the end of the handshake
    serve         the coordinator as an asyncio server, and as a process of its own
    join          become a member of a world
    connector     links to the other members, opened at first use
    reception     the port of `commute serve`; visit is its other end
    launch        the ranks of a node: children are its processes; forked: those that need no exec

This file imports nothing, so that reading the environment does not cost the import of asyncio.
"""
