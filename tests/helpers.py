"""Helpers of the tests: scripts run here or in processes to kill, random models and tensors."""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

GPU = os.environ.get("LOOPGRAFT_GPU")
if not GPU:  # hide any GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
import torch
import torch._dynamo  # which checkpoint() needs: before forking, which saves a second per process
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend

import common
import data
import eval_gsm8k  # and train: before forking, which saves their import in each process
import train
from data import Tokenizer
from model import Config, RecurrentLM, find_checkpoint
from muon import Optimizer
from sample import Decoder

ROOT = Path(__file__).resolve().parents[1]
RUN = [f"--config={ROOT}/tests/run.toml"]  # 12 updates, in a second
ORACLE = ROOT / "tests" / "oracle"  # these models are in it
FEED_FORWARD = "hf_llama", "hf_llama3", "hf_olmo2", "hf_qwen3", "hf_qwen2", "hf_mistral"
RECURRENT = "raven_llama", "raven_olmo2"
ASSETS = Path(os.environ.get("LOOPGRAFT_ASSETS", ROOT / "out"), "assets").resolve()
TOKENIZERS = ASSETS / "tokenizers"
EXTRAS = "pip install transformers accelerate gguf protobuf pyarrow matplotlib lm_eval==0.4.13"
needs_compiler = pytest.mark.skipif(not shutil.which("g++"),
                                    reason="no C++ compiler for torch.compile")
# Child processes import the scripts and this file.
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"
common.CPUINFO = Path("none")  # --dtype auto is float32 in these tests, whatever the CPU
# On busy cores two threads that wait for each other make models of this size 50 times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of torchrun's processes, too


def need(package):
    """Import an optional package, or skip the test."""
    return pytest.importorskip(package, reason=EXTRAS)


def outcome(command, *args):
    """
    Run a script in this process, to save seconds. command: its name and, as typed, flags, which
    precede args. Returns (exit code or error line, stdout).
    """
    script, *typed = shlex.split(command)
    main = importlib.import_module(script.replace("/", ".")).main
    printed = io.StringIO()
    with (mock.patch.object(sys, "argv", [script, *typed, *map(str, args)]),
          contextlib.redirect_stdout(printed)):
        try:
            common.cli(main)
        except SystemExit as end:
            return end.code or 0, printed.getvalue()


def run_script(command, *args):
    """Run a script that must succeed. Returns what it printed to stdout."""
    code, printed = outcome(command, *args)
    assert code == 0, code
    return printed


def error_line(command, *args):
    """Run a script that must fail. Returns its one-line error message."""
    line, _ = outcome(command, *args)
    assert isinstance(line, str) and "\n" not in line, line
    return line


# Processes are forked from a server that has imported torch, which saves seconds for each.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def run_forked(folder, env, script, *args):
    """Run a script in a forked process as if typed. Its output goes to the file "log"."""
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    torch.set_num_threads(1)
    common.RANK = int(os.environ["RANK"])
    common.WORLD = int(os.environ["WORLD_SIZE"])
    sys.argv = [script, *map(str, args)]
    runpy.run_path(f"{ROOT / script}.py", run_name="__main__")


def run_dying(*args):
    """run_forked(), but rank 1 kills itself once, while saving the update in the file "dies"."""
    gather = Optimizer.gather
    dies = Path("dies")

    def gather_or_die(optimizer):
        if optimizer.rank == 1 and dies.exists() and optimizer.updates == int(dies.read_text()):
            dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(optimizer)

    Optimizer.gather = gather_or_die
    run_forked(*args)


def launch(command, *args, world=1, last=(), run=run_forked):
    """Start a script on `world` ranks, the last with the flags `last`, too. Returns processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    Path("log").write_text("")
    processes = []
    for rank in range(world):
        env["RANK"] = str(rank)
        flags = [*args, *last] if rank == world - 1 else args
        process = FORKS.Process(target=run, args=(os.getcwd(), env, *command.split(), *flags))
        process.start()
        process.store = store  # lives as long as they do
        processes.append(process)

    return processes


def wait_until(condition, processes):
    """Wait until condition() is true. The processes must be running until then."""
    while not condition():
        assert all(p.is_alive() for p in processes), Path("log").read_text()
        time.sleep(0.002)


def kill(processes, condition):
    """Kill the processes with SIGKILL once condition() is true."""
    wait_until(condition, processes)
    for p in processes:
        p.kill()
        p.join()


def train_until(update, *flags):
    """Run train.py until it has written its checkpoint of this update."""
    save = train.Run.save

    def save_and_stop(run):
        save(run)
        if run.progress.update == update:
            raise KeyboardInterrupt

    with mock.patch.object(train.Run, "save", save_and_stop):
        code, _ = outcome("train", *flags)
    assert code == 128 + signal.SIGINT


def exit_codes(processes):
    """Wait for processes to end. Returns their exit codes."""
    for p in processes:
        p.join()
    return [p.exitcode for p in processes]


def run_on_ranks(*command, **options):
    """Run a script that must succeed on all ranks. options: those of launch()."""
    assert not any(exit_codes(launch(*command, **options))), Path("log").read_text()


@contextlib.contextmanager
def beside_the_tests(lines, folder):
    """Run lines of bash beside the tests, which go first. Yields a function that awaits the end."""
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(["nice", "-n", "5", "bash", "-ec", lines], cwd=folder,
                                   stdout=log, stderr=log)

    def output():
        code, said = process.wait(timeout=900), (folder / "log").read_text()
        assert code == 0, said
        return said

    yield output
    process.kill()
    process.wait()


def copy_scripts(folder):
    """Copy the scripts of the repository to a folder."""
    for part in ("runs", "config", "tools", "assets"):
        shutil.copytree(ROOT / part, folder / part)
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)


def contents(folder):
    """{path: bytes} of all files in and below a folder, except locks and leftovers of a kill."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).glob("**/*")
        if path.is_file() and path.name != ".lock" and ".loopgraft-" not in str(path)
    }


# Models and tensors.
def small(seed=0, **changes):
    """A random model that is cheap to run."""
    c = dict(vocab_size=17, n_embd=32, n_head=4, n_kv_head=2, n_ffn=64, n_prelude=1, n_core=2,
             n_coda=1, mean_recurrence=4, eos_token_id=1)
    model = RecurrentLM(Config(**c | changes))
    model.init_weights(seed)
    return model


def save(model, folder, corpus):
    """Save a model with the corpus's tokenizer."""
    model.save(folder)
    data.copy_tokenizer(corpus / "task", folder)


def convert(src, out, *flags):
    """Run surgery.py. Returns the model that it wrote, in float32."""
    run_script("surgery", src, out, *flags)
    return RecurrentLM.load(out, dtype=torch.float32)


def expected(name):
    """{name: tensor} that the reference computes for a checkpoint in tests/oracle."""
    tensors = load_file(ORACLE / "expected.safetensors")
    prefix = f"{name}/"
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def max_difference(a, b):
    return (a - b).abs().max()


def relative_error(found, exact):
    """The norm of the difference, relative to that of the exact tensor, which is on the CPU."""
    return ((found.cpu().float() - exact).norm() / exact.norm()).item()


def mean_loss(losses, targets):
    """The mean of the losses (B, T) over all targets that carry loss."""
    return losses.sum() / (targets != -100).sum()


def weights(folder, prefix=""):
    """{name: tensor} of all weights in a folder."""
    tensors = {}
    for file in Path(folder).glob(f"{prefix}*.safetensors"):
        tensors |= load_file(file)
    return tensors


def identical(a, b):
    """Whether two {name: tensor} have the same names and values, bit by bit. Dtypes must match."""
    return a.keys() == b.keys() and all(t.equal(b[name]) for name, t in a.items())


# What scripts read and write.
def read_log(folder, key):
    """{update: value} of the lines of log.jsonl that have `key`; {} if there is no log yet."""
    path = Path(folder, "log.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return {x["update"]: x[key] for x in map(json.loads, lines) if key in x}


def checkpoints(folder):
    """The sorted names of all that is called step_* in a folder, finished checkpoints or not."""
    return sorted(path.name for path in Path(folder).glob("step_*"))


def same_end(a, b):
    """Whether two runs logged equal losses, each once, and ended with bit-identical checkpoints."""
    def logged(folder):
        lines = map(json.loads, open(f"{folder}/log.jsonl"))
        return [(line["update"], line["loss"]) for line in lines if "loss" in line]

    ends = [weights(find_checkpoint(folder)) for folder in (a, b)]
    return logged(a) == logged(b) and identical(*ends)


def answers_of(path):
    """(r, index of the question, output) of all answers in a file, sorted."""
    answers = common.read_json(path)["answers"]
    return sorted((answer["steps"], answer["index"], answer["output"]) for answer in answers)


def documents(n):
    """Write a.jsonl with n documents. The text of document i is the digits of i, as words."""
    with open("a.jsonl", "w") as f:
        for i in range(n):
            meta = {"by": f"by {i % 50}"} if i else None
            print(json.dumps({"text": f" {' '.join(str(i))}\n", "meta": meta}), file=f)


def documents_in(folder, split):
    """The numbers i of those documents, in the order in which a data set's split has them."""
    ids = [np.load(path) for path in sorted(Path(folder).glob(f"{split}_*.npy"))]
    *texts, _ = Tokenizer.load(folder).decode(np.concatenate(ids).tolist()).split("</s>")
    return [int(text.replace(" ", "")) for text in texts]


# One question, with an answer that is right, and one whose prompt of cot does not fit.
ASKED = [
    {"question": "How many layers are there?", "answer": "4"},
    {"question": "How many " * 200 + "are there?", "answer": "5"},
]

# The parameters that optimizers are tested with, some of each kind.
QKV = "prelude.0.attn.qkv.weight"
SHAPES = {
    "embed.weight": (30, 8),
    "prelude.0.norm_1.weight": (8,),
    "adapter.weight": (8, 16),
    "core.0.attn.qk_bias": (2, 1, 2, 4),  # Huginn's
    QKV: (24, 8),
    "core.0.mlp.fc.weight": (40, 8),
    "core.0.mlp.proj.weight": (8, 20),
    "core.1.mlp.fc.weight": (40, 8),
    "core.2.mlp.fc.weight": (40, 8),
    "norm_f.weight": (8,),
    "head.weight": (30, 8),
}
MATRICES = [name for name in SHAPES if any(part in name for part in ("qkv", "adapter", "mlp"))]


def noise(*seed):
    """{name: random tensor} of the parameters in SHAPES. seed: any numbers."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(tensors):
    """{name: Parameter}, copies in float32 of {name: tensor}."""
    return {name: torch.nn.Parameter(t.to(torch.float32, copy=True)) for name, t in tensors.items()}


def step_with(opt, ps, grads, lr_factor):
    """Update the parameters ps with the gradients, {name: tensor}."""
    for name, p in ps.items():
        p.grad = grads[name].clone()
    opt.accumulate()
    opt.step(opt.reduce().item(), lr_factor=lr_factor)


def decode_model(n_core=2, norm="pre", vocab_size=64, context=64):
    """A tiny random model whose greedy tokens depend on its noise (std 1) and its recurrences."""
    return small(1, vocab_size=vocab_size, n_core=n_core, n_coda=min(n_core, 1), norm=norm,
                 context=context, state_std=1.0, mean_recurrence=3,
                 n_kv_head=4 if norm == "sandwich" else 2)


def generate_rows(decoder, prompts, limits, steps=None, **options):
    """Decode a batch in which row i ends after limits[i] tokens. Returns the tokens of each row."""
    rows = [[] for _ in prompts]

    def ends(row, token):
        return len(rows[row]) == limits[row]

    for row, token in decoder.generate(prompts, max(limits), steps, ends, **options):
        rows[row].append(token)
    return rows


def decode(model, prompts, n, **options):
    """n new tokens of each prompt, as a tensor (B, n)."""
    return torch.tensor(generate_rows(Decoder(model), prompts, [n] * len(prompts), **options))


def first_rows(dataset, count, seed=0):
    """idx and targets, both (count, T), of the first rows that a run with this seed reads."""
    idx, targets, _ = dataset.batch(seed, index=0, rank=0, world=1, B=count)
    return idx, targets


def slow_attention(model):
    """Train and decode. Returns the attention kernels that were chosen and are slow on a GPU."""
    attention = F.scaled_dot_product_attention
    chosen = set()

    def spy(q, k, v, mask=None, **flags):
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, **flags)
        chosen.add(SDPBackend(choice))
        return attention(q, k, v, mask, **flags)

    idx = torch.ones(4, 128, dtype=torch.int64, device=model.head.weight.device)
    with mock.patch.object(F, "scaled_dot_product_attention", spy):
        _, losses = model(idx, idx, (0, 1))
        losses.mean().backward()
        list(Decoder(model).generate([[1, 2, 3]], 2, 1))
    # MATH stores the scores of all pairs; cuDNN: see model.py.
    return chosen & {SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION}


def random_prompts(*lengths):
    return [torch.randint(64, (n,)).tolist() for n in lengths]


# Texts on which tokenizers go wrong: blanks, Unicode, control characters, names of control tokens.
HARD = [
    "",
    " ",
    "Hello  world",
    "naïve 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 café",
    "汉字和かな한국어 Ωмिक\u064e",
    "1234567890 3.14",
    "a\n\n\n  b\t\tc\r\n",
    "don't DON'T 'ſ",
    "e\u0301\u0323\u0308" * 9,
    "".join(map(chr, [*range(32), *range(127, 160)])),
    "|||IP_ADDRESS||| x",
    "<s></s><|endoftext|><|begin_of_text|><|eot_id|>",
    "a" * 5000,
    "漢" * 600,
    "\u2028\u00a0\ufeff ﷺ\U0010ffff",
    "\ufeffx",
    *(" " * n + "x" + "\n" * n for n in range(1, 101)),
]


def write_bpe(kind):
    """Write a small tokenizer.json into the folder `kind`, which names what is special about it."""
    tokenizers = need("tokenizers")
    words = tokenizers.pre_tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.normalizer = None if kind == "gpt2" else tokenizers.normalizers.NFC()
    qwen = words.Split(tokenizers.Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    to_bytes = words.ByteLevel(add_prefix_space=False, use_regex=False)
    with_regex = words.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = {
        "smollm2": words.Sequence([words.Digits(individual_digits=True), with_regex]),
        "gpt2": with_regex,
    }.get(kind, words.Sequence([qwen, to_bytes]))
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = [] if kind == "few_bytes" else to_bytes.alphabet()
    names = ["<s>", "</s>", "<｜user｜>", "<think>."]
    bpe.train([str(ROOT / "README.md")], tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=names))
    for name in ("<thi", "<think>", ">."):  # one begins with the other; the longest match wins
        bpe.add_tokens([tokenizers.AddedToken(name, normalized=False, lstrip=kind == "strips")])
    bpe.enable_truncation(9)
    spec = json.loads(bpe.to_str())
    common.write_json(f"{kind}/tokenizer.json", spec)
