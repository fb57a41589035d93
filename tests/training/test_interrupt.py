import contextlib
import signal
import sys
import threading

import pytest

from xformer.threads import parallel_map
from xformer.training.interrupt import Stopped, check_stop, stop_on_signals, until_stopped


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGBREAK" if sys.platform == "win32" else "SIGHUP"])
def test_a_signal_sets_the_request(name):
    with stop_on_signals() as stop:
        assert not stop
        signal.raise_signal(getattr(signal, name))
        assert stop == [name]


def test_iteration_ends_after_the_current_item(caplog):
    done = []

    def work():
        with stop_on_signals():
            for item in until_stopped([1, 2, 3]):
                if item == 2:
                    signal.raise_signal(signal.SIGTERM)
                done.append(item)

    caplog.set_level("INFO", "xformer")
    with pytest.raises(Stopped, match=r"^stopped by SIGTERM$"):
        work()
    assert done == [1, 2]
    assert caplog.messages == ["stopping as soon as the state is saved; a second Ctrl-C ends at once"]
    check_stop()  # the request ended with the block


def test_threads_of_parallel_map_see_the_request(monkeypatch):
    monkeypatch.setenv("XFORMER_NUM_THREADS", "2")
    with stop_on_signals():
        signal.raise_signal(signal.SIGTERM)
        for place in (0, 1):
            with pytest.raises(Stopped):
                parallel_map(lambda item, place=place: check_stop() if item == place else None, [0, 1])


def test_a_second_interrupt_ends_at_once():
    def interrupt_twice():
        with stop_on_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not stop
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(RuntimeError), stop_on_signals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_signals_are_not_caught_in_other_threads():
    actual = []

    def work():
        with stop_on_signals() as stop:
            actual.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert actual == [False]
