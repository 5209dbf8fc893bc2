# SPDX-License-Identifier: Apache-2.0
"""All questions, one after the other: `python -m benchmarks [--runs 3]`."""

import sys

from benchmarks import four_hosts, one_host
from benchmarks.session import ask, parse


def main() -> int:
    options = parse(str(__doc__))
    # The first that fails does not keep the others from being asked.
    return max(ask(question, options) for question in (one_host.QUESTION, four_hosts.QUESTION))


if __name__ == "__main__":
    sys.exit(main())
