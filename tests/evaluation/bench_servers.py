"""A server as `jetspecpp bench` sees it over HTTP, small enough for a test: text, metrics and faults are as told."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

METRICS = """\
# TYPE jetspec_rounds_total counter
jetspec_rounds_total{{outcome="hit"}} {hit}
jetspec_rounds_total{{outcome="late_hit"}} 0
jetspec_rounds_total{{outcome="miss"}} {miss}
jetspec_rounds_total{{outcome="first"}} {requests}
jetspec_rounds_total{{outcome="autoregressive"}} {alone}
# TYPE jetspec_verified_tokens_total counter
jetspec_verified_tokens_total{{outcome="hit"}} {hit_tokens}
jetspec_verified_tokens_total{{outcome="prefill"}} {requests}
jetspec_verified_tokens_total{{outcome="first"}} {requests}
jetspec_verified_tokens_total{{outcome="miss"}} {miss}
jetspec_verified_tokens_total{{outcome="autoregressive"}} {alone}
# TYPE jetspec_exposed_draft_latency_seconds histogram
jetspec_exposed_draft_latency_seconds_bucket{{outcome="hit",le="+Inf"}} {hit}
jetspec_exposed_draft_latency_seconds_count{{outcome="hit"}} {hit}
jetspec_exposed_draft_latency_seconds_sum{{outcome="hit"}} {hit_exposed}
jetspec_exposed_draft_latency_seconds_bucket{{outcome="miss",le="+Inf"}} {miss}
jetspec_exposed_draft_latency_seconds_count{{outcome="miss"}} {miss}
jetspec_exposed_draft_latency_seconds_sum{{outcome="miss"}} {miss_exposed}
# TYPE jetspec_verify_seconds histogram
jetspec_verify_seconds_bucket{{le="+Inf"}} {rounds}
jetspec_verify_seconds_count {rounds}
jetspec_verify_seconds_sum {verify}
# TYPE jetspec_spec_decode_num_drafts_total counter
jetspec_spec_decode_num_drafts_total {blocks}
# TYPE jetspec_spec_decode_num_accepted_tokens_per_pos_total counter
jetspec_spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first_slot}
jetspec_spec_decode_num_accepted_tokens_per_pos_total{{position="10"}} 0
jetspec_spec_decode_num_accepted_tokens_per_pos_total{{position="2"}} {second_slot}
# TYPE jetspec_draft_phase_seconds_total counter
jetspec_draft_phase_seconds_total{{phase="foresight"}} {foresight}
jetspec_draft_phase_seconds_total{{phase="draft"}} 0
# TYPE jetspec_drafter_up gauge
jetspec_drafter_up {drafter_up}
"""


def exposition(num_requests: int, *, is_plain: bool = False, drafter_up: int = 1) -> str:
    """Metrics after so many requests, each of 1 first round and 8 hits of 3 tokens and 2 misses of 1; plain: 20 steps.

    Verification takes 30 ms, a hit exposes 1 ms and a miss 10 ms; foresight takes 13 ms a round.
    """
    n = 0 if is_plain else num_requests
    alone = 20 * num_requests if is_plain else 0
    return METRICS.format(
        hit=8 * n,
        miss=2 * n,
        requests=n,
        alone=alone,
        hit_tokens=24 * n,
        hit_exposed=0.008 * n,
        miss_exposed=0.02 * n,
        rounds=11 * n + alone,
        verify=0.03 * (11 * n + alone),
        blocks=11 * n,
        first_slot=9 * n,
        second_slot=4 * n,
        foresight=0.143 * n,
        drafter_up=drafter_up,
    )


@dataclass
class FakeServer:
    """What the server says: `text` after every prompt, one token a piece; `fails_after` so many requests."""

    text: tuple[int, ...] = tuple(range(100, 120))
    is_plain: bool = False
    fails_after: int | None = None
    breaks_off: bool = False
    reports_error: bool = False
    num_requests: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    lock: Lock = field(default_factory=Lock)

    def metrics(self) -> str:
        return exposition(self.num_requests, is_plain=self.is_plain)

    def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream; the end of the text is a stop token that only usage counts."""
        tokens = self.text[: body["max_tokens"]]
        ends = len(self.text) < body["max_tokens"]
        pieces = [{"choices": [{"text": "x", "token_ids": [token]}]} for token in tokens]
        closing = {"choices": [{"text": "", "finish_reason": "stop" if ends else "length"}], "usage": None}
        usage = {"choices": [], "usage": {"completion_tokens": len(tokens) + ends}}
        return [*pieces, closing, usage]


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """The fake on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            return None

        def reply(self, content: str, status: int = 200, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            self.reply(fake.metrics() if self.path == "/metrics" else "{}", kind="text/plain")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                text = body["messages"][0]["content"]
                self.reply(json.dumps({"tokens": [ord(letter) for letter in text]}))
                return
            with fake.lock:
                fake.bodies.append(body)
                fake.num_requests += 1
            if fake.fails_after is not None and fake.num_requests > fake.fails_after:
                self.reply(json.dumps({"error": {"message": "broken"}}), status=500)
                return
            events = fake.events(body)
            if fake.reports_error:
                events = [*events[:2], {"error": {"message": "the engine is lost"}}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events[: 3 if fake.breaks_off else None]]
            self.reply("".join(lines) + ("" if fake.breaks_off else "data: [DONE]\n\n"), kind="text/event-stream")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
