"""Who may call: API keys, pages of other origins, and the ids that requests carry."""

import asyncio
import logging
from pathlib import Path

import pytest

from server.config import ConfigError, ServeConfig
from server.keys import ApiKeys, load_keys
from tests.server.conftest import Stack, StackFactory

PATHS = ("/v1/models", "/v1/models/demo", "/version", "/tokenizer_info", "/docs", "/openapi.json", "/nothing")


async def test_open_server_needs_no_key(stack: Stack) -> None:
    assert (await stack.client.get("/v1/models")).status_code == 200


async def test_everything_but_probes_and_metrics_needs_a_key(make_stack: StackFactory) -> None:
    async with make_stack(api_key=("alpha", "beta")) as stack:
        for path in ("/health", "/ready", "/ping", "/metrics", "/health/"):
            assert (await stack.client.get(path)).status_code == 200, path
        for path in PATHS:
            response = await stack.client.get(path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
            assert response.headers["x-request-id"]
        for path in ("/v1/completions", "/tokenize", "//v1/completions", "/health/../v1/completions"):
            response = await stack.client.post(f"http://server{path}", json={"prompt": "a"})
            assert response.status_code in (401, 404), path
        assert stack.verifier.submitted == []


@pytest.mark.parametrize(
    ("headers", "is_admitted"),
    [
        ({"Authorization": "Bearer alpha"}, True),
        ({"Authorization": "bearer   beta "}, True),
        ({"X-Api-Key": "beta"}, True),
        ({"Authorization": "Bearer nonsense", "X-Api-Key": "alpha"}, True),
        ({"Authorization": "Bearer alph"}, False),
        ({"Authorization": "Bearer alphaa"}, False),
        ({"Authorization": "Bearer ALPHA"}, False),
        ({"Authorization": "Bearer alpha,beta"}, False),
        ({"Authorization": "Bearer"}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": "Basic alpha"}, False),
        ({"Authorization": "alpha"}, False),
        ({"X-Api-Key": ""}, False),
        ({}, False),
    ],
)
async def test_keys(make_stack: StackFactory, headers: dict[str, str], is_admitted: bool) -> None:
    async with make_stack(api_key=("alpha", "beta")) as stack:
        response = await stack.client.get("/v1/models", headers=headers)
        assert response.status_code == (200 if is_admitted else 401)


async def test_metrics_may_need_a_key(make_stack: StackFactory) -> None:
    async with make_stack(api_key=("alpha",), metrics_require_auth=True) as stack:
        assert (await stack.client.get("/metrics")).status_code == 401
        assert (await stack.client.get("/metrics", headers={"X-Api-Key": "alpha"})).status_code == 200
        assert (await stack.client.get("/health")).status_code == 200


def test_keys_of_a_file_join_those_of_the_flags(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\n\n one \ntwo\n", encoding="utf-8")
    keys = load_keys(ServeConfig(api_key=("three",), api_key_file=str(file)))
    for key in ("one", "two", "three"):
        assert keys.admit([(b"x-api-key", key.encode())])
    assert not keys.admit([(b"x-api-key", b"# for the team")])
    assert not keys.admit([(b"x-api-key", b"")])


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        load_keys(ServeConfig(api_key_file=str(file)))


def test_no_key_admits_nobody_by_itself() -> None:
    assert not ApiKeys().are_required
    assert not ApiKeys().admit([(b"authorization", b"Bearer ")])


async def test_pages_of_other_origins_get_no_leave_by_default(stack: Stack) -> None:
    headers = {"Origin": "https://a.example"}
    response = await stack.client.get("/v1/models", headers=headers)
    assert not [name for name in response.headers if name.startswith("access-control")]
    preflight = await stack.client.options("/v1/models", headers={**headers, "Access-Control-Request-Method": "GET"})
    assert preflight.status_code == 405


async def test_named_origins_may_call_and_ask_before_without_a_key(make_stack: StackFactory) -> None:
    async with make_stack(allowed_origins=("https://a.example",), api_key=("alpha",)) as stack:
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await stack.client.options("/v1/completions", headers={"Origin": "https://a.example", **asking})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = await stack.client.options("/v1/completions", headers={"Origin": "https://b.example", **asking})
        assert other.status_code == 400
        keys = {"Origin": "https://a.example", "X-Api-Key": "alpha"}
        assert (await stack.client.get("/v1/models", headers=keys)).headers["access-control-allow-origin"]
        refused = await stack.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


async def test_request_id_is_echoed_in_every_kind_of_answer(stack: Stack) -> None:
    headers = {"X-Request-Id": "from-the-client/1"}
    body = {"prompt": "a", "max_tokens": 3}
    for response in (
        await stack.client.get("/health", headers=headers),
        await stack.client.get("/nothing", headers=headers),
        await stack.client.post("/v1/completions", json=body, headers=headers),
        await stack.client.post("/v1/completions", json={**body, "stream": True}, headers=headers),
        await stack.client.post("/v1/completions", json={**body, "n": "x"}, headers=headers),
    ):
        assert response.headers.get_list("x-request-id") == ["from-the-client/1"]


@pytest.mark.parametrize("sent", [None, "", "x" * 129, "two words", "tab\tinside", "\u00fcber"])
async def test_request_id_that_is_missing_or_harmful_is_replaced(stack: Stack, sent: str | None) -> None:
    headers = {} if sent is None else {"X-Request-Id": sent.encode("latin-1")}
    answers = [await stack.client.get("/health", headers=headers) for _ in range(2)]  # type: ignore[arg-type]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(len(one) == 32 and one.isalnum() for one in ids)


async def test_log_names_the_id_and_stays_on_one_line(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jetspec.http"):
        await stack.client.get("/no%0athing", headers={"X-Request-Id": "from-the-client"})
    assert "GET '/no\\nthing': 404, id from-the-client" in [record.getMessage() for record in caplog.records]


async def test_request_ids_can_be_switched_off(make_stack: StackFactory) -> None:
    async with make_stack(enable_request_id_headers=False) as stack:
        assert "x-request-id" not in (await stack.client.get("/health")).headers


async def test_same_id_for_many_requests_mixes_nothing(stack: Stack) -> None:
    """S22: the client's id is never a key of ours."""
    prompts = [f"prompt {index}" for index in range(20)]
    of_prompt = {tuple(stack.tokenizer.encode(prompt)): prompt for prompt in prompts}
    stack.verifier.plan.tokens = lambda submit: (
        [*stack.tokenizer.encode(f"answer to {of_prompt[tuple(submit.prompt_token_ids)]}."), 2]
    )
    stack.verifier.plan.round_s = 0.002
    headers = {"X-Request-Id": "same"}

    async def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 50, "request_id": "same"}
        answer = await stack.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "same"
        text: str = answer.json()["choices"][0]["text"]
        return text

    assert await asyncio.gather(*map(ask, prompts)) == [f"answer to {prompt}." for prompt in prompts]
