import subprocess
import sys


def test_doctor_reports_every_topic_and_leaves_cuda_alone():
    program = (
        "import torch; from torch_kvswap.cli import doctor; print(doctor.main([]));"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    topics = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert topics == [
        "library",
        "PyTorch",
        "CUDA driver",
        "GPUs",
        "CUDA kernels",
        "scattered copies",
        "0",
    ]
