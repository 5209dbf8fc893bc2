# SPDX-License-Identifier: Apache-2.0
"""The one error of the benchmarks."""


class BenchError(Exception):
    """The measurement could not be made: a peer is missing, died, or gave a wrong result."""
