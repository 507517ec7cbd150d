"""wherry explain: what the errors in a log mean and what to do, or what a check of doctor looks at.

Reads any log: of a job, of training, of vLLM. The entries are those of docs/troubleshooting.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wherry.cli import Parser, say
from wherry.errors import WherryError
from wherry.explain.entries import CHECKS, Entry, all_messages
from wherry.nearest import nearest

LINE = 300  # signs of a log line that are looked at and shown


def main(arguments: list[str]) -> int:
    made = Parser(
        "wherry explain",
        description=__doc__,
        epilog="example:\n  wherry explain wherry-train-1234.out\n  wherry explain device.visible",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("what", nargs="?", metavar="LOGFILE | ID", help="a log, '-' for stdin, or an id of doctor")
    made.add_argument("--page", action="store_true", help="print docs/troubleshooting.md")
    options = made.parse_args(arguments)
    if options.page:
        print(page(), end="")
    elif not options.what:
        raise WherryError(
            "nothing to explain", "command line", "wherry explain LOGFILE, or an id such as device.visible"
        )
    elif known := [entry for entry in CHECKS if entry.name == options.what]:
        print(as_text(known[0]))
    else:
        _explain_log(options.what)
    return 0


def _explain_log(name: str) -> None:
    if name == "-":
        found = search(sys.stdin)
    else:
        try:
            with Path(name).open(encoding="utf-8", errors="replace") as file:
                found = search(file)
        except (FileNotFoundError, IsADirectoryError):
            ids = [entry.name for entry in CHECKS]
            raise WherryError(
                f"{name} is neither a log nor an id", "command line", f"{nearest(name, ids)}wherry explain LOGFILE"
            ) from None
    if not found:
        say(f"{name}: no message that is known here. Read it from its first error on; the last is mostly a consequence")
        return
    for one in found:
        times = f", {one.count} times" if one.count > 1 else ""
        print(f"line {one.line}{times}: {one.text}\n{as_text(one.entry)}\n")


@dataclass
class Found:
    """An entry, and where a log has it first."""

    entry: Entry
    line: int
    text: str
    count: int = 1


def search(lines: Iterable[str]) -> list[Found]:
    """The known messages of a log, in the order in which they first come: the first is mostly the cause."""
    patterns = [(re.compile(entry.pattern), entry) for entry in all_messages()]
    found: dict[str, Found] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()[:LINE]
        entry = next((entry for pattern, entry in patterns if pattern.search(text)), None)
        if entry is None:
            continue
        if entry.name in found:
            found[entry.name].count += 1
        else:
            found[entry.name] = Found(entry, number, text)
    return list(found.values())


def as_text(entry: Entry) -> str:
    return f"{entry.name}\n  means: {entry.means}\n  fix:   {entry.fix}"


def page() -> str:
    """docs/troubleshooting.md."""
    lines = [
        "# Troubleshooting",
        "",
        "Written by `wherry explain --page` from `wherry.explain.entries`. `wherry explain LOGFILE` finds the messages",
        "of the second part in a log; `wherry explain ID` prints an entry of the first.",
        "",
        "## Checks of `wherry doctor`",
        "",
        "| id | what it looks at | what to do |",
        "|---|---|---|",
        *(f"| `{entry.name}` | {entry.means} | {entry.fix} |" for entry in CHECKS),
        "",
        "## Messages of the tools below",
    ]
    for entry in all_messages():
        lines += ["", f"### {entry.name}", "", entry.means, f"**Do:** {entry.fix}"]
    return "\n".join(lines) + "\n"
