"""wherry report: what a run did. Prints time and memory of each mode and the scores side by side.

report/report.md, report/scores.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherry.cli import open_run, parser, say
from wherry.errors import WherryError
from wherry.files import write_atomic

ORDER = ("prepare", "eval/base", "train", "merge", "eval/merged", "serve")


def main(arguments: list[str]) -> int:
    run = open_run(parser("report", __doc__, "wherry report --run demo").parse_args(arguments))
    modes = run.manifest()["modes"]
    if not modes:
        raise WherryError(f"run {run.name!r} has done nothing yet", str(run.path), f"wherry prepare --run {run.name}")
    results = [result for mode in ORDER for result in modes.get(mode, {}).get("results", [])]
    text = f"# Run {run.name}\n\n{stages(modes)}"
    if results:
        text += f"\n{scores(results)}"
        run.dir("report").mkdir(exist_ok=True)
        save_picture(results, run.dir("report") / "scores.png")
    write_atomic(run.dir("report") / "report.md", text)
    print(text, end="")
    say(f"report: {run.dir('report')}")
    return 0


def stages(modes: dict[str, Any]) -> str:
    lines = ["| mode | seconds | peak memory (GiB) | |", "|---|---:|---:|---|"]
    known = [mode for mode in ORDER if mode in modes]
    for mode in [*known, *sorted(modes.keys() - set(ORDER))]:
        record = modes[mode]
        note = "" if record.get("complete") else f"not complete: {record.get('ended_by', 'running')[:60]}"
        lines.append(f"| {mode} | {record['seconds']:.1f} | {record['peak_rss_bytes'] / 2**30:.2f} | {note} |")
    lines.append(f"| all | {sum(modes[mode]['seconds'] for mode in modes):.1f} | | |")
    return "\n".join(lines) + "\n"


def scores(results: list[dict[str, Any]]) -> str:
    lines = [
        "| task | model | score (%) | 95 % interval | n of N | truncated | unparsed | errors |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for r in sorted(results, key=lambda r: r["task"]):
        low, high = (100 * bound for bound in r["interval"])
        lines.append(
            f"| {r['task']} | {r['which']} | {100 * r['score']:.1f} | {low:.1f} to {high:.1f} | {r['n']} of {r['N']} "
            f"| {r['truncated']} | {r['unparsed']} | {r['errors']} |"
        )
    return "\n".join(lines) + "\n"


def save_picture(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 1.2 + 0.5 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    for position, r in enumerate(reversed(results)):
        low, high = r["interval"]
        centre = 100 * r["score"]
        axes.errorbar(
            centre, position, xerr=[[centre - 100 * low], [100 * high - centre]], fmt="o", capsize=4, color="#3b6ea5"
        )
    axes.set_yticks(range(len(results)), [f"{r['task']}, {r['which']}" for r in reversed(results)])
    axes.set(xlabel="score (%), 95 % interval", xlim=(-2, 102), ylim=(-0.6, len(results) - 0.4))
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
