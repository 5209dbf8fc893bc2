# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on disk: its manifest, and how a new one takes the place of an old one.

    path/manifest.json                       tables, clocks, and the checksums of all files
    path/segment-0001-of-0003.safetensors    the contents, see segments.py

A new checkpoint is written into a folder beside `path`, ".path.tmp-1234abcd", its manifest last.
When all is on disk the two change places in one step (where the file system cannot do that: the old
one is renamed to ".path.old-1234abcd", the new one to `path`), and the old one is removed. Whoever
is killed on the way leaves the old one at `path`, or the new one; between the two renames neither,
and loading then says which folder is whole. What was left behind is removed by the next save.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Any, Final

import msgspec

from commute import _core
from commute._errors import CheckpointError
from commute._version import __version__
from commute.store.segments import FileRecord, checksum

__all__ = ["Manifest", "SavedPart", "SavedTable", "Site", "segment_name"]

FORMAT: Final = "commute checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
_OURS: Final = re.compile(r"manifest\.json|segment-\d+-of-\d+\.safetensors")


class SavedPart(msgspec.Struct, frozen=True):
    """A part of a dense table: which bytes of the tensor, and how often it was updated."""

    begin: int
    bytes: int
    updates: int


class SavedTable(msgspec.Struct, frozen=True):
    """What is known of a table.

    Attributes:
        shape: of a sparse table that of a row.
        arrays: what there is of each part, or row.
        rows: of a sparse table, 0 of a dense one.
        parts: of a dense table, in the order of the tensor; none of a sparse one.
    """

    kind: str
    dtype: str
    shape: list[int]
    update: str
    declaration: str
    staleness: int | None
    clock: int
    arrays: list[str]
    rows: int
    parts: list[SavedPart]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What manifest.json says."""

    format: str = FORMAT
    version: int = VERSION
    commute: str = __version__
    store: str
    slots: int
    tables: dict[str, SavedTable]
    files: list[FileRecord]
    checksum: str = ""  # of all this without it, as JSON without spaces

    def encode(self) -> bytes:
        whole = msgspec.structs.replace(self, checksum=self._sum())
        return msgspec.json.format(msgspec.json.encode(whole), indent=1)

    @staticmethod
    def decode(text: bytes, path: str) -> Manifest:
        """Raises CheckpointError."""
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is damaged, or is no manifest: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint of commute")
        version = found.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise CheckpointError(
                f"{path} is of version {version}, written by commute {found.get('commute')}; this"
                f" commute, {__version__}, reads versions up to {VERSION}"
            )
        try:
            manifest = msgspec.convert(found, Manifest)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        if manifest.checksum != manifest._sum():
            raise CheckpointError(f"{path} is damaged: it is not what was saved")
        return manifest

    def _sum(self) -> str:
        return checksum(msgspec.json.encode(msgspec.structs.replace(self, checksum="")))


def segment_name(index: int, count: int) -> str:
    """Counted from 1, as people do.

    >>> from commute.store.manifest import segment_name
    >>> segment_name(0, 8)
    'segment-0001-of-0008.safetensors'
    """
    return f"segment-{index + 1:04}-of-{count:04}.safetensors"


class Site:
    """Where a checkpoint is, or will be."""

    def __init__(self, path: Any) -> None:
        self.path = os.path.realpath(os.fsdecode(path))
        self._parent, self._name = os.path.split(self.path)

    # ---- writing; rank 0 does this ----

    def prepare(self) -> str:
        """A new folder to write into. Raises CheckpointError where there is something else."""
        self._check_ours()
        os.makedirs(self._parent, exist_ok=True)
        folder = self._beside("tmp")
        os.mkdir(folder)
        return folder

    def complete(self, folder: str, manifest: Manifest) -> None:
        """Write the manifest, and put the folder in its place; when this returns it is on disk."""
        with open(os.path.join(folder, MANIFEST), "xb") as file:
            file.write(manifest.encode())
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)
        self._check_ours()
        if not os.path.lexists(self.path) or not os.listdir(self.path):
            os.rename(folder, self.path)
        elif not _core.exchange_paths(folder, self.path):
            aside = self._beside("old")
            os.rename(self.path, aside)
            try:
                os.rename(folder, self.path)
            except OSError:
                os.rename(aside, self.path)
                raise
        _sync(self._parent)
        self.clean()

    def clean(self) -> None:
        """Remove what was left behind by this save and earlier ones."""
        for folder in self._left_behind():
            discard(folder)

    def _beside(self, kind: str) -> str:
        return os.path.join(self._parent, f".{self._name}.{kind}-{secrets.token_hex(4)}")

    def _left_behind(self) -> list[str]:
        ours = re.compile(re.escape(f".{self._name}.") + r"(tmp|old)-[0-9a-f]{8}")
        with contextlib.suppress(OSError):
            names = filter(ours.fullmatch, sorted(os.listdir(self._parent)))
            return [os.path.join(self._parent, name) for name in names]
        return []

    def _check_ours(self) -> None:
        """What is in the way must be a checkpoint: it will be removed."""
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):
            raise CheckpointError(f"{self.path} is a file; a checkpoint is a folder")
        others = [name for name in sorted(os.listdir(self.path)) if not _OURS.fullmatch(name)]
        if others:
            raise CheckpointError(
                f"{self.path} holds {others[0]!r}, which is no part of a checkpoint; save into a"
                " folder of its own"
            )

    # ---- reading ----

    def manifest(self) -> Manifest:
        """Raises CheckpointError."""
        path = os.path.join(self.path, MANIFEST)
        try:
            with open(path, "rb") as file:
                text = file.read()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}{self._instead()}"
            ) from None
        return Manifest.decode(text, path)

    def _instead(self) -> str:
        if os.path.lexists(self.path):
            return ""
        whole = [
            folder
            for folder in self._left_behind()
            if os.path.exists(os.path.join(folder, MANIFEST))
        ]
        if not whole:
            return ""
        return f"; a save was interrupted, {whole[-1]} is whole: rename it to {self.path}"


def discard(folder: str) -> None:
    """Remove a folder's files that are ours, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for name in filter(_OURS.fullmatch, os.listdir(folder)):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
