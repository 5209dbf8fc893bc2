# SPDX-License-Identifier: Apache-2.0
"""`commute serve`: keeps tables up for whoever connects; store.serve does the rest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from commute._cores import usable_cores
from commute.cluster.auth import make_token_file, read_token

_PORT = 7077

_DESCRIPTION = """\
Keep a parameter server up, for any number of clients that come and go.

  commute serve --port 7077 --token-file ~/.commute-token      makes the token, if it is not there

From a notebook, a script, or each rank of a job:

  import commute
  store = commute.connect("127.0.0.1:7077", token_file="~/.commute-token").store("mine")
  w = store.dense("w", 3, update=commute.SGD(lr=0.1))
  w.push_pull(gradient)

Clients share the tables of a store that they name alike; stores of different names never touch each
other. Tables stay when their clients go, as long as this process lives."""

_EPILOG = """\
It listens on this machine only, unless --bind names an address or interface that others reach; copy
the token file to them (mode 600). The token keeps strangers out; the data is not encrypted.
`commute status HOST:PORT` shows tables and clients. Ctrl-C or SIGTERM ends it; clients are told."""


def parser() -> argparse.ArgumentParser:
    """The command line of `commute serve`."""
    made = argparse.ArgumentParser(
        prog="commute serve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--port", type=_port, default=_PORT, help=f"port (default {_PORT}); 0 takes a free one"
    )
    made.add_argument(
        "--token-file",
        metavar="FILE",
        help="file (mode 600) with the token; one is made if there is none. Without this flag "
        "COMMUTE_TOKEN or COMMUTE_TOKEN_FILE",
    )
    made.add_argument(
        "--shards",
        type=_shards,
        metavar="N",
        help="threads that share the tables (default: all cores but one, at least 1)",
    )
    made.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDR",
        help="address or interface to listen on (default 127.0.0.1: this machine only)",
    )
    made.add_argument(
        "--advertise", metavar="ADDR", help="address that clients are told, where it is another"
    )
    return made


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _shards(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1024, got {text!r}")
    return int(text)


def run(options: argparse.Namespace, env: Mapping[str, str]) -> int:
    from commute.store.serve import Serving, serve

    path = options.token_file
    if path is not None:
        path = os.path.abspath(os.path.expanduser(path))
        if make_token_file(path):
            print(f"commute serve: made a new token in {path} (mode 600)")
        env = {"COMMUTE_TOKEN_FILE": path}
    token = read_token(env)
    if token is None:
        print(
            "commute serve: there is no token; add --token-file FILE, which makes one if the file"
            " is not there, or set COMMUTE_TOKEN",
            file=sys.stderr,
        )
        return 2
    return serve(
        Serving(
            token=token,
            token_source=_source(env),
            port=options.port,
            shards=options.shards or max(1, int(usable_cores()) - 1),
            bind=options.bind,
            advertise=options.advertise,
        )
    )


def _source(env: Mapping[str, str]) -> str:
    """Where a client finds the token, as it would write it; never the token itself."""
    if env.get("COMMUTE_TOKEN"):
        return "token=os.environ['COMMUTE_TOKEN']"
    return f"token_file={env['COMMUTE_TOKEN_FILE']!r}"
