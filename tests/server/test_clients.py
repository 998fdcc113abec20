"""Clients that behave badly, over real sockets: they leave, they do not read, they send what is no HTTP."""

import asyncio
import json
import os
from pathlib import Path

from tests.server.server_process import LIMIT_S, ProcessFactory, ServerProcess

NUM_CLIENTS = 400
NUM_AT_ONCE = 100


def request_bytes(body: object, path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + content


async def is_at_rest(server: ServerProcess) -> bool:
    """Whether nothing runs, waits, or holds memory, as the metrics tell it."""
    samples = await server.samples()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    return not any(samples[f"jetspec_{name}"] for name in gauges)


async def rest(server: ServerProcess) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await is_at_rest(server):
            await asyncio.sleep(0.05)


async def test_clients_that_leave_free_their_sequences(start: ProcessFactory) -> None:
    """S20: 50 clients leave in the middle, half of them streaming. An answer would take 400 rounds of 50 ms; none is
    ever completed."""
    async with start("--max-num-seqs", "50", FAKE_ROUND_S="0.05") as server:
        await server.wait_until_ready()
        body = {"prompt": "hi", "max_tokens": 400, "speculative": False}
        bodies = [{**body, "stream": number % 2 == 0} for number in range(50)]
        requests = [asyncio.create_task(server.client.post("/v1/completions", json=body)) for body in bodies]
        await server.wait_for_metric("jetspec_num_requests_running 50.0")
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await server.wait_for_metric('jetspec_requests_total{finished_reason="abort"} 50.0')
        await rest(server)
        before = await server.samples()
        assert before["jetspec_client_disconnects_total"] == 50
        assert before["jetspec_requests_total[finished_reason=length]"] == 0
        assert before["jetspec_generation_tokens_total"] < 50 * 400
        await server.text(max_tokens=1)
        after = await server.samples()
        assert after["jetspec_generation_tokens_total"] == before["jetspec_generation_tokens_total"] + 1


async def one_client(port: int, number: int) -> str:
    """The first line of the answer; every third client leaves, early or late, and says so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes({"prompt": "hi", "max_tokens": 40, "stream": number % 2 == 0, "temperature": 0}))
        if number % 10 < 3:
            await reader.read(number % 3 * 100)
            return "left"
        answer = await reader.read()
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b'"usage"' in answer or b"429" in answer, answer
        return answer.partition(b"\r\n")[0].decode()
    finally:
        writer.transport.abort()


async def test_hundreds_of_clients_of_which_a_third_leaves(start: ProcessFactory) -> None:
    """F10: afterwards nothing runs, and neither descriptors nor memory have grown."""
    async with start("--max-num-seqs", "64", FAKE_TEXT="abcdefgh" * 10) as server:
        await server.wait_until_ready()
        limit = asyncio.Semaphore(NUM_AT_ONCE)

        async def limited(number: int) -> str:
            async with limit, asyncio.timeout(LIMIT_S):
                return await one_client(server.port, number)

        num_warm = NUM_CLIENTS // 4
        answers = await asyncio.gather(*(limited(number) for number in range(num_warm)))
        await rest(server)
        descriptors, memory_bytes = resources(server.process.pid)
        answers += await asyncio.gather(*(limited(number) for number in range(num_warm, NUM_CLIENTS)))
        await rest(server)
        assert {answer for answer in answers if answer != "left"} == {"HTTP/1.1 200 OK"}
        after = resources(server.process.pid)
        assert after[0] <= descriptors + 2
        assert after[1] < memory_bytes + 16 * 2**20

        samples = await server.samples()
        endings = {name: samples[f"jetspec_requests_total[finished_reason={name}]"] for name in ("stop", "length")}
        num_stayed = sum(answer != "left" for answer in answers)
        assert sum(endings.values()) >= num_stayed
        assert samples["jetspec_requests_total[finished_reason=error]"] == 0
        assert samples["jetspec_requests_total[finished_reason=abort]"] <= NUM_CLIENTS - num_stayed


def resources(pid: int) -> tuple[int, int]:
    """Open descriptors and resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


async def test_client_that_does_not_read_delays_nobody(start: ProcessFactory) -> None:
    """F11: its connection fills up, the others get their answers; when it leaves, its sequence is free."""
    async with start(FAKE_ROUND_S="0.002") as server:
        await server.wait_until_ready()
        body = {"prompt": "hi", "max_tokens": 400, "stream": True, "ignore_eos": True}
        idle = [await asyncio.open_connection("127.0.0.1", server.port, limit=1024) for _ in range(3)]
        for _, writer in idle:
            writer.write(request_bytes(body))
        for _ in range(5):
            assert len(await server.text(max_tokens=30)) == 30
        for _, writer in idle:
            writer.transport.abort()
        await rest(server)


JSON = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MALFORMED = [
    (b"GARBAGE\r\n\r\n", b"400"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),  # TLS to a plain port
    (b"GET /health HTTP/1.1\r\n\r\n", b"400"),  # no Host
    (b"GET /health HTTP/1.1\r\nHost: a\r\nx: a\x00b\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nx: " + b"a" * 200_000, b"400"),  # a header without end
    (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
    (b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"x: 1\r\n" * 5000 + b"\r\n", b"431"),
    (JSON + b"Content-Length: -1\r\n\r\n{}", b"400"),
    (JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"400"),
    (JSON + b"Content-Length: 99999999999999999999999\r\n\r\n{}", b"400"),
    (JSON + b"Content-Length: 9999999999999\r\n\r\n{}", b"413"),
    (JSON + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n", b"413"),
    (JSON + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n{}\r\n0\r\n\r\n", b"400"),
    (JSON + b"Transfer-Encoding: nonsense\r\n\r\n{}", b"400"),
    (JSON + b'Content-Length: 10\r\n\r\n{"prompt":', b"400"),  # JSON cut short
    (JSON + b'Content-Length: 14\r\n\r\n{"prompt":"\xff"}', b"400"),
    (JSON + b'Content-Length: 14\r\n\r\n{"prompt":"\x00"}', b"400"),
]


async def test_what_is_no_http_gets_an_error_and_harms_nobody(start: ProcessFactory) -> None:
    """F14."""
    async with start() as server:
        await server.wait_until_ready()
        for data, status in MALFORMED:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(200), LIMIT_S)
            assert answer.startswith(b"HTTP/1.1 " + status), (data[:80], answer)
            writer.transport.abort()
        for data in (JSON + b'Content-Length: 100\r\n\r\n{"prompt":', b"GET /hea", b""):  # and then gone
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.write_eof()
            writer.transport.abort()
        assert await server.text(max_tokens=5) == "abcde"
        await rest(server)
        assert not server.logged("Traceback")


async def test_upload_that_is_too_large_is_told_so(start: ProcessFactory) -> None:
    """Not cut off while it is sending; and who announces a body and sends none does not keep the connection."""
    async with start() as server:
        for _ in range(10):
            answer = await server.client.post("/v1/completions", content=b"x" * 30_000_000)
            assert answer.status_code == 413, answer.text
            assert answer.headers["Connection"] == "close"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(JSON + b"Content-Length: 99999999\r\n\r\n{")
        assert b"request_too_large" in await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.transport.abort()
