"""
A GPU that is none, on which test_all.py plays every script that uses one.

PyTorch's fake tensors have a shape, a dtype and a device, but no numbers. They are on "cuda" here,
refuse tensors on two devices and x[mask], whose shape only the device knows, and need no GPU. Card
adds what else a GPU would refuse, and counts where the host waits for it.
"""
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import bench
import model
import muon
import sample
import train
from model import RecurrentLM
from helpers import ROOT, call, small, write_task

# What torch for CPUs lacks for tensors on "cuda": a current device, and generators.
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


def build_driver(folder):
    """Build a shared library there, to be loaded before torch is: LD_PRELOAD. Returns its path."""
    (folder / "driver.cpp").write_text(DRIVER)
    root = os.path.dirname(torch.__file__)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", "driver.cpp",
                    "-o", "driver.so", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-lc10",
                    "-ltorch_cpu"], check=True, cwd=folder)
    return str(folder / "driver.so")


class Card(TorchDispatchMode):
    """
    Refuses a generator of another device than its tensor's, and a wait in a step that is being
    recorded. waits: {"file.function": how often it has waited for the device}. Where it is known,
    it answers as an H100 does: which kernel attention takes, the words of a warning.
    """
    waits, recording, warning = Counter(), False, False
    ours = {path.stem for path in ROOT.glob("*.py")}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if generator := kwargs.get("generator"):
            kwargs["generator"] = None  # fake tensors take none
        name = op.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "multinomial"):
            return self.read(args[0])
        if name == "_pin_memory":
            out = args[0].clone()
            out.pinned = True
            return out
        out = op(*args, **kwargs)
        leaves = tree_leaves((args, kwargs, out))
        on = {t.device.type for t in leaves if isinstance(t, torch.Tensor)}
        if generator and on != {generator.device.type}:
            raise RuntimeError(f"{name}: a generator of {generator.device} for tensors on {on}")
        if len(on) > 1 and not (kwargs.get("non_blocking") and hasattr(args[0], "pinned")):
            self.wait()  # for a copy from one to the other
        return out

    def read(self, t, shape=()):
        """A tensor's numbers in this shape: 1 for what may be a count, else 0."""
        if t.is_cuda:
            self.wait()
        return np.full(shape, not t.is_floating_point(), int).tolist()

    def wait(self):
        assert not self.recording, "the host waits in a step that is being recorded"
        frame = sys._getframe()
        while frame.f_back and frame.f_globals["__name__"] not in self.ours:
            frame = frame.f_back
        self.waits[f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"] += 1
        if self.warning:
            warnings.warn("called a synchronizing CUDA operation")

    def warn(self, mode):
        """In place of torch.cuda.set_sync_debug_mode."""
        self.warning = mode == "warn"
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect "
                      "all synchronizing operations")

    def kernel(self, q, k, v, mask, dropout, **_):
        """In place of torch._fused_sdp_choice: cuDNN's takes no mask of float32's."""
        if q.dtype == torch.float32:
            same = q.shape[1] == k.shape[1] == v.shape[1]
            return SDPBackend.EFFICIENT_ATTENTION.value if same else SDPBackend.MATH.value
        if torch.backends.cuda.cudnn_sdp_enabled():
            return SDPBackend.CUDNN_ATTENTION.value
        if mask is None:
            return SDPBackend.FLASH_ATTENTION.value
        return SDPBackend.EFFICIENT_ATTENTION.value

    def record(self, step, state):
        """In place of torch.cuda.make_graphed_callables: a replay reads copies of the inputs."""
        assert state[0].device.index == torch.cuda.current_device(), "recorded on another device"
        self.recording = True
        step(*state)
        self.recording = False

        def replay(*inputs):
            return step(*(old.copy_(new) for old, new in zip(state, inputs, strict=True)))

        return replay


def without_numbers(card):
    """A FakeTensorMode, and stand-ins for what it and torch for CPUs cannot do."""
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
    fake_tensor.FakeTensor.tolist = lambda t: card.read(t, t.shape)
    model.load_file = train.load_file = load
    model.save_file = train.save_file = save
    RecurrentLM.to = lambda self, *to: self.fill(
        {name: t.to(*to) for name, t in self.state_dict().items()}) or self
    RecurrentLM.compile_parts = lambda self, **how: None
    for name, value in {"is_available": True, "device_count": 1, "get_device_name": "none",
                        "synchronize": None, "max_memory_allocated": 0,
                        "get_device_properties": SimpleNamespace(total_memory=8e10)}.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.set_device = torch.accelerator.set_device_index
    torch.cuda.current_device = torch.accelerator.current_device_index
    torch.cuda.make_graphed_callables = card.record
    torch.cuda.set_sync_debug_mode = card.warn
    torch._fused_sdp_choice = card.kernel
    sample.gc = mock.MagicMock()  # half a second for each step that is recorded
    bench.DEVICE = "cuda"
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def play_training(card, found, corpus):
    """train.py as the only rank, and as two of eight, whose collectives agree."""
    def count(*args, log=train.log):
        if "norm" in args[-1]:
            found["update"] = dict(card.waits)
        log(*args)
        card.waits.clear()

    def rank(rank, world, optimizer):
        train.RANK, train.WORLD = rank, world
        train.dist = muon.dist = mock.MagicMock(HashStore=dist.HashStore)
        train.dist.rendezvous = lambda _: iter([[dist.HashStore()]])
        train.dist.all_gather_object = lambda found, mine: found.__setitem__(0, mine)
        call("train", "--data", f"{corpus}/task", f"--out_dir={rank}of{world}",
             f"--optimizer={optimizer}", *"--updates=2 --batch_size=8 --context=39 --n_prelude=1 "
             "--n_core=1 --n_coda=1 --eval_rows=8 --mean_recurrence=2 --backprop_depth=1 "
             "--curriculum=none --eval_steps=1 --recurrence_sampler=fixed --compile=false".split())
        calls = [call for call in train.dist.mock_calls
                 if "init" not in call[0] and call[0] != "PrefixStore"]
        direct = [call for call in calls if call[0] in ("send", "recv") and call.args[1] in (0, 7)]
        return [str(call) for call in calls if call[0] not in ("send", "recv")], len(direct)

    train.log = count
    rank(0, 1, "adamw*")
    first, received = rank(0, 8, "muon")
    last, sent = rank(7, 8, "muon")
    assert first == last and "broadcast" in str(first) and "reduce" in str(first)
    assert received == sent > 0
    train.RANK, train.WORLD = 0, 1


def play_decoding(card, found):
    """Every way of decoding, eager and recorded."""
    llm, sample.COLUMNS = small(1, n_core=1, context=64).to("cuda", torch.bfloat16), 8
    for decoder in (sample.Decoder(llm), sample.Decoder(llm, compile=True)):
        for way, options in {"plain": {}, "sampled": {"temperature": 0.8},
                             "drafted": {"draft_steps": 1}}.items():
            events = decoder.generate([[1, 2, 3], [4]], 5, 2, lambda row, _: row, **options)
            for row, _, _ in events:
                if row == 0:  # row 1 has left
                    found[way] = dict(card.waits)
                    card.waits.clear()


def play_mistakes():
    """What has to be refused, or the rest says little. And what is compiled for a GPU."""
    llm = small().to("cuda")
    idx = torch.ones(1, 8, dtype=torch.int64, device="cuda")
    for mistake, words in ((lambda: llm(idx, idx.cpu()), "two devices"),
                           (lambda: idx.double().normal_(generator=torch.Generator()), "generator"),
                           (lambda: idx[idx > 0], "nonzero")):
        try:
            mistake()
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")
    sample.Decoder(llm, compile=True)
    with (_disable_current_modes(), torch.no_grad(),
          mock.patch.object(torch.cuda, "is_available", lambda: False)):
        counter = CompileCounter()
        linear = torch.compile(type(llm.head)(8, 8).to("meta"), dynamic=True, backend=counter)
        for rows in (9, 2):
            linear(torch.empty(rows, 8, device="meta"))
    assert counter.frame_count == 1, "as a batch shrinks, all is compiled once more"


def play_scripts(corpus, folder):
    """Every other script that uses a GPU, from its command line."""
    for command in (
            "bench train --steps=1+1 --batch_size=1 --context=8 --repeat=1 --no_compile",
            "bench decode --tokens=4 --steps=2 --repeat=1",
            f"sample --model={folder} --tokens=3 --steps=2 --prompt=has --device=cuda:1 --compile",
            f"eval_gsm8k --model={folder} --data={corpus}/test.jsonl --limit=2 --steps=2 "
            "--template=plain --max_new_tokens=3 --out=gsm8k.json",
            f"train --updates=0 --init_from=0of1 --data={corpus}/task --context=39 --eval_rows=8 "
            "--batch_size=8 --out_dir=losses --compile=false"):
        call(*command.split())
    torch.cuda.set_device(0)
    if find_spec("lm_eval"):
        import eval_lm
        eval_lm.TaskManager = functools.partial(eval_lm.TaskManager, include_defaults=False)
        for task in ("choice", "answer"):
            call("eval_lm", "--model", folder, "--steps=1,2", *write_task(task))


# Lines of gpu_check.py that need right numbers, which nothing has here.
NUMBERS = re.compile("error|same bits|CPU's|loss|SIGTERM|estimate")


def play_gpu_check(corpus):
    """runs/gpu_check.py, in which only lines that need right numbers may fail."""
    sys.path.append(str(ROOT / "runs"))
    os.makedirs("out/gpu_check")
    import gpu_check as check
    check.SMALL = check.LARGE = replace(check.SMALL, context=42, n_core=1)
    check.LONG = replace(check.LONG, context=32)
    check.DEPTHS, check.UPDATES, check.TOKENS = (1, 2), 1, 2
    check.seconds = lambda step, _: [step()] and 1.0
    check.tiny = lambda out, rows: shutil.copytree(corpus, out)
    check.run = lambda script, *flags, **_: call(
        script[:-3], *(str(flag).replace("24+8", "1+1").replace("=config", f"={ROOT}/config")
                       for flag in flags)).splitlines()[-1]
    with mock.patch.object(sys, "argv", ["gpu_check.py"]):
        check.main()
    for words in ("cached steps, torch.bfloat16", "gradient of rows of 32, compiled, recompute"):
        assert any(words in row["check"] for row in check.ROWS), words
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=1e9)
    check.measure_training()
    failed = [row for row in check.ROWS if row["ok"] is False and not NUMBERS.search(row["check"])]
    assert not failed, failed
    assert "does not fit" in str(check.ROWS[-1]["value"]), check.ROWS[-1]
    check.GPU = False
    with mock.patch.object(os.path, "exists", lambda path: path == "/dev/kfd"):
        check.check_driver()
    assert check.ROWS[-1]["ok"] is False, "a GPU that torch does not find"


def simulate(corpus, folder):
    """Play everything, and print where updates and tokens wait. Spoils this process."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "the tests would run on a GPU, if there is one"
    card, found = Card(), {}
    with without_numbers(card), card:
        play_training(card, found, corpus)
        play_decoding(card, found)
        play_mistakes()
        play_scripts(corpus, folder)
        play_gpu_check(corpus)
    print(json.dumps(found))
