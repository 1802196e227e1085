"""The inputs that several tests share. Nothing changes them."""
import os
import shutil
import signal
import sys
from pathlib import Path

# First, because this hides any GPU:
from helpers import ROOT, RUN, beside_the_tests, copy_scripts, run_script, save, small

import pytest
import sentencepiece

import common
from common import read_json
from runs.tiny_corpus import tiny


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run each test in its own empty folder, with the usual signal handlers (not nohup's)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # no test cuts the power
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The running counts of tiny_corpus.py, with 1,000 training rows instead of 50,000."""
    folder = tmp_path_factory.mktemp("corpus") / "tiny"
    tiny(str(folder), "counts", rows=1000)
    return folder


@pytest.fixture(scope="session")
def checkpoint(corpus, tmp_path_factory):
    """A random model with the corpus's tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "m"
    save(small(context=40), folder, corpus)
    return folder


@pytest.fixture(scope="session")
def llama(corpus, tmp_path_factory):
    """A random Llama of 6 layers in transformers' layout, with the corpus's tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    save(small(n_prelude=6, n_core=0, n_coda=0), folder / "ours", corpus)
    run_script("tools/export", folder / "ours", folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="session")
def speaker(tmp_path_factory):
    """A random Llama of 5 layers with a SentencePiece tokenizer that has byte fallback."""
    folder = tmp_path_factory.mktemp("speaker")
    model = small(vocab_size=512, n_prelude=5, n_core=0, n_coda=0, bos_token_id=1, eos_token_id=2,
                  context=512)
    # Bytes are never the likeliest token: libraries decode an incomplete character differently.
    model.head.weight.data[:259] = 0
    model.save(folder)
    lines = (ROOT / "LICENSE").read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(  # with the settings of Llama's tokenizer
        sentence_iterator=iter(lines[4:]),  # without the names, which a fork may change
        model_prefix=folder / "tokenizer",
        vocab_size=512,
        minloglevel=2,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    return folder


@pytest.fixture(scope="session")
def base(corpus):
    """Arguments of a short run of 12 updates, without --out_dir."""
    return [*RUN, f"--data={corpus}/pretrain"]


@pytest.fixture(scope="session")
def unbroken(base, tmp_path_factory):
    """The folder of that run, trained without an interruption."""
    folder = tmp_path_factory.mktemp("run") / "unbroken"
    run_script("train", *base, f"--out_dir={folder}")
    return folder


@pytest.fixture(scope="session")
def looped(speaker, tmp_path_factory):
    """A looped model whose answers depend on r and on the noise, and whose prompts begin in BOS."""
    folder = tmp_path_factory.mktemp("looped") / "m"
    flags = "--shape=2,2,1 --adapter_init=torch --mean_recurrence=3"
    run_script("surgery", speaker, folder, *flags.split())
    config = read_json(folder / "config.json")
    common.write_json(folder / "config.json", config | {"state_std": 3.0})
    return folder


@pytest.fixture(scope="session")
def mistaken_inputs(corpus, llama, checkpoint, tmp_path_factory):
    """A folder with the inputs of MISTAKES: good ones, and others with one thing wrong."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "llama").symlink_to(llama)
    (folder / "m").symlink_to(checkpoint)
    (folder / "task").symlink_to(corpus / "task")
    (folder / "test.jsonl").symlink_to(corpus / "test.jsonl")
    shutil.copytree(checkpoint, folder / "damaged")
    os.truncate(folder / "damaged" / "model.safetensors", 10_000)
    os.mkdir(folder / "pointer")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 499723\n"
        Path(folder, "pointer", name).write_text(text)
    settings = (ROOT / "config/tiny.toml").read_text()
    (folder / "tiny.toml").write_text(settings.replace("context = 54", "context = 39"))
    return folder


@pytest.fixture(scope="session", autouse=True)
def shells(request, tmp_path_factory):
    """Run tiny.sh where an older version has been, then gpu.sh with a `python` that often fails."""
    asked = "end_to_end", "some_fail"
    if not any(item.name.endswith(asked) for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("shells")
    copy_scripts(folder)
    Path(folder, "fails").write_text(f"""#!/bin/bash
[[ "$*" == *"--batch_size "[1268]* ]] && echo boom && exit 3
exec {sys.executable} "$@"
""")
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = f"""PATH='{path}'
mkdir -p out/tiny-quick-seed5/data && touch out/tiny-quick-seed5/data/meta.json
bash runs/tiny.sh --quick --seed 5
install fails python
! bash runs/gpu.sh --cpu --train --decode"""
    with beside_the_tests(lines, folder) as output:
        yield output, folder
