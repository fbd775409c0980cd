"""Faults that users of other libraries have reported, and the tests that guard against them
here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# What went wrong, and where it was reported: the tests, as file and name without "test_".
PITFALLS = {
    "a store read blocks before they were written (vllm#45704, vllm#31341)": [
        "stream_order.a_store_waits_for_the_kernel_that_writes_its_block",
        "channel.a_store_starts_behind_what_the_current_stream_has_to_do",
    ],
    "a load overwrote blocks that kernels still read (vllm#47282)": [
        "stream_order.a_load_waits_for_the_kernel_that_reads_its_block",
    ],
    "a load landed before an earlier step's zeroing (vllm#50696)": [
        "stream_order.a_load_waits_for_the_kernel_that_zeroes_its_block",
    ],
    "any source order let the engine read device memory early (vllm#39306)": [
        "batch.any_source_order_is_for_host_sources_only",
        "swap_blocks_batch.every_kind_of_stream_orders_the_copies_after_its_work",
    ],
    "two GPU blocks went into one host page (TensorRT-LLM#8813, #9056)": [
        "submit.a_wrong_request_is_refused_with_what_is_wrong",
        "channel.two_jobs_of_which_one_writes_what_both_have_run_in_order",
        "scheduler.no_two_jobs_that_write_the_same_are_joined",
    ],
    "a GPU slot passed for the host slot of that number (TensorRT-LLM#15272)": [
        "channel.jobs_that_share_nothing_wait_for_nothing",
    ],
    "a descriptor buffer was overwritten while the GPU read it (TensorRT-LLM#15546)": [
        "stream_order.ids_that_change_right_after_the_call_change_nothing",
        "queue.ids_of_queued_jobs_may_change_after_the_call",
        "swap_blocks_batch.the_address_tensors_may_change_right_after_the_call",
    ],
    "a pageable source changed before the copy ran (vllm-xpu-kernels#157, #265)": [
        "swap_blocks_batch.a_pageable_source_may_change_right_after_the_call",
        "batch.after_an_error_pageable_memory_is_waited_for",
    ],
    "a temporary on a side stream went to another request (ROCm/ATOM#2053)": [
        "stream_order.jobs_take_no_gpu_memory",
    ],
    "blocks were reused while their store was in flight (vllm#29870)": [
        "stream_order.the_host_waits_for_a_job_that_has_not_started",
        "scheduler.the_host_waits_for_queued_jobs_as_long_as_it_is_told_to",
    ],
    "a tiny cache under forced eviction (sglang#20611)": [
        "fuzz.random_jobs_of_several_threads_on_the_cpu_leave_the_bytes_of_the_model",
        "fuzz.as_a_control_mistakes_are_found_on_the_simulated_driver",
    ],
    "the destination did not change at all (transformers)": [
        "handler.what_is_stored_comes_back_elsewhere_and_nothing_else_changes",
        "handler.random_jobs_do_what_plain_indexing_does",
    ],
    "a copy thread died and its jobs never ended (vllm#56032)": [
        "failures.a_call_that_fails_makes_one_failed_job_and_the_rest_goes_on",
        "failures.a_call_that_fails_for_a_queued_job_fails_that_job_only",
        "failures.a_worker_that_finds_the_device_lost_ends_all_jobs",
    ],
    "success was assumed, and another request's cache was served (vllm#39732, dynamo#15079)": [
        "job_table.a_load_of_a_page_that_was_not_stored_fails_until_it_is_stored",
        "job_table.failures_follow_the_data_through_stores_and_loads",
        "handler.waiting_for_failed_jobs_names_them",
    ],
    "aborting queued or running requests crashed (vllm#49118)": [
        "scheduler.a_cancelled_queued_job_ends_at_once_and_the_others_go_on",
        "scheduler.a_cancelled_running_job_ends_with_its_copy",
        "scheduler.a_job_that_has_ended_cannot_be_cancelled",
    ],
    "tensors moved under the handler (vllm#45268)": [
        "rebind.a_tensor_that_has_moved_is_refused_until_it_is_rebound",
        "rebind.later_jobs_use_the_new_memory_and_leave_the_old_alone",
    ],
    "60 GB of host memory became 80 (vllm#46278, #56410, sglang#36562, pytorch#95823)": [
        "memory.touched_memory_is_resident_and_no_more_than_was_asked",
        "pool.pinning_commits_what_was_asked_and_no_more",
    ],
    "one large registration failed, and so did copies across two (vllm#51080, sglang#36798)": [
        "pinning.a_chunk_that_is_refused_is_tried_again_in_halves",
        "pinning.no_copy_runs_from_one_chunk_into_the_next",
        "pinning.copies_across_seams_are_right_on_a_gpu",
    ],
    "a refused registration left an error for the next kernel (maru#64)": [
        "pool.a_refused_registration_leaves_no_error_for_the_next_kernel",
        "registration.each_piece_is_registered_by_itself_and_the_driver_is_asked",
    ],
    "registration failed in a loaded process (sglang#39744)": [
        "pool.without_pinning_there_are_pageable_pages_and_one_warning",
        "pinning.what_was_pinned_goes_again_when_the_rest_is_refused",
    ],
    "a minute to pin at start-up, or never (vllm#54578, #42632, TensorRT-LLM#15430)": [
        "pinning.pages_are_ready_from_the_front",
        "pinning.a_job_may_use_what_is_ready_and_no_more",
    ],
    "killed processes filled /dev/shm (vllm#51579)": [
        "shared.a_killed_process_leaves_nothing",
    ],
    "memory on the wrong NUMA node (pytorch#160420, dynamo#3700)": [
        "memory.the_node_of_the_gpu_is_found_by_its_place_on_the_bus",
        "memory.memory_is_placed_on_a_node_that_there_is",
    ],
}


def found(name: str) -> Path:
    """The file of tests with this name, in whatever folder."""
    (path,) = Path(__file__).parents[1].rglob(f"test_{name}.py")
    return path


@pytest.mark.parametrize("tests", PITFALLS.values(), ids=PITFALLS)
def test_each_pitfall_has_its_tests(tests: list[str]) -> None:
    for test in tests:
        file, name = test.split(".")
        tree = ast.parse(found(file).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert f"test_{name}" in functions, f"test_{file}.py has no test_{name}"
