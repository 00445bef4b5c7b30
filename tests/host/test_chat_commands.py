"""Commands on a conversation with a model that is none, without a terminal: what is said, kept and sent."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_chat import CONTEXT, FakeBackend

from minisgl.chat.commands import COMMANDS, enter
from minisgl.chat.screen import Screen
from minisgl.chat.session import Session
from minisgl.config import SamplingParams

UNSET = SamplingParams()


class Chat:
    """What a chat of some lines came to."""

    def __init__(self, lines: Sequence[str], capsys: pytest.CaptureFixture[str], sampling: SamplingParams) -> None:
        self.backend = FakeBackend()
        asyncio.run(asyncio.wait_for(self._talk(lines, sampling), 60))
        self.out, self.err = capsys.readouterr()

    async def _talk(self, lines: Sequence[str], sampling: SamplingParams) -> None:
        async def opened(report: object) -> FakeBackend:
            return self.backend

        self.session = session = Session(opened, Screen(live=False), sampling, "Be kind.")
        for line in lines:
            await enter(session, line)
        self.turns = [turn.question for turn in session.conversation.turns]
        await session.close()

    @property
    def sent(self) -> list[list[str]]:
        """What was said in each question's messages, without the system message."""
        return [[m["content"] for m in messages if m["role"] != "system"] for messages, _, _ in self.backend.asked]


@pytest.fixture
def chat(capsys):
    """`chat(*lines, sampling=…)`."""
    return lambda *lines, sampling=UNSET: Chat(lines, capsys, sampling)


def test_a_question_is_put_after_what_was_said(chat):
    done = chat("one", "two")
    assert done.sent == [["one"], ["one", "one", "two"]]
    assert done.backend.asked[0][0][0] == {"role": "system", "content": "Be kind."}
    assert (done.out, done.session.faults, done.backend.closed) == ("one\ntwo\n", 0, True)


def test_regen_asks_again_and_undo_brings_the_first_answer_back(chat):
    done = chat("one", "two", "/regen")
    assert done.sent[2] == done.sent[1]
    assert done.turns == ["one", "two"]
    assert chat("one", "two", "/regen", "/undo", "/undo").turns == ["one"]


def test_undo_takes_back_whatever_changed_the_conversation(chat):
    for change in ("/clear", "/fork 1", "/drop 1", "/system Be rude."):
        done = chat("one", "two", change, "/undo")
        assert (done.turns, done.session.conversation.system) == (["one", "two"], "Be kind.")
    assert "there is nothing to undo" in chat("/undo").err


def test_clear_keeps_the_system_message_and_drops_all_else(chat):
    done = chat("one", "/clear", "two")
    assert done.sent[1] == ["two"]
    assert done.session.conversation.system == "Be kind."


def test_fork_goes_on_from_a_turn_and_drop_without_the_oldest(chat):
    assert chat("one", "two", "three", "/fork 1", "four").sent[-1] == ["one", "one", "four"]
    assert chat("one", "two", "three", "/drop 2", "four").sent[-1] == ["three", "three", "four"]
    assert chat("one", "/fork 0").turns == []
    for wrong in ("/fork", "/fork 2", "/fork -1", "/fork x", "/drop 0", "/drop 2"):
        done = chat("one", wrong)
        assert done.turns == ["one"] and f"{wrong.split()[0]} takes a number from" in done.err


def test_the_system_message_can_be_set_shown_and_taken_away(chat):
    done = chat("/system Speak French.", "one", "/system none", "two", "/system")
    assert [messages[0]["content"] for messages, _, _ in done.backend.asked] == ["Speak French.", "one"]
    assert done.out.endswith("system  none\n")


def test_parameters_are_set_with_their_checks(chat):
    done = chat(
        *("/set temperature 0.5", "/set stop=END", '/set bad_words ["a", "b"]', "/set ignore_eos on", "/set seed 7"),
        *('/set logit_bias {"5": -1}', "/set presence_penalty = 1", "/set top_k 3", "/set top_k default", "one"),
    )
    assert done.session.faults == 0
    assert done.backend.asked[0][1] == SamplingParams(
        temperature=0.5,
        stop="END",
        bad_words=["a", "b"],
        ignore_eos=True,
        seed=7,
        logit_bias={5: -1},
        presence_penalty=1,
    )
    assert chat("/set stop a=b").session.sampling.stop == "a=b"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/set temperature 1000", "temperature must be from 0 to 100, got 1000"),
        ("/set temperature warm", "temperature must be a finite number or unset, got 'warm'"),
        ("/set temprature 1", "no parameter is called 'temprature': did you mean temperature?"),
        ("/set", "no parameter is called '': n, max_tokens, "),
        ("/set seed", "/set seed needs a value"),
        ("/set n 2", "n must be 1"),
        ("/set prompt_logprobs 2", "prompt_logprobs unset"),
        ('/set logit_bias {"x": 1}', "logit_bias must be"),
        ("/logprobs 1", "there are no turns yet"),
        ("/regen", "there are no turns yet"),
        ("/edit", "/edit needs a terminal"),
        ("/read", "/read takes a file's name"),
        ("/read /nowhere", "No such file or directory: '/nowhere'"),
        ("/load /", "/ is no ordinary file"),
        ("/read /dev/zero", "/dev/zero is no ordinary file"),
        ("/save /dev/zero", "/dev/zero is no ordinary file"),
        ("/drop 1", "there are no turns yet"),
        ("/fork 0", "there are no turns yet"),
        ("/set logit_bias " + "[" * 3000, "logit_bias must be"),
        ("/model absent", "absent is not here"),
        ("/xyzzy", "there is no /xyzzy; /help lists what there is"),
        ("/hlep me", "there is no /hlep; did you mean /help?"),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(chat, line, says):
    done = chat(line)
    assert says in done.err and done.err.removesuffix("closed\n").count("\n") == 1
    assert done.session.faults == 1
    assert (done.session.sampling, done.session.conversation.turns) == (SamplingParams(), ())


def test_thinking_is_the_models_choice_until_the_user_has_one(chat):
    done = chat("one", "/think", "two", "/nothink", "three", "/show")
    assert [thinking for _, _, thinking in done.backend.asked] == [None, True, False]
    assert "thinking  off" in done.out


def test_a_conversation_is_saved_and_loaded_with_its_settings(chat, tmp_path: Path):
    path = tmp_path / "a chat.json"
    chat("one", "refused", "/set temperature 0.5", "/nothink", f"/save {path}")
    saved = json.loads(path.read_bytes())
    assert saved["messages"][-1] == {"role": "user", "content": "refused"}
    assert (saved["model"], saved["temperature"]) == ("fake", 0.5)
    done = chat("/set seed 3", f"/load {path}", "/show")
    assert done.turns == ["one"] and done.session.unanswered == "refused"
    assert done.session.sampling == SamplingParams(temperature=0.5, seed=3) and done.session.thinking is False
    assert "1 turn; the last one: one; /regen answers the question that has no answer" in done.err
    assert chat(f"/load {path}", "/undo").turns == []


def test_save_writes_over_conversations_and_over_nothing_else(chat, tmp_path: Path):
    notes, saved = tmp_path / "notes.txt", tmp_path / "chat.json"
    notes.write_text("precious")
    done = chat("one", f"/save {notes}", f"/save {saved}", "two", f"/save {saved}")
    assert f"{notes} is there, and no conversation: give another name" in done.err
    assert notes.read_text() == "precious"
    assert len(json.loads(saved.read_bytes())["messages"]) == 5


def test_a_file_goes_before_the_next_question_only(chat, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("What is known.\n")
    (tmp_path / "bad").write_bytes(b"\xff")
    done = chat(f"/read {tmp_path}/notes.txt", "So?", "And?", f"/read {tmp_path}/bad")
    assert done.sent[0] == ["notes.txt:\n\nWhat is known.\n\nSo?"] and done.sent[1][-1] == "And?"
    assert "can't decode byte 0xff" in done.err


def test_a_full_context_is_said_with_the_numbers_and_dropping_makes_room(chat):
    third = "word " * 400  # with its answer 800 of 1000
    done = chat(third, "word " * 190)
    assert f"the prompt has 992 tokens; the context holds {CONTEXT}" not in done.err
    done = chat(third, "word " * 300)
    assert f"Error: the prompt has 1102 tokens; the context holds {CONTEXT}" in done.err
    assert "the context is full: /drop 1 makes room, /clear begins anew" in done.err
    assert done.turns == [third.strip()]
    done = chat(third, "word " * 300, "/drop 1")
    assert [len(text.split()) for text in done.turns] == [300], "and what did not fit is asked again"


def test_as_many_turns_are_named_as_a_big_question_needs(chat):
    turns, big = [f"{n} " + "word " * 39 for n in range(8)], "word " * 700  # a turn is 80 words with its answer
    done = chat(*turns, big)
    (drop,) = re.findall(r"/drop (\d) makes room", done.err)
    assert 5 <= int(drop) <= 7
    assert chat(*turns, big, f"/drop {drop}").turns[-1] == big.strip()
    for lines in ((), ("one",)):
        err = chat(*lines, "word " * 1200).err
        assert "the context is full: shorten the question" in err and "/drop" not in err


def test_an_answer_that_was_cut_says_why(chat):
    assert (
        "; cut at max_tokens; /set max_tokens N allows more" in chat("a b c", sampling=SamplingParams(max_tokens=2)).err
    )
    done = chat("word " * 900, sampling=SamplingParams(max_tokens=99))
    assert re.search(r"out 99, TTFT .* tok/s; the context is full: /drop 1 makes room, /clear begins anew", done.err)


def test_a_fault_keeps_what_came_and_a_question_without_an_answer_can_be_asked_again(chat):
    done = chat("broken in the middle", "/show")
    assert done.turns == ["broken in the middle"] and "turn 1" in done.out
    done = chat("one", "refused", "/regen")
    assert (done.turns, done.session.faults) == (["one"], 2)
    assert done.sent[1] == done.sent[2] == ["one", "one", "refused"]
    assert "the conversation is kept, and /regen asks again" in done.err
    assert "no text came; /regen asks again" in chat("silent").err


def test_what_nobody_foresaw_is_a_line_too_and_the_chat_goes_on(chat, monkeypatch):
    async def score(self, turn):
        raise KeyError("another")

    monkeypatch.setattr(FakeBackend, "score", score)
    done = chat("unforeseen", "ponder", "/tokens", "two")
    assert "Error: 'a fault of ours'\nthe conversation is kept, and /regen asks again\n" in done.err
    assert "Error: 'another'\n" in done.err
    assert (done.session.faults, done.turns) == (2, ["two"])


def test_regen_that_brings_nothing_leaves_the_answer_that_there_was(chat):
    done = chat("once", "/regen", "/regen", "two")
    assert done.sent == [["once"], ["once"], ["once"], ["once", "once", "two"]]
    assert done.turns == ["once", "two"]


def test_undo_of_a_question_without_an_answer_takes_back_that_alone(chat):
    done = chat("one", "refused", "/undo")
    assert (done.turns, done.session.unanswered) == (["one"], None)
    assert chat("one", "refused", "/undo", "/undo").turns == []
    done = chat("one", "refused", "/system Be brief.", "/regen")
    assert done.sent[-1] == ["one", "one", "refused"], "other changes leave the question open"


def test_thoughts_without_an_answer_can_be_seen_until_something_else_happens(chat):
    done = chat("one", "ponder this", "/show thinking")
    assert "first this, then\nthat, so:\n" in done.err and "no text came; /regen asks again" in done.err
    for after in ("two", "/undo"):
        assert "the last answer came without thoughts" in chat("one", "ponder this", after, "/show thinking").err


def test_that_the_engine_is_a_new_one_is_said(chat, monkeypatch):
    ready = FakeBackend.ready

    async def anew(self):
        self.news = "the engine has died: signal SIGKILL; this is a new one"
        return await ready(self)

    monkeypatch.setattr(FakeBackend, "ready", anew)
    assert "the engine has died: signal SIGKILL; this is a new one; tokens in 3 " in chat("one").err


def test_files_that_are_none_or_hold_nonsense_are_refused(chat, tmp_path: Path):
    fifo, deep, odd = tmp_path / "fifo", tmp_path / "deep.json", tmp_path / "odd.json"
    os.mkfifo(fifo)
    deep.write_text("[" * 200_000)
    messages = [{"role": "user", "content": "hi"}]
    odd.write_text(json.dumps({"messages": messages, "chat_template_kwargs": {"enable_thinking": "x"}}))
    for command in ("/read", "/load", "/save"):
        assert f"{fifo} is no ordinary file" in chat(f"{command} {fifo}").err
    assert f"{deep} cannot be loaded: it is not JSON" in chat(f"/load {deep}").err
    done = chat(f"/load {odd}", "/show")
    assert "enable_thinking must be true or false, got 'x'" in done.err and done.session.faults == 1


def test_tokens_and_their_alternatives_are_shown(chat):
    done = chat("so it is", "/tokens", "/logprobs 2")
    assert "1 'so' 90%  2 'it' 90%  3 'is' 90%" in done.out
    assert done.out.endswith("'it'      90.5%   -0.100  *\n'other'    5.0%   -3.000\n")
    assert "/logprobs takes a number from 1 to 3, got '4'" in chat("so it is", "/logprobs 4").err


def test_scores_that_did_not_come_with_the_answer_are_found_out_once(chat, monkeypatch):
    calls = []
    score = FakeBackend.score

    async def counted(self, turn):
        calls.append(turn.answer)
        turn.scores.clear()
        return await score(self, turn)

    async def unscored(self, *args):
        async for part in answer(self, *args):
            yield part._replace(scores=())

    answer = FakeBackend.answer
    monkeypatch.setattr(FakeBackend, "answer", unscored)
    monkeypatch.setattr(FakeBackend, "score", counted)
    done = chat("so it is", "/tokens", "/logprobs 1")
    assert calls == ["so it is"] and "1 'so' 61%" in done.out


def test_stats_count_all_answers_and_model_takes_another(chat):
    done = chat("a b", "c", "/undo", "/model other", "/stats")
    assert "answers  2\ntokens   in 11 (cached 5), out 3\nmodel    other\n" in done.out


def test_every_command_has_a_line_of_help(chat):
    done = chat("/help")
    for name in COMMANDS:
        assert f"{name} " in done.out
    assert all(command.__doc__ and "\n" not in command.__doc__ for command in COMMANDS.values())
    assert "/logprobs N       show what else token N" in done.out


def test_words_that_are_not_unicode_are_asked_all_the_same(chat):
    assert chat("a \udc80 b").sent == [["a ? b"]]
