"""From logits to tokens: what `sample` gives, and that on a GPU nothing in it waits for the device."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.ops import dispatch as ops
from batchgen.runtime import sampler
from batchgen.runtime.sampler import sample
from batchgen.runtime.warm_up import dummy_sweeps
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import NOT_FINITE, PENDING, Sequence

VOCAB = 500


class Allowed:
    """A Constraint that allows some tokens."""

    def __init__(self, tokens):
        self._bits = np.zeros(-(-VOCAB // 32) * 32, dtype=bool)
        self._bits[tokens] = True

    def mask(self):
        return np.packbits(self._bits, bitorder="little").view(np.int32)


def sequence(i, allowed=None, **sampling):
    made = Sequence(i, i, 0, [1, 2, 3 + i, 2], SamplingParams(**sampling))
    made.constraint = None if allowed is None else Allowed(allowed)
    return made


def of_all_kinds():
    return [
        sequence(0),
        sequence(1, temperature=0.8, top_p=0.9, logprobs=3),
        sequence(2, repetition_penalty=1.7, logprobs=0),
        sequence(3, temperature=1.0, repetition_penalty=0.6, top_k=20, logprobs=5),
        sequence(4, allowed=[7, 9], logprobs=2),
        sequence(5, allowed=[7, 9, 400], temperature=2.0, min_p=0.1),
        sequence(6, temperature=0.5, allowed=[2], repetition_penalty=3.0, logprobs=1),
        sequence(7, logit_bias={5: 40.0, 2: -100.0}, presence_penalty=1.0, logprobs=2),
        sequence(8, frequency_penalty=-0.5, presence_penalty=1.5, repetition_penalty=1.2, logit_bias=[[5, 30]]),
    ]


def logits_of(count):
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, [1, 2]] = torch.tensor([29.0, 30.0])  # what prompts hold is likely, and penalties decide
    return logits


def test_every_sequence_gets_what_it_would_get_alone():
    sequences, logits = of_all_kinds(), logits_of(9)
    together = sample(logits.clone(), sequences).tokens()
    alone = [sample(logits[i : i + 1].clone(), [s]).tokens()[0] for i, s in enumerate(sequences)]
    assert together == alone
    assert {type(t.token_id) for t in together} == {int}
    assert together[4].token_id in (7, 9) and together[5].token_id in (7, 9, 400) and together[6].token_id == 2


def test_logprobs_are_those_of_the_model_itself():
    """Before penalties, grammars and temperature."""
    sequences, logits = of_all_kinds(), logits_of(9)
    meant = torch.log_softmax(logits.double(), -1)
    for i, (s, token) in enumerate(zip(sequences, sample(logits.clone(), sequences).tokens(), strict=True)):
        if s.sampling.logprobs is None:
            assert token.logprob is None and token.top == ()
            continue
        assert token.logprob == pytest.approx(meant[i, token.token_id].item(), abs=1e-5)
        values, ids = meant[i].topk(s.sampling.logprobs)
        assert {t for t, _ in token.top} == set(ids.tolist()) and len(token.top) == s.sampling.logprobs
        assert [v for _, v in token.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 300, VOCAB - 1])
def test_logits_that_are_not_finite_give_no_token_whatever_is_asked_for(value, at):
    """The minus infinities of a mask are no fault: they come later."""
    sequences, logits = of_all_kinds(), logits_of(9)
    healthy = sample(logits.clone(), sequences).tokens()
    for bad in range(9):
        spoilt = logits.clone()
        spoilt[bad, at] = value
        sampled = sample(spoilt, sequences)
        for i, token in enumerate(sampled.tokens()):
            assert token == healthy[i] if i != bad else token.token_id == NOT_FINITE, (bad, i)
        assert 0 <= sampled.token_ids.min() <= sampled.token_ids.max() < VOCAB, "the next sweep embeds it"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_where_all_are_greedy_only_rows_with_logits_that_are_not_finite_get_no_token(value):
    sequences, logits = [sequence(i) for i in range(4)], logits_of(4)
    spoilt = logits.clone()
    spoilt[1, 300] = spoilt[3, 0] = value
    sampled = sample(spoilt, sequences)
    chosen = logits.argmax(-1).tolist()
    assert [token.token_id for token in sampled.tokens()] == [chosen[0], NOT_FINITE, chosen[2], NOT_FINITE]
    assert 0 <= sampled.token_ids.min() <= sampled.token_ids.max() < VOCAB, "the next sweep embeds it"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-40, 1.1e-38])
def test_a_temperature_below_what_float32_holds_is_greedy(temperature):
    logits = logits_of(9)
    logits[0, [3, 4]] = 50.0  # of equal ones the first
    sequences = [sequence(i, temperature=temperature, top_p=0.99, seed=i) for i in range(9)]
    assert [t.token_id for t in sample(logits.clone(), sequences).tokens()] == logits.argmax(-1).tolist()
    with pytest.raises(InputError, match="identical samples"):
        SamplingParams(temperature=temperature, n=2)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.2e-38},
        {"temperature": 1e-30, "min_p": 0.5},
        {"top_p": 5e-324},
        {"top_p": 1e-30},
        {"min_p": 1.0},
    ],
)
def test_filters_at_their_ends_leave_the_most_likely_token(filters):
    logits = logits_of(9)
    sequences = [sequence(i, **{"temperature": 1.0, "seed": i} | filters) for i in range(9)]
    assert [t.token_id for t in sample(logits.clone(), sequences).tokens()] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e30, 3.4e38, 1e39, 1e300])
def test_any_higher_temperature_draws_from_what_is_allowed(temperature):
    """Also one that float32 does not hold."""
    sequences = [sequence(i, temperature=temperature, allowed=[7, 9, 400], seed=i) for i in range(60)]
    drawn = {t.token_id for t in sample(torch.randn(60, VOCAB), sequences).tokens()}
    assert drawn == {7, 9, 400}


def test_filters_come_in_vllms_order():
    """min-p, then top-k, then top-p of the mass that is left."""
    probabilities = torch.tensor([0.40, 0.20, 0.15, 0.10, 0.09, 0.06])
    logits = torch.full((1, VOCAB), -60.0)
    logits[0, :6] = probabilities.log()

    def drawn(**filters):
        many = [sequence(i, temperature=1.0, seed=i, **filters) for i in range(400)]
        return {t.token_id for t in sample(logits.repeat(400, 1), many).tokens()}

    assert drawn(top_p=0.62) == {0, 1, 2}
    assert drawn(min_p=0.3, top_p=0.62) == {0, 1}  # 0.62 of 0.75
    assert drawn(top_k=3, top_p=0.62) == {0, 1}
    assert drawn(min_p=0.2, top_k=4) == {0, 1, 2, 3}


def test_penalties_are_applied_once_whatever_is_repeated():
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, 2, 50, 60]] = torch.tensor([8.0, 10.0, 7.0, -1.0])
    (token,) = sample(logits.clone(), [sequence(47, repetition_penalty=1.5)]).tokens()  # 2 is in it twice, 50 once
    assert token.token_id == 2  # 10 / 1.5, not 10 / 1.5 ** 2
    (token,) = sample(logits.clone(), [sequence(0, repetition_penalty=1.5)]).tokens()
    assert token.token_id == 50


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for the device.

    It does for copies to it, and for CPU tensors among a GPU's operands, which torch copies from memory that is not
    pinned.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        made = func(*args, **(kwargs or {}))
        operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in operands if x.dim()}
        results = {x.device.type for x in tree_flatten(made)[0] if isinstance(x, torch.Tensor)}
        assert devices <= {"cuda"} or "cuda" not in devices | results, f"{name} from {devices} to {results}"
        return made


def test_penalties_and_biases_are_openais():
    """Against the formula, token by token: of the output, not of the prompt; biases before the other penalties."""
    made = sequence(
        0, presence_penalty=0.75, frequency_penalty=-0.5, logit_bias={9: 3.0, 400: -2.5}, repetition_penalty=1.5
    )
    made.tokens += [7, 9, 7, 7]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    wanted = logits[0].double()
    wanted[9] += 3.0
    wanted[400] -= 2.5
    for token in {1, 2, 3, 7, 9}:
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[7] -= 0.75 - 0.5 * 3
    wanted[9] -= 0.75 - 0.5
    sample(changed := logits.clone(), [made])
    torch.testing.assert_close(changed[0].double(), wanted, rtol=1e-6, atol=1e-5)
    assert [made.sampling.penalizes_output for made in of_all_kinds()] == [i in (2, 3, 6, 7, 8) for i in range(9)]


def test_nothing_waits_for_a_gpu_until_tokens_are_asked_for(monkeypatch):
    """Fake tensors have no numbers: `item`, `tolist` and whatever depends on them is refused."""
    uploads, downloads, launched = [], [], []

    def upload(array, device):
        uploads.append(array)
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)

    class Kernels:
        def argmax(self, logits, want_lse=False):
            launched.append("argmax")
            rows = len(logits)
            return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows), logits.new_empty(rows)

        def draw(self, logits, rows, draws, out):
            launched.append(("draw", rows.tolist(), draws.top_k.tolist()))

        def forbid(self, logits, rows, allowed):
            launched.append(("forbid", rows.tolist()))

    def download(tensor):
        downloads.append(tensor)
        return tensor

    monkeypatch.setattr(sampler, "upload", upload)
    monkeypatch.setattr(sampler, "download", download)
    monkeypatch.setattr(ops, "device_kernels", lambda device: Kernels())
    with FakeTensorMode(), NoWaiting():
        chosen = sampler.sample(torch.empty(9, VOCAB, device="cuda"), of_all_kinds())
        assert chosen.token_ids.device.type == chosen.logprobs.device.type == "cuda"
        assert chosen.logprobs.shape == (6, 1 + 2 * 5)
    assert launched.count("argmax") == 2 and ("forbid", [4, 5, 6]) in launched
    assert ("draw", [1, 3, 5, 6], [0, 20, 0, 0]) in launched
    assert len(uploads) <= 3 and len(downloads) == 2  # whatever the number of sequences


def test_tokens_and_log_probabilities_come_in_one_copy_each(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("one number at a time"))
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self) or tolist(self))
    sample(logits_of(9), of_all_kinds()).tokens()
    assert len(copies) == 2


def test_a_device_warms_up_for_repetition_penalties():
    """They are on tokens that the host knows: PENDING has no logit."""
    scheduler = Scheduler({"cpu": BlockManager(64, 16)}, SchedulerLimits(4, 64))
    sweeps = dummy_sweeps(
        scheduler, lambda sweep: [sweep], list, max_num_seqs=4, max_num_batched_tokens=64, longest=100, vocab_size=50,
        sampling=SamplingParams(repetition_penalty=1.3), sampled_token=PENDING,
    )  # fmt: skip
    sampled = 0
    for (batch,) in sweeps:
        sequences = [scheduled.sequence for scheduled in batch if scheduled.samples]
        sampled += len(sample(torch.zeros(len(sequences), 50), sequences).tokens())
    assert sampled > 8, "rows decode too"
