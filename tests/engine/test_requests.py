"""Whatever vLLM offers a request goes on working for bounded ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ENGINE, Engine, engine, prompt

BUDGET = 256


def answer(e: Engine, tokens: list[int], max_tokens: int, **sampling: Any) -> Any:
    """vLLM's output of one request."""
    name = e.submit(tokens, max_tokens, **sampling)
    outputs = []
    while e.llm.llm_engine.has_unfinished_requests():
        outputs += e.step()
    (output,) = [o for o in outputs if o.request_id == name]
    return output


def test_log_probabilities_of_the_answer(tiny_llama: Path) -> None:
    with engine(tiny_llama) as e:
        plain = answer(e, prompt(700), 60)
        output = answer(e, prompt(700), 60, logprobs=3)
        assert e.counts["sparse_steps"] > 50
        (sample,) = output.outputs
        assert list(sample.token_ids) == list(plain.outputs[0].token_ids)
        assert len(sample.logprobs) == 60
        for token, given in zip(sample.token_ids, sample.logprobs, strict=True):
            assert given[token].rank == 1 and given[token].logprob == max(p.logprob for p in given.values())


def test_log_probabilities_of_the_prompt(tiny_llama: Path) -> None:
    """Such a request is computed from the beginning, and gets what stock vLLM gives."""
    with engine(tiny_llama, stock=True) as e:
        stock = answer(e, prompt(500), 20, prompt_logprobs=1)
    with engine(tiny_llama) as e:
        e.generate([prompt(500)], max_tokens=20)
        ours = answer(e, prompt(500), 20, prompt_logprobs=1)
    assert len(ours.prompt_logprobs) == len(stock.prompt_logprobs) == 500
    for mine, theirs in zip(ours.prompt_logprobs[1:], stock.prompt_logprobs[1:], strict=True):
        assert {t: round(p.logprob, 3) for t, p in mine.items()} == {t: round(p.logprob, 3) for t, p in theirs.items()}


def test_stop_tokens_and_stop_strings(tiny_llama: Path) -> None:
    with engine(tiny_llama) as e:
        tokens = list(answer(e, prompt(700), 60).outputs[0].token_ids)
        last = next(i for i, token in enumerate(tokens) if i > 20 and token not in tokens[:i])
        output = answer(e, prompt(700), 60, stop_token_ids=[tokens[last]]).outputs[0]
        assert list(output.token_ids) == tokens[: last + 1] and output.stop_reason == tokens[last]
        text = answer(e, prompt(700), 60).outputs[0].text
        word = text.split()[25]
        output = answer(e, prompt(700), 60, stop=[word]).outputs[0]
        assert output.text == text[: text.index(word)] and output.stop_reason == word


def test_a_seed_means_the_same_however_the_prompt_is_cut(tiny_llama: Path) -> None:
    answers = []
    for chunk in (2048, 192):
        with engine(tiny_llama, vllm={"max_num_batched_tokens": chunk}, residency="dense") as e:
            for _ in range(2):
                answers.append(list(answer(e, prompt(700), 40, temperature=1.0, seed=11).outputs[0].token_ids))
            other = list(answer(e, prompt(700), 40, temperature=1.0, seed=12).outputs[0].token_ids)
    assert answers == [answers[0]] * 4 and other != answers[0]


def test_penalties_and_forbidden_words(tiny_llama: Path) -> None:
    with engine(tiny_llama) as e:
        plain = list(answer(e, prompt(700), 80).outputs[0].token_ids)
        assert max(Counter(plain).values()) > 1
        varied = list(answer(e, prompt(700), 80, presence_penalty=2.0, frequency_penalty=2.0).outputs[0].token_ids)
        assert max(Counter(varied).values()) <= max(Counter(plain).values()) and varied != plain
        banned = plain[30]
        other = list(answer(e, prompt(700), 80, logit_bias={banned: -100.0}).outputs[0].token_ids)
        assert banned not in other and other[: plain.index(banned)] == plain[: plain.index(banned)]


@pytest.mark.slow
def test_structured_output() -> None:
    """With real weights: no grammar can be built from the tiny models' words."""
    from vllm.sampling_params import StructuredOutputsParams

    from oasiskv.models import resolve_model

    with engine(Path(resolve_model("smollm2")), budget_tokens=BUDGET) as e:
        tokens = e.llm.get_tokenizer().encode("The ledger says: " + ", ".join(map(str, range(1000, 1200))))
        sampling = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{40}x"), "ignore_eos": False}
        output = answer(e, tokens, 80, **sampling).outputs[0]
        assert re.fullmatch("[a-f]{40}x", output.text)
        assert len(tokens) > 2 * BUDGET and e.counts["sparse_steps"] > 10


def test_priorities(tiny_llama: Path) -> None:
    """An urgent request overtakes those that wait."""
    with engine(tiny_llama, vllm={"scheduling_policy": "priority", "max_num_seqs": 3}) as e:
        names = [e.submit(prompt(600, seed=i), 60) for i in range(5)]
        alone = dict(zip(names, e.generate([prompt(600, seed=i) for i in range(5)], 60), strict=True))
        ended: list[str] = []
        for i in range(5):
            e.submit(prompt(600, seed=i), 60, name=f"plain-{i}")
        for _ in range(20):
            e.step()
        e.llm.llm_engine.add_request("urgent", {"prompt_token_ids": prompt(600, seed=9)}, _params(10), priority=-1)
        while e.llm.llm_engine.has_unfinished_requests():
            for output in e.step():
                ended.append(output.request_id)
                if output.request_id.startswith("plain"):
                    assert [list(output.outputs[0].token_ids)] == alone[names[int(output.request_id[-1])]]
        assert ended.index("urgent") <= 3 < ended.index("plain-3") and len(ended) == 6


def _params(max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY
    )


@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET, BUDGET + 1, ENGINE["max_model_len"] - 40])
def test_prompts_at_the_edges(tiny_llama: Path, verified: Any, length: int) -> None:
    """Of exactly the budget, one less, one more, and the longest that leaves room for the answer."""
    with engine(tiny_llama, budget_tokens=BUDGET) as e:
        report = e.verify()
        ((tokens,),) = e.generate([prompt(length)], max_tokens=40)
        assert len(tokens) == 40 and max(report.worst.values()) < 1e-5
        assert report.rows["bounded"] > 0
        verified(report)


def test_the_longest_context_ends_where_vllm_ends_it(tiny_llama: Path) -> None:
    most = ENGINE["max_model_len"]
    with engine(tiny_llama, budget_tokens=BUDGET) as e:
        output = answer(e, prompt(most - 10), 500)
        assert len(output.outputs[0].token_ids) == 10 and output.outputs[0].finish_reason == "length"


def test_adapters_share_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    """LoRA: same tokens as stock vLLM while the budget holds the context; never another adapter's KV."""
    from vllm.lora.request import LoRARequest

    adapters = [LoRARequest(f"adapter-{i}", i, str(make_adapter(tmp_path / str(i), i))) for i in (1, 2)]
    vllm = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    answers = {}
    for name, options in {
        "stock": {"stock": True},
        "wide": {"budget_tokens": ENGINE["max_model_len"]},
        "bounded": {"budget_tokens": BUDGET, "host_gib": 0.1},
    }.items():
        with engine(tiny_llama, vllm=vllm, **options) as e:
            for i, adapter in enumerate([None, *adapters, *adapters]):
                e.llm.llm_engine.add_request(
                    f"lora-{i}", {"prompt_token_ids": prompt(600)}, _params(30), lora_request=adapter
                )
                (output,) = e.run()[f"lora-{i}"]
                answers[name, i] = output
            if name == "bounded":
                assert e.counts["sparse_steps"] > 100
    assert all(answers["wide", i] == answers["stock", i] for i in range(5))
    for name in ("stock", "bounded"):
        assert answers[name, 1] == answers[name, 3] and answers[name, 2] == answers[name, 4]
        assert len({tuple(answers[name, i]) for i in range(3)}) == 3


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the tiny Llama, large enough to change its answers."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return folder
