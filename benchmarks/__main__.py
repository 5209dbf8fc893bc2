# SPDX-License-Identifier: Apache-2.0
"""All questions, one after the other: `python -m benchmarks [--runs 3]`."""

import sys

from benchmarks import every_collective, four_hosts, import_time, learn, one_host, sparse, store
from benchmarks.session import ask, parse


def main() -> int:
    options = parse(str(__doc__))
    questions = (
        *(one_host.QUESTION, every_collective.QUESTION, four_hosts.QUESTION, store.QUESTION),
        *(sparse.QUESTION, learn.QUESTION),
    )
    # The first that fails does not keep the others from being asked.
    codes = [ask(question, options) for question in questions]
    return max(*codes, import_time.main())


if __name__ == "__main__":
    sys.exit(main())
