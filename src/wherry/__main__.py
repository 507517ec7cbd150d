"""wherry MODE …: one mode, one module, imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys

from wherry import __version__, ranks
from wherry.errors import WherryError, run
from wherry.nearest import nearest

MODES = {
    "prepare": "fetch and check the model and the data, write the token contract",
    "doctor": "check this machine, a job script, or every node of a job, before work starts",
    "plan": "whether it fits, how long it takes, what would fit: arithmetic alone",
    "train": "tune the prepared model; a second start resumes",
    "merge": "put the adapter into the base weights, tensor by tensor",
    "serve": "run vLLM behind the readiness gate",
    "wait": "wait until a run's server is ready, or has failed",
    "eval": "score the base or the merged model, with intervals",
    "status": "where a run stands: step, loss, time left, server, jobs",
    "explain": "what the errors in a log, or a check of doctor, mean and what to do",
    "report": "what a run did: time, memory, scores",
    "version": "versions of Wherry and of the packages that matter",
}

USAGE = f"""usage: wherry MODE [RECIPE] [key=value …] [--run NAME]

modes:
{chr(10).join(f"  {mode:<9}{text}" for mode, text in MODES.items())}

example:
  wherry train recipes/demo.yaml train.args.learning_rate=2e-4
  wherry MODE --help            the options of one mode

Runs live under $WHERRY_RUNS (default: runs/), one folder each, named after the recipe or by --run.
"""


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(f"wherry {__version__}")
        return 0
    code = run(lambda: dispatch(arguments[0], arguments[1:]))
    ranks.end(code)
    return code


def dispatch(mode: str, arguments: list[str]) -> int | None:
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "15")  # a log file needs a line now and then, not a moving bar
    if mode not in MODES:
        raise WherryError(
            f"unknown mode {mode!r}", "the first argument", f"{nearest(mode, MODES)}one of: {', '.join(MODES)}"
        )
    return importlib.import_module(f"wherry.{mode}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
