"""The demo's evaluation: held-out cargo notes, right only if the whole line is right."""

import re
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate

LINE = re.compile(r"qty=\d+ unit=\w+ goods=\w+ port=\w+ day=\w+")


@task
def cargo() -> Task:
    data = json_dataset(str(Path(__file__).parent / "heldout.jsonl"))
    return Task(dataset=data, solver=generate(), scorer=same_line())


@scorer(metrics=[accuracy()])
def same_line():
    async def score(state: TaskState, target: Target) -> Score:
        # An answer without the line in it has no `answer`: it counts as wrong, and as unparsed.
        found = LINE.search(state.output.completion)
        answer = found.group() if found else None
        right = answer == target.text and state.output.completion.strip() == answer
        return Score(value=CORRECT if right else INCORRECT, answer=answer)

    return score
