"""Render an example with the chat template and find the characters that the model is to learn.

TRL builds an assistant mask only for templates with {% generation %} markers, which most published templates lack.
Here the mask comes from what the template itself renders: what an assistant turn adds behind the generation prompt
is learned, its end-of-turn token included. Works for any template that renders turns in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

from wherry.errors import WherryError
from wherry.prepare.rows import Completion, Conversation, Example

TEMPLATE_FIX = "correct the row, or give another template with data.chat_template"


@dataclass(frozen=True)
class Rendered:
    """text, the [begin, end) character ranges that are learned, and how many assistant turns could not be."""

    text: str
    learned: list[tuple[int, int]]
    skipped_turns: int = 0


def render(example: Example, tokenizer: Any) -> Rendered:
    """Raises WherryError (exit 2) naming the row where the template refuses, drops or cannot delimit a turn."""
    if isinstance(example, Completion):
        begin = len(example.prompt)
        return Rendered(example.prompt + example.completion, [(begin, begin + len(example.completion))])
    return _conversation(example, tokenizer)


def _conversation(example: Conversation, tokenizer: Any) -> Rendered:
    messages = example.messages

    def template(upto: int, generation: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages[:upto], tools=example.tools, tokenize=False, add_generation_prompt=generation
            )
        except jinja2.TemplateError as error:
            raise WherryError(f"the chat template refuses the row: {error}", example.where, TEMPLATE_FIX) from None

    whole = template(len(messages))
    for index, message in enumerate(messages):
        content = (message.get("content") or "").strip()
        if message["role"] not in ("assistant", "tool") and content not in whole:
            raise WherryError(
                f"the chat template drops the content of messages[{index}] (role {message['role']!r})",
                example.where,
                TEMPLATE_FIX,
            )
    learned: list[tuple[int, int]] = []
    skipped = 0
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= example.train_from]
    for index in turns:
        until = template(index + 1) if index + 1 < len(messages) else whole
        if not whole.startswith(until):
            skipped += 1  # the template rewrites earlier turns (it drops their reasoning, say)
            continue
        begin = _answer_begins(messages[index], until, template(index), template(index, generation=True))
        if begin is None:
            skipped += 1
            continue
        # What follows the end-of-turn token (often a newline) belongs to the next turn's header.
        learned.append((begin, len(until.rstrip())))
    if not learned:
        what = "the chat template does not render its answer in one piece" if turns else "it has no assistant turn"
        raise WherryError(f"nothing to learn in the row: {what}", example.where, TEMPLATE_FIX)
    return Rendered(whole, learned, skipped)


def _answer_begins(message: dict[str, Any], until: str, before: str, prompted: str) -> int | None:
    """Index of the answer's first character in until.

    Normally what the generation prompt ends at. A prompt that opens a thought (`<think>`) is no prefix of a finished
    turn: there the answer is looked for behind the turns before it.
    """
    if until.startswith(prompted):
        return len(prompted)
    content = (message.get("content") or "").strip()
    for text in (content, content.split("</think>")[-1].strip()):
        if text and until.startswith(before):
            found = until.find(text, len(before))
            if found >= 0:
                return found
    return None
