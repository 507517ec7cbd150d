"""Put the adapter into the base weights: streaming, in constant memory, verified, atomic; a second start goes on.

Reads prepare/model (the base), prepare/tokenizer and train/adapter; writes merge/model, which anything that reads
Hugging Face models takes. The result is that of PEFT's merge_and_unload(). docs/merge.md says more.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from wherry import cli
from wherry.errors import WherryError
from wherry.rundir import Run, peak_rss_bytes


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    if isinstance(options.verify, str):
        return _verify_folder(Path(options.verify))
    run = cli.open_run(options)
    run.require("prepare")
    run.require("train")
    _check_meaning(run)
    if options.verify:
        return _verify(run)
    if options.compare:
        from wherry.merge.compare import compare

        print(compare(run), end="")
        return 0
    from wherry.merge import model

    if run.is_complete("merge"):
        model.refuse_outdated(run)
        cli.say(f"merge of run {run.name!r} is complete: {run.dir('merge') / 'model'}")
        return 0
    started = time.monotonic()
    with run.work("merge") as record:
        work = model.link_trained if run.recipe.train.tuning == "full" else model.merge
        record |= work(run)
    print(_summary(run, record, time.monotonic() - started))
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = cli.parser(
        "merge",
        __doc__,
        "wherry merge recipes/demo.yaml\n  wherry merge recipes/demo.yaml merge.base=nf4 --run demo-nf4\n"
        "  wherry merge --verify runs/demo/merge/model",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const=True,
        metavar="DIR",
        help="read a finished merge again: that of the run, or the one in DIR",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="measure on prompts which merge.base is closer to base + adapter (needs memory for the whole model twice)",
    )
    return parser.parse_args(arguments)


def _check_meaning(run: Run) -> None:
    if run.recipe.merge.base == "nf4" and run.recipe.train.tuning != "qlora":
        raise WherryError(
            f"merge.base is nf4 but train.tuning is {run.recipe.train.tuning}: nothing was trained on NF4 weights",
            "merge.base",
            "remove merge.base, or train with train.tuning: qlora",
        )


def _verify_folder(folder: Path) -> int:
    from wherry.merge import model

    if not (folder / model.MANIFEST).is_file():
        raise WherryError(
            f"{folder} is not a folder that merge has finished: {model.MANIFEST} is not in it",
            str(folder.absolute()),
            "wherry merge --verify runs/NAME/merge/model, or: wherry merge --run NAME --verify",
        )
    print(model.verify_again(folder))
    return 0


def _verify(run: Run) -> int:
    """A finished merge, read again. Raises WherryError (exit 6) where it is not what was written."""
    run.require("merge")
    from wherry.merge import model

    model.refuse_outdated(run)
    print(model.verify_again(run.dir("merge") / "model", run))
    return 0


def _summary(run: Run, record: dict[str, Any], seconds: float) -> str:
    return (
        f"merged {record['merged']} of {record['tensors']} tensors into {run.dir('merge') / 'model'}: "
        f"{record['bytes'] / 1e9:.2f} GB in {seconds:.1f} s, peak memory {peak_rss_bytes() / 1e9:.2f} GB"
    )
