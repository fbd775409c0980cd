"""Several vLLM engines at once on the same GPUs, each in a process; one works at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are set by a function, and no process more
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # that function is sent to the ranks
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork cannot use CUDA if its parent has
    "PYTHONHASHSEED": "0",  # a restarted engine names the same blocks alike
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Server:
    """A process that starts at once; ready() waits for it. Its words are in `log`."""

    def __init__(self, name: str, settings: Mapping[str, Any], log: Path) -> None:
        self.name, self.log = name, log
        answers, theirs = os.pipe()
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_server.py")), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                env=ENVIRONMENT | os.environ,
                text=True,
            )
        os.close(theirs)
        self._answers: IO[str] = os.fdopen(answers)
        self._say(settings)

    def ready(self) -> dict[str, Any]:
        return dict(self._hear()["ready"])

    def serve(self, **order: Any) -> dict[str, Any]:
        """`Engine.serve`."""
        self._say(order)
        return self._hear()

    def end(self) -> None:
        """As stop(), when all that it stored is in its tiers. Leaves no file in /dev/shm."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._hear()
        self.stop()

    def stop(self) -> None:
        self._process.kill()  # it holds nothing that matters
        self._process.wait()

    def _say(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: _hear() says so

    def _hear(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            end = "".join(self.log.open(errors="replace").readlines()[-40:])
            raise SystemExit(f"the vLLM of {self.name} has died; {self.log} ends with\n{end}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def write_model(folder: Path, shape: Mapping[str, int], latent: bool = False) -> None:
    """The configuration of a Llama, or of a DeepSeek-V2 without experts if latent; its weights are
    random. shape: layers, heads, kv_heads, head_size, hidden, intermediate, vocabulary."""
    configuration = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_size"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": 1 << 17,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if latent:
        del configuration["head_dim"]
        configuration |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": shape["heads"],
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": shape["head_size"],
            "qk_rope_head_dim": 64,
            "v_head_dim": shape["head_size"],
            "first_k_dense_replace": shape["layers"],
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": shape["intermediate"],
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
