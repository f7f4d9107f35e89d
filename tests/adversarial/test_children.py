"""The line protocol under attack: real children that lie, die, hang, flood, or leave processes behind."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from porter.child import ChildError

SERVED = """
import os, sys, time, subprocess
from porter.child_server import serve
{before}
def echo(progress, **a): return a
def huge(progress, size): return "x" * size
def fail(progress, text): raise ValueError(text)
def die(progress, code): os._exit(code)
def slow(progress, steps, pause):
    for i in range(steps):
        time.sleep(pause)
        progress(i + 1, steps)
    return steps
def hang(progress): time.sleep(3600)
def noise(progress):
    print("printed by a library"); os.write(1, b"written past sys.stdout\\n"); return "answer"
def nan(progress): return [float("nan"), -0.0, 1e-45]
def unsendable(progress): return object()
def cause(progress):
    try:
        raise KeyError("inner\\nreason")
    except KeyError as error:
        raise RuntimeError("outer") from error
def leave(progress):
    return subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]).pid
serve({{f.__name__: f for f in (echo, huge, fail, die, slow, hang, noise, nan, unsendable, cause, leave)}})
"""


def served(before: str = "") -> str:
    return SERVED.format(before=before)


def within(seconds: float, call):
    """Runs `call` in a thread: a call that blocks for ever fails the test instead of the whole session."""
    result: dict = {}

    def run() -> None:
        try:
            result["value"] = call()
        except BaseException as error:
            result["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still blocked after {seconds} s"
    if "error" in result:
        raise result["error"]
    return result["value"]


def test_what_libraries_print_is_no_answer(child_of):
    child = child_of(served("print('not json'); print('{'); print('')"))
    assert child.ask("noise", 20) == "answer"
    assert b"printed by a library" in child.log.read_bytes() and b"past sys.stdout" in child.log.read_bytes()


@pytest.mark.parametrize("line", ["42", "null", "[]", '"text"', "{}", '{"progress": 1}', "1e999", "NaN"])
def test_a_printed_line_that_happens_to_be_json_is_no_answer(child_of, line):
    child = child_of(served(f"print({line!r})"))
    assert child.ask("echo", 20, a=1) == {"a": 1}


def test_huge_answers_and_requests_arrive_whole(child_of):
    child = child_of(served())
    assert len(within(60, lambda: child.ask("huge", 30, size=20_000_000))) == 20_000_000
    text = "y" * 5_000_000
    assert within(60, lambda: child.ask("echo", 30, text=text)) == {"text": text}


def test_floats_keep_their_bits(child_of):
    nan, zero, least = child_of(served()).ask("nan", 20)
    assert nan != nan and str(zero) == "-0.0" and least == 1e-45


@pytest.mark.parametrize("text", ["one\ntwo\r\nthree", "", "\x00\x1b[31m\u2028", "ü" * 5000])
def test_an_exception_is_one_line_and_the_child_goes_on(child_of, text):
    child = child_of(served())
    with pytest.raises(ChildError) as fault:
        child.ask("fail", 20, text=text)
    assert "\n" not in fault.value.what and "ValueError" in fault.value.what and len(fault.value.what) < 700
    assert child.ask("echo", 20, a=2) == {"a": 2}


def test_the_cause_of_an_exception_is_what_is_told(child_of):
    with pytest.raises(ChildError, match="KeyError.*inner") as fault:
        child_of(served()).ask("cause", 20)
    assert fault.value.kind == "KeyError"


def test_an_answer_that_cannot_be_sent_is_an_error(child_of):
    child = child_of(served())
    with pytest.raises(ChildError, match="TypeError"):
        child.ask("unsendable", 20)
    with pytest.raises(ChildError, match="KeyError.*no_such_method"):
        child.ask("no_such_method", 20)
    assert child.ask("echo", 20) == {}


def test_death_between_and_during_requests(child_of):
    child = child_of(served())
    with pytest.raises(ChildError, match="exit code 3 during 'die'"):
        child.ask("die", 20, code=3)
    with pytest.raises(ChildError, match="exit code 3 during 'echo'"):
        child.ask("echo", 20)
    other = child_of(served())
    other.ask("echo", 20)
    os.kill(other.process.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match="killed by SIGKILL during 'echo'"):
        while True:  # the first request may still fit into the pipe of a child that just died
            other.ask("echo", 20)


def test_a_death_is_noticed_at_once_not_at_the_limit(child_of):
    child = child_of(served())
    pending, began = child.request("hang", 600), time.monotonic()
    assert not pending.ready()
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildError, match="SIGKILL"):
        pending.wait()
    assert time.monotonic() - began < 10 and pending.ready()


def test_silence_ends_a_child_and_progress_puts_that_off(child_of, nobody_left):
    child, seen = child_of(served()), []
    child.ask("echo", 30)
    assert child.ask("slow", 1.5, lambda done, total: seen.append(done), steps=6, pause=0.5) == 6
    assert seen and seen == sorted(seen)  # 3 s of work under a limit of 1.5 s of silence
    with pytest.raises(ChildError, match="silent for 1 s in 'hang'"):
        child.ask("hang", 1)
    nobody_left(child.process.pid)


def test_a_stopped_process_is_ended_by_the_silence_limit(child_of, nobody_left):
    child = child_of(served())
    child.ask("echo", 30)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(ChildError, match="silent for 1 s"):
        within(20, lambda: child.ask("echo", 1))
    nobody_left(child.process.pid)


@pytest.mark.xfail(strict=True, reason="child.py request(): a write into a full pipe has no limit")
def test_a_request_larger_than_the_pipe_to_a_stopped_process_has_the_limit_too(child_of):
    child = child_of(served())
    child.ask("echo", 30)
    os.kill(child.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ChildError, match="silent"):
            within(8, lambda: child.ask("echo", 1, text="z" * 1_000_000))
    finally:
        os.killpg(child.process.pid, signal.SIGKILL)


def test_answers_that_arrive_out_of_turn_reach_their_own_request(child_of):
    child = child_of(served())
    first, second, third = (child.request("echo", 20, n=n) for n in (1, 2, 3))
    assert third.wait() == {"n": 3} and first.wait() == {"n": 1} and second.wait() == {"n": 2}


def test_a_request_that_waits_behind_a_working_one_is_not_silence(child_of):
    child = child_of(served())
    child.ask("echo", 30)
    child.request("slow", 60, steps=4, pause=0.5)
    assert child.request("echo", 1, a=1).wait() == {"a": 1}


def test_stop_ends_grandchildren_that_ignore_sigterm(child_of, nobody_left):
    child = child_of(served())
    child.ask("leave", 20)
    child.stop()
    nobody_left(child.process.pid)
    child.stop()  # harmless again


def test_grandchildren_of_a_killed_child_are_ended(child_of, nobody_left):
    child = child_of(served())
    child.ask("leave", 20)
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(ChildError):
        child.ask("hang", 20)
    child.stop()
    nobody_left(child.process.pid)


@pytest.mark.parametrize("source", ["raise SystemExit(5)", "import no_such_module", "import os; os.abort()", "x = ("])
def test_a_child_that_never_serves_is_one_line(child_of, source):
    child = child_of(source)
    with pytest.raises(ChildError) as fault:
        for _ in range(100):
            child.ask("echo", 20)
    assert "\n" not in fault.value.what and ("exit code" in fault.value.what or "SIGABRT" in fault.value.what)


def test_a_child_that_closes_its_output_but_lives_on_is_ended_by_the_limit(child_of, nobody_left):
    child = child_of("import os, time; os.close(1); time.sleep(600)")
    with pytest.raises(ChildError, match="silent for 1 s"):
        within(20, lambda: child.ask("echo", 1))
    nobody_left(child.process.pid)


def test_an_exception_in_the_log_of_an_earlier_start_is_not_blamed(child_of, tmp_path):
    (tmp_path / "adversarial_child_0.log").write_text("(EngineCore pid=7) ERROR RuntimeError: of last week\n")
    with pytest.raises(ChildError) as fault:
        child_of(served()).ask("fail", 20, text="of today")
    assert "of today" in fault.value.what and "of last week" not in fault.value.what
