"""The offline engine on the real model, in the shape that vLLM's users know."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.errors import InputError, ModelFileError, PacelineError
from paceline.executors.base import Batch, StepResult
from paceline.executors.native import NativeExecutor
from paceline.loading import load_model
from paceline.options import EngineOptions

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), max_model_len=512) as model:
        yield model


def test_generate_answers_in_the_order_of_the_prompts(llm: LLM) -> None:
    results = llm.generate(["The capital of France is", "1, 2, 3, 4,"], GREEDY, use_tqdm=False)
    assert [result.prompt for result in results] == ["The capital of France is", "1, 2, 3, 4,"]
    assert results[0].outputs[0].text.startswith(" Paris")
    assert results[1].outputs[0].text.startswith(" 5")
    for result in results:
        assert list(result.prompt_token_ids) == llm.model.tokenizer.encode(result.prompt or "")
        assert len(result.outputs[0].token_ids) == result.usage.completion_tokens == 6
        assert result.outputs[0].finish_reason == "length"


def test_token_ids_and_texts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.model.tokenizer.encode("The capital of France is")
    by_text = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    one, several = llm.generate(ids, GREEDY, use_tqdm=False), llm.generate([ids, ids], GREEDY, use_tqdm=False)
    texts = {result.outputs[0].text for result in [*by_text, *one, *several]}
    assert len(texts) == 1
    assert one[0].prompt is None


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    results = llm.generate(["Hello", "Hello"], lengths, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5]
    with pytest.raises(InputError, match="2 sampling_params for 1 prompts"):
        llm.generate("Hello", lengths)


def test_several_choices_come_with_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=3, max_tokens=8, ignore_eos=True)
    (result,) = llm.generate("The capital of France is", params, use_tqdm=False)
    assert len({output.text for output in result.outputs}) == 3
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(result.prompt_token_ids), 24)


def test_score_tells_which_continuation_is_likeliest(llm: LLM) -> None:
    scores = llm.score("The capital of France is", [" Paris", " London", " banana bread"], use_tqdm=False)
    assert scores[0].is_greedy
    assert not scores[2].is_greedy
    assert scores[0].logprob > scores[1].logprob > scores[2].logprob
    assert [len(score.logprobs) for score in scores][:2] == [1, 1]


def test_score_says_what_generation_says(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=0, ignore_eos=True)
    (result,) = llm.generate("Once upon a time", params, use_tqdm=False)
    answer = result.outputs[0]
    (score,) = llm.score([list(result.prompt_token_ids)], [list(answer.token_ids)], use_tqdm=False)
    assert score.token_ids == answer.token_ids
    assert score.logprobs == tuple(entry.logprob for entry in answer.logprobs)


def test_score_computes_a_shared_prompt_once(llm: LLM) -> None:
    before = llm.model.engine.stats()
    prompt = " ".join(str(number) for number in range(100))
    scores = llm.score(prompt, [f" {number}" for number in range(100, 150)], use_tqdm=False)
    assert len(scores) == 50
    after = llm.model.engine.stats()
    hits, queries = after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries
    length = len(llm.model.tokenizer.encode(prompt))
    assert hits >= 49 * ((length - 1) // 32 * 32)
    assert queries - hits < length + 50 * 36


def test_score_needs_something_to_score(llm: LLM) -> None:
    with pytest.raises(InputError, match="a continuation has no tokens"):
        llm.score("Hello", [""])
    with pytest.raises(InputError, match="a prompt has no tokens"):
        llm.score("", ["Hello"])
    with pytest.raises(InputError, match="2 prompts for 3 continuations"):
        llm.score(["a", "b"], ["c", "d", "e"])


def test_priorities_and_timeouts(llm: LLM) -> None:
    results = llm.generate(["a", "b"], GREEDY, priority=[1, -1], timeout=600, use_tqdm=False)
    assert [result.outputs[0].finish_reason for result in results] == ["length", "length"]
    (late,) = llm.generate("a", GREEDY, timeout=1e-9, use_tqdm=False)
    assert late.outputs[0].finish_reason == "timeout"
    with pytest.raises(InputError, match="3 priorities for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1, 2, 3])


def test_bad_words_never_come_about(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, bad_words=["Paris"])
    text = llm.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text
    assert "Paris" not in text


def test_min_tokens_put_the_end_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=30)
    (result,) = llm.chat([{"role": "user", "content": "Say yes."}], params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) >= 30


def test_stop_strings_and_logprobs_come_through(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, stop=[" 8"], logprobs=2)
    output = llm.generate("1, 2, 3, 4,", params, use_tqdm=False)[0].outputs[0]
    assert output.text == " 5, 6, 7,"
    assert (output.finish_reason, output.stop_reason) == ("stop", " 8")
    assert len(output.logprobs) == len(output.token_ids)
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in output.logprobs)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    alone = llm.chat(question, GREEDY, use_tqdm=False)
    both = llm.chat([question, question], GREEDY, use_tqdm=False)
    assert {result.outputs[0].text for result in [*alone, *both]} == {alone[0].outputs[0].text}
    assert alone[0].prompt is not None
    assert "You are a helpful AI assistant named SmolLM" in alone[0].prompt
    pirate = llm.chat(question, GREEDY, system="You are a pirate.", use_tqdm=False)[0]
    assert "You are a pirate." in (pirate.prompt or "")


def test_a_prompt_that_cannot_run_leaves_the_others_out_of_the_engine(llm: LLM) -> None:
    with pytest.raises(InputError, match="512"):
        llm.generate(["Hello", "word " * 600], GREEDY, use_tqdm=False)
    assert not llm.model.engine.has_work
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_an_interrupt_leaves_the_engine_empty(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_self: NativeExecutor, _batch: Batch) -> StepResult:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NativeExecutor, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello", "World"], GREEDY, use_tqdm=False)
    assert not llm.model.engine.has_work
    assert llm.model.engine.stats().kv_blocks_used == 0
    assert llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_failed_request_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: NativeExecutor, _batch: Batch) -> StepResult:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patched:
        patched.setattr(NativeExecutor, "execute", fail)
        with pytest.raises(PacelineError, match="no such luck"):
            llm.generate("Hello", GREEDY, use_tqdm=False)
    assert not llm.model.engine.has_work


def test_threads_take_turns(llm: LLM) -> None:
    expected = [result.outputs[0].text for result in llm.generate(["Hello", "1, 2, 3,"], GREEDY, use_tqdm=False)]
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(llm.generate, prompt, GREEDY, use_tqdm=False) for prompt in ["Hello", "1, 2, 3,"] * 4]
        assert [future.result(timeout=60)[0].outputs[0].text for future in futures] == expected * 4


def test_numpy_ids_are_token_ids(llm: LLM) -> None:
    ids = llm.model.tokenizer.encode("The capital of France is")
    by_list = llm.generate(ids, GREEDY, use_tqdm=False)
    for prompt in (np.array(ids), [np.array(ids)]):
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs == by_list[0].outputs


@pytest.mark.parametrize("prompts", [[None], [[1, "a"]], [{"prompt": "x"}], [1.5]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InputError, match="a prompt is a string or a list of token ids"):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy"])
def test_what_are_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InputError, match="sampling_params is a SamplingParams or a list of them"):
        llm.generate("Hello", params)


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "wizard", "content": "hi"}], r"messages\[0\] has the role 'wizard'; there are system, developer"),
        ([{"role": "user"}], r"messages\[0\] has the content None; a string is needed"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], 'parts of type "text" are supported, not "image_url"'),
        (["hi"], "must be a dict with role and content"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, conversation: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.chat(conversation, GREEDY)


def test_chat_takes_openais_newer_forms(llm: LLM) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    newer = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    ]
    first, second = llm.chat([plain, newer], GREEDY, use_tqdm=False)
    assert first.prompt == second.prompt


def test_variables_of_the_template_reach_it(smollm2_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }} {{ mood }} {{ strftime_now('%Y') }}")
    with LLM(str(smollm2_path), max_model_len=64, chat_template=template, template_date=date(1999, 1, 2)) as llm:
        question = [{"role": "user", "content": "a"}]
        (result,) = llm.chat(question, GREEDY, chat_template_kwargs={"mood": "b"}, use_tqdm=False)
        assert result.prompt == llm.model.tokenizer.decode(result.prompt_token_ids) == "a b 1999"
        with pytest.raises(InputError, match="may not set tools"):
            llm.chat(question, GREEDY, chat_template_kwargs={"tools": []})


def test_unknown_options_are_named(smollm2_path: Path) -> None:
    with pytest.raises(InputError, match=r"no option max_len; there are: device, max_model_len, "):
        LLM(str(smollm2_path), max_len=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 9000}, "max_model_len is 9000, but .* trained for 8192"),
        ({"kv_memory": 2**20}, "8192 tokens needs 180 MiB of KV cache, there are 1: .*max_model_len to 32 at most"),
        ({"kv_memory": 10**15}, "a KV cache of 953674316 MiB does not fit the [0-9]+ MiB of memory"),
        ({"template_date": "2024-07-26"}, "template_date is '2024-07-26'; a datetime.date is needed"),
        ({"kv_memory": -1}, "kv_memory is -1; a positive integer is needed"),
        ({"kv_memory": "1GiB"}, "kv_memory is '1GiB'; a positive integer is needed"),
        ({"kv_dtype": "bf16"}, "kv_dtype is 'bf16'; on the device cpu there are f16, f32, int8"),
        ({"kv_dtype": "int8", "device": "cuda"}, "kv_dtype is 'int8'; on the device cuda there are f16, f32"),
        ({"device": "tpu"}, "device is 'tpu'; there are cpu, cuda, cuda:N and torch:cpu"),
        ({"device": "cuda:7"}, "there is no GPU 7"),
        ({"threads": 0}, "threads is 0; a positive integer"),
        ({"threads": 100_000}, "threads is 100000, but this process may use [0-9]+ core"),
        ({"target_itl": 0}, "target_itl is 0; milliseconds above 0 are needed"),
        ({"target_itl": "50ms"}, "target_itl is '50ms'; milliseconds above 0 are needed"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens 512 is below max_num_seqs 600"),
        ({"chat_template": "no-such.jinja"}, r"no-such\.jinja"),
    ],
)
def test_options_that_cannot_be_had_are_refused_with_numbers(
    smollm2_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_model(str(smollm2_path), options=EngineOptions(**options))  # type: ignore[arg-type]


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    wrong = tmp_path / "model.gguf"
    wrong.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load_model(str(wrong))


def test_the_mapping_of_the_file_is_dropped_after_loading(smollm2_path: Path) -> None:
    """In a process of its own: other tests of this one may have the file open."""
    code = f"""
from pathlib import Path
from paceline import LLM
with LLM({str(smollm2_path)!r}, max_model_len=64) as llm:
    assert {smollm2_path.name!r} not in Path("/proc/self/maps").read_text()
    print(llm.model.describe()["model"])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("SmolLM2-135M-Instruct.Q4_1 (instruct), llama, Q4_1 + Q8_0")


def test_the_file_and_its_copy_are_never_in_memory_at_once(smollm2_path: Path) -> None:
    """The peak is the end of loading, and a tensor or two: the largest has 29 MiB of the file's 94."""
    code = f"""
import re
from pathlib import Path
from paceline import LLM
with LLM({str(smollm2_path)!r}, max_model_len=64, kv_memory=1 << 22):
    status = Path("/proc/self/status").read_text()
    peak, now = (int(re.search(rf"{{name}}:\\s+(\\d+) kB", status)[1]) for name in ("VmHWM", "VmRSS"))
    print(peak - now)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) < 48 * 1024


def test_a_program_that_forgets_to_stop_its_engine_still_ends(smollm2_path: Path) -> None:
    """The engine's thread is in the executor when the interpreter ends; that must not abort the process."""
    code = f"""
from paceline import SamplingParams
from paceline.options import EngineOptions
from paceline.loading import load_model
model = load_model({str(smollm2_path)!r}, options=EngineOptions(max_model_len=2048))
model.engine.start(lambda outputs: None)
model.engine.submit([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
