"""wherry plan: will it fit, how long will it take, and what would fit; arithmetic alone, nothing is loaded.

GPU memory part by part at the fullest moment of a training step, for the recipe and for every other way of tuning;
host memory, disk, the KV cache of serve, and time. docs/plan.md says how well it agrees with what was measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from wherry.cli import open_run, parser, say
from wherry.errors import Exit


def main(arguments: list[str]) -> int:
    made = parser("plan", __doc__, "wherry plan recipes/demo.yaml --gpus 3x8xH100-80")
    made.add_argument("--gpus", metavar="NODESxGPUSxTYPE-GB", help="such as 3x8xH100-80 (default: this machine's)")
    made.add_argument("--recompute-layers", type=int, metavar="N", help="what if the first N layers recompute")
    made.add_argument("--explain", metavar="PART", help="the formula of one part, with its numbers")
    made.add_argument("--svg", type=Path, metavar="FILE", help="save the bars as a picture")
    made.add_argument("--json", action="store_true", help="everything, in bytes, seconds and tokens")
    options = made.parse_args(arguments)

    from wherry.plan import gpus, report
    from wherry.plan.made import make

    run = open_run(options)
    plan = make(run, gpus.parse(options.gpus) if options.gpus else gpus.here(), options.recompute_layers)
    if options.explain:
        print(report.explain(plan, options.explain))
    elif options.json:
        print(json.dumps(report.as_json(plan), indent=1))
    else:
        print(report.as_text(plan))
    if options.svg:
        from wherry.plan import picture

        picture.save(plan.options, options.svg)
        say(f"plan: {options.svg}")
    return 0 if plan.option.fits else Exit.PREFLIGHT
