"""
Every promise of nanoloop, one test each: `python -m pytest -q test_all.py`, on a CPU, offline.

Oracles come first: logits and gradients of the paper's own code, transformers' models, torch's
optimizers, a run that was never killed. What needs fixtures finds them through the environment
variable NANOLOOP_ASSETS and is skipped, saying so, where it is unset.
"""
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import bench
import data
import eval_gsm8k
import sample
import surgery
import train
from data import Shards, Tokenizer, tiny
from eval_gsm8k import METRICS, STOPS, cut, is_correct, make_prompt
from model import Config, Linear, RecurrentLM
from muon import Muon
from sample import Decoder, Decoding, adaptive, distribution, generate, pick

# On busy cores two threads that wait for each other make models of this size 50 times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the scripts, too

HERE = os.path.dirname(os.path.abspath(__file__))
ASSETS = os.environ.get("NANOLOOP_ASSETS")
needs_assets = pytest.mark.skipif(not ASSETS, reason="NANOLOOP_ASSETS is unset: no fixtures")

def shared(*path):
    return os.path.join(ASSETS, *path)

def fixture(*path):
    return shared("fixtures", *path)

def expected(name):
    return load_file(fixture(name, "expected", "expected.safetensors"))

def run(*command, ok=True, **kwargs):
    """A script as a user runs it: stdout + stderr. ok=False: it must fail, in one line."""
    command = [sys.executable, *map(str, command)]
    p = subprocess.run(command, cwd=HERE, capture_output=True, text=True, **kwargs)
    if ok:
        assert p.returncode == 0, p.stdout + p.stderr
    else:
        assert p.returncode not in (0, None), p.stdout
        assert len(p.stderr.strip().splitlines()) == 1, p.stderr
    return p.stdout + p.stderr

def call(main, *args):
    """A script's main() in this process, which spares the seconds that importing torch takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *map(str, args)])
        main()

def finish(*args):
    """train.py with these arguments, in this process; it must end well."""
    with pytest.raises(SystemExit) as e:
        call(train.main, *args)
    assert e.value.code in (0, None), e.value

def refusal(main, *args):
    """The one line with which main() refuses these arguments."""
    with pytest.raises((SystemExit, OSError)) as e:
        call(main, *args)
    assert len(str(e.value).splitlines()) == 1, e.value
    return str(e.value)

def convert(src, out, *flags):
    call(surgery.main, src, out, *flags)
    return RecurrentLM.load(out, dtype=torch.float32)

def small(seed=0, **changes):
    """A random model that is cheap to run."""
    c = Config(vocab_size=50, n_embd=32, n_head=4, n_kv_head=2, n_ffn=64, n_prelude=1, n_core=2,
               n_coda=1, mean_recurrence=4, eos_token_id=1)
    model = RecurrentLM(replace(c, head_dim=0, **changes))
    model.init_weights(seed)
    return model

def same_weights(a, b):
    a, b = (load_file(os.path.join(folder, "model.safetensors")) for folder in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "tiny"
    tiny(str(folder), rows=8000)
    return folder


# -------------------------------------------------------------------------------------- the model

@needs_assets
@pytest.mark.parametrize("name, tolerance", [("hf_llama_gqa_untied", 1e-4),
                                             ("hf_llama3_rope", 3e-4), ("hf_olmo2", 1e-4)])
def test_feed_forward_equals_transformers(name, tolerance, tmp_path):
    """A converted Llama or OLMo-2 (tied, sharded, bf16, scaled RoPE) gives transformers' logits."""
    model, x = convert(fixture(name), tmp_path / "m", "--feed_forward"), expected(name)
    ids = x["input_ids"]
    assert (model(ids)[0] - x["logits"]).abs().max() < tolerance
    assert abs(model(ids[:, :-1], ids[:, 1:])[1] - x["loss"]) < 1e-5

@needs_assets
@pytest.mark.parametrize("name", ["raven_llama", "raven_olmo2"])
def test_recurrence_equals_the_papers_code(name, tmp_path):
    """Logits at every r and every gradient of a truncated (3, 2) step are the paper's code's."""
    model, x = convert(fixture(name), tmp_path / "m"), expected(name)
    for r in (1, 2, 4, 8):
        for steps in (r, (r, 0), (0, r)):  # the value does not depend on the split
            logits = model(x["input_ids"], steps=steps, state=x["s0"])[0]
            assert (logits - x[f"logits.{r}"]).abs().max() < 1e-4, (r, steps)
    g = load_file(fixture(name, "expected", "grads.safetensors"))
    loss = model(g["input_ids"], g["labels"], steps=(3, 2), state=g["s0"])[1]
    loss.backward()
    assert abs(loss - g["loss"]) < 1e-5
    for ours, theirs in surgery.tensor_names(model.config, "huginn_raven").items():
        grad = g[f"grad.{theirs[0]}"]
        difference = model.get_parameter(ours).grad - grad
        assert difference.norm() < 1e-3 * grad.norm(), ours

def test_every_r_from_one_pass():
    """trajectory() gives what forward() gives at each r, the logits to the last bit."""
    for changes in ({}, {"n_core": 0}):
        model, idx = small(**changes), torch.randint(50, (2, 9))
        state = model.initial_state(2, 9, 0, [0, 1])
        logits = model.trajectory(idx, [0, 1, 3, 6], None, state)
        losses = model.trajectory(idx, [0, 1, 3, 6], idx, state)
        for r in (0, 1, 3, 6):
            assert torch.equal(logits[r], model(idx, steps=r, state=state)[0])
            assert abs(losses[r] - model(idx, idx, r, state)[1]) < 1e-6
    with pytest.raises(AssertionError, match="neither r nor"):
        model(idx, steps=[1, 4])

def test_gradient_stops_at_k():
    """Only the last k recurrences and one pass of the prelude carry gradient; k = 0: no core."""
    model, idx = small(), torch.arange(10)[None]
    state = model.initial_state(1, 10, 0, [0]).requires_grad_()
    model(idx, idx, (0, 2), state)[1].backward()
    assert state.grad is not None
    state.grad = None
    model.zero_grad()
    model(idx, idx, (1, 2), state)[1].backward()
    assert state.grad is None and model.embed.weight.grad.abs().sum() > 0
    model.zero_grad()
    model(idx, idx, (2, 0), state)[1].backward()
    assert all(p.grad is None for p in model.core.parameters())
    assert model.head.weight.grad is not None

def test_bfloat16_keeps_the_state_in_float32():
    """A bfloat16 gradient at (24, 8) is within 3.2% of float32's, as under autocast."""
    torch.manual_seed(0)
    idx, grads = torch.randint(1000, (4, 65)), []
    sizes = dict(vocab_size=1000, n_embd=256, n_kv_head=4, n_ffn=704, mean_recurrence=32)
    for dtype in (torch.float32, torch.bfloat16):
        model = small(n_prelude=2, n_core=4, n_coda=2, **sizes).to(dtype)
        state = model.initial_state(4, 64, 0, range(4))
        states = model.trajectory(idx[:, :-1], [2], None, state, lambda s, *_: s)
        assert states[2].dtype == torch.float32
        model(idx[:, :-1], idx[:, 1:], (24, 8), state)[1].backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.032 * grads[0].norm()

@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_transformers_as_oracle(kind, tmp_path):
    """A folder that the installed transformers writes goes in unchanged, with its logits."""
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    peer = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    if kind == "olmo2":
        peer = tf.Olmo2ForCausalLM(tf.Olmo2Config(**sizes, rope_theta=500000.0))
    for p in peer.parameters():  # norms of 1 would hide a misplaced one
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    peer.save_pretrained(tmp_path / "hf")
    model = convert(tmp_path / "hf", tmp_path / "m", "--feed_forward")
    ids = torch.randint(96, (2, 40))
    with torch.no_grad():
        assert (model(ids)[0] - peer(ids).logits).abs().max() < 1e-4

def test_initial_state():
    """Noise has the reference's spread and cut; a row's follows from its seed and number alone."""
    model = small(n_embd=64)
    s, std = model.initial_state(64, 128), model.config.state_std
    assert abs(s.std() / std - 0.98658) < 0.005
    assert s.abs().max() <= 3 * std and abs(s.mean()) < std / 50
    again = model.initial_state(2, 8, 1, [6, 7])
    assert torch.equal(model.initial_state(3, 8, 1, [5, 6, 7])[1:], again)


# ---------------------------------------------------------------------------------------- surgery

@needs_assets
def test_surgery_takes_the_layers_in_a_row(tmp_path):
    """r = 1 with the identity adapter is the kept layers in a row; a trained one, the paper's."""
    flags = ("--prelude", "0-1", "--core", "3-5", "--coda", "6,7")
    model, x = convert(fixture("hf_llama_gqa_untied"), tmp_path / "m", *flags), expected("surgery")
    logits = model(x["input_ids"], steps=1, state=x["s0"])[0]
    for wanted in ("logits.identity.1", "logits.hf_pruned"):
        assert (logits - x[wanted]).abs().max() < 1e-4
    model.adapter.weight.data = x["adapter"]
    for r in (1, 4):
        logits = model(x["input_ids"], steps=r, state=x["s0"])[0]
        assert (logits - x[f"logits.{r}"]).abs().max() < 1e-4

@needs_assets
def test_surgery_unties_and_retrofits_our_own(tmp_path):
    """A tied source gets a head of its own; our feed-forward checkpoint goes in as its source."""
    stories, flags = shared("assets", "stories260K"), ("--shape", "2,2,1")
    direct = convert(stories, tmp_path / "a", *flags)
    parent = convert(stories, tmp_path / "parent", "--feed_forward")
    convert(tmp_path / "parent", tmp_path / "b", *flags)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert torch.equal(direct.head.weight, direct.embed.weight)
    assert direct.head.weight is not direct.embed.weight
    assert parent.head.weight is parent.embed.weight
    untied = convert(stories, tmp_path / "untied", "--feed_forward", "--untie")
    assert untied.head.weight is not untied.embed.weight and not untied.config.tie_embeddings
    assert (tmp_path / "b" / "tokenizer.model").exists()

@needs_assets
@pytest.mark.parametrize("name", ["raven_llama", "raven_olmo2", "hf_llama_gqa_untied",
                                  "hf_llama3_rope", "hf_olmo2"])
def test_export_is_the_inverse_of_import(name, tmp_path):
    """In and out gives the same tensors; the released config.json key by key; transformers reads it."""
    convert(fixture(name), tmp_path / "m", *(["--feed_forward"] if name.startswith("hf") else []))
    call(surgery.main, tmp_path / "m", tmp_path / "out", "--export", "hf", "--verify")
    before = {}
    for file in os.listdir(fixture(name)):
        if file.endswith(".safetensors"):
            before |= load_file(fixture(name, file))
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for k, t in before.items():
        assert torch.equal(t, after[k]) and t.dtype == after[k].dtype
    if name.startswith("raven"):
        with open(fixture(name, "config.json")) as a, open(tmp_path / "out" / "config.json") as b:
            assert json.load(a) == json.load(b)
    else:
        tf = pytest.importorskip("transformers", reason="transformers is not installed")
        peer = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        x = expected(name)
        with torch.no_grad():
            assert (peer(x["input_ids"]).logits - x["logits"]).abs().max() < 3e-4

@needs_assets
def test_export_carries_the_tokenizer(tmp_path):
    """transformers' tokenizer of an exported folder gives our ids."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    stories = shared("assets", "stories260K")
    call(surgery.main, stories, tmp_path / "out", "--feed_forward", "--export", "hf")
    text = "Once upon a time, there was  a little girl.\nShe said: 12."
    ids = Tokenizer.load(tmp_path / "out").encode(text, bos=True)
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids == ids

def huginn(w, c, ids, s, steps):
    """Huginn-0125's forward pass in float64, literally: adjacent pairs rotate as complex numbers."""
    w = {k: v.double() for k, v in w.items()}
    C, H = c["n_embd"], c["n_heads"]
    D, T = C // H, ids.shape[1]
    frequency = c["rope_base"] ** -(torch.arange(0, D, 2).double() / D)
    angle = torch.arange(T).double()[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]

    def norm(x, name):
        x = x * (x.pow(2).mean(-1, keepdim=True) + c["norm_eps"]).rsqrt()
        return x * w[f"transformer.{name}.weight"]

    def rotate(x):
        x = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(x * turn).flatten(-2)

    def block(x, name):
        p = f"transformer.{name}."
        qkv = norm(x, f"{name}.norm_1") @ w[p + "attn.Wqkv.weight"].T
        q, k, v = qkv.unflatten(-1, (3, H, -1)).unbind(2)
        q = rotate(q + w[p + "attn.qk_bias"][0])
        k = rotate(k + w[p + "attn.qk_bias"][1])
        score = torch.einsum("bqhd,bkhd->bhqk", q, k) / D ** 0.5
        score = score.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", score, v).flatten(2)
        x = norm(x + y @ w[p + "attn.proj.weight"].T, f"{name}.norm_2")
        gate, up = (norm(x, f"{name}.norm_3") @ w[p + "mlp.fc.weight"].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.proj.weight"].T
        return norm(x + y, f"{name}.norm_4")

    e = block(w["transformer.wte.weight"][ids] * c["init_values"]["embed_scale"], "prelude.0")
    for _ in range(steps):
        s = torch.cat((s, e), -1) @ w["transformer.adapter.weight"].T
        s = block(block(s, "core_block.0"), "core_block.1")
    s = norm(block(norm(s, "ln_f"), "coda.0"), "ln_f")
    return s @ w["transformer.wte.weight"].T

def test_huginn_goes_in_and_out(tmp_path):
    """Huginn's block style, by its literal formulas, also through the cache; and out again."""
    C, F = 32, 48
    c = {"model_type": "huginn_raven", "n_embd": C, "n_heads": 4, "intermediate_size": F,
         "vocab_size": 64, "norm_eps": 1e-6, "rope_base": 50000, "rope_theta": 10000,
         "qk_bias": True, "block_size": 64, "tie_embeddings": True, "n_layers_in_prelude": 1,
         "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 1,
         "init_values": {"std": 0.1, "embed_scale": C ** 0.5}}
    torch.manual_seed(0)
    shapes = {"wte.weight": (64, C), "adapter.weight": (C, 2 * C), "ln_f.weight": (C,)}
    for block in ("prelude.0", "core_block.0", "core_block.1", "coda.0"):
        shapes |= {f"{block}.norm_{i}.weight": (C,) for i in (1, 2, 3, 4)} | {
            f"{block}.attn.Wqkv.weight": (3 * C, C), f"{block}.attn.proj.weight": (C, C),
            f"{block}.attn.qk_bias": (2, 1, 4, C // 4), f"{block}.mlp.fc.weight": (2 * F, C),
            f"{block}.mlp.proj.weight": (C, F)}
    w = {f"transformer.{name}": torch.randn(shape) * 0.2 + (len(shape) == 1)
         for name, shape in shapes.items()}
    (tmp_path / "src").mkdir()
    save_file(w | {"freqs_cis": torch.zeros(3)}, tmp_path / "src" / "model.safetensors")
    (tmp_path / "src" / "config.json").write_text(json.dumps(c))
    model = convert(tmp_path / "src", tmp_path / "m", "--mean_recurrence", 3)
    ids, s = torch.randint(64, (2, 9)), model.initial_state(2, 9, 0, [0, 1])
    for steps in (1, 3):
        logits = model(ids, steps=steps, state=s)[0]
        assert (logits - huginn(w, c, ids, s.double(), steps)).abs().max() < 1e-4
    text = torch.cat((ids, decode(model, ids.tolist(), 5, state="zero")), 1)
    logits = model(text, state=torch.zeros(2, 14, C))[0]
    assert text[:, 9:].tolist() == logits[:, 8:-1].argmax(-1).tolist()
    call(surgery.main, tmp_path / "m", tmp_path / "out", "--export", "hf")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert w.keys() == after.keys() and all(torch.equal(w[k], after[k]) for k in w)
    assert convert(tmp_path / "out", tmp_path / "again").config == model.config

@needs_assets
def test_verified_surgery(tmp_path, capsys, monkeypatch):
    """--verify finds 0.0 for every hidden state of what was written, and sees a wrong weight."""
    src, flags = fixture("hf_olmo2"), ("--shape", "1,2,1", "--verify")
    more = ((), ("--adapter", "add"), ("--adapter_init", "default", "--export", "hf"))
    for i, extra in enumerate(more):
        call(surgery.main, src, tmp_path / str(i), *flags, *extra)
        states = 7 if i == 0 else 6  # with the identity adapter also the logits at r = 1
        assert f"{states} hidden states and logits differ by at most 0.0 " in capsys.readouterr().out
    read_all, calls = surgery.read_all, []

    def wrong(source):  # at first, when OUT is made
        tensors = read_all(source)
        tensors["coda.0.attn.proj.weight"][3, 4] += 1e-3 * (not calls)
        calls.append(source)
        return tensors

    monkeypatch.setattr(surgery, "read_all", wrong)
    assert "differs" in refusal(surgery.main, src, tmp_path / "wrong", *flags)

def test_tables_of_the_paper(capsys):
    """--dry_run prints the paper's Tables 6-8 for every preset from the shapes alone."""
    tiny_llama, llama = "131,072,000 968,976,384", "525,336,576 973,146,112"
    olmo = "411,041,792 1,073,874,944"
    table = {  # source; body, prelude, core, coda
        "tinyllama-2-4-2": (tiny_llama, "352,354,304 88,088,576 176,177,152 88,088,576"),
        "tinyllama-4-8-4": (tiny_llama, "704,708,608 176,177,152 352,354,304 176,177,152"),
        "tinyllama-6-10-6": (tiny_llama, "968,974,336 264,265,728 440,442,880 264,265,728"),
        "llama-3.2-1b-2-4-2": (llama, "486,572,032 121,643,008 243,286,016 121,643,008"),
        "llama-3.2-1b-4-6-4": (llama, "851,501,056 243,286,016 364,929,024 243,286,016"),
        "olmo-2-1b-4-6-4": (olmo, "939,638,784 268,468,224 402,702,336 268,468,224")}
    assert table.keys() == surgery.PRESETS.keys()
    for preset, (source, parts) in table.items():
        call(surgery.main, "--preset", preset, "--dry_run")
        said = " ".join(capsys.readouterr().out.split())
        assert source in said and f"{source.split()[0]} {parts}" in said
    assert "--prelude 0,1,2,3 --core 6,7,8,9,10,11 --coda 12,13,14,15; dropped: [4, 5]" in said

@needs_assets
def test_layer_choice(tmp_path, capsys):
    """Block influence is the fixture's; the printed flags give the chosen model again."""
    with open(fixture("block_influence.json")) as f:
        oracle = json.load(f)
    model = surgery.build(surgery.open_source(fixture("hf_llama_gqa_untied")))
    influence = surgery.block_influence(model, expected("hf_llama_gqa_untied")["input_ids"])
    assert influence == pytest.approx(oracle["bi"], abs=1e-6)
    stories = shared("assets", "stories260K")
    select = ("--select", "block-influence", "--text", shared("assets", "gsm8k", "test.jsonl"))
    for flags, choice in (
            (("--shape", "1,2,1", *select), "--prelude 0 --core 1,2 --coda 3"),
            (("--shape", "3", "--feed_forward", *select), "--feed_forward --layers 0,1,3"),
            (("--shape", "1,2,1"), "--prelude 0 --core 2,3 --coda 4")):
        call(surgery.main, stories, tmp_path / "a", *flags, "--overwrite")
        assert choice in capsys.readouterr().out
        call(surgery.main, stories, tmp_path / "b", *choice.split(), "--overwrite")
        assert same_weights(tmp_path / "a", tmp_path / "b")

def edit_config(folder, **keys):
    with open(folder / "config.json") as f:
        config = json.load(f)
    (folder / "config.json").write_text(json.dumps(config | keys))

@needs_assets
def test_precision_and_kept_tensors(tmp_path):
    """Weights keep their type, mixed ones get one that holds all; dropped layers may be missing."""
    src = tmp_path / "src"
    shutil.copytree(fixture("hf_llama_gqa_untied"), src)
    tensors = load_file(src / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.startswith("model.layers.2.")}
    half, bf16 = torch.float16, torch.bfloat16
    for norms, rest, dtype in ((half, half, half), (bf16, bf16, bf16), (half, bf16, torch.float32)):
        stored = {k: v.to(norms if "norm" in k else rest) for k, v in tensors.items()}
        save_file(stored, src / "model.safetensors")
        flags = ("--prelude", "0", "--core", "3,5", "--coda", "7", "--overwrite")
        call(surgery.main, src, tmp_path / "m", *flags)
        out = load_file(tmp_path / "m" / "model.safetensors")
        assert {t.dtype for t in out.values()} == {dtype}
        kept = stored["model.layers.5.mlp.down_proj.weight"].to(dtype)
        assert torch.equal(out["core.1.mlp.proj.weight"], kept)


SURGERY_REFUSES = [  # flags, words in the message
    ("--prelude 0", "--core"), ("--prelude 0-1 --core 3-8 --coda 7", "3-8"),
    ("--prelude 0-3 --core 3-5 --coda 7", "taken twice"),
    ("--prelude 0 --core 1-x --coda 7", "--core"), ("--preset tinyllama-4-8-4", "--preset"),
    ("--shape 4,4,4", "--shape"), ("--select block-influence", "--text"),
    ("--feed_forward --layers 3-9", "--layers"), ("", "--prelude"),
    ("--feed_forward --shape 3", "--layers"), ("--shape 1,2,1 --prelude 0", "--shape"),
    ("--prelude 1-0 --core 2 --coda 3", "1-0")]

@needs_assets
def test_surgery_refuses(tmp_path):
    """Every wrong input to surgery.py ends in one line and leaves OUT as it was, or absent."""
    src, out, bad = fixture("hf_llama_gqa_untied"), tmp_path / "out", tmp_path / "bad"
    for flags, words in SURGERY_REFUSES:
        assert words in refusal(surgery.main, src, out, *flags.split()), flags
    assert "recurrent" in refusal(surgery.main, fixture("raven_llama"), out, "--shape", "1,2,1")
    weights = bad / "model.safetensors"

    def drop_one():
        tensors = load_file(weights)
        tensors.pop("model.layers.3.mlp.up_proj.weight")
        save_file(tensors, weights)

    tokenizer = "assets/tokenizers/tinyllama/tokenizer.model"
    for damage, words in ((lambda: edit_config(bad, model_type="gpt2"), "gpt2"),
                          (lambda: os.truncate(weights, 100_000), "damaged"),
                          (drop_one, "layers.3.mlp.up_proj"),
                          (lambda: edit_config(bad, hidden_size=128), "shape"),
                          (lambda: (bad / "config.json").write_text("{"), "config.json"),
                          (lambda: os.rename(weights, bad / "model.bin"), "Pickled"),
                          (lambda: shutil.copy(shared(tokenizer), bad), "tokenizer")):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(src, bad)
        damage()
        assert words in refusal(surgery.main, bad, out, "--feed_forward")
    assert os.listdir(tmp_path) == ["bad"]
    convert(src, out, "--feed_forward")
    assert "--overwrite" in run("surgery.py", src, out, "--feed_forward", ok=False)
    before = (out / "model.safetensors").read_bytes()
    assert "exists" in refusal(surgery.main, out, f"{out}/", "--export", "hf", "--overwrite")
    # A limit on the size of files stands for a full disk.
    command = f"ulimit -f 500; exec {sys.executable} surgery.py {src} {out} --shape 1,2,1 --overwrite"
    full = subprocess.run(["bash", "-c", command], cwd=HERE, capture_output=True, text=True)
    assert full.returncode == 1 and len(full.stderr.splitlines()) == 1, full.stderr
    assert str(out) in full.stderr and sorted(os.listdir(tmp_path)) == ["bad", "out"]
    assert (out / "model.safetensors").read_bytes() == before


# ------------------------------------------------------------------------------- data, tokenizers

# ------------------------------------------------------------------------------------ whole files

def test_whole_files_or_none(tmp_path):
    """A file or folder is written completely or not at all, for others to read; NaN is null."""
    for value in (1.0, float("nan")):
        data.write_json(tmp_path / "a.json", {"x": value})
    assert data.read_json(tmp_path / "a.json") == {"x": None}
    with pytest.raises(SystemExit, match="a.json: cannot be written"):
        with data.whole(tmp_path / "a.json") as new:
            os.makedirs(new)
    for end in ("", "KeyError"):
        with contextlib.suppress(KeyError), data.whole(tmp_path / "b") as new:
            os.makedirs(new)
            os.close(os.open(f"{new}/c{end}", os.O_CREAT, 0o600))  # as safetensors does
            if end:
                raise KeyError
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b"] and os.listdir(tmp_path / "b") == ["c"]
    assert os.stat(tmp_path / "b" / "c").st_mode == os.stat(tmp_path / "a.json").st_mode


# ---------------------------------------------------------------------------------------- the hub

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CHECKPOINT = {
    "config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"not wanted",
    "model.safetensors.index.json": b'{"weight_map": {"a": "%s", "b": "%s"}}' % (
        FIRST.encode(), SECOND.encode()),
    FIRST: b"1" * 3_000_000, SECOND: b"2" * 5}

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has `files` and lists `listed`. requests: the name and first byte of each."""
    state = SimpleNamespace(files=dict(CHECKPOINT), listed=dict(CHECKPOINT), requests=[], cut=None,
                            status=206, folder=tmp_path / "nanoloop" / "some--model")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = unquote(self.path).rpartition("/")[2]
            start = int(self.headers["Range"][6:-1])
            state.requests.append((name, start))
            body = state.files.get(name)
            if self.path == "/api/models/some/model/revision/main?blobs=true":
                files = [{"rfilename": name, "size": len(content),
                          "lfs": {"sha256": hashlib.sha256(content).hexdigest()}}
                         for name, content in state.listed.items()]
                body = json.dumps({"sha": "c0", "siblings": files}).encode()
            if body is None:
                return self.send_error(404)
            self.send_response(state.status)
            self.send_header("Content-Length", len(body) - start)
            self.end_headers()
            self.wfile.write(body[start:][:state.cut])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(data, "HF_HOME", tmp_path)
    yield state
    server.shutdown()

def fetch():
    return data.download("some/model")

def contents(folder):
    """{name: bytes} of the files of a folder, but for what a kill left."""
    files = [path for path in folder.iterdir() if path.is_file() and ".tmp-" not in path.name]
    return {path.name: path.read_bytes() for path in files}

def test_download_is_complete_and_not_repeated(hub):
    """config.json, tokenizer and safetensors are fetched, never pickles, and only once."""
    assert fetch() == fetch() == str(hub.folder) and len(hub.requests) == 6
    hub.listed.pop("pytorch_model.bin")
    assert contents(hub.folder) == hub.listed
    hub.listed = {"config.json": b"{}", "pytorch_model.bin": b"not wanted"}
    shutil.rmtree(hub.folder)
    assert "never loaded" in refusal(fetch)

def test_download_resumes(hub):
    """After a break only the rest of a file is fetched, by the same command or the next."""
    hub.cut = 1_200_000
    for _ in range(2):
        assert "resumes" in refusal(fetch)
    fetch()
    assert (hub.folder / FIRST).read_bytes() == CHECKPOINT[FIRST]
    starts = [start for name, start in hub.requests if name == FIRST]
    assert starts[0] == 0 < starts[1] < starts[2] and len(starts) == 3

@pytest.mark.parametrize("case, words", [
    ("hash", "sha256"), ("token", "HF_TOKEN"), ("missing", "404"), ("name", "would leave"),
    ("disk", "resumes")])
def test_download_refuses(hub, case, words):
    """A wrong hash, token or name, a missing file, a full disk: one line, and no file in place."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if case == "hash":
        hub.files[FIRST] = b"x" * 3_000_000
    if case == "token":
        hub.status = 401
    if case == "missing":
        del hub.files[SECOND]
    if case == "name":
        hub.listed["tokenizer/../../../x"] = b"x"
    if case == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    message = refusal(fetch)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert words in message and not (hub.folder / FIRST).exists()

def test_usual_cache_is_read_without_a_request(hub, tmp_path):
    """A complete folder in the usual Hugging Face cache is taken as it is."""
    cache = tmp_path / "hub" / "models--some--model"
    for name in ("refs/main", *(f"snapshots/c0/{name}" for name in CHECKPOINT)):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(CHECKPOINT.get(name[13:], b"c0"))
    assert fetch() == data.download("some/model@c0") == str(cache / "snapshots" / "c0")
    assert not hub.requests


# ------------------------------------------------------------------------------------- tokenizers

HARD = [
    "", " ", "Hello  world", "naïve 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 café", "汉字和かな한국어 Ωмिक\u064e",
    "1234567890 3.14", "a\n\n\n  b\t\tc\r\n", "don't DON'T 'ſ", "e\u0301\u0323\u0308" * 9,
    "".join(map(chr, [*range(32), *range(127, 160)])), "|||IP_ADDRESS||| x",
    "<s></s><|endoftext|><|begin_of_text|><|eot_id|>", "a" * 5000, "漢" * 600,
    "\u2028\u00a0\ufeff ﷺ\U0010ffff", "\ufeffx", *(" " * n + "x" + "\n" * n for n in range(1, 101))]
TOKENIZERS = ["tokenizers/llama3", "tokenizers/tinyllama", "tokenizers/olmo2", "stories260K"]

def oracle(name):
    """The tokenizer of an asset as the tokenizers library computes it, from converted files."""
    tokenizers = pytest.importorskip("tokenizers")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    path = shared("assets", name, "tokenizer.model")
    if name == "tokenizers/olmo2":
        return tokenizers.Tokenizer.from_file(path.replace("model", "json"))
    if name == "tokenizers/llama3":
        names = list(Tokenizer.load(shared("assets", name)).special)
        return convert.TikTokenConverter(path, extra_special_tokens=names).converted()
    sp = data.sentencepiece.SentencePieceProcessor(model_file=path)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    scores = {piece: sp.get_score(i) for piece, i in vocab.items() if i > 2 and not sp.is_byte(i)}
    merges = convert.generate_merges(vocab, scores)
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # As TinyLlama's tokenizer.json. Today's LlamaTokenizer adds no space before a first one.
    theirs.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    theirs.add_special_tokens(["<s>", "</s>"])
    return theirs

@needs_assets
@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_match_tokenizers(name, tmp_path):
    """
    Ids equal the tokenizers library's, special names read or not, and decode to the text (a lone
    surrogate to U+FFFD). Llama 3's tokenizer.json gives what its tokenizer.model does.
    """
    theirs, ours = oracle(name), [Tokenizer.load(shared("assets", name))]
    if name == "tokenizers/llama3":
        assert ours[0].encode("Hello world", bos=True) == [128000, 9906, 1917]  # as published
        assert ours[0].special["<|eot_id|>"] == 128009 and ours[0].eos_id == 128001
        (tmp_path / "tokenizer.json").write_text(theirs.to_str())
        ours.append(Tokenizer.load(tmp_path))
        assert ours[0].special == ours[1].special and ours[1].bos_id == 128000
    lines = Path(shared("assets", "gsm8k", "test.jsonl")).read_text().splitlines()
    long = "\n".join(lines * 2)  # byte-level encode() makes two parts of it
    for special in (False, True):
        theirs.encode_special_tokens = not special
        for text in (*HARD, *lines, long):
            expected = theirs.encode(text, add_special_tokens=False).ids
            for tokenizer in ours:
                assert tokenizer.encode(text, special=special) == expected, text[:200]
            assert special or ours[0].decode(expected) == text
    assert len(ours[0].encode(" " * 10**6)) > 1
    assert ours[0].decode(ours[0].encode("\udc00x \ud83d\ude00 \ud83d")) == "\ufffdx 😀 \ufffd"


# ---------------------------------------------------------------------------------------- prepare

def word_documents(path, n):
    """n documents in the embedded corpus's words, written to path; returns their texts."""
    texts = [" ".join(str(i * i + i)) for i in range(n)]
    rows = [{"text": f" {text}\n", "by": f"by {i % 50}"} for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return texts

def prepare(corpus, source, out, *flags):
    call(data.main, "prepare", "--input", source, "--tokenizer", corpus / "tokenizer",
         "--out", out, *flags)

@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prepare_resumes_byte_identical(kind, corpus, tmp_path):
    """
    prepare, killed at any time, resumes to the same bytes: documents without white space around
    them, each with EOS, dropped ones left out. Meanwhile no second one writes there.
    """
    texts, source = word_documents(tmp_path / "a.jsonl", 2000), tmp_path / f"a.{kind}"
    if kind == "parquet":
        table = pytest.importorskip("pyarrow.json").read_json(tmp_path / "a.jsonl")
        pytest.importorskip("pyarrow.parquet").write_table(table, source, row_group_size=90)
    flags = "--val=0.1", "--shard_tokens=2000", "--procs=2", "--drop=by=BY 7"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prepare(corpus, source, whole, *flags)
    command = ["prepare", "--input", source, "--tokenizer", corpus / "tokenizer", "--out", killed]
    first = subprocess.Popen([sys.executable, "data.py", *command, *flags], cwd=HERE)
    while not (killed / "train_000001.npy").exists():
        assert first.poll() is None
    assert "another process" in refusal(data.main, *command, *flags)
    first.kill()
    time.sleep(0.5)  # its workers notice, and let go of the lock
    assert "meta.json" in refusal(lambda: Shards(killed, "train", 8))
    for _ in range(2):  # to the end; and nothing more to do
        call(data.main, *command, *flags)
        assert contents(killed) == contents(whole)
    assert "other arguments" in refusal(data.main, *command)
    meta = data.read_json(whole / "meta.json")
    assert meta["counts"] == {"documents": 2000, "dropped": 40}
    shards = zip(meta["shards"]["train"], meta["shards"]["val"], strict=True)
    tokens = [np.load(whole / name) for pair in shards for name, *_ in pair]
    text = " ".join(f"{text} </s>" for i, text in enumerate(texts) if i % 50 != 7)
    assert np.concatenate(tokens).tolist() == [data.WORDS.index(word) for word in text.split()]

@pytest.mark.parametrize("row, ids", [
    ({"a": " has 1 ", "b": "has 2\n"}, ["has 1 \nhas 2", 1]),
    ({"a": "\n"}, []),
    ({"ids": [2, 8]}, [2, 8]),
    ({"a": "User: so\n### Assistant:\nit<|im_end|>\nthe user: is"}, ["so\nit\nthe user: is", 1]),
    ({"a": [{"content": "<|im_start|>user\nhas"}, {"content": "<|System|> 2"}]}, ["has\n2", 1])])
def test_prepare_reads_fields_chats_and_ids(row, ids):
    """Fields and messages are joined, tags and outer blanks removed; ids are taken as they are."""
    tokenizer = SimpleNamespace(encode=lambda text, bos: [text], eos_id=1, vocab_size=9)
    assert data.document_ids(tokenizer, row, list(row), strip_roles=True) == ids

@pytest.mark.parametrize("bad", ['{"text": ', "[]", '{"text": "\xff"}', '{"text": 3}',
                                 '{"text": [17]}', '{"q": "a"}'])
def test_prepare_counts_bad_documents(corpus, tmp_path, bad):
    """Up to --max_bad of the documents may be bad; they are left out and counted."""
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"text": "has 1"}\n' * 9 + bad, encoding="latin-1")
    assert "1 of 10 documents" in refusal(lambda: prepare(corpus, source, out))
    prepare(corpus, source, out, "--max_bad=0.1")
    assert data.read_json(out / "meta.json")["counts"]["bad"] == 1


# ------------------------------------------------------------------------------------- the loader

def test_loader_is_a_pure_function(corpus):
    """2 ranks with batch B see what 1 rank with 2B sees; each epoch is another order of all rows."""
    shards, again = (Shards(corpus / "task", "val", 26) for _ in range(2))
    both = shards.batch(7, 3, 0, 1, 8)
    parts = [again.batch(7, 3, rank, 2, 4) for rank in (0, 1)]
    for whole, *halves in zip(both, *parts):
        assert np.concatenate(halves).tolist() == whole.tolist()
    first, second = (shards.order(7, epoch).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1024)) and first != second

def test_loader_windows(corpus, tmp_path):
    """Windows follow one another without crossing shards; targets are the next token."""
    word_documents(tmp_path / "a.jsonl", 300)
    prepare(corpus, tmp_path / "a.jsonl", tmp_path / "out", "--shard_tokens=500")
    shards, windows = Shards(tmp_path / "out", "train", 16), []
    for name, *_ in shards.meta["shards"]["train"]:
        tokens = np.load(tmp_path / "out" / name).tolist()
        for i in range(0, len(tokens) - 16, 16):
            windows.append((tokens[i:i + 16], tokens[i + 1:i + 17]))
    idx, targets, _ = shards.batch(0, 0, 0, 1, shards.rows)
    assert sorted(zip(idx.tolist(), targets.tolist())) == sorted(windows)

def test_mixture_follows_its_weights(corpus):
    """Exact shares, evenly spread; each set gives its own samples in order, epoch by epoch."""
    weights, sets = (5, 1, 2), [Shards(corpus / "task", "val", 26) for _ in range(3)]
    for k, part in enumerate(sets):
        part.sample = functools.partial(lambda k, seed, number: np.array([[k], [number]]), k)
    mixture = data.Mixture(sets, weights)
    chosen, numbers, _ = mixture.batch(3, 0, 0, 1, 800)
    assert mixture.batch(3, 7, 1, 2, 8)[1].equal(numbers[120:128])
    for k, weight in enumerate(weights):
        mine = chosen == k
        assert (mine.cumsum(0)[:, 0] - torch.arange(1, 801) * weight / 8).abs().max() < 1.5
        assert numbers[mine].tolist() == list(range(100 * weight))
    mixture = data.open_data(f"{corpus}/task:2,{corpus}/task", "val", 26)
    assert mixture.weights == [2, 1] and mixture.rows == 1024 * 3 // 2

def test_changed_data_is_noticed(corpus, tmp_path):
    """The fingerprint is the same wherever the data lie, another where tokens changed."""
    folder = shutil.copytree(corpus / "task", tmp_path / "task")
    before = Shards(folder, "train", 26).fingerprint()
    assert before == Shards(corpus / "task", "train", 26).fingerprint()
    shard = folder / "train_000000.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert Shards(folder, "train", 26).fingerprint() != before
    assert "--context=26" in refusal(lambda: Shards(folder, "train", 32))
    os.truncate(shard, 5000)
    assert "cut short" in refusal(lambda: Shards(folder, "train", 26))


# ---------------------------------------------------------------------------- the embedded corpus

def solve(story):
    """The answer after every sentence of a story (a list of words): the task, said once more."""
    answers, count = [], 0
    for verb, number in zip(story[::2], map(int, story[1::2])):
        sums = {"gets": count + number, "loses": count - number, "times": count * number}
        count = sums.get(verb, number) % 10
        answers.append(str(count))
    return answers

def test_tiny_rows_say_the_truth(corpus):
    """Every row of the embedded corpus is a story with its true answers, labelled as it should."""
    lengths = Counter()  # sentences of worked stories; 0 for padding, 24 for a direct story
    for kind, T, n, shown, end in (("pretrain", 52, 512, 3, "-"), ("task", 26, 1024, 12, "</s>")):
        idx, targets, _ = Shards(corpus / kind, "val", T).batch(0, 0, 0, 1, n)
        labels = iter([*data.WORDS, "-"][max(i, -1)] for i in targets.ravel().tolist())
        for document in " ".join(data.WORDS[i] for i in idx.ravel()).split("</s>")[:-1]:
            text = document.split()
            said = [next(labels) for _ in range(len(text) + 1)]
            if text[:1] == ["so"]:
                assert text[4::4] == solve(sum(zip(text[1::4], text[2::4]), ()))
                assert said == [*text[1:], "</s>", "-"]
            elif text:
                answers = solve(text[:-1])
                assert text[-1] == answers[-1] and said[:24:2] == ["-"] * 12
                assert said[1:24:2] == answers[:shown] + ["-"] * (12 - shown)
                assert said[24:] == [end, "-"]
            lengths[24 if text[:1] == ["has"] else len(text) // 4] += 1
    assert lengths[24] == 512 + 1024 and {*lengths} == {*range(13), 24}
    rows = (corpus / "test.jsonl").read_text() + (corpus / "test18.jsonl").read_text()
    rows = [json.loads(row) for row in rows.splitlines()]
    assert Counter(row["difficulty"] for row in rows) == {18: 300, **{i: 100 for i in range(1, 13)}}
    for row in rows:
        answers = solve(row["question"].split())
        assert row["answer"] == answers[-1] and len(answers) == row["difficulty"]

def test_corpus_touches_nothing_else(corpus, tmp_path):
    """The corpus depends on the seed alone; neither it nor prepare replaces what is not theirs."""
    again, notes = tmp_path / "again", tmp_path / "notes.txt"
    for _ in range(2):
        tiny(again, rows=8000)
        for kind in ("pretrain", "task", "tokenizer", "."):
            assert contents(corpus / kind) == contents(again / kind)
    notes.write_text("mine")
    for out in (notes, again):
        assert "--out" in refusal(data.main, "tiny", "--out", out, "--seed", 1)
        assert refusal(lambda: prepare(corpus, notes, out))
    assert notes.read_text() == "mine" and len(os.listdir(again)) == 5


# ---------------------------------------------------------------------------------- the optimizer

SHAPES = {"embed.weight": (30, 8), "prelude.0.norm_1.weight": (8,), "adapter.weight": (8, 16),
          "prelude.0.attn.qkv.weight": (24, 8), "core.0.mlp.fc.weight": (40, 8),
          "core.0.mlp.proj.weight": (8, 20), "norm_f.weight": (8,), "head.weight": (30, 8)}
KINDS = ("muon", "adamw", "adamw*")

def noise(shape, *seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(seed) % 2**31))

def parameters(shapes=SHAPES, dtype=torch.float32):
    return {name: torch.nn.Parameter(noise(shape, i).to(dtype))
            for i, (name, shape) in enumerate(shapes.items())}

def step_with(opt, ps, *grads, **step):
    """One update from the gradients {name: tensor} of some micro-batches. Returns their norm."""
    for g in grads:
        for name, p in ps.items():
            p.grad = g[name].to(p.dtype, copy=True)
        opt.accumulate()
        assert all(p.grad is None for p in ps.values())
    return opt.step(**step)

def gradients(ps, *seed, scale=1.0):
    return {k: scale * noise(p.shape, *seed, j) for j, (k, p) in enumerate(ps.items())}

def test_muon_update_is_torchs():
    """Stacked or part by part, the update is torch.optim.Muon's of the same matrices, to the bit."""
    shapes = {"core.0.weight": (32, 64), "core.1.weight": (64, 32), "prelude.0.weight": (48, 16)}
    ours = parameters(shapes)
    theirs = [p.detach().clone() for p in ours.values()]
    theirs[2:] = [part.clone() for part in theirs[2].split([16, 32])]
    theirs = [torch.nn.Parameter(p) for p in theirs]
    splits = {"prelude.0.weight": [16, 32]}
    opt = Muon(ours.items(), lr=0.02, adam_lr=1.0, weight_decay=0.1, splits=splits)
    peer = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    for i in range(4):
        g = gradients(ours, i)
        step_with(opt, ours, g)
        grads = [*list(g.values())[:2], *g["prelude.0.weight"].split([16, 32])]
        for p, grad in zip(theirs, grads):
            p.grad = grad
        peer.step()
    found = [*list(ours.values())[:2], *ours["prelude.0.weight"].split([16, 32])]
    assert all(torch.equal(a, b) for a, b in zip(found, theirs, strict=True))

@pytest.mark.parametrize("clip, scale", ((math.inf, 1e-6), (0.5, 1.0)))
def test_adamw_and_clipping_are_torchs(clip, scale):
    """AdamW is torch's with eps 1e-8, after torch's clip_grad_norm_, also for tiny gradients."""
    ours, theirs = parameters(), parameters()
    opt = Muon(ours.items(), lr=0.01, adam_lr=1.0, weight_decay=0.1, optimizer="adamw")
    peer = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for i in range(5):
        g = gradients(ours, i, scale=scale)
        norm = step_with(opt, ours, g, lr_factor=0.5**i, clip=clip)
        for k, p in theirs.items():
            p.grad = g[k].clone()
        theirs_norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip)
        assert norm == pytest.approx(theirs_norm.item(), rel=1e-5)
        peer.param_groups[0]["lr"] = 0.01 * 0.5**i
        peer.step()
    assert all(torch.allclose(p, theirs[k], atol=1e-7) for k, p in ours.items())

def test_adamw_star_is_the_papers():
    """AdamW* is its formulas in REFERENCE.md, number by number, v clamped in place at 1e-12."""
    shapes = {"embed.weight": (5, 3), "norm_f.weight": (4,)}
    ours, lr, wd = parameters(shapes), 0.01, 0.1
    opt = Muon(ours.items(), lr=lr, adam_lr=1.0, weight_decay=wd, optimizer="adamw*")
    p = {k: q.detach().flatten().tolist() for k, q in ours.items()}
    m, v = {}, {}
    for t, factor in enumerate((0.3, 1.0, 1.0, 0.7, 0.2), start=1):
        grads = gradients(ours, t, scale=20.0 if t == 3 else 1.0)
        grads["embed.weight"][2] *= 1e-8
        step_with(opt, ours, grads, lr_factor=factor)
        for k, g in grads.items():
            g = g.flatten().tolist()
            if t == 1:
                m[k], v[k] = list(g), [x * x for x in g]
            m[k] = [0.9 * a + 0.1 * x for a, x in zip(m[k], g)]
            v[k] = [max(1e-12, 0.95 * a + 0.05 * x * x) for a, x in zip(v[k], g)]
            rms = math.sqrt(sum(x * x / a for a, x in zip(v[k], g)) / len(g))
            assert t != 3 or rms > 1.5, "no step is made smaller"
            step = lr * factor / max(1, rms) / (1 - 0.9**t)
            p[k] = [w * (1 - factor * wd) - step * math.atan2(a, math.sqrt(b / (1 - 0.95**t)))
                    for w, a, b in zip(p[k], m[k], v[k])]
    for k, q in ours.items():
        wanted = torch.tensor(p[k], dtype=torch.float64)
        assert torch.allclose(q.flatten().double(), wanted, atol=1e-6, rtol=0), k

def updates_of(kind, dtype, rank, world, start=0, end=20, saved=None):
    """Updates start..end of one rank: its optimizer and {name: weight}. saved: of update `start`."""
    ps = parameters(dtype=dtype)
    masters = saved["masters"] if saved else {k: p.detach() for k, p in parameters().items()}
    with torch.no_grad():
        for k, p in ps.items():
            p.copy_(masters[k])
    opt = Muon(ps.items(), 0.02, 0.01, 0.1, kind, masters=masters, rank=rank, world=world)
    if saved:
        opt.load(saved["state"], start)
    for u in range(start, end):
        share = range(rank * 8 // world, (rank + 1) * 8 // world)
        grads = [gradients(ps, u, i) for i in share]
        step_with(opt, ps, *grads, lr_factor=0.9**u, clip=20.0, labels=8)
    return opt, {f"{kind} {dtype} {k}": t.clone() for k, t in opt.masters.items()}


CASES = [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)]

def rank_main(rank, world, folder):
    """One of `world` gloo ranks: 20 updates of every kind, at one go and resumed after 12."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet{world}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    whole_run, resumed = {}, {}
    for kind, dtype in CASES:
        whole_run |= updates_of(kind, dtype, rank, world)[1]
        opt = updates_of(kind, dtype, rank, world, end=12)[0]
        saved = {"masters": {k: t.clone() for k, t in opt.masters.items()}, "state": opt.state}
        resumed |= updates_of(kind, dtype, rank, world, 12, 20, saved)[1]
    assert all(torch.equal(t, resumed[k]) for k, t in whole_run.items())
    save_file(whole_run, f"{folder}/{world}_{rank}")
    dist.barrier()
    dist.destroy_process_group()

def test_optimizer_on_any_number_of_ranks(tmp_path):
    """1, 2 and 4 ranks agree to rounding after 20 updates, ranks among each other and a resumed
    run with an unbroken one to the bit."""
    one = {}
    for kind, dtype in CASES:
        one |= updates_of(kind, dtype, 0, 1)[1]
    for world in (2, 4):
        torch.multiprocessing.spawn(rank_main, (world, str(tmp_path)), world)
        first = load_file(tmp_path / f"{world}_0")
        for rank in range(1, world):
            other = load_file(tmp_path / f"{world}_{rank}")
            assert all(torch.equal(t, other[k]) for k, t in first.items())
        difference = max((t - one[k]).abs().max().item() for k, t in first.items())
        print(f"{world} ranks: largest difference {difference}")
        assert difference < 0.01


# --------------------------------------------------------------------------------------- decoding

def decode_model(n_core=2, norm="pre", vocab_size=64):
    """A tiny random model whose noise (std 1) and recurrences change what it says."""
    model = RecurrentLM(Config(vocab_size, n_embd=32, n_head=4, n_kv_head=2, n_ffn=64, n_prelude=1,
                               n_core=n_core, n_coda=1, norm=norm, context=64, state_std=1.0,
                               mean_recurrence=3))
    model.init_weights(seed=1)
    return model

def decode(model, prompts, n, **kw):
    """(B, n) tokens"""
    rows = [[] for _ in prompts]
    for row, token, _ in generate(model, prompts, n, **kw):
        rows[row].append(token)
    return torch.tensor(rows)

def random_prompts(*lengths):
    return [torch.randint(64, (n,)).tolist() for n in lengths]

@needs_assets
@pytest.mark.parametrize("name", ("raven_llama", "raven_olmo2"))
def test_greedy_tokens_of_the_papers_code(name, tmp_path):
    """Cached greedy decoding gives the paper's own code's tokens (4 steps, zero state)."""
    model, x = convert(fixture(name), tmp_path / "m"), expected(name)
    prompt, greedy = x["greedy_prompt"], x["greedy"]
    new = decode(model, prompt.tolist(), greedy.shape[1] - prompt.shape[1], steps=4, state="zero")
    assert torch.cat((prompt, new), 1).tolist() == greedy.tolist()

@pytest.mark.parametrize("n_core, norm, steps", ((2, "pre", 5), (2, "post", 64), (2, "pre", 0),
                                                 (0, "pre", None)))
@pytest.mark.parametrize("chunk", (3, 512))
def test_cache_equals_full_recomputation(n_core, norm, steps, chunk, monkeypatch):
    """Every cached token is the one that a full forward pass over the text so far gives."""
    monkeypatch.setattr(sample, "PREFILL", chunk)
    model, prompts = decode_model(n_core, norm), torch.randint(64, (3, 7))
    text = torch.cat((prompts, decode(model, prompts.tolist(), 12, steps=steps, seed=5)), 1)
    state = model.initial_state(19, 1, 5, range(19))[:, 0].expand(3, -1, -1)
    with torch.no_grad():
        logits, _ = model(text, steps=steps, state=state)
    assert text[:, 7:].tolist() == logits[:, 6:-1].argmax(-1).tolist()

@pytest.mark.parametrize("way", ({}, {"draft_steps": 1, "draft_len": 3},
                                 {"steps": 9, "exit": "kl", "exit_threshold": 0.05}))
def test_batch_equals_alone(way):
    """A row's tokens depend neither on the batch's other rows nor on how many are asked for."""
    model, limits, prompts = decode_model(), (20, 5, 13, 6), random_prompts(1, 9, 4, 17)
    alone = [decode(model, [p], 20, seed=3, **way)[0].tolist() for p in prompts]
    assert decode(model, prompts, 10, seed=3, **way).tolist() == [row[:10] for row in alone]
    rows = [[] for _ in prompts]

    def ends(row, token):
        return len(rows[row]) == limits[row]

    for row, token, _ in generate(model, prompts, 20, ends=ends, seed=3, **way):
        rows[row].append(token)
    assert rows == [row[:n] for row, n in zip(alone, limits)]

@pytest.mark.parametrize("norm, steps, d, n", (("pre", 8, 2, 4), ("post", 3, 2, 1),
                                               ("pre", 64, 1, 7)))
def test_speculative_equals_plain(norm, steps, d, n):
    """Greedy text is the same token for token, whether drafts are accepted or not."""
    model, prompts = decode_model(2, norm), random_prompts(1, 12, 3)
    drafted = decode(model, prompts, 30, steps=steps, draft_steps=d, draft_len=n)
    assert torch.equal(drafted, decode(model, prompts, 30, steps=steps))

def test_speculative_sampling_keeps_the_distribution():
    """Pairs of tokens come as often as the model at r says, though drafts are distributed else."""
    model, rows, settings = decode_model(vocab_size=6), 8000, dict(temperature=0.7, top_k=5)
    state = model.initial_state(3, 1, 1, range(3))[:, 0]  # decoding has one for all rows

    @torch.no_grad()
    def pairs(steps):
        def after(*ids):
            logits = model(torch.tensor([ids]), steps=steps, state=state[None, :len(ids)])[0]
            return distribution(logits[0, -1], Decoding(**settings))

        return torch.stack([after(2)[i] * after(2, i)[j] for i in range(6) for j in range(6)])

    exact, draft = pairs(4), pairs(1)
    tokens = decode(model, [[2]] * rows, 3, steps=4, seed=1, draft_steps=1, draft_len=2, **settings)
    found = (6 * tokens[:, 0] + tokens[:, 1]).bincount(minlength=36) / rows
    error = (exact * (1 - exact) / rows).sqrt()
    assert ((found - exact).abs() <= 4.5 * error).all()
    assert ((found - draft).abs() > 10 * error).any()

def test_adaptive_exit():
    """Threshold 0 is plain decoding; one that is always met is decoding at min_steps."""
    model, prompts, way = decode_model(), [[5], [9], [33]], {"steps": 12, "exit": "kl"}
    for kv in ("full", "2"):
        never = decode(model, prompts, 20, exit_threshold=0.0, kv=kv, **way)
        assert torch.equal(never, decode(model, prompts, 20, steps=12, kv=kv))
    always = decode(model, prompts, 20, exit_threshold=1e9, min_steps=4, **way)
    assert torch.equal(always, decode(model, prompts, 20, steps=4))

def test_adaptive_rows_take_their_own_time():
    """Rows take different numbers; slots that a token did not reach hold its last keys."""
    model, prompts = decode_model(), [[5], [9], [33]]
    o = Decoding(exit="kl", exit_threshold=0.01)
    with torch.inference_mode():
        d, seen = Decoder(model, 12, 3, 60, o), []
        for event in adaptive(d, prompts, o, None, {0, 1, 2}):
            seen.append(event)
            if len(seen) == 60:
                break
    assert len({took for _, _, took in seen}) > 2
    for i in range(3):
        for position, took in enumerate([took for row, _, took in seen if row == i]):
            for keys, _ in d.layers[1]:
                slots = keys[:, i, position]
                assert slots[took - 1].any() and slots[took:].eq(slots[took - 1]).all()

def test_constant_memory():
    """--kv N has the size of N slots whatever r is; with N >= r it is exact."""
    model, prompts = decode_model(), [[5, 1, 2], [9]]
    sizes = [len(Decoder(model, r, 2, 30, Decoding(kv=kv)).layers[1][0][0])
             for r, kv in ((32, "full"), (32, "last"), (4, "last"), (32, "3"))]
    assert sizes == [32, 1, 1, 3]
    full = decode(model, prompts, 20, steps=6)
    assert torch.equal(full, decode(model, prompts, 20, steps=6, kv="6"))
    assert not torch.equal(full, decode(model, prompts, 20, steps=6, kv="last"))

@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile")
def test_every_way_of_decoding_compiles():
    """Plain, drafts and exits compile and give the tokens of the uncompiled model."""
    model, compiled = (decode_model(n_core=1) for _ in range(2))
    compiled.compile_parts(dynamic=True)
    for way in ({}, {"draft_steps": 1, "draft_len": 1}, {"exit": "kl", "exit_threshold": 0.01}):
        tokens = decode(compiled, [[5, 1, 2]], 4, steps=2, **way)
        assert torch.equal(tokens, decode(model, [[5, 1, 2]], 4, steps=2, **way)), way

@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler for torch.compile")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_compiled_products_of_few_rows(dtype):
    """The sums that replace products in compiled decoding are float64's, for 1 row to 5."""
    layer = Linear(48, 40).to(dtype)
    f = torch.compile(lambda x: layer(x), dynamic=False)
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0, "rtol": 2**-7}
    with torch.inference_mode():
        for rows in (1, 4, 5):
            x = torch.randn(1, rows, 48).to(dtype)
            wanted = x.double() @ layer.weight.double().T
            torch.testing.assert_close(f(x).double(), wanted, **close)

def test_pick_follows_temperature_top_k_and_top_p():
    """Draws have softmax(logits / temperature)'s frequencies, cut to the top k and the nucleus."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]].expand(20000, 4)
    rng = torch.Generator().manual_seed(0)
    for settings, wanted in (((1.0, 0, 1.0), [0.5, 0.3, 0.15, 0.05]),
                             ((1.0, 2, 1.0), [0.625, 0.375, 0.0, 0.0]),
                             ((1.0, 0, 0.7), [0.625, 0.375, 0.0, 0.0]),
                             ((0.5, 0, 1.0), [0.6849, 0.2466, 0.0616, 0.0068])):
        tokens = pick(logits, Decoding(*settings), rng)
        share = (tokens.bincount(minlength=4) / 20000)[[1, 3, 0, 2]]
        torch.testing.assert_close(share, torch.tensor(wanted), atol=0.015, rtol=0)
    for settings in ((0, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)):  # all of them greedy
        assert pick(logits[:5], Decoding(*settings), rng).tolist() == [1] * 5

def test_sampling_refuses(corpus, tmp_path):
    """Wrong flags, prompts and models of sample.py end in one line each."""
    small(vocab_size=17, context=40).save(tmp_path / "m", corpus / "tokenizer")
    small(vocab_size=16).save(tmp_path / "other", corpus / "tokenizer")
    nan = small(vocab_size=17)
    nan.embed.weight.data.fill_(math.nan)
    nan.save(tmp_path / "nan", corpus / "tokenizer")
    for model, flags, words in (
            ("no", "", "no such folder"), ("other", "", "another model"), ("m", "--prompt=", "word"),
            ("nan", "", "damaged"), ("m", "--kv=x", "--kv"), ("m", "--steps=-1", "--steps"),
            ("m", "--draft_steps=2 --exit=kl", "--draft_steps"),
            ("m", "--draft_steps=9 --steps=4", "--draft_steps")):
        args = ("--model", tmp_path / model, "--prompt=has 1", "--tokens=4", *flags.split())
        assert words in refusal(sample.main, *args), flags


# --------------------------------------------------------------------------------------- training

def settings(**changes):
    return train.Settings(**dict(out_dir="x", data="x") | changes)

@needs_assets
def test_schedules_are_the_papers():
    """Mean recurrence, backprop depth, learning rate and draws of (n, k) are the paper's code's."""
    with open(fixture("curriculum.json")) as f:
        oracle = json.load(f)
    for x in oracle["schedules"]:
        s = settings(updates=x["total"], curriculum_warmup=x["warmup"],
                     mean_recurrence=x["max_mean_rec"], curriculum=x["warmup_type"])
        runs = [r for r, length in x["mean_recurrence_runs"] for _ in range(length)]
        assert [train.mean_recurrence(s, u) for u in range(x["total"])] == runs
    for x in oracle["backprop_schedules"]:  # the paper's code falls back at the last update
        s = settings(updates=x["total"], backprop_warmup=x["warmup"], curriculum="none")
        runs = [k for k, length in x["backprop_depth_runs"] for _ in range(length)]
        assert [train.backprop_depth(s, u) for u in range(x["total"] - 1)] == runs[:-1]
    for x in oracle["lr_factors"]["cases"]:
        s = settings(updates=x["total"], warmup=x["warmup"], cooldown=x["cooldown"])
        assert all(abs(train.lr_scale(s, u) - f) < 1e-9 for u, f in x["points"])
    for x in oracle["sampler"]["cases"]:
        s = settings(mean_recurrence=x["mean_recurrence"], backprop_depth=x["backprop_depth"],
                     curriculum="none")
        draws = [list(train.draw_steps(s, 0, i)) for i in range(1, 65)]
        assert draws == x["exact_data_step_1_to_64"]

def test_settings_say_what_is_wrong(tmp_path):
    """Values keep their types, "=" may stand in one; a wrong key or type names the key."""
    config = tmp_path / "c.toml"
    config.write_text('out_dir = "a=b"\ndata = "d"\nlr = 1\neval_steps = [1, 2]\n')
    flags = [f"--config={config}", "--updates=1000", "--eval_steps=4,8", "--compile=false"]
    s = train.read_settings([*flags, "--recompute", "--seed", "3"])
    found = s.out_dir, s.lr, s.updates, s.eval_steps, s.compile, s.recompute, s.seed
    assert found == ("a=b", 1.0, 1000, [4, 8], False, True, 3)
    for arg, words in (("--uptades=3", "updates"), ("--updates=1.5", "updates"), ("--lr=x", "--lr"),
                       ("--compile=3", "--compile"),
                       ("--curriculum=cubic", "linear"), ("updates=3", "--updates="),
                       (f"--config={tmp_path}/no.toml", "no.toml")):
        message = refusal(lambda: train.read_settings([f"--config={config}", arg]))
        assert words in message, message


RUN = ("--n_prelude=1", "--n_core=1", "--n_coda=1", "--n_embd=32", "--n_ffn=64", "--context=26",
       "--batch_size=16", "--micro_batch=4", "--mean_recurrence=3", "--backprop_depth=2",
       "--updates=12", "--save_every=3", "--eval_every=6", "--eval_rows=32", "--eval_steps=1,4",
       "--compile=false", "--lr=0.01", "--adam_lr=0.003", "--dtype=float32", "--keep=1")

def losses(folder):
    with open(os.path.join(folder, "log.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    return {x["update"]: x["loss"] for x in lines if "loss" in x}

def listing(folder):
    return sorted(name for name in os.listdir(folder) if name != ".lock")

def children(p):
    found = subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]

def test_killed_runs_end_alike(corpus, tmp_path):
    """A rank that is killed is restarted by torchrun; all that are killed continue with the same
    command: the same bits on 2 processes, the same losses to rounding on 1."""
    base = ["train.py", f"--data={corpus}/pretrain", *RUN, "--context=52", "--dtype=bfloat16",
            "--draws=2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
              "--max-restarts=1"]
    run(*base, f"--out_dir={tmp_path}/one")
    run(*launch[1:], *base, f"--out_dir={tmp_path}/two")
    command, killed = [*launch, *base, f"--out_dir={tmp_path}/killed"], []
    for _ in range(2):
        p = subprocess.Popen(command, cwd=HERE, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
        for line in p.stdout:
            ranks = children(p)
            if line.startswith("update     4/12") and not killed:
                killed.append(ranks[-1])
                os.kill(ranks[-1], signal.SIGKILL)
            if line.startswith("update     8/12") and len(killed) == 1:
                killed += ranks
                for pid in (p.pid, *ranks):
                    os.kill(pid, signal.SIGKILL)
        p.wait()
    assert p.returncode == 0 and len(killed) == 3
    assert listing(tmp_path / "killed") == ["log.jsonl", "step_000012"]
    assert losses(tmp_path / "killed") == losses(tmp_path / "two")
    assert same_weights(tmp_path / "killed" / "step_000012", tmp_path / "two" / "step_000012")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 12 and all(abs(one[u] - two[u]) < 1e-2 for u in one)

def test_stopped_run_ends_with_the_same_weights(corpus, tmp_path):
    """SIGTERM and --max_minutes save and stop within an update; the same command continues."""
    base = ("train.py", f"--data={corpus}/task", *RUN, "--save_every=100", "--updates=40",
            "--eval_every=100")
    run(*base, f"--out_dir={tmp_path}/whole")
    folder = tmp_path / "stopped"
    p = subprocess.Popen([sys.executable, *base, f"--out_dir={folder}"], cwd=HERE, text=True, stdout=subprocess.PIPE)
    for line in p.stdout:
        if line.startswith("update     8/40  loss"):
            p.send_signal(signal.SIGTERM)
    assert p.wait() == 128 + signal.SIGTERM and "SIGTERM" in line and "continues" in line
    assert "--max_minutes" in run(*base, f"--out_dir={folder}", "--max_minutes=1e-6")
    finish(*base[1:], f"--out_dir={folder}", "--max_minutes=60")
    assert same_weights(tmp_path / "whole" / "step_000040", folder / "step_000040")
    assert losses(tmp_path / "whole") == losses(folder)
    message = refusal(train.main, *base[1:], f"--out_dir={folder}", "--lr=0.02")
    assert "lr=0.01, not 0.02" in message

def test_updates_that_are_not_finite(corpus, tmp_path, monkeypatch, capsys):
    """A loss that is not finite skips its update; too many in a row, over restarts too, end the
    run, and a good checkpoint is never replaced by a bad one."""
    args = (f"--data={corpus}/task", *RUN, "--save_every=6", "--max_skips=2")
    now, bad, forward, scale = [0], set(), RecurrentLM.forward, train.lr_scale

    def poisoned(model, *inputs):
        logits, loss = forward(model, *inputs)
        nan = torch.is_grad_enabled() and now[-1] in bad
        return logits, loss * (math.nan if nan else 1.0)

    monkeypatch.setattr(train, "lr_scale", lambda s, u: (now.append(u), scale(s, u))[1])
    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    bad |= {1, 3, 4}
    finish(*args, f"--out_dir={tmp_path}/some")
    assert capsys.readouterr().out.count("loss nan") == 3
    bad |= {5, 6, 7, 8}
    for _ in range(2):
        message = refusal(train.main, *args, f"--out_dir={tmp_path}/many")
        assert "no finite gradient" in message and "--lr" in message
        assert listing(tmp_path / "many") == ["log.jsonl"]
    diverging = ("--optimizer=adamw", "--lr=1e38", "--save_every=1")
    message = refusal(train.main, *args, *diverging, f"--out_dir={tmp_path}/diverged")
    assert "finite" in message
    for name in os.listdir(tmp_path / "diverged"):
        if name.startswith("step"):
            weights = load_file(tmp_path / "diverged" / name / "model.safetensors")
            assert all(t.isfinite().all() for t in weights.values())

def test_full_disk_leaves_the_last_checkpoint(corpus, tmp_path):
    """A checkpoint that cannot be written ends the run in one line; the one before stays whole."""
    base = (f"--data={corpus}/task", *RUN, "--save_every=6", "--keep=2", f"--out_dir={tmp_path}/run")
    finish(*base)
    os.rename(tmp_path / "run" / "step_000012", tmp_path / "whole")
    command = f"ulimit -f 40; exec {sys.executable} train.py {' '.join(base)}"  # files of 40 KB
    full = subprocess.run(["bash", "-c", command], cwd=HERE, capture_output=True, text=True)
    assert full.returncode == 1 and len(full.stderr.splitlines()) == 1, full.stderr
    assert "step_000012" in full.stderr
    assert listing(tmp_path / "run") == ["log.jsonl", "step_000006"]
    finish(*base)
    assert same_weights(tmp_path / "whole", tmp_path / "run" / "step_000012")

def test_accumulation_is_the_mean_over_all_labels(corpus, tmp_path):
    """Micro-batches with different numbers of labels give the update of the whole batch."""
    base = (f"--data={corpus}/pretrain", *RUN, "--context=52", "--updates=4",
            "--recurrence_sampler=fixed", "--optimizer=adamw")
    finish(*base, "--micro_batch=16", f"--out_dir={tmp_path}/one")
    finish(*base, "--micro_batch=2", f"--out_dir={tmp_path}/eight")
    one, eight = losses(tmp_path / "one"), losses(tmp_path / "eight")
    assert all(abs(one[u] - eight[u]) < 2e-5 for u in one), (one, eight)

def test_warm_up_changes_nothing_and_meets_the_memory_limit(corpus, tmp_path, monkeypatch):
    """The pass before the first update leaves no trace in the run; out of memory names the flags."""
    base = (f"--data={corpus}/task", *RUN, "--updates=2")
    finish(*base, f"--out_dir={tmp_path}/with")
    with monkeypatch.context() as patch:
        patch.setattr(train, "warm_up", lambda *_: "skipped")
        finish(*base, f"--out_dir={tmp_path}/without")
    assert same_weights(tmp_path / "with" / "step_000002", tmp_path / "without" / "step_000002")

    def no_memory(model, batch, seed, steps, device):
        assert steps == (1, 2)  # k of the whole run, though the curriculum begins at 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "run_batch", no_memory)
    message = refusal(train.main, *base, f"--out_dir={tmp_path}/none")
    assert "--micro_batch=2" in message and "--recompute" in message

def test_random_weights_in_a_given_shape(corpus, tmp_path, capsys):
    """--reinit keeps the shape of a checkpoint, --embed_scale scales its embeddings; Muon says that
    a feed-forward model's matrices go part by part."""
    small(vocab_size=17, tie_embeddings=True, n_core=0).save(tmp_path / "m")
    flags = (*RUN, "--updates=1", "--embed_scale=45.3", f"--init_from={tmp_path}/m", "--reinit")
    finish(*flags, f"--data={corpus}/task", f"--out_dir={tmp_path}/run")
    assert "q, k, v, gate and up each by itself" in capsys.readouterr().out
    model = RecurrentLM.load(tmp_path / "run")
    assert (model.config.n_embd, model.config.embed_scale, model.config.tie_embeddings) == \
        (32, 45.3, True)
    x = model.embed_idx(torch.tensor([[3]]))
    assert torch.allclose(x[0, 0], 45.3 * model.embed.weight[3])

def test_training_refuses(corpus, tmp_path):
    """Missing or corrupt data, a wrong context, another model's tokenizer: one line each."""
    def refuse(*args):
        return refusal(train.main, *RUN, f"--out_dir={tmp_path}/run", *args)

    data = f"--data={corpus}/task"
    small(vocab_size=8).save(tmp_path / "model")
    small(vocab_size=17, context=20).save(tmp_path / "short")
    small(vocab_size=17).save(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.model").write_bytes(b"other")
    for args, words in (((f"--data={tmp_path}/nothing",), "nothing"), ((data, "--context=30"), "--context"),
                        ((data, f"--init_from={tmp_path}/model"), "tokenizer"),
                        ((data, f"--init_from={tmp_path}/short"), "--context"),
                        ((data, f"--init_from={tmp_path}/other"), "tokenizer"),
                        ((data, f"--match_flops={tmp_path}/no"), "no such folder")):
        assert words in refuse(*args), args
    shutil.copytree(corpus / "task", tmp_path / "data")
    base = (*RUN, "--updates=2", f"--data={tmp_path}/data", f"--out_dir={tmp_path}/parent")
    finish(*base)
    with open(tmp_path / "data" / "train_000000.npy", "r+b") as f:
        f.seek(500)
        f.write(bytes([9, 0, 9, 0, 9, 0]))
    assert "has changed" in refusal(train.main, *base)
    child = (*RUN, data, f"--out_dir={tmp_path}/child", f"--init_from={tmp_path}/parent",
             f"--match_tokens={tmp_path}/parent")
    progress = tmp_path / "parent" / "step_000002" / "train.json"
    text = progress.read_text()
    progress.write_text(text.replace('"update": 2', '"update": 1'))
    assert "finish first" in refusal(train.main, *child)
    progress.write_text(text)
    finish(*child)
    shutil.rmtree(tmp_path / "parent")
    finish(*child)  # its own checkpoint needs no other folder

def test_eval_only(corpus, tmp_path):
    """--eval_only gives the losses of training's own validation, and float64's; nothing changes."""
    base = ["--context=26", "--micro_batch=8", "--batch_size=16", "--dtype=float32",
            "--eval_rows=30", f"--data={corpus}/task", "--eval_steps=1,4"]
    finish(*RUN, *base, "--updates=2", f"--out_dir={tmp_path}/run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    finish(*base, "--eval_only", f"--init_from={tmp_path}/run")
    path = tmp_path / "run" / "eval_loss_task.json"
    result = json.loads(path.read_text())["results"]
    after = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert after.keys() - before.keys() == {path} and before.items() <= after.items()
    with open(tmp_path / "run" / "log.jsonl") as f:
        last = json.loads(list(f)[-1])
    for key, name in (("value", "val"), ("accuracy", "accuracy")):
        assert {str(x["steps"]): x[key] for x in result} == pytest.approx(last[name], abs=1e-9)

    model = RecurrentLM.load(tmp_path / "run").double()
    idx, targets, numbers = Shards(str(corpus / "task"), "val", 26).batch(0, 0, 0, 1, 30)
    state = model.initial_state(30, 26, 0, numbers)
    logits = model.trajectory(idx, [4], state=state)[4][targets != -100].double()
    loss = torch.nn.functional.cross_entropy(logits, targets[targets != -100], reduction="none")
    assert (result[1]["steps"], result[1]["n"]) == (4, len(loss))
    assert abs(result[1]["value"] - loss.mean()) < 1e-5
    assert abs(result[1]["standard_error"] - loss.std() / len(loss) ** 0.5) < 1e-5


# ---------------------------------------------------------------------------- plans and recipes

FIGURES = sorted(name[:-5] for name in os.listdir(os.path.join(HERE, "config")) if "fig" in name)

def flops_rows():
    with open(fixture("flops.json")) as f:
        rows = json.load(f)["rows"]
    shapes = {"tinyllama": surgery.TINYLLAMA, "llama-3.2-1b": surgery.LLAMA,
              "olmo-2-1b": surgery.OLMO2}
    for row in rows:
        config = shapes[row["arch"]]
        if row["split"]:
            parts = dict(zip(("n_prelude", "n_core", "n_coda"), row["split"]))
            config = replace(config, **parts, tie_embeddings=False)
        yield row, config

@needs_assets
def test_flops_are_the_papers():
    """Training FLOPs are those of the paper's result files to 1e-8, those of figures by config/."""
    runs = {"tinyllama_ablate_rec_long": "fig5", "tinyllama_gsm8k_llama_long_4_rec": "fig6",
            "olmo_50k_steps": "fig6_olmo2", "tinyllama_nemotron_fineweb_2": "fig7_single"}
    found = 0
    for row, config in flops_rows():
        s = settings(updates=row["max_steps"] or row["chkpt"], mean_recurrence=row["train_rec"],
                     batch_size=1024, curriculum=row["warmup_type"] or "none",
                     curriculum_warmup=row["warmup"])
        plans = [s]
        if row["source"] in runs and row["split"]:
            name = os.path.join(HERE, "config", runs[row["source"]] + ".toml")
            recurrence = f"--mean_recurrence={row['train_rec']}"
            plans.append(train.read_settings([f"--config={name}", recurrence]))
            found += 1
        for s in plans:
            flops = train.paper_flops(s, RecurrentLM.empty(config), row["chkpt"])
            off = abs(flops / row["FLOPs"] - 1)  # one file has older edges
            assert abs(off - row.get("rel_err_with_floor_edges", 0)) < 1e-8, row
    assert found > 20

def plan_of(name, *flags):
    """(settings, the words) of a figure's dry run, with the config.json that its surgery makes."""
    path = os.path.join(HERE, "config", f"{name}.toml")
    return train.read_settings([f"--config={path}", *flags])

@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_its_file(name):
    """A figure's file names its surgery and launch, and each variation writes to its own folder."""
    with open(os.path.join(HERE, "config", f"{name}.toml")) as f:
        text = f.read()
    comment = "".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    comment = comment.replace(" \\", " ")
    assert f"train.py --config=config/{name}.toml" in comment
    made = [*re.findall(r"python surgery.py \S+ (\S+)", comment), "out/fig4", "out/fig2"]
    folders = []
    for line in ["", *re.findall(r"(?m)^#\s+(--\w+=.*out_dir.*)", text)]:
        flags = re.findall(r"--\w+=[\w./*,:-]+", line)
        s = plan_of(name, *flags)
        folders.append(s.out_dir)
        assert s.init_from in made or "--init_from" in line, s.init_from
        assert (s.dtype, s.context, s.weight_decay, s.clip) == ("bfloat16", 1024, 1e-4, 1.0)
    assert len(set(folders)) == len(folders)

def test_recipes_are_the_papers():
    """Warm-ups, updates, draws and optimizers of config/ are REFERENCE.md's section 6."""
    table = {  # updates, warm-up updates, cooldown, batch, mean r, curriculum, draws, optimizer
        "fig2": (28000, 77, 0.0, 4096, 32, "none", "adamw"),
        "fig4": (25000, 125, 0.9, 1024, 32, "linear", "muon"),
        "fig4_adamw": (30000, 126, 0.9, 1024, 32, "linear", "adamw"),
        "fig5": (50000, 125, 0.6, 1024, 32, "1-sqrt", "muon"),
        "fig6": (50000, 125, 0.6, 1024, 32, "1-sqrt", "muon"),
        "fig7_single": (25000, 125, 0.9, 1024, 4, "linear", "muon"),
        "fig7_two_phase": (25000, 125, 0.9, 1024, 4, "linear", "muon")}
    for name, wanted in table.items():
        s = plan_of(name)
        found = (s.updates, math.ceil(s.warmup * s.updates), s.cooldown, s.batch_size,
                 s.mean_recurrence, s.curriculum, s.optimizer)
        assert found == wanted, name
    assert plan_of("fig5").draws == plan_of("fig6").draws == 2

def test_dry_run(tmp_path, capsys):
    """--dry_run says parameters, tokens, FLOPs and schedules from a config.json alone, and which
    command is missing where there is none."""
    config = replace(surgery.TINYLLAMA, n_prelude=4, n_core=8, n_coda=4)
    flags = ("--config=config/fig4.toml", "--dry_run", f"--init_from={tmp_path}/m")
    assert "config/" in refusal(train.main, *flags)
    (tmp_path / "m").mkdir()
    keys = {"model_type": "nanoloop", **vars(config)}
    (tmp_path / "m" / "config.json").write_text(json.dumps(keys))
    call(train.main, *flags)
    said = capsys.readouterr().out
    for words in ("body 704,708,608", "2.621e+10 tokens", "mean r 1 x 196", "up over 125 updates"):
        assert words in said, said


# -------------------------------------------------------------------- evaluation

@needs_assets
def test_answer_extraction_by_table():
    """Cut, extraction and comparison equal the harness's on every row of the fixture."""
    for line in open(fixture("gsm8k_extract.jsonl")):
        row = json.loads(line)
        text = cut(row["output"], STOPS)
        assert text == row["cut"], row["why"]
        for metric, extract in METRICS.items():
            assert extract(text) == row[metric], row["why"]
            for answer in (row["answer"], row["gold"]):
                assert is_correct(extract(text), answer) == row[f"{metric}_correct"], row["why"]

@needs_assets
def test_prompts_are_the_papers():
    """The 0-, 1- and 8-shot prompts equal the harness's character by character."""
    oracle = json.load(open(fixture("gsm8k_prompt.json")))
    for shots in (0, 1, 8):
        assert make_prompt(oracle["doc"]["question"], "cot", shots) == oracle[str(shots)]
    assert list(STOPS) == oracle["until"]

def gsm8k_flags(folder, out, *flags):
    return ["--model", folder / "r", "--data", folder / "test.jsonl", "--out", out, "--template",
            "plain", "--max_new_tokens", 3, "--batch_size", 4, "--limit", 60, *flags]

def answers_of(path):
    """(r, question, output) of the answers in a file, in order."""
    settings, *answers = [json.loads(line) for line in open(path)]
    return sorted((answer["steps"], answer["index"], answer["output"]) for answer in answers)

@pytest.fixture(scope="session")
def evaluated(corpus, tmp_path_factory):
    """A folder with questions, models r and nan, and whole.json: r, evaluated at r = 1 and 64."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "test.jsonl").write_text((corpus / "test.jsonl").read_text())
    (folder / "no.jsonl").write_text('{"question": "1 + 1"}\n')
    model = small(vocab_size=17)
    model.save(folder / "r", tokenizer=corpus / "tokenizer")
    model.norm_f.weight.data.fill_(math.nan)
    model.save(folder / "nan", tokenizer=corpus / "tokenizer")
    call(eval_gsm8k.main, *gsm8k_flags(folder, folder / "whole.json", "--steps", "1,64"))
    return folder

def test_killed_evaluation_goes_on(evaluated, tmp_path):
    """Killed by -9 in the middle of a line and resumed on two processes, it ends as if unbroken."""
    out, path = tmp_path / "a.json", tmp_path / "a.jsonl"
    command = ["eval_gsm8k.py", *map(str, gsm8k_flags(evaluated, out, "--steps", "1,64"))]
    process = subprocess.Popen([sys.executable, *command], cwd=HERE)
    while not path.exists() or path.read_bytes().count(b"\n") < 70:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not out.exists() and path.read_bytes().count(b"\n") < 121
    with open(path, "a") as f:
        f.write('{"index": 3, "steps"')
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command)
    assert answers_of(path) == answers_of(evaluated / "whole.jsonl")
    results = [json.load(open(file))["results"] for file in (out, evaluated / "whole.json")]
    assert results[0] == results[1] and sorted(os.listdir(tmp_path)) == ["a.json", "a.jsonl"]

def test_evaluation_grows(evaluated, tmp_path, capsys):
    """More --steps and a larger --limit add to a file of answers."""
    counts = []
    for flags in ("--steps 1 --limit 8", "--steps 1,24 --limit 12"):
        call(eval_gsm8k.main, *gsm8k_flags(evaluated, tmp_path / "a.json", *flags.split()))
        counts.append(len(answers_of(tmp_path / "a.jsonl")))
    said = capsys.readouterr()
    assert counts == [8, 24] and "holds 8 answers" in said.err
    assert re.search(r"\n +1  .*\n +24\*  .*\n", said.out)


REFUSED = [
    ("eval_gsm8k", "--model {}/none", "no such folder"),
    ("eval_gsm8k", "--data {}/none.jsonl", "No such file"),
    ("eval_gsm8k", "--data {}/no.jsonl", "no.jsonl:1: not a JSON object with"),
    ("eval_gsm8k", "--data {}/r/model.safetensors", "not a JSON object"),
    ("eval_gsm8k", "--steps 1,-2", "--steps"),
    ("eval_gsm8k", "--max_new_tokens 4096", "context of 2048"),
    ("eval_gsm8k", "--out {}/test.json", "not a file of answers"),
    ("eval_gsm8k", "--out {}/whole.json --seed 1", "seed 0, not 1"),
    ("eval_gsm8k", "--model {}/nan", "not numbers"),
    ("eval_lm", "--tasks nope", "nope"),
    ("eval_lm", "--steps x", "--steps"),
    ("eval_lm", "--model {}/nan", "not finite"),
]

@pytest.mark.parametrize("script, flags, words", REFUSED)
def test_evaluation_refuses(script, flags, words, evaluated, tmp_path):
    """A user's mistake, and a model of NaN, end in one line; files that exist stay as they are."""
    base = gsm8k_flags(evaluated, tmp_path / "x.json")
    if script == "eval_lm":
        base = ["--model", evaluated / "r"]
        base += lm_flags(tmp_path, "text", [{"query": "a", "gold": 1}])
    main = eval_gsm8k.main if script == "eval_gsm8k" else harness().main
    files = {path: path.read_bytes() for path in evaluated.glob("**/*.json*")}
    assert words in refusal(main, *base, *flags.format(evaluated).split())
    assert files == {path: path.read_bytes() for path in evaluated.glob("**/*.json*")}


# -------------------------------------------------------------------- lm-evaluation-harness

def harness():
    """eval_lm, if the harness is installed. Its own tasks stay out, as indexing them takes 10 s."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    import eval_lm
    from lm_eval.tasks import TaskManager
    eval_lm.TaskManager = functools.partial(TaskManager, include_defaults=False)
    return eval_lm


TASKS = {"choice": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: gold
doc_to_choice: choices
num_fewshot: 1
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""", "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}} {{query * (9 if gold == 0 else 1)}}"
metric_list: [{metric: byte_perplexity}]
""", "answer": """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
""", "math": """
include: HARNESS/minerva_math/minerva_math500.yaml
dataset_name: null
tag: null
generation_kwargs: {until: ["Problem:"], max_gen_toks: 16, do_sample: false}
""", "gsm8k": """
include: HARNESS/gsm8k/gsm8k-cot-zeroshot.yaml
dataset_name: null
training_split: null
fewshot_split: null
num_fewshot: 0
generation_kwargs: {until: ["Q:", "</s>", "<|im_end|>"], max_gen_toks: 32, do_sample: false}
"""}

def lm_flags(folder, name, rows):
    """Write rows and a task of the harness's kind on them -> flags with which eval_lm.py runs it."""
    with open(folder / "rows.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    tasks = os.path.join(os.path.dirname(pytest.importorskip("lm_eval").__file__), "tasks")
    (folder / "task.yaml").write_text(TASKS[name].replace("HARNESS", tasks) + f"""
task: local_{name}
test_split: test
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
""")
    return "--tasks", f"local_{name}", "--include_path", folder, "--out", folder / "out.json"

def rows_for(name):
    """A few rows of the assets that suit a task of TASKS; MATH in the harness's fields."""
    files = {"gsm8k": "gsm8k/test.jsonl", "math": "math/math500.jsonl"}
    with open(shared("assets", files.get(name, "choice/arc_easy.jsonl")), encoding="utf-8") as f:
        rows = [json.loads(line) for line in itertools.islice(f, 8)]
    if name == "math":
        pytest.importorskip("math_verify", reason='needs pip install "lm_eval[math]"')
        rows = [{"problem": row["question"], "solution": row["answer"]} for row in rows]
    return rows

@pytest.fixture(scope="session")
def stories(tmp_path_factory):
    """The 260K Llama of the assets as our checkpoint, and as the harness's own HFLM loads it."""
    for package in ("lm_eval", "accelerate", "transformers"):
        pytest.importorskip(package, reason=f"the harness's own models need {package}")
    from lm_eval.models.huggingface import HFLM
    from tokenizers import decoders, processors
    from transformers import PreTrainedTokenizerFast
    folder, source = tmp_path_factory.mktemp("stories") / "m", shared("assets", "stories260K")
    call(surgery.main, source, folder, "--feed_forward")
    theirs = oracle("stories260K")
    theirs.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                        decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token="<s>", eos_token="</s>")
    theirs = HFLM(source, device="cpu", dtype="float32", max_length=512, tokenizer=tokenizer)
    theirs.steps = [0]
    return folder, theirs

@pytest.mark.parametrize("state", ["noise", "zero"])
def test_choices_in_one_row(state, corpus, tmp_path):
    """Choices that share a context have the likelihoods of each alone, at every r, in one pass."""
    small(vocab_size=17, context=40).save(tmp_path / "m", tokenizer=str(corpus / "tokenizer"))
    ids = np.random.default_rng(0).integers(0, 17, 60).tolist()
    requests = [(None, ids[:n], ids[k:2 * k + 1]) for n in (1, 9, 30, 60) for k in (1, 3, 5)]
    requests.append((None, ids[:5], ids[:40]))
    lm = harness().Harness(tmp_path / "m", [0, 1, 3, 6], batch_size=3, state=state, seed=5)
    model = RecurrentLM.load(tmp_path / "m").double()
    s0 = model.initial_state(40, 1, 5, range(40)).transpose(0, 1) * (state == "noise")
    lm._loglikelihood_tokens(requests)
    tokens = lm.tokens
    for _, context, x in requests:
        row = torch.tensor([(context + x)[-41:]])  # too long: cut from the left
        alone = model.trajectory(row[:, :-1], lm.steps, state=s0[:, :row.shape[1] - 1])
        for lm.r, logits in alone.items():
            likelihood, greedy = lm._loglikelihood_tokens([(None, context, x)])[0]
            p = logits[0, -len(x):].double().log_softmax(-1)
            assert abs(p[range(len(x)), x].sum() - likelihood) < 1e-4
            assert (p.argmax(-1).tolist() == x) == greedy
    assert lm.tokens == tokens < sum(len(c[-40:]) + len(x) for _, c, x in requests)

@needs_assets
@pytest.mark.parametrize("name", ["choice", "text", "answer", "math"])
def test_harness_scores_are_its_own_models(name, stories, tmp_path):
    """Likelihoods, texts and scores, those of MATH among them, are HFLM's with transformers."""
    (folder, theirs), eval_lm = stories, harness()
    flags = lm_flags(tmp_path, name, rows_for(name))
    call(eval_lm.main, "--model", folder, "--num_fewshot", 0, *flags)
    ours = json.loads((tmp_path / "out.json").read_text())["results"]
    tasks = eval_lm.load_tasks([f"local_{name}"], tmp_path, 0)
    for a, b in zip(ours, eval_lm.evaluate(theirs, tasks), strict=True):
        assert b == a | {"value": pytest.approx(a["value"], rel=1e-6 if name == "text" else 0)}
    lm = eval_lm.Harness(folder, [0])
    requests = tasks["tasks"][f"local_{name}"].instances
    answers = getattr(lm, requests[0].request_type)(requests)
    for request, answer in zip(requests, answers, strict=True):
        other = request.resps[0]
        if name in ("choice", "text"):  # float32's rounding, where a long text sums up to -3000
            other = pytest.approx(other, abs=1e-4, rel=3e-7)
        assert answer == other

@needs_assets
def test_right_answers_in_math(evaluated, tmp_path, monkeypatch):
    """The scores of eval_lm.py for right answers to MATH are 1."""
    rows, eval_lm = rows_for("math"), harness()
    flags = ["--model", evaluated / "r", *lm_flags(tmp_path, "math", rows)]
    right = [re.search(r"The answer is: (.*)", row["solution"])[1] for row in rows]
    texts = [f"Final Answer: The final answer is ${x}$. I hope it is correct." for x in right]
    monkeypatch.setattr(eval_lm.Harness, "generate_until", lambda *args, **kwargs: texts)
    call(eval_lm.main, *flags, "--steps", 1)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {x["metric"]: x["value"] for x in results} == {"exact_match": 1, "math_verify": 1}

@needs_assets
def test_lm_eval_says_the_same(stories, tmp_path):
    """The harness's own gsm8k with HFLM gives the outputs and the scores of eval_gsm8k.py."""
    (folder, theirs), eval_lm = stories, harness()
    lm_flags(tmp_path, "gsm8k", rows_for("gsm8k"))
    tasks = eval_lm.load_tasks(["local_gsm8k"], tmp_path)
    scores = {x["metric"]: x["value"] for x in eval_lm.evaluate(theirs, tasks)}
    call(eval_gsm8k.main, "--model", folder, "--data", tmp_path / "rows.jsonl", "--shots", 0,
         "--max_new_tokens", 32, "--out", tmp_path / "out.json")
    outputs = [request.resps[0] for request in tasks["tasks"]["local_gsm8k"].instances]
    assert [output for _, _, output in answers_of(tmp_path / "out.jsonl")] == outputs
    ours = {x["metric"]: x["value"] for x in json.load(open(tmp_path / "out.json"))["results"]}
    assert scores == {"exact_match,flexible-extract": ours["flexible"],
                      "exact_match,strict-match": ours["strict"]}


# ------------------------------------------------------------------------------- bench.py

@pytest.mark.parametrize("command, wanted", [
    ("train --batch_size 2 --context 8 --steps 0+2,1+1", [(0, 2), (1, 1)]),
    ("decode --prompt 4 --tokens 4 --steps 4 --ways exit=kl,exit_threshold=9;draft_steps=2",
     [{}, {"exit": "kl", "exit_threshold": 9}, {"draft_steps": 2}])])
def test_bench_ends_with_json(command, wanted, tmp_path, capsys):
    """bench.py train and decode end in JSON with a row for each (n, k) or way of decoding."""
    small().save(tmp_path / "m")
    call(bench.main, *command.split(), "--model", tmp_path / "m", "--repeat", 1, "--no_compile")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["way"] if "way" in row else (row["n"], row["k"]) for row in rows] == wanted
    speeds = [row["tokens_per_s"] for row in rows]
    if "way" in rows[0]:  # with this exit, tokens stop after 2 of 4 recurrences
        assert rows[1]["of_saving"] == pytest.approx(speeds[1] / speeds[0] / 2)

@pytest.mark.parametrize("command, words", [
    ("decode --ways foo=1", "foo=1"), ("decode --ways kv", "--ways kv"),
    ("decode --ways top_k=x", "top_k=x"), ("decode --ways exit=latent", "latent"),
    ("plot nothing.json", "nothing.json"), ("plot RELEASED --metric f1", "f1")])
def test_bench_refuses(command, words):
    """What cannot be measured or drawn is refused in one line that names it."""
    released = os.path.join(HERE, "runs", "released", "huginn-0125.json")
    assert words in refusal(bench.main, *command.replace("RELEASED", released).split())

def test_plot_results(tmp_path, capsys):
    """plot shows accuracy over r, FLOPs, updates or training FLOPs, and by difficulty."""
    model, path = small(), tmp_path / "result.json"
    row = {"steps": 4, "metric": "acc", "value": 0.5, "by_difficulty": {"3": [0.7, 0.1, 8]}}
    result = {"model": str(tmp_path), "config": vars(model.config), "results": [row]}
    path.write_text(json.dumps(result))
    (tmp_path / "train.json").write_text('{"update": 10, "flops": 700}')
    parts = (model.prelude, model.coda, *[model.core] * 4)
    flops = 2 * sum(p.numel() for part in parts for p in part.parameters())
    for x, place in {"steps": 4, "flops": flops, "train": 10, "training_flops": 700}.items():
        call(bench.main, "plot", path, "--x", x)
        text = capsys.readouterr().out
        assert f"{place:g}: 0.5000 ± 0.0000" in text and "3: 0.7000 ± 0.1000" in text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------- the study

def test_quick_run_end_to_end():
    """`bash runs/tiny.sh --quick` plays every stage, from the corpus to scores at every r."""
    shutil.rmtree(os.path.join(HERE, "out", "tiny-quick"), ignore_errors=True)
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    p = subprocess.run(["bash", "runs/tiny.sh", "--quick"], cwd=HERE, capture_output=True, text=True,
                       env=os.environ | {"PATH": path})
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    for name in ("recurrent", "parent_tokens", "parent_flops"):
        with open(os.path.join(HERE, "out", "tiny-quick", f"eval_{name}.json")) as f:
            result = json.load(f)
        steps = [row["steps"] for row in result["results"] if row["metric"] == "flexible"]
        assert steps == ([1, 2, 4, 8, 16, 32] if name == "recurrent" else [0])
    assert "tokens/s" in run("sample.py", "--steps", "32", "--tokens", "4")
