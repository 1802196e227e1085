"""
Count what --activation_budget of train.py keeps of a compiled recurrence and what it computes
again, or time an update at a budget. Both run on a CPU.

    python runs/activations.py count                 # from compiled graphs, 10 minutes
    python runs/activations.py time 0.5              # an update at this budget
    python runs/activations.py time 1.0 --recompute

For each budget, count prints the bytes per layer and token that a compiled recurrence keeps for its
backward pass, and the matrix products and the attention of the backward pass, as multiples of those
of the forward pass. time prints the CPU seconds of an update at (n, k) = (0, 8) of a (1,4,1) model
in float32, and the peak memory of the process.
"""
import functools
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Parser, cli, opening
from model import Config, RecurrentLM
from train import BUDGETS

T = 1024
PROPORTIONS = {  # of known models, at a smaller width
    "TinyLlama's proportions, 8 layers": Config(
        vocab_size=4096,
        n_embd=512,
        n_head=8,
        n_kv_head=1,
        n_ffn=1408,
        n_prelude=1,
        n_core=8,
        n_coda=1,
    ),
    "Llama-3.2-1B's proportions, 6 layers": Config(
        vocab_size=4096,
        n_embd=512,
        n_head=8,
        n_kv_head=2,
        n_ffn=2048,
        n_prelude=1,
        n_core=6,
        n_coda=1,
    ),
    "Qwen3-0.6B's proportions, 8 layers": Config(
        vocab_size=4096,
        n_embd=256,
        n_head=4,
        n_kv_head=2,
        n_ffn=768,
        n_prelude=1,
        n_core=8,
        n_coda=1,
        head_dim=128,
        head_norm=True,
    ),
}
TIMED = Config(
    vocab_size=4096,
    n_embd=512,
    n_head=8,
    n_kv_head=2,
    n_ffn=1408,
    n_prelude=1,
    n_core=4,
    n_coda=1,
)


def work(graph):
    """
    Return the FLOPs of a graph's matrix products, and how many products over all pairs of tokens
    its attention makes: 2 in a forward pass (scores, values), 5 in a backward pass.
    """
    flops = 0
    pairs = 0
    for node in graph.nodes:
        name = str(node.target)
        if "aten" in name and "mm" in name:
            left, right = node.args[-2:]
            rows, inner = left.meta["val"].shape
            _, columns = right.meta["val"].shape
            flops += 2 * rows * inner * columns
        if "aten" in name and "attention" in name:
            pairs += 5 if "backward" in name else 2
    return flops, pairs


def count(config, budget):
    """
    Compile a recurrence at a budget. Returns the bytes that it keeps per layer and token, and the
    matrix products and the attention of the backward pass, relative to the forward pass.
    """
    torch.compiler.reset()
    functorch_config.activation_memory_budget = budget
    model = RecurrentLM(config)
    model.init_weights(0)
    model.bfloat16()
    s, e = torch.randn(2, 1, T, config.n_embd)
    rope = model.rope(T)
    # Inputs and weights are in memory anyway, so they do not count as kept.
    not_counted = {t.untyped_storage().data_ptr() for t in (s, e, *rope, *model.parameters())}
    kept = {}    # {address: bytes}
    graphs = []  # work() of the forward and of the backward pass

    def count_work(graph, inputs):
        graphs.append(work(graph.graph))
        return make_boxed_func(graph.forward)

    def count_bytes(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    backend = aot_autograd(
        fw_compiler=count_work,
        bw_compiler=count_work,
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    core = torch.compile(model.run_core, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(count_bytes, lambda t: t):
        out = core(s.requires_grad_(), e.requires_grad_(), rope)
    out.sum().backward()
    forward, backward = graphs
    forward_flops, forward_pairs = forward
    backward_flops, backward_pairs = backward
    return (
        sum(kept.values()) / T / config.n_core,
        backward_flops / forward_flops,
        backward_pairs / forward_pairs,
    )


def measure(budget, recompute):
    """
    Time updates of the model TIMED. Returns the median, the lowest and the highest CPU seconds of
    3 updates, and the peak memory of the process in GB.
    """
    torch.set_num_threads(1)
    functorch_config.activation_memory_budget = budget
    model = RecurrentLM(TIMED)
    model.init_weights(0)
    model.compile_parts()
    idx = torch.randint(TIMED.vocab_size, (2, 513))

    def update():
        _, loss = model(idx[:, :-1], idx[:, 1:], (0, 8), recompute=recompute)
        loss.backward()
        model.zero_grad()

    update()
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak, without that of compiling
    seconds = []
    for _ in range(3):
        began = time.process_time()
        update()
        seconds.append(time.process_time() - began)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())  # in kB
    return statistics.median(seconds), min(seconds), max(seconds), int(peak[1]) / 1e6


def main():
    parser = Parser(description=opening(__doc__, 3))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("count", help="count bytes and FLOPs in compiled graphs")
    timed = commands.add_parser("time", help="time an update")
    timed.add_argument("budget", type=float, help="as --activation_budget of train.py")
    timed.add_argument("--recompute", action="store_true", help="as --recompute of train.py")
    args = parser.parse_args()
    if args.command == "time":
        median, lowest, highest, peak = measure(args.budget, args.recompute)
        print(f"{median:.2f} CPU seconds ({lowest:.2f}-{highest:.2f}), {peak:.3f} GB at the peak")
        return
    for name, config in PROPORTIONS.items():
        for budget in sorted(BUDGETS, reverse=True):
            kept, products, attention = count(config, budget)
            print(f"{name}, budget {budget}: {kept:,.0f} bytes, products {products:.2f}, attention "
                  f"{attention:.1f}", flush=True)


if __name__ == "__main__":
    cli(main)
