"""The options with which several commands say what model is run, and how: one wording for all of them."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

ModelName = Annotated[
    str, typer.Argument(help="Catalog name, path of a GGUF file, hf:owner/repo[:file] or ollama:name.")
]
ServedModelName = Annotated[
    list[str] | None, typer.Option(help="Name that requests use; repeatable. Default: the model's own.")
]
SystemPrompt = Annotated[str | None, typer.Option(help="System prompt for conversations that bring none.")]
ChatTemplateFile = Annotated[
    Path | None, typer.Option(help="Jinja chat template instead of the model's.", exists=True, dir_okay=False)
]
TemplateDate = Annotated[
    datetime | None,
    typer.Option(metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help="What chat templates take for today."),
]
Device = Annotated[
    str, typer.Option(help="cpu (our own kernels), cuda or cuda:1 (PyTorch on a GPU), torch:cpu (to compare with).")
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        help="Longest prompt plus answer, in tokens. Default: the model's own context; "
        "auto: that, or less if the KV cache holds less."
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Most requests computed at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Most tokens computed in one step.")]
KVMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the KV cache, such as 2GiB. Default: a quarter of the free memory, at most what "
        "--max-num-seqs full contexts need."
    ),
]
KVDType = Annotated[Literal["f16", "f32", "int8"], typer.Option(help="Number type of the KV cache.")]
Quantize = Annotated[
    Literal["q8", "q4"] | None,
    typer.Option(help="Quantize matrices that the file has as floats while loading; embeddings and head to q8."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Computing threads. Default: one per core.")]
PrefixCaching = Annotated[
    bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse the KV of prompts that begin alike.")
]
PromptLookup = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        metavar="TOKENS",
        help="Speculate: check up to so many tokens at once that followed the same words earlier in the text. "
        "The output stays the same; editing gets faster while few requests run. 0: off.",
    ),
]
