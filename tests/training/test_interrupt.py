import contextlib
import os
import signal
import threading

import pytest

from xformer.training.interrupt import stop_on_signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_remembered(name):
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), getattr(signal, name))
        assert stop
        assert stop.signal_name == name


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
