"""`/v1/completions` and the tokenizer's endpoints, with all details that evaluators rely on."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from serving import Served, serving


def complete(served: Served, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{served.v1}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_texts_and_tokens_are_continued_as_by_the_python_api(served: Served, client: openai.OpenAI) -> None:
    tokens = served.runtime.encode("the cat")
    mine = served.runtime.generate("the cat", max_tokens=16, temperature=1.0, seed=2)
    for prompt in ("the cat", tokens, ["the cat"], [tokens]):
        whole = client.completions.create(model="tiny", prompt=prompt, seed=2, temperature=1)
        assert [choice.text for choice in whole.choices] == [mine.text]
    streamed = client.completions.create(model="tiny", prompt="the cat", seed=2, temperature=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == mine.text


def test_choices_come_in_the_order_of_their_prompts(served: Served, client: openai.OpenAI) -> None:
    prompts = ["the cat", "a mat", "on the"]
    whole = client.completions.create(model="tiny", prompt=prompts, n=2, seed=3, temperature=1, max_tokens=5)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in whole.choices] == [
        served.runtime.generate(prompt, seed=seed, temperature=1.0, max_tokens=5).text
        for prompt in prompts
        for seed in (3, 4)
    ]


def test_prompts_are_scored_as_an_evaluator_asks(served: Served) -> None:
    """The request of lm-eval's `local-completions`, and what it reads from the answer."""
    context, continuation = (
        served.runtime.encode("the cat sat"),
        served.runtime.encode(" on the mat", add_special_tokens=False),
    )
    tokens = [*context, *continuation]
    body = {"prompt": [tokens, context], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    first = complete(served, model="tiny", **body)
    score = served.runtime.score(context, [continuation])[0]
    assert [choice["index"] for choice in first["choices"]] == [0, 1]
    found = first["choices"][0]["logprobs"]
    assert {len(values) for values in found.values()} == {len(tokens) + 1}
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert found["token_logprobs"][len(context) : -1] == list(score.logprobs)
    greedy = [
        logprob == max(top.values())
        for logprob, top in zip(
            found["token_logprobs"][len(context) : -1], found["top_logprobs"][len(context) : -1], strict=True
        )
    ]
    assert all(greedy) == score.is_greedy
    assert all(text in top for text, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))
    again = complete(served, model="tiny", **body)  # prefixes are cached by now
    assert again["choices"] == first["choices"]


def test_one_entry_follows_the_prompt_even_at_the_end_of_a_text() -> None:
    from runtimes import make_runtime

    with serving({"tiny": make_runtime(eos=frozenset(range(300)))}) as served:
        tokens = served.runtime.encode("the cat sat")
        whole = complete(served, prompt=tokens, temperature=0, max_tokens=1, logprobs=1, echo=True)
        assert len(whole["choices"][0]["logprobs"]["token_logprobs"]) == len(tokens) + 1


def test_an_echo_without_tokens_is_the_prompt_alone(served: Served) -> None:
    whole = complete(served, prompt="the cat", max_tokens=0, echo=True, logprobs=2)
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the cat", "length")
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"])
    with_text = complete(served, prompt="the cat", max_tokens=4, echo=True, temperature=0)
    assert with_text["choices"][0]["text"] == "the cat" + served.runtime.generate("the cat", max_tokens=4).text


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [10**6]},
        {"suffix": "x"},
        {"best_of": 4},
        {"prompt": ["a"] * 200, "n": 2},
    ],
)
def test_unsupported_fields_are_refused(client: openai.OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.post("/completions", body={"prompt": "a", "max_tokens": 1, **change}, cast_to=object)


def test_a_remote_tokenizer(served: Served) -> None:
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert info["bos_token"] == "<s>"
    assert "eos_token" in info
    tokens = httpx.post(f"{served.url}/tokenize", json={"prompt": "the cat", "add_special_tokens": False}).json()
    assert tokens["tokens"] == served.runtime.encode("the cat", add_special_tokens=False)
    assert httpx.post(f"{served.url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "the cat"}
    chat = [{"role": "user", "content": "hi"}]
    rendered = httpx.post(f"{served.url}/tokenize", json={"messages": chat}).json()["tokens"]
    assert served.runtime.decode(rendered) == served.runtime.render(chat).removeprefix("<s>")
    assert httpx.post(f"{served.url}/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert httpx.post(f"{served.url}/tokenize", json={}).status_code == 400


def test_metrics_have_both_families_and_count() -> None:
    with serving() as served:
        complete(served, prompt="the cat", max_tokens=4)
        httpx.get(f"{served.url}/nothing")
        text = httpx.get(f"{served.url}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        label = 'engine="0",model_name="tiny"'
        for name in ("edgekit_", "vllm:"):
            assert values[f"{name}generation_tokens_total{{{label}}}"] == "4.0"
            assert (
                values[f'{name}time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="tiny"}}'] == "1.0"
            )
        assert values['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == "1.0"
        assert values['http_requests_total{handler="none",method="GET",status="4xx"}'] == "1.0"
        assert values["edgekit_answers_active"] == "0.0"
        described = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(described) == len(set(described))
