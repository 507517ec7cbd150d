"""RequireKey: nothing but /health without the key, whatever the path is called."""

import asyncio
import json
import stat

import pytest

from wherry.serve.auth import RequireKey, make_key

OPEN_IN_VLLM = (
    "/v1/models /v1/completions /v1/chat/completions /invocations /tokenize /detokenize /inference/v1/generate "
    "/metrics /load /version /docs "
    "/openapi.json /ping / /health/ //health /Health /health/x /v1/../health /healthz /x/health"
).split()


@pytest.fixture
def key(tmp_path, monkeypatch):
    path = tmp_path / "api_key"
    monkeypatch.setenv("WHERRY_API_KEY_FILE", str(path))
    return make_key(path)


def ask(path, headers=(), kind="http", method="GET"):
    """(what the app behind was given or None, messages sent)."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers)}
    asyncio.run(RequireKey(app)(scope, None, send))
    return (reached[0] if reached else None), sent


def bearer(key):
    return [(b"authorization", f"Bearer {key}".encode())]


@pytest.mark.parametrize("path", OPEN_IN_VLLM)
def test_every_path_needs_the_key(key, path):
    reached, sent = ask(path)
    assert reached is None
    assert [message.get("status") for message in sent] == [401, None]
    error = json.loads(sent[1]["body"])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert key not in str(sent)
    assert ask(path, bearer(key))[0]["path"] == path


@pytest.mark.parametrize(
    "wrong",
    [
        lambda key: bearer(key + "x"),
        lambda key: bearer(key[:-1]),
        lambda key: bearer(""),
        lambda key: bearer("é"),
        lambda key: [(b"authorization", key.encode())],
        lambda key: [(b"authorization", f"bearer {key}".encode())],
        lambda key: [(b"authorization", f"Basic {key}".encode())],
        lambda key: [(b"x-api-key", key.encode())],
        lambda key: bearer(key) + bearer("other"),
        lambda key: bearer("other") + bearer(key),
    ],
)
def test_anything_but_exactly_the_key_is_refused(key, wrong):
    assert ask("/v1/models", wrong(key))[0] is None


def test_options_and_post_are_no_way_round(key):
    assert ask("/invocations", method="OPTIONS")[0] is None
    assert ask("/invocations", method="POST")[0] is None


def test_health_is_open_over_http_only(key):
    assert ask("/health")[0] is not None
    reached, sent = ask("/health", kind="websocket")
    assert (reached, sent[0]["type"], sent[0]["code"]) == (None, "websocket.close", 1008)


def test_websockets_pass_with_the_key_and_lifespan_always(key):
    assert ask("/v1/realtime", bearer(key), "websocket")[0] is not None
    assert ask("", kind="lifespan")[0] is not None


def test_the_key_file_is_the_owner_s_alone_and_new_every_time(tmp_path):
    path = tmp_path / "serve" / "api_key"
    first, second = make_key(path), make_key(path)
    assert first != second
    assert path.read_text() == second + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(second) >= 43  # 256 bits


def test_without_a_key_no_server_comes_up(tmp_path, monkeypatch):
    monkeypatch.delenv("WHERRY_API_KEY_FILE", raising=False)
    with pytest.raises(RuntimeError, match="WHERRY_API_KEY_FILE is not set"):
        RequireKey(None)
    path = tmp_path / "key"
    monkeypatch.setenv("WHERRY_API_KEY_FILE", str(path))
    with pytest.raises(RuntimeError, match=r"cannot be read: No such file"):
        RequireKey(None)
    path.write_text("\n")
    with pytest.raises(RuntimeError, match="is empty"):
        RequireKey(None)
