"""The executor on a device with streams: the same tokens whatever runs when, and a missing dependency is noticed."""

import itertools
import random
from dataclasses import replace

import pytest
from fake_device import FIRST_USES, ORDERS, FakeDevice, as_on_a_device, run_on
from thorough import covering, quick_or, rotating, some_of
from tiered import EMULATED, everything_moves, generate, make_parts, make_policy

from batchgen.core.request import SamplingParams
from batchgen.engine.loader import warm_up
from batchgen.runtime.streams import STREAMS

pytestmark = pytest.mark.usefixtures("one_thread")

_random = random.Random(3)
PROMPTS = [[_random.randrange(4, 500) for _ in range(n)] for n in (5, 30, 17, 1, 16, 40, 9, 22)]
LENGTHS = [3, 6, 4, 5, 2, 6, 4, 3]
# Rows of which `make test` has less, where the number of sweeps does not matter.
ROWS = quick_or(([prompt[:17] for prompt in PROMPTS], [2, 3, 3, 3, 2, 3, 3, 2]), (PROMPTS, LENGTHS))


def policies(path):
    return {
        "resident": make_policy(path, EMULATED, kv_seqs={"gpu": 4}),
        "everything moves": everything_moves(path, weight_format="float32"),
        "everything but activations": everything_moves(path, weight_format="float32", activation_batches=(2, 0)),
        "4 bits": everything_moves(path, kv_format="int5"),
        "8 bits": everything_moves(path, kv_format="int8"),
        "weights from the host": make_policy(
            path, EMULATED, weight_layers={"qkv": (1, 2, 0), "out": (0, 3, 0), "up": (1, 2, 0), "down": (0, 3, 0)},
        ),
        "disk alone": make_policy(path, EMULATED, kv_seqs={"disk": 8}, num_gpu_batches=2, gpu_batch_size=4),
        "streamed layers": make_policy(
            path, EMULATED, kv_seqs={"streamed": 8}, num_gpu_batches=2, gpu_batch_size=4, kv_layers=1
        ),
        "deferred alone": make_policy(path, EMULATED, kv_seqs={"deferred": 8}),
        "delegated alone": make_policy(path, EMULATED, kv_seqs={"cpu": 8}, num_gpu_batches=2, gpu_batch_size=4),
    }  # fmt: skip


@pytest.fixture
def make(tiny_models, tmp_path, monkeypatch):
    as_on_a_device(monkeypatch)
    path = tiny_models("llama", num_hidden_layers=3)[0]

    def make(name, ahead=False):
        """ahead: sweeps can be launched ahead, as embeddings are the device's."""
        policy = policies(path)[name]
        return make_parts(path, EMULATED, replace(policy, embedding_tier="gpu") if ahead else policy, tmp_path)

    return make


@pytest.mark.parametrize(("name", "ahead"), covering(itertools.product(policies("demo"), [False, True]), 0, "orders"))
def test_the_order_of_what_is_launched_changes_no_token(make, monkeypatch, name, ahead):
    """Some of the orders there are."""
    expected = generate(make(name), *ROWS)
    everywhere = ORDERS[:: 2 if name.startswith("everything") else 7]
    for order, eager in quick_or(rotating(name, ahead).sample(ORDERS, 1), everywhere):
        with monkeypatch.context() as patch:
            parts = run_on(make(name, ahead), FakeDevice(order, eager), patch, ahead=ahead)
            assert generate(parts, *ROWS) == expected, (order, eager)


# (kind of Step, kind that it waits for); only such that no other wait stands in for, where activations stay on the
# device or where they move too.
NEEDED = {
    "everything but activations": [
        ("load_weight", "post"),
        ("load_weight", "read_weight"),
        ("read_weight", "load_weight"),
        ("attention", "load_cache"),
        ("load_cache", "read_cache"),
        ("load_cache", "store_cache"),
        ("store_cache", "attention"),
        ("write_cache", "store_cache"),
        ("send_qkv", "pre"),
        ("cpu_attention", "send_qkv"),
        ("load_attention", "cpu_attention"),
        ("head", "load_head"),
        ("load_head", "head"),
    ],
    "weights from the host": [("pre", "load_weight")],
    "streamed layers": [
        ("attention", "load_cache"),
        ("load_cache", "store_cache"),
        ("store_cache", "attention"),
    ],
    "deferred alone": [
        ("send_deferred", "pre"),
        ("attend_deferred", "send_deferred"),
        ("join_deferred", "attend_deferred"),
    ],
    "disk alone": [("read_cache", "load_cache"), ("store_cache", "write_cache")],
    "everything moves": [("pre", "load_hidden"), ("load_hidden", "store_hidden"), ("store_hidden", "post")],
}


LATE = [("disk_write", "cpu_attention"), ("disk_read",), ()]


def is_noticed(make, monkeypatch, name, spoil):
    """Whether in some order other tokens come out, or none. spoil(parts, device): what is done before they run."""
    expected = generate(make(name), PROMPTS, LENGTHS)
    for late, (order, eager) in itertools.product(LATE, ORDERS[::3]):
        with monkeypatch.context() as patch:
            device = FakeDevice(order, eager)
            parts = run_on(make(name), device, patch, late)
            spoil(parts, device)
            try:
                if generate(parts, PROMPTS, LENGTHS) != expected:
                    return True
            except Exception:  # poison may also lead to what cannot go on
                return True
    return False


@pytest.mark.parametrize(
    ("name", "kind", "earlier"),
    some_of([(name, *pair) for name, pairs in NEEDED.items() for pair in pairs], 7, "needed"),
)
def test_a_missing_dependency_is_noticed(make, monkeypatch, name, kind, earlier):
    seen = 0

    def spoil(parts, device):
        steps, kinds = parts.executor._sweeps.steps, {}

        def without(*arguments):
            nonlocal seen
            for step in steps(*arguments):
                kinds[step.id] = step.kind
                kept = tuple(i for i in step.after if (step.kind, kinds[i]) != (kind, earlier))
                seen += kept != step.after
                yield step._replace(after=kept)

        parts.executor._sweeps.steps = without

    assert is_noticed(make, monkeypatch, name, spoil), "the same tokens in every order"
    assert seen


class Loans:
    """Memory kept for another stream than its own: (kind of Step, which of its blocks). left_out: this one is not."""

    def __init__(self, parts, device, left_out=None):
        self.found, self._left_out = set(), left_out
        self._memory, self._borrow = device.memory, device.memory.borrow
        perform = parts.executor.lanes._perform

        def note(step):
            self._kind, self._blocks = step.kind, []
            perform(step)

        parts.executor.lanes._perform = note
        device.borrow = lambda tensor: self._lend(tensor, device.launching.lane)

    def _lend(self, tensor, lane):
        block = self._memory.block_of(tensor)
        if block is None or block.owner == lane:
            return
        if block not in self._blocks:
            self._blocks.append(block)
        loan = self._kind, self._blocks.index(block)
        self.found.add(loan)
        if loan != self._left_out:
            self._borrow(tensor, lane)


LOANS = {
    ("store_cache", 0): "new_rows",
    ("store_cache", 1): "host_rows",
}
# Kept too, though something else does so: compute waits for these copies before it gives up what they read; and the
# Step that writes to disk holds the numbers of the blocks that it waits for.
NEEDLESS = {
    ("load_cache", 0), ("send_qkv", 0), ("send_qkv", 1), ("send_qkv", 2), ("store_cache", 2),
    *(("send_deferred", i) for i in range(6)),
}  # fmt: skip


@pytest.mark.parametrize("loan", some_of(LOANS, 2, "loans"), ids=LOANS.get)
def test_memory_that_is_not_kept_for_another_stream_is_noticed(make, monkeypatch, loan):
    loans = []
    spoil = lambda parts, device: loans.append(Loans(parts, device, loan))  # noqa: E731
    assert is_noticed(make, monkeypatch, "everything moves", spoil), "the same tokens in every order"
    assert loan in loans[-1].found


def test_no_other_memory_is_kept_for_another_stream(make, monkeypatch):
    device = FakeDevice(*ORDERS[9])
    parts = run_on(make("everything moves"), device, monkeypatch)
    loans = Loans(parts, device)
    generate(parts, PROMPTS, LENGTHS)
    assert loans.found == LOANS.keys() | NEEDLESS


# Packed weights and KV, which take many operations, are left to `make test-all`: they go where others do.
QUICK_FIRST_USES = [("everything but activations", True), ("deferred alone", False)]


@pytest.mark.parametrize(
    ("name", "ahead"), quick_or(QUICK_FIRST_USES, list(itertools.product(policies("demo"), [False, True])))
)
def test_nothing_is_new_after_warming_up(make, monkeypatch, name, ahead):
    """No operation, and no memory, while a stream waits at a semaphore."""
    expected = generate(make(name), *ROWS)
    device = FakeDevice(*ORDERS[9], warm=FIRST_USES)
    parts = run_on(make(name, ahead), device, monkeypatch, ahead=ahead)
    warm_up(parts.executor, parts.policy, parts.memory, "gpu", parts.split, parts.pack, SamplingParams())
    assert generate(parts, *ROWS) == expected
    planned = parts.memory.stream_bytes
    for lane in STREAMS if planned else ():
        assert device.memory.most_held[lane] <= planned.get(lane, 0), lane


def test_sweeps_are_launched_ahead(make, monkeypatch):
    """Some of one is still under way when the next is launched."""
    device, under_way = FakeDevice(*ORDERS[0]), []
    parts = run_on(make("resident", ahead=True), device, monkeypatch, ahead=True)
    run = parts.executor.run

    def run_ahead(batches, on_logits, **options):
        under_way.append(sum(map(len, device._queues.values())))
        return run(batches, on_logits, **options)

    parts.executor.run = run_ahead
    generate(parts, PROMPTS, LENGTHS)
    assert len(under_way) > 4 and sum(count > 0 for count in under_way) > len(under_way) / 2
