"""Results as a table: a row a check, a column a node; then what is to do."""

from __future__ import annotations

from wherry.doctor.check import Result

SIGNS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"}
ORDER = ("skip", "pass", "warn", "fail")
GROUPS = ("recipe", "script", "plan", "device", "network", "node", "model", "data", "train", "merge", "serve", "eval")
WIDE = 4  # nodes; more of them are counted


def worst(results: list[Result]) -> str:
    return max((result.status for result in results), key=ORDER.index)


def as_text(results: list[Result]) -> str:
    """One node: with what was found. Several: a sign for each, or counts. What was skipped everywhere comes last."""
    nodes = sorted({result.node for result in results})
    by_id: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: GROUPS.index(result.id.partition(".")[0])):
        by_id.setdefault(result.id, []).append(result)
    made = {name: found for name, found in by_id.items() if worst(found) != "skip"}
    width = max(map(len, made), default=0)
    lines = []
    if 1 < len(nodes) <= WIDE:
        lines.append(" " * (width + 2) + "  ".join(f"{node:>10}" for node in nodes))
    for name, found in made.items():
        if len(nodes) == 1:
            text = f"{SIGNS[worst(found)]:<5} {_shown(found)}"
        elif len(nodes) <= WIDE:
            text = "  ".join(f"{_sign(found, node):>10}" for node in nodes)
        else:
            text = _counts(found, nodes)
        lines.append(f"{name:<{width}}  {text}")
    return "\n".join([*lines, *_skipped(by_id), *_todo(results)])


def _skipped(by_id: dict[str, list[Result]]) -> list[str]:
    """Why, and which checks."""
    reasons: dict[str, list[str]] = {}
    for name, found in by_id.items():
        if worst(found) == "skip":
            reasons.setdefault(found[0].found, []).append(name)
    return (
        ["", "not looked at:", *(f"  {why}: {', '.join(names)}" for why, names in reasons.items())] if reasons else []
    )


def _shown(found: list[Result]) -> str:
    """What the worst of a check's results says."""
    return next(result.found for result in found if result.status == worst(found))


def _sign(found: list[Result], node: str) -> str:
    here = [result for result in found if result.node == node]
    return SIGNS[worst(here)] if here else ""


def _counts(found: list[Result], nodes: list[str]) -> str:
    counts = {sign: 0 for sign in ("FAIL", "warn", "ok", "-")}
    for node in nodes:
        if sign := _sign(found, node):
            counts[sign] += 1
    return ", ".join(f"{sign} on {count}" for sign, count in counts.items() if count)


def _todo(results: list[Result]) -> list[str]:
    """Failures, then warnings; the same on several ranks is said once."""
    lines = []
    for status in ("fail", "warn"):
        grouped: dict[tuple[str, str, str], list[Result]] = {}
        for result in results:
            if result.status == status:
                grouped.setdefault((result.id, result.found, result.fix), []).append(result)
        for (name, found, fix), same in grouped.items():
            where = ", ".join(dict.fromkeys(_who(result) for result in same))
            lines += ["", f"{SIGNS[status]} {name} on {where}", f"  found: {found}", f"  fix:   {fix}"]
    counted = {
        status: sum(result.status == status for result in results) for status in ("pass", "warn", "fail", "skip")
    }
    lines += ["", ", ".join(f"{count} {status}" for status, count in counted.items())]
    if counted["fail"] or counted["warn"]:
        lines.append("docs/troubleshooting.md has an entry for each (wherry explain ID)")
    return lines


def _who(result: Result) -> str:
    return result.node if result.rank < 0 else f"{result.node} (rank {result.rank})"
