"""Checks the image from inside, without a network, as the user of replicas. Run in a container by test_container.py."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def main() -> None:
    """Exit with 1 and a traceback at the first failure."""
    assert os.getuid() != 0, "runs as root"
    assert Path(os.environ["HOME"]).is_dir(), "no home"
    assert os.access(os.environ["HOME"], os.W_OK), "home cannot be written"
    # No cloud SDK. google-auth is none: it only creates tokens, for replicas on AWS with a store in Google Cloud.
    assert importlib.util.find_spec("google.auth"), "google-auth is not in the image"
    for name in ("boto3", "botocore", "sagemaker", "google.cloud.aiplatform_v1", "docker", "pytest"):
        parent = name.partition(".")[0]
        assert not (importlib.util.find_spec(parent) and importlib.util.find_spec(name)), f"{name} is in the image"
    for program in ("gcc", "cc", "g++", "git"):
        assert shutil.which(program) is None, f"{program} is in the image"
    assert not list(Path("/root").rglob("*")) if os.access("/root", os.R_OK) else True
    packages = Path(site.getsitepackages()[0])
    assert list((packages / "torch/__pycache__").glob("*.pyc")), "no bytecode: every start would compile torch"
    assert not os.access(packages, os.W_OK), "a replica can change what it runs"
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    check_torch()
    print(f"ok: Python {sysconfig.get_python_version()}, uid {os.getuid()}, HOME {os.environ['HOME']}")


def check_torch() -> None:
    """Test parts of torch that need extra files: autograd, DDP over gloo, workers with shared memory, export."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torchft.local_sgd import DiLoCo

    from skerry.runtime.manager import ObjectStoreManager

    assert DiLoCo
    assert ObjectStoreManager
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model(torch.randn(4, 8)).sum().backward()
    data = DataLoader(TensorDataset(torch.arange(64)), batch_size=8, num_workers=2)
    assert sum(int(batch[0].sum()) for batch in data) == 64 * 63 // 2
    # The shared-memory manager is a program in torch/bin.
    torch.multiprocessing.set_sharing_strategy("file_system")
    assert sum(int(batch[0].sum()) for batch in data) == 64 * 63 // 2
    torch.export.export(model, (torch.randn(4, 8),))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(f"file://{folder}/meet",), nprocs=2)


def _rank(rank: int, meet: str) -> None:
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    # Both ranks are done before either takes the group down.
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
