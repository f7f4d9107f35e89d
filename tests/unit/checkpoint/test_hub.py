"""Hub ids, against a small server that speaks as much of the hub's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = """
import sys
from porter import checkpoint, errors, hub
if len(sys.argv) > 2:
    import shutil
    free = shutil.disk_usage("/")._replace(free=int(sys.argv[2]))
    shutil.disk_usage = lambda path: free
try:
    found = checkpoint.resolve(sys.argv[1], progress=lambda text, part: print(text, file=sys.stderr))
    print(found.model_dump_json(exclude={"config"}))
except errors.PorterError as fault:
    print(fault)
    sys.exit(fault.exit_code)
"""


class Hub(BaseHTTPRequestHandler):
    """Serves `files` as the repository owner/tiny; every other repository does not exist."""

    files: dict[str, bytes] = {}

    def log_message(self, *given: Any) -> None:
        """Nothing: stderr is the test's."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        headers = {"X-Repo-Commit": COMMIT}
        body = b""
        if path.startswith("api/models/owner/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            body, status = json.dumps(entries).encode(), 200
        elif path.startswith("api/models/owner/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            body, status = json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode(), 200
        elif path.startswith("owner/tiny/resolve/") and path.split("/", 4)[4] in self.files:
            body, status = self.files[path.split("/", 4)[4]], 200
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            headers["X-Error-Code"], status = "RepoNotFound", 404
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def endpoint(whole: Any) -> Iterator[str]:
    """The server's address."""
    Hub.files = {path.name: path.read_bytes() for path in whole.path.iterdir()}
    Hub.files |= {
        "consolidated.safetensors": b"other weights",
        "original/params.json": b"{}",
        "model.py": b"evil",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def resolve(model: str, home: Path, cache: Path, *more: str, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process that resolves `model`."""
    own = {"HF_HOME": str(home), "XDG_CACHE_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, model, *more],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_hub_id_is_fetched_once(endpoint: str, whole: Any, tmp_path: Path) -> None:
    code, out, err = resolve("owner/tiny", tmp_path, tmp_path, HF_ENDPOINT=endpoint)
    assert code == 0, out + err
    found = json.loads(out)
    assert (found["slug"], found["source"], found["revision"]) == ("tiny", "hub owner/tiny", COMMIT)
    assert found["weights"] == "real" and found["parameters"] == whole.look().parameters
    fetched = {path.name for path in Path(found["path"]).iterdir()}
    assert fetched == {path.name for path in whole.path.iterdir()}  # no code, no second form of the weights
    assert "fetching owner/tiny" in err
    # And from then on without the hub.
    code, out, err = resolve("owner/tiny", tmp_path, tmp_path, HF_HUB_OFFLINE="1")
    assert code == 0 and json.loads(out) == found and "fetching" not in err, out + err


def test_no_such_repository(endpoint: str, tmp_path: Path) -> None:
    code, out, _ = resolve("owner/other", tmp_path, tmp_path, HF_ENDPOINT=endpoint)
    assert code == 2 and out.startswith("owner/other: the hub has no such model, and no such folder is here")


def test_the_disk_is_asked_before_fetching(endpoint: str, tmp_path: Path) -> None:
    code, out, _ = resolve("owner/tiny", tmp_path, tmp_path, "1000", HF_ENDPOINT=endpoint)
    assert code == 6 and "too little disk: owner/tiny takes" in out
    assert not list(tmp_path.rglob("model.safetensors"))


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_that_cannot_be_reached(environment: dict[str, str], tmp_path: Path) -> None:
    code, out, _ = resolve("owner/tiny", tmp_path, tmp_path, **environment)
    assert code == 2 and out.count("\n") == 1
    assert out.startswith("owner/tiny: no such folder is here, and the hub cannot be reached: ")
