"""torchrun that ends with the exit code of the rank that was wrong, and lets that rank's own message stand.

`python -m wherry.launch …` takes torchrun's arguments. torchrun itself ends with 1 and puts a traceback of its own
(ChildFailedError) below a message of three lines; and on SIGTERM it gives ranks 30 s, less than a large step lasts.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from wherry.cli import say
from wherry.errors import Exit


def main(arguments: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank has said it already
    # Slurm tells every process of a step: the ranks save and end by themselves, and this one waits for them.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run(parse_args(["--signals-to-handle", "SIGINT", *arguments]))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode
        if code < 0:
            say(f"rank {rank} was ended by {signal.Signals(-code).name}")
            return 128 - code
        if code not in list(Exit):
            say(f"rank {rank} ended with exit code {code}; its message is above")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
