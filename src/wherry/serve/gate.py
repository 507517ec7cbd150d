"""What a server must show before it counts as ready, and while it counts as alive.

Each question alone has been seen to lie: /health is 200 while the engine is dead, a port answers for someone else's
server, the model list is there before a token can be made. So the gate asks all of them, every one with a timeout.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

QUICK = 5.0
"""Seconds for an answer to /health and /v1/models."""

EVERY = 0.2
"""Seconds between two rounds of questions before it is ready: one refused connection on loopback costs nothing."""

SLOW = 60.0
"""Seconds for one token: the first may compile kernels, and a busy server has a queue."""


class NotYet(Exception):
    """A question that was not answered as a ready server does; the text says which, and how."""


class Questions:
    """What one can ask a server on this machine. Every method raises NotYet."""

    def __init__(self, port: int, key: str, model: str, *, slow: float = SLOW) -> None:
        self.port, self.key, self.model, self.slow = port, key, model, slow
        self.asking = "nothing"  # the path whose answer is outstanding, for messages

    def health(self) -> None:
        self._ask("GET", "/health", QUICK)

    def max_model_len(self) -> int | None:
        """The context length, in tokens, of the expected model, which must be listed."""
        answer = self._json("GET", "/v1/models", QUICK)
        listed = {entry.get("id"): entry for entry in _entries(answer, "data", "/v1/models")}
        if self.model not in listed:
            names = ", ".join(str(name) for name in listed) or "nothing"
            raise NotYet(f"/v1/models lists {names}, not {self.model}")
        return listed[self.model].get("max_model_len")

    def token(self) -> None:
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        answer = self._json("POST", "/v1/completions", self.slow, body)
        if not _entries(answer, "choices", "/v1/completions"):
            raise NotYet("/v1/completions came back without a choice")

    def ready(self) -> int | None:
        """All three, cheapest first; returns the context length in tokens."""
        self.health()
        length = self.max_model_len()
        self.token()
        return length

    def _json(self, method: str, path: str, timeout: float, body: Any = None) -> Any:
        try:
            return json.loads(self._ask(method, path, timeout, body))
        except ValueError:
            raise NotYet(f"{path} did not answer in JSON") from None

    def _ask(self, method: str, path: str, timeout: float, body: Any = None) -> bytes:
        self.asking = path
        # http.client rather than urllib: a site's http_proxy must not see requests to loopback.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise NotYet(f"{path} gave no answer in {timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise NotYet(f"{path}: {getattr(error, 'strerror', None) or type(error).__name__}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise NotYet(f"{path} answered {response.status}")
        return content


def _entries(answer: Any, name: str, path: str) -> list[dict[str, Any]]:
    entries = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise NotYet(f"{path} did not answer in OpenAI's form")
    return entries


def in_background(question: Callable[[], T]) -> Future[T]:
    """Ask without waiting, so that the death of the server is seen while an answer is outstanding."""
    future: Future[T] = Future()

    def ask() -> None:
        try:
            future.set_result(question())
        except Exception as error:
            future.set_exception(error)

    # A daemon: a question to a server that hangs must not keep this process from ending.
    threading.Thread(target=ask, daemon=True).start()
    return future


class Readiness:
    """Asks again and again until all answers are right; `missing` says what was wrong last, `length` what was found."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        self.answered = False
        self.length: int | None = None
        self._missing = "nothing was asked yet"
        self._next = time.monotonic()
        self._asked: Future[int | None] | None = None

    @property
    def missing(self) -> str:
        waiting = self._asked is not None and time.monotonic() - self._next > 0.5
        return f"{self.questions.asking} has not answered yet" if waiting else self._missing

    def look(self) -> bool:
        """Whether everything was answered rightly. Never blocks."""
        now = time.monotonic()
        if self._asked is None and now >= self._next:
            self._asked = in_background(self.questions.ready)
        elif self._asked is not None and self._asked.done():
            self._take(self._asked)
            self._asked = None
            self._next = now + EVERY
        return self.answered

    def _take(self, asked: Future[int | None]) -> None:
        try:
            self.length = asked.result()
            self.answered = True
        except NotYet as why:
            self._missing = str(why)


class Watch:
    """After ready: is it still answering? A busy server is not a dead one: what counts at last is a token."""

    def __init__(self, questions: Questions, *, every: float = 5.0, failures: int = 3) -> None:
        self.questions, self.every, self.failures = questions, every, failures
        self.failed = 0
        self._next = time.monotonic() + every
        self._asked: Future[None] | None = None

    def look(self) -> str | None:
        """Why the server counts as dead, or None. Never blocks."""
        now = time.monotonic()
        if self._asked is None:
            if now >= self._next:
                last_resort = self.failed >= self.failures
                self._asked = in_background(self.questions.token if last_resort else self.questions.health)
                self._next = now + self.every
            return None
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        return self._judge(asked)

    def _judge(self, asked: Future[None]) -> str | None:
        try:
            asked.result()
            self.failed = 0
        except NotYet as why:
            self.failed += 1
            if self.failed > self.failures:
                return f"alive but not answering: {why}"
            if self.failed == self.failures:
                self._next = time.monotonic()  # the token is asked for at once
        return None
