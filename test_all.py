"""
The tests of the method, one promise per test: `python -m pytest -q`, on a CPU, offline, which also
runs tests/test_tools.py.

Read in order, the docstrings are the list of promises. Wherever possible, a test compares with an
independent reference: logits, gradients, schedules, FLOPs and scores of the paper's own code
(tests/oracle), torch's optimizers, a run that was never interrupted, or another library if it is
installed. LOOPGRAFT_ASSETS may name a folder whose assets/tokenizers/ holds tokenizers that are too
large or not free to add: those of Llama 3, OLMo 2 and TinyLlama. A test that lacks something is
skipped, and `-rs` prints the command that installs it.
"""
import functools
import inspect
import io
import itertools
import json
import math
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.append(str(Path(__file__).parent / "tests"))
# First, because this hides any GPU:
from helpers import (ASKED, FEED_FORWARD, GPU, HARD, MATRICES, ORACLE, QKV, RECURRENT, ROOT,
                     TOKENIZERS, answers_of, beside_the_tests, checkpoints, contents, convert,
                     decode, decode_model, documents, documents_in, error_line, exit_codes,
                     expected, first_rows, generate_rows, identical, kill, launch, max_difference,
                     mean_loss, need, needs_compiler, noise, outcome, parameters,
                     random_prompts, read_log, relative_error, run_dying, run_on_ranks, run_script,
                     same_end, save, slow_attention, small, step_with, train_until,
                     wait_until, weights, write_bpe)

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.flop_counter import FlopCounterMode

import bench
import common
import data
import eval_gsm8k
import muon
import sample
import surgery
import train
from common import UserError, read_json
from data import Dataset, Tokenizer
from eval_gsm8k import METRICS, STOPS, make_prompt, same_answer
from model import ADAPTERS, IGNORE, RecurrentLM, find_checkpoint, load_config
from muon import Optimizer
from runs.tiny_corpus import tiny
from sample import NO_TOKEN, Decoder, choose, cut_at_stops
from surgery import retrofit_config
from tools import plan
from train import Settings

pytest_plugins = "shared_fixtures"


# ---------------------------------------------------------------------------------------- the model
@pytest.mark.parametrize("name", FEED_FORWARD)
def test_feed_forward_is_transformers(name):
    """A converted model of each kind (tied, sharded, scaled RoPE) gives transformers' logits."""
    model = convert(ORACLE / name, "m", "--feed_forward")
    x = expected(name)
    every = 16 if name == "hf_llama3" else 1
    ids = x["input_ids"]
    logits, _ = model(ids)
    assert max_difference(logits[:, ::every], x["logits"]) < 1e-5
    _, losses = model(ids[:, :-1], ids[:, 1:])
    assert abs(losses.mean() - x["loss"]) < 1e-6


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrence_is_the_papers_code(name):
    """Logits at each r, gradients of the last k and greedy tokens are those of the paper's code."""
    model = convert(ORACLE / name, "m")
    x = expected(name)
    ids, s0 = x["input_ids"], x["s0"]
    for r, x_r in model.trajectory(ids, [1, 2, 8], s0):
        logits = model.logits(x_r)
        # Float32 alone: 1.96e-5 apart on a CPU without AVX-512, below 1e-5 on one that has it.
        assert max_difference(logits, x[f"logits.{r}"]) < 3e-5
        for steps in (r, (r, 0), (0, r)):  # the value does not depend on the split
            assert model(ids, steps=steps, state=s0)[0].equal(logits)

    model.config.backprop_depth = 2
    names = surgery.tensor_names(model.config, "huginn_raven")
    ours = {theirs: name for name, (theirs,) in names.items()}
    for steps in ((3, 2), 5):
        model.zero_grad()
        _, losses = model(x["grad_input_ids"], x["labels"], steps, s0)
        mean_loss(losses, x["labels"]).backward()
        for key, wanted in x.items():
            if key.startswith("grad."):
                grad = model.get_parameter(ours[key.removeprefix("grad.")]).grad
                assert relative_error(grad, wanted) < 1e-5, key

    model.config.state_std = 0
    prompt, n = x["greedy_prompt"], x["greedy"].shape[1]
    tokens = decode(model, prompt.tolist(), n - prompt.shape[1], steps=4)
    assert torch.cat((prompt, tokens), 1).equal(x["greedy"])


def test_roundings_of_a_bfloat16_model():
    """A bfloat16 model rounds as Llama does; its states, logits and losses are float32."""
    model = small(n_embd=256, n_kv_head=4).bfloat16()
    weight = torch.nn.init.normal_(model.norm_f.weight)
    x = torch.randn(64, 256)
    mean_square = x.double().square().mean(-1, keepdim=True)
    normed = x.double() / (mean_square + 1e-5).sqrt()
    assert (model.norm_f(x) == normed.bfloat16() * weight).float().mean() > 0.999

    exact = x.bfloat16().double() @ model.head.weight.double().T
    logits = model.logits(x)
    assert logits.dtype == torch.float32
    assert max_difference(logits, exact) <= 2**-8 * exact.abs().max()

    idx = torch.randint(17, (2, 5))
    s0 = model.initial_state(2, 5, 0)
    rope = model.rope(5)
    e, s = model.run_prelude(idx, s0, rope)
    assert s.equal(s0), "s_0 should not be rounded"
    assert model.recur(s, e, rope, 3).dtype == torch.float32

    torch.manual_seed(0)
    idx = torch.randint(17, (4, 17))
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        # Large embeddings, beside which rounding the residual stream would lose much.
        model = small(n_embd=64, n_core=4, mean_recurrence=32, embed_scale=10.0).to(dtype)
        _, losses = model(idx[:, :-1], idx[:, 1:], (24, 8), model.initial_state(4, 16, 0))
        assert losses.dtype == torch.float32
        losses.mean().backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    exact, found = grads
    assert relative_error(found, exact) < 0.0077, "0.0082 with a residual stream in bfloat16"


def test_random_numbers_are_the_papers():
    """s_0, which depends on seed and position alone, and weights have the paper's distributions."""
    model = small(n_embd=64, state_std=1.0)
    s = model.initial_state(128, 128, 5)
    assert s.abs().max() < 3.00001
    moments = 0, 0.97334, 0, 2.68004  # of the truncated normal
    for power, moment in enumerate(moments, 1):
        assert abs((s**power).mean() - moment) < 0.006 * power
    for other in (model.initial_state(128, 128, 6), *(s.roll(1, dim) for dim in range(3))):
        assert abs((s * other).mean()) < 0.004  # 4 standard errors
    assert model.initial_state(2, 9, 5, row=6).equal(s[6:8, :9])
    assert not model.initial_state(2, 9).equal(model.initial_state(2, 9)), "no seed: a random one"

    wanted = 0.0085789  # of 524,288 numbers that the paper's code drew
    for norm, factor in (("sandwich", 6), ("pre", 1)):
        s = small(norm=norm, embed_scale=6.0, n_kv_head=4).initial_state(128, 128, 0)
        assert s.std() == pytest.approx(wanted * factor, rel=0.005)

    model = small(n_embd=64, n_ffn=512, n_prelude=2, n_core=2, n_coda=1, mean_recurrence=5)
    std = math.sqrt(2 / (5 * 64))
    written = std / math.sqrt(2 * (2 + 5 * 2 + 1))
    block = model.core[0]
    for matrix, wanted in ((block.attn.qkv, std), (block.mlp.fc, std), (model.adapter, std),
                           (block.attn.proj, written), (block.mlp.proj, written)):
        assert matrix.weight.std().item() == pytest.approx(wanted, rel=0.05)


def test_losses_in_chunks(monkeypatch):
    """Losses and gradients are those of a single cross-entropy, and few targets cost few logits."""
    torch.manual_seed(0)
    model, plain = small(n_core=1), small(n_core=1)
    chunks = model.chunk_losses = mock.Mock(wraps=model.chunk_losses)
    state = model.initial_state(4, 11, 0)
    cases = (  # the most rows in a chunk, the targets among 44, and the chunks: quarters, or all
        (5, 36, [5] * 8), (5, 0, [5]), (5, 44, [5] * 8 + [4]), (99, 12, [11] * 2), (99, 44, [44]),
    )
    for most, asked, sizes in cases:
        monkeypatch.setattr("model.LOGITS_AT_ONCE", 17 * most)
        idx, targets = torch.randint(17, (2, 4, 11))
        targets.view(-1)[torch.randperm(44)[asked:]] = -100
        logits, _ = plain(idx, steps=1, state=state)
        exact = F.cross_entropy(logits.mT, targets, reduction="none")
        wanted = torch.autograd.grad(mean_loss(exact, targets), list(plain.parameters()))
        chunks.reset_mock()
        _, losses = model(idx, targets, 1, state)
        assert [len(call.args[0]) for call in chunks.call_args_list] == sizes
        assert max_difference(losses, exact) < 1e-5
        found = torch.autograd.grad(mean_loss(losses, targets), list(model.parameters()))
        for ours, theirs in zip(found, wanted, strict=True):
            assert max_difference(ours, theirs) < 1e-6


# ------------------------------------------------------------------------------------------ surgery
@pytest.mark.parametrize("kind", surgery.DEFAULTS)
def test_defaults_are_those_of_transformers(kind):
    """If config.json lacks a key, we assume the default of transformers' class for that model."""
    tf = need("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 32, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 50, "model_type": kind}
    if kind == "mistral":  # the default window is not supported
        sizes["sliding_window"] = None
    common.write_json("config.json", sizes)
    theirs = tf.AutoConfig.from_pretrained(".")
    _, config = surgery.read_config(".", [])
    assert config == surgery.from_hf(Path("config.json"), theirs.to_dict())


@pytest.mark.parametrize("wrong", [
    {"model_type": "gemma"}, {"model_type": None},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e4}},
    {"is_causal": False}, {"hidden_act": "gelu"},
    {"attention_bias": True}, {"mlp_bias": True},
    {"quantization_config": {"bits": 4}},
    {"model_type": "mistral", "sliding_window": 8},
    {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
    {"model_type": "huginn_raven", "injection_type": "gate"},
    {"num_attention_heads": 0}, {"rms_norm_eps": "1e-5"}, {"eos_token_id": ["</s>"]},
])
def test_what_we_cannot_compute_is_refused(wrong):
    """A config.json that asks for what we do not support, or has a senseless value, is refused."""
    common.write_json("config.json", read_json(ORACLE / "hf_llama/config.json") | wrong)
    key, *_ = wrong
    with pytest.raises(UserError, match=f"is not supported|config.json: {key} = .* must be"):
        surgery.read_config(".", [])


def test_surgery_keeps_the_layers_in_a_row():
    """With the identity adapter, any r gives transformers' logits of the kept layers in a row."""
    for name, flags, kept in (
        ("hf_llama", "--shape 2,3,2", "0134567"),
        ("hf_llama", "--shape 2,3,2 --feed_forward", "0134567"),
        ("hf_llama", "--prelude 0-1 --core 3-5 --coda 6,7", "0134567"),
        ("hf_qwen3", "--prelude 0 --core 2,3 --coda 5", "0235"),
    ):
        model = convert(ORACLE / name, flags, *flags.split(), "--verify")
        x = expected(name)
        for r in (1, 8):
            logits, _ = model(x["input_ids"], steps=r)
            assert max_difference(logits, x[f"logits.layers_{kept}"]) < 1e-5, flags


def test_weights_are_never_rounded():
    """Weights have the dtype asked for, or the smallest that is exact."""
    shutil.copytree(ORACLE / "hf_llama", "hf")
    run_script("surgery hf coarse --shape 1,2,1")
    fine = torch.randn(32)
    save_file(weights("hf", "model") | {"model.norm.weight": fine}, "hf/model.safetensors")
    run_script("surgery hf fine --shape 1,2,1")
    assert weights("fine")["norm_f.weight"].equal(fine)
    small().half().save("half")
    for folder, stored, asked, wanted in (
        ("coarse", torch.bfloat16, None, torch.bfloat16),
        ("coarse", torch.bfloat16, torch.float32, torch.float32),
        ("fine", torch.float32, None, torch.float32),
        ("half", torch.float16, None, torch.float32),  # activations may exceed float16's range
    ):
        assert {t.dtype for t in weights(folder).values()} == {stored}
        assert {p.dtype for p in RecurrentLM.load(folder, dtype=asked).parameters()} == {wanted}


def test_weights_are_those_that_the_folder_declares():
    """Files that no index names are not read, whatever their names; others may have any name."""
    shutil.copytree(ORACLE / "hf_llama3", "hf")
    found = weights("hf", "model-")
    wanted = surgery.open_source("hf").state_dict()
    index = Path("hf/model.safetensors.index.json")
    files = {name: f"part-{file}" for name, file in read_json(index)["weight_map"].items()}
    common.write_json(index, {"weight_map": files})
    others = {f"{name}.safetensors" for name in ("model-00001-of-00001", "model.fp16", "amodel")}
    for file in others | {*files.values()}:  # tensors that belong elsewhere are halved in it
        tensors = {name: t if files[name] == file else t / 2 for name, t in found.items()}
        save_file(tensors, f"hf/{file}")
    assert identical(surgery.open_source("hf").state_dict(), wanted)

    save_file(found, "hf/model.safetensors")
    assert f"model.safetensors, and {index.name}" in error_line("surgery hf out")
    index.unlink()
    assert identical(surgery.open_source("hf").state_dict(), wanted)


def test_a_tied_head_has_either_name():
    """A tied head may be stored beside the embeddings or instead of them, but must equal them."""
    model = small(n_core=0, n_coda=0, tie_embeddings=True)
    model.save("m")
    run_script("tools/export m hf")
    tensors = weights("hf")
    others = tensors.copy()
    embed = others.pop("model.embed_tokens.weight")
    for names in others, tensors:
        save_file(names | {"lm_head.weight": embed.clone()}, "hf/model.safetensors")
        assert identical(surgery.open_source("hf").state_dict(), model.state_dict())
    save_file(tensors | {"lm_head.weight": 2 * embed}, "hf/model.safetensors")
    assert "lm_head.weight differs" in error_line("surgery hf out --feed_forward")


def test_weights_that_are_not_those_of_the_config(llama):
    """Quantized, infinite, unknown and misshapen tensors are refused, as are an adapter's."""
    name = "model.layers.0.self_attn.q_proj.weight"
    good = weights(llama)
    q = good[name]
    wrapped = name.replace("weight", "base_layer.weight")
    shutil.copytree(llama, "hf")
    for changed, words in (
        ({name: q.to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}, "quantized"),
        ({name: q[:-8], name.replace("q_", "k_"): q[:24]}, f"{name}' has the shape (24, 32)"),
        ({name: q + math.nan}, f"{name}' contains NaN or infinity"),
        ({name: None, wrapped: q, f"{wrapped}.lora_A": q[:4]},
         f"missing ['{name}'], unknown ['{wrapped}', '{wrapped}.lora_A']"),
    ):
        tensors = {name: t.clone() for name, t in (good | changed).items() if t is not None}
        save_file(tensors, "hf/model.safetensors")
        assert words in error_line("surgery hf out --feed_forward")

    save_file(good | {"rotary_emb.inv_freq": torch.ones(4)}, "hf/model.safetensors")
    assert "inv_freq" in run_script("surgery hf out --feed_forward")
    Path("hf/adapter_model.safetensors").touch()
    assert "hf/adapter_model.safetensors: an adapter" in error_line("surgery hf new --feed_forward")
    os.remove("hf/model.safetensors")
    os.remove("hf/adapter_model.safetensors")
    assert "has no model.safetensors" in error_line("surgery hf new --feed_forward")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_verify_sees_a_wrong_weight(adapter, llama, monkeypatch):
    """--verify compares OUT with the kept layers, and leaves no OUT if a weight is wrong."""
    flags = f"--shape 1,2,1 --adapter {adapter} --verify"
    assert "logits of 64 tokens are equal" in run_script(f"surgery {llama} m {flags}")
    save_whole = RecurrentLM.save

    def save_wrong(model, folder):
        save_whole(model, folder)
        tensors = weights(folder)
        tensors["coda.0.attn.proj.weight"][3, 4] += 1e-3
        save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(RecurrentLM, "save", save_wrong)
    before = contents(".")
    assert "differ from those of SRC" in error_line(f"surgery {llama} wrong {flags}")
    assert "differ from those of SRC" in error_line("surgery m again --verify")
    assert contents(".") == before


def test_an_unfinished_out_is_begun_again(llama):
    """What a kill left of OUT is made again; others' files and another process's are kept."""
    commands = [f"surgery {llama} a --shape 1,2,1", "tools/export a b --verify"]
    for command in commands:
        run_script(command)
    wanted = contents(".")
    for out, command in zip("ab", commands):
        os.remove(f"{out}/config.json")
        Path(out, ".unfinished").touch()
        os.mkdir(f"{out}/model.safetensors.loopgraft-unfinished-12345678")
        Path(out, "chat_template.jinja").write_text("of another SRC")
        with common.lock(Path(out, ".unfinished")):
            assert "another process is writing" in error_line(command)
        run_script(command)
        assert "exists already" in error_line(command)
    assert contents(".") == wanted
    for kept in ("notes.txt", "tokenizer.json"):
        common.write_json(f"{kept} alone/{kept}", {})
        assert "exists already" in error_line(commands[0].replace(" a ", f" '{kept} alone' "))


def test_flags_of_surgery(llama):
    """Flags change OUT as they say; --untie gives a tied head its own copy, also in an export."""
    eye = torch.eye(32)
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False)
    for how, wanted in (
        ("identity", torch.cat((0 * eye, eye), 1)),  # of the state, and of the prelude's output
        ("torch", linear.weight),
    ):
        model = convert(llama, how, "--shape", "1,2,1", "--adapter_init", how)
        assert model.adapter.weight.equal(wanted)
        assert model.config.mean_recurrence == 32

    add = convert(llama, "add", "--shape", "1,2,1", "--adapter", "add", "--mean_recurrence", 7)
    assert add.config == replace(model.config, adapter="add", mean_recurrence=7)
    assert not [name for name in add.state_dict() if "adapter" in name]
    assert convert("add", "again", "--mean_recurrence", 3).config.mean_recurrence == 3

    tied = small(n_core=0, n_coda=0, tie_embeddings=True)
    tied.save("tied")
    run_script("surgery tied untied --feed_forward --untie")
    run_script("tools/export untied hf")
    for folder, heads in ("tied", 0), ("untied", 1), ("hf", 1):
        assert len([name for name in weights(folder) if "head" in name]) == heads
    assert identical(convert("hf", "m", "--feed_forward").state_dict(), tied.state_dict())


def test_huginn_is_its_formulas():
    """A Huginn-style model, exported and read back, gives the logits of Huginn's formulas."""
    model = small(norm="sandwich", n_kv_head=4, tie_embeddings=True, embed_scale=32**0.5,
                  norm_eps=1e-6, rope_theta=50000.0)
    torch.manual_seed(0)
    for p in model.parameters():  # norms of 1 would hide a misplaced one
        torch.nn.init.normal_(p, float(p.dim() == 1), 0.2)

    model.save("ours")
    run_script("tools/export ours hf")
    again = convert("hf", "m")
    assert identical(again.state_dict(), model.state_dict())

    ids = torch.randint(17, (2, 9))
    s = again.initial_state(2, 9, 0)
    huginn = runpy.run_path(ORACLE / "huginn.py")["huginn"]
    for r in (1, 3):
        wanted = huginn(weights("hf"), read_json("hf/config.json"), ids, s.double(), r)
        assert max_difference(again(ids, steps=r, state=s)[0], wanted) < 1e-4


# --------------------------------------------------------------------------------------- tokenizers
def test_llama_3s_ids(monkeypatch):
    """Llama 3's tokenizer.json gives tiktoken's ids, without the tokenizers library."""
    slow = need("transformers.convert_slow_tokenizer")
    path = next(TOKENIZERS.glob("llama3/**/tokenizer.model"), None)
    if not path:  # it is gated: meta-llama/Llama-3.2-1B original/tokenizer.model
        pytest.skip(f"hf download meta-llama/Llama-3.2-1B --local-dir {TOKENIZERS}/llama3")

    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    converter = slow.TikTokenConverter(str(path), extra_special_tokens=names)
    converter.converted().save("tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    ours = Tokenizer.load(".")
    theirs = tiktoken.Encoding(name="llama 3", pat_str=converter.pattern,
                               mergeable_ranks=tiktoken.load.load_tiktoken_bpe(str(path)),
                               special_tokens={})
    for text in (*HARD, *(ROOT / "README.md").read_text().splitlines()):
        ids = ours.encode(text)
        assert ids == theirs.encode_ordinary(text), text[:200]
        assert ours.decode(ids) == text
    assert ours.encode("Hello world") == [9906, 1917]  # as published
    assert ours.eos_id == 128001


ALONE = ["qwen", "olmo2", "tiny", "llama2"]  # read without the tokenizers library
OTHERS = ["smollm2", "gpt2", "few_bytes", "strips", "llama2_one_more"]


def write_llama2(kind, speaker):
    """Write Llama 2's two files as transformers 4 does; their tokens may differ, by `kind`."""
    need("google.protobuf")
    os.mkdir(kind)
    shutil.copy(speaker / "tokenizer.model", kind)
    need("transformers").LlamaTokenizer.from_pretrained(kind).save_pretrained("as_of_5")
    spec = read_json("as_of_5/tokenizer.json")
    spec["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    spec["pre_tokenizer"] = None
    vocab = spec["model"]["vocab"]
    if kind == "llama2_one_more":
        e = {"id": vocab["e"], "content": "e", "special": False}
        spec["added_tokens"].append(spec["added_tokens"][0] | e)
    common.write_json(f"{kind}/tokenizer.json", spec)


@pytest.mark.parametrize("kind", [*ALONE, *OTHERS])
def test_ids_of_transformers(kind, corpus, speaker, monkeypatch):
    """A tokenizer.json gives transformers' ids and text, with control tokens read as text."""
    tf = need("transformers")
    known = {"olmo2": TOKENIZERS / "olmo2", "tiny": corpus / "task"}
    folder = known.get(kind, Path(kind))
    if kind.startswith("llama2"):
        write_llama2(kind, speaker)
    elif kind not in known:
        write_bpe(kind)
    if not (folder / "tokenizer.json").exists():
        pytest.skip(f"hf download allenai/OLMo-2-0425-1B tokenizer.json --local-dir {folder}")

    theirs = tf.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    readme = (ROOT / "README.md").read_text()
    texts = [*HARD, *readme.splitlines(), "<think>\u0338 <think> a</think> <think>. 1>."]
    texts += "10  20 a  3\n4 ²½ 1²  ½ pretraining depth-first", "has 7,so 4", "HAS 7"
    texts.append("has\x1c7\u2028so")
    if kind == "qwen":
        texts += [(readme * 99)[:410_000], " " * 10**6]  # more than it gets at a time
    if kind in ALONE:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    ours = Tokenizer.load(folder)
    for text in texts:
        ids = ours.encode(text)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        assert ids == theirs.encode(text, **options), text[:200]
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_texts_begin_as_in_transformers():
    """A text begins with the same control token, if any, as in transformers."""
    tf, tokenizers = need("transformers"), need("tokenizers")
    write_bpe("bpe")
    spec = read_json("bpe/tokenizer.json")

    def template(single):
        coder = tokenizers.Tokenizer.from_file("bpe/tokenizer.json")
        names = [("<s>", 0), ("</s>", 1)]
        coder.post_processor = tokenizers.processors.TemplateProcessing(single, None, names)
        return json.loads(coder.to_str())["post_processor"]

    bos, eos, at_the_end = map(template, ("<s> $A", "</s> $A", "$A </s>"))
    no_tokens = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)
    both = {"type": "Sequence", "processors": [no_tokens, bos]}
    first_tokens = set()
    for processor, adds, name in itertools.product(
        (None, bos, eos, both, at_the_end),
        ({}, {"add_bos_token": True}, {"add_bos_token": False}),
        ({}, {"bos_token": "</s>"}),
    ):
        config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"} | adds | name
        common.write_json("tokenizer_config.json", config)
        common.write_json("tokenizer.json", spec | {"post_processor": processor})
        ours, *_ = Tokenizer.load(".").encode("a d", bos=True)
        theirs, *_ = tf.AutoTokenizer.from_pretrained(".")("a d").input_ids
        assert ours == theirs, config
        first_tokens.add(ours)
    assert len(first_tokens) == 3, "<s>, </s> or no control token"


def test_texts_of_a_sentencepiece_model_begin_as_in_transformers(speaker):
    """tokenizer.model alone is read as in LlamaTokenizer: by default with BOS and a blank."""
    tf = need("transformers")
    need("google.protobuf")
    shutil.copy(speaker / "tokenizer.model", ".")
    assert Tokenizer.load(".").bos_id == 1

    prints = set()
    config = {"tokenizer_class": "LlamaTokenizer"}
    for adds, bos in itertools.product((True, False, None), (None, "<s>", "</s>")):
        common.write_json("tokenizer_config.json",
                          config | {"add_bos_token": adds, "bos_token": bos})
        theirs = tf.AutoTokenizer.from_pretrained(".")
        ours = Tokenizer.load(".")
        ids = theirs("has 1").input_ids
        assert ours.encode("has 1", bos=True) == ids, (adds, bos)
        assert ours.decode(ids[-3:]) == theirs.decode(ids[-3:])
        prints.add(ours.fingerprint)
    assert len(prints) == 3, "the fingerprint depends on BOS"


def test_configured_end_of_text(corpus):
    """EOS is the token that the config names, or else the first usual name that exists."""
    spec = read_json(corpus / "task" / "tokenizer.json")
    names = {"</s>": 1, "<|end_text|>": 31, "<|eot_id|>": 32}  # after a gap
    spec["model"]["vocab"] |= names
    token, *_ = spec["added_tokens"]
    spec["added_tokens"] = [token | {"content": name, "id": i, "special": i < 32}
                            for name, i in names.items()]
    common.write_json("tokenizer.json", spec)
    for config, eos in (
        ({}, 1),
        ({"eos_token": None}, 1),
        ({"eos_token": "<|end_text|>"}, 31),
        ({"eos_token": {"content": "<|eot_id|>"}}, 32),
    ):
        common.write_json("tokenizer_config.json", config)
        tokenizer = Tokenizer.load(".")
        assert tokenizer.eos_id == eos and tokenizer.fingerprint.endswith(f"EOS {eos}")

    for skipped in (29, 33):  # in the gap, and in the padding of a model's vocabulary
        assert tokenizer.decode([5, skipped, 7]) == tokenizer.decode([5, 7])

    common.write_json("tokenizer_config.json", {"eos_token": "<|none|>"})
    with pytest.raises(UserError, match="lacks the token <.none.>"):
        Tokenizer.load(".")


# ------------------------------------------------------------------------------------------ prepare
def prepare(corpus, source, out, *flags):
    """The arguments of data.py prepare."""
    return ("prepare", "--input", source, "--tokenizer", corpus / "task", "--out", out, *flags)


@pytest.mark.parametrize("source", ["a.jsonl", "a.parquet"])
def test_a_killed_prepare_begins_again(source, corpus):
    """An unfinished data set is rebuilt with the same bytes; a complete one is left alone."""
    documents(4000)
    asked = []
    if source == "a.parquet":
        asked = ["--prompt=text"]  # then rows hold whole documents
        table = need("pyarrow.json").read_json("a.jsonl")
        need("pyarrow.parquet").write_table(table, source, row_group_size=90)

    # Y 7 is a part of "by 7", in another case. The first document has null there, not "none".
    flags = "--shard_tokens=2000", "--drop=meta.by=Y 7", "--drop=meta.by=none", *asked
    command = prepare(corpus, source, "out", *flags)
    run_script("data", *command)
    whole = contents("out")
    counts = {"kept": 3920, "dropped": 80, "bad": 0, "long": 0}
    assert read_json("out/meta.json")["counts"] == counts

    # As a kill may leave it:
    os.remove("out/meta.json")
    os.truncate("out/train_000001.npy", 99)
    Path("out/val_000099.npy").touch()
    assert "out exists already" in error_line("data", *command), "it may be somebody else's"
    Path("out/.unfinished").touch()
    run_script("data", *command)
    assert contents("out") == whole
    assert "out is already complete" in run_script("data", *command)
    said = error_line("data", *prepare(corpus, source, "out", *asked))
    assert "created with drop = " in said


CHAT = "<extra_id_0>System\n\n<extra_id_1>User\nhas\n<extra_id_1>Assistant\nUser's"
TURNS = json.loads("""[
    {"role": "user", "content": "has 1", "tool_calls": []}, {"role": "tool", "content": null},
    {"role": "Assistant", "content": 0, "name": "a", "id": 7}, {"role": "user", "content": "so"},
    {"role": "assistant", "content": "3", "tool_calls": null}]""")
MARKED = "User: so\n### Assistant:\nit<|im_end|>\nthe user: is"


def parts_of(row, **flags):
    """What data.py prepare reads of a row, with these flags."""
    flags = dict(field="a", prompt=None, strip_roles=True, loss="all", drop=[]) | flags
    return data.read_parts(row, SimpleNamespace(**flags), vocab_size=128)


@pytest.mark.parametrize("row, flags, text", [  # the text with [brackets] around what carries loss
    ({"b": " has 1 \nhas 2\n"}, {"field": "b"}, "[|has 1 \nhas 2$]"),
    ({"a": MARKED}, {}, "[|so\nit\nthe user: is$]"),
    ({"a": CHAT}, {}, "[|has\nUser's$]"),
    ({"a": TURNS}, {}, "[|has 1\n\n0\nso\n3$]"),
    ({"a": TURNS}, {"loss": "assistant"}, "|has 1[\n0$]\nso[\n3$]"),
    ({"a": json.dumps(TURNS).encode()}, {"loss": "assistant"}, "|has 1[\n0$]\nso[\n3$]"),
    ({"a": {"b": "1\n"}, "q": "has "}, {"field": "a.b", "prompt": "q"}, "|has [\n1$]"),
    ({"a.b": "1", "a": {"b": "2"}}, {"field": "a.b"}, "[|1$]"),
    ({"a": 7.0, "q": True}, {"prompt": "q"}, "|true[\n7$]"),
    ({"a": [65, 66, 67]}, {}, "[ABC]"),
])
def test_prepare_reads_fields_and_chats(row, flags, text):
    """Messages are joined, role tags are removed; what is no answer has no loss."""
    tokenizer = SimpleNamespace(encode=lambda text, bos: [*map(ord, "|" * bos + text)],
                                eos_id=ord("$"))
    flags = {"prompt": None, "loss": "all"} | flags
    tokens = data.document(tokenizer, parts_of(row, **flags), SimpleNamespace(**flags))
    ids, *targets = tokens.tolist()
    parts = re.split(r"[][]", text)
    assert "".join(map(chr, ids)) == "".join(parts)
    labels = [ord(c) if i % 2 else -100 for i, part in enumerate(parts) for c in part]
    partly = flags["prompt"] or flags["loss"] != "all"
    assert targets == ([[*labels[1:], -100]] if partly else [])
    answer = json.dumps([{"from": "Oslo", "to": "Rome", "value": 100}])
    assert parts_of({"a": answer, "q": "1"}, prompt="q")[1] == (answer, True)


ANSWER = {"role": "assistant", "content": "1"}


@pytest.mark.parametrize("row, flags, words", [
    *[({"a": [ANSWER | {key: value}]}, {"loss": loss}, f"has {key}, which is not read")
      for loss in ("all", "assistant")
      for key, value in (("reasoning", "so"), ("refusal", "no"), ("tool_calls", [1]), ("new", 0),
                         ("audio", {"id": 1}), ("weight", 0), ("train", False))],
    ({"a": [ANSWER | {"role": "critic"}]}, {"loss": "assistant"}, "the role critic"),
    ({"a": [{"content": "1"}]}, {}, "'role'"),
    ({"a": [{"role": "user"}]}, {}, "'content'"),
    ({"a": [{"from": "gpt", "value": "1"}]}, {"loss": "assistant"}, "gpt='assistant'"),
    ({"a": [ANSWER | {"content": [{"type": "text", "text": "1"}]}]}, {}, "list of parts"),
    ({"a": json.dumps(ANSWER)}, {"loss": "assistant"}, "'role' is not a message"),
    ({"a": [65, 66], "q": "1"}, {"prompt": "q"}, "65 is not a message"),
    ({"a": [65, 128]}, {}, "ids that the tokenizer"),
    ({"a": " ", "q": "1"}, {"prompt": "q"}, "no token carries loss"),
])
def test_what_would_be_lost_is_refused(row, flags, words):
    """A record with more, or something else, than is read is bad, and its line says why."""
    with pytest.raises((ValueError, KeyError, TypeError), match=words):
        parts_of(row, **flags)


def test_documents_are_counted_and_bad_ones_skipped(corpus):
    """Over 1% of bad ones are an error; counts have all documents, no shard overwrites another."""
    good = '{"text": "has 1"}\n'
    bad = [
        '{"text": ', "[]", '{"q": "a"}', '{"text": null}', '{"text": NaN}',
        '{"text": "\xff"}', '{"text": "\\ud83d"}',  # not UTF-8, and a lone surrogate
        '{"text": [17]}', '{"text": [true]}', '{"text": ["has 1"]}',  # no ids of the tokenizer
    ]
    for share, count in ("10 of 58", 48), ("", 1500):
        Path("b.jsonl").write_text(good * count + "\n".join(bad), encoding="latin-1")
        run = error_line if share else run_script
        assert share in run("data", *prepare(corpus, "b.jsonl", "out"))
    assert read_json("out/meta.json")["counts"]["bad"] == 10

    texts = "has", "so", "so drop", " "
    Path("c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = prepare(corpus, "c.jsonl", "c", "--shard_tokens=1", "--drop=text=drop", "--val=0.9")
    run_script("data", *command)
    meta = read_json("c/meta.json")
    assert meta["counts"] == {"kept": 2, "dropped": 2, "bad": 0, "long": 0}  # one is empty
    names = [name for shards in meta["shards"].values() for name, *_ in shards]
    assert len({*names}) == len(names) == len([*Path("c").glob("*.npy")])
    assert sum(len(np.load(f"c/{name}")) for name in names) == 4  # two words, each with EOS


def test_texts_in_other_encodings(corpus):
    """A byte order mark and parquet's binary columns are read; what is not UTF-8 is refused."""
    parquet, pa = need("pyarrow.parquet"), need("pyarrow")
    texts = [f"has {i % 10}" for i in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    Path("marked.jsonl").write_text(lines, "utf-8-sig")
    parquet.write_table(pa.table({"text": [text.encode() for text in texts]}), "binary.parquet")
    for path in "marked.jsonl", "binary.parquet":
        run_script("data", *prepare(corpus, path, f"of-{path}"))
        assert read_json(f"of-{path}/meta.json")["counts"]["kept"] == 60
        ids = np.load(f"of-{path}/train_000000.npy").tolist()
        assert ids[0] == Tokenizer.load(corpus / "task").encode("has")[0]

    Path("x.txt").write_text("caf\xe9 " * 50, "latin-1")
    Path("x.jsonl").write_text(lines, "utf-16")
    parquet.write_table(pa.table({"text": [text.encode("utf-16") for text in texts]}), "x.parquet")
    for path in ("x.txt", "x.jsonl", "x.parquet"):
        assert f"{path}: " in error_line("data", *prepare(corpus, path, "out"))


def test_what_lies_beside_is_named_once(corpus, capsys):
    """Columns and marks that would change a text, but are not read, are named, each once."""
    data.NOTED.clear()
    for i, row in enumerate((
        {"a": [5, 6], "labels": [5, -100]},
        {"a": [ANSWER], "system": "has", "tools": []},
        {"a": "so\n<|endoftext|>\nso"},
    )):
        Path(f"{i}.jsonl").write_text(f"{json.dumps(row)}\n" * 30)
        run_script("data", *prepare(corpus, f"{i}.jsonl", i, "--field=a"))
    named = re.findall("note: (?:records have )?(\\S+)", capsys.readouterr().err)
    assert named == ["labels", "system", "<|endoftext|>"]


def test_validation_has_whole_documents(corpus):
    """Validation gets documents of any remainder, and none is lost; or the last 1% of a book."""
    for out, n, flags, count_val in (
        ("a", 4000, [], 40), ("b", 1000, [], 32), ("c", 300, [], 30), ("d", 300, ["--val=0.2"], 60),
    ):
        documents(n)
        run_script("data", *prepare(corpus, "a.jsonl", out, *flags))
        train, val = documents_in(out, "train"), documents_in(out, "val")
        assert len(val) == count_val and sorted(train + val) == [*range(n)]
        assert (train, val) == (sorted(train), sorted(val)), "in the order of the file"
        for cycle in 2, 3, 4, 5, 6:  # rows may come in turn
            assert len({i % cycle for i in val}) == cycle

    Path("a.txt").write_text("\ufeffhas 1 " + "has 1 " * 499)
    run_script("data", *prepare(corpus, "a.txt", "out"))
    rest, val = (np.load(f"out/{split}_000000.npy") for split in ("train", "val"))
    assert (len(rest), len(val)) == (991, 10)
    assert Tokenizer.load("out").decode(rest[:2].tolist()) == "has 1", "without the byte order mark"


def write_questions(lengths):
    """Write q.jsonl, whose questions become documents of these numbers of tokens."""
    rows = [{"q": "has " * (n - 2), "a": i % 10} for i, n in enumerate(lengths)]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_rows_hold_whole_questions(corpus):
    """Rows hold each question once, whole, with its answer."""
    lengths = np.random.default_rng(0).integers(3, 100, 900).tolist()
    write_questions(lengths)
    command = prepare(corpus, "q.jsonl", "out", "--prompt=q", "--field=a", "--shard_tokens=20000")
    run_script("data", *command)
    meta, tokenizer = read_json("out/meta.json"), Tokenizer.load("out")
    found = []
    for split, shards in meta["shards"].items():
        for name, *_ in shards:
            for ids, targets in np.load(f"out/{name}").reshape(2, -1, 256).swapaxes(0, 1).tolist():
                while ids and ids[0] != meta["eos_id"]:
                    n = ids.index(meta["eos_id"]) + 1
                    assert targets[:n] == [-100] * (n - 3) + [*ids[n - 2:n], -100]
                    found.append((n, tokenizer.decode(ids[n - 2:n - 1])))
                    ids, targets = ids[n:], targets[n:]
                assert {*ids} <= {meta["eos_id"]} and {*targets} <= {-100}, "padding"
    assert sorted(found) == sorted((n, str(i % 10)) for i, n in enumerate(lengths))
    size = sum(tokens for shards in meta["shards"].values() for _, tokens, _ in shards)
    assert sum(lengths) > 0.9 * size, "rows are full"


def test_row_length_fits_the_questions(corpus):
    """Rows hold two of the usual questions; longer ones are left out and counted."""
    for out, lengths, T, long in ("a", [130] * 100, 512, 0), ("b", [100] * 199 + [700], 256, 1):
        write_questions(lengths)
        run_script("data", *prepare(corpus, "q.jsonl", out, "--prompt=q", "--field=a"))
        meta = read_json(f"{out}/meta.json")
        assert (meta["row_length"], meta["counts"]["long"]) == (T, long)


def test_unknown_words_are_named(capsys):
    """A word that the tokenizer lacks is named, also where its file has a number for it."""
    tokenizers = need("tokenizers")
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigram.train_from_iterator(["once upon a time"] * 20, tokenizers.trainers.UnigramTrainer(
        vocab_size=40, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False))
    unigram.save("tokenizer.json")
    for text in ("once upon", "once \u6f22 upon"):
        Tokenizer.load(".").encode(text)
        assert ("tokenizer lacks '\u6f22'" in capsys.readouterr().err) == ("\u6f22" in text)


def test_a_data_set_has_its_models_tokenizer(corpus, speaker):
    """train.py refuses a data set of another tokenizer than the model's, which a run also has."""
    shutil.copytree(corpus / "task", "run/step_000001")
    Path("run/step_000001/config.json").touch()
    data.check_same_tokenizer(Tokenizer.load("run"), corpus / "pretrain")
    with pytest.raises(UserError, match="differs from the model's"):
        data.check_same_tokenizer(Tokenizer.load(speaker), corpus / "task")


# --------------------------------------------------------------------------------------- the loader
def test_each_epoch_has_its_own_order(corpus):
    """Each epoch and seed has the same rows in its own order."""
    (shards,) = Dataset(f"{corpus}/task", "val", 39).sources

    def rows(seed, epoch):
        numbers = range(epoch * shards.num_rows, (epoch + 1) * shards.num_rows)
        return [shards.sample(seed, number).tolist() for number in numbers]

    first = rows(seed=7, epoch=0)
    for other in [rows(seed=7, epoch=1), rows(seed=8, epoch=0)]:
        assert sorted(other) == sorted(first)
        assert other != first


def test_every_token_of_a_row_has_a_target(corpus):
    """A token's target is the next one, whatever its id; shards that are too short are reported."""
    spec = read_json(corpus / "task" / "tokenizer.json")
    spec["model"]["vocab"] |= {f"w{i}": i for i in range(20, 70_000)}  # some above 65,535
    common.write_json("large/tokenizer.json", spec)
    ids = [20, 65535, 65536, 69999]
    Path("a.txt").write_text(" ".join(f"w{i}" for i in ids))
    run_script("data prepare --input=a.txt --tokenizer=large --out=out")
    assert np.load("out/train_000000.npy").tolist() == [*ids, 1]
    (idx,), (targets,) = first_rows(Dataset("out", "train", 4), 1)
    assert (idx.tolist(), targets.tolist()) == (ids, [*ids[1:], 1])
    with pytest.raises(UserError, match="too few train tokens for one row of 5"):
        Dataset("out", "train", 5)

    shutil.copytree(corpus / "task", "task")
    path = Path("task", read_json("task/meta.json")["shards"]["val"][0][0])
    os.truncate(path, path.stat().st_size - 40)
    with pytest.raises(UserError, match=f"{path}: damaged"):
        Dataset("task", "val", 39)


def test_mixture_follows_its_weights(corpus):
    """A mixture has exact shares, evenly spread, and reads the samples of each set in order."""
    for name in "abc":
        shutil.copytree(corpus / "task", name)
    mixture = Dataset("a:5,b,c:2", "val", 39)

    for k, shards in enumerate(mixture.sources):  # the set is the ids, the sample the targets
        shards.sample = lambda seed, number, k=k: np.array([[k], [number]])
    chosen, numbers = first_rows(mixture, 800, seed=3)
    for k, weight in enumerate((5, 1, 2)):
        mine = chosen == k
        assert max_difference(mine.cumsum(0)[:, 0], torch.arange(1, 801) * weight / 8) < 1
        assert numbers[mine].tolist() == list(range(100 * weight))
    assert mixture.num_rows == 1024 * 8 // 5  # an epoch of the first set

    assert Dataset("a:5,b,c:3", "val", 39).fingerprint() != mixture.fingerprint()
    assert Dataset("a:10,b:2,c:4", "val", 39).fingerprint() == mixture.fingerprint()


# ------------------------------------------------------------------------------------ the optimizer
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
def test_muon_beside_adamw_is_torchs(products):
    """Matrices follow torch's Muon to the last bit, other parameters torch's AdamW."""
    ours, theirs = parameters(noise()), parameters(noise())
    sizes = [16, 8]
    opt = Optimizer(ours.items(), MATRICES, lr=0.02, adam_lr=0.003, weight_decay=0.1,
                    stacked={QKV: sizes}, product_dtype=products)
    parts = [torch.nn.Parameter(part) for part in theirs.pop(QKV).detach().split(sizes)]
    matrices, rest = [], []
    for name, p in theirs.items():
        (matrices if name in MATRICES else rest).append(p)

    peers = [
        (torch.optim.Muon([*matrices, *parts], weight_decay=0.1), 0.02),
        (torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1), 0.003),
    ]
    for i, factor in enumerate((0.1, 1.0, 0.6, 0.2)):
        grads = noise(i)
        grads["embed.weight"] *= 1e-8  # so small that AdamW's epsilon matters
        step_with(opt, ours, grads, lr_factor=factor)
        for name, p in theirs.items():
            p.grad = grads[name]
        for part, grad in zip(parts, grads[QKV].split(sizes)):
            part.grad = grad
        for peer, lr in peers:
            peer.param_groups[0]["lr"] = lr * factor
            peer.step()

    assert ours[QKV].equal(torch.cat(parts))
    for name, p in theirs.items():
        exact = name.startswith("core") and p.dim() == 2
        assert max_difference(ours[name], p) <= (0 if exact else 1e-6), name


def test_muon_alone_updates_in_another_project(monkeypatch):
    """The five lines of its docstring update what is not frozen, with nothing else of ours."""
    monkeypatch.delitem(sys.modules, "muon")
    for ours in ("common", "model", "data", "train"):
        monkeypatch.setitem(sys.modules, ours, None)
    lines = re.findall(r"^    (.+)", muon.__doc__, re.M)
    assert len(lines) == 5
    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(9, 16),
                                 "blocks": torch.nn.Linear(16, 16),
                                 "first_blocks": torch.nn.Linear(16, 16, bias=False)})
    model.first_blocks.requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    names = {"model": model, "batch": torch.arange(9), "labels": 9,
             "loss": lambda model, batch: model.blocks(model.wte(batch)).square().sum()}
    exec("\n".join(["from muon import Optimizer", *lines]), names)
    by_muon = [piece.name for piece in names["opt"].pieces if piece.rule == "muon"]
    assert by_muon == ["blocks.weight"]
    assert [*map(torch.equal, before, model.parameters())] == [False, False, False, True]


def test_adamw_star_is_the_papers():
    """AdamW* follows its formulas, written here in float64, with v clamped in place at 1e-12."""
    lr, decay = 0.01, 0.1
    name = "embed.weight"
    w = noise()[name].double()
    ours = parameters({name: w})
    opt = Optimizer(ours.items(), [], lr=lr, adam_lr=1.0, weight_decay=decay, rule="adamw*")
    for t, factor in enumerate((0.3, 1.0, 1.0, 0.7, 0.2), start=1):
        g = noise(t)[name] * (20 if t == 3 else 1)
        g[2] *= 1e-8
        step_with(opt, ours, {name: g}, lr_factor=factor)
        g = g.double()
        if t == 1:
            m = g
            v = g**2
        m = 0.9 * m + 0.1 * g
        v = (0.95 * v + 0.05 * g**2).clamp(min=1e-12)
        excess = (g**2 / v).mean().sqrt()
        assert t != 3 or excess > 1.5, "the third gradient is too small to shrink its step"
        step = lr * factor / max(1, excess) / (1 - 0.9**t)
        size = (v / (1 - 0.95**t)).sqrt()
        w = w * (1 - factor * decay)
        w = w - step * torch.atan2(m, size)

    assert max_difference(ours[name], w) < 1e-6


@pytest.mark.parametrize("preset", ["tinyllama-4-8-4", "llama-3.1-8b-8-12-8"])
def test_ranks_keep_even_shares(preset):
    """Ranks share one copy of the optimizer, and Muon's work, evenly within 15%."""
    parent, sizes = plan.presets()[preset]
    model = RecurrentLM.empty(retrofit_config(parent, sizes))
    alone = train.make_optimizer(Settings(), model, 0, 1).masters_and_moments().values()
    for world in (2, 4, 8):
        optimizers = [train.make_optimizer(Settings(), model, rank, world) for rank in range(world)]
        kept = [opt.masters_and_moments().values() for opt in optimizers]
        work = [[piece.master for piece in opt.own if piece.rule == "muon"] for opt in optimizers]
        for tensors in (kept, work):
            shares = [sum(t.numel() for t in share) for share in tensors]
            assert max(shares) < 1.15 * sum(shares) / world, (world, shares)
        assert sum(t.numel() for share in kept for t in share) == sum(t.numel() for t in alone)


# ----------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("n_core, norm, depths", [
    (2, "pre", (8, 2, 8, 0, None)),
    (2, "post", (4, 1)),
    (2, "sandwich", (6,)),
    (0, "pre", (None,)),
])
def test_decoding_is_that_of_the_model(n_core, norm, depths):
    """Any batch gives the tokens of generate(), without a cache, whatever was decoded before."""
    torch.manual_seed(0)
    model = decode_model(n_core, norm)
    decoder = Decoder(model)
    for r in depths:
        for lengths, limits in ((1, 9, 34, 3), (20, 5, 30, 6)), ((5,), (9,)):
            generate_rows(decoder, random_prompts(40, 9, 2, 2), [4, 9, 1, 1], r, seed=1)
            prompts = random_prompts(*lengths)
            wanted = [model.generate(*asked, r) for asked in zip(prompts, limits)]
            assert generate_rows(decoder, prompts, limits, r) == wanted


def test_numbers_that_are_none(checkpoint, corpus):
    """Logits that are not finite end each command in one line; they do not spoil the next text."""
    model = RecurrentLM.load(checkpoint)
    model.head.weight.data[3] = math.nan
    save(model, "bad", corpus)
    Path("q.jsonl").write_text('{"question": "has", "answer": "2"}')
    for command in "sample --prompt=has --steps=2", "eval_gsm8k --data=q.jsonl --template=plain":
        assert "logits are not finite" in error_line(command, "--model=bad"), command

    model = decode_model()
    model.embed.weight.data[5] = math.inf
    decoder = Decoder(model)
    with pytest.raises(UserError, match="not finite"):
        generate_rows(decoder, [[1, 2, 5]], [9], 2)
    assert generate_rows(decoder, [[1]], [9], 2) == [model.generate([1], 9, 2)]


@needs_compiler
def test_compiled_decoding(monkeypatch, capfd):
    """Compiled decoding gives the same tokens, never recompiles, and leaves the model as it was."""
    monkeypatch.setattr(sample, "IN_CACHE", 2500)  # some matrices are larger
    model = small(1, vocab_size=64, n_core=1, context=64, state_std=1.0, qkv_bias=True)
    for name, p in model.named_parameters():
        if name.endswith("bias"):  # 0 so far
            torch.nn.init.normal_(p, std=3)
    attributes = [{**vars(module)} for module in model.modules()]
    compiled = Decoder(model, compile=True)
    compiled.chunk = 4
    prompt = [5]  # a single token, since prefill is never compiled
    wanted = model.generate(prompt, 12, 2)
    assert generate_rows(compiled, [prompt], [1], 2) == [wanted[:1]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert generate_rows(compiled, [prompt], [12], 2) == [wanted]
    assert attributes == [vars(module) for module in model.modules()]
    assert "warning" not in capfd.readouterr().err


def test_a_gpu_compiles_whole_recurrences(monkeypatch):
    """A compiled recurrence that attends by SDPA, as on a GPU, has no graph break."""
    monkeypatch.setattr(sample, "attend_one", sample.attend)
    model = decode_model()
    wanted = [model.generate(prompt, 9, 2) for prompt in ([5], [7])]
    model.run_core = torch.compile(model.run_core, fullgraph=True, dynamic=True, backend="eager")
    assert generate_rows(Decoder(model), [[5], [7]], [9, 9], 2) == wanted


def test_sampling_follows_its_settings(corpus):
    """Tokens have the frequencies of softmax(logits / temperature), cut to the top k, by --seed."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().expand(20000, 1, 4)
    for temperature, top_k, wanted in (
        (1.0, 0, [0.15, 0.5, 0.05, 0.3]),
        (1.0, 2, [0.0, 0.625, 0.0, 0.375]),
        (1.0, 9, [0.15, 0.5, 0.05, 0.3]),
        (0.5, 0, [0.0616, 0.6849, 0.0068, 0.2466]),
        (1e-38, 0, [0.0, 1.0, 0.0, 0.0]),  # a division by it would overflow
    ):
        draws = torch.empty(logits.shape).exponential_(generator=torch.Generator().manual_seed(0))
        tokens, checked = choose(logits, draws, temperature, top_k)
        assert tokens.equal(checked)
        share = tokens.flatten().bincount(minlength=4) / 20000
        assert share.tolist() == pytest.approx(wanted, abs=0.015)

    logits = torch.tensor([[1.0, 2.0], [math.inf, 0], [0, -math.inf], [math.nan, 0], [3, 2]])
    _, checked = choose(logits[:, None])
    assert checked.flatten().tolist() == [1, *[NO_TOKEN] * 3, 0]

    save(small(context=40, state_std=0), "m", corpus)
    ask = "sample --model=m --prompt='has 1' --tokens=20"
    texts = [run_script(f"{ask} --temperature=2 --seed={seed}") for seed in (0, 0, 1, 2)]
    assert texts[0] == texts[1] and len({*texts}) == 3
    assert run_script(f"{ask} --temperature=2 --top_k=1") == run_script(ask)


def test_auto_dtype(monkeypatch):
    """--dtype auto is bfloat16 on GPUs and CPUs where that is native; elsewhere it is slow."""
    monkeypatch.setattr(common, "CPUINFO", Path("cpuinfo"))
    assert common.choose_dtype("auto", "cpu") == "float32", "no cpuinfo, as on macOS"
    for cpuinfo, wanted in (
        ("vendor_id : GenuineIntel flags : fma avx512_bf16 amx_bf16 amx_tile", "bfloat16"),
        ("vendor_id : GenuineIntel flags : fma avx512f avx512_bf16", "float32"),  # which is faster
        ("vendor_id : AuthenticAMD flags : fma avx512f avx512_bf16", "bfloat16"),
        ("vendor_id : AuthenticAMD flags : fma avx2", "float32"),
        ("Features : fp asimd i8mm bf16 dgh", "bfloat16"),  # ARM
    ):
        Path("cpuinfo").write_text(cpuinfo)
        assert common.choose_dtype("auto", "cpu") == wanted
    for gpu, wanted in (
        ({"major": 8}, "bfloat16"), ({"major": 7}, "float32"),  # such as an A100 and a T4
        ({"major": 9, "gcnArchName": "gfx906:sramecc+:xnack-"}, "float32"),  # an MI50
    ):
        monkeypatch.setattr("torch.version.hip", "gcnArchName" in gpu or None)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda: SimpleNamespace(**gpu))
        assert common.choose_dtype("auto", "cuda:0") == wanted


def test_auto_on_resume_is_what_it_became(base, looped, monkeypatch):
    """Training and evaluation that began with --dtype auto resume in the dtype that it became."""
    Path("asked.jsonl").write_text(json.dumps(ASKED[0]))
    run = "train --dtype=auto --updates=1 --out_dir=run", *base
    flags = "--data=asked.jsonl --out=x.json --max_new_tokens=2 --steps=3"
    ask = f"eval_gsm8k --model={looped} {flags}"
    monkeypatch.setattr(common, "CPUINFO", Path("cpuinfo"))
    Path("cpuinfo").write_text("amx_bf16")
    run_script(*run)
    run_script(ask)
    os.remove("cpuinfo")
    assert "bfloat16 on cpu" in run_script(*run)
    run_script(ask)
    assert read_json("answers_x.json")["asked"]["dtype"] == "bfloat16"


# ----------------------------------------------------------------------------------------- training
def test_schedules_are_the_papers():
    """Schedules of r, k and lr are the paper's, as are seed 0's draws, however many per update."""
    def expand(runs):
        """[[value, number of updates], ...] -> the value at each update."""
        values, counts = zip(*runs)
        return np.repeat(values, counts).tolist()

    oracle = read_json(ORACLE / "paper.json")["curriculum"]
    for x in oracle["schedules"]:
        s = Settings(updates=x["total"], curriculum_warmup=x["warmup"],
                     mean_recurrence=x["max_mean_rec"], curriculum=x["warmup_type"])
        means = expand(x["mean_recurrence_runs"])
        assert [train.scheduled_mean(s, u) for u in range(x["total"])] == means
        s.curriculum_warmup = 0
        assert train.scheduled_mean(s, 0) == s.mean_recurrence

    for x in oracle["backprop_schedules"]:
        s = Settings(updates=x["total"], backprop_warmup=x["warmup"], curriculum_warmup=0)
        found = [train.scheduled_k(s, u) for u in range(x["total"] - 1)]
        *wanted, _ = expand(x["backprop_depth_runs"])  # its last update has k = 1
        assert found == wanted

    for x in oracle["lr_factors"]["cases"]:
        s = Settings(updates=x["total"], warmup=x["warmup"], cooldown=x["cooldown"])
        for update, factor in x["points"]:
            assert train.lr_scale(s, update) == pytest.approx(factor, rel=0, abs=1e-9), update

    for x, draws, seed in itertools.product(oracle["sampler"]["cases"], (1, 4), (0, 1)):
        s = Settings(mean_recurrence=x["mean_recurrence"], backprop_depth=x["backprop_depth"],
                     curriculum_warmup=0, draws=draws, seed=seed)
        pairs = [train.draws_of(s, update) for update in range(64 // draws)]
        found = [list(pair) for pair in itertools.chain(*pairs)]
        assert (found == x["exact_data_step_1_to_64"]) == (seed == 0)

    s = Settings(updates=10, warmup=0.25, cooldown=0)  # a warm-up of 2.5 updates takes 3
    assert [train.lr_scale(s, u) for u in range(4)] == pytest.approx([0.001, 0.334, 0.667, 1])
    assert train.updates_in(Settings(updates=100), 0.07) == 7, "though 0.07 * 100 > 7"


ATEN = torch.ops.aten
CAUSAL = {  # FLOPs of attention for FlopCounterMode: a causal kernel computes half of each product
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, *_, **__: 2 * math.prod(q) * q[2],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, q, *_, **__: 5 * math.prod(q) * q[2],
}


def test_executed_flops_are_torchs():
    """FLOPs per token (forward and backward) and of Newton-Schulz match torch's count."""
    for shape, steps, flags in (
        ({}, (3, 2), ""),
        ({"tie_embeddings": True, "adapter": "add"}, (3, 2), ""),
        ({}, (0, 4), ""),
        ({}, (3, 2), "--train=core|adapter"),
        ({}, (3, 2), "--train=coda|head"),
        ({}, (3, 2), "--train=norm_f"),
        ({"n_core": 0, "n_coda": 0, "qkv_bias": True}, (0, 0), "--train=head"),
    ):
        model = small(vocab_size=300, n_embd=64, n_ffn=160, **shape)
        run = f"--data=x --out_dir=run --init_from=x --context=200 {flags}"
        s = train.read_settings(run.split())
        train.choose_trained(s, model)
        idx = torch.ones(2, 200, dtype=torch.int64)
        for training in (False, True):
            with (FlopCounterMode(display=False, custom_mapping=CAUSAL) as counter,
                  torch.set_grad_enabled(training)):
                _, losses = model(idx, idx, steps)
                if training:
                    losses.sum().backward()
            wanted = counter.get_total_flops() / idx.numel()
            found = model.flops_per_token(steps, 200, training)
            # The gradient of the first trained matrix's input is not needed.
            assert found == pytest.approx(wanted, rel=0.02 if flags else 1e-9), (flags, training)

        optimizer = train.make_optimizer(s, model, 0, 1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.accumulate()
        with FlopCounterMode(display=False) as counter:
            optimizer.step(1.0)
        assert optimizer.flops() == counter.get_total_flops(), flags


def test_a_forks_matrix_costs_flops():
    """Those of a forward pass in each of 3 + 2 recurrences, and of a backward pass in two."""
    model = small(n_core=1)
    C = model.config.n_embd
    before = model.flops_per_token((3, 2), 8, True)
    model.gate = torch.nn.Linear(C, C, bias=False)
    assert model.flops_per_token((3, 2), 8, True) - before == (5 * 2 + 2 * 4) * C**2


def test_flags_override_the_configs(base, monkeypatch):
    """Flags override TOML files, later ones earlier ones; ~ is expanded; a parent has its shape."""
    text = 'data = ["a=b:1", "~/c"]\nout_dir = "run"\nlr = 1\ncompile = false\nseed = 5\n'
    Path("my.toml").write_text(text + "eval_recurrences = [8, 1]", "utf-8-sig")
    Path("more.toml").write_text("lr = 2\nupdates = 7")
    monkeypatch.setenv("HOME", "/h")
    flags = "--updates=9 --config=my.toml --draws=2 --init_from=~/m --config=more.toml"
    s = train.read_settings(flags.split())
    assert (s.data, s.init_from, s.out_dir) == ("a=b:1,/h/c", "/h/m", "run")
    assert (s.lr, s.eval_recurrences, s.updates, s.draws, s.seed) == (2.0, [1, 8], 9, 2, 5)
    assert s.compile is False
    s = train.read_settings([*base, "--out_dir=run", "--init_from=x", "--reinit"])
    assert (s.n_embd, s.n_core) == (None, None), "the shape of x"
    assert train.read_settings([*base, "--out_dir=run", "--n_head=4"]).n_kv_head == 4


def test_killed_ranks_end_alike(base, unbroken):
    """Runs whose ranks were killed end bit-identical on as many ranks, and close on others."""
    base = [*base, "--dtype=bfloat16", "--draws=2", f"--init_from={unbroken}", "--reinit"]
    base += ["--train=core|adapter|embed|head|norm"]  # not the matrices of the other layers
    base += "--updates=6 --save_every=2 --eval_every=6 --batch_size=8 --micro_batch=2".split()
    Path("dies").write_text("4")
    two = launch("train --out_dir=two", *base, world=2, run=run_dying)
    assert exit_codes(two) == [1, -signal.SIGKILL]
    assert checkpoints("two") == ["step_000002"]

    for world in "14":
        shutil.copytree("two", world)
    run_script("train --out_dir=1", *base, "--micro_batch=1")
    run_on_ranks("train --out_dir=4", *base, "--micro_batch=1", world=4)
    run_on_ranks("train --out_dir=two", *base, world=2)
    wanted = weights("two/step_000006", "model")
    for world in "14":
        for key in ("loss", "norm"):
            assert read_log(world, key) == pytest.approx(read_log("two", key), abs=1e-2)
        for name, t in weights(f"{world}/step_000006", "model").items():
            assert relative_error(wanted[name], t) < 0.02, name

    Path("dies").write_text("2")  # before its first checkpoint, so it starts over
    torchrun = elastic_launch(LaunchConfig(  # torchrun --standalone --max-restarts=1, but forked
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="forkserver"), run_dying)
    torchrun(os.getcwd(), {}, "train", *base, "--out_dir=restarted")
    assert same_end("two", "restarted")


@needs_compiler
def test_compiled_run_resumes_alike(base, monkeypatch):
    """A resumed compiled run ends bit-identical on two threads, with an uncompiled one's losses."""
    def skip(run):  # fewer graphs to compile
        run.progress.validated = run.progress.update

    monkeypatch.setattr(train.Run, "validate", skip)
    monkeypatch.setattr("model.LOGITS_AT_ONCE", 3200)  # several chunks
    monkeypatch.setattr(torch, "compile", mock.Mock(wraps=torch.compile))
    base = [*base, "--compile=true", "--n_prelude=0", "--n_coda=0", "--updates=6"]
    torch.set_num_threads(2)
    torch.compiler.reset()
    train_until(3, *base, "--out_dir=resumed")
    run_script("train --out_dir=unbroken", *base)
    torch.compiler.reset()
    run_script("train --out_dir=resumed", *base)
    torch.set_num_threads(1)
    torch.compile.assert_called()
    assert same_end("resumed", "unbroken")
    run_script("train --out_dir=eager", *base, "--compile=false")
    assert read_log("eager", "loss") == pytest.approx(read_log("resumed", "loss"), abs=1e-3)


def test_stopped_run_ends_alike(base, unbroken, monkeypatch):
    """A signal, unless ignored, ends a run, which is saved; the same command ends as without it."""
    to_inputs = train.to_inputs
    trained = []
    signals = {"row 20": signal.SIGHUP, "row 36": signal.SIGINT,  # in the second and third update
               "row 52": signal.SIGHUP,  # ignored by then
               "validation 6": signal.SIGUSR1, "validation 12": signal.SIGUSR1}

    def signalled(model, batch, seed):
        _, _, rows = batch
        if torch.is_grad_enabled():
            trained.append(rows[0])
            places = {f"row {row}" for row in rows}
        else:
            places = {f"validation {max(read_log('run', 'loss'), default=0)}"}
        for place in places & signals.keys():
            os.kill(os.getpid(), signals.pop(place))
        return to_inputs(model, batch, seed)

    monkeypatch.setattr(train, "to_inputs", signalled)
    flags = [*base, "--out_dir=run"]
    wanted = read_log(unbroken, "val")
    for row, saved, validated in ((20, 1, [0]), (36, 2, [0]), (92, 6, [0]), (188, 12, [0, 6])):
        if saved == 6:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        code, _ = outcome("train", *flags)
        assert code == 128 + signal.SIGTERM
        assert trained[-1] == row
        assert checkpoints("run") == [f"step_{saved:06d}"]
        assert read_log("run", "val") == {update: wanted[update] for update in validated}
    assert not signals
    run_script("train", *flags)
    assert read_log("run", "val") == wanted and same_end("run", unbroken)
    assert "validation" not in run_script("train", *flags)


def test_ranks_start_alike_and_stop_together(base, corpus):
    """
    A rank whose settings differ, but for data paths, says which. A signal to one stops all, also if
    another has no share of the optimizer, because too little is trained.
    """
    two = launch("train --out_dir=new", *base, world=2, last=["--lr=0.02"])
    _, last_code = exit_codes(two)
    assert "rank 1 has lr = 0.02, but rank 0 has 0.01" in Path("log").read_text()
    assert last_code == 1 and not checkpoints("new")

    Path("moved").symlink_to(corpus / "pretrain")
    long = "train --train=adapter --updates=900 --save_every=900 --out_dir=new"
    two = launch(long, *base, world=2, last=["--data=moved"])
    wait_until(lambda: read_log("new", "loss"), two)
    os.kill(two[1].pid, signal.SIGTERM)
    assert exit_codes(two) == [128 + signal.SIGTERM] * 2
    assert len(checkpoints("new")) == 1, "all stop after the same update"


def test_ctrl_c_of_a_pipeline_saves(base):
    """Ctrl-C saves the last complete update, though `tee` ends first and every print then fails."""
    flags = " ".join([*base, "--updates=900", "--save_every=900", "--out_dir=run"])
    line = f"exec {sys.executable} {ROOT}/train.py {flags} 2>&1 | tee log"
    ours, theirs = os.openpty()
    process = subprocess.Popen(["setsid", "--ctty", "bash", "-c", line],
                               stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"update     3/" not in seen:
        seen += os.read(ours, 4096)
    os.write(ours, b"\x03")
    assert process.wait() == 128 + signal.SIGINT
    os.close(ours)
    (name,) = checkpoints("run")
    assert name in [f"step_{update:06d}" for update in read_log("run", "loss")]


def test_a_run_is_trained_by_one_process(base):
    """A second process on the same --out_dir ends in one line."""
    with common.lock(Path("run/.lock")):
        assert "another process" in error_line("train --out_dir=run", *base)


def test_changed_settings_or_data(base, unbroken):
    """A run resumes if it or its data moves or its parent goes, but not with other settings."""
    base = [*base, "--data=data/pretrain", "--updates=1", "--init_from=parent", "--out_dir=run"]
    shutil.copytree(unbroken, "parent")
    tiny("data", "counts", rows=64)
    run_script("train", *base)
    assert "lr = 0.01, but this command says 0.02" in error_line("train --lr=0.02", *base)

    shutil.copytree("run", "copy")
    shutil.copytree("data", "moved")
    assert "done: copy" in run_script("train", *base, "--data=moved/pretrain", "--out_dir=copy")

    shutil.rmtree("parent")
    assert "done: run" in run_script("train", *base)
    for other in ("run", ""):
        assert "init_from = parent" in error_line("train", *base, f"--init_from={other}")

    shutil.rmtree("data")
    tiny("data", "counts", seed=1, rows=64)
    assert "digest of the data" in error_line("train", *base)


def test_a_run_says_which_code_has_changed_since_it_began(base, monkeypatch):
    """A run that is resumed, or found complete, with other code says so, and goes on."""
    flags = *base, "--updates=6", "--out_dir=run"
    began = train.CODE
    assert began == common.code_of("common.py", "model.py", "muon.py", "data.py", "train.py")
    train_until(3, *flags)
    monkeypatch.setattr(train, "CODE", began | {"model.py": "changed", "data.py": "too"})
    for _ in range(2):
        assert "since this run began (model.py, data.py)" in run_script("train", *flags)
    path = "run/step_000006/train.json"
    progress = read_json(path)
    assert progress.pop("code") == began
    common.write_json(path, progress)  # as an older version's
    assert "since this run began (an older version)" in run_script("train", *flags)


def test_a_run_that_starts_from_a_run_goes_on_after_its_rows(base, monkeypatch):
    """On the same data, in the same order; otherwise, and with --reinit, it begins with row 0."""
    numbers, sample_row = [], data.Shards.sample

    def spy(shards, seed, number):
        if seed:  # not in validation
            numbers.append(number)
        return sample_row(shards, seed, number)

    monkeypatch.setattr(data.Shards, "sample", spy)
    for name in "ab":
        tiny(name, "counts", seed=ord(name), rows=64)

    def flags(out, parent, name, *more):
        start = f"--data={name}/pretrain", f"--init_from={parent}", f"--out_dir={out}"
        return *base, *start, "--seed=3", "--updates=3", "--save_every=1", *more

    def check(*command, first):
        numbers.clear()
        said = run_script("train", *flags(*command))
        assert numbers[4:] == [*range(first, first + 48)]  # after the warm-up
        assert (f"begin after the {first} of" in said) == (first > 0)

    check("one", "", "a", first=0)
    check("two", "one", "a", "--updates=6", "--batch_size=8", first=48)
    check("three", "two", "a", first=96)
    check("other_seed", "three", "a", "--seed=4", first=0)
    check("new", "three", "a", "--reinit", first=0)
    check("other_data", "three", "b", first=0)

    again = flags("again", "two", "a")
    train_until(2, *again)
    run_script("train", *again)
    assert same_end("again", "three")


def test_context_follows_the_data_and_extends_the_parents(base, corpus):
    """--context is the data's, and no other is accepted; beyond the parent's, it extends that."""
    run = *base, f"--data={corpus}/task", "--updates=0", "--eval_rows=4"
    assert "rows of 39 tokens" in run_script("train --context=0 --out_dir=new", *run)
    assert "Use --context=39" in error_line("train --context=38 --out_dir=x", *run)

    save(small(context=40), "short", corpus)
    save(small(context=60, embed_scale=2.0), "long", corpus)
    for name, context in (("short", 50), ("long", 60)):
        run_script(f"train --init_from={name} --out_dir=run-{name} --updates=1", *base)
        assert load_config(f"run-{name}/step_000001").context == context
    assert load_config("run-long/step_000001").embed_scale == 2, "--embed_scale is for new weights"


def test_train_some_parameters(base, unbroken):
    """Parameters that --train leaves out stay bit-identical and have no moments."""
    flags = f"--init_from={unbroken} --train=core|adapter --out_dir=run"
    run_script(f"train --dtype=bfloat16 --updates=1 {flags}", *base)
    before, after = weights(unbroken / "step_000012", "model"), weights("run/step_000001", "model")
    trained = "core", "adapter"
    for name, t in before.items():
        assert name.startswith(trained) != t.equal(after[name]), name
    assert all(name.startswith(trained) for name in weights("run/step_000001", "optimizer"))


def test_a_run_deletes_only_its_own(base, unbroken):
    """It deletes old checkpoints after the next save, even on a full disk, and no other files."""
    for path in ("step_000002_keep/config.json", "step_best/config.json", "step_notes.txt",
                 "step_000001/of_another_trainer"):
        common.write_json(f"run/{path}", {})
    os.mkdir("run/notes.tmp-20261127")
    names = {*os.listdir("run"), "log.jsonl", ".lock"}
    names |= {f"step_{n:06d}" for n in (3, 9, 12)}
    flags = [*base, "--keep=2", "--out_dir=run"]
    train_until(6, *flags)
    common.write_json("run/step_000003/eval_test.json", {})  # by somebody who does not wait
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        assert "step_000009" in error_line("train", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert find_checkpoint("run") == "run/step_000006"
    run_script("train", *flags)
    assert {*os.listdir("run")} == names and same_end("run", unbroken)


def test_a_save_may_be_killed_at_any_file(base, unbroken, monkeypatch):
    """A save or a deletion that was killed leaves nothing that counts, and no rest in the end."""
    flags = "train", *base, "--out_dir=run"
    with monkeypatch.context() as patch:  # while step_000003 is deleted
        patch.setattr(train, "shutil", mock.Mock(rmtree=mock.Mock(side_effect=KeyboardInterrupt)))
        outcome(*flags)
    rename, died = Path.rename, set()

    def rename_or_die(path, target):
        if "step_000009" in str(target) and target.name not in died:
            died.add(target.name)
            target.with_name(f"{target.name}.loopgraft-unfinished-1").mkdir()  # SIGKILL leaves it
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    while outcome(*flags)[0]:
        assert find_checkpoint("run") == "run/step_000006"
    assert died == {*os.listdir("run/step_000012")}
    assert checkpoints("run") == ["step_000012"] and same_end("run", unbroken)


def test_updates_that_are_not_finite(base, monkeypatch):
    """Updates without a finite gradient are skipped; too many in a row end the run."""
    to_inputs = train.to_inputs
    bad = {1, 4}

    def poisoned(model, batch, seed):
        idx, targets, state = to_inputs(model, batch, seed)
        _, _, numbers = batch
        if torch.is_grad_enabled() and numbers[0] // 16 in bad:
            state = state * math.nan
        return idx, targets, state

    monkeypatch.setattr(train, "to_inputs", poisoned)
    monkeypatch.setattr(train, "MAX_SKIPS", 2)
    base = [*base, "--optimizer=adamw", "--keep=2"]
    run_script("train --out_dir=whole", *base)
    assert read_json("whole/step_000012/train.json")["skipped"] == 2

    # Skipped updates do not count in AdamW's bias correction, after a restart either.
    train_until(3, *base, "--out_dir=resumed")
    run_script("train --out_dir=resumed", *base)
    assert identical(weights("resumed/step_000012"), weights("whole/step_000012"))

    bad |= {5, 6, 7}
    assert "last 3 updates had no finite gradient" in error_line("train --out_dir=bad", *base)
    assert checkpoints("bad") == ["step_000003", "step_000006"]


def test_wandb_goes_on_in_its_run(base, monkeypatch):
    """A resumed run goes on in the Weights & Biases run that it began; no login is told at once."""
    def init(id, **_):
        wandb.run = SimpleNamespace(id=id or "new")

    class NoLogin(Exception):
        pass

    wandb = mock.Mock(Error=NoLogin, init=mock.Mock(side_effect=NoLogin("no API key\n")))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = [*base, "--wandb", "--updates=6", "--out_dir=run"]
    error, said = outcome("train", *flags)
    assert "no API key" in error and "\n" not in error and "warm-up" not in said
    wandb.init = mock.Mock(side_effect=init)
    train_until(3, *flags)
    run_script("train", *flags)
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == [None, "new"]


@pytest.mark.parametrize("n_core", [0, 1])
def test_muon_updates_the_papers_matrices(n_core):
    """Muon updates q, k, v, gate and up one by one in an ordinary model, but stacked in a loop."""
    model = small(n_core=n_core, n_coda=n_core)
    optimizer = train.make_optimizer(Settings(), model, 0, 1)
    splits = {piece.name: piece.splits for piece in optimizer.pieces if piece.rule == "muon"}
    assert len(splits) == (4 + 1 + 4 + 4 if n_core else 4)  # with the adapter
    assert [*splits.pop("prelude.0.attn.qkv.weight")] == ([64] if n_core else [32, 16, 16])
    assert splits.pop("prelude.0.mlp.fc.weight") == ([128] if n_core else [64, 64])
    for name, rows in splits.items():
        assert rows == [len(model.get_parameter(name))]


@pytest.mark.parametrize("clip", [0, 0.5])
def test_updates_are_torchs(clip, base):
    """Updates with two draws, each over two micro-batches, follow torch's AdamW step by step."""
    flags = "--optimizer=adamw --updates=6 --draws=2 --warmup=0.4 --seed=3 --cooldown=0.5"
    flags = [*base, *flags.split(), f"--clip={clip}", "--weight_decay=0.5"]
    run_script("train --out_dir=run", *flags)
    s = train.read_settings([*flags, "--out_dir=new"])
    dataset = Dataset(s.data, "train", s.context)
    model = train.Run(s, "cpu").model
    peer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=s.weight_decay)
    for update in range(6):
        idx, targets, numbers = dataset.batch(s.seed, update, rank=0, world=1, B=16)
        state = model.initial_state(16, 50, s.seed, int(numbers[0]))
        total = 0
        for half in (0, 1):
            rows = slice(8 * half, 8 * half + 8)
            steps = train.draw_steps(s, update, 1 + 2 * update + half)  # counted over the run
            _, losses = model(idx[rows], targets[rows], steps, state[rows])
            loss = losses.sum() / (targets != -100).sum()
            loss.backward()
            total += loss.item()
        assert read_log("run", "loss")[update + 1] == pytest.approx(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        assert read_log("run", "norm")[update + 1] == pytest.approx(norm.item(), rel=1e-5)
        lr = s.lr * train.lr_scale(s, update)
        assert read_log("run", "lr")[update + 1] == lr
        peer.param_groups[0]["lr"] = lr
        peer.step()
        peer.zero_grad()

    for name, t in load_file("run/step_000006/model.safetensors").items():
        assert max_difference(t, model.get_parameter(name)) < 1e-3 * s.lr, name


# A value of each setting that is not that of RUN. Some need other flags to matter.
RECIPES = """
    --init_from={m}; --reinit --init_from={m}; --embed_scale=2; --seed=1; --updates=4;
    --batch_size=4; --draws=2; --mean_recurrence=4; --recurrence_sampler=fixed; --curriculum=none;
    --curriculum=1-sqrt --curriculum_warmup=1 --mean_recurrence=16; --curriculum_warmup=1;
    --backprop_depth=1; --backprop_warmup=1 --backprop_depth=3 --curriculum_warmup=0; --train=core;
    --optimizer=adamw; --lr=0.02; --adam_lr=0.004; --weight_decay=0.5; --clip=0.01; --warmup=1;
    --cooldown=0; --dtype=bfloat16"""


def test_the_recipe_decides_the_result(base, unbroken):
    """Changing any setting of the Recipe changes the final weights."""
    base = [*base, "--updates=3", "--batch_size=8", "--eval_rows=4", "--eval_recurrences=1"]

    @functools.cache
    def end(*flags):
        name = f"run{len(os.listdir())}"
        run_script("train", *base, *flags, f"--out_dir={name}")
        return weights(find_checkpoint(name))

    found = set()
    for flags in RECIPES.format(m=unbroken).split(";"):
        change, *others = flags.split()
        assert not identical(end(change, *others), end(*others)), flags
        name, _, _ = change.partition("=")
        found.add(name.strip("-"))
    # Without the shape, and the context, which is the data's.
    assert found == {item.name for item in fields(train.Recipe)} - {"context", *train.SHAPE}


def test_log_and_checkpoint_agree(base, corpus):
    """train.json counts the FLOPs of the r that were drawn; logged losses are the checkpoint's."""
    run = [*base, "--draws=4", "--keep=4", "--updates=6", "--eval_every=3"]
    run_script("train --out_dir=run", *run)
    s = train.read_settings([*run, "--out_dir=run"])
    model = RecurrentLM.load("run")
    assert (model.config.mean_recurrence, model.config.backprop_depth) == (3, 2)

    flops = 6 * train.make_optimizer(s, model, 0, 1).flops()
    train_set = Dataset(s.data, "train", 50)
    for update in range(6):
        draws = train.draws_of(s, update)
        _, targets, _ = train_set.batch(s.seed, update, 0, 1, s.batch_size)
        labelled = (targets != IGNORE).double().mean().item()
        for steps in draws:
            flops += 4 * 50 * model.flops_per_token(steps, 50, True, labelled=labelled)
        logged = [read_log("run", key)[update + 1] for key in "nk"]
        assert logged == np.mean(draws, axis=0).tolist()
    assert read_json("run/step_000006/train.json")["flops"] == pytest.approx(flops, rel=1e-9)

    logs = read_log("run", "val")
    assert logs[3] != logs[6]
    measure = [*base, "--updates=0", "--init_from=run/step_000003"]
    run_script("train --out_dir=one", *measure)
    run_on_ranks("train --out_dir=two", *measure, world=2)
    assert read_log("one", "val")[0] == logs[3]
    assert read_log("two", "val")[0] == pytest.approx(logs[3], abs=1e-6)


def test_full_memory_is_met_in_the_warm_up_and_ends_in_one_line(base, monkeypatch):
    """The warm-up has the largest k, and the line names flags that help."""
    forward = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(RecurrentLM, "forward", forward)
    for k in (2, 9):  # the curriculum begins with a mean of 1, and ends at 3
        line = error_line("train", *base, f"--backprop_depth={k}", "--out_dir=run")
        assert "--activation_budget" in line
    assert [steps for (_, _, steps, *_), _ in forward.call_args_list] == [(1, 2), (1, 3)]

    on_a_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for full in MemoryError(), on_a_cpu:
        with pytest.raises(SystemExit, match="out of memory. Lower --batch_size"):
            common.cli(common.reading("file")(mock.Mock(side_effect=full)))


def test_no_updates_only_validate(corpus, base, unbroken):
    """--updates=0 only logs a checkpoint's mean loss over the labels of all data sets."""
    large = f"{corpus}/pretrain"
    shutil.copytree(large, "small")
    meta = read_json("small/meta.json")
    shard = np.load("small/val_000000.npy")[:, : 5 * 50].copy()
    meta["shards"]["val"] = [data.write_shard("small", "val_000000.npy", shard)]
    common.write_json("small/meta.json", meta)
    base = [*base, f"--data={large}:2,small:1", "--updates=0", f"--init_from={unbroken}"]
    assert "warm-up" not in run_script("train --train=core --out_dir=run", *base)
    assert not checkpoints("run")

    model = RecurrentLM.load(unbroken).double()
    total = labels = 0
    for folder, rows in ((large, 6), ("small", 5)):
        idx, targets = first_rows(Dataset(folder, "val", 50), rows)
        _, losses = model(idx, targets, steps=4, state=model.initial_state(rows, 50, 0))
        total += losses.sum()
        labels += (targets != -100).sum()
    assert abs(read_log("run", "val")[0]["4"] - total / labels) < 1e-5
    run_script("train --seed=1 --out_dir=seed1", *base)
    assert read_log("seed1", "val") == read_log("run", "val"), "rates are chosen by validation"


# --------------------------------------------------------------------------------------- evaluation
def test_gsm8k_is_asked_and_scored_as_in_the_paper():
    """Prompts, stops, extraction and scores match the harness's for the paper's task."""
    asked, *rows = map(json.loads, open(ORACLE / "gsm8k.jsonl"))
    assert make_prompt(asked["question"]) == asked["prompt"]
    assert list(STOPS) == asked["until"]

    for row in rows:
        text = cut_at_stops(row["output"], STOPS)
        assert text == row["cut"], row["why"]
        assert eval_gsm8k.flexible_extract(text) == row["flexible"], row["why"]
        assert eval_gsm8k.strict_extract(text) == row["strict"], row["why"]
        for metric, is_right in METRICS["cot"].items():
            for answer in (row["answer"], row["gold"], f"####{row['gold']} \n"):
                assert is_right(text, answer) == row[f"{metric}_correct"], row["why"]


# OUTPUT | REFERENCE; ...
RIGHT = """17 + 25 = 42 | 17 + 25 = 42; 18 | #### 18; $1,234.50 | 1234.5; \u22123 | -3; .5 | 0.5;
    paris.\n | Paris; caf\xe9 | cafe\u0301; No.5 | 5; so...5 | 5; $.75 | 0.75; 1.5e6 | 1,500,000;
    1500000 | 1.5E+6; 9e99999999999999999999 | 99999999999999999999; 3, 5, 7. | 3,5,7;
    58,500 | 58500; 5-3 | 3; room B-3 | 3; 007 | 007; it is -0 | 0; 0110. | 0110"""
WRONG = """it is 43. | 17 + 25 = 42; 1/4 | 3/4; it is .5 | 5; 35 | 3,5; They are 3, 5. | 3, 5;
    1234 | 12,34; June 5, 2024 | May 3, 2024; x = 5, y = 4 | x = 3, y = 4; x <= 5 | x >= 5;
    5 | x != 5; 110 | 0110; 7 | 007; -7 | -007; 110 | 0,110; 2134 | 02134; 7 | x = 07"""


@pytest.mark.parametrize("right, answers", [(True, RIGHT), (False, WRONG)])
def test_answers_to_plain_questions(right, answers):
    """A numeric reference is compared with the output's last number, any other as text."""
    for answer in answers.split(";"):
        output, reference = answer.split(" | ")
        assert same_answer(output, reference) == right, answer


def test_an_answer_of_words_is_scored_as_text(checkpoint, monkeypatch):
    """The summary of --template plain, from stored outputs, which another scorer scores anew."""
    Path("asked.jsonl").write_text("""{"question": "has", "answer": "so gets", "difficulty": "easy"}
        {"question": "so", "answer": 7, "difficulty": 2.0}
        {"question": "loses", "answer": "so gets", "difficulty": 10}
        {"question": "gets", "answer": "gets", "difficulty": "10 "}""")
    said = {"has": "so gets", "so": "7", "loses": "gets", "gets": "gets"}
    shutil.copytree(checkpoint, "run/step_000009")
    common.write_json("run/step_000009/train.json", {"update": 9, "flops": 10**9, "config": {}})

    def answer(decoder, tokenizer, prompts, *_):
        os.remove("run/step_000009/train.json")
        words = map(tokenizer.decode, prompts)
        return [(said[word], word == "so") for word in words]

    answer_batch = mock.Mock(side_effect=answer)
    monkeypatch.setattr(eval_gsm8k, "answer_batch", answer_batch)
    ask = "eval_gsm8k --model=run --data=asked.jsonl --steps=1 --template=plain"
    header, row = re.findall("^     . .*", run_script(ask), re.M)
    assert len(header) == len(row) and "     4     1 " in row  # n and cut

    summary = read_json("run/eval_asked.json")
    assert summary["settings"]["max_new_tokens"] == 2 + 8
    assert summary["training"] == {"update": 9, "flops": 10**9}
    (result,) = summary["results"]
    assert (result["value"], result["cut"]) == (0.75, 1)
    assert result["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    shares = [(level, share) for level, (share, *_) in result["by_difficulty"].items()]
    assert shares == [("2", 1.0), ("10", 0.5), ("easy", 1.0)]

    monkeypatch.setitem(METRICS["plain"], "accuracy", lambda *_: False)
    run_script(ask)
    assert read_json("run/eval_asked.json")["results"][0]["value"] == 0
    answer_batch.assert_called_once()


def scripted(model, ids):
    """A mock Decoder that generates these ids until ends() returns True, and must end so."""

    def generate(prompts, max_new_tokens, steps, ends, **options):
        for token in ids:
            yield 0, token
            if ends(0, token):
                return
        raise AssertionError("nothing ended the text")

    return SimpleNamespace(model=model, generate=generate)


def test_a_text_ends_at_any_end(checkpoint, speaker, monkeypatch):
    """Any id of config.ends or stop string ends a text. Answers lack it and control tokens."""
    model, tokenizer = sample.load_model(checkpoint)
    *words, _ = tokenizer.encode("has 1 so gets")
    control, end, after = tokenizer.encode("4 5 6")
    model.config.eos_token_id = [99, end, tokenizer.eos_id]
    monkeypatch.setattr(sample, "load_model", lambda *_: (model, tokenizer))
    for last in (end, tokenizer.eos_id):
        decoder = scripted(model, [*words, last, after])
        monkeypatch.setattr(sample, "Decoder", lambda *_, decoder=decoder: decoder)
        assert run_script(f"sample --model {checkpoint} --prompt=has") == " has 1 so\n"

    tokenizer.special["a control token"] = control
    spoken = Tokenizer.load(speaker)
    *chinese, _ = spoken.encode("A 漢字 B")
    for coder, ids, stop, answer in (
        (tokenizer, [*words, control, end, after], "x", "has 1 so"),
        (tokenizer, [*words, *tokenizer.encode("gets 2")], "so gets", "has 1 "),
        (spoken, chinese, "漢字", "A "),
    ):
        decoder = scripted(model, ids)
        assert sample.answer_batch(decoder, coder, [[5]], 30, [stop], 3) == [(answer, False)]
    decoder.generate = lambda *_, **__: iter([(0, words[0])])  # up to max_new_tokens
    assert sample.answer_batch(decoder, tokenizer, [[5]], 1, [], 3) == [("has", True)]


def test_a_hub_id_beside_a_folder(monkeypatch):
    """ORG/NAME is a folder if that exists, else a hub id, even if a folder ORG exists."""
    download = mock.Mock(side_effect=ConnectionError("offline"))
    monkeypatch.setattr(need("huggingface_hub"), "snapshot_download", download)
    shutil.copytree(ORACLE / "hf_llama", "org/here")
    run_script("surgery org/here m --feed_forward")
    download.assert_not_called()
    line = error_line("surgery org/there out --feed_forward")
    assert "no such folder" in line and "offline" in line


def test_one_place_decides_what_ends_a_text(corpus):
    """The parent's EOS and its tokenizer's end a text in a cut, in sample.py and in an export."""
    for i, (ends, wanted) in enumerate(((5, [5, 1]), ([6, 5], [5, 6, 1]), (None, 1), (1, 1))):
        save(small(eos_token_id=ends, n_prelude=4, n_core=0, n_coda=0), f"{i}/m", corpus)
        run_script(f"surgery {i}/m {i}/loop --shape=1,2,1")
        run_script(f"tools/export {i}/m {i}/hf")
        model, _ = sample.load_model(f"{i}/m")  # made before surgery.py decided
        for config in (load_config(f"{i}/loop"), model.config):
            assert config.eos_token_id == wanted
        assert read_json(f"{i}/hf/config.json")["eos_token_id"] == wanted
        for said, end in ((None, wanted), (0, 0)):  # 0 is an id, not a missing one
            common.write_json(f"{i}/hf/generation_config.json", {"eos_token_id": said})
            _, config = surgery.read_config(f"{i}/hf", [])
            assert config.eos_token_id == end


def test_questions(checkpoint, corpus, monkeypatch, capfd):
    """--limit draws questions, and a larger one asks only what is new; GSM8K is downloaded once."""
    body = (corpus / "test.jsonl").read_bytes()
    get = mock.Mock(return_value=SimpleNamespace(content=body, raise_for_status=lambda: None))
    monkeypatch.setattr("requests.get", get)
    answer_batch = mock.Mock(side_effect=lambda _, __, prompts, *___: [("1", False)] * len(prompts))
    monkeypatch.setattr(eval_gsm8k, "answer_batch", answer_batch)
    shutil.copytree(checkpoint, "m")
    ask = "eval_gsm8k --model=m --steps=1 --max_new_tokens=30 --batch_size=9999"
    drawn, rows = [], [json.loads(line) for line in body.splitlines()]
    for limit in (100, 100, 150):  # the second command has nothing left to ask
        run_script(ask, f"--limit={limit}")
        drawn.append({i for _, i, _ in answers_of("m/answers_eval_gsm8k.json")})
    get.assert_called_once()
    asked, more = [call.args[2] for call in answer_batch.call_args_list]
    assert (len(asked), len(more), len(drawn[2])) == (100, 50, 150) and drawn[0] < drawn[2]
    for part in range(5):  # of files whose rows go in cycles
        assert 10 < sum(i % 5 == part for i in drawn[0]) < 30

    encode = Tokenizer.load(checkpoint).encode
    room = 40 - 30  # the context without the new tokens
    wanted = [encode(make_prompt(rows[i]["question"]))[-room:] for i in drawn[0]]
    assert sorted(asked) == sorted(wanted)
    assert f"{len(rows)} prompts lose their beginning" in capfd.readouterr().err


@pytest.mark.parametrize("line, encoding, words", [
    ('{"question": "has 1 so", "answer": ["1"]}', "utf-8", "line 5 is not"),
    ('{"question": "\\ud83d", "answer": "1"}', "utf-8", "line 5 is not"),
    ('{"question": "has 1 so", "answer": " "}', "utf-8", "line 5 is not"),
    ('{"question": "has 1 so", "answer": "so 7 #### "}', "utf-8", "line 5 is not"),
    ('{"question": "has 1 so", "answer": "1"}', "utf-16", "damaged"),
])
def test_questions_that_are_none(line, encoding, words, checkpoint):
    """Questions and answers are text or numbers in UTF-8; others are refused, and nothing asked."""
    good = '{"question": "has 1 so", "answer": 1, "difficulty": " "}\n\n'
    Path("q.jsonl").write_text(good * 2 + line, encoding)
    said = error_line(f"eval_gsm8k --model {checkpoint} --data=q.jsonl --out=a.json")
    assert "q.jsonl: " in said and words in said
    assert not os.path.exists("answers_a.json")


def test_a_killed_evaluation_resumes(checkpoint, corpus):
    """A killed evaluation, and one on two ranks, end with the files of an uninterrupted one."""
    shutil.copy(corpus / "test.jsonl", "asked.jsonl")
    flags = "--template=plain --max_new_tokens=3 --batch_size=4 --limit=34"
    here = f"eval_gsm8k --model={checkpoint} --data=asked.jsonl {flags}"
    said = error_line(f"{here} --max_new_tokens=40 --out=unbroken.json")
    assert "context of 40" in said  # without an answer to keep
    for steps in ("1,32", "1"):  # r = 32 stays in the summary
        run_script(f"{here} --steps={steps} --out=unbroken.json")
    run_on_ranks(f"{here} --steps=1,32 --out=ranks.json", world=2)

    path = Path("answers_killed.json")
    processes = launch(f"{here} --steps=1,32 --out=killed.json")
    kill(processes, lambda: path.exists() and len(answers_of(path)) > 38)
    shutil.copytree(checkpoint, "moved")
    shutil.move("asked.jsonl", "moved.jsonl")
    there = f"eval_gsm8k --model=moved --data=moved.jsonl {flags}"
    run_script(f"{there} --steps=1,32 --out=killed.json")
    unbroken = Path("answers_unbroken.json")
    assert len(answers_of(unbroken)) == 2 * 34
    for out in "killed", "ranks":
        assert Path(f"answers_{out}.json").read_bytes() == unbroken.read_bytes()
        assert read_json(f"{out}.json")["results"] == read_json("unbroken.json")["results"]


def test_answers_to_something_else_are_set_aside(checkpoint, corpus, monkeypatch, capfd):
    """Answers of other weights, code, questions or flags are kept under another name, and named."""
    shutil.copytree(checkpoint, "m")
    Path("q.jsonl").write_text('{"question": "has 1", "answer": 1}')
    Path("p.jsonl").write_text('{"question": "has 2", "answer": 1}')
    ask = "eval_gsm8k --model=m --data=q.jsonl --template=plain --steps=1 --out=x.json"
    run_script(ask)
    code = common.code_of("model.py", "sample.py", "data.py")
    edited = mock.Mock(return_value=code | {"data.py": "edited"})
    for change, flags, words in (
        (None, "--data=p.jsonl", "prompts"),
        (lambda: save(small(context=40, seed=1), "m", corpus), "--data=p.jsonl", "weights"),
        (None, "--seed=1", "seed, prompts"),
        (lambda: monkeypatch.setattr(eval_gsm8k, "code_of", edited), "--seed=1", "data.py"),
        (None, "--seed=1 --max_new_tokens=8", "max_new_tokens"),
        (None, "--seed=1 --max_new_tokens=8 --template=cot", "template, stops, prompts"),
    ):
        before = Path("answers_x.json").read_bytes()
        if change:
            change()
        run_script(f"{ask} {flags}")
        assert f"because {words} changed since. " in capfd.readouterr().err
        assert before in [path.read_bytes() for path in Path().glob("answers_x.*.json")]
    Path("answers_x.json").write_text('{"notes": 1}')
    assert "holds something else" in error_line(ask)
    assert Path("answers_x.json").read_text() == '{"notes": 1}'


def test_two_evaluations_at_once_keep_all_answers(checkpoint, monkeypatch):
    """Those that another command gives at another r meanwhile stay."""
    Path("q.jsonl").write_text('{"question": "has 1", "answer": 1}')
    ask = f"eval_gsm8k --model={checkpoint} --data=q.jsonl --template=plain --out=x.json"

    def meanwhile(*asked):
        monkeypatch.setattr(eval_gsm8k, "answer_batch", sample.answer_batch)
        run_script(f"{ask} --steps=1")
        return sample.answer_batch(*asked)

    monkeypatch.setattr(eval_gsm8k, "answer_batch", meanwhile)
    run_script(f"{ask} --steps=4")
    assert [row["steps"] for row in read_json("x.json")["results"]] == [1, 4]
    assert len(answers_of(Path("answers_x.json"))) == 2


def test_answers_are_those_that_the_flags_ask_for(looped, monkeypatch):
    """An answer is what Decoder generates with these flags, up to a stop of the paper's prompt."""
    compile_parts = mock.Mock()
    monkeypatch.setattr(RecurrentLM, "compile_parts", compile_parts)
    monkeypatch.setattr(eval_gsm8k, "STOPS", ("ANY", "mis"))
    Path("asked.jsonl").write_text(json.dumps(ASKED[0]))

    def wanted(steps=3, seed=0, max_new_tokens=12, template="cot", dtype="float32"):
        model, tokenizer = sample.load_model(looped, dtype)
        ids = [1, *tokenizer.encode(make_prompt(ASKED[0]["question"], template))]
        events = Decoder(model).generate([ids], max_new_tokens, steps, seed=seed)
        text = tokenizer.decode([token for _, token in events])
        return text if template == "plain" else re.split("ANY|mis", text)[0]

    def answer(out, *flags):
        ask = f"eval_gsm8k --model={looped} --data=asked.jsonl --out={out}.json"
        run_script(f"{ask} --steps=3 --max_new_tokens=12", *flags)
        ((_, _, output),) = answers_of(f"answers_{out}.json")
        return output

    changes = {"steps": 1, "seed": 5, "max_new_tokens": 9, "template": "plain"}
    answers = {key: wanted(**{key: value}) for key, value in changes.items()}
    assert answers == {key: answer(key, f"--{key}={value}") for key, value in changes.items()}
    assert len({wanted(), *answers.values()}) == 5, "a flag changes nothing"
    assert answer("compiled", "--compile", "--dtype=bfloat16") == wanted(dtype="bfloat16")
    compile_parts.assert_called_once()
    assert read_json("compiled.json")["dtype"] == "bfloat16"


# ---------------------------------------------------------------------------------------- measuring
def test_bench_measures_what_it_says(checkpoint, monkeypatch):
    """bench.py reports the right speeds, on a mock clock that ticks once per recurrence."""
    ticks = itertools.chain([0], itertools.count(100))  # a slow warm-up
    run_core = RecurrentLM.run_core
    monkeypatch.setattr(RecurrentLM, "run_core", lambda *args: next(ticks) and run_core(*args))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    rows = []
    for command in ("train --context 8 --steps 1+1 --optimizer adamw --micro_batches 2",
                    "decode --prompt_tokens 4 --tokens 4 --steps 4"):
        said = run_script(f"bench {command} --model={checkpoint} --repeat=1 --compile=false")
        rows += json.loads(said.splitlines()[-1])["rows"]

    update, plain = rows
    # 2 recurrences for each micro-batch, and the clock at the end.
    tokens = 2 * 4 * 8
    assert update["tokens_per_s"] == tokens / (2 * 2 + 1)
    model = RecurrentLM.load(checkpoint)
    flops = tokens * model.flops_per_token((1, 1), 8, training=True)
    peak = 2 * 2048**3  # in a second: the clock at the end
    assert update["mfu"] == flops / (2 * 2 + 1) / peak
    # 4 recurrences for the prompt and for each of 4 tokens, and the clock at the end.
    assert plain["tokens_per_s"] == 4 / (4 + 4 * 4 + 1)
    uses = {"embed": 0, "prelude": 1, "adapter": 4, "core": 4, "coda": 1, "head": 1}
    sizes = model.num_params(matrices=True)
    read = 4 * sum(uses[part] * sizes[part] for part in uses) * plain["tokens_per_s"]
    assert plain["mbu"] == read / 2**31, "2 GB in a second"


# ----------------------------------------------------------------------------------------- mistakes
# Commands that end in one line, and words of that line. Their files: see mistaken_inputs().
MISTAKES = [
    ("surgery llama out", "--prelude"),
    ("surgery llama out --shape 4,4,4", "0-5"),
    ("surgery llama out --shape 1,2,1 --prelude 0", "--prelude: --shape chooses the layers"),
    ("surgery m out --shape 1,1,1", "SRC is already recurrent"),
    ("surgery llama out --shape 1,2,1 --untie", "--untie: only with --feed_forward"),
    ("surgery pointer out --feed_forward", "only a pointer of Git LFS"),
    ("data prepare --input web/*.parquet --tokenizer m --out out", "web/*.parquet"),
    ("data prepare --input test.jsonl --tokenizer gpt2 --out out", "tokenizer.json"),
    ("train --data=task --context=39 --out_dir=out --uptades=3", "--uptades=3"),
    ("train --config=tiny.toml --data=task --out_dir=out --train=norm|heads", "named 'heads'"),
    ("train --config=tiny.toml --data=task --out_dir=out --n_kv_head=4", "n_kv_head = 4"),
    ("train --config=tiny.toml --data=task --out_dir=out --n_embd=97", "head_dim = 48.5"),
    ("train --config=tiny.toml --data=task --out_dir=llama", "holds a model"),
    ("train --data=x --out_dir=out --n_embd=32 --n_ffn=64", "give --n_head, --n_prelude, or"),
    ("train --config=tiny.toml --init_from=x --n_core=2 --embed_scale=50",
     "--n_core: no effect with --init_from"),
    ("train --config=tiny.toml --adam_lr=0.3 --optimizer=adamw", "--adam_lr: no effect"),
    ("train --config=tiny.toml --data=test.jsonl --out_dir=out", "not a finished data set"),
    ("train --config=tiny.toml --data=task:0.5 --out_dir=out", "whole numbers above 0"),
    ("sample --prompt 3 --model llama", "surgery.py llama OUT"),
    ("sample --prompt 3 --model damaged", "model.safetensors: damaged"),
    ("sample --prompt 3 --model m --top_k=5", "--top_k: needs a --temperature"),
    ("sample --trace --model m --temperature 1 --tokens=9", "--tokens, --temperature: no effect"),
    ("eval_gsm8k --model m --data test.jsonl --out test.jsonl", "over the questions"),
    ("surgery x.gguf out --feed_forward", "python -m tools.from_gguf x.gguf"),
    ("tools/plot m/config.json", "nothing to draw"),
    ("tools/block_influence m out --text test.jsonl --shape 1,1,1", "not an ordinary model"),
]


@pytest.mark.parametrize("command, words", MISTAKES)
def test_mistakes_end_in_one_line(command, words, mistaken_inputs):
    """Each mistake is reported in one line that contains these words, and no result is written."""
    for path in mistaken_inputs.iterdir():
        Path(path.name).symlink_to(path)
    assert words in error_line(command)
    assert not os.path.exists("out")


MUTANTS = [  # a forker's mistakes, each with its error
    (lambda *args, **options: {}["hiden_size"], KeyError),
    (lambda *args, **options: torch.ones(2) @ torch.ones(3), RuntimeError),
    (lambda *args, **options: __import__("modle"), ModuleNotFoundError),
]


@pytest.mark.parametrize("mistake, error", MUTANTS)
@pytest.mark.parametrize("function, command", [
    (surgery.from_hf, "surgery {llama} out --feed_forward"),
    (surgery.tensor_names, "surgery {llama} out --feed_forward"),
    (RecurrentLM.fill, "sample --model={model} --prompt=has"),
    (RecurrentLM.rope, "sample --model={model} --prompt=has"),
    (Optimizer.step, "train {base} --out_dir=out"),
    (train.read_settings, "train {base} --out_dir=out"),
    (data.document, "data prepare --input={asked} --tokenizer={model} --field=question --out=out"),
    (data.fill_rows, "data prepare --input={asked} --tokenizer={model} --field=answer "
                     "--prompt=question --out=out"),
    (same_answer, "eval_gsm8k --model={model} --data={asked} --template=plain --limit=1 --steps=1 "
                  "--max_new_tokens=1 --out=out.json"),
])
def test_a_bug_keeps_its_traceback(function, command, mistake, error, llama, checkpoint, corpus,
                                   base, monkeypatch):
    """A mistake in our code, or a fork's, ends in a traceback whose last line is the mistake."""
    monkeypatch.setattr(inspect.unwrap(function), "__code__", mistake.__code__)
    inputs = {"llama": llama, "model": checkpoint, "base": " ".join(base)}
    with pytest.raises(error) as caught:
        outcome(command.format(asked=f"{corpus}/test.jsonl", **inputs))
    assert caught.traceback[-1].frame.code.raw is mistake.__code__


# ------------------------------------------------------------------------------------- the terminal


def test_closed_pipes(checkpoint, corpus):
    """If a pipe is closed or cannot encode "±", results are complete, under `python -OO`, too."""
    env = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    read, write = os.pipe()
    os.close(read)
    flags = f"--data={corpus}/test.jsonl --steps=1 --limit=1 --max_new_tokens=2 --out=a.json"
    command = [sys.executable, "-OO", ROOT / "eval_gsm8k.py", "--model", checkpoint, *flags.split()]
    done = subprocess.run(command, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 0 and "rror" not in done.stderr, done.stderr
    assert read_json("a.json")["results"]


SCRIPTS = [path for folder in (ROOT, ROOT / "tools") for path in sorted(folder.glob("*.py"))
           if "\n    cli(main" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_python_that_is_too_old(script, monkeypatch):
    """Each script names the Python that it needs, before anything fails."""
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    monkeypatch.setitem(sys.modules, "tomllib", None)  # as in 3.10
    monkeypatch.delitem(sys.modules, "common")
    with pytest.raises(SystemExit, match="needs Python 3.11"):
        runpy.run_path(str(script), run_name="__main__")


def test_no_compiler(checkpoint, monkeypatch, capfd):
    """Without a working compiler, scripts go on uncompiled and say why."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.getcwd())  # which holds nothing
    torch.compiler.reset()  # forgets what other tests compiled
    with torch._inductor.config.patch("cpp.cxx", ("/bin/false",)):
        run_script(f"sample --model={checkpoint} --compile --prompt=has --tokens=2")
    torch.compiler.set_stance("default")
    said = capfd.readouterr().err
    assert re.search("warning: .*C[+][+] compiler.*without torch.compile", said), said


def test_prompts_from_the_terminal(checkpoint, monkeypatch, capfd):
    """Without --prompt, each line is a prompt, answered alone; a mistake ends only its own."""
    ask = f"sample --model {checkpoint} --tokens=2 --steps=2,4"
    answers = [run_script(f"{ask} --prompt='{prompt}'") for prompt in ("has 1", "so")]
    capfd.readouterr()
    typed = b"has 1\n\ncaf\xe9\nso"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    assert run_script(ask) == "".join(answers)
    errors = capfd.readouterr().err
    assert re.findall("--- r = ([0-9]+)", errors) == ["2", "4"] * 2
    assert errors.count("lone surrogate") == 1


def test_trace_is_what_the_model_says(speaker, corpus):
    """--trace shows what model(idx, steps=r) predicts at each r, after every token."""
    loud = small(seed=2, context=40, state_std=1.0)  # another choice at each r
    for p in loud.core.parameters():
        p.data *= 3
    save(loud, "loud", corpus)
    stars = 0
    for folder, prompt, steps, *flags in (
        ("loud", "has 7 loses 4 times 3 gets 2 gets 1", [1, 2, 3, 6], "--steps=1,2,3,6"),
        (speaker, "na\u00efve 漢字 🙂", [0]),  # an ordinary model: one column
    ):
        model = RecurrentLM.load(folder)
        tokenizer = Tokenizer.load(folder)
        ask = f"sample --trace --seed=3 --model={folder} --prompt='{prompt}'"
        header, *lines, last = run_script(ask, *flags).splitlines()
        ids = tokenizer.encode(prompt, bos=True)
        state = model.initial_state(1, len(ids), 3)
        logits = [model(torch.tensor([ids]), steps=r, state=state)[0][0] for r in steps]
        highest, tokens = torch.stack(logits).softmax(-1).max(-1)  # both (r, position)
        for token, line, ps, choices in zip(ids, lines, highest.T, tokens.T, strict=True):
            assert line.split()[0] == sample.token_text(tokenizer, token)
            cells = re.findall(r"(\d+)% (\S+)", line)
            for (percent, text), p, choice in zip(cells, ps, choices, strict=True):
                star = "" if choice == choices[-1] else "*"
                assert text == sample.token_text(tokenizer, choice.item()) + star
                assert abs(int(percent) - 100 * p) < 0.501
                stars += len(star)
        same = [f"{n} of {len(ids)}" for n in (tokens == tokens[-1]).sum(1).tolist()]
        assert last.split() == f"same as r = {steps[-1]} {' '.join(same)}".split()
    assert stars > 5


def test_characters_are_shown_whole(speaker, monkeypatch):
    """sample.py streams only whole characters."""
    text = "naïve 漢字 👍🏽 na e\u0301"
    model, tokenizer = sample.load_model(speaker)
    decoder = scripted(model, [*tokenizer.encode(text), tokenizer.eos_id])
    shown = []
    monkeypatch.setattr(sample, "Decoder", lambda *_: decoder)
    monkeypatch.setattr(sample, "print", lambda part, **_: shown.append(part), raising=False)
    run_script(f"sample --model {speaker} --prompt=A")
    assert "".join(shown) == f" {text}"
    assert len(shown) > 9
    assert not any("\ufffd" in part for part in shown)


# ------------------------------------------------------------------------------------------ the GPU
# Compare a GPU with the CPU: LOOPGRAFT_GPU=1 python -m pytest -q -k gpu
# To torch, AMD's GPUs are "cuda", too. LOOPGRAFT_GPU=cpu runs these tests on a CPU, to test them.
DEVICE = "cpu" if GPU == "cpu" else "cuda"
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: LOOPGRAFT_GPU=1 python -m pytest")


def gpu_model(device, dtype):
    """A random model with heads of 64 on a device, and idx, targets and a state for it."""
    model = small(vocab_size=512, n_embd=128, n_head=4, n_kv_head=2, head_dim=64, n_ffn=352,
                  context=512)
    generator = torch.Generator().manual_seed(0)
    idx = torch.randint(512, (4, 129), generator=generator)
    state = torch.randn(4, 128, 128, generator=generator)
    model.to(device, dtype)
    idx = idx.to(device)
    return model, idx[:, :-1], idx[:, 1:], state.to(device)


@needs_gpu
def test_gpu_updates_like_the_cpu():
    """Logits and an update match the CPU's, with its precision, and without slow attention."""
    def update(device, dtype):
        """The logits before an update, at r = 1, 4 and 32, and the change of all weights by it."""
        model, idx, targets, state = gpu_model(device, torch.float32)
        masters = {name: p.data.clone() for name, p in model.named_parameters()}
        before = torch.cat([w.flatten() for w in masters.values()])
        model.to(dtype)
        logits = [model(idx, steps=r, state=state)[0].detach() for r in (1, 4, 32)]
        settings = Settings(lr=0.01, adam_lr=0.01, weight_decay=0.0)
        optimizer = train.make_optimizer(settings, model, 0, 1, masters)
        _, losses = model(idx, targets, (4, 4), state)
        losses.mean().backward()
        optimizer.accumulate()
        optimizer.step(optimizer.reduce().item())
        after = torch.cat([piece.master.flatten() for piece in optimizer.own])
        return torch.stack(logits).cpu(), (after - before).cpu()

    exact_logits, exact_change = update("cpu", torch.float32)

    def errors(device, dtype):
        logits, change = update(device, dtype)
        angle = 1 - F.cosine_similarity(change, exact_change, 0).item()
        return relative_error(logits, exact_logits), angle

    logits_error, angle = errors(DEVICE, torch.float32)
    assert logits_error < 1e-4 and angle < 0.02
    on_cpu = errors("cpu", torch.bfloat16)
    for error, cpu_error in zip(errors(DEVICE, torch.bfloat16), on_cpu):
        assert error < 1.5 * cpu_error + 0.005
    for dtype in (torch.bfloat16, torch.float32):
        model, *_ = gpu_model(DEVICE, dtype)
        assert not slow_attention(model), dtype


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_decodes_like_the_cpu(compiled):
    """GPU decoding, eager or recorded, gives the CPU's tokens for batches in turn."""
    on_cpu, *_ = gpu_model("cpu", torch.float32)
    model, *_ = gpu_model(DEVICE, torch.float32)
    on_gpu = Decoder(model, compile=compiled)
    for lengths, r in ((4, 19, 39), 4), ((250,), 4), ((4, 19, 39), 2), ((300, 5), 4):
        prompts = [list(range(1, n + 1)) for n in lengths]
        limits = [30, 100, 100][:len(prompts)]
        wanted = generate_rows(Decoder(on_cpu), prompts, limits, r)
        assert generate_rows(on_gpu, prompts, limits, r) == wanted
    sampled = [generate_rows(on_gpu, prompts, limits, 4, temperature=0.8, top_k=9) for _ in "ab"]
    assert sampled[0] == sampled[1] != wanted


@needs_gpu
def test_gpu_run_resumes(base):
    """A compiled run that was killed, or uses two GPUs, ends with the loss of an unbroken run."""
    base = [*base, "--dtype=bfloat16", "--compile=true", "--updates=30", "--save_every=10",
            "--eval_rows=27"]
    run_script("train --out_dir=unbroken", *base)
    kill(launch("train --out_dir=killed", *base), lambda: len(read_log("killed", "loss")) > 15)
    run_script("train --out_dir=killed", *base)
    runs = ["unbroken", "killed"]
    if DEVICE == "cuda" and torch.cuda.device_count() > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        subprocess.run([*command, ROOT / "train.py", *base, "--out_dir=two"], check=True)
        runs.append("two")
    start = read_log("unbroken", "val")[0]["4"]
    ends = [read_log(run, "val")[30]["4"] for run in runs]
    assert max(ends) < start - 0.1
    assert ends == pytest.approx([ends[0]] * len(runs), abs=0.02)


# ------------------------------------------------------------------------------------- the mock GPU
@pytest.fixture(scope="session", autouse=True)
def simulation(request, tmp_path_factory):
    """Start fake_gpu.py, a minute of work, in a process that runs beside the other tests."""
    asked = any("hidden_waits" in item.name for item in request.session.items)
    if not asked or not shutil.which("g++") or torch.version.cuda or torch.version.hip:
        yield None
        return

    import fake_gpu

    folder = tmp_path_factory.mktemp("card")
    small(vocab_size=512, context=512).save(folder / "model")
    data.copy_tokenizer(request.getfixturevalue("speaker"), folder / "model")
    corpus = request.getfixturevalue("corpus")
    simulate = f"import fake_gpu; fake_gpu.simulate('{corpus}', 'model')"
    lines = f"{fake_gpu.write_driver(folder)}\nLD_PRELOAD=$PWD/driver.so exec {sys.executable} -c "
    with beside_the_tests(lines + shlex.quote(simulate), folder) as output:
        yield output


def test_right_device_and_no_hidden_waits(simulation):
    """On a mock GPU, tensors share one device, and the host waits only where fake_gpu.py says."""
    if not simulation:
        pytest.skip("needs a C++ compiler and torch for CPUs; with a GPU use LOOPGRAFT_GPU=1")
    simulation()


def test_a_recorded_step_gives_the_same_text(monkeypatch):
    """Steps, recorded once of each kind and replayed as CUDA would, give the same texts."""
    import fake_gpu

    graphs = fake_gpu.record_on_a_cpu(monkeypatch)
    model = decode_model(context=600)
    decoder = Decoder(model)
    decoder.on_gpu = decoder.recording = True
    decoder.chunk = 256
    for lengths, limits, r, recorded in (
        ([9], [12], 3, 1),
        ([5], [20], 3, 0),              # the same kind of step
        ([9], [12], 2, 1),              # another r
        ([250], [9], 3, 2),             # a larger cache, without graphs; it reads 256, then 512
        ([3, 5, 7], [9, 9, 4], 3, 2),   # 4 rows, then 2
        ([8, 6, 7, 8], [9] * 4, 3, 0),
    ):
        before = len(graphs)
        prompts = random_prompts(*lengths)
        wanted = [model.generate(*asked, r) for asked in zip(prompts, limits)]
        assert generate_rows(decoder, prompts, limits, r) == wanted
        assert len(graphs) - before == recorded, lengths
    sampled = {"temperature": 0.8, "top_k": 5, "seed": 3}
    wanted = generate_rows(Decoder(model), [[1, 2, 3]], [30], 3, **sampled)
    assert generate_rows(decoder, [[1, 2, 3]], [30], 3, **sampled) == wanted
