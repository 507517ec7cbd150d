"""A stand-in for the Hugging Face hub on loopback: there is no network in tests. Serves folders as repositories.

Speaks what huggingface_hub and datasets ask for: repository information, file trees, and files by commit.
"""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: dict[str, Path], gated: tuple[str, ...] = ()):
    """repositories: "models/org/name" or "datasets/org/name" → folder. Yields (endpoint, list of requested paths)."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer()

        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            self.answer()

        def answer(self, body=True):
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(path)
            if path.startswith("api/"):
                self.api(path.removeprefix("api/"))
            else:
                self.file(path, body)

        def api(self, path):
            kind, org, name, *rest = [*path.split("/"), "", ""]
            repository = f"{kind}/{org}/{name}"
            if repository not in repositories:
                return self.error(404, "RepoNotFound", "Repository not found")
            if repository in gated:
                return self.error(403, "GatedRepo", "Access to this repository is restricted")
            rest = [part for part in rest if part]
            if len(rest) > 1 and rest[1] not in ("main", "v1", COMMIT):
                return self.error(404, "RevisionNotFound", "Invalid rev id")
            folder = repositories[repository]
            files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
            if rest[:1] in (["tree"], ["paths-info"]):
                found = [
                    {"type": "file", "path": f, "oid": etag(folder / f), "size": (folder / f).stat().st_size}
                    for f in files
                ]
                return self.json(found)
            self.json({"id": f"{org}/{name}", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})

        def file(self, path, body):
            kind, rest = (
                ("datasets", path.removeprefix("datasets/")) if path.startswith("datasets/") else ("models", path)
            )
            org, name, _, _, *file = rest.split("/")
            found = repositories.get(f"{kind}/{org}/{name}", Path("/nonexistent")).joinpath(*file)
            if not found.is_file():
                return self.error(404, "EntryNotFound", "Entry not found")
            content = found.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag(found)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def json(self, value):
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def error(self, status, code, message):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
