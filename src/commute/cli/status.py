# SPDX-License-Identifier: Apache-2.0
"""`commute status host:port`: what a server of `commute serve` holds, and for whom."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping

import msgspec

from commute._errors import AuthenticationError
from commute.cluster.auth import read_token

_SECONDS = 5.0

_DESCRIPTION = """\
Show what a server of `commute serve` holds: stores and tables with their update, bytes, slots and
clocks, and the clients that are connected.

  commute status 127.0.0.1:7077 --token-file ~/.commute-token
  commute status 127.0.0.1:7077 --json | jq '.stores[].tables[].name'"""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute status`."""
    made = argparse.ArgumentParser(
        prog="commute status",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("address", metavar="HOST:PORT", help="as the server printed it")
    made.add_argument(
        "--token-file",
        metavar="FILE",
        help="file (mode 600) with its token; by default COMMUTE_TOKEN or COMMUTE_TOKEN_FILE",
    )
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from commute.cluster.visit import ask_status
    from commute.store.status import as_text, decode

    if options.token_file is not None:
        env = {"COMMUTE_TOKEN_FILE": os.path.expanduser(options.token_file)}
    token = read_token(env)
    if token is None:
        raise AuthenticationError(
            "asking a server needs its token; add --token-file FILE, or set COMMUTE_TOKEN"
        )
    body = asyncio.run(ask_status(options.address, token, _SECONDS))
    found = decode(body, options.address)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print(as_text(found))
    return 0
