"""Stands in for vLLM: as much of its API as the gate asks for, and every way to fail that was seen, by option.

The key is checked by Wherry's rule so that a gate that forgets it does not get through.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--port", type=int, required=True)
options.add_argument("--name", default="demo")
options.add_argument("--bind-after", type=float, default=0, help="seconds until the port answers at all")
options.add_argument("--good-after", type=float, default=0, help="seconds until /health is 200; before that it is 503")
options.add_argument("--say", action="append", default=[], help="a line for the log")
options.add_argument("--exit", type=int, help="end with this code instead of serving; -N: by signal N")
options.add_argument("--end-after", type=float, help="seconds until --end-with")
options.add_argument("--end-with", type=int, default=0, help="as --exit")
options.add_argument("--completion", choices=("good", "500", "hang", "empty", "html"), default="good")
options.add_argument("--health", choices=("good", "hang"), default="good")
options.add_argument("--sick-when", help="while this file exists, /health is 503")
options.add_argument("--dead-when", help="while this file exists, completions are 500")
options.add_argument("--flood", action="store_true", help="write much to the log")
options.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
options.add_argument("--engine", action="store_true", help="have a child that ignores SIGTERM, as vLLM has")
given = options.parse_args()
begun = time.monotonic()
key = Path(os.environ["WHERRY_API_KEY_FILE"]).read_text().strip()


def end(code: int) -> None:
    sys.stdout.flush()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            if given.health == "hang":
                time.sleep(1000)
            sick = given.sick_when and Path(given.sick_when).exists()
            return self.send(503 if sick or time.monotonic() - begun < given.good_after else 200, {})
        if self.headers["Authorization"] != f"Bearer {key}":
            return self.send(401, {})
        return self.send(200, {"data": [{"id": given.name, "max_model_len": 512}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {key}":
            return self.send(401, {})
        if given.completion == "hang":
            time.sleep(1000)
        if given.completion == "500" or (given.dead_when and Path(given.dead_when).exists()):
            return self.send(500, {})
        assert (body["model"], body["max_tokens"]) == (given.name, 1), body
        if given.completion == "html":
            return self.send(200, "<html>")
        return self.send(200, {"choices": [] if given.completion == "empty" else [{"text": "a"}]})

    def send(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


print("\n".join(given.say), flush=True)
if given.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if given.engine and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)
if given.flood:
    print("x" * 999 + "\n", end="", flush=True)
    for _ in range(20_000):  # 20 MB: no pipe holds that
        sys.stdout.write("y" * 999 + "\n")
    sys.stdout.flush()
if given.exit is not None:
    end(given.exit)
if given.end_after is not None:
    threading.Timer(given.end_after, lambda: end(given.end_with)).start()
time.sleep(given.bind_after)
ThreadingHTTPServer(("127.0.0.1", given.port), Answer).serve_forever()
