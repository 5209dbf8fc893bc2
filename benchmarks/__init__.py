# SPDX-License-Identifier: Apache-2.0
"""Measurements against the peers, one question per module: `python -m benchmarks.<question>`."""
