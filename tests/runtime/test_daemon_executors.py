"""Executors with daemon threads: order, number of threads, shutdown, and threads of a forgotten executor."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
from tests.kit.managers import wait_for

from skerry.runtime.daemon_executors import BackgroundThreads, wait_for_jobs


def test_one_thread_runs_jobs_in_order() -> None:
    done: list[int] = []
    with BackgroundThreads(1, "one") as pool:
        jobs = [pool.submit(done.append, number) for number in range(100)]
    assert done == list(range(100))
    assert all(job.done() for job in jobs)


def test_jobs_run_at_once_up_to_the_number_of_threads() -> None:
    together = threading.Barrier(3)
    with BackgroundThreads(3, "three") as pool:
        jobs = [pool.submit(together.wait, 10) for _ in range(6)]
    assert sorted(job.result() for job in jobs) == [0, 0, 1, 1, 2, 2]


def test_threads_are_daemons() -> None:
    with BackgroundThreads(1, "daemon") as pool:
        assert pool.submit(lambda: threading.current_thread().daemon).result()


def test_error_of_a_job_is_raised_by_its_result() -> None:
    def fail() -> None:
        raise SystemExit(3)

    with BackgroundThreads(1, "errors") as pool:
        failed, after = pool.submit(fail), pool.submit(int)
        with pytest.raises(SystemExit):
            failed.result()
        assert after.result() == 0


def test_shutdown_cancels_waiting_jobs_only() -> None:
    started, end = threading.Event(), threading.Event()

    def run() -> str:
        started.set()
        end.wait()
        return "done"

    pool = BackgroundThreads(1, "cancelled")
    running, waiting = pool.submit(run), pool.submit(run)
    assert started.wait(300)
    pool.shutdown(wait=False, cancel_futures=True)
    end.set()
    pool.shutdown()
    assert running.result() == "done"
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(run)


def test_forgotten_executor_ends_its_threads_after_its_jobs() -> None:
    end = threading.Event()
    pool = BackgroundThreads(2, "forgotten")
    jobs = [pool.submit(end.wait) for _ in range(3)]
    del pool
    end.set()
    assert all(job.result(300) for job in jobs)
    wait_for(lambda: not any(thread.name.startswith("forgotten") for thread in threading.enumerate()))


def test_wait_for_jobs_is_limited() -> None:
    end = threading.Event()
    with BackgroundThreads(1, "limited") as pool:
        job = pool.submit(end.wait)
        wait_for_jobs(0.01)
        assert not job.done()
        end.set()
        wait_for_jobs(10)
        assert job.done()
