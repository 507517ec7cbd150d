"""Runs inside the evaluation environment: one inspect-ai task against an OpenAI-compatible server.

    python worker.py SPEC.json

SPEC holds task, model, url, api_key_file, args, log_dir, out. Every sample's outcome is written to `out` (JSON):
Wherry itself counts and judges them, so that its denominators are its own. Imports nothing of Wherry, which is not
installed here.
"""

import json
import os
import sys
from pathlib import Path


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ["WHERRY_BASE_URL"] = f"{spec['url']}/v1"
    os.environ["WHERRY_API_KEY"] = Path(spec["api_key_file"]).read_text().strip()

    from inspect_ai import eval

    (log,) = eval(
        spec["task"],
        model=f"openai-api/wherry/{spec['model']}",
        log_dir=spec["log_dir"],
        display="plain",
        fail_on_error=False,  # a sample that fails is counted, not a reason to lose the others
        **spec["args"],
    )
    if log.status != "success" or log.samples is None:
        print(f"error: {log.error.message if log.error else log.status}", file=sys.stderr)
        return 1
    out = {
        "task": log.eval.task,
        "dataset_size": log.eval.dataset.samples,
        "sampling": {k: v for k, v in log.eval.model_generate_config.model_dump().items() if v is not None},
        "log": log.location,
        "inspect_ai": log.eval.packages.get("inspect_ai"),
        "items": [outcome(sample) for sample in log.samples],
    }
    part = Path(spec["out"] + ".part")
    part.write_text(json.dumps(out, indent=1))
    part.replace(spec["out"])
    return 0


def outcome(sample) -> dict:
    from inspect_ai.scorer import value_to_float

    score = next(iter((sample.scores or {}).values()), None)
    return {
        "id": sample.id,
        "epoch": sample.epoch,
        "value": None if score is None else value_to_float()(score.value),
        "answer": None if score is None else score.answer,
        "stop_reason": sample.output.stop_reason if sample.output.choices else None,
        "error": sample.error.message if sample.error else None,
    }


if __name__ == "__main__":
    sys.exit(main())
