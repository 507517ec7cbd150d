"""A file written once, in order, past the page cache.

A merge writes more than memory holds: through the cache every byte would be copied once more, push out what others
use, and wait for its turn again when it is flushed. (man 2 open: O_DIRECT)
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

BUFFER_BYTES = 8 << 20
BLOCK_BYTES = 4096  # O_DIRECT takes whole blocks from aligned memory at aligned offsets


class DirectFile:
    """Call write, then close: then all of it is on the disk. Where a file system has no O_DIRECT, an ordinary file."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o644)
            self._direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o644)
            self._direct = False
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._filled = 0

    def write(self, block: memoryview) -> None:
        while block:
            count = min(len(block), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = block[:count]
            self._filled += count
            block = block[count:]
            if self._filled == BUFFER_BYTES:
                self._flush()

    def close(self) -> None:
        whole = self._filled // BLOCK_BYTES * BLOCK_BYTES
        tail = bytes(self._buffer[whole : self._filled])
        self._filled = whole
        self._flush()
        self._use_the_cache()
        self._put(memoryview(tail))
        os.fsync(self._file)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the file as it is; nothing where it is closed."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _flush(self) -> None:
        self._put(self._buffer[: self._filled])
        self._filled = 0

    def _put(self, block: memoryview) -> None:
        while block:
            try:
                count = os.write(self._file, block)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._use_the_cache()  # the file system took the flag and does not keep to it
                continue
            block = block[count:]
            if count % BLOCK_BYTES:
                self._use_the_cache()

    def _use_the_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False
