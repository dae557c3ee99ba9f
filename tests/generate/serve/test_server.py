"""The server, asked by OpenAI's own client and by clients that misbehave."""

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers as hf
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from convert.from_hf import load
from data.text.tokenization.byte_tokenizer import ByteTokenizer
from data.text.tokenization.file_tokenizer import FileTokenizer
from generate.generator import Generator
from generate.prompts import TextCodec
from generate.sampling import Sampling
from generate.serve.__main__ import _parser, open_model
from generate.serve.app import make_app
from generate.serve.connections import ConnectionLimits, listen, make_server

TOKENIZER = ByteTokenizer(has_special_tokens=True)
CODEC = TextCodec(FileTokenizer(TOKENIZER.content, "bytes"))
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{{ ' ' + mood if mood }}:{% endif %}"
)
LENGTH = 96
NUM_CLIENTS = 200


def write_model(path: Path, template: str = TEMPLATE) -> Path:
    """Write a Hugging Face model with larger weights, whose continuations vary; return its path."""
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=TOKENIZER.vocab_size, n_positions=LENGTH, n_layer=2, n_head=2, n_embd=32
    )
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = TOKENIZER.eos_id
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(TOKENIZER.content, encoding="utf-8")
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


LIMITS = ConnectionLimits(head_s=20, request_s=700, max_connections=400)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def serving(directory, *options: str) -> Iterator[str]:
    """Serve a model on a free port in a thread; yield its address."""
    args: argparse.Namespace = _parser().parse_args([f"--model={directory}", *options])
    with listen("127.0.0.1", 0) as listening:
        address = f"http://127.0.0.1:{listening[0].getsockname()[1]}"
        with open_model(args) as (served, engine):
            server = make_server(make_app(served, engine), LIMITS, "error")
            thread = threading.Thread(target=server.run, args=(listening,))
            thread.start()
            try:
                yield address
            finally:
                server.should_exit = True
                thread.join()


@pytest.fixture(scope="module")
def address(directory) -> Iterator[str]:
    with serving(directory, "--batch_size=4", "--max_body_mib=0.01") as found:
        yield found


@pytest.fixture
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def generator(directory) -> Generator:
    return Generator(load(directory), stop=[TOKENIZER.eos_id], batch_size=4)


def greedy(generator: Generator, prompts: list[str], most: int) -> list[str]:
    tokens = [list(prompt.encode()) for prompt in prompts]
    found = generator.generate(tokens, max_new_tokens=most, sampling=Sampling(temperature=0))
    return [CODEC.decode(one) for one in found]


def is_idle(address: str) -> bool:
    state = httpx.get(f"{address}/health").json()
    return state == {"status": "ok", "running": 0, "waiting": 0}


def wait_until_idle(address: str) -> None:
    deadline = time.monotonic() + 20
    while not is_idle(address):
        assert time.monotonic() < deadline, httpx.get(f"{address}/health").json()
        time.sleep(0.05)


def test_completions_are_those_of_the_generator(client, generator):
    prompts = ["def main(", "a", "return x"]
    found = client.completions.create(model="tiny", prompt=prompts, max_tokens=20, temperature=0)
    assert [choice.text for choice in found.choices] == greedy(generator, prompts, 20)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert found.usage.prompt_tokens == sum(map(len, prompts))
    assert found.usage.completion_tokens <= 60


@pytest.mark.thorough
@pytest.mark.drawn(1)
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"extra_body": {"top_k": 5}}])
def test_samples_are_those_of_the_generator_with_the_same_seed(client, generator, settings):
    found = client.completions.create(
        model="tiny", prompt="def main(", max_tokens=16, temperature=0.9, seed=7, n=5, **settings
    )
    own = Sampling(temperature=0.9, seed=7, **(settings.get("extra_body") or settings))
    expected = generator.generate(
        [list(b"def main(")], max_new_tokens=16, sampling=own, num_samples=5
    )
    assert [choice.text for choice in found.choices] == [CODEC.decode(one) for one in expected]
    assert len({choice.text for choice in found.choices}) > 1


def test_prompts_of_a_request_have_their_own_random_numbers(client, generator):
    found = client.completions.create(
        model="tiny", prompt=["def main("] * 2, max_tokens=16, seed=7, n=2
    )
    tokens = generator.generate(
        [list(b"def main(")] * 2, max_new_tokens=16, sampling=Sampling(seed=7), num_samples=2
    )
    assert [choice.text for choice in found.choices] == [CODEC.decode(one) for one in tokens]
    assert len({choice.text for choice in found.choices}) > 1


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 10**30}, {"top_k": 10**400}, {"prompt": "\ud800"}],
    ids=["30", "400", "text"],
)
def test_strange_values_do_not_end_the_server(address, fields):
    body = json.dumps({"prompt": "a", "max_tokens": 2, **fields})
    found = httpx.post(f"{address}/v1/completions", content=body)
    assert found.status_code == 200, found.text


def test_stream_is_the_same_text_in_pieces(client):
    settings = {"model": "tiny", "prompt": "def main(", "max_tokens": 24, "seed": 3}
    whole = client.completions.create(**settings)
    options = {"include_usage": True}
    pieces = [*client.completions.create(**settings, stream=True, stream_options=options)]
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage == whole.usage
    assert len(pieces) > 3


def test_chat_uses_the_template_of_the_model(client, generator):
    messages = [{"role": "user", "content": "Say 3."}]
    found = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=20
    )
    (expected,) = greedy(generator, ["user: Say 3.\nassistant:"], 20)
    assert found.choices[0].message.content == expected
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say 3."}]}]
    pieces = client.chat.completions.create(
        model="tiny", messages=parts, temperature=0, max_tokens=20, stream=True
    )
    deltas = [piece.choices[0].delta for piece in pieces]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content for delta in deltas) == expected


def test_variables_reach_the_chat_template(address, client, generator):
    (expected,) = greedy(generator, ["user: Say 3.\nassistant glad:"], 8)
    found = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Say 3."}],
        temperature=0,
        max_tokens=8,
        extra_body={"chat_template_kwargs": {"mood": "glad", "self": 1, "__class__": "x"}},
    )
    assert found.choices[0].message.content == expected
    for variables in ([], {"messages": []}):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": variables}
        refused = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "chat_template_kwargs must" in refused.json()["error"]["message"]


def test_stop_texts_end_a_continuation(client, generator):
    (whole,) = greedy(generator, ["def main("], 40)
    stop = whole[10:13]
    found = client.completions.create(
        model="tiny", prompt="def main(", max_tokens=40, temperature=0, stop=[stop, "\0\0"]
    )
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": "x" * LENGTH}, 400, "prompt 0 has 96 tokens"),
        ({"prompt": ""}, 400, "the prompt has no tokens"),
        ({"prompt": [1, 10**6]}, 400, "token ids must be from 0 to"),
        ({"prompt": [["a"]]}, 400, "prompt must be a text"),
        ({}, 400, "prompt must be a text"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1 must be 0, or from"),
        ({"prompt": "a", "temperature": 10**400}, 400, "must be 0, or from"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature=hot must be a number"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 must be a whole number"),
        ({"prompt": "a", "n": 1000}, 400, "are more than 64 continuations"),
        ({"prompt": "a", "logit_bias": {"3": 9}}, 400, "logit_bias="),
        ({"prompt": "a", "logprobs": 0}, 400, "logprobs=0 is not supported"),
        ({"prompt": "a", "best_of": True}, 400, "best_of=True is not supported"),
        ({"prompt": "a", "beams": 3}, 400, "the field beams is unknown"),
        ({"prompt": "a", "reasoning_effort": "high"}, 400, "reasoning_effort=high is not"),
        ({"prompt": "a", "model": "other"}, 404, "the model is 'tiny'"),
        ({"prompt": "a", "stop": ["b"] * 5}, 400, "stop must be a text"),
        ({"prompt": "x" * 20_000}, 413, "has more than 10,485 bytes"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(address, fields, status, message):
    found = httpx.post(f"{address}/v1/completions", json=fields)
    assert found.status_code == status
    assert message in found.json()["error"]["message"].replace("'beams'", "beams")


@pytest.mark.parametrize("kind", [chat_params, completion_params])
def test_every_field_of_the_api_may_be_null(address, kind):
    names = {*kind.CompletionCreateParamsBase.__annotations__, "beams"}
    fields = dict.fromkeys(names - {"prompt", "messages", "model"})
    if kind is chat_params:
        fields |= {"messages": [{"role": "user", "content": "a", "name": None}], "max_tokens": 2}
        fields |= {"safety_identifier": "me", "prediction": {"type": "content", "content": "b"}}
    else:
        fields |= {"prompt": "a", "max_tokens": 2}
    path = "chat/completions" if kind is chat_params else "completions"
    found = httpx.post(f"{address}/v1/{path}", json=fields)
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff\xfe", b"[" * 5000, b'{"prompt": NaN}', b""])
def test_malformed_json_is_refused(address, body):
    for path in ("completions", "chat/completions"):
        found = httpx.post(f"{address}/v1/{path}", content=body)
        assert found.status_code == 400
        assert "the request" in found.json()["error"]["message"]


def test_other_routes_and_errors_of_the_client(address, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
        client.models.retrieve("org/other")
    assert httpx.get(f"{address}/v2").json()["error"]["message"] == "GET /v2: Not Found"
    assert httpx.get(f"{address}/v1/completions").status_code == 405
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        client.completions.create(model="tiny", prompt="")
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\] must have"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user"}])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(
        openai.BadRequestError, match=r"messages\[0\] has tool_calls, which are not"
    ):
        client.chat.completions.create(model="tiny", messages=[called])


@pytest.mark.thorough
def test_many_clients_get_their_own_answers(address, generator):
    prompts = [f"def f{number}(" for number in range(NUM_CLIENTS)]
    expected = greedy(generator, prompts, 12)

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:

            async def one(number: int) -> str:
                settings = {"model": "tiny", "prompt": prompts[number], "max_tokens": 12}
                if number % 2:
                    found = await client.completions.create(**settings, temperature=0)
                    return found.choices[0].text
                pieces = await client.completions.create(**settings, temperature=0, stream=True)
                return "".join([piece.choices[0].text async for piece in pieces])

            return await asyncio.gather(*map(one, range(NUM_CLIENTS)))

    assert asyncio.run(ask()) == expected
    wait_until_idle(address)


def test_clients_that_leave_free_their_places(address, client, generator):
    body = {"prompt": "def main(", "max_tokens": LENGTH - 10, "n": 4, "stream": True}
    for number in range(8):
        body["stream"] = bool(number % 2)
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=0.2) as leaving:
            with leaving.stream("POST", f"{address}/v1/completions", json=body) as response:
                next(response.iter_lines())
    wait_until_idle(address)
    found = client.completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0)
    assert found.choices[0].text == greedy(generator, ["a"], 8)[0]


@pytest.mark.thorough
def test_requests_beyond_the_limits_are_turned_away(directory):
    options = ("--batch_size=1", "--max_waiting=20", "--timeout_s=0.01")
    with serving(directory, *options) as address:
        many = {"prompt": "a", "n": 21, "max_tokens": 80}
        found = httpx.post(f"{address}/v1/completions", json=many)
        assert found.status_code == 429 and found.headers["Retry-After"] == "1"
        assert "at most 20" in found.json()["error"]["message"]
        late = httpx.post(f"{address}/v1/completions", json=many | {"n": 20})
        assert late.status_code == 504 and "more than 0.01 s" in late.json()["error"]["message"]
        stream = httpx.post(f"{address}/v1/completions", json=many | {"n": 20, "stream": True})
        # If reading takes as long, the error is the answer; otherwise it is the last event.
        last = stream.text.strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == 504
        wait_until_idle(address)


def test_server_refuses_other_sites_and_does_not_redirect(address):
    found = httpx.get(f"{address}/v1/models", headers={"Host": "rebound.example"})
    assert found.status_code == 403
    assert httpx.get(f"{address}/health/").status_code == 404
