"""A stand-in for the W&B server on loopback: answers its client and keeps what it sends."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

KEY = "0123456789abcdef0123456789abcdef01234567"
ENTITY = "someone"


@dataclass
class SentRun:
    """What the client has sent about one run."""

    about: dict[str, Any] = field(default_factory=dict)  # the variables of its first mutation
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        values = json.loads(self.about["config"]).items()
        return {key: node["value"] for key, node in values if key != "_wandb"}

    def stream(self, body: dict[str, Any]) -> None:
        for name, part in body.get("files", {}).items():
            rows = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                self.history[part["offset"] :] = rows
            if name == "wandb-summary.json":
                self.summary = rows[-1]
        self.exit_code = body.get("exitcode", self.exit_code)


class WandbServer(ThreadingHTTPServer):
    """Use it as a context manager; `silent.set()` leaves further requests unanswered."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.environment = {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY}
        self.projects = {"adashift"}
        self.operations: list[tuple[str, dict[str, Any]]] = []
        self.runs: dict[str, SentRun] = defaultdict(SentRun)
        self.uploads: dict[str, bytes] = {}
        self.status, self.silent, self.closed = 200, Event(), Event()

    def __enter__(self) -> WandbServer:
        Thread(target=self.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *request: object) -> None:
        """A client that gives up is no error of this server."""

    def only_run(self) -> SentRun:
        (run,) = self.runs.values()
        return run

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/graphql":
            request = json.loads(body)
            return {"data": self.resolve(request["query"], request.get("variables") or {})}
        if path.endswith("/file_stream"):
            self.runs[path.split("/")[-2]].stream(json.loads(body))
        elif path.startswith("/upload/"):
            self.uploads[path.removeprefix("/upload/")] = body
        return {}

    def resolve(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        name = next((n for n in RESOLVERS if n in query), "")
        self.operations.append((name, given))
        return RESOLVERS[name](self, given) if name else {}


def upsert_bucket(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    run = server.runs[given["name"]]
    run.about = run.about or given
    project = {"id": "project", "name": given["project"], "entity": {"id": "e", "name": ENTITY}}
    bucket = {"id": "run", "name": given["name"], "project": project, "historyLineCount": 0}
    return {"upsertBucket": {"bucket": bucket, "inserted": True}}


def create_run_files(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    files = [{"name": n, "uploadUrl": f"{server.address}/upload/{n}"} for n in given["files"]]
    return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}


def upsert_view(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    return {"upsertView": {"view": {**given, "id": "Vmlldzox"}, "inserted": True}}


def project_id(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    known = given["projectName"] in server.projects
    return {"project": {"id": "project", "internalId": "UHJvamVjdDox"} if known else None}


def list_projects(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    same = {"entityName": ENTITY, "createdAt": "", "isBenchmark": False, "user": None}
    edges = [{"node": {"id": name, "name": name, **same}} for name in server.projects]
    return {"models": {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": edges}}


def viewer(server: WandbServer, given: dict[str, Any]) -> dict[str, Any]:
    user = {"id": "user", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "admin": False}
    return {"viewer": {**user, "flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}}}


RESOLVERS = {
    "upsertBucket": upsert_bucket,
    "createRunFiles": create_run_files,
    "upsertView": upsert_view,
    "ProjectInternalId": project_id,
    "GetProjects": list_projects,
    "viewer": viewer,
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.silent.is_set():
            self.server.closed.wait()
            return
        answer = json.dumps(self.server.answer(self.path, body)).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def log_message(self, *parts: object) -> None:
        """Print nothing."""
