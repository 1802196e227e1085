"""
Convert a .gguf file to a folder in Hugging Face layout, for surgery.py. transformers reads the file
and dequantizes its weights.

    pip install transformers accelerate gguf
    python -m tools.from_gguf FILE.gguf OUT
    python surgery.py OUT LOOP --shape 13,4,13

The weights are float32; or bfloat16, if the file has bfloat16 and that holds every weight exactly.
"""
from pathlib import Path

import torch
from safetensors.torch import save_file

from common import Parser, UserError, cli, new_folder, opening, write_atomically, write_json


def convert(path, out):
    """
    Convert the .gguf file `path` to a new folder `out`. Raises UserError if it is corrupt or not
    supported.
    """
    import gguf
    import transformers
    transformers.logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        stored = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ValueError as e:
        one_line = " ".join(str(e).split())
        raise UserError(f"{path}: damaged, or not supported by transformers ({one_line:.200})")
    quantized = stored - {"F32", "F16", "BF16"}
    if quantized:
        print("note: what quantization lost is not restored:", *quantized)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    if "BF16" in stored and all(t.equal(t.bfloat16().float()) for t in weights.values()):
        weights = {name: t.bfloat16() for name, t in weights.items()}
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # the weights are dequantized
    with write_atomically(out) as folder:
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
        write_json(folder / "config.json", config)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    print(f"wrote {out}")


def main():
    parser = Parser(usage="python -m tools.from_gguf FILE.gguf OUT", description=opening(__doc__))
    flag = parser.add_argument
    flag("file", metavar="FILE.gguf", type=Path)
    flag("out", metavar="OUT", type=new_folder, help="a new folder")
    args = parser.parse_args()
    convert(args.file, args.out)


if __name__ == "__main__":
    cli(main)
