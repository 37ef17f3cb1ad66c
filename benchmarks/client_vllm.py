"""vLLM's own load generator (``vllm bench serve``), run by benchmarks/peers in vLLM's environment.

    client_vllm.py URL MODEL FOLDER    one JSON object per concurrency

128 random tokens in, 64 out, greedy, two requests for each place (and at least five). In one process: importing vLLM
takes longer than the load.
"""

import argparse
import contextlib
import json
import os
import random
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def arguments(url: str, model: str, tokenizer: str, concurrency: int) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--model": model,
        "--tokenizer": tokenizer,
        "--dataset-name": "random",
        "--random-input-len": 128,
        "--random-output-len": 64,
        "--num-prompts": max(2 * concurrency, 5),
        "--max-concurrency": concurrency,
        "--temperature": 0,
        # llama-server closes connections that were idle for some seconds, also just when one is used again.
        "--header": "Connection=close",
        "--seed": random.randrange(2**31),
    }
    words = [str(word) for option in options.items() for word in option]
    return parser.parse_args([*words, "--ignore-eos", "--disable-tqdm", "--save-detailed"])


for size in map(int, os.environ.get("PEERS_CONCURRENCY", "1,8,32").split(",")):
    with contextlib.redirect_stdout(sys.stderr):
        result = main(arguments(*sys.argv[1:], size))
    figures = {
        name: result[name] for name in ("completed", "failed", "output_throughput", "median_ttft_ms", "median_tpot_ms")
    }
    # Some are tracebacks, whose last line has the reason.
    reasons = sorted({error.strip().splitlines()[-1] for error in result["errors"] if error.strip()})
    print(json.dumps({"concurrency": size, **figures, "reasons": reasons}), flush=True)
