"""In-step loads of KVSwapConnector on a device where copies are late: a layer reads what is loaded
only if the model's stream has waited for it."""

from __future__ import annotations

import pytest
import vllm_engine  # noqa: F401  skips where vLLM's tests do not run
from queued_devices import run_on_device

SCRIPT = """
    import pathlib, random, sys, tempfile

    import torch
    from vllm.config import CUDAGraphMode
    from vllm_serving import expected_tokens, serving

    runner, graph, waits = sys.argv[1:]
    prompts = {f"{n}": random.Random(n).choices(range(512), k=60 + 20 * n) for n in range(3)}
    new = {name: [*one, *random.Random(int(name) + 9).choices(range(512), k=30)]
           for name, one in prompts.items()}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(pathlib.Path(folder), runner=runner, device="fakeaccel:0") as engine,
    ):
        engine.serve(prompts)
        engine.forget_gpu()
        made, connector = engine.runner, engine.runner.connector
        part, start, held = connector.connector_worker, connector.start_load_kv, []
        made.graph = CUDAGraphMode[graph]

        def start_held(*arguments, **options):
            # No copy begins before all layers are launched.
            held.append(accelerator.hold_copies())
            start(*arguments, **options)
            if part._in_step_job is not None:
                print("groups", part._in_step_job.layer_groups)
            else:
                held.pop().release()

        def let_them_go():
            if held:
                if waits == "none":
                    torch.accelerator.current_stream().synchronize()
                held.pop().release()

        connector.start_load_kv, made.when_launched = start_held, let_them_go
        submit = part.worker.submit_step_loads

        class Noted:
            def __init__(self, *loads):
                self.job = submit(*loads)
                self.layer_groups = self.job.layer_groups

            def wait(self, layer_group):
                print("waits for", layer_group)
                if waits == "all":
                    self.job.wait(layer_group=layer_group)

        part.worker.submit_step_loads = Noted
        engine.serve({f"again {name}": one for name, one in new.items()})
        right = [engine.tokens[f"again {name}"] == expected_tokens(one, 4)
                 for name, one in new.items()]
        print("right", *right)
"""


WAITS = {
    "NONE": [f"waits for {group}" for group in range(4)],
    "PIECEWISE": [f"waits for {group}" for group in range(4)],
    "FULL": ["waits for None"],  # a replay calls no hooks
}


def said_by(*arguments: str) -> list[str]:
    """What the script prints, sorted, without the words of vLLM."""
    lines = run_on_device(SCRIPT, *arguments).splitlines()
    return sorted(line for line in lines if line.startswith(("groups", "waits", "right")))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("graph", WAITS)
def test_each_layer_waits_for_its_load_or_the_step_for_all(runner, graph):
    said = said_by(runner, graph, "all")
    assert said == ["groups 4", "right True True True", *WAITS[graph]]


@pytest.mark.parametrize("graph", ["PIECEWISE", "FULL"])
def test_without_the_waits_a_step_reads_old_bytes(graph):
    """The control of the test above."""
    said = said_by("v2", graph, "none")
    assert said == ["groups 4", "right False False False", *WAITS[graph]]


# Page i is full of i + 1, and its load goes to block 9 + i.
LOADS = """
    import sys

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm_engine import CPULoadStoreSpec, KVSwapWorker, base, caches

    from torch_kvswap.integrations.vllm.options import SpecOptions

    cache = caches([[(0, 64), (1, 64)]], [64, 64], "fakeaccel:0")
    layers = [one.tensor for one in cache.tensors]
    worker = KVSwapWorker(cache, 3, 1, SpecOptions(1))
    for page in range(3):
        worker._pool.pages[page] = page + 1
    for layer in layers:
        layer.zero_()
    torch.accelerator.synchronize()
    loads = {
        page: TransferJob(f"{page}", CPULoadStoreSpec([page]), base.GPULoadStoreSpec([9 + page], [1], [0]))
        for page in range(3)
    }
"""
ORDER = """
    steps = [loads] if sys.argv[1] == "joined" else [{page: one} for page, one in loads.items()]
    stream = torch.Stream("fakeaccel:0")
    with accelerator.hold_copies():
        first, *_ = [worker.submit_step_loads(one, 2) for one in steps]
        first.wait(stream, layer_group=0)
        with stream:
            seen = [layer[9:12, 0].clone() for layer in layers]
        # The ids, the first layer of each block, and the ids again.
        accelerator.let_copies(1 + len(steps[0]) + 1)
        stream.synchronize()
    worker.wait(set(loads))
    for of_layer in (*seen, *(layer[9:12, 0] for layer in layers)):
        print("layer", *of_layer.tolist())
    print("ended", [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()])
    worker.shutdown()
"""


@pytest.mark.parametrize(
    ("how", "first_layer", "sizes"),
    [
        ("joined", "layer 1 2 3", [3 * 128, None, None]),
        ("apart", "layer 1 0 0", [128] * 3),  # the control
    ],
)
def test_a_layer_of_all_loads_of_a_step_lands_before_the_next_layer_of_any(how, first_layer, sizes):
    *layers, ended = run_on_device(LOADS + ORDER, how).splitlines()[-5:]
    assert layers == [first_layer, "layer 0 0 0", "layer 1 2 3", "layer 1 2 3"]
    assert ended == f"ended {[(number, True, size) for number, size in enumerate(sizes)]}"


HEADS = """
    worker._heads = int(sys.argv[1])
    stream = torch.Stream("fakeaccel:0")
    with stream, accelerator.hold_copies():
        job = worker.submit_step_loads({0: loads[0]}, 2)
        print("waits by layer:", job is not None)
        seen = [layer[9].clone() for layer in layers]
        if job is not None:
            stream.synchronize()  # before the copies
    stream.synchronize()
    print("seen", *(int(one.sum()) for one in seen))
    worker.wait({0})
    print("ended", [one.success for one in worker.get_finished()])
    worker.shutdown()
"""


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ("2", ["waits by layer: False", "seen 64 64"]),
        ("1", ["waits by layer: True", "seen 0 0"]),  # the control: nobody has waited
    ],
)
def test_with_several_heads_in_canonical_rows_the_step_waits_for_its_whole_loads(heads, said):
    assert run_on_device(LOADS + HEADS, heads).splitlines()[-3:] == [*said, "ended [True]"]
