"""OpenVINO GenAI's continuous batching on a GGUF file, run by benchmarks/peers in an environment of its own.

    offline_openvino.py decode|prefill FILE.gguf    one JSON object per measurement

A whole run minus a run of one token is the decode time, as the pipeline tells no steps apart.
"""

import json
import os
import random
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai

PROMPT, NEW = int(os.environ.get("PEERS_PROMPT", "128")), int(os.environ.get("PEERS_NEW", "64"))
BATCHES = [int(size) for size in os.environ.get("PEERS_BATCH", "1,8,32").split(",")]
REPEAT = int(os.environ.get("PEERS_REPEAT", "3"))


def main() -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    threads = int(os.environ["PEERS_THREADS"])
    pipeline = genai.LLMPipeline(sys.argv[2], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)
    seconds(pipeline, 1, 8)
    if sys.argv[1] == "decode":
        for batch in BATCHES:
            first, whole = seconds(pipeline, batch, 1), seconds(pipeline, batch, NEW + 1)
            print(json.dumps({"pl": batch, "speed_tg": batch * NEW / (whole - first)}), flush=True)
    else:
        speeds = [PROMPT / seconds(pipeline, 1, 1) for _ in range(REPEAT)]
        print(json.dumps({"samples_ts": speeds}), flush=True)


def seconds(pipeline: genai.LLMPipeline, batch: int, new: int) -> float:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
    ids = np.array([[random.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(batch)], dtype=np.int64)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    start = time.perf_counter()
    pipeline.generate(inputs, config)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
