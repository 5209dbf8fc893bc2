# SPDX-License-Identifier: Apache-2.0
"""The recorder's dump: the last operations of a rank as JSON lines, written when a group breaks.

The ring itself is in the core and always on. A dump is one line per operation, oldest first, so
that the files of several ranks can be laid side by side: `sequence` is the same on all ranks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FIELDS = (
    "number",
    "sequence",
    "operation",
    "dtype",
    "count",
    "op",
    "root",
    "peer",
    "algorithm",
    "state",
    "begun_ns",
    "ended_ns",
)


def rows(records: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The core's records as dictionaries."""
    return [dict(zip(FIELDS, record, strict=True)) for record in records]


def dump(records: Iterable[tuple[Any, ...]], directory: str | None, name: str) -> Path:
    """Write the records to `name`.jsonl in the directory (the temporary one by default)."""
    folder = Path(directory or tempfile.gettempdir())
    lines = "".join(json.dumps(row) + "\n" for row in rows(records))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    # Not through a file that somebody else may have put there.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(lines)
    return path
