"""wherry doctor: know in a minute whether a job can run, before the queue and before hours are spent.

The same checks in three places, as far as each can be made there: on the login node, of a job script before it is
submitted (wherry doctor slurm/train.sh RECIPE), and in a job on every node and rank (sbatch slurm/doctor.sh RECIPE).
Exit code 3 where any check fails. docs/troubleshooting.md has an entry for every check.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wherry import ranks
from wherry.cli import open_run, parser
from wherry.errors import Exit, WherryError


def main(arguments: list[str]) -> int:
    made = parser("doctor", __doc__, "wherry doctor slurm/train.sh recipes/demo.yaml --gpus 3x8xH100-80")
    made.add_argument("--script", metavar="FILE", help="a job script; the same as FILE alone")
    made.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="sbatch's own options: --sbatch='--nodes=3 --time=1:00:00'"
    )
    made.add_argument("--gpus", metavar="NODESxGPUSxTYPE-GB", help="what the job will run on (default: what is here)")
    made.add_argument("--json", action="store_true", help="a list of results")
    options = made.parse_args(arguments)

    from wherry.doctor import table
    from wherry.doctor.check import CHECKS, Result
    from wherry.doctor.check import made as results_of

    context, trouble = context_of(options)
    results = [Result("recipe.read", v.status, v.found, v.fix, context.node) for v in trouble if context.rank.is_main]
    results += results_of(CHECKS, context)
    speaks = context.rank.is_main
    if not context.rank.alone:
        results, met = _together(context, results)
        speaks |= not met and context.rank.local_rank == 0
    if speaks:
        text = json.dumps([one.as_json() for one in results], indent=1) if options.json else table.as_text(results)
        print(text, flush=True)
    return Exit.PREFLIGHT if any(result.status == "fail" for result in results) else Exit.DONE


def context_of(options: Any) -> Any:
    """(Context, verdicts on the recipe). A recipe that cannot be read is a result: the other checks still count."""
    from wherry.doctor import device, model, network, node, planned, script  # noqa: F401 they register their checks
    from wherry.doctor.check import passed, refused
    from wherry.doctor.context import Context
    from wherry.doctor.jobscript import is_script, read
    from wherry.plan import gpus

    scripts = [word for word in options.words if "=" not in word and is_script(word)]
    options.words = [word for word in options.words if word not in scripts]
    scripts += [options.script] if options.script else []
    if len(scripts) > 1:
        raise WherryError(f"two job scripts: {' and '.join(scripts)}", "command line", "give one")
    context = Context(ranks.current(), nvml=_nvml())
    context.gpus = gpus.parse(options.gpus) if options.gpus else None
    context.script = read(Path(scripts[0]), options.sbatch) if scripts else None
    if not (options.words or options.recipe or options.run):
        return context, []
    try:
        context.run = open_run(options)
    except WherryError as error:
        return context, [refused(error)]
    return context, [passed(f"{context.run.name}: {context.run.recipe.model.name}")]


def _nvml() -> Any:
    with suppress(Exception):  # no driver here, or no library for it: checks of GPUs say so
        import pynvml

        pynvml.nvmlInit()
        return pynvml
    return None


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Gloo writes lines of its own to stdout, from C++: results must stay alone there."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _together(context: Any, mine: list[Any]) -> tuple[list[Any], bool]:
    """All ranks' results, with those of what they did together. Where they do not meet, each has its own, and False."""
    from wherry.doctor import network
    from wherry.plan import gpus

    with tempfile.TemporaryDirectory() as folder, _stdout_to_stderr():
        met = network.meet(context, mine, Path(folder) / "nccl")
    return met.results + network.group_results(context, met, context.gpus or gpus.here()), not met.error
