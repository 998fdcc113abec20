"""Contestants brought to life: servers and peer processes, started together and stopped together."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from evaluation.bench.client import Client, Generation
from evaluation.bench.contestants import BASELINE, Contestant, PeerKind
from evaluation.bench.counters import Counters
from evaluation.bench.errors import ContestantFailed, WrongInput
from evaluation.bench.measure import Runner
from evaluation.bench.peers import PeerMissing, PeerProcess, PeerSetup, check_library
from evaluation.bench.servers import COMMAND, ServerProcess

logger = logging.getLogger("jetspec.bench")


@dataclass(frozen=True)
class ServerRunner:
    """A method on its own server."""

    contestant: Contestant
    client: Client

    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> Generation:
        return self.client.generate(prompt_token_ids, max_tokens)

    def counters(self) -> Counters:
        return self.client.counters()


@dataclass(frozen=True)
class PeerRunner:
    """A peer; it has no counters of its own."""

    contestant: Contestant
    process: PeerProcess

    def generate(self, prompt_token_ids: list[int], max_tokens: int) -> Generation:
        return self.process.generate(prompt_token_ids, max_tokens, self.contestant.gamma)

    def counters(self) -> None:
        return None


@dataclass(frozen=True)
class Stage:
    """How contestants are started. `server_flags` go to every server; `peer_file` says what a peer loads."""

    server_flags: tuple[str, ...]
    peer_setup: PeerSetup
    peer_file: Callable[[PeerKind], Path]
    server_command: Sequence[str] = COMMAND

    @contextmanager
    def open(
        self, contestants: Sequence[Contestant], skipped: dict[str, str], running: Sequence[Runner] = ()
    ) -> Iterator[list[Runner]]:
        """Start everyone who is not `running` already, before anything is measured; stop those at the end.

        A contestant that cannot start is noted in `skipped`, unless it was asked for by name: then `WrongInput`.
        """
        with ExitStack() as stack:
            runners = [runner for runner in running if runner.contestant in contestants]
            already = [runner.contestant for runner in runners]
            peers: dict[str, PeerProcess] = {}
            for contestant in contestants:
                if contestant.name in skipped or contestant in already:
                    continue
                logger.info("starting %s", describe(contestant))
                try:
                    if contestant.peer is None:
                        runners.append(self._server(contestant, stack))
                    else:
                        runners.append(self._peer(contestant, contestant.peer, stack, peers))
                except (PeerMissing, WrongInput, ContestantFailed) as error:
                    if contestant.is_required:
                        raise WrongInput(f"{describe(contestant)}: {error}") from error
                    logger.warning("%s is left out: %s", describe(contestant), error)
                    skipped[contestant.name] = str(error)
            yield runners

    def _server(self, contestant: Contestant, stack: ExitStack) -> ServerRunner:
        server = ServerProcess([*self.server_flags, *contestant.serve_flags()], self.server_command)
        stack.enter_context(server)
        server.wait_until_ready(needs_drafter=contestant.method != BASELINE)
        return ServerRunner(contestant, server.client)

    def _peer(
        self, contestant: Contestant, kind: PeerKind, stack: ExitStack, peers: dict[str, PeerProcess]
    ) -> PeerRunner:
        """Contestants of one name share a process: they differ in the number of drafts only."""
        if contestant.name not in peers:
            check_library(contestant, self.peer_setup)
            process = PeerProcess(contestant, self.peer_setup, self.peer_file(kind))
            peers[contestant.name] = stack.enter_context(process)
        return PeerRunner(contestant, peers[contestant.name])


def describe(contestant: Contestant) -> str:
    """Its name, with the number of drafts where one was chosen."""
    return contestant.name if contestant.gamma is None else f"{contestant.name}, γ={contestant.gamma}"


def grouped(contestants: Sequence[Contestant], max_processes: int) -> list[list[Contestant]]:
    """Groups that fit into memory together, plain decoding in each of them: every speed-up needs it beside it."""
    baseline = [contestant for contestant in contestants if contestant.name == BASELINE]
    others = [contestant for contestant in contestants if contestant.name != BASELINE]
    size = max(1, max_processes - len(baseline))
    return [[*baseline, *others[start : start + size]] for start in range(0, max(1, len(others)), size)]
