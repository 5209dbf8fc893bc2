# SPDX-License-Identifier: Apache-2.0
"""`python -m commute` is the command `commute`."""

import sys

from commute.cli import main

if __name__ == "__main__":
    sys.exit(main())
