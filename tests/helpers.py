"""
What test_all.py plays on: scripts in this process, processes that can be killed, a full disk, a hub
on this machine, commands in comments, tasks of lm-evaluation-harness, and random models.
"""

import contextlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import common
import data
import eval_gsm8k  # and with it all that the processes below import
import train
from model import Config, RecurrentLM
from muon import Optimizer
from sample import Decoder

ROOT = Path(__file__).resolve().parents[1]
# Where processes find the scripts, and this file.
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}"
# On busy cores two threads that wait for each other make models of this size 50 times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of torchrun's processes, too


def outcome(script, *args):
    """Run a script in this process, which saves seconds -> (exit code or line, what it said)."""
    main = importlib.import_module(script.replace("/", ".")).main
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script, *map(str, args)]),
        contextlib.redirect_stdout(said),
    ):
        try:
            common.cli(main)
        except SystemExit as end:
            return end.code or 0, said.getvalue()


def call(script, *args):
    """A script that ends well -> what it said on stdout."""
    code, said = outcome(script, *args)
    assert code == 0, code
    return said


def refusal(script, *args):
    """The one line with which a script refuses these arguments."""
    line, _ = outcome(script, *args)
    assert isinstance(line, str) and "\n" not in line, line
    return line


def play(command):
    """
    Run a shell script of this folder -> its exit code. Its python asks for its scripts to be run in
    this process, which saves half a minute of importing torch.
    """
    asked, ask = os.pipe()
    answer, answered = os.pipe()
    Path("python").write_text(f"""#!/bin/bash
if [[ $1 == -c ]]; then exec {sys.executable} "$@"; fi
printf '%s\\t' "$@" >&{ask}
echo >&{ask}
read -r size <&{answer}
head -c "$size" <&{answer}
""")
    os.chmod("python", 0o755)
    env = os.environ | {"PATH": f"{os.getcwd()}:{os.environ['PATH']}"}
    process = subprocess.Popen(command.split(), env=env, pass_fds=(ask, answer))
    os.close(ask)
    with open(asked) as lines, open(answered, "wb", 0) as answers:
        for line in lines:
            script, *args = line.split("\t")[:-1]
            said = call(script.removesuffix(".py"), *args).encode()
            answers.write(b"%d\n%s" % (len(said), said))

    os.close(answer)
    return process.wait()


# Each process is a fork of one that imported torch.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def run_forked(folder, env, script, *args):
    """Run a script in this process as its user does. All output goes to the file "log"."""
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    common.RANK = int(env["RANK"])
    common.WORLD = int(env["WORLD_SIZE"])
    sys.argv = [script, *map(str, args)]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def launch(*command, world=1, threads=1, last=()):
    """
    Start a script on `world` ranks, which meet at a store, as torchrun's do -> processes. last:
    more flags for the last one.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
    }
    Path("log").write_text("")
    processes = []
    for rank in range(world):
        args = os.getcwd(), env | {"RANK": str(rank)}, *command
        args += tuple(last) if rank == world - 1 else ()
        process = FORKS.Process(target=run_forked, args=args)
        process.start()
        process.store = store  # lives as long as they do
        processes.append(process)

    return processes


def kill(processes, condition):
    """Kill the processes by SIGKILL once condition() is true. Until then they must be running."""
    while not condition():
        assert all(p.is_alive() for p in processes)
        time.sleep(0.002)
    for p in processes:
        p.kill()
        p.join()


def finish(*command, **ranks):
    """Run a script to its end."""
    for p in launch(*command, **ranks):
        p.join()
        assert p.exitcode == 0, Path("log").read_text()


@contextlib.contextmanager
def full_disk(size):
    """No file may become longer than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def typed(*lines):
    """What stdin is while somebody types these lines (bytes)."""
    return io.TextIOWrapper(io.BytesIO(b"\n".join(lines)), "utf-8")


def contents(folder):
    """{path: bytes} of all files in and below a folder, but locks and what a kill left."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).glob("**/*")
        if path.is_file() and path.name != ".lock" and ".tmp-" not in str(path)
    }


def start_hub(files):
    """
    What huggingface_hub asks of a hub, with `files` {name: bytes} in every repository. It notes the
    names of all `requests`. The first answer with model.safetensors breaks off.
    """
    hub = SimpleNamespace(requests=[])
    commit = "c0" * 20
    listing = [
        {"type": "file", "path": name, "oid": name, "size": len(body)}
        for name, body in files.items()
    ]
    info = {"id": "some/model", "sha": commit}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            answer = listing if "/tree/" in self.path else info
            body = files.get(name, json.dumps(answer).encode())
            self.send_response(200)
            self.send_header("Content-Length", len(body))
            self.send_header("ETag", name)
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if self.command == "GET":
                breaks = name == "model.safetensors" and name not in hub.requests
                hub.requests.append(name)
                self.wfile.write(body[:999] if breaks else body)

        do_HEAD = do_GET

    hub.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{hub.server.server_port}"
    threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True).start()
    return hub


def recipe(path):
    """The commands in the comments of a file of config/. `--key=value  words` varies the last."""
    launch = []
    for line in re.findall(r"^#   (\S.*)", re.sub(r" \\\n# *", " ", path.read_text()), re.M):
        words = line.split("  ")[0].split()
        if "train.py" in words:
            launch = words
        yield launch + words if words[0].startswith("--") else words


# Tasks of lm-evaluation-harness.
TASKS = {
    "choice": dict(
        output_type="multiple_choice",
        doc_to_text="{{query}}",
        doc_to_target="gold",
        doc_to_choice="choices",
        num_fewshot=1,
        fewshot_split="test",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    ),
    "text": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{query}} {{query * (9 if gold == 0 else 1)}}",
        metric_list=[{"metric": "byte_perplexity"}],
    ),
    "answer": dict(
        output_type="generate_until",
        doc_to_text="{{query}}",
        doc_to_target="{{choices[gold]}}",
        metric_list=[{"metric": "exact_match"}],
        generation_kwargs=dict(until=["\n", "."], max_gen_toks=16),
    ),
    "math": dict(
        include="minerva_math/minerva_math500.yaml",
        dataset_name=None,
        tag=None,
        generation_kwargs=dict(until=["Problem:"], max_gen_toks=16, do_sample=False),
    ),
    "gsm8k": dict(
        include="gsm8k/gsm8k-cot-zeroshot.yaml",
        dataset_name=None,
        training_split=None,
        fewshot_split=None,
        num_fewshot=0,
        generation_kwargs=dict(until=eval_gsm8k.STOPS, max_gen_toks=32, do_sample=False),
    ),
}


def write_task(name):
    """Write a task of the harness's kind on 8 questions of the prompt; its flags for eval_lm.py."""
    shots = common.read_json(ROOT / "tests/oracle/gsm8k_prompt.json")["8"].split("\n\n")[:8]
    with open("rows.jsonl", "w") as f:
        for i, shot in enumerate(shots):
            question, answer = shot.removeprefix("Q: ").split("\nA: ")
            number = answer.removesuffix(".").split()[-1]
            row = {
                "query": question,
                "choices": answer.split(". "),
                "gold": i % 2,
                "question": question,
                "answer": f"#### {number}",
                "problem": question,
                "solution": f"\\boxed{{{number}}}",
            }
            f.write(json.dumps(row) + "\n")

    task = TASKS[name] | dict(
        task=f"local_{name}",
        test_split="test",
        dataset_path="json",
        dataset_kwargs=dict(data_files={"test": "rows.jsonl"}, cache_dir="cache"),
    )
    if "include" in task:  # one of its own
        task["include"] = str(Path(find_spec("lm_eval").origin).parent / "tasks" / task["include"])

    common.write_json("task.yaml", task)  # JSON is YAML, too
    return "--tasks", f"local_{name}", "--include_path", os.getcwd(), "--out", f"{name}.json"


# Models and tensors.
def small(seed=0, **changes):
    """A random model that is cheap to run."""
    c = Config(
        vocab_size=17,
        n_embd=32,
        n_head=4,
        n_kv_head=2,
        n_ffn=64,
        n_prelude=1,
        n_core=2,
        n_coda=1,
        mean_recurrence=4,
        eos_token_id=1,
    )
    model = RecurrentLM(replace(c, **{"head_dim": 0} | changes))
    model.init_weights(seed)
    return model


def save(model, folder, corpus):
    """Save a model with the corpus's tokenizer."""
    model.save(folder)
    data.copy_tokenizer(corpus / "task", folder)


def convert(src, out, *flags):
    """surgery.py -> the model in OUT"""
    call("surgery", src, out, *flags)
    return RecurrentLM.load(out, dtype=torch.float32)


def expected(name):
    """{name: tensor} of what others make of a checkpoint in tests/oracle."""
    return load_file(ROOT / "tests/oracle" / name / "expected.safetensors")


def far(a, b):
    """The largest difference."""
    return (a - b).abs().max()


def weights(folder, prefix=""):
    """{name: tensor} of all weights in a folder."""
    tensors = {}
    for file in Path(folder).glob(f"{prefix}*.safetensors"):
        tensors |= load_file(file)
    return tensors


def same(a, b):
    """Whether two {name: tensor} have the same names and bits. Other types raise."""
    return a.keys() == b.keys() and all(t.equal(b[name]) for name, t in a.items())


# What scripts read and write.
def logged(folder, key):
    """{update: value} of what log.jsonl has under `key` so far."""
    path = Path(folder, "log.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return {x["update"]: x[key] for x in map(json.loads, lines) if key in x}


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("step_*"))


def same_end(a, b):
    """Whether two runs ended with the same losses and weights, to the bit."""
    ends = [weights(Path(folder, checkpoints(folder)[-1])) for folder in (a, b)]
    return logged(a, "loss") == logged(b, "loss") and same(*ends)


def answers_of(path):
    """(r, question, output) of the answers in a file, in order."""
    settings, *answers = [json.loads(line) for line in open(path)]
    return sorted((answer["steps"], answer["index"], answer["output"]) for answer in answers)


def documents(n):
    """Write n documents in the embedded corpus's words to a.jsonl."""
    with open("a.jsonl", "w") as f:
        for i in range(n):
            row = {"text": f" {' '.join(str(i))}\n", "meta": {"by": f"by {i % 50}"}}
            print(json.dumps(row), file=f)


def write_bad_folders(folder, llama, checkpoint, corpus):
    """Folders of models that surgery.py and other scripts refuse, by the name of what is wrong."""
    save(small(vocab_size=16), folder / "other", corpus)
    model = small()
    model.embed.weight.data.fill_(math.nan)
    save(model, folder / "nan", corpus)
    small().save(folder / "foreign")
    (folder / "foreign" / "tokenizer.model").write_bytes(b"of another model")
    shutil.copytree(checkpoint, folder / "trained" / "step_000002")
    (folder / "blank").write_text("\n")
    (folder / "latin.txt").write_bytes(b"has 1\ncaf\xe9\n")
    for name in ("truncated", "missing", "mixed", "misshapen", "biased"):
        shutil.copytree(llama, folder / name)

    os.truncate(folder / "truncated" / "model.safetensors", 100_000)
    tensors = weights(llama)
    bias = {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}
    save_file(tensors | bias, folder / "biased" / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "missing" / "model.safetensors")
    save_file(tensors, folder / "mixed" / "model-2.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "misshapen" / "model.safetensors")
    config = common.read_json(llama / "config.json")
    for name, wrong in (
        ("list", []),
        ("window", config | {"model_type": "mistral", "sliding_window": 8}),
        ("yarn", config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("qwen", config | {"model_type": "qwen3"}),
    ):
        shutil.copytree(llama, folder / name)
        common.write_json(folder / name / "config.json", wrong)


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_bpe(kind):
    """
    Write the tokenizer.json of a small byte-level BPE: Qwen's kind, SmolLM2's ("smollm2"), that
    with a blank before each text ("prefix"), or Qwen's with merges in another order ("merges").
    """
    import tokenizers

    words = tokenizers.pre_tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits = kind in ("smollm2", "prefix")
    first = words.Digits(True) if digits else words.Split(tokenizers.Regex(QWEN), "isolated")
    last = words.ByteLevel(kind == "prefix", use_regex=digits)
    bpe.pre_tokenizer = words.Sequence([first, last])
    bpe.decoder = tokenizers.decoders.ByteLevel()
    if kind == "qwen":
        bpe.normalizer = tokenizers.normalizers.NFC()

    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=last.alphabet(), special_tokens=["<s>"]
    )
    bpe.train([str(ROOT / "README.md")], trainer)
    for name in ("<thi", "<think>"):  # the longer one counts
        bpe.add_tokens([tokenizers.AddedToken(name, normalized=False, special=False)])

    spec = json.loads(bpe.to_str())
    if kind == "merges":
        spec["model"]["merges"].reverse()

    common.write_json("tokenizer.json", spec)


# What an optimizer updates.
QKV = "prelude.0.attn.qkv.weight"
SHAPES = {
    "embed.weight": (30, 8),
    "prelude.0.norm_1.weight": (8,),
    "adapter.weight": (8, 16),
    QKV: (24, 8),
    "core.0.mlp.fc.weight": (40, 8),
    "core.0.mlp.proj.weight": (8, 20),
    "norm_f.weight": (8,),
    "head.weight": (30, 8),
}


def noise(*seed, scale=1.0):
    """{name: random tensor}"""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(tensors, dtype=torch.float32):
    return {name: torch.nn.Parameter(t.to(dtype, copy=True)) for name, t in tensors.items()}


def step_with(opt, ps, *grads, lr_factor=1.0, labels=1):
    """
    One update by the gradients {name: tensor} of some micro-batches, which have `labels` labels in
    all. Returns the norm of their mean over the labels.
    """
    for g in grads:
        for name, p in ps.items():
            p.grad = g[name].to(p.dtype, copy=True)
        opt.accumulate()
    return opt.step(opt.reduce().item(), labels, lr_factor)


def decode_model(n_core=2, norm="pre", vocab_size=64, context=64):
    """A tiny random model whose noise (std 1) and recurrences change what it says."""
    return small(
        1,
        vocab_size=vocab_size,
        n_core=n_core,
        norm=norm,
        context=context,
        state_std=1.0,
        mean_recurrence=3,
        n_kv_head=4 if norm == "sandwich" else 2,
    )


def decode(model, prompts, n, **options):
    """(B, n) tokens"""
    rows = [[] for _ in prompts]
    for row, token, _ in Decoder(model).generate(prompts, n, **options):
        rows[row].append(token)
    return torch.tensor(rows)


def random_prompts(*lengths):
    return [torch.randint(64, (n,)).tolist() for n in lengths]


def optimizer_rank(rank, world, folder):
    """
    20 updates of every kind on one of `world` gloo ranks, into a file: its weights, on rank 0 all
    masters and moments, and how many numbers it keeps and sends in an update.
    """
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet{world}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    found = {}
    for kind, dtype in itertools.product(("muon", "adamw", "adamw*"), ("float32", "bfloat16")):
        ps = parameters(noise(), getattr(torch, dtype))
        opt = Optimizer(
            ps.items(),
            lr=0.02,
            adam_lr=0.01,
            weight_decay=0.1,
            clip=20.0,
            rule=kind,
            weights=noise(),
            rank=rank,
            world=world,
        )
        for u in range(20):
            grads = [noise(u, i) for i in range(rank * 8 // world, (rank + 1) * 8 // world)]
            step_with(opt, ps, *grads, lr_factor=0.9**u, labels=8)
        kept = sum(t.numel() for t in (opt.masters | opt.moments).values())
        found |= {f"{kind} {dtype} kept": torch.tensor(kept)}
        found |= {f"{kind} {dtype} {name}": p.detach() for name, p in ps.items()}
        found |= {f"{kind} {dtype} all {key}": t.clone() for key, t in opt.gather().items()}

    save_file(found, f"{folder}/{world}_{rank}")
    dist.barrier()
    dist.destroy_process_group()


def count(story, _):
    """The answer after every sentence of a story (a list of words): the task, said once more."""
    answers = []
    number = 0
    for verb, x in zip(story[::2], map(int, story[1::2])):
        sums = {"gets": number + x, "loses": number - x, "times": number * x}
        number = sums.get(verb, x) % 10
        answers.append(str(number))
    return answers


def multiply(story, known):
    """The product after every factor, as permutation matrices; known: each factor by itself."""
    answers = []
    product = np.eye(5)
    for factor in story:
        product = np.eye(5)[[int(i) - 1 for i in known[factor]]] @ product
        answers.append("".join(str(row.argmax() + 1) for row in product))
    return answers


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


RUN = """--n_prelude=1 --n_core=1 --n_coda=1 --n_embd=32 --n_ffn=64 --context=50 --batch_size=16
    --micro_batch=4 --mean_recurrence=3 --backprop_depth=2 --updates=12 --save_every=3
    --eval_every=6 --eval_rows=27 --eval_steps=1,4 --compile=false --lr=0.01 --adam_lr=0.003
    --dtype=float32 --keep=1""".split()


DIES = """
import importlib, os, muon, train
def gather(self, whole=muon.Optimizer.gather):
    if self.updates == 6 and (self.rank, os.environ.get("TORCHELASTIC_RESTART_COUNT")) == (1, %r):
        os.kill(os.getpid(), 9)
    return whole(self)
muon.Optimizer.gather = gather
importlib.reload(train)  # its RANK is that of this process
train.cli(train.main)
"""


# Run by each of two nodes. Rank 1 dies in its first attempt before it has met the others.
NODE = """
import os, train
if "LOST" in os.environ and not os.path.exists("lost"):
    open("lost", "w").close()
    os.kill(os.getpid(), 9)
train.cli(train.main)
"""


MISTAKES = """
surgery {llama} out:
     -> --prelude; --preset tinyllama-4-8-4 -> 0-5; --shape 4,4,4 -> 0-5;
    --shape 4 -> --feed_forward; --prelude 0 --core 1-x --coda 3 -> --core;
    --prelude 0-3 --core 3-4 --coda 5 -> taken once; --shape 4,8,4 -> a shape of 16 layers;
    --feed_forward --shape 0 -> --shape; --feed_forward --shape -2 -> --shape;
    --shape 2,2,-1 -> --shape; --feed_forward --prelude= -> leave no layer;
    --feed_forward --prelude 3-9 -> 0-5; --feed_forward --mean_recurrence 0 -> --mean_recurrence;
surgery:
    {llama} {m} --feed_forward -> exists already; {truncated} out --feed_forward -> damaged;
    {missing} out --feed_forward -> layers.3.mlp.up_proj; {mixed} out --feed_forward -> two models;
    {misshapen} out --feed_forward -> not the model of its config.json;
    {other} out --export hf -> different model; {biased} out --feed_forward -> q_proj.bias' has no;
    {window} out --feed_forward -> sliding_window of 8;
    {list} out --feed_forward -> is damaged; {yarn} out --feed_forward -> 'yarn' is not supported;
    {qwen} out --feed_forward -> q_norm.weight' is missing;
    {llama} {llama} --feed_forward -> exists already;
    ./lama out --feed_forward -> no such folder;
runs/block_influence {llama} out:
    --shape 1,2,1 --text {blank} -> has no text; --text {blank} -> --shape;
    --shape 1,x,1 --text {blank} -> --shape; --shape 4,8,4 --text {corpus}/test.jsonl -> 16 layers;
runs/tiny_corpus:
    --out {m} -> meta.json; --out out --rows 0 -> --rows;
data:
    prepare --input {corpus}/test.jsonl --tokenizer {m} --out {m} -> --out;
    prepare --input {corpus}/test.jsonl --tokenizer gpt2 --out out -> tokenizer.json;
    prepare --input {corpus}/test.jsonl --tokenizer {m} --out {corpus} -> other files;
data prepare --tokenizer {m} --out out:
    --input {corpus}/test.jsonl --field question --drop question -> COLUMN=TEXT;
    --input {corpus}/test.jsonl --field question --drop question=has -> no text is left;
    --input none.txt -> none.txt; --input web/*.parquet -> web/*.parquet;
    --input {m}/config.json -> config.json: is not; --input {latin} -> line 2 is not UTF-8;
train {run}:
    --uptades=3 -> did you mean --updates?; --steps 4; --seed=-1; --warmup=1.5; --draws=3;
    --n_head=5; --wandb -> pip install; --lr=x; --curriculum=cubic -> linear;
    --config=none.toml -> none.toml; --data=none -> none;
    --data={corpus}/test.jsonl -> not a finished data set; --data={corpus}/task:0 -> weight;
    --data={corpus}/task:1.5 -> weight; --context=30; --init_from={foreign} -> tokenizer;
    --init_from=none -> no such folder; --init_from=x --out_dir=./x -> is --init_from;
    --out_dir -> expected one argument; --train -> expected one argument;
    --updates=-1; --batch_size=0; --micro_batch=0; --draws=0;
    --context=0; --mean_recurrence=0; --eval_every=0; --eval_rows=0; --save_every=0;
    --flops_of=none -> no such folder; --flops_of={m} -> has no train.json;
    --updates=3 --flops_of={m} -> give one of the two;
    --log_every=0; --keep=0; --train=cores; --train=norm| -> '' matches none;
sample --prompt 3:
    --model none -> no such folder; --model {other} -> different model;
    --model {m}m -> did you mean {m}?; --model {exported} -> surgery.py {exported} OUT;
    --model {llama} -> --feed_forward;
sample --prompt 3 --model {m}:
    --top_k=x; --temperature=-1; --seed=-1; --tokens=0;
    --device=cuda:99 -> --device cuda:99;
    --steps=-1; --draft_steps=x; --picture a.png -> is a picture of --trace;
eval_gsm8k {ask}:
    --data none.jsonl -> No such file; --data {m}/config.json -> not a JSON object; --steps 1,-2;
    --max_new_tokens 4096 -> context of 40; --limit 0; --batch_size x;
    --max_new_tokens=3 --out=x.json --seed=-1 -> --seed; --seed=2e13; --seed=20000000000000;
    --out {other} -> is a folder;
bench decode:
    --draft_steps x; --repeat 0;
bench train:
    --steps 4; --steps 4+0;
bench plot:
     -> results; none.json; {m}/config.json -> nothing to draw; {m} --x steps -> --x steps;
    {m}/config.json {m} --labels a -> 1 labels for 2;
"""


def mistakes():
    """(command, what its refusal says) of each mistake in MISTAKES; it says the flag by default."""
    for line in MISTAKES.strip().splitlines():
        if line[0] != " ":
            command = line.removesuffix(":")
        for mistake in line.split(";")[:-1]:
            mistake, _, words = map(str.strip, mistake.partition("->"))
            yield f"{command} {mistake}", words or re.split("[ =]", mistake)[0]
