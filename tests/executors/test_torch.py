"""What is the PyTorch executor's own: types, devices, groups of queries; the contract's tests cover the rest."""

import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ExecutorError, InputError
from paceline.executors.native import NativeExecutor
from paceline.executors.torch import step as torch_step
from paceline.executors.torch.executor import TorchExecutor
from paceline.executors.torch.model import TorchModel
from paceline.models.quants import QuantType
from paceline.models.spec import ModelWeights
from tests.executors.batches import Row, Sequence, logits_of_all, make_batch
from tests.executors.float64_model import reference_logits
from tests.executors.tiny import tiny_spec, tiny_weights
from tests.executors.tiny_specs import TINY_SPECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")

IDS = np.random.default_rng(3).integers(0, 150, 100).tolist()
TABLE = [9, 2, 7, 4]


def executor(weights: ModelWeights | None = None, **options: object) -> TorchExecutor:
    settings: dict[str, object] = {"num_blocks": 16, "max_model_len": 256, "kv_dtype": "f32"}
    return TorchExecutor(weights or tiny_weights(tiny_spec()), **(settings | options))  # type: ignore[arg-type]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("kind", [QuantType.Q4_1, QuantType.Q8_0, QuantType.F16])
def test_stored_weights_are_used_exactly(kind: QuantType) -> None:
    weights = tiny_weights(tiny_spec(), kind)
    expected = reference_logits(weights, IDS)
    assert np.abs(logits_of_all(executor(weights), IDS, 100, TABLE) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("options", "size"), [({"dtype": "bfloat16"}, 2), ({"kv_dtype": "bf16"}, 4)])
def test_bfloat16_costs_precision_but_not_the_sense(options: dict[str, str], size: int) -> None:
    model = executor(**options)
    error = relative_error(logits_of_all(model, IDS, 100, TABLE), logits_of_all(executor(), IDS, 100, TABLE))
    assert 1e-4 < error < 0.05  # unrelated logits differ by 1.4
    matrices = sum(np.prod(t.shape) for t in tiny_weights(tiny_spec()).tensors.values() if len(t.shape) == 2)
    norms = sum(t.data.nbytes for t in tiny_weights(tiny_spec()).tensors.values() if len(t.shape) == 1)
    assert model.weight_bytes == size * matrices + norms


@pytest.mark.parametrize("name", ["grouped", "alternating-windows"])
def test_queries_may_attend_in_any_groups(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Long contexts are cut into stretches of queries, and many short ones into several groups."""
    sequences = [Sequence(IDS, TABLE), Sequence(IDS[:33], [0, 1]), *(Sequence([i], [i]) for i in (3, 5, 6, 8, 10))]
    batch = make_batch(sequences, [Row(0, token) for token in range(100)] + [Row(i) for i in range(1, 7)])
    expected = executor(tiny_weights(TINY_SPECS[name])).logits(batch)
    for limit in (1, 64, 1000, 4000):
        monkeypatch.setattr(torch_step, "_GROUP_LIMIT", limit)
        groups = torch_step.prepare(batch, torch.device("cpu")).groups
        assert sorted(torch.cat([g.tokens.flatten() for g in groups]).tolist()) == list(range(138))
        assert all(len(g.tokens) == 1 or g.tokens.numel() * g.blocks.shape[1] * 32 <= limit for g in groups)
        got = executor(tiny_weights(TINY_SPECS[name])).logits(batch)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_decoding_sequences_attend_together() -> None:
    batch = make_batch([Sequence([i], [i], 5 * i) for i in range(6)] + [Sequence([1, 2], [8]), Sequence([3, 4], [9])])
    groups = torch_step.prepare(batch, torch.device("cpu")).groups
    assert [tuple(group.tokens.shape) for group in groups] == [(6, 1), (2, 2)]


def test_what_lies_in_a_table_beyond_the_context_is_not_read() -> None:
    batch = make_batch([Sequence(IDS, TABLE), Sequence(IDS, [0, 1, 3, 5])])
    short = make_batch([Sequence(IDS[:1], [8, 99, 99, 99]), Sequence(IDS[:1], [10]), Sequence([1], TABLE, 99)])
    model = executor()
    model.logits(batch)
    assert np.isfinite(model.logits(short)).all()


def test_only_the_rows_asked_for_pay_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed, logits = executor(), [], TorchModel.logits

    def counted(self: TorchModel, hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(TorchModel, "logits", counted)
    model.execute(make_batch([Sequence(IDS, TABLE), Sequence([1], [0])]))
    assert computed == [2]
    model.execute(make_batch([Sequence(IDS, TABLE)], [Row(0, token) for token in range(100)]))
    assert computed == [2, 64, 36]


def test_both_executors_draw_the_same_tokens() -> None:
    weights = tiny_weights(tiny_spec(), seed=1)
    filters = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 20, "top_p": 0.9}]
    rows = [
        Row(0, temperature=0.5 + seed % 3, seed=seed * 0x9E3779B97F4A7C15 % 2**64, draw_position=seed // 7, **options)
        for seed in range(200)
        for options in filters
    ]
    batch = make_batch([Sequence([3, 1, 4], [0])], rows)
    native = NativeExecutor(weights, num_blocks=4, max_model_len=64, kv_dtype="f32")
    ours, theirs = executor(weights).execute(batch).token_ids, native.execute(batch).token_ids
    assert (ours != theirs).sum() <= 2  # a number may fall on the border between two tokens, which rounding moves


def test_a_failure_of_torch_ends_the_batch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = executor(), make_batch([Sequence([1], [0])])
    with monkeypatch.context() as broken:
        broken.setattr(TorchModel, "hidden", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
        for run in (model.execute, model.logits):
            with pytest.raises(ExecutorError, match="out of memory"):
                run(batch)
    assert model.execute(batch).status.tolist() == [0]


def test_calls_from_several_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hidden, running, most = executor(), TorchModel.hidden, [], []

    def watched(self: TorchModel, *arguments: Any) -> torch.Tensor:
        running.append(self)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return hidden(self, *arguments)

    monkeypatch.setattr(TorchModel, "hidden", watched)
    with ThreadPoolExecutor(4) as threads:
        batch = make_batch([Sequence([1], [0])])
        for future in [threads.submit(run, batch) for run in (model.execute, model.logits) * 4]:
            future.result(timeout=60)
    assert most == [1] * 8


def test_the_device_is_named() -> None:
    assert executor().device == "PyTorch on cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees")
@pytest.mark.parametrize("name", TINY_SPECS)
def test_a_gpu_computes_the_same(name: str) -> None:
    weights = tiny_weights(TINY_SPECS[name])
    model = executor(weights, device="cuda")
    expected = reference_logits(weights, IDS)
    assert model.device.startswith("cuda:")
    assert np.abs(logits_of_all(model, IDS, 40, TABLE) - expected).max() <= 1e-4 * np.abs(expected).max()
    model.close()


@pytest.mark.parametrize("device", ["cuda:63", "nonsense"])
def test_a_device_that_is_not_there_is_an_input_error(device: str) -> None:
    with pytest.raises(InputError, match=f"cannot compute on the device '{device}'"):
        executor(device=device)


def test_a_pool_that_does_not_fit_is_a_clear_error() -> None:
    with pytest.raises(ExecutorError, match=r"a KV pool of .* MiB do not fit cpu"):
        executor(num_blocks=2**45)


def test_more_positions_than_the_model_has_are_refused() -> None:
    weights = tiny_weights(TINY_SPECS["learned-positions"])
    with pytest.raises(InputError, match="max_model_len is 1025, but tiny has embeddings for 1024 positions"):
        executor(weights, max_model_len=1025)


def test_without_pytorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "paceline.executors.torch.executor")
    with pytest.raises(InputError, match=r"pip install 'paceline\[torch\]'"):
        importlib.import_module("paceline.executors.torch.executor")
