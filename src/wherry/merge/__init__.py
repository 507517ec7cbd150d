"""Put the adapter into the base weights, tensor by tensor, in the memory of the largest one.

Reads prepare/model (the base), prepare/tokenizer and train/adapter; writes merge/model, which anything that reads
Hugging Face models takes, and merge/sha256.json. The arithmetic is PEFT's own. docs/merge.md says more.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from wherry import cli
from wherry.rundir import Run, peak_rss_bytes


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    run = cli.open_run(options)
    if options.verify:
        return _verify(run)
    run.require("prepare")
    run.require("train")
    if run.is_complete("merge"):
        cli.say(f"merge of run {run.name!r} is complete: {run.dir('merge') / 'model'}")
        return 0
    started = time.monotonic()
    with run.work("merge") as record:
        from wherry.merge import model  # imports torch and PEFT: only now, so that mistakes are answered at once

        work = model.link_trained if run.recipe.train.tuning == "full" else model.merge
        record |= work(run)
    print(_summary(run, record, time.monotonic() - started))
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = cli.parser("merge", __doc__, "wherry merge recipes/demo.yaml")
    parser.add_argument("--verify", action="store_true", help="read a finished merge again: headers and sha256 sums")
    return parser.parse_args(arguments)


def _verify(run: Run) -> int:
    """A finished merge, read again. Raises WherryError (exit 6) where it is not what was written."""
    run.require("merge")
    from wherry.merge import model

    print(model.verify_again(run))
    return 0


def _summary(run: Run, record: dict[str, Any], seconds: float) -> str:
    return (
        f"merged {record['merged']} of {record['tensors']} tensors into {run.dir('merge') / 'model'}: "
        f"{record['bytes'] / 1e9:.2f} GB in {seconds:.1f} s, peak memory {peak_rss_bytes() / 1e9:.2f} GB"
    )
