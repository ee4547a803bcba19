"""Lists known vulnerabilities of the locked packages and fails if there are any: audit.py PIP-AUDIT

It passes with a message if the database cannot be reached or knows none of the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-cluster.lock")
OPTIONS = ["--require-hashes", "--disable-pip", "--progress-spinner=off", "--timeout=5", "-f=json"]
PATIENCE = 120  # seconds


def audit(tool: str, lock: Path) -> list[str]:
    """Return one line per vulnerability; raise OSError if the database gave no answer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [tool, "-r", str(lock), *OPTIONS, "-o", str(out)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if not out.exists():
            raise OSError((answer.stderr.strip().splitlines() or ["no error message"])[-1])
        packages = json.loads(out.read_text())["dependencies"]
    known = [package for package in packages if "skip_reason" not in package]
    if not known:
        raise OSError(f"none of {len(packages)} packages could be looked up")
    return [f"{p['name']} {p['version']}: {v['id']}" for p in known for v in p["vulns"]]


def main(tool: str) -> int:
    found = []
    for name in LOCKS:
        try:
            lines = audit(tool, Path(__file__).parent.parent / name)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"{name}: the audit could not run: {error}")
            continue
        print(f"{name}: {'; '.join(lines) or 'no known vulnerability'}")
        found += lines
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
