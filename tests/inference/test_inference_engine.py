"""Promises: what the engine samples and reports is what the model says, whatever else it is doing at the time."""

from __future__ import annotations

import numpy as np
import pytest
from inference_fakes import VOCAB, assert_exact, drain, engine, params, prompt, run, run_all, teacher, tiny

from etude.base.errors import InferenceFault
from etude.base.records import Completion


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_greedy_tokens_are_those_of_a_full_forward_loop(q_lora_rank: int | None) -> None:
    model = tiny(q_lora_rank=q_lora_rank)
    context = prompt(0, 11)
    expected = list(context)
    for _ in range(20):
        expected.append(int(teacher(model, expected)[0][-1].argmax()))
    completion = run(engine(model), context, params(20, temperature=0.0))
    assert list(completion.tokens) == expected[11:]
    assert_exact(model, context, completion)


@pytest.mark.parametrize("budget", [16, 17, 256])
def test_any_batch_and_any_chunking_is_exact(budget: int) -> None:
    model = tiny()
    served = engine(model, prefill_tokens=budget)
    requests = [(prompt(seed, 3 + 9 * seed), params(10 + seed, seed=seed), f"s{seed}") for seed in range(8)]
    for (context, _, _), completion in zip(requests, run_all(served, requests), strict=True):
        assert_exact(model, context, completion)


def test_turns_of_a_session_are_exact_and_feed_only_what_is_new() -> None:
    model = tiny()
    served = engine(model)
    context, known = prompt(1, 20), 0
    for turn in range(4):
        completion = run(served, context, params(6, seed=turn), "agent")
        assert_exact(model, context, completion)
        assert completion.cached_tokens == known
        known = len(context) + len(completion.tokens) - 1  # the last sampled token was not fed
        context = [*context, *completion.tokens, *prompt(10 + turn, 5)]


def test_experts_can_be_asked_for_from_a_position_on() -> None:
    model, context = tiny(), prompt(2, 20)
    completion = run(engine(model), context, params(5), experts_start=17)
    assert completion.experts is not None
    assert completion.experts.shape == (20 - 17 + 4, 2, 2)
    assert completion.experts.dtype == np.int16
    assert_exact(model, context, completion)


def test_a_group_computes_its_common_prompt_once() -> None:
    model, context = tiny(), prompt(3, 50)
    served = engine(model)
    requests = [(context, params(8, seed=seed), f"g{seed}") for seed in range(8)]
    for completion in run_all(served, requests):
        assert_exact(model, context, completion)
    assert served.counters.prefix_hits == 7
    assert served.counters.tokens_prefilled == 50 + 7  # each follower feeds the last prompt token itself


def test_a_new_session_takes_the_longest_prefix_of_a_closed_one() -> None:
    model = tiny()
    served = engine(model)
    run(served, prompt(4, 40), params(4), "first")
    served.close_session("first")
    context = prompt(4, 40)[:30] + prompt(5, 10)
    completion = run(served, context, params(4), "second")
    assert completion.cached_tokens == 30
    assert_exact(model, context, completion)


def test_a_session_that_changes_its_past_goes_back_to_the_common_beginning() -> None:
    model = tiny()
    served = engine(model)
    run(served, prompt(6, 40), params(4), "s")
    context = prompt(6, 40)[:25] + prompt(7, 9)
    completion = run(served, context, params(6), "s")
    assert completion.cached_tokens == 25
    assert_exact(model, context, completion)


def test_an_evicted_session_goes_on_exactly() -> None:
    model = tiny()
    served = engine(model, slots=2)
    contexts = {name: prompt(seed, 12) for seed, name in enumerate("abcd")}
    for turn in range(3):
        for name in contexts:
            completion = run(served, contexts[name], params(5, seed=turn), name)
            assert_exact(model, contexts[name], completion)
            contexts[name] = [*contexts[name], *completion.tokens, *prompt(turn, 3)]
    assert served.load["sessions"] == 2


def test_more_requests_than_slots_all_finish() -> None:
    model = tiny()
    served = engine(model, slots=3)
    requests = [(prompt(seed, 5 + seed), params(7, seed=seed), f"s{seed}") for seed in range(11)]
    for (context, _, _), completion in zip(requests, run_all(served, requests), strict=True):
        assert_exact(model, context, completion)


def test_two_requests_of_one_session_run_one_after_the_other_and_hold_up_nobody() -> None:
    model = tiny()
    served = engine(model)
    order: list[str] = []
    for name, session, length in (("long", "s", 30), ("second", "s", 2), ("other", "o", 2)):
        served.submit(prompt(8, 10), params(length), lambda _, name=name: order.append(name), session=session)  # type: ignore[misc]
    drain(served)
    assert order == ["other", "long", "second"]


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    model, context = tiny(), prompt(9, 15)
    alone = run(engine(model), context, params(30, seed=42))
    company = [(prompt(seed, 4 + seed), params(25, seed=seed), f"c{seed}") for seed in range(7)]
    together = run_all(engine(model, prefill_tokens=16), [*company, (context, params(30, seed=42), "s")])[-1]
    assert alone.tokens == together.tokens
    assert run(engine(model), context, params(30, seed=43)).tokens != alone.tokens


def test_stop_tokens_end_a_row_and_are_part_of_it() -> None:
    model, context = tiny(), prompt(10, 8)
    free = run(engine(model), context, params(30))
    stop = free.tokens[9]
    completion = run(engine(model), context, params(30, stop_token_ids=(stop,)))
    cut = free.tokens.index(stop) + 1
    assert completion.tokens == free.tokens[:cut]
    assert (completion.stop_reason, free.stop_reason) == ("stop", "length")
    again = run(engine(model), context, params(30))
    assert again.tokens == free.tokens


def test_a_full_context_ends_with_length() -> None:
    model = tiny()
    served = engine(model, max_length=32)
    completion = run(served, prompt(11, 20), params(100))
    assert (len(completion.tokens), completion.stop_reason) == (12, "length")
    assert_exact(model, prompt(11, 20), completion)


def test_cancel_returns_what_there_is_and_frees_the_slot() -> None:
    model = tiny()
    served = engine(model, slots=1)
    results: list[Completion] = []
    running = served.submit(prompt(0, 6), params(50), lambda r: results.append(r.completion()), session="a")
    waiting = served.submit(prompt(1, 6), params(50), lambda r: results.append(r.completion()), session="b")
    for _ in range(5):
        served.step()
    served.cancel(waiting)
    served.cancel(running)
    served.cancel(running)
    assert [(r.stop_reason, len(r.tokens)) for r in results] == [("cancelled", 0), ("cancelled", 5)]
    assert not served.busy
    completion = run(served, prompt(2, 9), params(5), "c")
    assert_exact(model, prompt(2, 9), completion)


@pytest.mark.parametrize(
    ("tokens", "changes", "names"),
    [
        ([], {}, "empty"),
        ([1] * 96, {}, "96"),
        ([VOCAB], {}, str(VOCAB - 1)),
        ([-1], {}, "outside"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"stop_token_ids": (VOCAB,)}, "outside"),
    ],
)
def test_what_can_never_run_is_refused_by_name(tokens: list[int], changes: dict[str, object], names: str) -> None:
    served = engine()
    with pytest.raises(InferenceFault, match=names):
        served.submit(tokens, params(**{"max_new_tokens": 4, **changes}), print, session="s")  # type: ignore[arg-type]
    assert not served.busy


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_sampled_distribution_is_the_models(temperature: float) -> None:
    """Chi-square over all tokens with an expected count of five or more, 8,000 draws."""
    from scipy.stats import chisquare

    model, context = tiny(vocab_size=23), [4, 9, 1]
    served = engine(model, slots=64)
    requests = [(context, params(1, seed=seed, temperature=temperature), f"s{seed % 64}") for seed in range(8000)]
    drawn = np.bincount([c.tokens[0] for c in run_all(served, requests)], minlength=23)
    expected = (teacher(model, context)[0][-1] / temperature).softmax(-1).double().numpy() * 8000
    common = expected >= 5
    observed = np.append(drawn[common], drawn[~common].sum())
    wanted = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_tempered_sampling_reports_the_untempered_logprob() -> None:
    model, context = tiny(), prompt(12, 10)
    assert_exact(model, context, run(engine(model), context, params(20, temperature=0.3)))


def test_positions_never_leak_between_neighbours() -> None:
    """Rows of one slot after another: what a slot held before does not matter to who gets it next."""
    model = tiny()
    served = engine(model, slots=1)
    for seed in range(5):
        context = prompt(20 + seed, 60 - 10 * seed)
        assert_exact(model, context, run(served, context, params(8), f"s{seed}"))
