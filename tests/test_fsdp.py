"""Sharded parameters (FSDP2's DTensors) on two processes: the same training as on one."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from anon_optim import Anon, Guard

OPTIONS = [
    {"gamma": 1.1, "foreach": False},
    {"gamma": 1.5, "foreach": False, "beta3": None, "growth": 1.25},
    {"gamma": 0.5, "foreach": True, "weight_decay": 0.1},
    {"gamma": 1.5, "foreach": True, "guard": Guard(brake=False, follow=True)},
    {"gamma": 1.0, "foreach": False, "guard": Guard(follow=True)},
    {"gamma": 1.0, "foreach": True, "beta3": None, "growth": 1.25},
    {"gamma": -0.5, "fused": True, "lr_scale": "tensor"},  # a kernel does not take shards: another path does
]


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 14), torch.nn.Tanh(), torch.nn.Linear(14, 3)).double()


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for t in range(steps):
        x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        x[:, :2] *= t > 2  # columns of the first layer that start late
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def worker(rank, port, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for options in OPTIONS:
        whole = model_of()
        train(whole, Anon(whole.parameters(), lr=0.01, **options), 10)
        sharded = model_of()
        fully_shard(sharded, mesh=mesh)
        optimizer = Anon(sharded.parameters(), lr=0.01, **options)
        train(sharded, optimizer, 10)
        for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-10, atol=1e-12)

        resumed = Anon(sharded.parameters(), lr=0.01, **options)
        set_optimizer_state_dict(sharded, resumed, get_optimizer_state_dict(sharded, optimizer))
        for p in sharded.parameters():
            for key, value in optimizer.state[p].items():
                torch.testing.assert_close(resumed.state[p][key], value, rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_as_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, 2), nprocs=2)
