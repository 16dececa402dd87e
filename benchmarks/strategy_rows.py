"""Rows of NEO's, APEX's and Pie's figures: how much faster one strategy is than another, planned and simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from paper_row import PaperRow
from paper_settings import (
    HOSTS,
    OSC_OUTPUT,
    OUTPUT_LENS,
    Setting,
    a10g,
    azure,
    azure_on_h100s,
    expanded,
    faster,
    gh200,
    h100s,
    t4_of_vllm,
)

_PLANNED_WELL = "the GPU alone has continuous admission and chunked prompts here, so less is left to gain"
_DECIDED_ONCE = "how many sequences the CPU attends to is planned once for the job, while NEO chooses in each sweep"
_ONE_AFTER_ANOTHER = "the paper's requests arrive one after the other; here all rows are there, which helps a GPU alone"
_MEMORY_OF_VLLM = "how much GPU memory their engines leave to KV on a T4 is not printed, and decides how many rows fit"
_LONGEST_UNKNOWN = "the figure is the lowest of theirs, and the longest output of the paper is not printed"
_SLOW_HOST = "each GPU of the profile has an eighth of a host, whose CPU attends to few sequences in a sweep"
_CPU_IS_FAST = "NEO's two batches have as many sequences as fit, where CPU attention is as fast as here"
_OVERLAPPED = "FlexGen's strategy runs on the same runtime here, without padding, and all its lanes overlap"
_RECOMPUTED = "requests of theirs arrive at a rate, and preempted ones are computed again; here admission is projected"

# The expansions that Pie's figures show are at most twice as many sequences as the GPU alone holds.
_MOST_EXPANSION = 2


def _row(paper: str, item: str, setting: str, than: str, published: float, gain: float | None, reason: str) -> PaperRow:
    """A row, with the reason only where the prediction is not close."""
    row = PaperRow(paper, item, setting, f"times {than}", published, gain, reason)
    return replace(row, reason="") if row.is_close else row


def _best(settings: Iterable[Setting], strategy: str, than: str) -> float | None:
    """The highest factor over some settings."""
    gains = (faster(setting, strategy, than) for setting in settings)
    return max((gain for gain in gains if gain is not None), default=None)


def neo_rows() -> Iterator[PaperRow]:
    """Figures 6 (throughput at the highest load), 8b, 9 and 10a: gains over a GPU that works alone."""

    def over_gpu(item: str, name: str, published: float, settings: list[Setting], reason: str) -> PaperRow:
        return _row("NEO", item, name, "GPU-only", published, _best(settings, "NEO", "GPU-only"), reason)

    yield over_gpu("figure 6a", "2x H100, Azure code", 1.143, [azure_on_h100s()], _ONE_AFTER_ANOTHER)
    yield over_gpu("figure 6b", "A10G, host 4x, Azure code", 1.064, [azure("code", "4x")], _ONE_AFTER_ANOTHER)
    yield over_gpu("figure 6c", "T4, OSC", 6.63, [t4_of_vllm(OSC_OUTPUT)], _MEMORY_OF_VLLM)
    longest = h100s(OUTPUT_LENS[-1])
    gain = faster(longest, "FastDecode+", "GPU-only")
    name = f"2x H100, FastDecode+, outputs of {OUTPUT_LENS[-1]}"
    yield _row("NEO", "figure 8b", name, "GPU-only", 0.6, gain, _LONGEST_UNKNOWN)

    def over_lengths(machine: Callable[[int], Setting]) -> list[Setting]:
        return [machine(output_len) for output_len in OUTPUT_LENS]

    best = "best output length"
    yield over_gpu("figure 9", f"2x H100, {best}", 1.14, over_lengths(h100s), _SLOW_HOST)
    yield over_gpu("figure 9", f"A10G, {best}", 1.26, over_lengths(lambda n: a10g("4x", n)), _DECIDED_ONCE)
    yield over_gpu("figure 9", f"T4, {best}", 8.5, over_lengths(t4_of_vllm), _MEMORY_OF_VLLM)
    for host, published in zip(HOSTS, (1.122, 1.133, 1.297, 1.793), strict=True):
        settings = over_lengths(lambda n, host=host: a10g(host, n))
        yield over_gpu("figure 10a", f"A10G, host {host}, {best}", published, settings, _PLANNED_WELL)


def apex_rows() -> Iterator[PaperRow]:
    """Figures 5 and 7: gains over NEO and over a GPU that works alone."""
    for than, published in {"NEO": 1.71, "GPU-only": 1.96}.items():
        best = _best([t4_of_vllm(output_len) for output_len in OUTPUT_LENS], "APEX", than)
        yield _row("APEX", "figure 5a", "T4, OSC, best output length", than, published, best, _MEMORY_OF_VLLM)
    for than, published in {"NEO": 1.13, "GPU-only": 1.11}.items():
        gain = faster(azure("conv", "16x"), "APEX", than)
        reason = _CPU_IS_FAST if than == "NEO" else _ONE_AFTER_ANOTHER
        yield _row("APEX", "figure 5b", "A10G, Azure conversation", than, published, gain, reason)
    for output_len, published in zip(OUTPUT_LENS, (1.05, 1.05, 1.05, 1.22, 1.37), strict=True):
        gain = faster(a10g("16x", output_len), "APEX", "NEO")
        yield _row("APEX", "figure 7", f"A10G, outputs of {output_len}", "NEO", published, gain, _CPU_IS_FAST)


def pie_rows() -> Iterator[PaperRow]:
    """Figures 6, 7, 8 and 10, on a GH200 whose GPU has so many GB for KV beside the weights."""

    def best(item: str, model: str, data: str, sizes: tuple[int, ...], published: float) -> PaperRow:
        settings = [expanded(gh200(model, data, kv_gb), _MOST_EXPANSION) for kv_gb in sizes]
        gain = _best(settings, "Pie", "GPU-only")
        name = f"GH200, {model}, {data}, {' or '.join(map(str, sizes))} GB of KV"
        return _row("Pie", item, name, "GPU-only", published, gain, _RECOMPUTED)

    yield best("figure 6", "OPT-30B", "ShareGPT", (3, 7), 1.86)
    yield best("figure 6", "OPT-30B", "Alpaca", (3, 7), 1.58)
    yield best("figure 6", "OPT-13B", "ShareGPT", (3, 7), 1.54)
    yield best("figure 6", "Llama-13B", "Alpaca", (3, 7), 1.27)
    yield best("figure 7", "OPT-13B", "Alpaca", (3, 6, 12), 1.5)
    yield best("figure 7", "OPT-13B", "ShareGPT", (3, 6, 12), 1.9)
    yield best("figure 8", "OPT-30B", "Alpaca", (3,), 1.6)
    yield best("figure 8", "OPT-30B", "ShareGPT", (3,), 1.9)
    for data, published in (("Alpaca", 7.8), ("ShareGPT", 9.4)):
        gain = faster(gh200("OPT-30B", data, 7), "Pie", "FlexGen")
        name = f"GH200, OPT-30B, {data}, 7 GB of KV"
        yield _row("Pie", "figure 10", name, "FlexGen", published, gain, _OVERLAPPED)
