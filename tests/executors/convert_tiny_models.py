"""llama.cpp's convert_hf_to_gguf.py on several folders in one process: python convert_tiny_models.py LLAMA_CPP JOBS.

JOBS is JSON, a list of the converter's arguments each. The tensors are the converter's business alone; patched is only
where the vocabulary comes from, since it knows tokenizers by the hashes of the real models', and Mistral's window, for
which GGUF has a key but the converter does not write it.
"""

import json
import sys
from typing import Any


def main(llama_cpp: str, jobs: list[list[str]]) -> None:
    sys.path.insert(0, llama_cpp)
    import convert_hf_to_gguf as converter
    from conversion.base import TextModel
    from conversion.llama import LlamaModel

    def set_llama_parameters(model: LlamaModel) -> None:
        plain_parameters(model)
        if model.hparams.get("sliding_window"):
            model.gguf_writer.add_sliding_window(model.hparams["sliding_window"])

    plain_parameters = LlamaModel.set_gguf_parameters
    LlamaModel.set_gguf_parameters = set_llama_parameters
    TextModel.get_vocab_base = _vocabulary
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    for job in jobs:
        sys.argv = ["convert_hf_to_gguf.py", *job]
        converter.main()


def _vocabulary(model: Any) -> tuple[list[str], list[int], str]:
    tokens = list(json.loads((model.dir_model / "tokenizer.json").read_text())["model"]["vocab"])
    normal = 1
    return tokens, [normal] * len(tokens), "gpt-2"


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
