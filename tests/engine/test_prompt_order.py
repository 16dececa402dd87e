"""The order in which rows start: that of their prompts' tree, whatever their order in the input."""

import random
from array import array
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiered import CPU, EMULATED, make_parts, make_policy, make_requests, once_all_rows_are_there

from batchgen.core.request import Request, SamplingParams, ScoreRequest
from batchgen.engine.engine import Engine
from batchgen.engine.prefetch import Prefetch
from batchgen.engine.prompt_order import PromptOrder

SUBJECTS, ROWS_OF_EACH, PREFIX, IN_FLIGHT = 8, 4, 80, 4
SAVED = SUBJECTS * (ROWS_OF_EACH - 1) * PREFIX


@dataclass(frozen=True)
class Waiting:
    prompt: array | None


class Source:
    """A source that has items ready in portions: the next portion is there when the one before it was found taken."""

    def __init__(self, items, portions):
        self.items, self.portions = list(items), iter(portions)
        self.num_ready = next(self.portions, 1)

    @property
    def ready(self):
        is_ready = self.num_ready > 0
        if not is_ready:
            self.num_ready = next(self.portions, 1)
        return is_ready

    def take(self, most):
        taken = []
        while self.items and len(taken) < most and (not taken or self.num_ready > 0):
            if isinstance(self.items[0], Exception) and taken:
                break
            self.num_ready -= 1
            item = self.items.pop(0)
            if isinstance(item, Exception):
                raise item
            taken.append(item)
        return taken

    def close(self):
        pass


def of(*prompts):
    return [Waiting(None if prompt is None else array("i", prompt)) for prompt in prompts]


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), min_size=1, max_size=4), max_size=30),
    st.lists(st.integers(0, 4)),
    st.integers(1, 8),
)
def test_every_request_comes_once_however_the_source_is_filled(prompts, portions, most):
    requests = of(*prompts)
    order = list(PromptOrder(Source(requests, portions), most))
    assert sorted(map(id, order)) == sorted(map(id, requests))


def test_requests_that_are_all_there_come_in_the_order_of_their_prompts():
    prompts = [(5, 1), (2,), (300, 1), (5,), (2, 256), (2, 3), (5, 1)]
    order = [tuple(request.prompt) for request in PromptOrder(Source(of(*prompts), [100]))]
    assert order == sorted(prompts)
    at_once = PromptOrder(Source(of(*prompts), [100]))
    taken = [at_once.take(3) for _ in range(4)]
    assert [tuple(request.prompt) for some in taken for request in some] == order
    assert list(map(len, taken)) == [3, 3, 1, 0]


def test_after_the_last_prompt_come_the_first_again():
    order = PromptOrder(Source(of((3,), (9,), (5,), (1,), (4,)), [3, 2]))
    assert [request.prompt[0] for request in order] == [3, 4, 5, 9, 1]


def test_what_is_not_run_does_not_wait():
    requests = of((4,), None, (3,), None)
    order = list(PromptOrder(Source(requests, [4])))
    assert [request.prompt and request.prompt[0] for request in order] == [None, None, 3, 4]


def test_an_error_of_the_input_comes_after_the_rows_before_it():
    order = PromptOrder(Source([*of((4,), (3,)), OSError("gone")], [3]))
    assert [next(order).prompt[0] for _ in range(2)] == [3, 4]
    with pytest.raises(OSError, match="gone"):
        next(order)
    assert list(order) == []


def test_the_first_request_is_the_first_of_all_that_come_soon():
    order = PromptOrder(Prefetch(iter(of(*((n,) for n in range(50, 0, -1)))), ahead=4), 100)
    order.fill(60)  # ends when all are there
    assert [request.prompt[0] for request in order] == list(range(1, 51))
    slow = PromptOrder(Source(of((3,), (1,), (2,)), [0] * 1_000_000))
    slow.fill(0.01)
    assert sorted(request.prompt[0] for request in slow) == [1, 2, 3]


def test_no_more_requests_wait_than_are_allowed():
    source = Source(of(*((n,) for n in range(50, 0, -1))), [100])
    order = PromptOrder(source, 8)
    for _ in order:
        assert len(order._waiting) < 8


@pytest.fixture(scope="module")
def prompts():
    """Rows about some subjects, shuffled: those of a subject begin with the same text."""
    rng = random.Random(3)
    texts = [[rng.randrange(4, 500) for _ in range(PREFIX)] for _ in range(SUBJECTS)]
    rows = [text + [rng.randrange(4, 500) for _ in range(rng.randint(4, 20))] for text in texts * ROWS_OF_EACH]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize(
    ("family", "place"),
    [
        *((family, "memory") for family in ("llama", "gemma2", "qwen3_5", "lfm2")),
        *(("llama", place) for place in ("device", "streamed", "delegated")),
        ("qwen3_5", "streamed"),
        *((family, place) for family in ("llama", "gemma2", "qwen3_5") for place in ("disk", "emulated disk")),
    ],
)
def test_prefixes_of_a_shuffled_table_are_computed_once_in_memory_for_few(
    family, place, prompts, tiny_models, tmp_path
):
    """The pool has space for the rows in flight and a few more blocks, so a prefix cannot wait for long."""
    model = tiny_models(family)[0]
    device, seqs = {
        "memory": (CPU, {"cpu": IN_FLIGHT}),
        "device": (EMULATED, {"gpu": IN_FLIGHT}),
        "streamed": (EMULATED, {"streamed": IN_FLIGHT}),
        "delegated": (EMULATED, {"cpu": IN_FLIGHT}),
        "disk": (CPU, {"disk": IN_FLIGHT}),
        "emulated disk": (EMULATED, {"disk": IN_FLIGHT}),
    }[place]
    policy = make_policy(model, device, gpu_batch_size=IN_FLIGHT, kv_seqs=seqs, max_num_batched_tokens=256)
    limits = {"most_kv_tokens": (IN_FLIGHT + 1) * (PREFIX + 32)}
    requests = make_requests(prompts, [2] * len(prompts))
    tokens = {}
    for share in (True, False):
        parts = make_parts(model, device, replace(policy, share_prefixes=share), tmp_path, **limits)
        with Engine.from_parts(parts) as engine:
            done = list(engine.generate(requests, should_stop=once_all_rows_are_there))
            tokens[share] = {completion.index: completion.samples[0].token_ids for completion in done}
            if share:
                assert engine.stats.cached_prompt_tokens >= 0.95 * SAVED
                firsts = [tuple(prompts[completion.index][:PREFIX]) for completion in done]
                assert sum(a != b for a, b in pairwise(firsts)) < 2 * SUBJECTS  # a subject's rows end together
    assert tokens[True] == tokens[False]


def test_contexts_of_a_shuffled_table_are_computed_once(prompts, tiny_models, tmp_path):
    model = tiny_models("llama")[0]
    policy = make_policy(model, CPU, gpu_batch_size=IN_FLIGHT, kv_seqs={"cpu": IN_FLIGHT})
    limits = {"most_kv_tokens": (IN_FLIGHT + 1) * (PREFIX + 32), "task": "score"}
    with Engine.from_parts(make_parts(model, CPU, policy, tmp_path, **limits)) as engine:
        requests = [ScoreRequest(prompt, ([7, 8], [9])) for prompt in prompts]
        done = list(engine.score(requests, should_stop=once_all_rows_are_there))
        assert len(done) == len(prompts)
        assert engine.stats.cached_prompt_tokens >= 0.95 * SAVED


def test_rows_start_in_input_order_where_no_prefix_is_shared(prompts, tiny_models, tmp_path):
    model = tiny_models("llama")[0]
    policy = make_policy(model, CPU, gpu_batch_size=1, kv_seqs={"cpu": 1}, share_prefixes=False)
    sampling = SamplingParams(max_tokens=1)
    with Engine.from_parts(make_parts(model, CPU, policy, tmp_path)) as engine:
        done = engine.generate([Request(prompt, sampling) for prompt in prompts[:20]])
        assert [completion.index for completion in done] == list(range(20))
