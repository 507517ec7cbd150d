"""What a check is: a small function with an id that looks at one thing and says what it found and what to do.

Every id has an entry in docs/troubleshooting.md (wherry.explain.entries); a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from wherry.doctor.context import Context
from wherry.errors import WherryError

Status = Literal["pass", "warn", "fail", "skip"]
Scope = Literal["once", "node", "rank"]


class Verdict(NamedTuple):
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """scope: by whom it is made: the first rank alone, one rank of each node, or every rank."""

    id: str
    scope: Scope
    look: Callable[[Context], Verdict]


@dataclass(frozen=True)
class Result:
    """rank is -1 where a check speaks for a whole node."""

    id: str
    status: Status
    found: str
    fix: str
    node: str
    rank: int = -1

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


CHECKS: list[Check] = []


def check(name: str, scope: Scope) -> Callable[[Callable[[Context], Verdict]], Callable[[Context], Verdict]]:
    """Register a function as a check."""

    def register(look: Callable[[Context], Verdict]) -> Callable[[Context], Verdict]:
        CHECKS.append(Check(name, scope, look))
        return look

    return register


def passed(found: str) -> Verdict:
    return Verdict("pass", found)


def warn(found: str, fix: str) -> Verdict:
    return Verdict("warn", found, fix)


def fail(found: str, fix: str) -> Verdict:
    return Verdict("fail", found, fix)


def skip(why: str) -> Verdict:
    return Verdict("skip", why)


def refused(error: WherryError) -> Verdict:
    """The verdict that a mode's own refusal is."""
    return fail(f"{error.what} ({error.where})", error.fix)


def made(checks: Iterable[Check], context: Context) -> list[Result]:
    """Make the checks that this rank is to make. One that breaks is a warning: the others still count."""
    results = []
    for one in checks:
        if (one.scope == "once" and not context.rank.is_main) or (one.scope == "node" and context.rank.local_rank):
            continue
        try:
            verdict = one.look(context)
        except WherryError as error:
            verdict = refused(error)
        except Exception as error:  # an odd machine must not hide what the other checks find
            verdict = warn(f"the check itself failed: {error!r}"[:300], "please report this")
        rank = context.rank.rank if one.scope == "rank" else -1
        results.append(Result(one.id, *verdict, context.node, rank))
    return results
