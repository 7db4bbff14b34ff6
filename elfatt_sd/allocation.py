"""What a process does with the memory that tensors on the CPU free."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_NEVER = 2**31 - 1
_kept = False


def keep_freed_memory() -> bool:
    """Let this process keep the memory that tensors on the CPU free, for the next ones.

    glibc gives large blocks back to the system at once, which clears them page by page before the next tensor may use
    them; for every layer of a UNet again. On CUDA PyTorch keeps freed memory too. The elfatt-sd command does so from
    the start; `docs/performance.md` says what it gains. It holds for the whole process and cannot be taken back. The
    memory that the process holds at most may grow.

    Returns:
        Whether memory is kept now; False where the C library is not glibc.
    """
    global _kept
    if sys.platform == "linux" and not _kept:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        _kept = mallopt is not None and all(mallopt(limit, _NEVER) == 1 for limit in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
    return _kept


def keeps_freed_memory() -> bool:
    """Tell whether `keep_freed_memory` did so in this process."""
    return _kept
