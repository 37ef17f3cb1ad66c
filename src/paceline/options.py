"""How a model is run, as its user says it."""

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal, get_args

from paceline.engine.config import check_timeout
from paceline.errors import InputError
from paceline.executors.native import KVDType
from paceline.executors.quantize import Quantize
from paceline.machine import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is run. What is None is chosen by the machine and the model."""

    device: str = "cpu"
    """``cpu``: our own kernels. ``cuda``, ``cuda:1``: PyTorch on a GPU. ``torch:cpu``: PyTorch on the CPU, to compare
    with. What is not ``cpu`` needs the extra ``paceline[torch]``."""
    max_model_len: int | Literal["auto"] | None = None
    """Longest sequence in tokens; None: the model's own context; auto: that, or less if the KV memory holds less."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    kv_memory: int | None = None
    """Bytes of the KV cache; None: a quarter of the free memory, capped at what max_num_seqs full contexts need."""
    kv_dtype: KVDType = "f16"
    quantize: Quantize | None = None
    """Quantizes the matrices that the file has as floats (F32, F16, BF16), to 8 or 4 bits, while it is loaded; what is
    quantized already stays as it is. On the CPU alone. Embeddings and head get 8 bits."""
    threads: int | None = None
    """None: one per usable core."""
    chat_template: Path | str | None = None
    """A jinja file instead of the model's own template."""
    template_date: date | None = None
    """The date that chat templates see and may write into the prompt; None: today's."""
    enable_prefix_caching: bool = True
    max_waiting: int | None = None
    """Requests that may wait to be scheduled; more are refused. None: any number."""
    request_timeout: float | None = None
    """Seconds after which a request is given up, if it does not say itself; None: never."""
    target_itl: float | None = None
    """Milliseconds between two tokens of a request that prompts of others should not exceed; None: prompts are computed
    as fast as can be."""
    prompt_lookup_tokens: int = 0
    """Longest proposal of prompt lookup, in tokens: what followed the last few tokens where they came before is checked
    in one step. The output stays the same. 0: none."""

    def __post_init__(self) -> None:
        """Raises InputError: a value of the wrong type, or out of range."""
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_memory", "threads"):
            value = getattr(self, name)
            optional = self.__dataclass_fields__[name].default is None
            if (value is None and optional) or (name == "max_model_len" and value == "auto"):
                continue
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; a positive integer is needed", param=name)
        if not re.fullmatch(r"cpu|cuda(:\d+)?|torch:cpu", self.device):
            raise InputError(f"device is {self.device!r}; there are cpu, cuda, cuda:N and torch:cpu", param="device")
        kv_dtypes = get_args(KVDType) if self.native else ("f16", "f32")
        if self.kv_dtype not in kv_dtypes:
            raise InputError(
                f"kv_dtype is {self.kv_dtype!r}; on the device {self.device} there are {', '.join(kv_dtypes)}",
                param="kv_dtype",
            )
        self._check_quantize()
        if not (self.template_date is None or isinstance(self.template_date, date)):
            raise InputError(
                f"template_date is {self.template_date!r}; a datetime.date is needed", param="template_date"
            )
        self._check_traffic()
        cores = usable_cores()
        if self.threads is not None and self.threads > cores:
            raise InputError(
                f"threads is {self.threads}, but this process may use {cores} core{'s' if cores > 1 else ''}: "
                "more threads than cores only wait for each other",
                param="threads",
            )

    def _check_traffic(self) -> None:
        for name in ("max_waiting", "prompt_lookup_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise InputError(f"{name} is {value!r}; a number of at least 0 is needed", param=name)
        target = self.target_itl
        if target is not None and not (isinstance(target, int | float) and target > 0):
            raise InputError(f"target_itl is {target!r}; milliseconds above 0 are needed", param="target_itl")
        if self.request_timeout is not None:
            check_timeout("request_timeout", self.request_timeout)

    def _check_quantize(self) -> None:
        if self.quantize is not None and self.quantize not in get_args(Quantize):
            raise InputError(
                f"quantize is {self.quantize!r}; there are {', '.join(get_args(Quantize))}", param="quantize"
            )
        if self.quantize is not None and not self.native:
            raise InputError(
                f"quantize is {self.quantize}, but on the device {self.device} PyTorch computes with floats: it would "
                "cost quality and save nothing; leave it out, or use the device cpu",
                param="quantize",
            )

    @property
    def native(self) -> bool:
        """It runs on our own kernels, not on PyTorch."""
        return self.device == "cpu"

    @property
    def used_threads(self) -> int:
        """Computing threads on the CPU."""
        return self.threads or usable_cores()
