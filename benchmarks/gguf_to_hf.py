"""Dequantizes a GGUF file into a float32 Hugging Face folder for vLLM, run by benchmarks/peers in vLLM's environment.

gguf_to_hf.py FILE.gguf FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    path, folder = Path(sys.argv[1]).resolve(), sys.argv[2]
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    fields = AutoConfig.from_pretrained(**where).to_dict()
    for name in ("quantization_config", "_name_or_path"):
        fields.pop(name, None)
    # A model of its own: the one from the file remembers that it was quantized, and would be saved as such.
    plain = type(model)(type(model.config)(**fields))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
