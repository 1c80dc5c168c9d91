"""A stand-in for the Hugging Face hub on localhost: as much of its interface as a download uses."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories (files by name) and what was asked for."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    token: str = ""  # opens the gated ones
    cut_at: dict[str, int] = field(default_factory=dict)  # file: the bytes after which its first transfer breaks
    broken: set[str] = field(default_factory=set)  # files that cannot be had
    fetched: list[str] = field(default_factory=list)  # "FILE" or "FILE FROM-BYTE" of each transfer
    endpoint: str = ""


@contextmanager
def hub_stand_in(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        parts = PurePosixPath(unquote(urlsplit(self.path).path)).parts[1:]
        if parts[:2] == ("api", "models"):
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.hub.repositories:
            self.refuse(401, "RepoNotFound", "Repository not found")
        elif "api" not in parts and self.closed(repo):
            self.refuse(403, "GatedRepo", "Access to this repository is restricted")
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        elif "api" in parts:
            self.send_json(self.listing(repo, tree=bool(rest) and rest[0] == "tree"), body)
        else:
            self.send_file(repo, "/".join(rest[2:]), body)

    def closed(self, repo: str) -> bool:
        return repo in self.hub.gated and self.headers.get("authorization") != f"Bearer {self.hub.token}"

    def listing(self, repo: str, tree: bool) -> object:
        files = self.hub.repositories[repo]
        if tree:
            return [
                {"type": "file", "path": name, "size": len(files[name]), "oid": _etag(files[name])} for name in files
            ]
        return {
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "gated": repo in self.hub.gated,
            "siblings": [{"rfilename": name} for name in files],
        }

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, value: object, body: bool) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content if body else b"")

    def send_file(self, repo: str, name: str, body: bool) -> None:
        content = self.hub.repositories[repo].get(name)
        if content is None or name in self.hub.broken:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.hub.fetched.append(f"{name} {start}" if start else name)
            self.wfile.write(content[start : self.hub.cut_at.pop(name, len(content))])
            self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
