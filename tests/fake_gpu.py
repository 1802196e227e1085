"""
A mock GPU, on which test_all.py runs every script that can use a GPU.

PyTorch's fake tensors have a shape, a dtype and a device, but no values. Here they are on "cuda",
though this machine has none. They reject an operation on two devices, and x[mask], whose shape only
the device would know. MockGPU rejects what else a real GPU would, and counts how often the host
waits for it.
"""
import contextlib
import gc
import os
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import bench
import common
import eval_gsm8k
import model
import muon
import sample
import train
from model import RecurrentLM
from helpers import ROOT, run_script, slow_attention, small

# A build of torch for CPUs needs this for tensors on "cuda": a current device, and generators.
DRIVER = """
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace at {
struct Numbers : CPUGeneratorImpl { Numbers(int i) { device_ = Device(kCUDA, i < 0 ? 0 : i); } };
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Generator getNewGenerator(DeviceIndex i) const override { return make_generator<Numbers>(i); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<kCUDA>)
}
"""


def write_driver(folder):
    """Write driver.cpp. Returns the command that makes driver.so, to be loaded before torch."""
    (folder / "driver.cpp").write_text(DRIVER)
    root = os.path.dirname(torch.__file__)
    return (f"g++ -std=c++20 -shared -fPIC -I{root}/include driver.cpp -o driver.so -L{root}/lib "
            f"-Wl,-rpath,{root}/lib -lc10 -ltorch_cpu")


class MockGPU(TorchDispatchMode):
    """
    Rejects a generator that is on another device than its tensors, a read of a copy that may not
    have arrived yet, and a wait for the device in a step that is being recorded. Chooses attention
    kernels as an H100 would.
    """
    waits = Counter()  # {"script.function": how often the host has waited there for the device}
    recording = False
    recorded = 0  # CUDA graphs
    scripts = {path.stem for path in ROOT.glob("*.py")}

    def __init__(self):
        super().__init__()
        self.under_way = []  # copies to the host that no event was awaited for

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        assert not any(arg is copy for copy in self.under_way for arg in args), "read too early"
        if generator := kwargs.get("generator"):
            kwargs["generator"] = None  # fake tensors take none
        name = op.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
            return self.read(args[0])
        if name == "_pin_memory":
            out = args[0].clone()
            out.pinned = True
            return out
        out = op(*args, **kwargs)
        on = {t.device.type for t in tensors((args, kwargs, out)).values()}
        if generator and on != {generator.device.type}:
            raise RuntimeError(f"{name}: a generator of {generator.device} for tensors on {on}")
        if len(on) > 1:  # a copy between host and device
            if not kwargs.get("non_blocking"):
                self.wait()
            elif args[0].is_cuda:
                self.under_way.append(out)
            elif not hasattr(args[0], "pinned"):
                self.wait()
        return out

    def read(self, t, shape=()):
        """Values for a read on the host: 1 for whole numbers, which may be counts, else 0."""
        if t.is_cuda:
            self.wait()
        return np.full(shape, not t.is_floating_point(), int).tolist()

    def wait(self):
        """Count a wait for the device under the function of our scripts that caused it."""
        assert not self.recording, "the host waits in a step that is being recorded"
        frame = sys._getframe()
        while frame.f_back and frame.f_globals["__name__"] not in self.scripts:
            frame = frame.f_back
        self.waits[f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"] += 1

    def kernel(self, q, k, v, mask, dropout, **_):
        """Replaces torch._fused_sdp_choice. Only some kernels take float32, or a mask."""
        if q.dtype == torch.float32:
            same = q.shape[1] == k.shape[1] == v.shape[1]
            return SDPBackend.EFFICIENT_ATTENTION.value if same else SDPBackend.MATH.value
        if torch.backends.cuda.cudnn_sdp_enabled():
            return SDPBackend.CUDNN_ATTENTION.value
        if mask is None:
            return SDPBackend.FLASH_ATTENTION.value
        return SDPBackend.EFFICIENT_ATTENTION.value

    @contextlib.contextmanager
    def record(self, graph, pool):
        """Replaces torch.cuda.graph. A graph's replay() does nothing here: see Graph."""
        self.recording = True
        yield
        self.recording = False
        self.recorded += 1

    def synchronize(self):
        """Replaces the method of torch.cuda.Event."""
        self.wait()
        self.under_way.clear()


class Graph(TorchDispatchMode):
    """
    A CUDA graph of real tensors on a CPU. As on a GPU, recording changes no value; replay() repeats
    the operations on the same memory, whatever Python would do by now; and graphs share the memory
    that they allocate, so each spoils that of the others.
    """
    graphs = []

    def __init__(self):
        super().__init__()
        self.calls = []   # each operation, and which of its outputs are new memory
        self.before = {}  # {address: (memory, a copy of it before the recording wrote to it)}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(op._schema.arguments, args):
            if argument.alias_info and argument.alias_info.is_write:
                memory = value.untyped_storage()
                self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))
        out = op(*args, **kwargs)
        old = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs)).values()}
        new = {i: t for i, t in tensors(out).items() if t.untyped_storage().data_ptr() not in old}
        self.calls.append((op, args, kwargs, new))
        return out

    def pool(self):
        return "shared"

    def replay(self):
        for graph in self.graphs:
            for *_, new in graph.calls:
                for t in new.values():
                    t.untyped_storage().fill_(255)  # NaN, or -1
        for op, args, kwargs, new in self.calls:
            out = tensors(op(*args, **kwargs))
            for i, t in new.items():
                t.copy_(out[i])


def tensors(tree):
    """The tensors in a tree of arguments or outputs, {index: tensor}."""
    return {i: t for i, t in enumerate(tree_leaves(tree)) if isinstance(t, torch.Tensor)}


def record_on_a_cpu(monkeypatch):
    """Replace CUDA graphs with Graph. Returns a list to which each recorded one is added."""
    @contextlib.contextmanager
    def record(graph, pool):
        assert not gc.isenabled(), "what the garbage collector frees would invalidate the graph"
        with graph:
            yield
        for memory, copy in graph.before.values():
            memory.copy_(copy)
        Graph.graphs.append(graph)

    monkeypatch.setattr(Graph, "graphs", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock)
    attention = gpu_layout(F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return Graph.graphs


def gpu_layout(attention):
    """Wrap SDPA so that its output has the memory layout (B, T, H, D) of a GPU's fused kernels."""
    def call(*args, **flags):
        return attention(*args, **flags).transpose(1, 2).contiguous().transpose(1, 2)

    return call


def fake_tensors(gpu):
    """Replace what fake tensors, or a torch for CPUs, cannot do. Returns a FakeTensorMode."""
    def load(path, device="cpu"):
        with _disable_current_modes():
            tensors = load_file(path)
        return {name: torch.empty_like(t, device=device) for name, t in tensors.items()}

    def save(tensors, path, *metadata):
        with _disable_current_modes():
            zeros = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}
            save_file(zeros, path, *metadata)

    fake_tensor.FakeTensorMode.avoid_device_init = True
    fake_tensor.CONSTANT_NUMEL_LIMIT = 0  # no exception for tensors of one number
    fake_tensor.FakeTensor.tolist = lambda t: gpu.read(t, t.shape)
    model.load_file = train.load_file = load
    model.save_file = train.save_file = save
    RecurrentLM.to = lambda self, *to: self.fill(
        {name: t.to(*to) for name, t in self.state_dict().items()}) or self
    torch.compile = lambda function, **how: function

    def returns(value):
        return lambda *args: value

    torch.cuda.is_available = returns(True)
    torch.cuda.get_device_name = returns("H100")
    torch.cuda.get_device_properties = returns(
        SimpleNamespace(major=9, total_memory=80_000_000_000))
    torch.cuda.synchronize = returns(None)
    torch.cuda.reset_peak_memory_stats = returns(None)
    torch.cuda.set_device = torch.accelerator.set_device_index
    torch.cuda.CUDAGraph = mock.MagicMock
    torch.cuda.graph = gpu.record
    torch.cuda.Event = lambda: mock.Mock(synchronize=gpu.synchronize)
    torch._fused_sdp_choice = gpu.kernel
    F.scaled_dot_product_attention = gpu_layout(F.scaled_dot_product_attention)
    bench.DEVICE = sample.DEVICE = eval_gsm8k.DEVICE = "cuda:0"
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def run_training(gpu, corpus):
    """Run train.py as rank 0 of 8, whose messages go nowhere, and as the only rank."""
    original_log = train.Run.log
    waits = []  # of each update

    def log(run, entry):
        if "norm" in entry:  # the line of an update
            waits.append(dict(gpu.waits))
        original_log(run, entry)
        gpu.waits.clear()

    train.Run.log = log
    for world, optimizer in (8, "muon"), (1, "adamw*"):  # run_scripts() goes on as the only rank
        train.WORLD = world
        common.dist = train.dist = muon.dist = mock.MagicMock()
        train.dist.rendezvous = lambda _: iter([[dist.HashStore()]])
        train.dist.group.WORLD = "all ranks"
        train.dist.broadcast_object_list = lambda objects: None
        flags = ("--updates=2 --batch_size=8 --context=39 --n_embd=96 --n_head=2 --n_ffn=240 "
                 "--n_prelude=1 --n_core=1 --n_coda=1 --mean_recurrence=2 --backprop_depth=1 "
                 "--recurrence_sampler=fixed --curriculum_warmup=0 --compile=false --eval_rows=8 "
                 "--eval_recurrences=1")
        run_script("train", f"--data={corpus}/task", f"--out_dir=of{world}",
                   f"--optimizer={optimizer}", *flags.split())
    assert waits == 4 * [{"train.sum_gradients": 1}], waits


def run_decoding(gpu):
    """Run every way of decoding, eager and recorded, twice. Each round must wait once."""
    llm = small(1, n_core=1, context=64).to("cuda", torch.bfloat16)

    def second_row_ends(row, token):
        return row == 1

    for decoder in (sample.Decoder(llm), sample.Decoder(llm, compile=True)):
        decoder.chunk = 8
        for options in {}, {"temperature": 0.8}:
            for recorded in 2 * decoder.recording, 0:  # 2 rows, then one
                before = gpu.recorded
                for row, _ in decoder.generate([[1, 2, 3], [4]], 5, 2, second_row_ends, **options):
                    if row == 0:  # all rounds but the first have only this row
                        waits = dict(gpu.waits)
                        gpu.waits.clear()
                assert waits == {"sample.generate": 1}, waits
                assert gpu.recorded - before == recorded, "recorded again"


def check_the_mock():
    """Make deliberate mistakes that the mock has to reject, or the other checks mean little."""
    llm = small().to("cuda")
    idx = torch.ones(1, 8, dtype=torch.int64, device="cuda")
    for mistake, words in (
        (lambda: llm(idx.cpu()), "two devices"),
        (lambda: idx.double().normal_(generator=torch.Generator()), "generator"),
        (lambda: idx[idx > 0], "nonzero"),  # a shape from values
    ):
        with pytest.raises(RuntimeError, match=words):
            mistake()


def check_attention():
    """As an H100 would choose them, no attention kernel is slow, with grouped heads of 64, too."""
    for dtype in (torch.float32, torch.bfloat16):
        assert not slow_attention(small(head_dim=64, context=128).to("cuda", dtype)), dtype


def run_scripts(corpus, folder):
    """Run every other script that uses a GPU, from its command line."""
    assert run_script("runs/gpu", "smollm2-135m-2-2-2", "shape") == "80\n"
    for command, words in (
            ("bench train --model=shape --steps=1+1 --batch_size=1 --context=8 --repeat=1 "
             "--compile=false", '"peak_mib": '),
            (f"bench decode --model={folder} --tokens=4 --steps=2 --repeat=1", '"r": 2')):
        said = run_script(*command.split())
        assert words in said.splitlines()[-1], said
    for command in (
            f"sample --model={folder} --tokens=3 --steps=2 --prompt=has --compile",
            f"eval_gsm8k --model={folder} --data={corpus}/test.jsonl --limit=2 --steps=2 "
            "--template=plain --max_new_tokens=3 --out=gsm8k.json",
            f"train --updates=0 --init_from=of1 --data={corpus}/task --context=39 --eval_rows=8 "
            "--batch_size=8 --out_dir=losses --compile=false"):
        run_script(*command.split())


def simulate(corpus, folder):
    """Run everything above. Then this process is of no other use: much of torch is replaced."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "hide real GPUs from the tests"
    gpu = MockGPU()
    with fake_tensors(gpu), gpu:
        run_training(gpu, corpus)
        run_decoding(gpu)
        check_the_mock()
        check_attention()
        run_scripts(corpus, folder)
