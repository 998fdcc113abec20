"""schemathesis: requests made from /openapi.json. Every answer must be documented, and none a failure of the server."""

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.servers import scripted_server

TIME_S = int(os.environ.get("JETSPEC_SCHEMATHESIS_S", "60"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_no_request_made_from_the_schema_breaks_the_server(tmp_path: Path) -> None:
    """The workers are scripted: what is tried is how requests are read, not what models say."""
    with scripted_server(tmp_path / "tiny") as server:
        config = tmp_path / "schemathesis.toml"
        config.write_text("")
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
        command += [f"{server.address}/openapi.json", "--checks", CHECKS, "--max-time", str(TIME_S), "--seed", "1"]
        command += ["--request-timeout", "30", "--no-color", "--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        server.wait_for_rest()
        assert not any("Traceback" in line for line in server.log)
