"""locust: users for half a minute, of whom a third leaves early; afterwards nothing runs."""

import csv
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.servers import ROOT, Server

DURATION_S = int(os.environ.get("JETSPEC_LOCUST_S", "30"))
NUM_USERS = 6


def test_users_of_whom_a_third_leaves(server: Server, tmp_path: Path) -> None:
    server.wait_for_rest()
    before = server.samples()["jetspec_client_disconnects_total"]
    command = [sys.executable, "-m", "locust", "--locustfile", str(ROOT / "tests/clients/locustfile.py")]
    command += ["--headless", "--users", str(NUM_USERS), "--spawn-rate", str(NUM_USERS), "--host", server.address]
    command += ["--run-time", f"{DURATION_S}s", "--stop-timeout", "60", "--csv", str(tmp_path / "locust")]
    done = subprocess.run([*command, "--only-summary"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "locust_stats.csv").open(newline="") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    assert {"/v1/completions", "stream", "leaves"} <= set(rows)
    assert int(rows["Aggregated"]["Failure Count"]) == 0
    server.wait_for_rest()
    assert server.samples()["jetspec_client_disconnects_total"] > before
    assert server.process.poll() is None
