# SPDX-License-Identifier: Apache-2.0
"""The programs that the benchmarks start as ranks, one per library under test."""
