"""Threads submit until the handler is closed or its device is lost; test_fuzz.py has what they
copy before.
"""

from __future__ import annotations

import random
import threading

import pytest
from patience import PATIENCE, in_time
from simulated_driver import Driver, cache, simulated

from torch_kvswap import Job, OffloadHandler, Result

THREADS, BLOCKS = 5, 4  # of each thread, and as many pages
JOBS = 100  # at least, of each thread
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("end", "reason"), [("close", "the handler is closed"), ("lose", "the device is lost")]
)
@simulated
def test_jobs_of_many_threads_are_reported_once(
    driver: Driver, end: str, reason: str, seed: int
) -> None:
    layout, host = cache(driver, num_blocks=THREADS * BLOCKS, num_pages=THREADS * BLOCKS)
    driver.set_mode("threaded", seed)
    handler = OffloadHandler(layout, host)
    jobs: list[list[Job]] = [[] for _ in range(THREADS)]
    results: list[Result] = []
    refusals = [""] * THREADS

    def submit(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        own = range(number * BLOCKS, (number + 1) * BLOCKS)
        try:
            while True:
                blocks, pages = rng.sample(own, 2), rng.sample(own, 2)
                if rng.random() < 0.5:
                    job = handler.store(gpu_block_ids=blocks, page_ids=pages, after=())
                else:
                    job = handler.load(
                        page_ids=pages, gpu_block_ids=blocks, after=(), expedited=rng.random() < 0.5
                    )
                jobs[number].append(job)
                if rng.random() < 0.1:
                    handler.cancel(rng.choice(jobs[number][-8:]))
                if rng.random() < 0.1:
                    results.extend(handler.poll())
        except RuntimeError as error:
            refusals[number] = str(error)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    assert in_time(
        lambda: (
            min(map(len, jobs)) >= JOBS
            and {result.state for result in list(results)} >= {"done", "cancelled"}
        )
    ), "the threads do not go on"
    if end == "lose":
        driver.lose()
    else:
        threads += [threading.Thread(target=handler.close) for _ in range(2)]
        for thread in threads[THREADS:]:
            thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(reason in refusal for refusal in refusals), refusals
    handler.close()
    results += handler.poll()
    submitted = [job for of_thread in jobs for job in of_thread]
    assert sorted(result.job_id for result in results) == sorted(job.id for job in submitted)
    assert all(job.result for job in submitted)
    assert driver.live("streams") == 0
    assert end == "lose" or driver.live("events") == 0
