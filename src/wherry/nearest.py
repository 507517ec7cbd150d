"""The right name for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like name, or None where none is like it."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence to begin a fix with: 'did you mean x? ', or nothing."""
    found = closest(name, known)
    return f"did you mean {found}? " if found else ""
