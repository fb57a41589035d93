"""Every job of a worker ends with a result or an error, and none holds the others."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from xformer.errors import BackendError, DataError, MissingPackageError
from xformer.generation.batch import GenerationBatch
from xformer.generation.generate import search
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.serve.jobs import Job, JobError, Worker, public_error

MODEL = LanguageModel(LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1))


def searching(worker, length, *, timeout=60.0, before=None, model=MODEL, **options):
    """Submit a search with so many new tokens."""
    job = Job(timeout, **options)

    def task():
        if before is not None:
            before()
        batch = GenerationBatch(model, [[5, 4]], None, max_new_tokens=length, stopping_criteria=[job.check])
        return (yield from search(batch))

    job.task = task()
    worker.submit(job)
    return job


def run(test):
    async def main():
        worker = Worker("test")
        try:
            await asyncio.wait_for(test(worker), 60)
        finally:
            await asyncio.to_thread(worker.close)

    asyncio.run(main())


def test_searches_end_with_results_and_errors():
    def fail():
        raise DataError("no")

    async def test(worker):
        jobs = [searching(worker, length, is_alone=length == 7) for length in (5, 7, 3)]
        jobs.append(searching(worker, 2, is_alone=True, model=MODEL.to("array_api_strict")))
        failing = searching(worker, 5, before=fail)
        late = searching(worker, 10**5, timeout=0.2)
        for job, length in zip(jobs, (5, 7, 3, 2), strict=True):
            ((output,),) = await job.result()
            assert len(output.tokens) <= length
        with pytest.raises(JobError, match=r"^no$"):
            await failing.result()
        with pytest.raises(JobError, match="took too long"):
            await late.result()

    run(test)


def test_a_search_stops_when_its_client_stops_listening():
    async def test(worker):
        events = searching(worker, 10**5).events()
        waiting = asyncio.ensure_future(anext(events))
        while not worker.num_running:
            await asyncio.sleep(0.01)
        waiting.cancel()
        while worker.num_running:
            await asyncio.sleep(0.01)
        assert not worker.num_waiting

    run(test)


def test_a_closed_worker_finishes_what_runs_and_refuses_the_rest():
    started, proceed = threading.Event(), threading.Event()

    def wait():
        started.set()
        proceed.wait(10)

    async def test(worker):
        worker.max_batch = 1
        running = searching(worker, 5, before=wait)
        await asyncio.to_thread(started.wait, 10)
        waiting = searching(worker, 5)
        threading.Timer(0.1, proceed.set).start()
        await asyncio.to_thread(worker.close)
        assert await running.result()
        for call in (waiting.result, lambda: worker.compute(len, "a"), lambda: worker.join(list, ["a"])):
            with pytest.raises(JobError, match="the server is stopping"):
                await call()
        with pytest.raises(JobError, match="the server is stopping"):
            searching(worker, 3)

    run(test)


def test_a_search_that_does_not_end_is_stopped_when_the_worker_closes():
    async def test(worker):
        job = searching(worker, 10**5)
        while not worker.num_running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(worker.close, 0.2)
        with pytest.raises(JobError, match="the server is stopping"):
            await job.result()

    run(test)


def test_texts_are_joined_and_a_long_list_does_not_hold_others():
    sizes, order = [], []

    def embed(texts):
        sizes.append(len(texts))
        time.sleep(0.02)
        if "bad" in texts:
            raise DataError("no")
        return [text.upper() for text in texts]

    async def call(worker, name, texts):
        result = await worker.join(embed, texts)
        order.append(name)
        return result

    async def test(worker):
        texts = [f"t{number}" for number in range(300)]
        calls = [call(worker, "long", texts), *(call(worker, "short", [f"s{number}"]) for number in range(20))]
        long, *short = await asyncio.gather(*calls)
        assert long == [text.upper() for text in texts]
        assert short == [[f"S{number}"] for number in range(20)]
        assert order[-1] == "long"
        assert max(sizes) <= 64
        assert len(sizes) < 10
        with pytest.raises(JobError, match=r"^no$"):
            await worker.join(embed, ["bad"])

    run(test)


def test_texts_of_clients_that_have_gone_hold_no_others():
    proceed, sizes = threading.Event(), []

    def embed(texts):
        sizes.append(len(texts))
        return [text.upper() for text in texts]

    async def test(worker):
        running = asyncio.ensure_future(worker.compute(proceed.wait, 10))
        gone = [asyncio.ensure_future(worker.join(embed, ["gone"] * 64)) for _ in range(3)]
        waiting = asyncio.ensure_future(worker.join(embed, ["a"]))
        gone.append(asyncio.ensure_future(worker.join(embed, ["gone"] * 64)))
        while len(worker._texts) < 5:
            await asyncio.sleep(0.01)
        for each in gone:
            each.cancel()
        await asyncio.sleep(0.01)
        proceed.set()
        assert await running
        assert await asyncio.wait_for(waiting, 10) == ["A"]
        assert await asyncio.wait_for(worker.join(embed, ["b"]), 10) == ["B"]
        assert sizes == [1, 1]

    run(test)


def test_errors_of_requests_and_of_the_server():
    missing, invalid, mixed = map(
        public_error, (MissingPackageError("run: pip install x"), DataError("text is blank"), BackendError("devices"))
    )
    assert (missing.status, str(missing)) == (501, "run: pip install x")
    assert (invalid.status, str(invalid)) == (400, "text is blank")
    assert mixed.status == 500
    assert "devices" not in str(mixed)
