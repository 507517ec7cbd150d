"""wherry eval: score the base or the merged model with inspect-ai tasks, against vLLM behind the readiness gate.

eval/<base|merged>/result.json       one entry a task: n of N, score, 95 % interval, truncated, unparsed, errors
eval/<base|merged>/<task>.items.json outcome of every item
eval/<base|merged>/logs              inspect's own logs (inspect view --log-dir …)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wherry.cli import open_run, parser, say
from wherry.errors import Exit, WherryError
from wherry.eval.score import line, summarise
from wherry.files import read_json, write_json
from wherry.rundir import Run


def main(arguments: list[str]) -> int:
    options = parser("eval", __doc__, "wherry eval recipes/demo.yaml --model base")
    options.add_argument(
        "--model", choices=("base", "merged"), help="which model (default: merged if there is one, else base)"
    )
    chosen = options.parse_args(arguments)
    run = open_run(chosen)
    tasks = run.recipe.eval.tasks
    if not tasks:
        raise WherryError("the recipe names no task", "eval.tasks", "name an inspect-ai task file, such as task.py")
    for task in tasks:
        if not Path(task.partition("@")[0]).is_file():
            raise WherryError(f"no task file {task}", "eval.tasks", "correct the path")
    which = chosen.model or ("merged" if run.is_complete("merge") else "base")
    mode = f"eval/{which}"
    if run.is_complete(mode) and read_json(run.dir(mode) / "inputs.json") == run.inputs("eval"):
        say(f"{mode} of run {run.name!r} is complete")
        show(read_json(run.dir(mode) / "result.json"))
        return 0
    set_aside(run, mode)
    with run.work(mode) as record:
        results = evaluate(run, which, tasks)
        record["results"] = results
        write_json(run.dir(mode) / "result.json", results)
    show(results)
    return 0


def evaluate(run: Run, which: str, tasks: list[str]) -> list[dict[str, Any]]:
    from wherry.serve import Server

    folder = run.dir(f"eval/{which}")
    results = []
    with Server(run, which=which) as server:
        for task in tasks:
            name = Path(task.partition("@")[0]).stem
            spec, out = folder / f"{name}.spec.json", folder / f"{name}.items.json"
            write_json(
                spec,
                {
                    "task": task,
                    "model": server.model,
                    "url": server.url,
                    "api_key_file": str(server.api_key_file),
                    "args": run.recipe.eval.args,
                    "log_dir": str(folder / "logs"),
                    "out": str(out),
                },
            )
            code = server.run([str(evaluation_python()), "-P", str(Path(__file__).parent / "worker.py"), str(spec)])
            if code != 0 or not out.is_file():
                raise WherryError(
                    f"the task ended with exit code {code}",
                    f"{task}; its last lines stand above",
                    "correct the task or eval.args, then start the same command again",
                )
            results.append(
                summarise(read_json(out))
                | {"which": which, "model": server.model, "max_model_len": server.max_model_len}
            )
    return results


def evaluation_python() -> Path:
    """inspect-ai's own environment, which install.sh makes inside the main one."""
    python = Path(sys.prefix) / "eval" / "bin" / "python"
    if not python.exists():
        raise WherryError(
            "the evaluation environment is missing", str(python), "run containers/install.sh", Exit.PREFLIGHT
        )
    return python


def set_aside(run: Run, mode: str) -> None:
    """Keep the result of other tasks or arguments under a number; it is nobody's to overwrite."""
    folder = run.dir(mode)
    if run.is_complete(mode):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        say(f"eval: the earlier result was for other tasks or arguments; kept as {aside}")


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        print(f"{result['which']:<7}{line(result)}")
