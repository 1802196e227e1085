"""
Every promise of nanoloop, one test each: `python -m pytest -q test_all.py`, on a CPU, offline.

Oracles come first: logits and gradients of the paper's own code, transformers' models, torch's
AdamW, a run that was never killed. What needs those files finds them through the environment
variable NANOLOOP_ASSETS and is skipped, saying so, where it is unset.
"""
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import data
import eval_gsm8k
import muon
import surgery
import train
from data import Shards, Tokenizer, download, prepare, tiny
from eval_gsm8k import STOPS, answer_batch, cut, flexible_extract, is_correct, make_prompt, strict_extract
from model import Config, InputError, Int8Linear, Linear, RecurrentLM, save_folder, whole_folder
from muon import Muon, newton_schulz
from sample import Decoder, Decoding, adaptive, distribution, generate, newest_checkpoint, pick, stream

# On busy cores two threads that wait for each other make models of this size 50 times slower.
torch.set_num_threads(1)

HERE = os.path.dirname(os.path.abspath(__file__))
ASSETS = os.environ.get("NANOLOOP_ASSETS")
needs_assets = pytest.mark.skipif(not ASSETS, reason="NANOLOOP_ASSETS is unset: no fixtures to compare with")


def shared(*path):
    return os.path.join(ASSETS, *path)


def fixture(*path):
    return shared("fixtures", *path)


def expected(name):
    return load_file(fixture(name, "expected", "expected.safetensors"))


def run(*command, ok=True, **kwargs):
    """Run a script of the repository as a user does; returns stdout + stderr. ok=False: it must fail in one line."""
    p = subprocess.run([sys.executable, *map(str, command)], cwd=HERE, capture_output=True, text=True, **kwargs)
    if ok:
        assert p.returncode == 0, p.stdout + p.stderr
    else:
        assert p.returncode not in (0, None), p.stdout
        assert "Traceback" not in p.stderr and len(p.stderr.strip().splitlines()) == 1, p.stderr
    return p.stdout + p.stderr


def call(main, *args):
    """A script's main() in this process, which spares the seconds that importing torch takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *map(str, args)])
        main()


def refusal(main, *args):
    """The one line with which main() refuses these arguments (cli() prints it)."""
    with pytest.raises((InputError, OSError)) as e:
        call(main, *args)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def convert(src, out, *flags):
    call(surgery.main, src, out, *flags)
    return RecurrentLM.load(out, dtype=torch.float32)


def small(seed=0, **changes):
    """A random model that is cheap to run."""
    settings = dict(vocab_size=50, n_embd=32, n_head=4, n_kv_head=2, n_ffn=64, n_prelude=1, n_core=2, n_coda=1,
                    mean_recurrence=4, eos_token_id=1)
    model = RecurrentLM(Config(**settings | changes))
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


# ---------------------------------------------------------------- the model

@needs_assets
@pytest.mark.parametrize("name, tolerance", [("hf_llama_gqa_untied", 1e-4), ("hf_llama3_rope", 3e-4), ("hf_olmo2", 1e-4)])
def test_feed_forward_equals_transformers(name, tolerance, tmp_path):
    """A converted Llama or OLMo-2 (tied, sharded, bf16, scaled RoPE) gives transformers' logits and loss."""
    model, x = convert(fixture(name), tmp_path / "m", "--feed-forward"), expected(name)
    ids = x["input_ids"]
    assert (model(ids)[0] - x["logits"]).abs().max() < tolerance
    assert abs(model(ids[:, :-1], ids[:, 1:])[1] - x["loss"]) < 1e-5


@needs_assets
@pytest.mark.parametrize("name", ["raven_llama", "raven_olmo2"])
def test_recurrence_equals_the_papers_code(name, tmp_path):
    """Logits at every r, and every gradient of a truncated (3, 2) step, are those of the paper's modelling code."""
    model, x = convert(fixture(name), tmp_path / "m"), expected(name)
    for r in (1, 2, 4, 8):
        for steps in (r, (r, 0), (0, r)):  # the value does not depend on the split
            logits = model(x["input_ids"], steps=steps, state=x["s0"])[0]
            assert (logits - x[f"logits.{r}"]).abs().max() < 1e-4, (r, steps)
    g = load_file(fixture(name, "expected", "grads.safetensors"))
    loss = model(g["input_ids"], g["labels"], steps=(3, 2), state=g["s0"])[1]
    loss.backward()
    assert abs(loss - g["loss"]) < 1e-5
    names = {"transformer.wte": "embed", "transformer.ln_f": "norm_f", "lm_head": "head", "core_block": "core",
             "transformer.": "", "Wqkv": "qkv"}
    params = dict(model.named_parameters())
    for key, grad in g.items():
        if key.startswith("grad."):
            key = key.removeprefix("grad.")
            for theirs, ours in names.items():
                key = key.replace(theirs, ours)
            assert (params.pop(key).grad - grad).norm() < 1e-3 * grad.norm(), key
    assert not params, f"no gradient to compare with for {list(params)}"


def test_every_r_from_one_pass():
    """trajectory() gives the logits and losses of forward() at each r, to the last bit."""
    for changes in ({}, {"n_core": 0}):
        model, idx = small(**changes), torch.randint(50, (2, 9))
        state = model.initial_state(2, 9, [0, 1])
        logits, losses = (model.trajectory(idx, [0, 1, 3, 6], targets, state) for targets in (None, idx))
        for r in (0, 1, 3, 6):
            assert torch.equal(logits[r], model(idx, steps=r, state=state)[0])
            assert torch.equal(losses[r], model(idx, idx, r, state)[1])


def test_gradient_stops_at_k():
    """Only the last k recurrences and one pass of the prelude carry gradient; k = 0 leaves the core without."""
    model, idx = small(), torch.arange(10)[None]
    state = model.initial_state(1, 10, [0]).requires_grad_()
    model(idx, idx, (0, 2), state)[1].backward()
    assert state.grad is not None
    state.grad = None
    model.zero_grad()
    model(idx, idx, (1, 2), state)[1].backward()
    assert state.grad is None and model.embed.weight.grad.abs().sum() > 0
    model.zero_grad()
    model(idx, idx, (2, 0), state)[1].backward()
    assert all(p.grad is None for p in model.core.parameters()) and model.head.weight.grad is not None


@pytest.mark.parametrize("start", ["zero", "prelude"])
def test_other_first_states(start, tmp_path):
    """A model whose s_0 is zero or the prelude's output: by hand, whatever state is given, saved, decoded; not exported."""
    model, idx = small(start=start), torch.randint(50, (2, 10))
    rope = model.rope(10)
    with torch.no_grad():
        e = x = model.run_prelude(model.embed_idx(idx), rope)
        x = 0 * e if start == "zero" else e
        for _ in range(3):
            x = model.run_core(x, e, rope)
        for state in (None, model.initial_state(2, 10)):
            assert torch.equal(model.finish(x, rope), model(idx, steps=3, state=state)[0])
            assert torch.equal(model.finish(x, rope), model.trajectory(idx, [3], None, state)[3])
        model.save(tmp_path / "m")
        assert RecurrentLM.load(tmp_path / "m").config.start == start
        new = decode(model, idx.tolist(), 8, steps=3)
        assert new.tolist() == model(torch.cat((idx, new), 1), steps=3)[0][:, 9:-1].argmax(-1).tolist()
    assert "start" in refusal(surgery.main, tmp_path / "m", tmp_path / "out", "--export", "hf")


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_transformers_as_oracle(kind, tmp_path):
    """A folder that the installed transformers writes (its config keys, its logits) goes in unchanged."""
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128)
    peer = (tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)) if kind == "llama" else tf.Olmo2ForCausalLM(tf.Olmo2Config(
        **sizes, rope_theta=500000.0)))
    for p in peer.parameters():  # norms of 1 would hide a misplaced one
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    peer.save_pretrained(tmp_path / "hf")
    model = convert(tmp_path / "hf", tmp_path / "m", "--feed-forward")
    ids = torch.randint(96, (2, 40))
    with torch.no_grad():
        assert (model(ids)[0] - peer(ids).logits).abs().max() < 1e-4


def test_initial_state():
    """Noise has the reference's spread and cut, and a row's noise follows from its seed alone."""
    model = small(n_embd=64, n_head=4)
    s = model.initial_state(64, 128)
    std = model.config.state_std
    assert abs(s.std() / std - 0.98658) < 0.005 and s.abs().max() <= 3 * std and abs(s.mean()) < std / 50
    assert torch.equal(model.initial_state(3, 8, [5, 6, 7])[1:], model.initial_state(2, 8, [6, 7]))


def test_save_and_load(tmp_path):
    """A saved model comes back bit for bit, tied or not; a save replaces the old one whole, and what killed ones left."""
    os.makedirs(tmp_path / "m.tmp-999999999")
    for tied in (False, True):
        model = small(tie_embeddings=tied)
        model.save(tmp_path / "m")
        again = RecurrentLM.load(str(tmp_path / "m"))
        assert again.config == model.config and os.listdir(tmp_path) == ["m"]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    os.rename(tmp_path / "m", tmp_path / "m.old-999999999")  # killed between the two renames of a save
    with pytest.raises(InputError, match="no room"), whole_folder(str(tmp_path / "m")):
        raise OSError("no room")
    assert again.config == RecurrentLM.load(str(tmp_path / "m")).config


@needs_assets
def test_counts_are_the_papers():
    """num_params and flops_per_token give the paper's Tables 6 and 7 and the FLOPs behind its figures."""
    count = lambda *a, **k: RecurrentLM.empty(Config(*a, **k))
    tiny_llama = (32000, 2048, 32, 4, 5632)
    n = count(*tiny_llama, 22, 0, 0).num_params()
    assert (n["embeddings"], n["body"]) == (131_072_000, 968_976_384)
    model = count(*tiny_llama, 4, 8, 4)
    n = model.num_params()
    assert [n[k] for k in ("body", "prelude", "core", "coda", "adapter", "norm_f")] == [
        704_708_608, 176_177_152, 352_354_304, 176_177_152, 8_388_608, 2_048]
    assert count(*tiny_llama, 6, 10, 6).num_params()["body"] == 968_974_336
    llama = (128256, 2048, 32, 8, 8192)
    assert count(*llama, 16, 0, 0).num_params()["body"] == 973_146_112
    assert count(*llama, 4, 6, 4).num_params()["body"] == 851_501_056
    # One update of a published run lasts 2^20 tokens; its curriculum is summed here step by step.
    row = next(r for r in json.load(open(fixture("flops.json")))["rows"]
               if r["split"] == [4, 8, 4] and r["edges"] == "floor" and r["warmup_type"] == "linear")
    R, W = row["train_rec"], int(row["warmup"] * row["max_steps"])
    edges = [int(r / R * W) for r in range(R)] + [W]
    total = sum((edges[r] - edges[r - 1]) * model.flops_per_token((max(r - 8, 0), min(r, 8)))
                for r in range(1, R + 1) if edges[r] <= row["chkpt"])
    last = sum(e <= row["chkpt"] for e in edges)  # the recurrence that the checkpoint falls into
    total += (row["chkpt"] - edges[last - 1]) * model.flops_per_token((max(min(last, R) - 8, 0), min(last, R, 8)))
    assert abs(total * 2**20 / row["FLOPs"] - 1) < 1e-8


# ---------------------------------------------------------------- surgery

@needs_assets
def test_surgery_takes_the_layers_in_a_row(tmp_path):
    """r = 1 with the identity adapter equals the kept layers run in a row; a trained adapter gives the paper's logits."""
    model = convert(fixture("hf_llama_gqa_untied"), tmp_path / "m", "--prelude", "0-1", "--core", "3-5", "--coda", "6,7")
    x = expected("surgery")
    for wanted in ("logits.identity.1", "logits.hf_pruned"):
        assert (model(x["input_ids"], steps=1, state=x["s0"])[0] - x[wanted]).abs().max() < 1e-4
    # The same layers through our own feed-forward model, layer by layer.
    parent = convert(fixture("hf_llama_gqa_untied"), tmp_path / "p", "--feed-forward")
    parent.prelude = torch.nn.ModuleList(parent.prelude[i] for i in (0, 1, 3, 4, 5, 6, 7))
    assert torch.equal(model(x["input_ids"], steps=1)[0], parent(x["input_ids"])[0])
    model.adapter.weight.data = x["adapter"]
    for r in (1, 4):
        assert (model(x["input_ids"], steps=r, state=x["s0"])[0] - x[f"logits.{r}"]).abs().max() < 1e-4


@needs_assets
def test_surgery_unties_and_retrofits_our_own(tmp_path):
    """A tied source gets a head of its own; a feed-forward checkpoint of ours goes in as Hugging Face's does."""
    stories = shared("assets", "stories260K")
    flags = ("--prelude", "0-1", "--core", "2-3", "--coda", "4")
    direct = convert(stories, tmp_path / "a", *flags)
    convert(stories, tmp_path / "parent", "--feed-forward")
    convert(tmp_path / "parent", tmp_path / "b", *flags)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert torch.equal(direct.head.weight, direct.embed.weight) and direct.head.weight is not direct.embed.weight
    assert (tmp_path / "b" / "tokenizer.model").exists()


@needs_assets
@pytest.mark.parametrize("name", ["raven_llama", "raven_olmo2", "hf_llama_gqa_untied", "hf_llama3_rope", "hf_olmo2"])
def test_export_is_the_inverse_of_import(name, tmp_path):
    """In and out again gives the same tensors under the same names; the released layout's config.json key by key;
    transformers reads the other one and gives our logits."""
    convert(fixture(name), tmp_path / "m", *(["--feed-forward"] if name.startswith("hf") else []))
    call(surgery.main, tmp_path / "m", tmp_path / "out", "--export", "hf", "--verify")
    files = [file for file in os.listdir(fixture(name)) if file.endswith(".safetensors")]
    before = {k: v for file in files for k, v in load_file(fixture(name, file)).items()}
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    if name.startswith("raven"):
        with open(fixture(name, "config.json")) as a, open(tmp_path / "out" / "config.json") as b:
            assert json.load(a) == json.load(b)
    else:
        tf = pytest.importorskip("transformers", reason="transformers is not installed")
        peer, x = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32), expected(name)
        with torch.no_grad():
            assert (peer(x["input_ids"]).logits - x["logits"]).abs().max() < 3e-4


@needs_assets
def test_export_carries_the_tokenizer(tmp_path):
    """transformers' tokenizer of an exported folder gives our ids."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed, which transformers wants here")
    tf = pytest.importorskip("transformers", reason="transformers is not installed")
    call(surgery.main, shared("assets", "stories260K"), tmp_path / "out", "--feed-forward", "--export", "hf")
    text = "Once upon a time, there was  a little girl.\nShe said: 12."
    ids = Tokenizer.load(tmp_path / "out").encode(text, bos=True)
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids == ids


def huginn(w, c, ids, s, steps):
    """Huginn-0125's forward pass, literally and in float64: adjacent pairs are rotated as complex numbers."""
    w = {k: v.double() for k, v in w.items()}
    C, H = c["n_embd"], c["n_heads"]
    norm = lambda x, name: x * (x.pow(2).mean(-1, keepdim=True) + c["norm_eps"]).rsqrt() * w[f"transformer.{name}.weight"]
    angle = torch.arange(ids.shape[1]).double()[:, None] / c["rope_base"] ** (torch.arange(0, C // H, 2).double() / (C // H))
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]

    def block(x, name):
        qkv = norm(x, f"{name}.norm_1") @ w[f"transformer.{name}.attn.Wqkv.weight"].T
        q, k, v = qkv.unflatten(-1, (3, H, -1)).unbind(2)
        bias = w[f"transformer.{name}.attn.qk_bias"]
        q, k = (torch.view_as_real(torch.view_as_complex((x + b).unflatten(-1, (-1, 2))) * turn).flatten(-2)
                for x, b in ((q, bias[0]), (k, bias[1])))
        score = torch.einsum("bqhd,bkhd->bhqk", q, k) / (C // H) ** 0.5
        score = score.masked_fill(torch.ones_like(score).triu(1).bool(), -torch.inf).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", score, v).flatten(2) @ w[f"transformer.{name}.attn.proj.weight"].T
        x = norm(x + y, f"{name}.norm_2")
        gate, up = (norm(x, f"{name}.norm_3") @ w[f"transformer.{name}.mlp.fc.weight"].T).chunk(2, -1)
        return norm(x + (torch.nn.functional.silu(gate) * up) @ w[f"transformer.{name}.mlp.proj.weight"].T, f"{name}.norm_4")

    e = w["transformer.wte.weight"][ids] * c["init_values"]["embed_scale"]
    for i in range(c["n_layers_in_prelude"]):
        e = block(e, f"prelude.{i}")
    for _ in range(steps):
        s = torch.cat((s, e), -1) @ w["transformer.adapter.weight"].T
        for i in range(c["n_layers_in_recurrent_block"]):
            s = block(s, f"core_block.{i}")
    s = norm(s, "ln_f")
    for i in range(c["n_layers_in_coda"]):
        s = block(s, f"coda.{i}")
    return norm(s, "ln_f") @ w["transformer.wte.weight"].T


def test_huginn_goes_in_and_out(tmp_path):
    """Huginn's block style, by its literal formulas, with and without the cache; exported, the same tensors again."""
    C, F, shape = 32, 48, {"prelude": 1, "core_block": 2, "coda": 1}
    c = {"model_type": "huginn_raven", "n_embd": C, "n_heads": 4, "intermediate_size": F, "vocab_size": 64, "norm_eps": 1e-6,
         "rope_base": 50000, "rope_theta": 10000, "qk_bias": True, "block_size": 64, "tie_embeddings": True,
         "init_values": {"std": 0.1, "embed_scale": C ** 0.5}, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2,
         "n_layers_in_coda": 1}
    torch.manual_seed(0)
    random = lambda *size: torch.randn(*size) * 0.2 + (len(size) == 1)
    w = {"transformer.wte.weight": random(64, C), "transformer.adapter.weight": random(C, 2 * C),
         "transformer.ln_f.weight": random(C)}
    for part, n in shape.items():
        for i in range(n):
            name = f"transformer.{part}.{i}."
            w |= {name + f"norm_{j}.weight": random(C) for j in (1, 2, 3, 4)} | {
                name + "attn.Wqkv.weight": random(3 * C, C), name + "attn.proj.weight": random(C, C),
                name + "attn.qk_bias": random(2, 1, 4, C // 4), name + "mlp.fc.weight": random(2 * F, C),
                name + "mlp.proj.weight": random(C, F)}
    (tmp_path / "src").mkdir()
    save_file(w | {"freqs_cis": torch.zeros(3)}, tmp_path / "src" / "model.safetensors")
    (tmp_path / "src" / "config.json").write_text(json.dumps(c))
    model = convert(tmp_path / "src", tmp_path / "m", "--mean_recurrence", 3)
    ids = torch.randint(64, (2, 9))
    s = model.initial_state(2, 9, [0, 1])
    for steps in (1, 3):
        assert (model(ids, steps=steps, state=s)[0] - huginn(w, c, ids, s.double(), steps)).abs().max() < 1e-4
    text = torch.cat((ids, decode(model, ids.tolist(), 5, state="zero")), 1)
    logits = model(text, state=torch.zeros(2, 14, C))[0]
    assert text[:, 9:].tolist() == logits[:, 8:-1].argmax(-1).tolist()
    call(surgery.main, tmp_path / "m", tmp_path / "out", "--export", "hf")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert w.keys() == after.keys() and all(torch.equal(w[k], after[k]) for k in w)
    again = convert(tmp_path / "out", tmp_path / "again")
    assert again.config == model.config and again.config.mean_recurrence == 3


@needs_assets
def test_verified_surgery(tmp_path, capsys, monkeypatch):
    """--verify finds 0.0 for every hidden state, whatever the adapter and OUT's layout, and says where a weight is wrong."""
    src, flags = fixture("hf_olmo2"), ("--shape", "1,2,1", "--verify")
    for i, more in enumerate(((), ("--adapter", "add"), ("--adapter-init", "default", "--export", "hf"), ("--overwrite",))):
        call(surgery.main, src, tmp_path / f"{min(i, 2)}", *flags, *more)
        said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("verify:")]
        assert [words[-1] for words in said[:-1]] == ["0.0"] * 6

    def wrong(folder, config, tensors, *rest):
        tensors["coda.0.attn.proj.weight"][3, 4] += 1e-3
        save_folder(folder, config, tensors, *rest)

    monkeypatch.setattr(surgery, "save_folder", wrong)
    assert "differs" in refusal(surgery.main, src, tmp_path / "wrong", *flags)
    assert "layer 4    0.0\n" not in capsys.readouterr().out


def test_tables_of_the_paper(capsys):
    """--dry-run prints the paper's Tables 6-8 for every preset from the shapes alone; the mislabelled row is said."""
    tiny_llama, llama, olmo = "131,072,000 968,976,384", "525,336,576 973,146,112", "411,041,792 1,073,874,944"
    table = {  # source; body, prelude, core, coda; layers
        "tinyllama-2-4-2": (tiny_llama, "352,354,304 88,088,576 176,177,152 88,088,576", "0-1 16-19 20-21"),
        "tinyllama-4-8-4": (tiny_llama, "704,708,608 176,177,152 352,354,304 176,177,152", "0-3 10-17 18-21"),
        "tinyllama-6-10-6": (tiny_llama, "968,974,336 264,265,728 440,442,880 264,265,728", "0-5 6-15 16-21"),
        "llama-3.2-1b-2-4-2": (llama, "486,572,032 121,643,008 243,286,016 121,643,008", "0-1 10-13 14-15"),
        "llama-3.2-1b-4-6-4": (llama, "851,501,056 243,286,016 364,929,024 243,286,016", "0-3 6-11 12-15"),
        "olmo-2-1b-4-6-4": (olmo, "939,638,784 268,468,224 402,702,336 268,468,224", "0-3 6-11 12-15")}
    assert table.keys() == surgery.PRESETS.keys()
    for preset, (source, parts, layers) in table.items():
        call(surgery.main, "--preset", preset, "--dry-run")
        said = " ".join(capsys.readouterr().out.split())
        assert source in said and f"{source.split()[0]} {parts}" in said
        assert "and adapter 8,388,608, final norm 2,048" in said
        assert "--prelude {} --core {} --coda {};".format(*layers.split()) in said
        assert ("486,572,032" in said) == ("2-4-2" in preset)


@needs_assets
def test_layer_choice(tmp_path, capsys):
    """Both measures equal the fixture's; the choices follow their rules, and the printed flags give the same model."""
    with open(fixture("block_influence.json")) as f:
        oracle = json.load(f)
    model = surgery.build(surgery.open_source(fixture("hf_llama_gqa_untied")))
    influence, angle = surgery.measure(model, expected("hf_llama_gqa_untied")["input_ids"])
    assert influence == pytest.approx(oracle["bi"], abs=1e-6)
    assert angle == pytest.approx(oracle["angular_distance"], abs=1e-6)
    assert surgery.knee([1, 0.5, 0.15, 0.12, 0.1, 0.09]) == 2
    stories = shared("assets", "stories260K")
    text = ("--text", shared("assets", "gsm8k", "test.jsonl"))
    for flags, choice in (
            (("--select", "block-influence", "--shape", "1,2,1", *text), "--prelude 0 --core 1-2 --coda 3"),
            (("--select", "block-influence", "--shape", "3", "--feed-forward", *text), "--feed-forward --layers 0-1,3"),
            (("--select", "angular", *text), "--prelude 0-1 --core 2-3 --coda 4"),
            (("--select", "angular", "--shape", "1,2,1", *text), "--prelude 0 --core 2-3 --coda 4"),
            (("--shape", "1,2,1",), "--prelude 0 --core 2-3 --coda 4")):
        call(surgery.main, stories, tmp_path / "a", *flags, "--overwrite")
        assert choice in capsys.readouterr().out
        call(surgery.main, stories, tmp_path / "b", *choice.split(), "--overwrite")
        assert same_weights(tmp_path / "a", tmp_path / "b")


@needs_assets
def test_precision_and_kept_tensors(tmp_path, capsys):
    """Weights keep their type; mixed ones get the type that holds all; dropped layers need not even be there."""
    src = tmp_path / "src"
    shutil.copytree(fixture("hf_llama_gqa_untied"), src)
    tensors = {k: v for k, v in load_file(src / "model.safetensors").items() if not k.startswith("model.layers.2.")}
    for change, dtype in ((lambda k: torch.float16, torch.float16), (lambda k: torch.bfloat16, torch.bfloat16),
                          (lambda k: torch.float16 if "norm" in k else torch.bfloat16, torch.float32)):
        stored = {k: v.to(change(k)) for k, v in tensors.items()}
        save_file(stored, src / "model.safetensors")
        call(surgery.main, src, tmp_path / "m", "--prelude", "0", "--core", "3,5", "--coda", "7", "--overwrite")
        out = load_file(tmp_path / "m" / "model.safetensors")
        assert {t.dtype for t in out.values()} == {dtype}
        assert torch.equal(out["core.1.mlp.proj.weight"], stored["model.layers.5.mlp.down_proj.weight"].to(dtype))
    assert "mixes BF16 and F16" in capsys.readouterr().out


@needs_assets
def test_surgery_refuses(tmp_path):
    """Every wrong input to surgery.py ends in one line that names it, and leaves OUT as it was, or absent."""
    src, out = fixture("hf_llama_gqa_untied"), tmp_path / "out"
    three = lambda *parts: [x for pair in zip(("--prelude", "--core", "--coda"), parts) for x in pair]
    bad = tmp_path / "bad"

    def broken(change):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(fixture("hf_llama3_rope") if change is no_shard else src, bad)
        change()
        return bad

    def edit(**keys):
        with open(bad / "config.json") as f:
            config = json.load(f)
        (bad / "config.json").write_text(json.dumps(config | keys))

    def cut():
        with open(bad / "model.safetensors", "r+b") as f:
            f.truncate(100_000)

    def change_one(change):
        tensors = load_file(bad / "model.safetensors")
        name = "model.layers.3.mlp.up_proj.weight"
        tensors[name] = change(tensors[name]) if change else tensors.pop(name).new_zeros(1)
        save_file({k: v for k, v in tensors.items() if change or k != name}, bad / "model.safetensors")

    def no_shard():
        os.remove(bad / "model-00002-of-00002.safetensors")

    def wrong_index():
        (bad / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')

    def pickled():
        os.rename(bad / "model.safetensors", bad / "pytorch_model.bin")

    for args, word in (
            (("no/such/path", out, "--feed-forward"), "no such folder"), ((src, out), "--prelude"), ((src,), "OUT"),
            ((src, out, *three("0-1", "3-8", "7")), "--core"), ((src, out, *three("0-3", "3-5", "7")), "--core"),
            ((src, out, *three("0", "1-x", "7")), "--core"), ((src, out, "--preset", "tinyllama-4-8-4"), "--preset"),
            ((src, out, "--shape", "4,4,4"), "--shape"), ((src, out, "--layers", "1"), "--layers"),
            ((src, out, "--shape", "1,2,1", *three("0", "1", "2")), "--shape"),
            ((src, out, "--select", "angular"), "--text"),
            ((src, out, "--feed-forward", "--layers", "3-9"), "--layers"),
            ((src, out, "--feed-forward", "--mean_recurrence", "4"), "--mean_recurrence"),
            ((src, out, "--shape", "1,2,1", "--mean_recurrence", "0"), "--mean_recurrence 0"), ((src, ""), "OUT"),
            ((src, out, "--feed-forward", "--layers", "0-999999999"), "--layers"), ((src, out, "--seed", "-1"), "--seed"),
            ((fixture("raven_llama"), out, "--adapter", "add"), "--adapter"),
            ((fixture("raven_llama"), out, "--shape", "1,2,1"), "--shape")):
        assert word in refusal(surgery.main, *args), args
    for change, word in ((lambda: edit(model_type="gpt2"), "gpt2"), (cut, "model.safetensors"), (no_shard, "00002-of-00002"),
                         (lambda: change_one(None), "layers.3.mlp.up_proj"), (lambda: edit(hidden_size=128), "(320, 128)"),
                         *((functools.partial(edit, **{key: value}), "config.json") for key, value in (
                             ("rms_norm_eps", None), ("rms_norm_eps", "1"), ("rope_theta", [1]), ("eos_token_id", ["x"]),
                             ("tie_word_embeddings", "false"), ("num_hidden_layers", 10**30), ("vocab_size", 3.5))),
                         (lambda: edit(hidden_size=2**40), "1099511627776"), (wrong_index, "index.json"),
                         (lambda: change_one(torch.Tensor.double), "F64"), (lambda: change_one(torch.Tensor.char), "I8"),
                         (lambda: (bad / "config.json").write_text("{"), "config.json"), (pickled, "pickle"),
                         (lambda: os.remove(bad / "model.safetensors"), "model.safetensors"),
                         (lambda: shutil.copy(shared("assets/tokenizers/tinyllama/tokenizer.model"), bad), "tokenizer")):
        assert word in refusal(surgery.main, broken(change), out, "--feed-forward")
    assert not out.exists() and not list(tmp_path.glob("*.tmp-*"))
    convert(src, out, "--feed-forward")
    assert "--overwrite" in run("surgery.py", src, out, "--feed-forward", ok=False)  # as a user sees it
    before = (out / "model.safetensors").read_bytes()
    assert "lost" in refusal(surgery.main, out, f"{out}/", "--export", "hf", "--overwrite")
    nan = broken(lambda: change_one(lambda t: t * torch.nan))  # which max() would pass over
    assert "nan" in refusal(surgery.main, nan, tmp_path / "nan", "--feed-forward", "--verify")
    # A limit on the size of files stands for a full disk.
    command = f"ulimit -f 500; exec {sys.executable} surgery.py {src} {out} --shape 1,2,1 --overwrite"
    full = subprocess.run(["bash", "-c", command], cwd=HERE, capture_output=True, text=True)
    assert full.returncode == 1 and str(out) in full.stderr and len(full.stderr.splitlines()) == 1, full.stderr
    assert (out / "model.safetensors").read_bytes() == before and not list(tmp_path.glob("*.tmp-*"))


# ---------------------------------------------------------------- the hub

COMMIT, MODEL = "0123456789abcdef" * 2 + "01234567", "some/model"
SHARDS = {f"model-0000{i}-of-00002.safetensors": np.random.default_rng(i).bytes(200_000 + i) for i in (1, 2)}
FIRST, SECOND = SHARDS
CHECKPOINT = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "README.md": b"not wanted",
              "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("abc", [*SHARDS] * 2))}).encode(),
              **SHARDS}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """
    A hub on 127.0.0.1 with the files of `files`, in a new cache. fault(handler, name, start, body) may answer in its
    place by returning True; name: the file or "list". requests: (name, Range) of each; tokens: what it was sent.
    """
    def lfs(name):
        return name.endswith(".safetensors")

    def listing(files):
        return {"sha": COMMIT, "siblings": [
            {"rfilename": name, "size": len(body), "blobId": blob_of("", body)}
            | ({"lfs": {"sha256": blob_of(name, body), "size": len(body)}} if lfs(name) else {})
            for name, body in files.items()]}

    def blob_of(name, body):
        return (hashlib.sha256(body) if lfs(name) else hashlib.sha1(b"blob %d\0" % len(body) + body)).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm, log_message = "HTTP/1.1", True, lambda *_: None

        def reply(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in {"Content_Length": len(body), **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body)
            return True

        def cut(self, start, body, most):
            """An answer of which only `most` bytes come before the connection breaks."""
            self.close_connection = True
            headers = {"Content_Length": len(body) - start, **span(start, body)}
            return self.reply(206 if start else 200, body[start:start + most], **headers)

        def do_GET(self):
            path, asked = unquote(self.path.partition("?")[0]), self.headers.get("Range")
            name = "list" if path.startswith("/api/") else path.partition(f"/resolve/{COMMIT}/")[2]
            start = int(asked[6:-1]) if asked else 0
            state.requests.append((name, asked))
            state.tokens.append(self.headers.get("Authorization"))
            body = json.dumps(state.listing or listing(state.files)).encode() if name == "list" else state.files[name]
            if not state.fault(self, name, start, body):
                self.reply(206 if start else 200, body[start:], **span(start, body))

    for key in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # clients that hang up are the point here
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state = SimpleNamespace(files=dict(CHECKPOINT), listing=None, fault=lambda *_: False, requests=[], tokens=[],
                            port=server.server_port, folder=tmp_path / "hub" / "models--some--model",
                            blob=lambda name: state.folder / "blobs" / blob_of(name, state.files[name]))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(data, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(data, "CHUNK", 1 << 14)
    yield state
    server.shutdown()
    server.server_close()


def fetched(hub, spec=MODEL):
    """download(); what it returns must be whole and right."""
    folder = download(spec)
    assert folder == str(hub.folder / "snapshots" / COMMIT)
    assert sorted(os.listdir(folder)) == sorted(hub.files.keys() - {"README.md"})
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            assert f.read() == hub.files[name], name
    assert not list(hub.folder.glob("blobs/*.incomplete"))
    return folder


def span(start, body):
    """The header of an answer that sends body from `start` on."""
    return {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}


def fails(error):
    def call(*args):
        raise error
    return call


def not_fetched(spec=MODEL):
    """The one line with which download() fails."""
    with pytest.raises(InputError) as e:
        download(spec)
    assert len(str(e.value).splitlines()) == 1
    return str(e.value)


def test_hub_fetches_once(hub, monkeypatch, capsys):
    """A sharded checkpoint is fetched with what belongs to it, once: then, as offline, nothing is asked for."""
    assert "HF_HUB_OFFLINE" in download_offline(monkeypatch) and not hub.requests
    fetched(hub)
    names = [name for name, _ in hub.requests]
    assert names[0] == "list" and len(names) == 6 and {*names[1:4]}.isdisjoint(SHARDS)  # small ones first
    assert os.readlink(hub.folder / "snapshots" / COMMIT / FIRST) == f"../../blobs/{hub.blob(FIRST).name}"
    for spec in (MODEL, f"{MODEL}@main", f"{MODEL}@{COMMIT}"):
        capsys.readouterr()
        fetched(hub, spec)
        assert COMMIT in capsys.readouterr().err
    (hub.folder / "snapshots" / COMMIT / "tokenizer.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "True")
    download(MODEL)  # lacks only the tokenizer, which the caller may have elsewhere
    hub.blob(FIRST).unlink()
    assert FIRST in not_fetched()
    assert len(hub.requests) == 6
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fetched(hub)
    assert len(hub.requests) == 8  # the list and the shard; the tokenizer's blob was there


def download_offline(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return not_fetched()


def test_hub_cache_is_the_usual_one(hub):
    """huggingface_hub finds in the cache what download() has put there, under the revision's name as well."""
    peer = pytest.importorskip("huggingface_hub")
    folder, cache = fetched(hub, f"{MODEL}@refs/pr/1"), hub.folder.parent
    for revision in ("refs/pr/1", COMMIT):
        assert peer.snapshot_download(MODEL, revision=revision, cache_dir=cache, local_files_only=True) == folder
        assert peer.try_to_load_from_cache(MODEL, FIRST, cache, revision) == os.path.join(folder, FIRST)
    assert [len(repo.revisions) for repo in peer.scan_cache_dir(cache).repos] == [1]


def test_hub_files_in_folders_and_single_file(hub):
    """Shards may lie in folders; a model of one file has no index; a revision with "/" and "+" is asked for as one."""
    hub.files = {"config.json": b"{}", "tokenizer.model": b"", "model.safetensors": b"w" * 10}
    fetched(hub, f"{MODEL}@a/b+c")
    assert (hub.folder / "refs/a/b+c").read_text() == COMMIT
    shard, hub.files = "deep er/x#1.safetensors", {"config.json": b"{}"}
    hub.files |= {"model.safetensors.index.json": json.dumps({"weight_map": {"a": shard}}).encode(), shard: b"w" * 20}
    assert open(f"{download(f'{MODEL}@other')}/{shard}", "rb").read() == b"w" * 20


def test_hub_goes_on_after_breaks(hub):
    """However often the connection breaks: the next request asks for the rest, and the file is right."""
    hub.fault = lambda h, name, start, body: name == FIRST and start < 150_000 and h.cut(start, body, 20_000)
    fetched(hub)
    starts = [int((asked or "bytes=0-")[6:-1]) for name, asked in hub.requests if name == FIRST]
    assert len(starts) > data.TRIES + 2 and starts == sorted({*starts})


def stale(hub, name, part):
    """Leave `part` of a file in the cache, as a process that was killed does."""
    hub.folder.joinpath("blobs").mkdir(parents=True, exist_ok=True)
    hub.folder.joinpath("blobs", hub.blob(name).name + ".incomplete").write_bytes(part)


@pytest.mark.parametrize("part, starts", [
    (SHARDS[FIRST][:100_000], ["bytes=100000-"]), (SHARDS[FIRST], []), (SHARDS[FIRST] + b"more", [None]),
    (b"?" * 100_000, ["bytes=100000-", None]), (b"?" * len(SHARDS[FIRST]), [None])])
def test_hub_goes_on_after_a_kill(hub, part, starts):
    """Half a file is completed, a whole one taken; one that is wrong shows at the end and is fetched anew."""
    stale(hub, FIRST, part)
    fetched(hub)
    assert [asked for name, asked in hub.requests if name == FIRST] == starts


LIES = {
    "the whole file": lambda h, start, body: h.reply(200, body),
    "no range": lambda h, start, body: h.reply(206, body[start:]),
    "another start": lambda h, start, body: h.reply(206, body[1:], **span(1, body)),
    "another total": lambda h, start, body: h.reply(206, body[start:], **span(start, body + b"?")),
    "too much": lambda h, start, body: h.reply(206, body[start:] + b"?" * 50_000, **span(start, body)),
    "416": lambda h, start, body: h.reply(416, Content_Range=f"bytes */{len(body)}"),
}


@pytest.mark.parametrize("lie", LIES)
def test_hub_that_lies_about_ranges(hub, lie):
    """An answer that is not the range asked for is not appended: the file is fetched from its start, and right."""
    stale(hub, FIRST, SHARDS[FIRST][:100_000])
    hub.fault = lambda h, name, start, body: start and LIES[lie](h, start, body)
    fetched(hub)
    again = [None] * (lie != "the whole file")
    assert [asked for name, asked in hub.requests if name == FIRST] == ["bytes=100000-", *again]


@pytest.mark.parametrize("answer", [
    lambda h, start, body: h.reply(200, body + b"?"),
    lambda h, start, body: LIES["416"](h, start, body) if start else h.cut(0, body, 50_000)], ids=["more", "breaks"])
def test_hub_that_always_lies(hub, answer):
    """Neither more bytes than promised nor the same ones again and again are progress: a few tries, then one line."""
    hub.fault = lambda h, name, start, body: name == FIRST and answer(h, start, body)
    assert FIRST in not_fetched() and not hub.blob(FIRST).exists()
    assert data.TRIES <= len([name for name, _ in hub.requests if name == FIRST]) <= data.TRIES + 1


@pytest.mark.parametrize("status, headers", [(429, {"Retry_After": 1}), (500, {}), (503, {"Retry_After": "soon"})])
def test_hub_that_is_busy(hub, status, headers):
    """Passing failures are asked again, after the pause that the hub wants; without end they end in one line."""
    turn, begun = {"list": 2, "config.json": 1, FIRST: 3}, time.time()

    def fault(handler, name, start, body):
        turn[name] = turn.get(name, 0) - 1
        return turn[name] >= 0 and handler.reply(status, b"busy", **headers if name == "config.json" else {})
    hub.fault = fault
    fetched(hub)
    assert (time.time() - begun > 1) == (status == 429)
    hub.folder.rename(hub.folder.with_name("old"))
    for name in ("list", SECOND):
        turn[name] = 10**6
        hub.requests.clear()
        message = not_fetched()
        assert str(status) in message and "127.0.0.1" in message
        assert len([n for n, _ in hub.requests if n == name]) == data.TRIES
        turn[name] = 0


def test_hub_pauses():
    """Retry-After in seconds or as a date, and the hub's RateLimit, are heeded up to a minute; else 1, 2, 4, ... s."""
    def pause(failures=1, **headers):
        return data._pause(SimpleNamespace(response=SimpleNamespace(headers=headers)), failures)
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 30))
    assert 28 < pause(**{"Retry-After": date}) <= 30 and pause(**{"Retry-After": "3000"}) == 60
    assert pause(RateLimit='"resolvers";r=0;t=55') == 55
    assert [pause(i) for i in (1, 2, 3, 4)] == [1, 2, 4, 8] and data._pause(OSError(), 1) == 1


@pytest.mark.parametrize("name, status, code, token, says", [
    ("list", 401, "RepoNotFound", "", ["private or gated", "HF_TOKEN", f"/{MODEL}"]),
    ("list", 401, "", "hf_secret", ["one that may read it"]),
    (FIRST, 401, "GatedRepo", "", ["is gated", "HF_TOKEN", f"/{MODEL}"]),
    ("config.json", 403, "", "hf_secret", ["is gated", f"/{MODEL}"]),
    ("list", 404, "RepoNotFound", "", ["no such model"]),
    ("list", 404, "RevisionNotFound", "", ["no revision v9"]),
    (FIRST, 404, "EntryNotFound", "", [FIRST]),
    ("list", 410, "", "", ["410"])])
def test_hub_that_refuses(hub, monkeypatch, name, status, code, token, says):
    """What will not pass is said in one line that names the mend and no token; it is asked for once."""
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fault = lambda h, n, start, body: n == name and h.reply(status, b"no", X_Error_Code=code)
    message = not_fetched(f"{MODEL}@v9")
    assert all(part in message for part in says) and "hf_secret" not in message, message
    assert [n for n, _ in hub.requests].count(name) == 1


def test_hub_with_a_wrong_file(hub):
    """A file whose hash stays wrong is fetched twice and ends in one line; nothing is left that looks complete."""
    wrong = b"?" * len(SHARDS[SECOND])
    hub.fault = lambda h, name, start, body: name == SECOND and h.reply(200, wrong)
    for _ in range(2):  # the cache is not taken for warm either
        message = not_fetched()
        assert all(part in message for part in (SECOND, hub.blob(SECOND).name, hashlib.sha256(wrong).hexdigest()))
        assert not list(hub.folder.glob(f"*/{hub.blob(SECOND).name}*")) and not (hub.folder / "refs").exists()
        assert not list(hub.folder.glob("snapshots/*/*.safetensors"))
    assert [name for name, _ in hub.requests].count(SECOND) == 4
    hub.fault = lambda *_: False
    fetched(hub)


def entry(name, size=1, sha="0" * 40):
    return {"rfilename": name, "size": size, "blobId": sha}


@pytest.mark.parametrize("listing, says", [
    ({"sha": COMMIT, "siblings": [entry("config.json"), entry("pytorch_model.bin")]}, "pickled"),
    ({"sha": COMMIT, "siblings": [entry("config.json")]}, "no model.safetensors"),
    ({"sha": COMMIT, "siblings": [entry("model.safetensors")]}, "no config.json"),
    ({"sha": COMMIT, "siblings": [entry("../config.json")]}, "HF_ENDPOINT"),
    ({"sha": COMMIT, "siblings": [entry("/etc/config.json")]}, "HF_ENDPOINT"),
    ({"sha": COMMIT, "siblings": [entry("config.json", sha="../" + "0" * 37)]}, "HF_ENDPOINT"),
    ({"sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}, "HF_ENDPOINT"),
    ({"sha": "../..", "siblings": []}, "HF_ENDPOINT"), ({"error": "\n"}, "HF_ENDPOINT"), ([1], "HF_ENDPOINT")])
def test_hub_lists_that_are_refused(hub, listing, says):
    """Pickled weights, no checkpoint, no list, names or hashes that lead out of the cache: one line, none fetched."""
    hub.listing = listing
    assert says in not_fetched() and len(hub.requests) == 1 and not hub.folder.exists()


@pytest.mark.parametrize("weight_map", [{"a": "../../x.safetensors"}, {"a": "/x.safetensors"}, {"a": "x.bin"}, {"a": 1},
                                        {"a": "absent.safetensors"}, {}, None])
def test_hub_indexes_that_are_refused(hub, weight_map):
    """An index that names files outside its folder, others than safetensors or absent ones: one line."""
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    assert "index.json" in not_fetched() and {name for name, _ in hub.requests}.isdisjoint(SHARDS)


def test_hub_answers_that_are_no_json(hub, monkeypatch):
    """A page in place of the list, no answer at all and no address: one line that names HF_ENDPOINT."""
    hub.fault = lambda h, *_: h.reply(200, b"<html>\n")
    assert "HF_ENDPOINT" in not_fetched()
    for endpoint in ("http://127.0.0.1:1", "huggingface", "http://[", "http://.x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert "HF_ENDPOINT" in not_fetched() and endpoint in not_fetched()


@pytest.mark.parametrize("spec", ["", "model", "a/b/c", "../x", "a/..", "a/b@", "a/b@../c", "a/b@c/", "a--b/c", "a b"])
def test_hub_names_that_are_refused(hub, spec):
    """Only org/name and org/name@REVISION are asked for; what could leave or mix up the cache is refused."""
    with pytest.raises(InputError, match="org/name@REVISION"):
        download(spec)
    assert not hub.requests


@pytest.mark.parametrize("source", ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HOME"])
def test_hub_token(hub, monkeypatch, tmp_path, source):
    """The token of the environment or of its file goes to the endpoint, and not to the host that stores the files."""
    (tmp_path / "token").write_text("hf_secret\n")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login who password else\n")  # which requests would prefer
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if source != "HF_HOME":
        (tmp_path / "token").rename(tmp_path / "elsewhere")
        monkeypatch.setenv(source, {"HF_TOKEN": "hf_secret", "HF_TOKEN_PATH": str(tmp_path / "elsewhere")}[source])
    seen = []

    def fault(handler, name, start, body):
        if handler.headers["Host"].startswith("localhost"):
            return seen.append(handler.headers["Authorization"])
        assert handler.headers["Authorization"] == "Bearer hf_secret"
        if name in SHARDS:
            return handler.reply(302, Location=f"http://localhost:{hub.port}{handler.path}")
    hub.fault = fault
    fetched(hub)
    assert seen == [None, None] and hub.tokens.count("Bearer hf_secret") == 6


def test_hub_storage_that_forgets(hub):
    """A storage host refuses a link that has expired: the hub is asked for a new one."""
    turn = iter(range(9))

    def fault(handler, name, start, body):
        if name == FIRST and handler.headers["Host"].startswith("127"):
            return handler.reply(302, Location=f"http://localhost:{hub.port}{handler.path}")
        return name == FIRST and next(turn) < 2 and handler.reply(403, b"expired")
    hub.fault = fault
    fetched(hub)


def test_hub_bad_token_is_not_printed(hub, monkeypatch):
    """A token that no header can hold is refused without being printed."""
    monkeypatch.setenv("HF_TOKEN", "hf_sec\nret")
    assert "HF_TOKEN" in (message := not_fetched()) and "ret" not in message.replace("correct", "")


def test_hub_full_disk(hub, monkeypatch):
    """Weights that do not fit are not begun, and a disk that fills up on the way leaves a part to go on from."""
    free = sum(map(len, SHARDS.values()))
    monkeypatch.setattr(data.shutil, "disk_usage", lambda path: SimpleNamespace(free=free - 1))
    message = not_fetched()
    assert "HF_HOME" in message and str(hub.folder) in message and {n for n, _ in hub.requests}.isdisjoint(SHARDS)
    stale(hub, FIRST, SHARDS[FIRST][:1])  # one byte less to fetch
    with monkeypatch.context() as patch:
        patch.setattr(data.os, "fsync", fails(OSError(28, "No space left on device")))
        message = not_fetched()
        assert "No space left" in message and str(hub.folder) in message
    fetched(hub)


def test_hub_without_links(hub, monkeypatch):
    """On a file system without symbolic links the snapshot holds copies."""
    monkeypatch.setattr(data.os, "symlink", fails(OSError("no links here")))
    assert not os.path.islink(os.path.join(fetched(hub), FIRST))
    assert not [name for name in os.listdir(hub.folder / "snapshots" / COMMIT) if name not in CHECKPOINT]


def test_hub_interrupt(hub):
    """Ctrl-C ends a download at once, though one file hangs and one goes on; the next run goes on from the parts."""
    def fault(handler, name, start, body):
        if name in SHARDS:
            handler.cut(start, body, 100_000)
            if name == SECOND:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
            for i in range(100_000, 180_000, 20_000):
                release.wait(0.2 if name == FIRST else 9)
                handler.wfile.write(body[i:i + 20_000])
            return True
    release, hub.fault, begun = threading.Event(), fault, time.time()
    with pytest.raises(KeyboardInterrupt):
        download(MODEL)
    assert time.time() - begun < 5 and not list(hub.folder.glob("snapshots/*/*.safetensors"))
    release.set()
    hub.fault = lambda *_: False
    fetched(hub)
    assert all(150_000 > int(asked[6:-1]) > 50_000 for name, asked in hub.requests[-2:])


def test_hub_data_sets(hub, corpus, tmp_path, monkeypatch):
    """prepare reads a data set's files from the hub as from the disk, and fetches those that the pattern names alone."""
    for i in range(3):
        word_documents(tmp_path / f"{i}.jsonl", 50 + i)
        hub.files[f"data/{i}.jsonl"] = (tmp_path / f"{i}.jsonl").read_bytes()
    flags = dict(tokenizer=f"{corpus}/tokenizer", shard_tokens=500)
    prepare([str(tmp_path / f"{i}.jsonl") for i in (0, 1)], out=str(tmp_path / "here"), **flags)
    prepare(["hf://datasets/some/set/data/[01].jsonl"], out=str(tmp_path / "there"), **flags)
    assert [name for name, _ in hub.requests] == ["list", "data/0.jsonl", "data/1.jsonl"]
    assert (tmp_path / "hub" / "datasets--some--set" / "snapshots" / COMMIT / "data" / "1.jsonl").exists()
    for name in os.listdir(tmp_path / "here"):
        if name.endswith(".npy"):
            assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    assert COMMIT in json.loads((tmp_path / "there" / "meta.json").read_text())["arguments"]["input"][0][0]
    for spec, word in (("hf://some/set/x", "hf://datasets"), ("hf://datasets/some/set/none*.jsonl", "none"),
                       ("hf://datasets/some/set/README.md", "README")):
        with pytest.raises(InputError, match=word):
            prepare([spec], out=str(tmp_path / "bad"), **flags)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        prepare(["hf://datasets/some/set/data/0.jsonl"], out=str(tmp_path / "bad"), **flags)


def test_hub_two_at_once(hub):
    """Two downloads of one model at the same time fetch each file once."""
    hub.fault = lambda *_: time.sleep(0.05)
    other = threading.Thread(target=download, args=(MODEL,))
    other.start()
    fetched(hub)
    other.join()
    assert sorted(name for name, _ in hub.requests if name != "list") == sorted(hub.files.keys() - {"README.md"})


# ---------------------------------------------------------------- the optimizer

SHAPES = {"embed.weight": (30, 8), "prelude.0.norm_1.weight": (8,), "prelude.0.attn.qkv.weight": (24, 8),
          "prelude.0.mlp.fc.weight": (40, 8), "prelude.0.mlp.proj.weight": (8, 20), "adapter.weight": (8, 16),
          "core.0.attn.qkv.weight": (24, 8), "core.0.mlp.fc.weight": (40, 8), "core.0.mlp.proj.weight": (8, 20),
          "coda.0.attn.proj.weight": (8, 8), "norm_f.weight": (8,), "head.weight": (30, 8)}
GRAINS, KINDS = 8, ("muon", "adamw", "adamw*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def noise(shape, *seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash(seed) % 2**31))


def parameters(shapes=SHAPES, dtype=torch.float32):
    return {name: torch.nn.Parameter(noise(shape, i).to(dtype)) for i, (name, shape) in enumerate(shapes.items())}


def step_with(opt, *grads, lr_factor=1.0, clip=math.inf):
    """One update from the gradients {name: tensor} of some micro-batches. Returns their norm."""
    for g in grads:
        for s in opt.slots:
            s.p.grad = g[s.name].to(s.p.dtype, copy=True)
        opt.accumulate()
    norm = opt.reduce()
    opt.step(lr_factor, clip)
    return norm


def test_muon_update_is_the_official_one():
    """The update equals the official formula matrix by matrix, and torch.optim.Muon's bit for bit where present."""
    shapes = {f"core.{i}.weight": s for i, s in enumerate([(32, 64), (64, 32), (32, 64), (48, 48)])}
    ours, plain, theirs = parameters(shapes), {k: p.detach() for k, p in parameters(shapes).items()}, parameters(shapes)
    opt = Muon(ours.items(), lr=0.02, adam_lr=1.0, weight_decay=0.1)
    peer = torch.optim.Muon(theirs.values(), lr=0.02, weight_decay=0.1) if hasattr(torch.optim, "Muon") else None
    momentum = {k: torch.zeros_like(p) for k, p in plain.items()}
    for i in range(4):
        grads = {k: noise(p.shape, i, j) for j, (k, p) in enumerate(plain.items())}
        step_with(opt, grads)
        for k, p in plain.items():
            g, m = grads[k], momentum[k]
            m.copy_(0.95 * m + 0.05 * g)
            u = (0.05 * g + 0.95 * m).bfloat16()
            u = u.T if g.size(0) > g.size(1) else u
            X = u / (u.norm() + 1e-7)
            for _ in range(5):
                A = X @ X.T
                X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
            X = (X.T if g.size(0) > g.size(1) else X).float()
            p.mul_(1 - 0.02 * 0.1).sub_(0.02 * X * max(1, g.size(0) / g.size(1)) ** 0.5)
        if peer:
            for k, p in theirs.items():
                p.grad = grads[k]
            peer.step()
    for k in shapes:  # the formula rounds more often than addmm, in bfloat16
        assert (ours[k] - plain[k]).abs().max() < 2e-3, k
        assert not peer or torch.equal(ours[k], theirs[k]), k


def test_newton_schulz_orthogonalises():
    """In float64's eyes the result has singular values near 1 along the input's own singular directions."""
    for shape in ((40, 24), (24, 40), (24, 24)):
        G = noise(shape, 0)
        assert torch.allclose(newton_schulz(torch.stack((G, 2 * G)))[1], newton_schulz(G), atol=0.02)  # as on a GPU
        U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
        values = torch.einsum("ir,ij,jr->r", U, newton_schulz(G).double(), V.mT)
        assert values[:-1].min() > 0.6 and values.max() < 1.3, values


@pytest.mark.parametrize("clip", (math.inf, 0.5))
def test_adamw_and_clipping_are_torchs(clip):
    """AdamW with a schedule equals torch's AdamW after torch's clip_grad_norm_, with all parameters at lr."""
    ours, theirs = parameters(), parameters()
    opt = Muon(ours.items(), lr=0.01, adam_lr=1.0, weight_decay=0.1, optimizer="adamw")
    peer = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for i in range(5):
        grads = {k: noise(p.shape, i, j) for j, (k, p) in enumerate(ours.items())}
        norm = step_with(opt, grads, lr_factor=0.5**i, clip=clip)
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        assert abs(norm - torch.nn.utils.clip_grad_norm_(theirs.values(), clip)) < 1e-4
        peer.param_groups[0]["lr"] = 0.01 * 0.5**i
        peer.step()
    assert all(torch.allclose(p, theirs[k], atol=1e-7) for k, p in ours.items())


def test_adamw_star_is_the_papers():
    """AdamW* equals its formulas, number by number in float64; a row that never has a gradient only decays."""
    shapes = {"embed.weight": (5, 3), "norm_f.weight": (4,)}
    ours, lr, wd = parameters(shapes), 0.01, 0.1
    opt = Muon(ours.items(), lr=lr, adam_lr=1.0, weight_decay=wd, optimizer="adamw*")
    p = {k: q.detach().flatten().tolist() for k, q in ours.items()}
    m, v = {}, {}
    for t, factor in enumerate((0.3, 1.0, 1.0, 0.7, 0.2), start=1):
        grads = {k: noise(q.shape, t, j) * (20 if t == 3 else 1) for j, (k, q) in enumerate(ours.items())}
        grads["embed.weight"][2] = 0
        step_with(opt, grads, lr_factor=factor)
        for k, g in grads.items():
            g = g.flatten().tolist()
            if t == 1:
                m[k], v[k] = list(g), [x * x for x in g]
            m[k] = [0.9 * a + 0.1 * x for a, x in zip(m[k], g)]
            v[k] = [0.95 * a + 0.05 * x * x for a, x in zip(v[k], g)]
            rms = math.sqrt(sum(x * x / a if a else 0.0 for a, x in zip(v[k], g)) / len(g))
            assert t != 3 or rms > 1.5, "no step is made smaller"
            step = lr * factor / max(1, rms) / (1 - 0.9**t)
            p[k] = [w * (1 - factor * wd) - step * math.atan2(a, math.sqrt(b) / math.sqrt(1 - 0.95**t))
                    for w, a, b in zip(p[k], m[k], v[k])]
    for k, q in ours.items():
        assert torch.allclose(q.flatten().double(), torch.tensor(p[k], dtype=torch.float64), atol=1e-6, rtol=0), k


def test_groups_and_refusals():
    """Muon takes the matrices of blocks and adapter alone; bad arguments and gradients stop before anything changes."""
    ours = parameters()
    opt = Muon(ours.items(), lr=1.0, adam_lr=1.0, weight_decay=0.0)
    assert {s.name for s in opt.slots if s.kind == "muon"} == {
        k for k, p in ours.items() if p.dim() == 2 and "embed" not in k and "head" not in k}
    with pytest.raises(ValueError, match="sgd"):
        Muon(ours.items(), lr=1.0, adam_lr=1.0, weight_decay=0.0, optimizer="sgd")
    with pytest.raises(AssertionError, match="shape"):
        opt.load(lambda name: torch.zeros(1, 1), 3)
    before = {k: p.detach().clone() for k, p in ours.items()}
    bad = {k: torch.full_like(p, math.nan if k == "adapter.weight" else 0.0) for k, p in ours.items()}
    with pytest.raises(FloatingPointError, match="nan"):
        step_with(opt, bad)
    assert all(torch.equal(p, before[k]) for k, p in ours.items()) and not any(map(torch.any, opt.state.values()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches_add_up_as_a_tree(dtype):
    """Gradients are summed in float32, ((g0 + g1) + (g2 + g3)) + ..., with few partial sums; what is left over, last."""
    g = [noise((50,), i).pow(9).to(DTYPES[dtype]).float() for i in range(8)]  # of all sizes, so that each sum rounds
    pair = [a + b for a, b in zip(g[::2], g[1::2])]
    expected = {1: g[0], 2: pair[0], 6: (pair[0] + pair[1]) + pair[2], 7: (pair[0] + pair[1]) + (pair[2] + g[6]),
                8: (pair[0] + pair[1]) + (pair[2] + pair[3])}
    assert not torch.equal(expected[8], sum(g)), "the order does not show"
    for n, total in expected.items():
        p = torch.nn.Parameter(torch.zeros(50, dtype=DTYPES[dtype]))
        opt = Muon([("norm_f.weight", p)], lr=1.0, adam_lr=1.0, weight_decay=0.0)
        for i in range(n):
            p.grad = mine = g[i].to(p.dtype, copy=True)
            opt.accumulate()
            assert p.grad is None and len(opt.partial) <= 3
        opt.reduce()
        assert torch.equal(opt.grads["norm_f.weight"], total), n
        assert n > 1 or dtype == "bfloat16" or opt.grads["norm_f.weight"] is mine, "one micro-batch needs no copy"


def updates_of(kind, dtype, rank, world, start=0, end=5, folder=None):
    """
    Updates start..end of one rank, with gradients that depend on the weights; from folder's files of any number
    of ranks where start > 0. Returns the optimizer and {name: tensor}: weights, and rank 0's masters.
    """
    saved = {}
    if start:
        for file in os.listdir(folder):
            saved |= load_file(os.path.join(folder, file))
    ps = parameters(dtype=DTYPES[dtype])
    masters = {k: saved[f"{kind} {dtype} master {k}"] for k in ps} if start else \
        {k: p.detach() + (1e-4 if dtype == "bfloat16" else 0) for k, p in parameters().items()}
    with torch.no_grad():
        for k, p in ps.items():
            p.copy_(masters[k])
    opt = Muon(ps.items(), 0.02, 0.01, 0.1, kind, masters=masters, rank=rank, world=world)
    if start:
        opt.load(lambda name: saved[f"{kind} {dtype} {name}"], start)
        assert opt.wanted() == {name: tuple(t.shape) for name, t in opt.state_tensors().items()}
    norms = []
    for u in range(start, end):
        mine = range(rank * GRAINS // world, (rank + 1) * GRAINS // world)
        grads = [{k: noise(p.shape, u, i, j).pow(5) + 0.1 * p.detach().float() for j, (k, p) in enumerate(ps.items())}
                 for i in mine]  # of all sizes, so that each sum rounds
        norms.append(step_with(opt, *grads, lr_factor=0.9**u, clip=20.0))
    prefix = f"{kind} {dtype} "
    out = {f"{prefix}weight {k}": p.detach() for k, p in ps.items()}
    out[f"{prefix}norms"] = torch.tensor(norms, dtype=torch.float64)
    gathered = [(f"{prefix}master {k}", t.clone()) for k, t in opt.gather_masters()]
    assert [k for k, _ in gathered] == [f"{prefix}master {k}" for k in (SHAPES if rank == 0 else ())]
    return opt, out | dict(gathered)


def rank_main(rank, world, folder):
    """A gloo rank: five updates of everything; with two ranks, also checkpoints of update 3, with which four go on."""
    torch.set_num_threads(1)
    muon.BUCKET = 600  # several buckets, whose borders cut tensors in two
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
    results, checkpoint, resumed = {}, {}, {}
    for kind in KINDS:
        for dtype in DTYPES:
            opt, out = updates_of(kind, dtype, rank, world)
            results |= out
            assert len(opt.buckets) > 1
            sizes = [math.prod(shape) for shape in SHAPES.values()]
            owned = sum(t.numel() for t in opt.masters.values())
            assert owned == sum(s.p.numel() for s in opt.owned) <= sum(sizes) / world + max(sizes), (kind, world, owned)
            assert len(opt.state) == sum(1 if s.kind == "muon" else 2 for s in opt.owned)
            if world == 2:
                opt, out = updates_of(kind, dtype, rank, world, end=3)
                checkpoint |= {f"{kind} {dtype} {k}": t for k, t in opt.state_tensors().items()}
                checkpoint |= {k: t for k, t in out.items() if " master " in k}
            else:
                resumed |= updates_of(kind, dtype, rank, world, 3, 5, os.path.join(folder, "checkpoint"))[1]
    os.makedirs(f"{folder}/checkpoint", exist_ok=True)
    save_file(results, f"{folder}/world{world}_rank{rank}")
    save_file(checkpoint if world == 2 else resumed, f"{folder}/checkpoint/rank{rank}" if world == 2 else
              f"{folder}/resumed_rank{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads abort an ordinary exit now and then


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder of what 2 ranks, then 4, left behind."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    for world in (2, 4):
        torch.multiprocessing.spawn(rank_main, (world, folder), world)
    return folder


def by_itself(start=0, end=5, folder=None):
    """{name: tensor} of one process without torch.distributed."""
    return {k: t for kind in KINDS for dtype in DTYPES
            for k, t in updates_of(kind, dtype, 0, 1, start, end, folder)[1].items()}


def differing(a, b):
    return [k for k in b if not torch.equal(a[k], b[k])]


def test_optimizer_on_any_number_of_ranks(ranks):
    """1, 2 and 4 ranks: weights on every rank, masters and norms after 5 updates are equal bit for bit, for all kinds."""
    one = by_itself()
    assert not dist.is_initialized()
    for world in (2, 4):
        for rank in range(world):
            many = load_file(f"{ranks}/world{world}_rank{rank}")
            assert len(many) >= 6 * (len(SHAPES) + 1) and not differing(one, many), (world, rank, differing(one, many))
    for kind in KINDS:  # a bfloat16 weight is its master's rounding, and not all there is
        key = f"{kind} bfloat16 %s head.weight"
        assert torch.equal(one[key % "weight"], one[key % "master"].bfloat16())
        assert not torch.equal(one[key % "weight"].float(), one[key % "master"])


def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks):
    """State saved by 2 ranks and loaded by 1 or 4 goes on bit for bit as if nothing had happened."""
    one, last = by_itself(), lambda d: {k: t[-2:] if k.endswith("norms") else t for k, t in d.items()}
    resumed = by_itself(3, 5, f"{ranks}/checkpoint")
    assert not differing(last(one), resumed), differing(last(one), resumed)
    for rank in range(4):
        many = load_file(f"{ranks}/resumed_rank{rank}")
        assert not differing(last(one), many), (rank, differing(last(one), many))


@pytest.mark.parametrize("world, case", ((8, "TinyLlama"), (2, "one wide matrix")))
def test_shares_are_even(world, case):
    """Newton-Schulz work is even to 5 %, as is all else or else one tensor, and each parameter has one owner."""
    block = {"attn.qkv": (2560, 2048), "attn.proj": (2048, 2048), "mlp.fc": (11264, 2048), "mlp.proj": (2048, 5632)}
    shapes = {f"core.{i}.{k}.weight": s for i in range(16) for k, s in block.items()} | {
        "adapter.weight": (2048, 4096), "embed.weight": (32000, 2048), "head.weight": (32000, 2048)}
    if case != "TinyLlama":  # weights alone would give a rank all that is square: a sixth too much
        shapes = {"core.0.weight": (64, 512)} | {f"core.{i}.weight": (64, 64) for i in range(1, 9)}
    named = [(k, torch.nn.Parameter(torch.empty(s, device="meta"))) for k, s in shapes.items()]
    shares = [Muon(named, 1.0, 1.0, 0.0, rank=r, world=world) for r in range(world)]
    assert sorted(s.name for opt in shares for s in opt.owned) == sorted(shapes)
    work = lambda s: min(s.p.shape) ** 2 * (2 * max(s.p.shape) + min(s.p.shape)) if s.kind == "muon" else s.p.numel()
    for kind, most in (("muon", 0), ("adamw", 32000 * 2048)):
        sums = [sum(work(s) for s in opt.owned if s.kind == kind) for opt in shares]
        assert max(sums) <= max(1.05 * sum(sums) / world, most), (kind, sums)


# ---------------------------------------------------------------- decoding and scoring

def decode_model(n_core=2, norm="pre", vocab_size=64):
    """A tiny random model whose noise (std 1) and recurrences change what it says."""
    model = RecurrentLM(Config(vocab_size, n_embd=32, n_head=4, n_kv_head=2, n_ffn=64, n_prelude=1, n_core=n_core,
                               n_coda=1, norm=norm, context=64, state_std=1.0, mean_recurrence=3))
    model.init_weights(seed=1)
    return model


def decode(model, prompts, n, **kw):
    """(B, n) tokens"""
    rows = [[] for _ in prompts]
    for row, token, _ in generate(model, prompts, n, **kw):
        rows[row].append(token)
    return torch.tensor(rows)


@needs_assets
@pytest.mark.parametrize("name", ("raven_llama", "raven_olmo2"))
def test_greedy_tokens_of_the_papers_code(name, tmp_path):
    """Cached greedy decoding gives the tokens that the paper's own code gave (4 steps, zero state)."""
    model, x = convert(fixture(name), tmp_path / "m"), expected(name)
    prompt, greedy = x["greedy_prompt"], x["greedy"]
    new = greedy.shape[1] - prompt.shape[1]
    out = decode(model, prompt.tolist(), new, steps=4, state="zero")
    assert torch.cat((prompt, out), 1).tolist() == greedy.tolist()


@pytest.mark.parametrize("n_core, norm, steps", ((2, "pre", 5), (2, "post", 64), (2, "pre", 0), (0, "pre", None)))
@pytest.mark.parametrize("chunk", (3, 512))
def test_cache_equals_full_recomputation(n_core, norm, steps, chunk, monkeypatch):
    """Every cached token is the one that a full forward pass over the text so far gives, noise and all, however many
    tokens of the prompt go at once."""
    monkeypatch.setattr("sample.PREFILL", chunk)
    model = decode_model(n_core, norm)
    prompts = torch.randint(64, (3, 7))
    text = torch.cat((prompts, decode(model, prompts.tolist(), 12, steps=steps, seed=5)), 1)
    noise = model.initial_state(19, 1, [5 * 1_000_003 + position for position in range(19)])[:, 0].expand(3, -1, -1)
    with torch.no_grad():
        logits, _ = model(text, steps=steps, state=noise)
    assert text[:, 7:].tolist() == logits[:, 6:-1].argmax(-1).tolist()


@pytest.mark.parametrize("n_core", (2, 0))
def test_batch_equals_alone(n_core):
    """A row's tokens depend neither on the batch's other rows and those that ended on the way, nor on how many tokens
    are asked for; plain, speculative and adaptive."""
    model, limits = decode_model(n_core), (20, 5, 13, 6)
    prompts = [torch.randint(64, (n,)).tolist() for n in (1, 9, 4, 17)]
    ways = {}, {"draft_steps": 1, "draft_len": 3}, {"steps": 9, "exit": "latent", "exit_threshold": 0.9}
    for how in ways if n_core else ways[:1]:
        alone = [decode(model, [p], 20, seed=3, **how)[0].tolist() for p in prompts]
        assert decode(model, prompts, 10, seed=3, **how).tolist() == [row[:10] for row in alone]
        rows = [[] for _ in prompts]
        ends = lambda row, _: len(rows[row]) == limits[row]
        for row, token, _ in generate(model, prompts, 20, ends=ends, seed=3, **how):
            rows[row].append(token)
        assert rows == [row[:n] for row, n in zip(alone, limits)]


@pytest.mark.parametrize("norm, steps, d, n", (("pre", 8, 2, 4), ("post", 3, 2, 1), ("pre", 64, 1, 7)))
def test_speculative_equals_plain(norm, steps, d, n):
    """Greedy text is the same token for token, whether drafts are accepted or not."""
    model, prompts = decode_model(2, norm), [torch.randint(64, (n,)).tolist() for n in (1, 12, 3)]
    assert decode(model, prompts, 30, steps=steps, draft_steps=d, draft_len=n).tolist() == \
        decode(model, prompts, 30, steps=steps).tolist()


def test_speculative_sampling_keeps_the_distribution():
    """Pairs of tokens come as often as the model at r says, though the drafts are of another distribution."""
    model, rows, settings = decode_model(vocab_size=6), 8000, dict(temperature=0.7, top_k=5)
    with torch.no_grad():  # the noise of each position is given: decoding has one for all rows
        noise = model.initial_state(3, 1, [1_000_003 + i for i in range(3)])[:, 0]
        after = lambda steps, *ids: distribution(model(torch.tensor([ids]), steps=steps, state=noise[None, :len(ids)])[0]
                                                 [0, -1], Decoding(**settings))
        exact, draft = ([after(r, 2)[i] * after(r, 2, i)[j] for i in range(6) for j in range(6)] for r in (4, 1))
    tokens = decode(model, [[2]] * rows, 3, steps=4, seed=1, draft_steps=1, draft_len=2, **settings)
    found = (6 * tokens[:, 0] + tokens[:, 1]).bincount(minlength=36) / rows
    exact, draft = torch.stack(exact), torch.stack(draft)
    error = (exact * (1 - exact) / rows).sqrt()
    assert ((found - exact).abs() <= 4.5 * error).all() and ((found - draft).abs() > 10 * error).any()


def test_adaptive_exit():
    """Threshold 0 is plain decoding, with fewer slots and where states no longer change, too. One that is always met is
    decoding at min_steps."""
    model, prompts = decode_model(), [[5], [9], [33]]
    for rule in ("latent", "kl", "second-order"):
        how = {"steps": 12, "exit": rule}
        assert torch.equal(decode(model, prompts, 20, exit_threshold=0.0, **how), decode(model, prompts, 20, steps=12))
        assert torch.equal(decode(model, prompts, 20, exit_threshold=1e9, min_steps=4, **how),
                           decode(model, prompts, 20, steps=4))
        assert torch.equal(decode(model, prompts, 20, exit_threshold=0.0, kv="2", **how),
                           decode(model, prompts, 20, steps=12, kv="2"))
    with torch.no_grad():
        for p in model.core.parameters():
            p.mul_(0.3)  # settles: differences of 0 but for rounding, which may be negative
    assert {took for _, _, took in generate(model, prompts, 20, 40, exit="kl", exit_threshold=0.0)} == {40}


def test_adaptive_rows_take_their_own_time():
    """Rows of a batch take different numbers, and slots that a token did not reach hold its last keys and values."""
    model, prompts = decode_model(), [[5], [9], [33]]
    o = Decoding(exit="latent", exit_threshold=0.8)
    with torch.inference_mode():
        d = Decoder(model, 12, 3, 60, o)
        seen = list(itertools.islice(adaptive(d, prompts, o, None, {0, 1, 2}), 60))
    assert len({took for _, _, took in seen}) > 2
    for i in range(3):
        for position, took in enumerate([took for row, _, took in seen if row == i]):
            keys = d.keys[1:-1, i, position].unflatten(0, (12, 2))
            assert keys[took - 1].any() and keys[took:].eq(keys[took - 1]).all()


def test_constant_memory():
    """--kv N has the size of N slots whatever r is; with N >= r it is exact."""
    model, prompts = decode_model(), [[5, 1, 2], [9]]
    size = lambda r, kv: len(Decoder(model, r, 2, 30, Decoding(kv=kv)).keys)
    assert (size(32, "full"), size(32, "last"), size(4, "last"), size(32, "3")) == (2 + 64, 2 + 2, 2 + 2, 2 + 6)
    full = decode(model, prompts, 20, steps=6)
    assert torch.equal(full, decode(model, prompts, 20, steps=6, kv="6")) and \
        not torch.equal(full, decode(model, prompts, 20, steps=6, kv="last"))


def test_int8_core_is_close():
    """The recurrent block in 8 bits: every weight within half a step of 1/127 of its row's largest, at any width."""
    model = RecurrentLM(Config(64, n_embd=36, n_head=2, n_kv_head=1, n_ffn=43, n_prelude=1, n_core=2, n_coda=1)).bfloat16()
    before = {name: m.weight.float() for name, m in model.named_modules() if type(m) is Linear and name != "head"}
    model.quantise_core()
    for name, m in model.named_modules():
        if isinstance(m, Int8Linear):
            old, step = before[name], before[name].abs().amax(1, keepdim=True) / 127
            assert (m.weight[:, :old.shape[1]] * step - old).abs().le(step / 2 * 1.001).all()
            x = torch.randn(3, old.shape[1]).bfloat16()
            torch.testing.assert_close(m(x).float(), x.float() @ old.T, atol=0.02, rtol=0.02)
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 9


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_compiled_products_of_few_rows(dtype):
    """The sums that replace matrix products in compiled decoding equal float64's products, for 1 row to 5."""
    layer = Linear(48, 40).to(dtype)
    f = torch.compile(lambda x: layer(x), dynamic=False)
    with torch.inference_mode():
        for rows in (1, 4, 5):
            x = torch.randn(1, rows, 48).to(dtype)
            close = dict(atol=1e-6, rtol=1e-5) if dtype == torch.float32 else dict(atol=0, rtol=2**-7)
            torch.testing.assert_close(f(x).double(), x.double() @ layer.weight.double().T, **close)


def test_decoding_leaves_the_model_trainable():
    """Decoding first and training after works: no inference tensor stays behind in the model."""
    model = decode_model()
    decode(model, [[1, 2, 3]], 4)
    model(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]), steps=2)[1].backward()


def test_bf16_decodes():
    """bfloat16 models decode, padded too."""
    assert decode(decode_model().bfloat16(), [[1], [2, 3]], 4).shape == (2, 4)


def test_pick_follows_temperature_top_k_and_top_p():
    """Draws have softmax(logits / temperature)'s frequencies, cut to the top k and to the nucleus."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]].expand(20000, 4)
    rng = torch.Generator().manual_seed(0)
    share = lambda *a: (pick(logits, Decoding(*a), rng).bincount(minlength=4) / 20000)[[1, 3, 0, 2]]
    close = lambda a, b: torch.testing.assert_close(a, torch.tensor(b), atol=0.015, rtol=0)
    close(share(1.0, 0, 1.0), [0.5, 0.3, 0.15, 0.05])
    close(share(1.0, 2, 1.0), [0.625, 0.375, 0.0, 0.0])
    close(share(1.0, 0, 0.7), [0.625, 0.375, 0.0, 0.0])
    close(share(0.5, 0, 1.0), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365])
    for settings in ((0, 0, 1.0), (1e-40, 0, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9)):  # all of them greedy
        assert pick(logits[:5], Decoding(*settings), rng).tolist() == [1] * 5


@needs_assets
@pytest.mark.parametrize("name", ("tinyllama", "llama3"))
def test_streamed_text_is_whole(name):
    """Pieces join to the text, spaces included, and no piece shows half a character."""
    tokenizer = Tokenizer.load(shared("assets", "tokenizers", name))
    text = "Once upon a time 日本語 in Zürich 🙂👩‍👩‍👧, so.\n  Über"
    ids = tokenizer.encode(text)
    pieces = list(stream(tokenizer, ids[:3], ids[3:]))
    assert tokenizer.decode(ids[:3]) + "".join(pieces) == text and len(pieces) > 10
    assert "\ufffd" not in "".join(pieces)


@needs_assets
def test_answer_extraction_by_table():
    """Cut, extraction and comparison equal lm-eval's on every row of the fixture."""
    for line in open(fixture("gsm8k_extract.jsonl")):
        row = json.loads(line)
        text = cut(row["output"], STOPS["cot"])
        found = {"cut": text, "flexible": flexible_extract(text), "strict": strict_extract(text)}
        for answer in (row["answer"], row["gold"]):
            found |= {f"{key}_correct": is_correct(found[key], answer) for key in ("flexible", "strict")}
            assert {key: row[key] for key in found} == found, row["why"]


@needs_assets
def test_prompts_are_the_papers():
    """The 0-, 1- and 8-shot prompts equal lm-eval's character by character."""
    oracle = json.load(open(fixture("gsm8k_prompt.json")))
    for shots in (0, 1, 8):
        assert make_prompt(oracle["doc"]["question"], "cot", shots) == oracle[str(shots)]
    assert list(STOPS["cot"]) == oracle["until"]


def test_batched_answers_equal_single_ones():
    """answer_batch ends each row at its own stop or EOS and gives the text that the row gives alone."""
    class Letters:  # one character a token: stops span tokens
        eos_id, decode = 63, staticmethod(lambda ids: "".join(chr(40 + i) for i in ids))

    model, stops = decode_model(), ("5", "AB", "@")
    prompts = [torch.randint(64, (n % 7 + 1,)).tolist() for n in range(10)]
    texts, counts, recurrences = answer_batch(model, Letters, prompts, 30, stops, 3)
    alone = [answer_batch(model, Letters, [p], 30, stops, 3) for p in prompts]
    full = decode(model, prompts, 30, steps=3)
    whole = [Letters.decode(row[:row.index(63)] if 63 in row else row) for row in full.tolist()]
    assert texts == [text for (text,), _, _ in alone] == [cut(text, stops) for text in whole]
    assert counts == [n for _, (n,), _ in alone] and recurrences == [3 * n for n in counts] and sum(counts) < 10 * 30


def test_decoding_refuses_bad_prompts():
    """An empty prompt, ids beyond the vocabulary, more than the context, no tokens and damaged weights are InputErrors."""
    for prompts, n, word in (([[1], []], 4, "empty"), ([[64]], 4, "vocabulary"), ([[1] * 60], 5, "context"),
                             ([[1]], 0, "at least one"), ([[2]], 4, "damaged")):
        model = decode_model()
        with torch.no_grad():
            model.embed.weight[2] = float("nan")
        with pytest.raises(InputError, match=word):
            next(generate(model, prompts, n))


@pytest.mark.parametrize("way", ("exit=foo,exit_threshold=1", "state=foo", "int8=0", "temperature=x", "top_k=3", "foo=1"))
def test_ways_of_decoding_are_checked(way):
    """bench.py decode measures no setting that would silently be another."""
    assert bench.parse_ways("temperature=0.5,top_k=3;int8") == [{"temperature": 0.5, "top_k": 3}, {"int8": ""}]
    with pytest.raises(InputError, match=way.split("=")[0]):
        bench.parse_ways(way)


def test_newest_checkpoint(tmp_path):
    """The last written nanoloop config.json wins; foreign models and half-written saves do not count."""
    with pytest.raises(InputError, match="tiny.sh"):
        newest_checkpoint(str(tmp_path))
    for age, (name, kind) in enumerate((("a/step_000002", "nanoloop"), ("a/step_000001", "nanoloop"), ("b", "llama"),
                                        ("a/step_000003.tmp-12", "nanoloop"))):
        (tmp_path / name).mkdir(parents=True)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps({"model_type": kind}))
        os.utime(path, (age, age))
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "a/step_000001")


# ---------------------------------------------------------------- tokenizers and data

HARD = ["", " ", "Hello  world", "naïve 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 café", "汉字和かな한국어 Ωмिक\u064e", "1234567890 3.14",
        "a\n\n\n  b\t\tc\r\n", "".join(map(chr, [*range(32), *range(127, 160)])), "e\u0301\u0323\u0308" * 9,
        "don't DON'T 'ſ", "<s></s><|endoftext|><|begin_of_text|><|eot_id|>", "|||IP_ADDRESS||| x",
        "a" * 5000, "漢" * 600, "\u2028\u00a0\ufeff ﷺ\U0010ffff", "\ufeffx",
        *(" " * n + "x" + "\n" * n for n in range(1, 101))]
TOKENIZERS = ["tokenizers/llama3", "tokenizers/tinyllama", "tokenizers/olmo2", "stories260K"]


@needs_assets
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_round_trip(name):
    """Any text comes back from its ids (a lone surrogate as U+FFFD), and no text becomes BOS or EOS unless asked."""
    tokenizer = Tokenizer.load(shared("assets", name))
    for text in HARD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_id not in ids and (tokenizer.bos_id is None or tokenizer.bos_id not in ids)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    bos = [tokenizer.bos_id][tokenizer.bos_id is None:]
    assert tokenizer.encode("a", bos=True) == bos + tokenizer.encode("a")
    if name == "tokenizers/llama3":  # the published ids
        assert tokenizer.encode("Hello world", bos=True) == [128000, 9906, 1917] and tokenizer.eos_id == 128001
    assert tokenizer.decode(tokenizer.encode("\udc00x \ud83d\ude00 a half \ud83d")) == "\ufffdx 😀 a half \ufffd"
    begin, end = "<|begin_of_text|>" if "llama3" in name else "<s>", tokenizer.decode([tokenizer.eos_id]) or "</s>"
    text, read = f"{begin * len(bos)}a{end} b", tokenizer.encode("a") + [tokenizer.eos_id] + tokenizer.encode(" b")
    assert tokenizer.encode(text, special=True) == tokenizer.encode(text, bos=True, special=True) == bos + read
    with pytest.raises(InputError):
        tokenizer.decode([tokenizer.vocab_size])


def oracle(name):
    """The tokenizer of an asset as the tokenizers library computes it, from files converted by transformers."""
    tokenizers, convert = map(pytest.importorskip, ("tokenizers", "transformers.convert_slow_tokenizer"))
    models, normalizers, processors = tokenizers.models, tokenizers.normalizers, tokenizers.processors
    path = shared("assets", name, "tokenizer.model")
    if name == "tokenizers/olmo2":
        return tokenizers.Tokenizer.from_file(shared("assets", name, "tokenizer.json"))
    if name == "tokenizers/llama3":  # with the names that Llama-3.2's tokenizer_config.json gives the ids
        names = ("begin_of_text end_of_text 0 1 finetune_right_pad_id 2 start_header_id end_header_id eom_id eot_id "
                 "python_tag").split() + list(range(3, 248))
        names = [f"<|{n if len(str(n)) > 3 else f'reserved_special_token_{n}'}|>" for n in names]
        theirs = convert.TikTokenConverter(path, extra_special_tokens=names).converted()
        theirs.post_processor = processors.Sequence([theirs.post_processor, processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 128000)])])
        return theirs
    sp = data.sentencepiece.SentencePieceProcessor(model_file=path)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    scores = {piece: sp.get_score(i) for piece, i in vocab.items() if i > 2 and not sp.is_byte(i)}
    theirs = tokenizers.Tokenizer(models.BPE(vocab, convert.generate_merges(vocab, scores), unk_token="<unk>",
                                             fuse_unk=True, byte_fallback=True))
    # As TinyLlama's own tokenizer.json. Today's LlamaTokenizer differs: no space before text that begins with one.
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.add_special_tokens(["<s>", "</s>"])
    return theirs


@needs_assets
@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_ids_match_tokenizers(name, tmp_path):
    """Ids equal the tokenizers library's, special names read or not; Llama-3's tokenizer.json gives its .model's."""
    theirs, ours = oracle(name), Tokenizer.load(shared("assets", name))
    with open(shared("assets", "gsm8k", "test.jsonl"), encoding="utf-8") as f:
        lines = f.read().splitlines()
    texts = [*HARD, *lines, "\n".join(lines * 2)]
    assert len(texts[-1]) > 400_000  # of which byte-level encode() makes two parts
    for special in (False, True):
        theirs.encode_special_tokens = not special
        for text in texts:
            assert ours.encode(text, special=special) == theirs.encode(text, add_special_tokens=False).ids, text[:200]
    if name == "tokenizers/olmo2":
        assert (ours.bos_id, ours.eos_id) == (None, 100257)
    if name == "tokenizers/llama3":
        (tmp_path / "tokenizer.json").write_text(theirs.to_str())
        hub = Tokenizer.load(str(tmp_path))
        assert all((t.bos_id, t.eos_id, t.vocab_size) == (128000, 128001, 128256) for t in (hub, ours))
        for text in texts:
            assert hub.encode(text, bos=True, special=True) == ours.encode(text, bos=True, special=True)
        for i, token in theirs.get_added_tokens_decoder().items():
            assert ours.encode(token.content, special=True) == hub.encode(token.content, special=True) == [i]


def test_byte_level_json_in_any_id_order(tmp_path):
    """A tokenizer.json whose ids are not in merge order is read exactly, with the BOS of its template."""
    tokenizers = pytest.importorskip("tokenizers")
    oracle = tokenizers.ByteLevelBPETokenizer()
    texts = ["the cat sat on the mat, then that cat ate the hat 你好"] * 9
    oracle.train_from_iterator(texts, vocab_size=300, min_frequency=1)
    spec = json.loads(oracle.to_str())
    spec["pre_tokenizer"]["add_prefix_space"] = False
    vocab, first = spec["model"]["vocab"], {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    order = np.random.default_rng(0).permutation(len(vocab)).tolist()
    spec["model"]["vocab"] = {piece: order[i] for piece, i in vocab.items()}
    spec["added_tokens"] = [dict(id=len(vocab) + i, content=name, special=True, normalized=False,
                                 single_word=False, lstrip=False, rstrip=False)
                            for i, name in enumerate(["<|begin|>", "</s>"])]
    spec["post_processor"] = {
        "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [len(vocab)], "tokens": ["<|begin|>"]}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer, oracle = Tokenizer.load(str(tmp_path)), tokenizers.Tokenizer.from_str(json.dumps(spec))
    for text in ["the cat ate that", "then 你好 hat", "zzz\x00"]:
        assert tokenizer.encode(text, bos=True) == oracle.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id == len(vocab) + 1 and tokenizer.vocab_size == len(vocab) + 2


def test_other_tokenizers_are_refused_by_name(corpus, tmp_path):
    """A tokenizer.json that is not byte-level BPE is named, with the mend; a damaged one is told apart."""
    level, meta = {"type": "ByteLevel", "add_prefix_space": False}, {"type": "Metaspace"}
    split = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "MergedWithNext", "invert": False}
    spec = {"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": level}
    for changes, message in (({"model": {"type": "Unigram"}, "pre_tokenizer": meta}, "Unigram with Metaspace, not"),
                             ({"model": {"type": "WordPiece"}, "pre_tokenizer": None}, "WordPiece, not"),
                             ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}, "with Split, not"),
                             ({"normalizer": {"type": "NFC"}}, "BPE with NFC, not"),
                             ({"pre_tokenizer": meta}, "BPE with Metaspace, .*: put .*tokenizer.model"),
                             ({}, "damaged: fetch it again")):
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec | changes))
        with pytest.raises(InputError, match=message):
            Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec)[:-9])
    with pytest.raises(InputError, match="damaged: fetch it again"):
        Tokenizer.load(str(tmp_path))
    shutil.copy(f"{corpus}/tokenizer/tokenizer.model", tmp_path)
    assert Tokenizer.load(str(tmp_path)).files == [str(tmp_path / "tokenizer.model")]  # wins beside TinyLlama's .json


def test_special_tokens_in_the_prompt(corpus, tmp_path, capsys):
    """sample.py reads "</s>" in a prompt as characters, with --special as the token."""
    import sample
    small(vocab_size=17, context=8).save(str(tmp_path / "m"), tokenizer=f"{corpus}/tokenizer")
    for flags, count in (((), 2), (("--special",), 3)):  # the word 7</s> is unknown
        call(sample.main, "--model", tmp_path / "m", "--prompt", "has 7</s>", *flags)
        assert f"{count} prompt tokens leave room" in capsys.readouterr().err


def word_documents(path, n):
    """n short documents in the embedded corpus's words, written to path; returns their texts."""
    rng = np.random.default_rng(0)
    rows = [" ".join(["has", *map(str, rng.integers(10, size=rng.integers(1, 9)))]) for _ in range(n)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prepare_resumes_byte_identical(kind, corpus, tmp_path, monkeypatch):
    """
    A killed prepare goes on after its last whole shard and ends with the same bytes, bad and dropped rows or not;
    twice does nothing.
    """
    rows = word_documents(tmp_path / "b.jsonl", 800)
    table = [{"text": row, "by": "DeepSeek-R1" if i % 50 == 7 else "human"} for i, row in enumerate(rows)]
    table[100]["text"] = table[700]["text"] = None
    rows = [row["text"] for row in table if row["text"] and row["by"] == "human"]
    path = str(tmp_path / f"a.{kind}")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(table), path, row_group_size=90)
        sources = {path: (os.path.getsize(path), lambda: path)}
        place = next(data._chunks(sources, ["text"], 0, [0, 360, 0]))[3]
        assert place[:2] == [0, 450]  # a resumed run begins at its row group
    arguments = dict(inputs=[path], tokenizer=f"{corpus}/tokenizer", val=0.1,
                     shard_tokens=1000, drop=["by=deepseek"])
    prepare(out=str(tmp_path / "whole"), **arguments)
    save = np.save
    with monkeypatch.context() as patch:
        def die(path, array):
            save(path, array)
            if path.endswith("train_000002.npy"):
                raise KeyboardInterrupt
        patch.setattr(np, "save", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(out=str(tmp_path / "killed"), **arguments)
    with pytest.raises(InputError, match="no meta.json"):
        Shards(str(tmp_path / "killed"), "train", 8)
    prepare(out=str(tmp_path / "killed"), procs=2, **arguments)
    names = sorted(os.listdir(tmp_path / "whole"))
    assert names == sorted(os.listdir(tmp_path / "killed"))
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name
    tokenizer, stream = Tokenizer.load(str(tmp_path / "whole")), []
    meta = json.loads((tmp_path / "whole" / "meta.json").read_text())
    counts, meta = meta["counts"][path], meta["shards"]
    assert (counts["documents"], counts["bad"], counts["dropped"]) == (800, 2, 16)
    assert [line.split(": ")[0] for line in counts["first"]] == [f"{path}:101", f"{path}:701"] and len(meta["train"]) > 3
    for (train, _), (val, _) in zip(meta["train"], meta["val"], strict=True):
        stream += [*np.load(tmp_path / "whole" / train), *np.load(tmp_path / "whole" / val)]
    assert stream == [i for row in rows for i in [*tokenizer.encode(row), tokenizer.eos_id]]
    prepare(out=str(tmp_path / "whole"), **arguments)
    with pytest.raises(InputError, match="other arguments"):
        prepare(out=str(tmp_path / "whole"), **(arguments | {"val": 0.2}))


def test_prepare_refuses_bad_input(corpus, tmp_path):
    """Bad text is refused with the file, the line and the mend."""
    for content, message in [(b'{"text": "has 1"}\n{"text": ', ":2: "), (b'{"text": "\xff"}', ":1: "),
                             (b"", "empty"), (b"\n\n", "no text"), (b'{"q": "has"}', "--field"),
                             (b'{"text": null}', "--field"), (b"[1]", ":1: ")]:
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=message):
            prepare([str(tmp_path / "bad.jsonl")], f"{corpus}/tokenizer", str(tmp_path / "out"))
    with pytest.raises(InputError, match="tokenizer"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(InputError, match="COLUMN=TEXT"):
        prepare([str(tmp_path / "bad.jsonl")], f"{corpus}/tokenizer", str(tmp_path / "out"), drop=["deepseek"])


def test_prepare_allows_few_bad_documents(corpus, tmp_path, capsys):
    """Up to --max_bad of an input may be bad: left out, counted, the first ones shown. A wrong column never passes."""
    word_documents(tmp_path / "a.jsonl", 95)
    with open(tmp_path / "a.jsonl", "ab") as f:
        f.write(b'{"text": \n[]\n{"text": "\xff"}\n{"text": 3}\n{"text": [{"role": "user"}]}\n')
    arguments = [str(tmp_path / "a.jsonl")], f"{corpus}/tokenizer", str(tmp_path / "out")
    with pytest.raises(InputError, match=r"a.jsonl:96: .*; 5 of 100 documents .*--max_bad"):
        prepare(*arguments)
    prepare(*arguments, max_bad=0.05)
    assert capsys.readouterr().out.count("left out: ") == 6  # 3 each time
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["counts"][arguments[0][0]]["bad"] == 5
    word_documents(tmp_path / "b.jsonl", 1000)
    with open(tmp_path / "b.jsonl", "a") as f:
        f.write('{"q": "has"}\n' * 5000)
    for more in ({"field": "question"}, {"drop": ["by=x"]}, {"max_bad": 0.8}):
        with pytest.raises(InputError, match=":1001: " if "max_bad" in more else ":1: "):
            prepare([str(tmp_path / "b.jsonl")], f"{corpus}/tokenizer", str(tmp_path / "other"), **more)


def test_prepare_strips_roles_and_joins_messages(corpus, tmp_path):
    """Chats become plain text: a message a line, without the tags that a line begins with."""
    chat = [{"role": "user", "content": "User: has 1\n### Assistant:\nhas 2"},
            {"role": "assistant", "content": "<|im_start|>assistant\nhas 3<|im_end|>\nthe user: has 4\n<|System|> has 5"}]
    row = json.dumps({"messages": chat, "text": "the end"}).encode()
    text = data._text("a.jsonl", row, ["messages", "text"], [("text", "start")])
    assert text == "\n".join([chat[0]["content"], chat[1]["content"], "the end"])
    assert data._text("a.jsonl", row, ["text"], [("text", "END")]) is None
    assert data.ROLES.sub("", text) == "has 1\nhas 2\nhas 3\nthe user: has 4\nhas 5\nthe end"
    (tmp_path / "a.txt").write_text("Human: has 1\nAssistant: has 2")
    prepare([str(tmp_path / "a.txt")], f"{corpus}/tokenizer", str(tmp_path / "out"), strip_roles=True, val=0)
    tokenizer = Tokenizer.load(f"{corpus}/tokenizer")
    assert np.load(tmp_path / "out" / "train_000000.npy").tolist() == [*tokenizer.encode("has 1\nhas 2"), tokenizer.eos_id]


def test_loader_is_a_pure_function(corpus):
    """2 ranks with batch B see what 1 rank with 2B sees; an epoch visits every row once."""
    shards = Shards(f"{corpus}/task", "val", 26)
    both = shards.batch(7, 3, 0, 1, 8)
    parts = [shards.batch(7, 3, rank, 2, 4) for rank in (0, 1)]
    for whole, a, b in zip(both, *parts):
        assert np.concatenate([a, b]).tolist() == whole.tolist()
    assert both[2].tolist() == list(range(24, 32))
    for rows in (1, 2, 3, 10, 1000, 4096):
        first, second = data._shuffled(np.arange(2 * rows), 5, rows).reshape(2, rows)
        assert sorted(first) == sorted(second) == list(range(rows))
        assert rows < 10 or (first.tolist() != second.tolist() and (first == np.arange(rows)).mean() < 0.5)
    assert 0 <= data._shuffled(np.arange(10**12, 10**12 + 64), 5, 10**9).min()


def test_loader_windows(corpus, tmp_path):
    """Windows follow one another without crossing shards; targets are the next token."""
    word_documents(tmp_path / "a.jsonl", 300)
    out = str(tmp_path / "out")
    prepare([str(tmp_path / "a.jsonl")], f"{corpus}/tokenizer", out, shard_tokens=500, val=0)
    shards = Shards(out, "train", 16)
    idx, targets, _ = shards.batch(0, 0, 0, 1, shards.rows)
    files = [np.load(f"{out}/{name}") for name, _ in shards.meta["shards"]["train"]]
    windows = [(f[i:i + 16].tolist(), f[i + 1:i + 17].tolist()) for f in files for i in range(0, len(f) - 16, 16)]
    assert sorted(windows) == sorted(zip(idx.tolist(), targets.tolist()))


def row_sets(corpus, folder, counts):
    """Data sets of rows [set, number of the row]; their folders."""
    for i, n in enumerate(counts):
        shutil.copytree(f"{corpus}/tokenizer", folder / str(i))
        shards = {}
        for split in ("train", "val"):
            rows = np.stack([np.full(n, i), np.arange(n)], 1)
            np.save(folder / str(i) / f"{split}.npy", rows.ravel().astype(np.uint16))
            np.save(folder / str(i) / f"{split}.targets.npy", rows.ravel().astype(np.int32))
            shards[split] = [[f"{split}.npy", 2 * n]]
        meta = {"vocab_size": 100, "eos_id": 1, "row": 2, "shards": shards, "arguments": {"input": ["x" * 200, n]}}
        (folder / str(i) / "meta.json").write_text(json.dumps(meta))
    return [str(folder / str(i)) for i in range(len(counts))]


def test_mixture_follows_its_weights(corpus, tmp_path):
    """Exact shares, evenly spread; every set in epochs of its own; a batch depends on no rank and no other step."""
    folders, counts, weights = row_sets(corpus, tmp_path, (30, 7, 11)), (30, 7, 11), (5, 1, 2)
    spec = ",".join(f"{folder}:{weight}" for folder, weight in zip(folders, weights))
    for split in ("train", "val"):
        mixture = data.open_data(spec, split, 2)
        rows, targets, _ = mixture.batch(3, 0, 0, 1, 800)
        assert rows.equal(targets) and mixture.rows == 44 and mixture.meta["vocab_size"] == 100
        for k, (n, weight) in enumerate(zip(counts, weights)):
            mine = rows[:, 0] == k
            assert mine.view(-1, 8).sum(1).tolist() == [weight] * 100
            assert (mine.cumsum(0) - torch.arange(1, 801) * weight / 8).abs().max() < 1.5
            epochs = rows[mine, 1][:mine.sum() // n * n].view(-1, n)
            assert epochs.sort(1).values.equal(torch.arange(n).expand_as(epochs)) and len(epochs.unique(dim=0)) > 1
        for step in (0, 7):
            parts = [mixture.batch(3, step, rank, 2, 8) for rank in (0, 1)]
            assert torch.cat([parts[0][0], parts[1][0]]).equal(rows[16 * step:16 * step + 16])
    even = data.open_data(",".join(folders), "train", 2).batch(0, 0, 0, 1, 300)[0]
    assert even[:, 0].bincount().tolist() == [100] * 3
    with open(tmp_path / "2" / "tokenizer.model", "ab") as f:
        f.write(b"x")
    with pytest.raises(InputError, match=f"{folders[0]}.*{folders[2]}"):
        data.open_data(spec, "train", 2)


def test_loader_fingerprint(corpus, tmp_path):
    """Says which data set it is, wherever it lies: other rows, inputs or weights change it."""
    folders = row_sets(corpus, tmp_path, (30, 7))
    shutil.copytree(folders[0], tmp_path / "moved")
    mark = lambda spec: data.open_data(spec, "train", 2).fingerprint()
    assert mark(folders[0]) == mark(str(tmp_path / "moved")) == json.loads(json.dumps(mark(folders[0])))
    assert mark(folders[0])["train"] == 60 and len(json.dumps(mark(folders[0]))) < 200
    pair = ",".join(folders)
    assert {k for k, v in mark(pair).items() if mark(f"{folders[0]}:2,{folders[1]}")[k] != v} == {"0 weight"}
    assert {k for k, v in mark(folders[0]).items() if mark(folders[1])[k] != v} == {"train", "val", "input"}


def test_loader_refuses_bad_folders(corpus, tmp_path):
    """A cut shard, a wrong T, a small vocabulary, a missing folder: each is said, never trained on."""
    with pytest.raises(InputError, match="--context=26"):
        Shards(f"{corpus}/task", "train", 32)
    with pytest.raises(InputError, match="meta.json"):
        Shards(str(tmp_path), "train", 26)
    for name in ("train_000000.npy", "train_000000.targets.npy"):
        for size in (0, 50, 5000, None):
            folder = str(tmp_path / f"{name}{size}")
            shutil.copytree(f"{corpus}/task", folder)
            os.truncate(f"{folder}/{name}", size) if size is not None else os.remove(f"{folder}/{name}")
            with pytest.raises(InputError, match=name):
                Shards(folder, "train", 26)


def solve(sentences):
    """The answer after every sentence of a story (a list of words): the task, said once more."""
    answers = []
    for verb, number in zip(sentences[::2], map(int, sentences[1::2])):
        last = int(answers[-1]) if answers else 0
        count = {"has": number, "gets": last + number, "loses": last - number, "times": last * number}[verb]
        answers.append(str(count % 10))
    return answers


def test_tiny_rows_say_the_truth(corpus):
    """Every row of the embedded corpus is a story with its true answers, labelled where it should be."""
    tokenizer = Tokenizer.load(f"{corpus}/tokenizer")
    words = [tokenizer.decode([i]) for i in range(17)]
    assert words[1:] == ["", "has", "gets", "loses", "times", "so", *"0123456789"]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (17, None, 1)
    assert solve("has 7 loses 4 times 3 gets 2 gets 1 loses 4".split())[-1] == "8"
    kinds, lengths = {"worked": 0, "direct": 0}, set()
    for kind, T, n in (("pretrain", 52, 512), ("task", 26, 1024)):
        idx, targets, _ = Shards(f"{corpus}/{kind}", "val", T).batch(0, 0, 0, 1, n)
        # A row is one document or two, each with EOS at its end, or one and padding of EOS.
        ends = [[i for i, token in enumerate(row) if token == 1] for row in idx.tolist()]
        documents = [(row[a + 1:b + 1], label[a + 1:b + 1]) for row, label, at in zip(idx.tolist(), targets.tolist(), ends)
                     for a, b in zip([-1, *at], at)]
        assert all(at[-1] == T - 1 for at in ends)
        for row, label in documents:
            end = len(row) - 1
            assert label[end] == -100
            if end == 0:
                continue
            text, said = [words[i] for i in row[:end]], {i: words[y] for i, y in enumerate(label) if y >= 0}
            if text[0] == "so":
                kinds["worked"] += 1
                lengths.add(end // 4)
                story = [w for i in range(1, end, 4) for w in text[i:i + 2]]
                assert text[4::4] == solve(story) and label[:end] == row[1:end + 1]
            else:
                kinds["direct"] += 1
                story, answers = text[:-1], solve(text[:-1])
                assert len(story) == 24 and text[-1] == answers[-1]
                shown = 3 if kind == "pretrain" else 12
                expected = {2 * i + 1: answers[i] for i in range(shown)} | ({24: ""} if kind == "task" else {})
                assert said == expected
    assert kinds["direct"] == 512 + 1024 and 460 < kinds["worked"] <= 512 and lengths == set(range(1, 13))
    for name, counts in (("test.jsonl", {i: 100 for i in range(1, 13)}), ("test18.jsonl", {18: 300})):
        with open(f"{corpus}/{name}") as f:
            rows = [json.loads(line) for line in f]
        for row in rows:
            assert row["answer"] == solve(row["question"].split())[-1]
            assert len(row["question"].split()) == 2 * row["difficulty"]
            counts[row["difficulty"]] -= 1
        assert not any(counts.values())


def test_tiny_again(corpus, tmp_path):
    """The corpus depends on the seed alone, and a second call leaves a whole one untouched."""
    before = os.stat(f"{corpus}/test.jsonl").st_mtime_ns
    tiny(str(corpus), rows=8000)
    assert os.stat(f"{corpus}/test.jsonl").st_mtime_ns == before
    tiny(str(tmp_path / "again"), rows=8000)
    for name in ("pretrain/train_000000.npy", "task/train_000000.targets.npy", "tokenizer/tokenizer.model",
                 "test.jsonl"):
        with open(f"{corpus}/{name}", "rb") as a, open(tmp_path / "again" / name, "rb") as b:
            assert a.read() == b.read()
    with pytest.raises(InputError, match="--out"):
        tiny(str(corpus), seed=1)


# ---------------------------------------------------------------- training

def settings(**changes):
    return train.Settings(**dict(out_dir="x", data="x") | changes)


@needs_assets
def test_schedules_are_the_papers():
    """Mean recurrence, backprop depth, learning rate and the drawn (n, k) are those that the paper's code gives."""
    with open(fixture("curriculum.json")) as f:
        oracle = json.load(f)
    for x in oracle["schedules"]:
        s = settings(updates=x["total"], curriculum_warmup=x["warmup"], mean_recurrence=x["max_mean_rec"],
                     curriculum=x["warmup_type"])
        runs = [r for r, length in x["mean_recurrence_runs"] for _ in range(length)]
        assert [train.mean_recurrence(s, u) for u in range(x["total"])] == runs
    for x in oracle["backprop_schedules"]:  # the paper's code falls back at the last update: we do not
        s = settings(updates=x["total"], backprop_warmup=x["warmup"], curriculum="none")
        runs = [k for k, length in x["backprop_depth_runs"] for _ in range(length)]
        assert [train.backprop_depth(s, u) for u in range(x["total"] - 1)] == runs[:-1]
    for x in oracle["lr_factors"]["cases"]:
        s = settings(updates=x["total"], warmup=x["warmup"], cooldown=x["cooldown"])
        assert all(abs(train.lr_factor(s, u) - f) < 1e-9 for u, f in x["points"])
    for x in oracle["sampler"]["cases"]:
        s = settings(mean_recurrence=x["mean_recurrence"], backprop_depth=x["backprop_depth"], curriculum="none")
        assert [list(train.draw_steps(s, 0, i)) for i in range(1, 65)] == x["exact_data_step_1_to_64"]


def test_settings_say_what_is_wrong(tmp_path):
    """Values keep their types, '=' may stand in one, and a wrong key or type names the key and the mend."""
    config = tmp_path / "c.toml"
    config.write_text('out_dir = "a=b"\ndata = "d"\nlr = 1\neval_steps = [1, 2]\n')
    s = train.read_settings([f"--config={config}", "--updates=1e3", "--eval_steps=4,8", "--compile=false"])
    assert (s.out_dir, s.lr, s.updates, s.eval_steps, s.compile) == ("a=b", 1.0, 1000, [4, 8], False)
    for arg, words in (("--uptades=3", "updates"), ("--updates=1.5", "int"), ("--lr=fast", "float"), ("--compile=3", "bool"),
                       ("--updates=0", "between"), ("--clip=-1", "between"), ("--eval_steps=-1", "eval_steps"),
                       ("--curriculum=cubic", "linear"), ("updates=3", "--key=value"),
                       (f"--config={tmp_path}/no.toml", "no.toml")):
        with pytest.raises(InputError, match=words):
            train.read_settings([f"--config={config}", arg])


RUN = ("--n_prelude=1", "--n_core=1", "--n_coda=1", "--n_embd=32", "--n_ffn=64", "--context=26", "--batch_size=16",
       "--micro_batch=8", "--mean_recurrence=3", "--backprop_depth=2", "--updates=12", "--save_every=3", "--eval_every=6",
       "--eval_rows=32", "--eval_steps=1,4", "--compile=false", "--lr=0.01", "--adam_lr=0.003")


def losses(folder):
    with open(os.path.join(folder, "log.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    return {x["update"]: x["loss"] for x in lines if "loss" in x}


def children(p):
    return subprocess.run(["pgrep", "-P", str(p.pid)], capture_output=True, text=True).stdout.split()


def test_any_number_of_ranks_gives_the_same_bits(corpus, tmp_path):
    """1 and 2 ranks end with the same weights to the last bit, and the same log, at the same global batch and micro-batch;
    so does a run that was killed and gone on with on another number of ranks each time, with nothing half-written."""
    base = (f"--data={corpus}/pretrain", *RUN, "--context=52", "--micro_batch=2", "--dtype=bfloat16", "--draws=2")

    def launch(n, folder, last=13):
        ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}") if n > 1 else ()
        p = subprocess.Popen([sys.executable, *ranks, "train.py", *base, f"--out_dir={tmp_path}/{folder}"], cwd=HERE,
                             text=True, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        for line in p.stdout:
            if line.startswith(f"update {last:5d}/12  loss"):
                subprocess.run(["kill", "-9", *children(p), str(p.pid)])
        assert (p.wait() == 0) == (last == 13)

    launch(1, "one")
    launch(2, "two")
    for n, last in ((2, 4), (1, 7), (2, 13)):
        launch(n, "killed", last)
    for name in ("two", "killed"):
        assert losses(tmp_path / name) == losses(tmp_path / "one") and len(losses(tmp_path / "one")) == 12
        assert same_weights(tmp_path / name / "step_000012", tmp_path / "one" / "step_000012")
        assert sorted(os.listdir(tmp_path / name)) == ["log.jsonl", "step_000012"]


def test_stopped_run_ends_with_the_same_weights(corpus, tmp_path):
    """SIGTERM and SIGINT save and stop within a step, --max_minutes in time; the same command goes on to the same end."""
    base = ("train.py", f"--data={corpus}/task", *RUN, "--save_every=100", "--updates=40", "--eval_every=100")
    run(*base, f"--out_dir={tmp_path}/whole")
    folder, seen = tmp_path / "stopped", []
    for number in (signal.SIGTERM, signal.SIGINT):
        p = subprocess.Popen([sys.executable, *base, f"--out_dir={folder}"], cwd=HERE, stdout=subprocess.PIPE, text=True)
        for line in p.stdout:
            if line.startswith("update") and "  loss" in line:
                seen.append(line)
                if len(seen) % 8 == 0 and f"by {number.name}" not in line:
                    p.send_signal(number)
            stopped = line
        assert p.wait() == 128 + number and number.name in stopped and "goes on" in stopped
        assert len(os.listdir(folder)) == 2
    assert "--max_minutes" in run(*base, f"--out_dir={folder}", "--max_minutes=1e-6")
    run(*base, f"--out_dir={folder}", "--max_minutes=60")
    assert same_weights(tmp_path / "whole" / "step_000040", folder / "step_000040")
    assert losses(tmp_path / "whole") == losses(folder)
    assert "choose another" in run(*base, f"--out_dir={folder}", "--lr=0.02", ok=False)


def test_lost_rank(corpus, tmp_path):
    """Where a rank is killed the others end with a line; torchrun --max-restarts goes on from the last checkpoint."""
    base = ("train.py", f"--data={corpus}/task", *RUN, "--updates=80", "--save_every=5", "--eval_every=1000")
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # as torchrun's processes: a sum's order depends on the threads
    run(*base, f"--out_dir={tmp_path}/whole", env=alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = [alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank} for rank in "01"]
    first, second = (subprocess.Popen([sys.executable, *base, f"--out_dir={tmp_path}/lost"], cwd=HERE, env=place, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) for place in places)
    for line in first.stdout:
        if line.startswith("update    12/"):
            second.kill()
    error = first.stderr.read()
    assert first.wait() == 1 and len(error.strip().splitlines()) == 1 and "another process" in error, error
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", *base,
              f"--out_dir={tmp_path}/lost"]
    p = subprocess.Popen(launch, cwd=HERE, env=alone, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    killed = 0
    for line in p.stdout:
        if line.startswith("update    40/") and not killed:
            killed = int(children(p)[-1])
            os.kill(killed, signal.SIGKILL)
    assert p.wait() == 0 and killed
    assert same_weights(tmp_path / "whole" / "step_000080", tmp_path / "lost" / "step_000080")


def test_updates_that_are_not_finite(corpus, tmp_path, monkeypatch, capsys):
    """A loss that is not finite skips its update and is counted; too many in a row end the run, the checkpoint stays."""
    args = (f"--data={corpus}/task", *RUN, "--save_every=6", "--max_skips=2", "--keep=2")
    now, bad, draw, forward = [], set(), train.draw_steps, RecurrentLM.forward

    def poisoned(model, *inputs):
        logits, loss = forward(model, *inputs)
        return logits, loss * (float("nan") if torch.is_grad_enabled() and now[-1] in bad else 1.0)

    monkeypatch.setattr(train, "draw_steps", lambda s, u, number: (now.append(u), draw(s, u, number))[1])
    monkeypatch.setattr(RecurrentLM, "forward", poisoned)
    bad |= {1, 3, 4}
    call(train.main, *args, f"--out_dir={tmp_path}/some")
    assert capsys.readouterr().out.count("skipped: loss nan") == 3
    bad |= {7, 8, 9}
    message = refusal(train.main, *args, f"--out_dir={tmp_path}/many")
    assert "--max_skips=2" in message and os.listdir(tmp_path / "many" / "step_000006")
    weights = load_file(tmp_path / "some" / "step_000012" / "model.safetensors").values()
    assert all(w.isfinite().all() for w in weights)
    bad -= {7, 8, 9}
    os.rename(tmp_path / "some" / "step_000012", tmp_path / "whole")
    call(train.main, *args, f"--out_dir={tmp_path}/some")  # goes on as if nothing had been
    assert same_weights(tmp_path / "whole", tmp_path / "some" / "step_000012")


def test_full_disk_leaves_the_last_checkpoint(corpus, tmp_path):
    """A checkpoint that cannot be written stops the run with a line; the one before stays whole and goes on."""
    base = ("train.py", f"--data={corpus}/task", *RUN, "--save_every=6", "--keep=2", f"--out_dir={tmp_path}/run")
    run(*base)
    os.rename(tmp_path / "run" / "step_000012", tmp_path / "whole")
    command = f"ulimit -f 40; exec {sys.executable} {' '.join(base)}"  # files of 40 KB at most stand for a full disk
    full = subprocess.run(["bash", "-c", command], cwd=HERE, capture_output=True, text=True)
    assert full.returncode == 1 and len(full.stderr.splitlines()) == 1 and "step_000012" in full.stderr, full.stderr
    assert sorted(os.listdir(tmp_path / "run")) == ["log.jsonl", "step_000006"]
    run(*base)
    assert same_weights(tmp_path / "whole", tmp_path / "run" / "step_000012")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler for torch.compile")
def test_compiled_runs_repeat_bit_for_bit(corpus, tmp_path):
    """With torch.compile and all cores, too, the same command gives the same weights: no sum is left to chance."""
    for name in ("a", "b"):
        run("train.py", f"--data={corpus}/task", *RUN, "--compile=true", "--updates=3", "--batch_size=64",
            "--micro_batch=64", f"--out_dir={tmp_path}/{name}",
            env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"})
    assert same_weights(tmp_path / "a" / "step_000003", tmp_path / "b" / "step_000003")


def test_accumulation_is_the_mean_over_all_labels(corpus, tmp_path):
    """Micro-batches with different numbers of labels give the update of the whole batch, at a fixed r."""
    base = ["train.py", f"--data={corpus}/pretrain", *RUN, "--context=52", "--updates=4", "--recurrence_sampler=fixed",
            "--optimizer=adamw"]
    run(*base, "--micro_batch=16", f"--out_dir={tmp_path}/one")
    run(*base, "--micro_batch=4", f"--out_dir={tmp_path}/four")
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert all(abs(one[u] - four[u]) < 2e-5 for u in one), (one, four)


def test_distillation_is_the_formula():
    """(1 - w) cross-entropy + w KL(teacher || model), the mean over labels, and no gradient where the two agree."""
    model, teacher, idx, targets = small(), small(1, n_core=0), torch.randint(50, (2, 9)), torch.randint(50, (2, 9))
    targets[0, 4:] = -100
    state = model.initial_state(2, 9)
    loss = lambda w, m=model, t=teacher: train.distil(m, t, idx, targets, (1, 2), state, w)
    p, q = (m(idx, steps=(1, 2), state=state)[0].double().softmax(-1)[targets != -100] for m in (teacher, model))
    apart = (p * (p / q).log()).sum(-1).mean()
    assert abs(loss(0.0) - model(idx, targets, (1, 2), state)[1]) < 1e-5 and abs(loss(1.0) - apart) < 1e-5
    assert abs(loss(0.25) - 0.75 * loss(0.0) - 0.25 * apart) < 1e-5
    loss(1.0, teacher, teacher).backward()
    assert max(p.grad.abs().max() for p in teacher.parameters()) < 1e-6


def test_distilled_and_started_otherwise(corpus, tmp_path):
    """--distill_from, --start and --backprop_depth=0 in a run; the next stage keeps a start; wrong teachers are refused."""
    base = [*RUN, "--updates=2", "--compile=false"]
    call(train.main, *base, f"--data={corpus}/task", f"--out_dir={tmp_path}/plain", "--n_core=0", "--n_prelude=2")
    base += [f"--data={corpus}/task", "--distill_weight=1"]
    first = [*base, f"--out_dir={tmp_path}/first", "--start=prelude", "--backprop_depth=0"]
    call(train.main, *first, f"--distill_from={tmp_path}/plain")
    call(train.main, *base, f"--init_from={tmp_path}/first", f"--out_dir={tmp_path}/second")
    assert all(RecurrentLM.load(tmp_path / name).config.start == "prelude" for name in ("first", "second"))
    with open(tmp_path / "first" / "log.jsonl") as f:
        updates = [x for x in map(json.loads, f) if "n" in x]
    assert all(x["n"] == 0 and x["k"] > 0 for x in updates)
    model, teacher = (RecurrentLM.load(tmp_path / name) for name in ("first", "plain"))
    drawn = train.draw_steps(train.read_settings(first), 0, 1)
    assert updates[0]["flops"] == 16 * 26 * (model.flops_per_token(drawn) + teacher.flops_per_token() // 3)
    teachers = small(vocab_size=17), small(vocab_size=18, n_core=0)
    for i, teacher in enumerate(teachers):
        teacher.save(tmp_path / f"t{i}")
        assert "--distill_from" in refusal(train.main, *base, f"--out_dir={tmp_path}/x", f"--distill_from={tmp_path}/t{i}")


def test_training_refuses(corpus, tmp_path):
    """A missing or corrupt data set, a wrong context and a tokenizer of another model each end in one line."""
    base = [*RUN, f"--out_dir={tmp_path}/run"]
    assert "nothing" in run("train.py", *base, f"--data={tmp_path}/nothing", ok=False)
    assert "--context" in refusal(train.main, *base, f"--data={corpus}/task", "--context=30")
    bad = tmp_path / "bad"
    shutil.copytree(corpus / "task", bad)
    with open(bad / "train_000000.npy", "r+b") as f:
        f.truncate(5000)
    assert "train_000000.npy" in refusal(train.main, *base, f"--data={bad}")
    small(vocab_size=8).save(tmp_path / "model")
    assert "vocabulary" in refusal(train.main, *base, f"--data={corpus}/task", f"--init_from={tmp_path}/model")
    small(context=20).save(tmp_path / "short")
    assert "--context" in refusal(train.main, *base, f"--data={corpus}/task", f"--init_from={tmp_path}/short")
    assert not (tmp_path / "run").exists()
    shutil.copytree(corpus / "task", tmp_path / "data")
    base += [f"--data={tmp_path}/data", "--updates=2"]
    call(train.main, *base)
    meta = tmp_path / "data" / "meta.json"
    meta.write_text(meta.read_text().replace('"seed": 0', '"seed": 1'))
    assert "seed was 0, is 1" in refusal(train.main, *base)
    assert "choose another" in refusal(train.main, *base, "--lr=0.02")
    child = [*RUN, f"--data={corpus}/task", f"--out_dir={tmp_path}/child", f"--init_from={tmp_path}/run",
             f"--match_tokens={tmp_path}/run"]
    progress = tmp_path / "run" / "step_000002" / "train.json"
    text = progress.read_text()
    progress.write_text(text.replace('"update": 2,', '"update": 1,'))
    assert "finish first" in refusal(train.main, *child)
    progress.write_text(text)
    call(train.main, *child)
    shutil.rmtree(tmp_path / "run")
    call(train.main, *child)  # its own checkpoint needs no other folder
    (tmp_path / "child" / "step_000002" / "train.json").write_text('{"config": []}')
    assert "train.json" in refusal(train.main, *child)


# ---------------------------------------------------------------- evaluation, comparison and pictures

EQUAL = [(r"\frac{1}{2}", "1/2"), (r"\frac12", "0.5"), (r"\dfrac{17}{50}", ".34"), (r"1\frac45", "9/5"),
         (r"137 \frac{1}{2}", "137.5"), (r"\$32,\!348", "32348"), ("58,500", "58500"), ("x=5", "5"), (r"2.50", "2.5"),
         (r"x \in [-2,7]", r"\left[-2, 7\right]"), (r"5.4 \text{ cents}", "5.4"), (r"864 \mbox{ inches}^2", "864"),
         (r"90^\circ", "90"), (r"90^{\circ}", "90 degrees"), (r"\text{(C)}", "C"), (r"\text{Evelyn}", "Evelyn"),
         ("3,5,7", "7, 3, 5"), (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt{5}"), (r"10\%", "10"),
         (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\\tfrac{2}{3}\end{bmatrix}"),
         (r"\frac{\sqrt{3}}{3}", r"\sqrt{3}/3"), (r"\frac{11+9a}{20}", "(11+9a)/20"), (r"3\text{ and }4", "3, 4"),
         (r"\frac{3\sqrt{3}}{4}", r"3\sqrt3/4"), ("52_8", "52_{8}"), (r"70 \sqrt{2}", r"70\cdot\sqrt{2}"),
         (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"), (r"-\frac{1}{2}", r"\frac{-1}{2}"),
         (r"\left( \frac{3}{2}, -13 \right)", "(1.5,-13)"), (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}")]
UNEQUAL = [("1/2", "1/3"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2)"), ("2", "20"), (r"2\cdot3", "23"), ("0.33", "1/3"),
           ("5", "-5"), ("", "0"), ("[invalid]", "1"), ("1,2", "1,2,3"), ("2x", "2"), (r"\pi", "3.14"), ("C", "D"),
           (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), (r"x^{2y}", "x^2y")]
# math_verify sees through these: algebra, percent; and it takes a base for nothing, a tuple for a list
NOT_SEEN = [(r"2\sqrt{3}", r"\sqrt{12}"), ("x+1", "1+x"), (r"50\%", "0.5"), ("52_8", "52"), ("(1,2)", "1,2")]


def test_math_answers_by_table():
    """What eval_gsm8k.py's docstring promises to see as equal, and what not; the last box or the words name the answer."""
    for a, b in EQUAL:
        assert eval_gsm8k.same_math(a, b) and eval_gsm8k.same_math(b, a), (a, b)
    for a, b in UNEQUAL + NOT_SEEN:
        assert not eval_gsm8k.same_math(a, b), (a, b)
    for text, found in (
            (r"\boxed{1} or \boxed{\frac{1}{2}}. The answer is 3", r"\frac{1}{2}"), ("The answer is 3.5.", "3.5"),
            ("Final Answer: The final answer is $[2,5)$. I hope it is correct.", "$[2,5)$"),
            ("the answer is:\n 7\nand more", "7"), ("none", "[invalid]"), (r"\boxed{1 + {2", "1 + {2")):
        assert eval_gsm8k.math_extract(text) == found


def test_math_answers_beside_math_verify():
    """The package math_verify says the same of every pair, but of those that the docstring names."""
    math_verify = pytest.importorskip("math_verify", reason="math_verify is not installed")
    same = lambda a, b: math_verify.verify(*(math_verify.parse(rf"$\boxed{{{text}}}$") for text in (a, b)))
    assert all(same(a, b) for a, b in EQUAL + NOT_SEEN) and not any(same(a, b) for a, b in UNEQUAL)


@needs_assets
def test_math500_golds():
    """Each of the 500 golds equals itself in its solution's words, and no two golds of other values are the same."""
    rows, left_out = eval_gsm8k.read_questions(shared("assets", "math", "math500.jsonl"), "math500")
    assert len(rows) == 500 and left_out == 0
    for row, line in zip(rows, open(shared("assets", "math", "math500.jsonl"))):
        solution, tail = json.loads(line)["answer"].rsplit("The answer is: ", 1)
        assert eval_gsm8k.score("math500", solution, row["gold"])["exact_correct"]
        assert eval_gsm8k.score("math500", f"The answer is: {tail}", row["gold"])["exact_correct"]
    values = {}
    for gold in {row["gold"] for row in rows}:
        values.setdefault(eval_gsm8k.canonical(eval_gsm8k.simplify(gold)), []).append(gold)
    assert {min(same, key=lambda gold: (len(gold), gold)) for same in values.values() if len(same) > 1} == {
        "90", "5", "-2,1", "120", "36", r"\frac14", "30", "10080", "15", r"2\sqrt{5}"}


@needs_assets
@pytest.mark.parametrize("task, n, left_out, gold", [("asdiv", 2093, 122, 9), ("svamp", 1000, 0, 145),
                                                     ("multiarith", 600, 0, 39), ("singleeq", 508, 0, 43),
                                                     ("addsub", 395, 0, 43)])
def test_word_problems(task, n, left_out, gold):
    """Their files are read, and numbers are compared as numbers."""
    rows, left = eval_gsm8k.read_questions(shared("assets", "math_word", f"{task}.jsonl"), task)
    assert (len(rows), left, rows[0]["gold"]) == (n, left_out, gold) and rows[0]["question"].endswith("?")
    right = lambda text: [eval_gsm8k.score(task, text, rows[0]["gold"])[f"{key}_correct"] for key in ("flexible", "strict")]
    for text in (f"The answer is {gold}.", f"So the answer is ${gold}.00", f"2 + 2. The answer is {2 * gold}/2 apples."):
        assert right(text) == [True, True], text
    assert right(f"It is {gold}") == [True, False] and right(f"The answer is {gold}. No, 1.") == [False, True]
    assert right("none") == right(f"The answer is {gold}.1") == [False, False]


PLAIN = ("--template", "plain", "--max_new_tokens", 3, "--batch_size", 4)


def evaluate(model, data, out, *flags):
    call(eval_gsm8k.main, "--model", model, "--data", data, "--out", out, *PLAIN, "--limit", 60, *flags)


def answers_of(path):
    """The lines of a file of answers, without the seconds, which no two runs share."""
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in open(path)]


@pytest.fixture(scope="session")
def evaluated(corpus, tmp_path_factory):
    """A folder with models r and ff, and r's evaluation whole.json at r = 1 and 24."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, n_core in (("r", 2), ("ff", 0)):
        small(vocab_size=17, n_core=n_core).save(folder / name, tokenizer=corpus / "tokenizer")
    evaluate(folder / "r", corpus / "test.jsonl", folder / "whole.json", "--steps", "1,24")
    return folder


def test_killed_evaluation_goes_on(evaluated, corpus, tmp_path):
    """Two processes, killed -9 in the midst of a line, then one: the file of answers and the scores of an unbroken run."""
    command = map(str, (sys.executable, "eval_gsm8k.py", "--model", evaluated / "r", "--data", corpus / "test.jsonl", *PLAIN,
                        "--limit", 60, "--steps", "1,24", "--out", tmp_path / "a.json"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command, paths = list(command), [tmp_path / "a.jsonl", tmp_path / "a.jsonl.part1"]
    ranks = [subprocess.Popen(command, cwd=HERE, env=env | {"RANK": rank}, stderr=subprocess.DEVNULL) for rank in "01"]
    while not all(path.exists() and path.read_bytes().count(b"\n") > 4 for path in paths):
        assert all(p.poll() is None for p in ranks)
        time.sleep(0.01)
    for p in ranks:
        p.kill()
        p.wait()
    assert not (tmp_path / "a.json").exists()
    with open(paths[1], "a") as f:
        f.write('{"index": 3, "steps"')
    assert sum(path.read_bytes().count(b"\n") - 1 for path in paths) < 120
    evaluate(evaluated / "r", corpus / "test.jsonl", tmp_path / "a.json", "--steps", "1,24")
    assert answers_of(tmp_path / "a.jsonl") == answers_of(evaluated / "whole.jsonl")
    assert len(answers_of(tmp_path / "a.jsonl")) == 121
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.jsonl"]
    ours, whole = (json.load(open(path)) for path in (tmp_path / "a.json", evaluated / "whole.json"))
    assert ours["results"] == whole["results"] and ours["n"] == 60
    lines = [json.loads(line) for line in open(tmp_path / "a.jsonl")][1:]
    assert ours["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert ours["tokens_per_second"] == pytest.approx(sum(line["tokens"] for line in lines) / ours["seconds"])


def test_two_processes_equal_one(evaluated, corpus, tmp_path):
    """torchrun shares the questions, whole batches of them; one summary comes out, and every answer is the same."""
    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval_gsm8k.py", "--model", evaluated / "r",
        "--data", corpus / "test.jsonl", *PLAIN, "--limit", 60, "--steps", "1,24", "--out", tmp_path / "a.json",
        env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert answers_of(tmp_path / "a.jsonl") == answers_of(evaluated / "whole.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "a.jsonl"]


def test_evaluation_grows_and_refuses(evaluated, corpus, tmp_path, capsys):
    """More --steps and a larger --limit add to a file; other settings, other files and damage are refused, and not lost."""
    model, test, out = evaluated / "r", corpus / "test.jsonl", tmp_path / "a.json"
    evaluate(model, test, out, "--steps", "1", "--limit", 8)
    before = answers_of(tmp_path / "a.jsonl")
    evaluate(model, test, out, "--steps", "1,24", "--limit", 12)
    after = answers_of(tmp_path / "a.jsonl")
    assert len(after) == 25 and all(answer in after for answer in before)
    said = capsys.readouterr()
    assert "holds 8 of 24 answers" in said.err
    assert re.search(r"\n +1  .*\n +24\*  .*\n", said.out) and "* beyond the mean recurrence of the training, 4" in said.out
    refuse = lambda *flags, to=out: refusal(eval_gsm8k.main, "--model", model, "--data", test, *PLAIN, "--out", to, *flags)
    text = (tmp_path / "a.jsonl").read_bytes()
    assert "seed (0, not 1)" in refuse("--seed", 1) and "--overwrite" in refuse("--seed", 1)
    assert "weights" in refuse("--model", evaluated / "ff")
    assert (tmp_path / "a.jsonl").read_bytes() == text
    evaluate(model, test, out, "--steps", "1", "--limit", 4, "--seed", 1, "--overwrite")
    assert len(answers_of(tmp_path / "a.jsonl")) == 5
    lines = text.splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines[:3], b"{oops\n", *lines[3:]]))
    assert "a.jsonl:4: " in refuse()
    (tmp_path / "a.jsonl").write_bytes(b"".join([*lines[:3], b'{"steps": 1, "index": []}\n', *lines[3:]]))
    assert "a.jsonl:4: " in refuse()
    (tmp_path / "a.jsonl").write_bytes(text)
    evaluate(model, test, out, "--steps", "1,24", "--limit", 12, "--overwrite")  # its own answers: goes on, too
    assert "holds 24 of 24 answers" in capsys.readouterr().err
    with open(tmp_path / "a.jsonl") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert "another run" in refuse()
    shutil.copyfile(test, tmp_path / "b.jsonl")  # the questions themselves
    assert "something else" in refuse("--overwrite", to=tmp_path / "b.json")
    assert (tmp_path / "b.jsonl").read_bytes() == test.read_bytes()
    shutil.copyfile(model / "config.json", tmp_path / "c.json")
    assert "something else" in refuse(to=tmp_path / "c.json")
    assert "--shots 8" in refusal(eval_gsm8k.main, "--model", model, "--data", test, "--task", "math500", "--shots", 8)
    assert "Body" in refuse("--task", "svamp") and "--model" in refusal(eval_gsm8k.main, "--data", test)


def test_bootstrap_by_hand():
    """The difference, and interval and p as of a bootstrap that draws questions one by one; no difference: p = 1."""
    a, b = np.zeros(400, bool), np.zeros(400, bool)
    a[:150], b[30:160] = True, True  # 30 right for A alone, 10 for B alone
    difference, low, high, p = eval_gsm8k.bootstrap(a, b)
    drawn = np.random.default_rng(1).integers(400, size=(10_000, 400))
    slow = (a.astype(float) - b)[drawn].mean(1)
    assert difference == pytest.approx(0.05)
    assert np.abs(np.array([low, high]) - np.quantile(slow, (0.025, 0.975))).max() < 0.0026  # one question
    spread = math.sqrt((40 / 400 - 0.05**2) / 400)
    assert abs(low - (0.05 - 1.96 * spread)) < 0.0025 and 0 < p < 0.005
    assert eval_gsm8k.bootstrap(a, a) == (0, 0, 0, 1)


def test_paired_runs(evaluated, corpus, tmp_path, capsys):
    """r by r, a feed-forward run with every r; other questions are refused in one line."""
    whole = evaluated / "whole.json"
    evaluate(evaluated / "ff", corpus / "test.jsonl", tmp_path / "ff.json")
    evaluate(evaluated / "r", corpus / "test.jsonl", tmp_path / "short.json", "--steps", "24", "--limit", 8)
    evaluate(evaluated / "r", corpus / "test.jsonl", tmp_path / "other.json", "--steps", "2")
    evaluate(evaluated / "r", corpus / "test18.jsonl", tmp_path / "long.json", "--steps", "24")
    pair = lambda a, b: call(eval_gsm8k.main, "--paired", a, b)
    capsys.readouterr()
    pair(whole, whole)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "flexible" in line]
    assert [row[:2] for row in rows] == [["1", "1"], ["24", "24"]] and all(row[-1] == "1.0000" for row in rows)
    pair(whole, tmp_path / "ff.json")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "flexible" in line]
    assert [row[:2] for row in rows] == [["1", "-"], ["24", "-"]]
    results = json.load(open(whole))["results"]
    assert [row[3] for row in rows] == [f"{100 * x['value']:.1f}" for x in results if x["metric"] == "flexible"]
    for other, word in (("short", "--limit"), ("other", "no r in common"), ("long", "different questions")):
        assert word in refusal(eval_gsm8k.main, "--paired", whole, tmp_path / f"{other}.json")
    path = tmp_path / "other.jsonl"  # --kv last --overwrite, killed before its summary
    path.write_text(path.read_text().replace('"kv": "full"', '"kv": "last"'))
    assert "another run" in refusal(eval_gsm8k.main, "--paired", whole, tmp_path / "other.json")
    os.remove(tmp_path / "short.jsonl")
    assert "short.jsonl" in refusal(eval_gsm8k.main, "--paired", whole, tmp_path / "short.json")


def test_text_chart(tmp_path, capsys, monkeypatch):
    """Without matplotlib the same is printed, over r, FLOPs and updates; what has no place there is refused."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    def result(name, folder, model, rows, **more):
        (tmp_path / name).write_text(json.dumps({"model": folder, "config": vars(model.config), "task": "t", "results": [
            {"steps": r, "metric": "acc", "value": value, "standard_error": 0.125, "n": 16} | more for r, value in rows]}))
        return tmp_path / name

    def chart(*args):
        call(bench.main, "plot", *args)
        return capsys.readouterr().out

    model, parent = small(), small(n_core=0)
    hard = {"1": [0.5, 0.1, 8], "x": [0, 0, 8]}
    a = result("a.json", "out/run/step_000010", model, [(1, 0.25), (4, 0.5)], by_difficulty=hard)
    b = result("b.json", "out/run/step_000020", model, [(1, 0.5), (4, 1.0)])
    c = result("c.json", "out/parent", parent, [(0, 0.75)])
    text = chart(a, c)
    assert "acc on t (n = 16), over recurrences" in text and f"       4 0.500 ± 0.125 {'█' * 25}\n" in text
    assert f"parent\n         - 0.750 ± 0.125 {'█' * 38}\n" in text and text.count("0.50\n") == 2
    n = {k: v.numel() for k, v in model.named_parameters() if v.dim() == 2 and not k.startswith("embed")}
    looped = sum(size for name, size in n.items() if name.startswith(("core", "adapter")))
    flops = [2 * (sum(n.values()) + (r - 1) * looped) for r in (1, 4)]
    found = [int(line.split()[0]) for line in chart(a, "--x", "flops").splitlines() if "±" in line]
    assert all(0 <= x / flops - 1 < 0.01 for x, flops in zip(found, flops, strict=True))  # and norms
    text = chart(b, a, c, "--x", "train")
    assert "run, r = 4\n        10 0.500" in text and "        20 1.000" in text and "parent\n         - 0.750" in text
    refuse = lambda *args: refusal(bench.main, "plot", *args)
    assert "holds no f1, but acc" in refuse(a, "--metric", "f1") and "1 names for 2" in refuse(a, c, "--labels", "x")
    assert "no train.json" in refuse(result("d.json", "out/x", model, [(1, 1.0)]), "--x", "train")
    (tmp_path / "e.json").write_text('{"results": [{"steps": 1}]}')
    assert "e.json: holds no results" in refuse(tmp_path / "e.json")


@needs_assets
def test_lm_eval_says_the_same(tmp_path):
    """lm-evaluation-harness 0.4.13, its own prompts, generation, extraction and scores, on 8 questions: row by row ours."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm_eval lacks what its hf models need")
    yaml = pytest.importorskip("yaml")
    from lm_eval.tasks import TaskManager

    convert(shared("assets", "stories260K"), tmp_path / "m", "--feed-forward")
    call(surgery.main, tmp_path / "m", tmp_path / "hf", "--export", "hf")
    folder, test = os.path.join(os.path.dirname(lm_eval.__file__), "tasks", "gsm8k"), shared("assets", "gsm8k", "test.jsonl")
    call(eval_gsm8k.main, "--model", tmp_path / "m", "--data", test, "--limit", 8, "--max_new_tokens", 32)
    with open(os.path.join(folder, "gsm8k-cot-zeroshot.yaml")) as a, open(os.path.join(folder, "gsm8k-cot.yaml")) as b:
        task, shots = yaml.safe_load(a), yaml.safe_load(b)["fewshot_config"]["samples"]
    for key in ("training_split", "fewshot_split", "dataset_name", "tag"):
        task.pop(key)
    task |= {"task": "paper", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": test}}, "num_fewshot": 1,
             "fewshot_config": {"sampler": "first_n", "samples": [{"question": x["question"], "answer": x["target"]}
                                                                 for x in shots]}}
    task["generation_kwargs"]["max_gen_toks"] = 32
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "paper.yaml").write_text(yaml.safe_dump(task))
    lm = huggingface.HFLM(pretrained=str(tmp_path / "hf"), dtype="float32", batch_size=16, add_bos_token=True, device="cpu")
    out = lm_eval.simple_evaluate(lm, tasks=["paper"], limit=8, log_samples=True, bootstrap_iters=0,
                                  task_manager=TaskManager(include_path=str(tmp_path / "tasks")))
    ours = {answer["index"]: answer for answer in answers_of(tmp_path / "m" / "eval_test.jsonl")[1:]}
    names = {"flexible-extract": "flexible", "strict-match": "strict"}
    for x in out["samples"]["paper"]:
        key, answer = names[x["filter"]], ours[x["doc_id"]]
        assert x["resps"][0][0] == answer["output"] and x["filtered_resps"][0] == answer[key]
        assert bool(x["exact_match"]) == answer[f"{key}_correct"]
    assert len(out["samples"]["paper"]) == 16


# ---------------------------------------------------------------- forecasts and recipes

FIGURES = sorted(name[:-5] for name in os.listdir(os.path.join(HERE, "config")) if name.startswith("fig"))


def flops_rows():
    file = json.load(open(fixture("flops.json")))
    shapes = {"tinyllama": surgery.TINYLLAMA, "llama-3.2-1b": surgery.LLAMA, "olmo-2-1b": surgery.OLMO2}
    for row in file["rows"]:
        c = shapes[row["arch"]]
        split = row["split"] or (c.n_prelude, 0, 0)
        yield row, Config(c.vocab_size, c.n_embd, c.n_head, c.n_kv_head, c.n_ffn, *split, norm=c.norm)


def lines_of(s, c, ranks=1):
    said = []
    bench.plan(s, c, ranks, said.append)
    return {line.partition(":")[0]: line for line in said}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_dry_runs(name, monkeypatch):
    """A figure's file, and every variation that its comment lists, is read and planned, without weights."""
    monkeypatch.chdir(HERE)
    path = os.path.join("config", f"{name}.toml")
    text = open(path).read()
    comment = "".join(line[1:] for line in text.splitlines() if line.startswith("#")).replace(" \\", " ")
    assert re.match(r"# (Figure|The parent of fig)", text) and f"train.py --config={path}" in comment
    nodes = re.search(r"--nnodes=(\d+)", comment)
    ranks = 4 * int(nodes[1] if nodes else 1)
    if surgeries := re.findall(r"python surgery.py \S+ (\S+)", comment):
        s = train.read_settings([f"--config={path}"])
        assert s.init_from in surgeries + ["out/fig4", ""]  # the second phase starts from the first
    variations = [re.findall(r"--\w+='?[\w./*-]+'?", line) for line in text.splitlines() if re.match(r"#\s+--\w+=", line)]
    for flags in [[], *variations]:
        s = train.read_settings([f"--config={path}", *shlex.split(" ".join(flags))])
        assert (s.out_dir == f"out/{name}") == (not flags or "--keep=50" in flags)  # no run overwrites another
        c = bench.shape(s)
        lines = lines_of(s, c, ranks)
        assert set(lines) == {"model", "budget", "learning rate", "memory a device", *["curriculum"][:c.n_core]}
        assert s.draws == (s.batch_size // ranks // 8 if "mean_recurrence" in text else 1)  # the paper draws per micro-batch
        assert f"({ranks} x {s.batch_size // ranks // 8} x 8 rows of 1024)" in lines["budget"]
        assert (s.dtype, s.context, s.weight_decay, s.clip) == ("bfloat16", 1024, 1e-4, 1.0)


@pytest.mark.parametrize("name", sorted(name for name in os.listdir(os.path.join(HERE, "config")) if "fig" not in name))
def test_the_other_files_dry_run(name, tmp_path, monkeypatch):
    """So does each other file, in a fresh clone: the shape of what is not made yet follows from its name."""
    monkeypatch.chdir(tmp_path)
    s = train.read_settings([f"--config={HERE}/config/{name}"])
    c = bench.shape(s)
    assert c.vocab_size in (17, 512) and "budget" in lines_of(s, c)


def test_figures_are_what_their_names_say(monkeypatch):
    """Shapes without weights: the paper's Tables 6 and 7; a scratch run has the shape of the surgery beside it."""
    monkeypatch.chdir(HERE)
    settings_of = lambda name, *a: train.read_settings([f"--config=config/{name}.toml", *a])
    body = lambda *a: RecurrentLM.empty(bench.shape(settings_of(*a))).num_params()
    assert body("fig4")["body"] == body("fig7_two_phase")["body"] == 704_708_608
    assert body("fig13")["body"] == 968_974_336 and body("fig4_parent")["body"] == 968_976_384
    assert body("fig6")["body"] == 851_501_056 and body("fig6_parent")["body"] == 973_146_112
    assert body("fig2") == body("fig2_random") and body("fig2")["embeddings"] == 525_336_576
    assert body("fig13", "--init_from=out/tinyllama-4-8-4-add")["adapter"] == 0
    assert body("fig12", "--init_from=out/tinyllama-8")["body"] == 8 * 44_044_288 + 2048
    with pytest.raises(InputError, match="does not tell a shape"):
        body("fig12", "--init_from=out/nothing")


@needs_assets
def test_flops_are_the_papers():
    """Every row of the paper's result files: 1e-8 relative; the one file with older edges by what it is known to differ."""
    for row, c in flops_rows():
        s = train.Settings(updates=row["max_steps"] or row["chkpt"], mean_recurrence=row["train_rec"], batch_size=1024,
                     curriculum=row["warmup_type"] or "none", curriculum_warmup=row["warmup"])
        off = abs(bench.paper_flops(s, RecurrentLM.empty(c), row["chkpt"]) / row["FLOPs"] - 1)
        assert abs(off - row.get("rel_err_with_floor_edges", 0)) < 1e-8, (row, off)


@needs_assets
def test_figures_cost_what_the_paper_says(monkeypatch):
    """The FLOPs of Figures 5, 6 and 7 at their last checkpoints follow from config/ itself."""
    monkeypatch.chdir(HERE)
    found = 0
    for row, c in flops_rows():
        name = {"tinyllama_ablate_rec_long": "fig5", "tinyllama_gsm8k_llama_long_4_rec": "fig6",
                "olmo_50k_steps": "fig6_olmo2", "tinyllama_nemotron_fineweb_2": "fig7_single"}.get(row["source"])
        if name:
            static = [] if row["split"] else [f"--init_from=out/{row['arch']}"]
            s = train.read_settings([f"--config=config/{name}.toml", f"--mean_recurrence={row['train_rec']}", *static])
            assert abs(bench.paper_flops(s, RecurrentLM.empty(bench.shape(s)), row["chkpt"]) / row["FLOPs"] - 1) < 1e-8
            found += 1
    assert found > 25


def test_curriculum_and_rates_in_words():
    """The lines of a dry run say what the schedules do."""
    c = Config(512, 64, 4, 2, 160, 1, 2, 1)
    lines = lines_of(train.Settings(updates=6250, mean_recurrence=32, curriculum_warmup=0.5, cooldown=0.0), c)
    assert "mean r 1 x 98, 2 x 98, 3 x 97, ... 31 x 98, 32 from update 3,028, at the end 33 in" in lines["curriculum"]
    assert "then constant, x 1 at the end" in lines["learning rate"]
    lines = lines_of(train.Settings(updates=1000, mean_recurrence=4, curriculum="none", backprop_warmup=0.5), c)
    assert "mean r 4 from update 0, at the end 5 in truth; k 2 to 4 over 500 updates" in lines["curriculum"]


def saved(c, B, T, k, dtype):
    """Bytes of what autograd saves in a forward pass, weights apart."""
    model = RecurrentLM(c)
    model.init_weights(0)
    model.to(dtype)
    storages, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            storages[x.untyped_storage().data_ptr()] = x  # alive, so that no address comes twice
        return x

    idx = torch.randint(0, c.vocab_size, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        _, loss = model(idx, idx, (1, k))
    assert loss.isfinite()
    return sum(x.untyped_storage().nbytes() for x in storages.values())


def test_memory_is_as_measured():
    """The estimate of the activations against autograd's saved tensors: within 3 % at four shapes, in both dtypes."""
    cases = [(Config(500, 128, 4, 2, 320, 1, 2, 1), 3, 200, 4),
             (Config(1000, 64, 2, 2, 256, 2, 1, 1, norm="post"), 2, 160, 2),
             (Config(300, 96, 3, 1, 264, 1, 1, 2, adapter="add"), 1, 320, 3),
             (Config(700, 128, 2, 2, 350, 4, 0, 0), 2, 256, 0)]
    for c, B, T, k in cases:
        for dtype, e in ((torch.float32, 4), (torch.bfloat16, 2)):
            real, guess = saved(c, B, T, k, dtype), bench.saved_bytes(c, B, T, k, e)
            assert abs(guess / real - 1) < 0.03, (c, dtype, real, guess)


# ---------------------------------------------------------------- all of it

def test_quick_run_end_to_end():
    """`bash runs/tiny.sh --quick` plays every stage: corpus, pretraining, surgery, healing, task, parents, scores, chart."""
    shutil.rmtree(os.path.join(HERE, "out", "tiny-quick"), ignore_errors=True)
    p = subprocess.run(["bash", "runs/tiny.sh", "--quick"], cwd=HERE, capture_output=True, text=True,
                       env=os.environ | {"PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]})
    assert p.returncode == 0, p.stdout[-3000:] + p.stderr[-3000:]
    for name in ("recurrent", "parent_tokens", "parent_flops"):
        with open(os.path.join(HERE, "out", "tiny-quick", f"eval_{name}.json")) as f:
            result = json.load(f)
        steps = [row["steps"] for row in result["results"] if row["metric"] == "flexible"]
        assert steps == ([1, 2, 4, 8, 16, 32] if name == "recurrent" else [0])
        assert result["n"] >= 100
    text = run("sample.py", "--steps", "32", "--tokens", "4")
    assert "tokens/s" in text


# ---------------------------------------------------------------- the study

@pytest.fixture(scope="session")
def study():
    spec = importlib.util.spec_from_file_location("study", os.path.join(HERE, "runs", "study", "study.py"))
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_study_tables_by_hand(study, tmp_path, monkeypatch, capsys):
    """Means, standard errors over seeds, where 90% was reached, differences paired by seed; the best rate; the picture."""
    for seed, late in enumerate((0, 10, 20)):
        for arm, cost in (("a_0.1", 1.0), ("b_0.2", 2.0)):
            folder = tmp_path / str(seed) / arm
            folder.mkdir(parents=True)
            lines = [{"update": u, "val": {"8": loss}, "accuracy": {"8": right}, "flops": cost * 1e12 * u, "tokens": u}
                     for u, loss, right in ((0, 3.0, 0.1), (100 + late, cost, 0.8), (200 + late, 1.5, 1.0))]
            lines.insert(1, {"update": 1, "loss": 1.0, "skipped": seed == 1, "norm": 2.0, "flops": 1, "tokens": 1})
            (folder / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    call(study.main, "curves", "x", "--runs", tmp_path, "--out", tmp_path / "x.json", "a_0.1=one", "b_0.2=two")
    result = json.loads((tmp_path / "x.json").read_text())
    a, b = (dict(zip(result["columns"], row)) for row in result["rows"])
    assert (a["seeds"], a["updates to 90%"], a["TFLOPs to 90%"]) == (3, "160 ± 6", "160.00 ± 5.77")
    assert (b["TFLOPs, minus the first arm's"], b["validation loss"]) == ("160.00 ± 5.77", "1.5000 ± 0.0000")
    assert (a["non-finite updates"], a["largest gradient norm"]) == (1, "2.0 ± 0.0")
    assert (a["validations 10% above the best"], b["validations 10% above the best"]) == ("1.0 ± 0.0", "0.0 ± 0.0")
    assert result["figures"][0]["curves"]["one"][1] == [110.0, 1.0, 0.0]
    capsys.readouterr()
    call(study.main, "best", "a", "--runs", tmp_path)
    assert capsys.readouterr().out == "0.1\n"
    assert "nothing" in refusal(study.main, "curves", "x", "--runs", tmp_path, "--out", tmp_path / "y.json", "nothing")
    call(bench.main, "plot", tmp_path / "x.json", "--out", tmp_path / "x.png")
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert f"the numbers are in {tmp_path / 'x.json'}" in capsys.readouterr().out


def test_study_of_states(study, corpus, tmp_path):
    """trace() has the answers of a forward pass at each r; the rank correlation has ties right, within its interval."""
    small(vocab_size=17).save(tmp_path / "m")
    states, said, right = study.trace(str(tmp_path / "m"), f"{corpus}/task", 70, [1, 3], noise=2)
    model = RecurrentLM.load(tmp_path / "m")
    idx, targets, _ = Shards(f"{corpus}/task", "val", 26).batch(0, 0, 0, 1, 70)
    with torch.no_grad():
        logits = model(idx, steps=3, state=model.initial_state(70, 26, [2 * 1_000_003 + i for i in range(70)]))[0]
    assert torch.equal(said[1].flatten(), logits[targets != -100].argmax(-1)) and states.shape == (2, 70, 13, 32)
    assert torch.equal(right[1].flatten(), said[1].flatten() == targets[targets != -100])
    r, low, high = study.interval([1, 2, 3, 4] * 50, [1, 2, 2, 5] * 50)
    assert abs(r - 0.9486833) < 1e-6 and 0.9 < low < r < high < 1


def test_every_result_of_the_study_has_its_command():
    """Each JSON of runs/study/results has its script, its picture and its place on the page; no picture is without one."""
    with open(os.path.join(HERE, "runs", "study", "README.md")) as f:
        page = f.read()
    names = {name.removesuffix(".json") for name in os.listdir(os.path.join(HERE, "runs", "study", "results"))}
    pictures = {name for name in os.listdir(os.path.join(HERE, "assets")) if name.startswith("study_")}
    assert pictures == {f"study_{name}.png" for name in names} and len(names) >= 11
    for name in names:
        with open(os.path.join(HERE, "runs", "study", "results", f"{name}.json")) as f:
            result = json.load(f)
        name = name.removesuffix("_scale")
        assert result["study"] == name and result["commit"] and result["figures"] and result["rows"]
        assert os.path.exists(os.path.join(HERE, "runs", "study", f"{name}.sh"))
        assert f"bash runs/study/{name}.sh" in page and f"study_{name}.png" in page


# ---------------------------------------------------------------- losses and tasks over recurrences

def test_eval_only(corpus, tmp_path, monkeypatch):
    """--eval_only gives the losses of training's own validation, and float64's, on 1 and 2 ranks; nothing else changes."""
    base = ["--context=26", "--micro_batch=8", "--compile=false", "--eval_rows=30", f"--data={corpus}/task"]
    call(train.main, *RUN, *base, "--updates=2", f"--out_dir={tmp_path}/run", "--eval_steps=1,4")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    base += ["--eval_only", f"--init_from={tmp_path}/run", "--eval_steps=1,4"]
    call(train.main, *base)
    result = json.loads((tmp_path / "run" / "eval_loss_task.json").read_text())
    with open(tmp_path / "run" / "log.jsonl") as f:
        last = json.loads([*f][-1])
    for key, name in (("value", "val"), ("accuracy", "accuracy")):
        assert {str(x["steps"]): x[key] for x in result["results"]} == last[name]
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {tmp_path / "run" / "eval_loss_task.json"} and before.items() <= after.items()

    model, rows = RecurrentLM.load(tmp_path / "run").double(), Shards(str(corpus / "task"), "val", 26)
    idx, targets, number = rows.batch(0, 0, 0, 1, 30)
    with torch.no_grad():
        logits = model.trajectory(idx, [4], state=model.initial_state(30, 26, number.tolist()))[4].double()
    loss = torch.nn.functional.cross_entropy(logits[targets != -100], targets[targets != -100], reduction="none")
    x = result["results"][1]
    assert (x["steps"], x["n"], x["metric"]) == (4, len(loss), "loss") and abs(x["perplexity"] - math.exp(x["value"])) < 1e-9
    assert x["accuracy"] == (logits.argmax(-1) == targets)[targets != -100].double().mean().item()
    assert abs(x["value"] - loss.mean()) < 1e-5 and abs(x["standard_error"] - loss.std() / len(loss) ** 0.5) < 1e-5

    run("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *base, f"--out_dir={tmp_path}/two")
    two = json.loads((tmp_path / "two" / "eval_loss_task.json").read_text())["results"]
    assert all(abs(a[key] - b[key]) < 1e-6 for a, b in zip(two, result["results"], strict=True) for key in ("value", "n"))

    held = os.open(tmp_path / "run", os.O_RDONLY)  # as by a run at work
    train.fcntl.flock(held, train.fcntl.LOCK_EX)
    for folder in ("run", "run/step_000002"):
        assert "--out_dir" in refusal(train.main, *base, f"--init_from={tmp_path}/{folder}")
    train.fcntl.flock(held, train.fcntl.LOCK_SH)  # as by another evaluation
    call(train.main, *base)
    os.close(held)
    small(vocab_size=17).save(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.model").write_bytes(b"other")
    assert "tokenizer" in refusal(train.main, *base, f"--init_from={tmp_path}/other")
    assert "--init_from" in refusal(train.main, *base[:-2])
    assert "eval_steps" in refusal(train.main, *base, "--eval_steps=-1,4")


def harness():
    """eval_lm, where lm-evaluation-harness is installed."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: nothing to compare eval_lm.py with")
    import eval_lm
    return eval_lm


def test_eval_lm_without_the_harness(monkeypatch):
    """Where it is not installed eval_lm.py ends in one line that says how to get it."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "eval_lm", raising=False)
    with pytest.raises(SystemExit, match="pip install lm_eval"):
        importlib.import_module("eval_lm")


def test_choices_in_one_row(corpus, tmp_path):
    """Choices that share a context in one row have the log-likelihoods that each has alone, at every r, from one pass."""
    eval_lm, rng = harness(), np.random.default_rng(0)
    small(vocab_size=17, context=40).save(tmp_path / "m", tokenizer=str(corpus / "tokenizer"))
    model = RecurrentLM.load(tmp_path / "m").double()
    ids = lambda n: rng.integers(0, 17, n).tolist()
    requests = []
    for _ in range(12):
        context = ids(rng.integers(1, 30))
        requests += [(None, context, ids(n)) for n in rng.integers(1, 9, rng.integers(1, 5))]
    requests += [(None, ids(60), ids(3)), (None, ids(5), ids(40))]  # too long: cut from the left
    for state in ("noise", "zero"):
        lm = eval_lm.Harness(tmp_path / "m", [0, 1, 3, 6], batch_size=3, state=state, seed=5)
        s0 = model.initial_state(40, 1, [5 * 1_000_003 + i for i in range(40)])[:, 0] * (state == "noise")
        for lm.r in lm.steps:
            for (_, context, x), (likelihood, greedy) in zip(requests, lm._loglikelihood_tokens(requests), strict=True):
                row = torch.tensor([(context + x)[-41:]])
                with torch.no_grad():
                    logits = model(row[:, :-1], steps=lm.r, state=s0[None, :row.shape[1] - 1])[0][0, -len(x):].double()
                assert abs(logits.log_softmax(-1)[range(len(x)), x].sum() - likelihood) < 1e-4
                assert greedy == (logits.argmax(-1).tolist() == x)
            if lm.r == 0:
                tokens = lm.tokens
        assert lm.tokens == tokens < sum(len(c[-40:]) + len(x) for _, c, x in requests)
        alone = eval_lm.Harness(tmp_path / "m", 3, batch_size=3, state=state, seed=5)
        lm.r = 3
        assert alone._loglikelihood_tokens(requests) == lm._loglikelihood_tokens(requests)


TASKS = {"choice": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: gold
doc_to_choice: choices
num_fewshot: 1
fewshot_split: test
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},
              {metric: acc_norm, aggregation: mean, higher_is_better: true}]
""", "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}} {{choices | join(' ')}}{{query * (9 if gold == 0 else 1)}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""", "answer": """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""}


@needs_assets
def test_harness_scores_are_its_own_models(tmp_path, monkeypatch, capsys):
    """On an untouched parent every answer is that of the harness's HFLM with transformers: likelihoods within 1e-4, texts,
    and the scores to the last digit; eval_lm.py prints and writes them."""
    eval_lm = harness()
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package, reason=f"HFLM needs {package}")
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast
    # The harness's own tasks stay out: to index them takes seconds.
    monkeypatch.setattr(eval_lm, "TaskManager", functools.partial(eval_lm.TaskManager, include_defaults=False))
    with open(shared("assets", "choice", "arc_easy.jsonl"), encoding="utf-8") as f:
        (tmp_path / "q.jsonl").write_text("".join(f.readlines()[:12]), encoding="utf-8")
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(
            f"task: nanoloop_{name}{text}test_split: test\ndataset_path: json\n"
            f"dataset_kwargs: {{data_files: {{test: {tmp_path}/q.jsonl}}, cache_dir: {tmp_path}/cache}}\n")
    call(surgery.main, shared("assets", "stories260K"), tmp_path / "m", "--feed-forward")
    names = [f"nanoloop_{name}" for name in TASKS]
    call(eval_lm.main, "--model", tmp_path / "m", "--tasks", ",".join(names), "--include_path", tmp_path, "--limit", "12")
    printed = capsys.readouterr().out
    file, = (tmp_path / "m").glob("eval_*.json")
    result = json.loads(file.read_text())["results"]
    assert all(f"{x['value']:#.4g}" in printed for x in result) and {x["n"] for x in result} == {12}

    for flags, words in ((("--tasks", "nope"), "nope"), (("--steps", "1,-2"), "--steps"), (("--limit", "0"), "--limit"),
                         (("--out", tmp_path / "no" / "x"), "--out"), (("--model", tmp_path / "no"), "no such folder")):
        assert words in refusal(eval_lm.main, "--model", tmp_path / "m", "--tasks", names[0], *flags)

    theirs, tokenizers = oracle("stories260K"), pytest.importorskip("tokenizers")
    theirs.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    theirs.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])
    theirs = HFLM(shared("assets", "stories260K"), device="cpu", dtype="float32", batch_size=8, max_length=512, tokenizer=(
        PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token="<s>", eos_token="</s>", unk_token="<unk>")))
    ours = eval_lm.Harness(tmp_path / "m", [7])
    tasks, answers = eval_lm.load_tasks(names, str(tmp_path)), {}
    for lm in (ours, theirs):
        lm.steps = [0]
        answers[lm] = eval_lm.evaluate(lm, tasks, 12), [
            (x.args, x.resps[0]) for task in tasks["tasks"].values() for x in task.instances]
        pairs = [("", " Once"), ("Once upon a time ", "there was"), ("</s>", " Once"), ("Once " * 400, "upon a"), ("a", "b")]
        answers[lm] += [(x, y) for x, y in zip(pairs, lm.loglikelihood([SimpleNamespace(args=x) for x in pairs]))],
    assert answers[ours][0] == result
    for a, b in zip(*(x[0] for x in answers.values()), strict=True):
        assert a == b or a["metric"] == "byte_perplexity" and abs(a["value"] / b["value"] - 1) < 1e-6
    kinds = set()
    for (asked, a), (same, b) in zip(*(x[1] + x[2] for x in answers.values()), strict=True):
        a, b = ((x, None) if isinstance(x, float) else x for x in (a, b))
        kinds.add(type(a))
        close = lambda x, y: abs(x - y) < max(1e-4, 3e-7 * abs(y))  # float32's rounding, where a text sums up to -3000
        assert asked == same and (a == b if isinstance(a, str) else close(a[0], b[0]) and a[1] == b[1]), (asked, a, b)
    assert kinds == {tuple, str}
