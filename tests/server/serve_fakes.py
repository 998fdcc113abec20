"""`jetspecpp serve` with fake workers: the server process of the tests in test_serve.py."""

import os
import sys

from server.config import ArgumentParser, ConfigError, add_flags, from_arguments
from server.serve import configure_logging, run
from server.service import StartupError
from server.supervisor import WorkerCommands

COMMAND = (sys.executable, "-m", "tests.server.fake_worker")

if __name__ == "__main__":
    parser = ArgumentParser()
    add_flags(parser)
    config = from_arguments(vars(parser.parse_args()), os.environ)
    configure_logging(config.log_level)
    try:
        sys.exit(run(config, WorkerCommands((*COMMAND, "verifier"), (*COMMAND, "drafter"))))
    except (ConfigError, StartupError) as error:
        sys.exit(f"refused: {error}")
