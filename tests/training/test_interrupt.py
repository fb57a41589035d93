import contextlib
import os
import signal
import threading

import pytest

from xformer.threads import parallel_map
from xformer.training.interrupt import Stopped, check_stop, stop_on_signals, until_stopped


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_remembered(name):
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), getattr(signal, name))
        assert stop
        assert stop.signal_name == name


def test_work_ends_after_the_item_under_way(caplog):
    done = []

    def work():
        with stop_on_signals():
            for item in until_stopped([1, 2, 3]):
                if item == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                done.append(item)

    caplog.set_level("INFO", "xformer")
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        work()
    assert done == [1, 2]
    assert caplog.messages == ["stopping as soon as the state is saved; a second Ctrl-C ends at once"]
    check_stop()  # nobody asks any more


def test_threads_that_share_the_work_see_the_request(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        for place in (0, 1):
            with pytest.raises(Stopped):
                parallel_map(lambda item, place=place: check_stop() if item == place else None, [0, 1])


def test_a_second_interrupt_is_not_waited_for():
    def interrupt_twice():
        with stop_on_signals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(RuntimeError), stop_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_nothing_is_caught():
    found = []

    def work():
        with stop_on_signals() as stop:
            found.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
