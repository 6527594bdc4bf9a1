"""How much faster several small networks train at once, in one CUDA graph, than one after another.

    python -m benchmarks.together [--models resnet20 vit] [--at-once 1 2 4 8 16 32]

Random images of CIFAR-10's shape; the time of a step does not depend on what they show. Each line is one way to train n
networks; "times faster" is the time of n plain runs after another over the time of these n.
"""

import argparse
import json
import time
from datetime import date
from itertools import product
from pathlib import Path

import torch

from anon_lab.files import write_json
from anon_lab.run import Run
from anon_lab.settings import Settings, provenance
from anon_lab.steps import Steps
from anon_lab.tasks import _cifar10, _images, cifar10

STEPS = 60


def random_task(model: str) -> _images.InMemory:
    generator = torch.Generator().manual_seed(0)
    images = _images.Images(
        torch.randint(0, 256, (20_000, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (20_000,), generator=generator),
    )
    recipe, build = cifar10.RECIPES[model], cifar10.MODELS[model]
    return _images.InMemory("cifar10", recipe, build, _cifar10.NORMAL, images, None, images, pad=4, flip=True)


def seconds_a_step(
    task: _images.InMemory, optimizer: str, count: int, graph: bool, device: torch.device, stacked: bool = False
) -> float:
    """Of `count` runs in lockstep, after the capture and over half an epoch."""
    settings = [
        Settings("cifar10", optimizer, 1e-3, task.recipe, seed=seed, precision="bf16", graph=graph, stacked=stacked)
        for seed in range(count)
    ]
    steps = Steps([Run(each, task, device) for each in settings])
    for _ in range(10):
        steps.take()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(STEPS):
        steps.take()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet20", "vit"], choices=list(cifar10.MODELS))
    parser.add_argument("--optimizers", nargs="+", default=["Anon", "AdamW", "SGDM"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    rows = []
    print("model     optimizer  at once  graph  stacked  ms a step  times faster")
    for model in chosen.models:
        task = random_task(model)
        for optimizer in chosen.optimizers:
            plain = seconds_a_step(task, optimizer, 1, False, device)
            ways = [(1, False, False, plain)]
            for n, stacked in product(chosen.at_once, (False, True) if model == "resnet20" else (False,)):
                ways.append((n, True, stacked, seconds_a_step(task, optimizer, n, True, device, stacked)))
            for n, graph, stacked, seconds in ways:
                faster = n * plain / seconds
                row = {"model": model, "optimizer": optimizer, "at_once": n, "graph": graph, "stacked": stacked}
                rows.append({**row, "seconds_a_step": seconds, "times_faster": faster})
                way = f"{model:9} {optimizer:10} {n:7}  {graph!s:5}  {stacked!s:7}"
                print(f"{way}  {1000 * seconds:9.2f}  {faster:12.1f}", flush=True)
    if chosen.out:
        write_json(chosen.out, {"date": str(date.today()), **provenance(device), "rows": rows})
        print(json.dumps(provenance(device)))


if __name__ == "__main__":
    main()
