"""The key that guards the server: every path but /health, not only those that vLLM's own --api-key looks at.

vLLM's option leaves /invocations, /tokenize, /metrics, /docs and others open to every user of the node. RequireKey
runs inside vLLM's API process, as its outermost ASGI middleware.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from wherry.files import write_atomic

KEY_FILE = "WHERRY_API_KEY_FILE"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

REFUSAL = json.dumps(
    {
        "error": {
            "message": "this server needs its key: send the header 'Authorization: Bearer KEY'",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
).encode()


def make_key(path: Path) -> str:
    """A new key in a file that only its owner can read."""
    key = secrets.token_urlsafe(32)
    write_atomic(path, key + "\n", mode=0o600)
    return key


class RequireKey:
    """ASGI middleware: 401 without the key in the file that WHERRY_API_KEY_FILE names.

    Raises RuntimeError when made without a usable key file: a server that cannot check keys must not start.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.expected = b"Bearer " + _read_key()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "key required"})
        else:
            await _refuse(send)

    def _may_pass(self, scope: Message) -> bool:
        if scope["type"] == "http" and scope["path"] == "/health":
            return True
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        # Two headers are ambiguous: a proxy in between may have looked at the other one.
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(REFUSAL)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})


def _read_key() -> bytes:
    path = os.environ.get(KEY_FILE)
    if not path:
        raise RuntimeError(f"{KEY_FILE} is not set: the server would be open to everyone on this machine")
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise RuntimeError(f"{KEY_FILE}={path} cannot be read: {error.strerror}") from error
    if not key:
        raise RuntimeError(f"{KEY_FILE}={path} is empty")
    return key
