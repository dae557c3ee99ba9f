"""The chat on the terminal: replies, commands, Ctrl-C and Ctrl-D."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import transformers as hf

from generate.chat import main
from tests.generate.serve.test_server import TEMPLATE, write_model
from tests.runs import ROOT

NEW = 12
GREEDY = ("--temperature=0", f"--max_new_tokens={NEW}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def converse(monkeypatch, capsys):
    """Runs the chat with lines of standard input; returns its code, output and errors."""

    def converse(directory, lines: list[str], *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        code = main([f"--model={directory}", *GREEDY, *options])
        return code, *capsys.readouterr()

    return converse


def replies_of_transformers(directory, questions: list[str], system: str = "") -> list[str]:
    """Return the greedy replies to the questions of one conversation."""
    model: Any = hf.GPT2LMHeadModel.from_pretrained(directory)
    tokenizer: Any = hf.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), chat_template=TEMPLATE
    )
    messages = [{"role": "system", "content": system}] if system else []
    replies = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        tokens = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        new = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False
        )
        replies.append(tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


@pytest.mark.parametrize("mesh", ["", pytest.param("data=2,model=2", marks=pytest.mark.thorough)])
def test_replies_equal_those_of_transformers(mesh, directory, converse):
    code, printed, _ = converse(directory, ["ab", "c?"], f"--mesh={mesh}")
    expected = replies_of_transformers(directory, ["ab", "c?"])
    assert printed == "".join(f"{reply}\n" for reply in expected)
    assert code == 0 and expected[0] != expected[1]


def test_reset_begins_a_new_conversation_and_exit_ends_the_chat(directory, converse):
    lines = ["ab", "/reset", "ab", "", "/exit", "ab"]
    _, printed, _ = converse(directory, lines, "--system=Be kind.")
    (reply,) = replies_of_transformers(directory, ["ab"], "Be kind.")
    assert printed == f"{reply}\n{reply}\n"


def test_a_conversation_that_is_full_goes_on_after_a_reset(directory, converse):
    code, printed, log = converse(directory, ["ab", 99 * "x", "/reset", "ab"])
    (reply,) = replies_of_transformers(directory, ["ab"])
    assert code == 0 and printed == f"{reply}\n{reply}\n"
    assert "leaves no room for a reply in max_length=96; /reset begins a new one" in log


@pytest.mark.thorough
def test_random_replies_differ_and_repeat_with_the_seed(directory, converse):
    options = ("--temperature=1", "--seed=3")
    _, printed, _ = converse(directory, ["ab", "/reset", "ab"], *options)
    first, second = printed.splitlines()[:2]
    assert first != second
    assert converse(directory, ["ab", "/reset", "ab"], *options)[1] == printed


def test_a_model_without_a_chat_template_is_refused(directory, tmp_path, converse):
    for file in directory.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, printed, log = converse(tmp_path, ["ab"])
    assert code == 2 and printed == ""
    assert log.splitlines()[-1] == (
        f"error: --model={tmp_path} has no chat template; take a model that was trained on "
        "conversations, or continue texts with python -m generate"
    )


@pytest.mark.thorough
def test_ctrl_c_ends_a_reply_and_ctrl_d_the_chat(directory):
    """A real process on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    # No token ends a reply, so it would go on for as long as there is room.
    # Without randomness: a random reply may contain the prompt "> ".
    options = [f"--model={directory}", "--max_length=96", "--temperature=0"]
    command = [sys.executable, "-m", "generate.chat", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)

    def read_until(text: str, *, presses_ctrl_c: bool = False) -> str:
        deadline = time.monotonic() + 120
        while text not in screen[0]:
            assert time.monotonic() < deadline, screen[0]
            if select.select([ours], [], [], 2)[0]:
                screen[0] += os.read(ours, 4096).decode(errors="replace")
            elif presses_ctrl_c:
                # Between the prompt and its wait for a key, input() only notes the signal.
                process.send_signal(signal.SIGINT)
        before, _, screen[0] = screen[0].partition(text)
        return before

    screen = [""]
    try:
        read_until("> ")
        os.write(ours, b"hello\n")
        read_until("hello\r\n")
        time.sleep(1)  # the terminal echoes a line before the process has read it
        process.send_signal(signal.SIGINT)  # while the model is being compiled, or replies
        read_until("> ")
        process.send_signal(signal.SIGINT)  # no reply: the line is given up
        read_until("(/exit or Ctrl-D ends the chat)", presses_ctrl_c=True)
        read_until("> ")
        os.write(ours, b"/reset\n")
        read_until("/reset\r\n")
        read_until("> ")
        os.write(ours, b"hello\n")
        read_until("hello\r\n")
        assert len(read_until("> ")) > 5  # the caches are intact
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
