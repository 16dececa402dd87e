"""A fault while tiers are at work stops the job with its own error: no hang, no thread left, nothing wrong kept."""

import errno
import itertools
import os
import random
import shutil
import signal
import threading
import time

import pytest
from new_threads import NewThreads
from thorough import quick_or, rotating
from tiered import CPU, EMULATED, before_each_step, everything_moves, make_parts, make_policy, make_requests

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.models.files import resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.store.weight_store import open_store

pytestmark = pytest.mark.usefixtures("one_thread")

ON_AN_ACCELERATOR = (
    "embed", "read_weight", "load_weight", "expand_weight", "load_hidden", "pre", "send_qkv", "cpu_attention",
    "load_attention", "read_cache", "load_cache", "attention", "store_cache", "write_cache", "post", "store_hidden",
    "load_head", "head",
)  # fmt: skip
ON_THE_CPU = (
    "embed", "read_weight", "expand_weight", "pre", "read_cache", "attention", "write_cache", "post",
    "read_head", "head",
)  # fmt: skip


class Trouble(Exception):
    """Nothing that batchgen knows of."""


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("llama")[0]


@pytest.fixture(scope="module")
def stores(model, tmp_path_factory):
    """Converted once; tests that damage a store make a copy."""
    folder = tmp_path_factory.mktemp("stores")
    for weights in ("native", "int4"):
        find_or_convert(resolve_model(str(model)), folder, "float32", weights)
    return folder


@pytest.fixture(scope="module")
def expected(model, stores):
    """What all rows come to, with everything in memory."""
    parts = make_parts(model, CPU, make_policy(model, CPU), stores)
    with Engine.from_parts(parts) as engine:
        return completed(engine)


@pytest.fixture
def threads():
    return NewThreads()


@pytest.fixture
def engine_of(model, stores, threads):
    """An engine with weights and KV in all tiers; closed afterwards, and its threads gone."""
    made = []

    def make(device=EMULATED, offload_dir=stores, serial=False, store=None, **changes):
        if device.accelerated:
            policy = everything_moves(model, **changes)
        else:
            layers = {"qkv": (0, 1, 2), "out": (0, 1, 2), "up": (0, 0, 3), "down": (0, 3, 0)}
            fields = {"weight_layers": layers, "kv_seqs": {"cpu": 4, "disk": 4}, "weight_format": "int4"}
            fields |= {"head_tier": "disk", "embedding_tier": "disk"}
            policy = make_policy(model, device, num_gpu_batches=2, gpu_batch_size=4, **fields | changes)
        made.append(Engine.from_parts(make_parts(model, device, policy, offload_dir, serial=serial, store=store)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert threads.left() == []


def rows(count=10):
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 500) for _ in range(rng.randrange(1, 50))] for _ in range(count)]
    return make_requests(prompts, [rng.randrange(4, 9) for _ in range(count)])


def endless():
    return itertools.chain.from_iterable(rows() for _ in itertools.count())


def completed(engine):
    return [c.samples[0].token_ids for c in sorted(engine.generate(rows()), key=lambda c: c.index)]


def raise_in(engine, kind, error, after=0):
    """Has the Steps of a kind raise, from the one after the `after` first on; returns them."""
    raised = []
    count = itertools.count()

    def act(step):
        if step.kind == kind and next(count) >= after:
            raised.append(step)
            raise error

    before_each_step(engine.parts, act)
    return raised


def fails_with(engine, threads, error, raised):
    """The very error comes out, although there are rows without end, and the engine says why it does not go on."""
    with pytest.raises(type(error)) as found:
        list(engine.generate(endless()))
    assert found.value is error
    assert len(raised) == 1, "Steps ran after a failure"
    with pytest.raises(BatchgenError, match="this engine has failed and cannot go on") as refused:
        list(engine.generate(rows()))
    assert "\n" not in str(refused.value) and (str(error) or type(error).__name__) in str(refused.value)
    engine.close()
    assert threads.left() == []


@pytest.mark.parametrize("kind", ON_AN_ACCELERATOR)
def test_an_error_in_any_step(engine_of, threads, kind):
    engine = engine_of()
    error = Trouble(f"in {kind}")
    fails_with(engine, threads, error, raise_in(engine, kind, error, after=rotating(kind).randrange(12)))


@pytest.mark.parametrize("kind", ON_THE_CPU)
def test_an_error_in_any_step_on_the_cpu(engine_of, threads, kind):
    engine = engine_of(CPU)
    error = Trouble(f"in {kind}")
    fails_with(engine, threads, error, raise_in(engine, kind, error, after=rotating(kind).randrange(12)))


def test_an_error_in_serial_mode(engine_of, threads):
    engine = engine_of(serial=True)
    error = Trouble("alone")
    fails_with(engine, threads, error, raise_in(engine, "store_cache", error, after=3))


@pytest.mark.parametrize("seed", range(quick_or(6, 12)))
def test_an_interrupt_in_any_step(engine_of, threads, seed):
    """Whichever thread it comes to."""
    rng = rotating(seed)
    engine = engine_of(CPU if seed % 4 == 0 else EMULATED)
    error = KeyboardInterrupt()
    kind = rng.choice(ON_THE_CPU if seed % 4 == 0 else ON_AN_ACCELERATOR)
    fails_with(engine, threads, error, raise_in(engine, kind, error, after=rng.randrange(30)))


def test_ctrl_c_at_any_moment(engine_of, threads):
    """The real signal, in the midst of whatever the main thread does."""
    rng = rotating()
    main = threading.main_thread().ident
    for _ in range(quick_or(10, 25)):
        engine, over, delay = engine_of(), threading.Event(), rng.random() * 0.1

        def interrupt(over=over, delay=delay):
            time.sleep(delay)
            while True:
                signal.pthread_kill(main, signal.SIGINT)
                if over.wait(5):  # Python drops one that comes to it while it cleans up after an object
                    return

        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):
            try:
                thread.start()
                for _ in engine.generate(endless()):
                    pass
            finally:
                over.set()
        thread.join()
        engine.close()
        assert threads.left() == []


@pytest.mark.parametrize("device", [EMULATED, CPU], ids=str)
def test_after_a_stop_the_engine_goes_on(engine_of, expected, device):
    """Whether asked to stop, or left alone with rows under way, or given an input that breaks off."""
    engine = engine_of(device, weight_format="float32")
    count = itertools.count()
    list(engine.generate(endless(), should_stop=lambda: next(count) > 4))
    assert engine.used_kv_blocks == 0
    assert completed(engine) == expected
    running = engine.generate(endless())
    next(running)
    running.close()
    assert engine.used_kv_blocks == 0
    assert completed(engine) == expected

    def broken():
        yield from rows(3)
        raise Trouble("in the input")

    with pytest.raises(Trouble, match="in the input"):
        list(engine.generate(broken()))
    assert completed(engine) == expected


def test_a_closed_engine_stays_closed(engine_of):
    engine = engine_of()
    engine.close()
    engine.close()
    with pytest.raises(InputError, match="the engine is closed"):
        list(engine.generate(rows(1)))


@pytest.fixture
def damaged(model, stores, tmp_path):
    """(store of our own, file of its middle layer)."""
    source = find_or_convert(resolve_model(str(model)), stores, "float32", "native")
    shutil.copytree(source.path, tmp_path / "store")
    store = open_store(tmp_path / "store")
    return store, store.layers[1].path


def flip_a_bit(store, path, group):
    extent = store.layers[1].extents[group]
    with path.open("r+b") as file:
        file.seek(extent.offset + extent.tensors[0].num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())


def truncate(store, path, group):
    os.truncate(path, store.layers[1].extents[group].offset + 4096)


@pytest.mark.parametrize("device", [EMULATED, CPU], ids=str)
@pytest.mark.parametrize("group", ["out", "down"])
@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_a_store_file_is_damaged_before_it_is_read(engine_of, damaged, damage, group, device):
    """Found by its checksum, when it is loaded or when it is first streamed, and named."""
    store, path = damaged
    damage(store, path, group)
    with pytest.raises(BatchgenError) as found:
        list(engine_of(device, store=store, weight_format="float32").generate(rows()))
    message = str(found.value)
    assert str(path) in message and "made the store again" in message and "\n" not in message


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_a_store_file_is_damaged_after_it_was_opened(engine_of, damaged, damage):
    store, path = damaged
    engine = engine_of(store=store, weight_format="float32")
    damage(store, path, "up")  # on disk in all layers
    with pytest.raises(BatchgenError, match="made the store again") as found:
        list(engine.generate(rows()))
    assert str(path) in str(found.value)


@pytest.mark.parametrize("which", ["embeddings", "head"])
def test_a_table_on_disk_is_damaged_before_it_is_read(engine_of, damaged, which):
    store, _ = damaged
    file = getattr(store, which)
    with file.path.open("r+b") as opened:
        opened.seek(next(iter(file.extents.values())).offset + 100)
        opened.write(b"\x7f\x7f\x7f\x7f")
    with pytest.raises(BatchgenError, match="made the store again") as found:
        engine_of(CPU, store=store, weight_format="float32")
    assert str(file.path) in str(found.value) and "\n" not in str(found.value)


def overwrite_half(path):
    with path.open("r+b") as opened:
        opened.seek(path.stat().st_size // 2)
        opened.write(bytes(range(64)))


def cut_half(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("which", ["embeddings", "head"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [(overwrite_half, r"was changed while .*made the store again"), (cut_half, "made the store again")],
)
def test_a_table_on_disk_that_changes_in_the_midst_of_a_job_ends_it(
    engine_of, damaged, expected, which, damage, message
):
    """The message says how the store is repaired, and no row is of what the table has then."""
    store, _ = damaged
    engine, done = engine_of(CPU, store=store, weight_format="float32"), {}
    path = getattr(store, which).path

    def change(stats):
        if stats.sweeps == 12:
            damage(path)
            touch(path)

    with pytest.raises(BatchgenError, match=message) as found:
        for completion in engine.generate(itertools.islice(endless(), 200), on_sweep=change):
            done[completion.index] = completion.samples[0].token_ids
    assert str(path) in str(found.value) and "\n" not in str(found.value)
    assert done and all(expected[index % len(expected)] == tokens for index, tokens in done.items())


def test_a_store_file_is_truncated_in_the_midst_of_a_job(engine_of, damaged):
    """When it has been read, and found to be whole, in earlier sweeps."""
    store, path = damaged
    engine = engine_of(store=store, weight_format="float32")
    with pytest.raises(BatchgenError, match="shorter than it was") as found:
        list(
            engine.generate(
                endless(), on_sweep=lambda stats: truncate(store, path, "up") if stats.sweeps == 5 else None
            )
        )
    assert str(path) in str(found.value)


def touch(path):
    """As if it was written to a second after it was."""
    after_ns = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(after_ns, after_ns))


@pytest.mark.parametrize("device", [EMULATED, CPU], ids=str)
def test_a_store_file_that_changes_in_the_midst_of_a_job_ends_it(engine_of, damaged, device, expected):
    """Also when it has been read, and found to be whole, in earlier sweeps; no row is of the new weights."""
    store, path = damaged
    engine, done = engine_of(device, store=store, weight_format="float32"), {}

    def change(stats):
        if stats.sweeps == 12:
            flip_a_bit(store, path, "up")
            touch(path)

    with pytest.raises(BatchgenError, match=r"is damaged: group up .* made the store again"):
        for completion in engine.generate(itertools.islice(endless(), 200), on_sweep=change):
            done[completion.index] = completion.samples[0].token_ids
    assert done and all(expected[index % len(expected)] == tokens for index, tokens in done.items())


def test_a_store_file_that_is_touched_or_removed_in_the_midst_of_a_job_does_no_harm(engine_of, damaged, expected):
    store, path = damaged
    engine, done = engine_of(store=store, weight_format="float32"), {}

    def change(stats):
        if stats.sweeps == 2:
            touch(path)
        if stats.sweeps == 4:
            path.unlink()

    for completion in engine.generate(rows(), on_sweep=change):
        done[completion.index] = completion.samples[0].token_ids
    assert [done[index] for index in sorted(done)] == expected


@pytest.mark.parametrize("sweep", [0, 2])
def test_tables_on_disk_that_are_touched_or_removed_in_the_midst_of_a_job_do_no_harm(
    engine_of, damaged, expected, sweep
):
    """Nor is there harm when that happens before the first sweep."""
    store, _ = damaged
    engine, done = engine_of(CPU, store=store, weight_format="float32"), {}
    paths = [store.embeddings.path, store.head.path]

    def change(stats):
        for path in paths:
            if stats.sweeps == sweep:
                touch(path)
            if stats.sweeps == sweep + 2:
                path.unlink()

    change(engine.stats)
    for completion in engine.generate(rows(), on_sweep=change):
        done[completion.index] = completion.samples[0].token_ids
    assert [done[index] for index in sorted(done)] == expected


def test_an_engine_that_cannot_be_made_leaves_no_file_open(engine_of, stores, tmp_path):
    """Weights are there when KV finds no place."""
    folder = tmp_path / "offload"
    shutil.copytree(stores, folder)
    (store,) = (open_store(path) for path in (folder / "stores").iterdir() if "int4" not in path.name)
    with pytest.raises(BatchgenError, match="does not take"):
        engine_of(CPU, store=store, weight_format="float32", offload_dir=tmp_path / "nowhere")
    opened = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in opened if str(folder) in path]


@pytest.mark.parametrize("device", [EMULATED, CPU], ids=str)
def test_the_offload_directory_is_removed_in_the_midst_of_a_job(engine_of, stores, tmp_path, expected, device):
    """What is open stays readable and writable: the job completes."""
    folder = tmp_path / "offload"
    shutil.copytree(stores, folder)
    engine = engine_of(device, offload_dir=folder, weight_format="float32")
    done = {}
    for completion in engine.generate(
        rows(), on_sweep=lambda stats: shutil.rmtree(folder) if stats.sweeps == 3 else None
    ):
        done[completion.index] = completion.samples[0].token_ids
    assert not folder.exists() and engine.stats.sweeps > 6
    assert [done[i] for i in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("call", "expected_error"),
    [("preadv", "cannot read .*: Input/output error"), ("pwritev", "cannot write KV at .*: Input/output error")],
)
def test_the_disk_fails_in_the_midst_of_a_job(engine_of, monkeypatch, call, expected_error):
    """Weights or KV, whichever comes first; in the disk's own thread."""
    engine = engine_of()
    real, count = getattr(os, call), itertools.count()

    def fail(*args):
        if next(count) >= 40:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(BatchgenError, match=expected_error) as found:
        list(engine.generate(endless()))
    assert "\n" not in str(found.value) and "the same command goes on" in str(found.value)
    assert next(count) > 40, "the disk did not fail"


def test_a_row_that_fails_alone(engine_of, expected):
    """What is wrong with a row stays with it, whatever the tiers are at."""
    engine = engine_of(weight_format="float32")
    bad = [Request([10_000]), Request("", SamplingParams(max_tokens=3)), Request([5], error="null")]
    done = {c.index: c for c in engine.generate([*rows(), *bad])}
    assert [done[i].samples[0].token_ids for i in range(10)] == expected
    assert all(done[i].error for i in (10, 11, 12))
