"""Promises of the service over HTTP: token in and token out, the OpenAI form, updates in flight, typed errors, no hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from inference_fakes import assert_exact, params, prompt, tiny

from etude.base.errors import InferenceFault, UserError, WeightSyncError
from etude.base.process import ServiceProcess
from etude.base.records import Completion, Message
from etude.data.chat import ChatCodec
from etude.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from etude.inference.client import InferenceClient
from etude.inference.engine import EngineConfig
from etude.inference.process import start_engine
from etude.inference.server import main
from etude.inference.service import ServerConfig
from etude.models.checkpoint import export_state, save_checkpoint
from etude.models.deepseek import DeepseekModel
from etude.weights.content import content_hash
from etude.weights.publisher import WeightPublisher
from etude.weights.store import Store

VOCAB = 300
MODEL: dict[str, Any] = {"vocab_size": VOCAB}
TOOLS = {"read": ("path",), "edit": ("path", "change")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    save_checkpoint(tiny(3, **MODEL), directory, eos_token_id=1, pad_token_id=0)
    save_tokenizer(train_tokenizer(["def f(x):\n    return x + 1\n"] * 20, VOCAB), directory)
    return directory


@pytest.fixture(scope="module")
def publisher(checkpoint: Path) -> WeightPublisher:
    return WeightPublisher(Store(str(checkpoint / "store")))


@pytest.fixture(scope="module")
def server(checkpoint: Path, publisher: WeightPublisher) -> Iterator[ServiceProcess]:
    config = ServerConfig(
        checkpoint=str(checkpoint),
        version=5,
        store=publisher.store.location,
        engine=EngineConfig(slots=16, max_length=256),
        tools=TOOLS,
        deadline_seconds=30.0,
        max_body_bytes=50_000,
    )
    process = asyncio.run(start_engine(config, log=checkpoint / "server.log"))
    yield process
    process.stop()


@pytest.fixture
def http(server: ServiceProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.key}"}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=30.0) as client:
        yield client


@pytest.fixture
def codec(checkpoint: Path) -> ChatCodec:
    return ChatCodec(load_tokenizer(checkpoint), TOOLS)


def session(server: ServiceProcess, work: Any) -> Any:
    """Run ``await work(client)``."""

    async def scenario() -> Any:
        client = InferenceClient(server.base_url, server.key, timeout=30.0)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(scenario())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ token level


def test_the_client_gets_exact_tokens_logprobs_and_experts(server: ServiceProcess) -> None:
    async def work(client: InferenceClient) -> Completion:
        await client.generate(prompt(0, 20), params(4), session="a b/c")
        completion = await client.generate(prompt(0, 20), params(8), session="a b/c", experts_start=15)
        await client.close_session("a b/c")
        await client.close_session("unknown")
        return completion

    completion = session(server, work)
    assert completion.cached_tokens == 19
    assert_exact(tiny(3, **MODEL), prompt(0, 20), completion)


def test_a_hundred_concurrent_agents_each_get_their_own_exact_answers(server: ServiceProcess) -> None:
    model = tiny(3, **MODEL)

    async def agent(client: InferenceClient, seed: int) -> tuple[list[int], Completion]:
        context = [*prompt(1, 30), *prompt(seed, 5)]
        for turn in range(3):
            completion = await client.generate(context, params(6, seed=seed), session=f"agent {seed}")
            if turn < 2:
                context = [*context, *completion.tokens, *prompt(turn, 4)]
        await client.close_session(f"agent {seed}")
        return context, completion

    async def work(client: InferenceClient) -> Any:
        return await asyncio.gather(*(agent(client, seed) for seed in range(100)))

    for context, completion in session(server, work):
        assert_exact(model, context, completion)
    assert session(server, lambda client: client.health())["running"] == 0


def test_a_client_that_goes_away_cancels_its_request(server: ServiceProcess, http: httpx.Client) -> None:
    body = {"tokens": [1, 2, 3], "max_new_tokens": 250, "session": "leaver"}
    payload = json.dumps(body).encode()
    before = http.get("/health").json()["tokens_sampled"]
    host, port = server.base_url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST /v1/tokens/generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.key}\r\n"
            raw.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
    until(lambda: http.get("/health").json()["running"] + http.get("/health").json()["waiting"] == 0)
    assert http.get("/health").json()["tokens_sampled"] - before < 20 * 250


@pytest.fixture(scope="module")
def slow(checkpoint: Path) -> Iterator[ServiceProcess]:
    """A server whose longest answers take far longer than its deadline."""
    config = ServerConfig(
        checkpoint=str(checkpoint), engine=EngineConfig(slots=2, max_length=32768), deadline_seconds=2.0
    )
    process = asyncio.run(start_engine(config, log=checkpoint / "slow.log"))
    yield process
    process.stop()


def test_a_stream_that_nobody_reads_any_more_is_cancelled(slow: ServiceProcess) -> None:
    headers = {"authorization": f"Bearer {slow.key}"}
    with httpx.Client(base_url=slow.base_url, headers=headers) as http:
        before = http.get("/health").json()["tokens_sampled"]
        body = {"prompt": "x", "stream": True, "n": 2, "temperature": 0.0}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        clock = time.monotonic()
        until(lambda: http.get("/health").json()["running"] == 0)
        assert time.monotonic() - clock < 1.5, "the deadline ended it, not the disconnect"
        assert before < http.get("/health").json()["tokens_sampled"] < before + 60000


def test_the_deadline_of_a_request_is_an_error_that_names_it(slow: ServiceProcess) -> None:
    with pytest.raises(InferenceFault, match=r"waited 2s .*policy version 0"):
        session(slow, lambda client: client.generate([1], params(32000), session="s"))
    until(lambda: session(slow, lambda client: client.health())["running"] == 0)


def test_sigterm_ends_a_server_in_seconds_with_work_in_flight(slow: ServiceProcess) -> None:
    async def work(client: InferenceClient) -> None:
        request = asyncio.create_task(client.generate([1], params(32000), session="s"))
        while (await client.health())["running"] == 0:
            await asyncio.sleep(0.01)
        clock = time.monotonic()
        await asyncio.to_thread(slow.stop)
        assert time.monotonic() - clock < 3.0
        with pytest.raises(InferenceFault):
            await request

    session(slow, work)
    assert slow.process.returncode == 0


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [
        ("/v1/tokens/generate", "{", 400, "JSON"),
        ("/v1/tokens/generate", "[]", 400, "object"),
        ("/v1/tokens/generate", '{"session": "s", "max_new_tokens": 1}', 400, "tokens: missing"),
        ("/v1/tokens/generate", '{"tokens": [1], "session": "s"}', 400, "max_new_tokens"),
        ("/v1/tokens/generate", '{"tokens": [1.5], "session": "s", "max_new_tokens": 1}', 400, "integers"),
        ("/v1/tokens/generate", '{"tokens": ["a"], "session": "s", "max_new_tokens": 1}', 400, "integers"),
        ("/v1/tokens/generate", '{"tokens": [[1]], "session": "s", "max_new_tokens": 1}', 400, "integers"),
        ("/v1/tokens/generate", '{"tokens": [9999], "session": "s", "max_new_tokens": 1}', 400, "outside"),
        ("/v1/tokens/generate", '{"tokens": [' + "1," * 256 + '1], "session": "s", "max_new_tokens": 1}', 400, "256"),
        ("/v1/tokens/generate", '{"tokens": [' + "1," * 30_000 + "1]}", 413, "50000"),
        ("/v1/chat/completions", "{}", 400, "messages"),
        ("/v1/chat/completions", '{"messages": [{"role": "robot", "content": ""}]}', 400, "role"),
        ("/v1/completions", '{"prompt": "x", "top_p": 0.5}', 400, "top_p"),
        ("/v1/completions", '{"prompt": "x", "n": 0}', 400, "n"),
        ("/v1/weights/update", "{}", 400, "version"),
        ("/v1/weights/update", '{"version": 404}', 409, "404"),
        ("/v1/nothing", "{}", 404, "/v1/nothing"),
        ("/health", "{}", 405, "method"),
    ],
)
def test_bad_requests_get_one_typed_answer(http: httpx.Client, path: str, body: str, status: int, names: str) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert names in error["message"]
    assert error.keys() == {"type", "message", "param", "code"}


def test_a_body_without_a_length_is_limited_too(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=(b" " * 10_000 for _ in range(10)))
    assert answer.status_code == 413


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_key_is_refused(server: ServiceProcess, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.get(f"{server.base_url}/health", headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_no_server_is_a_fault() -> None:
    port = free_port()
    nowhere = ServiceProcess(f"http://127.0.0.1:{port}", "key", None)  # type: ignore[arg-type]
    with pytest.raises(InferenceFault, match=str(port)):
        session(nowhere, lambda client: client.generate([1], params(1), session="s"))


def test_a_used_port_is_one_line_and_code_2(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServerConfig(checkpoint=str(checkpoint), port=taken.getsockname()[1])
        assert main([config.model_dump_json()]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: port {config.port} on 127.0.0.1 cannot be used")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "names"),
    [({"checkpoint": "/nowhere"}, "/nowhere"), ({"checkpoint": "x", "prot": 1}, "prot"), ({}, "checkpoint")],
)
def test_a_bad_configuration_is_one_line_and_code_2(
    config: dict[str, Any], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([json.dumps({"port": free_port(), **config})]) == 2
    said = capsys.readouterr().err
    assert names in said
    assert said.count("\n") == 1


def test_whoever_starts_a_server_that_fails_learns_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"code 2: checkpoint .*nowhere"):
        asyncio.run(start_engine(ServerConfig(checkpoint=str(tmp_path / "nowhere")), log=tmp_path / "log"))


# ---------------------------------------------------------------------------------------------------- OpenAI


def test_chat_renders_by_the_codec_and_reports_the_tokens(http: httpx.Client, codec: ChatCodec) -> None:
    body = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 12,
        "seed": 3,
        "logprobs": True,
        "n": 2,
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    tokens = codec.render(
        [Message(role="system", content="s"), Message(role="user", content="hi")], open_assistant=True
    )
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    direct = http.post(
        "/v1/tokens/generate",
        json={
            "tokens": tokens, "max_new_tokens": 12, "seed": 3, "session": "x", "stop_token_ids": codec.stop_token_ids
        },
    ).json()  # fmt: skip
    first = answer["choices"][0]
    assert [entry["logprob"] for entry in first["logprobs"]["content"]] == pytest.approx(direct["logprobs"], abs=1e-5)
    assert (first["message"]["content"] or "") == codec.parse(direct["tokens"]).content


def test_calls_that_the_codec_reads_come_back_as_tool_calls(http: httpx.Client, codec: ChatCodec) -> None:
    """The random model calls nothing by itself, so a call is forced by asking until one is sampled."""
    call = codec._ids["<|call|>"]
    for seed in range(400):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40, "seed": seed, "temperature": 2.0}
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            break
    assert choice["finish_reason"] == "tool_calls", f"token {call} was never sampled"
    entry = choice["message"]["tool_calls"][0]
    assert entry["type"] == "function"
    assert isinstance(json.loads(entry["function"]["arguments"]), dict)
    streamed = events(http, "/v1/chat/completions", {**body, "stream": True})
    assert [c["function"] for c in streamed[-2]["choices"][0]["delta"]["tool_calls"]][:1] == [
        call["function"] for call in choice["message"]["tool_calls"]
    ][-1:]
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_adds_up_to_the_answer(http: httpx.Client) -> None:
    for path, ask in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def f"}]}),
        ("/v1/completions", {"prompt": "def f"}),
    ):
        body = {**ask, "max_tokens": 40, "seed": 11}
        whole = http.post(path, json=body).json()
        parts = events(http, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        choices = [part["choices"][0] for part in parts[:-1]]
        pieces = [c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices]
        expected = whole["choices"][0]
        text = expected["message"]["content"] or "" if "message" in expected else expected["text"]
        assert "".join(pieces) == text
        assert sum(bool(piece) for piece in pieces) > 3, "it did not come in pieces"
        assert choices[-1]["finish_reason"] == expected["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text_wherever_tokens_end(http: httpx.Client, stream: bool) -> None:
    for seed in range(50):
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "seed": seed}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        clean = [i for i in range(5, len(text) - 2) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 2]]
        if clean:
            break
    stop = text[clean[0] : clean[0] + 2]
    cut = {**body, "stop": [stop, "never in there"]}
    if stream:
        parts = events(http, "/v1/completions", {**cut, "stream": True})
        got, reason = "".join(p["choices"][0]["text"] for p in parts), parts[-1]["choices"][0]["finish_reason"]
    else:
        choice = http.post("/v1/completions", json=cut).json()["choices"][0]
        got, reason = choice["text"], choice["finish_reason"]
    assert got == text[: text.index(stop)]
    assert reason == "stop"
    until(lambda: http.get("/health").json()["running"] == 0)


def test_models_lists_the_checkpoint(http: httpx.Client, checkpoint: Path) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [checkpoint.name]


# --------------------------------------------------------------------------------------------------- weights


def test_weights_are_pulled_and_swapped_while_rows_run(
    server: ServiceProcess, publisher: WeightPublisher, checkpoint: Path
) -> None:
    """Last in the file: it changes what the server holds."""

    def state(model: DeepseekModel) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in export_state(model).items()}

    async def updates(client: InferenceClient) -> AsyncIterator[int]:
        for version, seed in ((6, 4), (7, 5)):
            publisher.publish(version, state(tiny(seed, **MODEL)))
            assert await client.update_weights(version) == content_hash(state(tiny(seed, **MODEL)))
            yield version

    async def work(client: InferenceClient) -> tuple[list[Completion], Completion]:
        stop = asyncio.Event()

        async def agent(seed: int) -> list[Completion]:
            found = []
            while not stop.is_set():
                found.append(await client.generate(prompt(seed, 10), params(60, seed=seed), session=f"u{seed}"))
            return found

        agents = [asyncio.create_task(agent(seed)) for seed in range(8)]
        async for version in updates(client):
            assert (await client.health())["version"] == version
        await asyncio.sleep(0)
        stop.set()
        gathered = [completion for found in await asyncio.gather(*agents) for completion in found]
        return gathered, await client.generate(prompt(50, 10), params(8), session="after")

    during, after = session(server, work)
    assert all(list(c.versions) == sorted(c.versions) for c in during)
    assert {v for c in during for v in c.versions} >= {5, 7}
    assert set(after.versions) == {7}
    assert_exact(tiny(5, **MODEL), prompt(50, 10), after)

    key = publisher.publish(8, state(tiny(6, **MODEL))).files[0].key
    (checkpoint / "store" / key).write_bytes(b"torn")
    with pytest.raises(WeightSyncError, match=key):
        session(server, lambda client: client.update_weights(8))
    still = session(server, lambda client: client.generate(prompt(50, 10), params(8), session="after torn"))
    assert set(still.versions) == {7}
    assert_exact(tiny(5, **MODEL), prompt(50, 10), still)


def test_the_server_dies_with_its_parent(checkpoint: Path, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, os\nfrom pathlib import Path\nfrom etude.inference.process import start_engine\n"
        "from etude.inference.service import ServerConfig\n"
        f"starting = start_engine(ServerConfig(checkpoint={str(checkpoint)!r}), log=Path({str(tmp_path / 'log')!r}))\n"
        "engine = asyncio.run(starting)\n"
        "print(engine.process.pid, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())
