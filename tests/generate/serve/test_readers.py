"""Chats that need much time hold up no completions and no other chats."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from generate.serve import readers
from tests.generate.serve.test_server import TEMPLATE, serving, write_model
from untrusted.limited_process import Limits


@pytest.mark.thorough
def test_chats_that_never_end_hold_up_no_others(tmp_path, monkeypatch):
    """A message makes the template run for ever."""
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    endless = "{% if messages[0].content == 'run' %}" + loops + "{% endif %}"
    write_model(tmp_path / "tiny", TEMPLATE + endless)
    monkeypatch.setattr(readers, "_TEMPLATE_LIMITS", Limits(cpu_s=0.2, memory_bytes=2**28))

    def chat(content: str) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        fields = {"messages": messages, "max_tokens": 2}
        return httpx.post(f"{address}/v1/chat/completions", json=fields, timeout=60)

    def complete(number: int) -> httpx.Response:
        fields = {"prompt": f"def f{number}(", "max_tokens": 2}
        return httpx.post(f"{address}/v1/completions", json=fields, timeout=60)

    with serving(tmp_path / "tiny") as address, ThreadPoolExecutor(20) as threads:
        hostile = [threads.submit(chat, "run") for _ in range(8)]
        assert all(found.status_code == 200 for found in threads.map(complete, range(8)))
        assert not all(each.done() for each in hostile)
        assert chat("Say 3.").status_code == 200
        for each in hostile:
            assert each.result().status_code == 400
            problem = each.result().json()["error"]["message"]
            assert "chat_template.jinja takes more than 0.2 s of processor time" in problem


def test_chats_wait_no_longer_than_an_answer_and_completions_do_not_wait(monkeypatch):
    def wait(fields: dict[str, Any]) -> None:
        time.sleep(fields["seconds"])

    async def read() -> None:
        of_server = readers.Readers()
        soon = asyncio.get_running_loop().time() + 0.3
        chats = [
            of_server.read(wait, {"seconds": 0.5}, is_chat=True, deadline_s=soon) for _ in range(20)
        ]
        all_chats = asyncio.gather(*chats, return_exceptions=True)
        await asyncio.sleep(0.05)
        for _ in range(20):
            await of_server.read(wait, {"seconds": 0}, is_chat=False, deadline_s=soon)
        assert not all_chats.done()
        monkeypatch.setattr(readers, "_MAX_UNREAD", 20)
        with pytest.raises(readers.Busy, match=r"20 requests are waiting to be read"):
            await of_server.read(wait, {"seconds": 0}, is_chat=False, deadline_s=soon)
        for problem in await all_chats:
            assert isinstance(problem, TimeoutError)

    asyncio.run(read())
