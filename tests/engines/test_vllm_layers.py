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
            if part._in_step:
                print("groups", *sorted({job.job.layer_groups for job in part.worker._open.values()}))
            else:
                held.pop().release()

        def let_them_go():
            if held:
                if waits == "none":
                    torch.accelerator.current_stream().synchronize()
                held.pop().release()

        connector.start_load_kv, made.when_launched = start_held, let_them_go
        let_wait = part.worker.let_wait

        def noted(jobs, group=None):
            print("waits for", group)
            if waits == "all":
                let_wait(jobs, group)

        part.worker.let_wait = noted
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
