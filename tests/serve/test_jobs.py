"""Every job of a worker ends with a result or an error."""

from __future__ import annotations

import asyncio
import threading

import pytest

from xformer.serve.jobs import Job, JobError, Worker


class ExpiringJob(Job):
    """A job whose time ends right after it is first looked at."""

    num_looks = 0

    @property
    def is_stopped(self):
        self.num_looks += 1
        return self.num_looks > 1


def finish(jobs):
    for job in jobs:
        job.finish(job.request)


def test_a_job_whose_time_ends_while_it_is_scheduled_gets_an_error():
    async def run():
        worker = Worker("test")
        job = ExpiringJob(finish, 1)
        worker.submit(job)
        with pytest.raises(JobError, match="took too long"):
            await asyncio.wait_for(job.next_event(), 10)
        worker.close()

    asyncio.run(run())


def test_jobs_that_wait_get_an_error_when_the_worker_is_closed():
    async def run():
        worker, started, proceed = Worker("test"), threading.Event(), threading.Event()

        def work(jobs):
            started.set()
            proceed.wait(10)
            finish(jobs)

        running, waiting = Job(work, 1), Job(finish, 2)
        worker.submit(running)
        worker.submit(waiting)
        await asyncio.to_thread(started.wait, 10)
        threading.Timer(0.05, proceed.set).start()
        await asyncio.to_thread(worker.close)
        with pytest.raises(JobError, match="the server is stopping"):
            await asyncio.wait_for(waiting.next_event(), 10)
        with pytest.raises(JobError, match="the server is stopping"):
            worker.submit(Job(finish, 3))

    asyncio.run(run())
