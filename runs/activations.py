"""
Count what --activation_budget of train.py keeps of a compiled recurrence and what it computes
again, or time an update at a budget. Both run on a CPU.

    PYTHONPATH=. python runs/activations.py count                 # of compiled graphs, 10 minutes
    PYTHONPATH=. python runs/activations.py time 0.5              # an update at this budget
    PYTHONPATH=. python runs/activations.py time 1.0 --recompute

count: bytes that a compiled recurrence keeps for its backward pass, a layer and token, and the
matrix products and attention of the backward pass, in units of the forward pass's. time: CPU
seconds of an update at (0, 8) of a (1,4,1) model in float32, and the peak of the process's memory.
"""
import argparse
import functools
import re
import statistics
import time

import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from common import opening
from model import Config, RecurrentLM
from train import BUDGETS

T = 1024
SHAPES = {
    "TinyLlama (4,8,4)": Config(4096, 512, 8, 1, 1408, 1, 8, 1),
    "Llama-3.2-1B (4,6,4)": Config(4096, 512, 8, 2, 2048, 1, 6, 1),
    "Qwen3-0.6B (4,8,4)": Config(4096, 256, 4, 2, 768, 1, 8, 1, head_dim=128, head_norm=True),
}


def work(graph):
    """(FLOPs of the products, passes over all pairs of tokens) of a graph."""
    products = pairs = 0
    for node in graph.nodes:
        name = str(node.target)
        if "aten" in name and "mm" in name:
            (rows, inner), (_, columns) = (t.meta["val"].shape for t in node.args[-2:])
            products += 2 * rows * inner * columns
        if "attention" in name and "aten" in name:
            pairs += 5 if "backward" in name else 2
    return products, pairs


def count(config, budget):
    """(bytes kept, products of the backward pass, its attention), see the top."""
    torch.compiler.reset()
    functorch_config.activation_memory_budget = budget
    model = RecurrentLM(config)
    model.init_weights(0)
    model.bfloat16()
    s, e = torch.randn(2, 1, T, config.n_embd)
    rope = model.rope(T)
    own = {t.untyped_storage().data_ptr() for t in (s, e, *rope, *model.parameters())}
    kept = {}
    graphs = []

    def note(graph, inputs):
        graphs.append(work(graph.graph))
        return make_boxed_func(graph.forward)

    def keep(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=note,
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    core = torch.compile(model.run_core, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = core(s.requires_grad_(), e.requires_grad_(), rope)
    out.sum().backward()
    (products, pairs), (its_products, its_pairs) = graphs
    return sum(kept.values()) / T / config.n_core, its_products / products, its_pairs / pairs


def measure(budget, recompute):
    """Median, least and most CPU seconds of an update, and GB of the process at its peak."""
    torch.set_num_threads(1)
    functorch_config.activation_memory_budget = budget
    model = RecurrentLM(Config(4096, 512, 8, 2, 1408, 1, 4, 1))
    model.init_weights(0)
    model.compile_parts()
    idx = torch.randint(4096, (2, 513))

    def update():
        model(idx[:, :-1], idx[:, 1:], (0, 8), recompute=recompute)[1].backward()
        model.zero_grad()

    update()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak begins anew, without that of compiling
    seconds = []
    for _ in range(3):
        began = time.process_time()
        update()
        seconds.append(time.process_time() - began)
    peak = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())
    return statistics.median(seconds), min(seconds), max(seconds), int(peak[1]) / 1e6


def main():
    parser = argparse.ArgumentParser(description=opening(__doc__, 3),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("count")
    timed = commands.add_parser("time")
    timed.add_argument("budget", type=float)
    timed.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    if args.command == "time":
        middle, least, most, peak = measure(args.budget, args.recompute)
        print(f"{middle:.2f} CPU seconds ({least:.2f}-{most:.2f}), {peak:.3f} GB at the peak")
        return
    for name, config in SHAPES.items():
        for budget in sorted(BUDGETS, reverse=True):
            kept, products, attention = count(config, budget)
            print(f"{name}, budget {budget}: {kept:,.0f} bytes, products {products:.2f}, attention "
                  f"{attention:.1f}", flush=True)


if __name__ == "__main__":
    main()
