"""Writes the tables of docs/benchmarks.md, whose figures come from benchmarks/results/.

    python docs/describe_benchmarks.py

Each row has the words of a result as a template over its file. `make docs` runs this, and a test compares the page with
the committed one. `quotes` has the figures that other pages repeat.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from draw_ladder import SHARES

from batchgen.core.dtypes import KV_CODE_BITS
from batchgen.core.quality import KV_LOSSES, NEAR, QUALITIES, SMALL, WEIGHT_LOSSES, format_loss, format_losses

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
HEADER = "| job | machine | result | file | command |\n|---|---|---|---|---|\n"
# Letters of the page for what is in a file's name or text.
MACHINES = (
    ("amd-epyc-25-17", "A"),
    ("amd-epyc-26-2", "B"),
    ("intel-xeon-processor-6-207", "C"),
    ("intel-xeon-processor-6-167", "E"),
    ("amd-epyc-25-1", "F"),  # after "A", whose name begins with it
)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        job: what ran.
        file: the result file, without its ending.
        command: the script with its options.
        words: the result in words, from the content of the file.
    """

    job: str
    file: str
    command: str
    words: Callable[[dict], str]

    def line(self) -> str:
        command = f"python benchmarks/{self.command}" if ".py" in self.command.partition("/")[0] else self.command
        cells = (self.job, machine_of(self.file), self.words(read(self.file)), f"`{self.file}.json`", f"`{command}`")
        return f"| {' | '.join(cells)} |\n"


def read(file: str) -> dict:
    """The content of a result file."""
    return json.loads((RESULTS / f"{file}.json").read_text())


def machine_of(file: str) -> str:
    """The page's letter for the machine that a result is of; D where the file does not name the kind of its EPYC."""
    on, named = read(file).get("machine"), file
    if isinstance(on, dict) and "family" in on:
        name = f"{on['cpu']} {on['family']} {on['model']}"
        named = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", " ", name).lower())
    letters = [letter for part, letter in MACHINES if part in named]
    return letters[0] if letters else "D" if "EPYC" in (RESULTS / f"{file}.json").read_text() else "-"


def times(ratios: Iterable[float], digits: int = 2) -> str:
    """Ratios as "1.37, 1.33 and 2.70"."""
    *first, last = (f"{ratio:.{digits}f}" for ratio in ratios)
    return f"{', '.join(first)} and {last}" if first else last


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def span(values: Iterable[float], digits: int = 1) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def errors(found: dict) -> str:
    return f"{100 * found['median']:.0f} and {percent(found['worst'])}"


def over_peers(workload: str, peers: Iterable[str]) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        work = d["workloads"][workload]
        rate = f", {work['total_tokens_per_s']['batchgen']:,.0f} tokens/s"
        bound = (
            f"; {percent(work['bound']['share_of_wall'])} of what products and memory allow" if "bound" in work else ""
        )
        wall = statistics.mean(work["wall_s"]["batchgen"])
        return f"{wall:.1f} s{rate}{bound}; {times(work['batchgen_over'][peer] for peer in peers)} times as fast"

    return words


def larger_than_memory(d: dict) -> str:
    run, rates = d["runs"][0], d["summary"]["generated_tokens_per_s"]
    bound, peer = run["bound"], next((r for r in d["runs"] if r["engine"] == "llama.cpp"), None)
    beside = ""
    if peer:
        projected = "" if peer["complete"] else f" (projected from {peer['measured_s']:.0f} s)"
        ratio = d["summary"]["batchgen_over_llama.cpp"]
        beside = f"; llama.cpp {rates['llama.cpp']:.1f}{projected}: {ratio:.1f} times as fast"
    return (
        f"{rates['batchgen']:.1f} generated tokens/s;"
        f" {percent(bound['share_of_bound'])} of what disk, products and states allow;"
        f" predicted {bound['predicted_over_measured']:.2f} times the measured time;"
        f" peak memory {run['limited']['peak_bytes'] / 2**30:.1f} GiB{beside}"
    )


def ladder(name: str) -> Callable[[dict], str]:
    """The largest and the smallest limit within which each engine did the job. name: the model's name."""

    def limit(share: float) -> str:
        told = SHARES[f"{share:g}"]
        return "with ample memory" if told == "ample" else f"within {told} of the model"

    def words(d: dict) -> str:
        tokens = d["arguments"]["rows"] * d["arguments"]["output_tokens"]
        rates: dict[str, dict[float, float]] = {}
        for cell in d["models"][name]["cells"].values():
            if "wall_s" in cell and (cell.get("valid") or "same" not in cell):  # older ones are not judged
                of_engine = rates.setdefault(cell["engine"], {})
                of_engine[cell["share"]] = max(of_engine.get(cell["share"], 0.0), tokens / cell["wall_s"])
        shown = [
            f"{engine} {' and '.join(f'{by_share[at]:.{int(by_share[at] < 10)}f} {limit(at)}' for at in ends)}"
            for engine, by_share in rates.items()
            for ends in [sorted({max(by_share), min(by_share)}, reverse=True)]
        ]
        return f"generated tokens/s: {'; '.join(shown)}"

    return words


def cascade_planted(d: dict) -> str:
    worst = max(case["broken"] for case in d["planted"].values())
    shares = [f"{case['large_share']:.0%}" for case in d["planted"].values()]
    return f"broken by {worst} of 200 samples at most; the large model answers {', '.join(shares)} of the rows"


def cascade_data(d: dict) -> str:
    def shown(sets: dict) -> str:
        return ", ".join(f"{name} {case['broken']} and {case['large_share']:.0%}" for name, case in sets.items())

    of_models = "; ".join(f"{models}: {shown(sets)}" for models, sets in d["data"].items())
    return f"broken samples, and rows of the large model: {of_models}"


def perplexities(*names: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        added = [percent(d["results"][name]["ratio_to_fp32"] - 1, 2) for name in names]
        return f"{' and '.join(added)} more; {d['results']['fp32']['tokens_scored']:,} tokens"

    return words


def accuracies(d: dict) -> str:
    found = (f"{name} {', '.join(f'{value:.3f}' for value in one.values())}" for name, one in d["formats"].items())
    return "; ".join(found)


BUDGETS, BUDGET_LENGTHS = ("20%", "10%"), (2048, 4096, 8192)


def budget_speed(placement: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        def of_length(length: int) -> str:
            found = d["results"][f"demo, bfloat16, {length}, speed, {placement}"]["times_as_fast"]
            return f"{length:,} tokens: " + ", ".join(f"{found[budget]:.2f}" for budget in BUDGETS)

        return "; ".join(map(of_length, BUDGET_LENGTHS))

    return words


def budget_loss(d: dict) -> str:
    """The perplexities and the numbers found of all attention budgets, in the longest contexts that were measured."""
    results = d["results"]
    start = next(name for name in reversed(results) if ", perplexity, " in name).rsplit(", ", 2)[0]
    whole, *some = (results[f"{start}, perplexity, {budget}"]["perplexity"] for budget in ("all", *BUDGETS))
    found = [results[f"{start}, retrieval, {budget}"] for budget in ("all", *BUDGETS)]
    counts = [f"{one['numbers_found'] * one['cases']:.0f}" for one in found]
    losses = " and ".join(f"{value / whole - 1:.1%}".replace("%", " %") for value in some)
    return (
        f"{int(start.rsplit(', ', 1)[1]):,} tokens: perplexity {losses} higher; {' and '.join(counts[1:])} of"
        f" {found[0]['cases']} numbers found in the text, with `all` {counts[0]}"
    )


def state_decode(dtype: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        shares = []
        for sequences in (1, 4, 16, 64):
            named = [
                found["ratio"]
                for name, found in d["medians"].items()
                if name.startswith(f"decode, {dtype} ") and name.endswith(f" {sequences} sequences")
            ]
            shares.append(span((100 * ratio for ratio in named), 0))
        return f"{', '.join(shares[:-1])} and {shares[-1]} %"

    return words


def state_prefill(d: dict) -> str:
    ratios = [found["ratio"] for name, found in d["medians"].items() if name.startswith("avx512_bf16: prefill")]
    return f"{span((100 * ratio for ratio in ratios), 0)} %"


def plan_accuracy(d: dict) -> str:
    errors = [abs(job["error"]) for job in d["jobs"]]
    return f"off by {percent(statistics.median(errors))} at the median, and by {percent(max(errors))} at most"


def first_minutes(d: dict) -> str:
    def first_rows(state: str, job: str) -> str:
        series = [run["first_row_s"] for run in d["jobs"][state][job]]
        return f"{series[0]:.1f} s on a machine never seen, {series[-1]:.1f} s on a known one"

    runs = [run for jobs in d["jobs"].values() for series in jobs.values() for run in series]
    share = max(run["measuring_s"] / run["total_s"] for run in runs)
    return (
        f"first line after {max(run['first_line_s'] for run in runs):.2f} s at most; first finished row of the 4:"
        f" {first_rows('idle', 'four rows')} (busy: {first_rows('busy', 'four rows')}), of the 189:"
        f" {first_rows('idle', 'quickstart')}; measuring: at most {max(run['measuring_s'] for run in runs):.1f} s and"
        f" {percent(share)} of a job"
    )


def policy_errors(setting: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        found = d["settings"][setting]
        assert found["different_rows"] == 0
        rank, slower = found["rank_of_plan"], found["plan_against_fastest"]
        place = "the fastest" if rank == 1 else f"number {rank}, {slower:.2f} times as long as the fastest"
        return (
            f"simulator {errors(found['simulated_error'])}, cost model {errors(found['planned_error'])};"
            f" the planner's own choice is {place} of the {len(found['policies'])};"
            " every policy generated the same tokens"
        )

    return words


def strategies(d: dict) -> str:
    *settings, _ = d["settings"].values()
    assert all(s["chosen_strategy"] == s["fastest_strategy"] in s["meant_to_win"] for s in settings)
    slower = max(s["chosen_against_fastest"] for s in settings)
    chosen = [s["plans"]["chosen"] for s in settings]
    short = [100 * (1 - plan["planned_s"] / plan["measured_s"]) for plan in chosen]
    return (
        f"{', '.join(s['fastest_strategy'] for s in settings)} are the fastest where they are meant to be;"
        f" the plan follows that strategy in all {len(settings)}, and takes {slower:.2f} times as long as the fastest;"
        f" its prediction is {span(short, 0)} % too short"
    )


def reaction(d: dict) -> str:
    ratios = []
    for case in d["cases"].values():
        for ways in case.values():
            adapting, same, *others = (way["seconds"] for way in ways.values())
            ratios.append((same / adapting, adapting / min(same, *others)))
    gains, against_best = zip(*ratios, strict=True)
    return (
        f"{span(gains, 2)} times as fast as without adaptation; {span(against_best, 2)} times as long as the best plan"
        " for that machine"
    )


def flipped_strategy(d: dict) -> str:
    setting = list(d["settings"].values())[-1]
    taken = {name: plan["measured_s"] for name, plan in setting["plans"].items()}
    return (
        f"NEO takes {taken['NEO'] / taken['APEX']:.2f} times as long as APEX;"
        f" the plan follows {setting['chosen_strategy']},"
        f" which takes {setting['chosen_against_fastest']:.2f} times as long as NEO"
    )


def pipeline(d: dict) -> str:
    assert d["same_output"]
    predicted = times(stage["predicted_over_measured"] for stage in d["stages"].values())
    return f"{d['speedup']:.2f} times as fast, same output; predicted {predicted} times the measured time"


def paper_gains(d: dict) -> str:
    gains = [cell["gains"] for cell in d["cells"]]
    best = {name: max(gain[name] for gain in gains if gain.get(name)) for name in ("NEO", "APEX")}
    return f"NEO up to {percent(best['NEO'])}, APEX up to {percent(best['APEX'])}"


def papers(d: dict) -> str:
    def is_close(row: dict) -> bool:
        if row["published"] is None or row["predicted"] is None:
            return row["published"] is row["predicted"]
        return abs(row["predicted"] / row["published"] - 1) <= 0.25

    rows = [row for of_paper in d["papers"].values() for row in of_paper]
    return f"{sum(map(is_close, rows))} of {len(rows)} are off by at most a quarter"


def row_order(d: dict) -> str:
    (of,) = d["tables"]["reviews"]
    wall_s, times, shares = of["wall_s"], of["faster_than"], of["share_of_tree"]
    return (
        f"{wall_s['here'][0]:.0f} s; {times['other']:.2f} and {times['vllm']:.2f} times as fast;"
        f" {shares['here']:.0%} of what the prompts' tree can save ({shares['other']:.0%} in input order)"
    )


def row_order_shares(d: dict) -> str:
    def of_table(name: str) -> str:
        least = min(run["share_of_tree"]["here"] for run in d["tables"][name])
        kv = sorted({run["kv_tokens"] for run in d["tables"][name]})
        sizes = " to ".join(f"{tokens:,}" for tokens in kv[:: max(1, len(kv) - 1)])
        return f"`{name}` {least:.1%} with KV of {sizes} tokens"

    return "; ".join(map(of_table, d["tables"]))


def length_order(d: dict) -> str:
    (before,), (after,) = d["runs"]["prompt_order"], d["runs"]["longest_first"]
    return (
        f"{after['seconds']:.0f} s; {d['gain']:.2f} times as fast; {after['sweeps']} sweeps against"
        f" {before['sweeps']}, at least {d['least_sweeps']}"
    )


def length_order_sweeps(d: dict) -> str:
    found = [f"{of['times_fewer_sweeps']:.2f} with {of['seqs']}" for of in d["sizes"]]
    above = max(of["longest_first"] / of["least"] - 1 for of in d["sizes"])
    of_input = [of["input_order"] / of["longest_first"] for of in d["sizes"]]
    return (
        f"times fewer: {', '.join(found)} in flight ({min(of_input):.2f} to {max(of_input):.2f} against input order);"
        f" at most {above:.1%} more than any order needs"
    )


def draft_sources(d: dict) -> str:
    names = ("prompt lookup", "prompt lookup and rows that have ended", "prompt lookup and suffix tree")
    found = []
    for task, of in d["tasks"].items():
        tokens = ", ".join(f"{of[name]['tokens_per_step']:.2f}" for name in names)
        found.append(f"{task} {tokens}")
    return "; ".join(found)


def sort_prompts(d: dict) -> str:
    few, many = d["runs"]
    return (
        f"{many['sort_cpu_s']:.0f} CPU seconds, {many['part_of_job']:.2%} of a job of {many['job_s']:,.0f} s;"
        f" {many['peak_bytes'] / 1e6:.0f} MB against {few['peak_bytes'] / 1e6:.0f} MB"
    )


def drafted(case: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        found = d["cases"][case]
        run = min(found["on"], key=lambda run: run["seconds"])
        accepted = run["accepted_tokens"] / max(1, run["drafted_tokens"])
        forced = f", {run['forced_tokens']:,} tokens forced" if run["forced_tokens"] else ""
        return (
            f"{found['gain']:.2f} times as fast, predicted {found['predicted_gain']:.2f}; {run['seconds']:.3g} s,"
            f" predicted {run['predicted_s']:.3g} s;"
            f" {percent(accepted)} of {run['drafted_tokens']:,} accepted{forced}"
        )

    return words


def lm_eval(d: dict) -> str:
    ours, theirs = (d[side][0]["wall_s"] for side in ("batchgen", "hf"))
    return f"{ours:.0f} s against {theirs:.0f} s: {d['ratio']:.2f} times as fast; the same scores"


def embeddings(d: dict) -> str:
    peers = {name: wall for name, wall in d["median_wall_s"].items() if name != "batchgen"}
    differences = d["differences"].get("batchgen", d["differences"])  # files of several peers have them by engine
    fastest, last = min(peers, key=lambda name: peers[name]), d["runs"]["batchgen"][-1]
    ours = f"{d['median_wall_s']['batchgen']:.3g} s (last run: {last['busy_s']['compute']:.3g} s in layers"
    near = f"; numbers differ by at most {differences['largest']:.0e}" if differences else ""
    return (
        f"{ours}, predicted {last['predicted_s']:.3g} s) against {peers[fastest]:.3g} s ({fastest}):"
        f" {d['times_as_fast']:.2f} times as fast{near}"
    )


def structured(d: dict) -> str:
    valid = f"{d['rows_valid']} of {d['rows']} valid"
    return f"{valid}; {percent(d['ratio'])} of the throughput without a schema"


def decode_shares(d: dict) -> str:
    def of_group(group: int) -> str:
        ratios = [row["ratio"] for name, row in d["medians"].items() if f"group {group}," in name]
        return span([100 * ratio for ratio in ratios], 0)

    return f"{', '.join(of_group(group) for group in (1, 4, 8))} %"


def prefill_ratios(isa: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        ratios = [row["ratio"] for name, row in d["medians"].items() if name.startswith(f"{isa}: prefill bf")]
        return f"{span(ratios)} times as fast"

    return words


def packed_ratios(isa: str, weight_format: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        name = f"{isa}: {weight_format} to bf16 weights, 3072x8192"
        ratios = (d["medians"][f"{name}, {tokens} tokens"]["ratio"] for tokens in (1, 4, 8, 16))
        return f"{times(ratios)} times as fast"

    return words


def linear_ratios(isa: str, dtype: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        row = d["medians"][f"{isa}: linear {dtype}, all"]
        return f"{row['geometric_mean']:.2f} times as fast (geometric mean; {row['worst']:.2f} at worst)"

    return words


def native(case: str) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        over, peer = (d["models"][case][f"native_over_{side}"] for side in ("dequantized", "llama.cpp"))
        decoded = [times(side[f"decoded_tokens_per_s_of_{n}"] for n in (1, 4, 16)) for side in (over, peer)]
        return (
            f"decoding {decoded[0]} times as fast, prompts {over['prompt_tokens_per_s']:.1f} times;"
            f" {over['model_bytes']:.2f} of the memory; loading {over['load_s']:.2f} times as long;"
            f" {decoded[1]} times as fast as llama.cpp decodes"
        )

    return words


def memory_flat(d: dict) -> str:
    few, many = (run["peak_bytes"] / 1e6 for run in d["runs"])
    return f"{many:.0f} MB against {few:.0f} MB"


def long_rows(d: dict) -> str:
    return "; ".join(
        f"{name}: {run['report']['wall_s']:.0f} s (predicted {run['report']['predicted_wall_s']:.0f} s),"
        f" {run['kv_bytes'] / 1e6:.0f} MB of KV, {run['limited']['peak_bytes'] / 1e6:.0f} MB at most in the group"
        for name, run in d["runs"].items()
    )


def embedding_rows(d: dict) -> str:
    return ", ".join(f"{run['peak_bytes'] / 1e6:.0f} MB at {run['rows']:,}" for run in d["runs"])


def host_time(d: dict) -> str:
    now, before = (d["million_rows_cpu_s"][side] for side in ("this", "other"))
    return f"{now:.0f} CPU seconds; {before:.0f} before"


def sweep_host_time(seqs: int) -> Callable[[dict], str]:
    def words(d: dict) -> str:
        now, before = (d["least_of_rounds"][side][str(seqs)] for side in ("this", "other"))
        return (
            f"{now['median_ms']:.1f} ms, mean {now['mean_ms']:.1f} ms, {now['with_prompts'] / now['sweeps']:.0%} of the"
            f" sweeps with prompts; {before['median_ms']:.1f} ms, mean {before['mean_ms']:.1f} ms before"
        )

    return words


def kills(d: dict) -> str:
    assert d["mismatches"] == 0
    return f"{sum(d['hits'].values())} kills and interrupts: every output equal to an undisturbed one's"


def soak(d: dict) -> str:
    assert d["wrong"] == [] and d["resident_growth"] <= 0.05
    return (
        f"{60 * d['hours']:.0f} minutes, {d['jobs']} jobs, {sum(d['disturbed'].values())} disturbances:"
        f" every output equal to an undisturbed one's, no file left;"
        f" resident memory grew by {percent(d['resident_growth'], 1)}"
    )


def random_configs(d: dict) -> str:
    equal, refused = (sum(kinds[kind] for kinds in d["models"].values()) for kind in ("equal", "refused"))
    assert d["wrong"] == [] and d["largest_difference"] <= d["margin"] and equal + refused == d["draws"]
    return (
        f"{equal} equal (log-probabilities within {d['largest_difference']:.0e}),"
        f" {refused} refused by the name of a key, {d['refused_by_transformers_too']} of them by transformers too"
    )


def fuzz(d: dict) -> str:
    assert d["failed"] == []
    return f"{sum(end - begin for begin, end in d['seeds'].values()):,} jobs: no traceback, hang or wrong row"


def share(d: dict) -> str:
    assert d["rows_that_differ"] == 0
    return f"{d['kills']} killed, {d['suspensions']} suspended: all {d['rows']:,} rows equal to one worker's"


A, B, C = "amd-epyc-25-17-avx512-bf16", "amd-epyc-26-2-avx512-bf16", "intel-xeon-processor-6-207-avx512-bf16"
E, F = "intel-xeon-processor-6-167-amx", "amd-epyc-25-1-avx2"
ALL_PEERS, TWO_PEERS = ("openvino", "vllm", "llama.cpp", "transformers"), ("openvino", "vllm")
PEER_NAMES = "OpenVINO GenAI, vLLM, llama.cpp and transformers"
TWO_ENGINES = "cpu_engines.py --engines batchgen,openvino,vllm --repeats 1"
WORKLOADS = {
    "fixed": "`fixed`: 64 prompts of 512 tokens, 32 out",
    "azure": "`azure`: 64 requests of the Azure trace, up to 1,024 in and 256 out",
    "match": "`match`: the quickstart's 189 prompts, 1,682 of 1,746 tokens shared",
}
OSS, QWEN = "gpt-oss-20b's shape in MXFP4 (12.8 GB)", "Qwen3-30B-A3B's shape in Q4_0 (18.1 GB)"
OSS_COMMAND = "larger_than_memory.py --shape gpt-oss-20b --work-dir DIR"
QWEN_COMMAND = "larger_than_memory.py --shape qwen3-30b-a3b --work-dir DIR"
HYBRID, GEMMA = "Qwen3.6-35B-A3B's shape in Q4_0 (21.0 GB)", "Gemma 4 26B-A4B's shape in Q4_0 (15.3 GB)"
HYBRID_COMMAND = "larger_than_memory.py --shape qwen3.6-35b-a3b --work-dir DIR"
GEMMA_COMMAND = "larger_than_memory.py --shape gemma-4-26b-a4b --engines batchgen --work-dir DIR"
STATES_COMMAND = "cpu_engines.py --shape {} --workloads fixed --engines batchgen,vllm --repeats 1"
BUDGET_COMMAND = "attention_budget.py --dtype bfloat16 --rows 4 --budget all --budget 20% --budget 10%"
PROMISE = "[the promise of a cascade](cascades.md), 0.95 with 0.95"
POLICIES = "twenty policies drawn at random, median and worst error"

TABLES: dict[str, list[Row]] = {
    "Against other engines": [
        *(
            Row(f"{job}; against {PEER_NAMES}", f"cpu_engines-{A}", "cpu_engines.py", over_peers(name, ALL_PEERS))
            for name, job in WORKLOADS.items()
        ),
        *(
            Row(
                f"`{name}`, against OpenVINO GenAI and vLLM",
                f"cpu_engines-{B}",
                TWO_ENGINES,
                over_peers(name, TWO_PEERS),
            )
            for name in WORKLOADS
        ),
        *(
            Row(
                f"`{name}`, against OpenVINO GenAI and vLLM; one round",
                f"cpu_engines-{E}",
                TWO_ENGINES,
                over_peers(name, TWO_PEERS),
            )
            for name in WORKLOADS
        ),
        *(
            Row(
                f"`{name}`, weights and KV in 8 bits, against OpenVINO GenAI's defaults on the model in 8 bits",
                f"cpu_engines_int8-{B}",
                "cpu_engines.py --bits 8",
                over_peers(name, ["openvino"]),
            )
            for name in WORKLOADS
        ),
        *(
            Row(
                f"`fixed`, on {name}'s shape, against vLLM",
                f"cpu_engines-{name.lower()}-{A}",
                STATES_COMMAND.format(name.lower()),
                over_peers("fixed", ["vllm"]),
            )
            for name in ("Qwen3.5-2B", "Qwen3.5-4B")
        ),
        *(
            Row(
                "a shuffled table of 150 products with 6 reviews each, demo in bf16 within 1,400 MiB, 16 rows in"
                " flight, against rows in input order and vLLM with prefix caching; one round",
                f"row_order-{cpu}",
                "row_order.py --tables reviews --memory 1400MiB --repeats 1 --other CHECKOUT --vllm ENVIRONMENT",
                row_order,
            )
            for cpu in (A, E)
        ),
        Row(
            "four shuffled tables, 16 rows in flight, three budgets: the least share of what the prompts' tree can save"
            " (layers compute nothing)",
            "row_order_shares",
            "row_order.py --counts --repeats 1 --tables columns --memory 1070MiB,1100MiB,1400MiB",
            row_order_shares,
        ),
    ],
    "Larger than memory": [
        Row(f"{OSS} within 8 GiB", f"larger_than_memory-gpt-oss-20b-8GiB-{A}", OSS_COMMAND, larger_than_memory),
        Row(f"{OSS} within 8 GiB", f"larger_than_memory-gpt-oss-20b-8GiB-{C}", OSS_COMMAND, larger_than_memory),
        *(
            Row(
                f"{OSS} within 20 GiB, all in memory",
                f"larger_than_memory-gpt-oss-20b-20GiB-{machine}",
                f"{OSS_COMMAND} --memory 20GiB",
                larger_than_memory,
            )
            for machine in (A, C)
        ),
        Row(f"{QWEN} within 10 GiB", f"larger_than_memory-qwen3-30b-a3b-10GiB-{A}", QWEN_COMMAND, larger_than_memory),
        Row(f"{QWEN} within 10 GiB", f"larger_than_memory-qwen3-30b-a3b-10GiB-{C}", QWEN_COMMAND, larger_than_memory),
        Row(
            f"{HYBRID} within 10 GiB",
            f"larger_than_memory-qwen3.6-35b-a3b-10GiB-{A}",
            HYBRID_COMMAND,
            larger_than_memory,
        ),
        Row(
            f"{GEMMA} within 10 GiB",
            f"larger_than_memory-gemma-4-26b-a4b-10GiB-{A}",
            GEMMA_COMMAND,
            larger_than_memory,
        ),
        *(
            Row(
                f"[a ladder of memory](ladder.md): {name}{', random weights' if model.get('random') else ''}",
                path.stem,
                f"ladder.py{f' --shapes {name}' if model.get('random') else ''} --work-dir DIR",
                ladder(name),
            )
            for path in sorted(RESULTS.glob("ladder-*.json"))
            for name, model in read(path.stem)["models"].items()
        ),
        Row(
            "[drafts](tiers.md#drafts) against none: a 3B shape within 3 GiB, 32 rows whose answers are spans of"
            " prompts; one round",
            f"drafts-{E}",
            "drafts.py --work-dir DIR --cases extraction --rounds 1",
            drafted("extraction"),
        ),
        *(
            Row(
                f"drafts against none: gpt-oss-20b's shape in MXFP4 within 8 GiB, {rows} rows whose answers are"
                " spans of prompts; one round",
                f"drafts-{E}",
                f"drafts.py --work-dir DIR --cases 'experts {rows}' --rounds 1 --prompt-tokens 96 --output-tokens 48",
                drafted(f"experts {rows}"),
            )
            for rows in (16, 64)
        ),
        Row(
            "drafts against none: restaurant entries into JSON under a schema, demo on disk, 32 rows at a time",
            f"drafts-{E}",
            "drafts.py --work-dir DIR --cases json",
            drafted("json"),
        ),
        Row(
            "drafts against none: 2 layers of a 3B shape on disk, 256 rows, where computation binds",
            f"drafts-{E}",
            "drafts.py --work-dir DIR --cases 'many rows' --prompt-tokens 100 --output-tokens 48",
            drafted("many rows"),
        ),
        Row(
            "a 3B shape within 3 GiB, 1,280 rows with output lengths of the Azure trace over 32, 128 in flight: longest"
            " first, against the order of the prompts; one round",
            f"length_order-{E}",
            "length_order.py --work-dir DIR",
            length_order,
        ),
        Row(
            "sweeps of jobs with output lengths of the Azure trace, rows ten times what is in flight: longest first,"
            " against the order of the prompts (layers compute nothing)",
            "length_order_sweeps",
            "length_order.py --counts",
            length_order_sweeps,
        ),
        Row(
            "answers of demo replayed: tokens that a row gains in a sweep, with up to 8 drafts of grammar and prompt"
            " lookup; of these and of rows that have ended; of a suffix tree of these rows instead",
            "draft_sources",
            "draft_sources.py",
            draft_sources,
        ),
    ],
    "Fewer bits": [
        Row(
            "perplexity of weights and activations in 8 bits, over fp32",
            "perplexity",
            'perplexity.py --format fp32 --format "int8 weights"',
            perplexities("int8 weights"),
        ),
        Row("perplexity of int4 weights, over fp32", "perplexity", "perplexity.py", perplexities("int4 weights")),
        Row(
            "perplexity of KV in 8 bits and in 5-bit codes, over fp32",
            "perplexity",
            "perplexity.py",
            perplexities("int8 KV", "int5 KV"),
        ),
        *(
            Row(
                f"decoding with an attention budget of 20% and of 10%, KV {place}, times as fast as `all`",
                "attention_budget",
                f"{BUDGET_COMMAND} --part speed",
                budget_speed(placement),
            )
            for placement, place in (("cpu", "in memory"), ("disk", "on disk"))
        ),
        Row(
            "what an attention budget of 20% and of 10% loses, the demo model in fp32",
            "attention_budget_losses",
            "attention_budget.py --rows 4 --part perplexity --part retrieval --lengths 2048 4096 --output FILE",
            budget_loss,
        ),
        Row(
            "the same in bf16, of two texts of which one repeats what stands far before",
            "attention_budget_losses_8192",
            "attention_budget.py --rows 2 --dtype bfloat16 --part perplexity --part retrieval --lengths 8192 -o FILE",
            budget_loss,
        ),
        Row(
            "three data wrangling recipes with fewer bits, the demo model: F1, accuracy, F1",
            "format_accuracy",
            "format_accuracy.py",
            accuracies,
        ),
        Row(
            "the demo model in Q4_1",
            f"native_weights-{C}",
            "native_weights.py --work-dir DIR --peers DIR",
            native("demo-Q4_1"),
        ),
        Row(
            "8 layers of Llama-3.2-3B's shape in Q4_1, the output matrix in Q6_K",
            f"native_weights-{C}",
            "native_weights.py --work-dir DIR --peers DIR",
            native("3B-Q4_1"),
        ),
        Row(
            "8 layers of Llama-3.2-3B's shape in Q4_K",
            f"native_weights-{C}",
            "native_weights.py --work-dir DIR --peers DIR",
            native("3B-Q4_K"),
        ),
        Row(
            "recurrent states in bf16, random Qwen3.5 models of 4 and 8 layers, 512 tokens a text: perplexity of the"
            " model's own texts, against states in fp32",
            "state_rounding",
            "state_rounding.py --tokens 512",
            lambda d: ", ".join(f"{of['perplexity_ratio'] - 1:+.2%}" for of in d["results"]["models"].values()),
        ),
    ],
    "Planning": [
        Row(
            "what a person waits for: 4 rows and the quickstart's 189, three jobs in a row from an empty cache, idle"
            " and beside two busy loops",
            "first_minutes",
            'first_minutes.py --only "four rows" --only quickstart',
            first_minutes,
        ),
        Row(
            "predicted against measured wall time, eight jobs of different shape",
            "plan_accuracy",
            "plan_accuracy.py",
            plan_accuracy,
        ),
        *(
            Row(
                f"{POLICIES}: {words}",
                "policy_errors",
                "policy_errors.py --work-dir DIR --rounds 1",
                policy_errors(name),
            )
            for name, words in {
                "links as fast as compute": "an emulated accelerator whose links are as slow as its compute",
                "CPU and disk": "the CPU and a disk",
                "slow CPU attention": "an emulated accelerator beside a CPU that attends slowly",
            }.items()
        ),
        Row(
            "an emulated accelerator in four settings, in each of which another of the papers' strategies wins",
            "strategy_plans",
            "strategy_plans.py --work-dir DIR",
            strategies,
        ),
        Row(
            "the last of these with a CPU that attends four times as fast, where inequality (6) of APEX flips",
            "strategy_plans",
            "strategy_plans.py --work-dir DIR",
            flipped_strategy,
        ),
        Row(
            "plans on emulated accelerators whose CPU or link is slower than planned, or whose rows change; simulated",
            "reaction-simulated",
            "reaction.py --simulate",
            reaction,
        ),
        Row(
            "predictions for OPT-6.7B, 30B and 175B on a T4, 24 cases, against whole simulated jobs",
            "plan_times",
            "plan_times.py",
            lambda d: f"median and worst error {errors(d['prediction_error'])}",
        ),
        Row(
            "planning these, in CPU seconds; the aim is 2 s in every case",
            "plan_times",
            "plan_times.py",
            lambda d: f"median {d['planning_cpu_s']['median']:.1f} s, worst {d['planning_cpu_s']['worst']:.1f} s",
        ),
        Row(
            "two stages of a pipeline against one, on emulated accelerators whose links are slow",
            "pipeline",
            "pipeline.py",
            pipeline,
        ),
        Row(
            "gains of NEO and APEX over the GPU alone, 25 cases, simulated for an A10G and a T4"
            " ([beside theirs](neo_apex_check.md))",
            "paper_gains",
            "paper_gains.py",
            paper_gains,
        ),
        Row(
            "figures of the four papers, predicted ([beside theirs](papers.md))",
            "papers",
            "papers.py",
            papers,
        ),
    ],
    "Scoring and structure": [
        *(
            Row(f"{PROMISE}: {job}", "cascade", command, words)
            for job, command, words, part in (
                ("eight planted cases", "cascade.py", cascade_planted, "planted"),
                ("yes or no over record pairs", "cascade.py --data DIR --work-dir DIR", cascade_data, "data"),
            )
            if read("cascade")[part]
        ),
        Row(
            "lm-evaluation-harness: three tasks in fp32, against its own `hf`",
            "lm_eval",
            "lm_eval_tasks.py",
            lm_eval,
        ),
        Row(
            "200 restaurant entries into JSON records under a schema, three times",
            "structured_output",
            "structured_output.py",
            structured,
        ),
    ],
    "Embeddings": [
        Row(
            "all-MiniLM-L6-v2 in fp32: 2,000 paragraphs, 157,183 tokens, against sentence-transformers",
            f"embeddings-minilm-{A}",
            "embeddings.py --model all-MiniLM-L6-v2 --packages DIR --rows 2000 --repeats 2",
            embeddings,
        ),
        Row(
            "all-MiniLM-L6-v2 in fp32: 1,000 paragraphs, 81,094 tokens, against sentence-transformers, OpenVINO and"
            " ONNX Runtime; two rounds",
            "embeddings-minilm-float32-intel-xeon-processor-6-167-amx",
            "embeddings.py --model all-MiniLM-L6-v2 --packages DIR --rows 1000 --repeats 2 --sweep-rows 40",
            embeddings,
        ),
        Row(
            "the same: 2,500 paragraphs, 200,513 tokens, against OpenVINO; one round",
            "embeddings-minilm-float32-2500-intel-xeon-processor-6-167-amx",
            "embeddings.py --model all-MiniLM-L6-v2 --packages DIR --engines openvino --rows 2500 --repeats 1"
            " --sweep-rows 40 --output FILE",
            embeddings,
        ),
        Row(
            "the same: 500 paragraphs, against sentence-transformers, OpenVINO and ONNX Runtime; one round",
            f"embeddings-minilm-float32-{F}",
            "embeddings.py --model all-MiniLM-L6-v2 --packages DIR --rows 500 --repeats 1 --sweep-rows 16",
            embeddings,
        ),
        Row(
            "Qwen3-Embedding-0.6B's shape in bf16, random weights: 120 paragraphs, 9,958 tokens, against"
            " sentence-transformers",
            f"embeddings-qwen3-embedding-0.6b-{A}",
            "embeddings.py --shape qwen3-embedding-0.6b --tokenizer DIR --packages DIR --rows 120 --repeats 1"
            " --dtype bfloat16",
            embeddings,
        ),
        Row(
            "the same shape in bf16: 60 paragraphs, 6,693 tokens, against sentence-transformers; one round",
            "embeddings-qwen3-embedding-0.6b-bfloat16-intel-xeon-processor-6-167-amx",
            "embeddings.py --shape qwen3-embedding-0.6b --tokenizer DIR --packages DIR --engines sentence-transformers"
            " --rows 60 --repeats 1 --sweep-rows 6 --dtype bfloat16",
            embeddings,
        ),
        Row(
            "peak memory of a job that embeds rows of 13 tokens: a random BERT, two layers of 64 columns",
            "embedding_rows-amd-epyc-25-1-avx2",
            "embedding_rows.py --tokenizer all-MiniLM-L6-v2 --rows 100000 1000000 10000000",
            embedding_rows,
        ),
    ],
    "Kernels": [
        Row(
            "decode attention in bf16 at 1, 4 and 8 query heads per KV head: its bytes per second over plain reads'",
            f"kernels-{A}",
            "kernel_rates.py",
            decode_shares,
        ),
        Row(
            "Gated DeltaNet, one token of 1, 4, 16 and 64 sequences, states in fp32: bytes per second over scaling in"
            " place",
            f"state_kernels-{A}",
            "state_kernels.py",
            state_decode("float32"),
        ),
        Row(
            "the same with states in bf16",
            f"state_kernels-{A}",
            "state_kernels.py",
            state_decode("bfloat16"),
        ),
        Row(
            "Gated DeltaNet, prompts of 64 to 2,048 tokens: FLOPs per second over those of fp32 products",
            f"state_kernels-{A}",
            "state_kernels.py",
            state_prefill,
        ),
        Row(
            "4-bit weights dequantized, against a copy",
            f"kernels-{A}",
            "kernel_rates.py --only expansion --keep",
            lambda d: f"{d['medians']['int4 to bf16 weights']['ratio']:.2f} times the rate",
        ),
        *(
            Row(
                "prefill attention in bf16, one thread, 512 to 2,048 tokens, against torch's SDPA",
                f"kernels-{machine}",
                f"kernel_rates.py --only prefill --rounds 1{options}",
                prefill_ratios(isa),
            )
            for machine, isa, options in ((B, "avx512_bf16", ""), (E, "amx", " --seconds 0.1 --keep"))
        ),
        *(
            Row(
                f"linear layers in {name} against torch's `F.linear`, six shapes of 576x1536 to 4096x14336,"
                f" 1 to {most} tokens, one thread by its own clock",
                f"kernels-{machine}",
                f"kernel_rates.py --only linear --rounds 1 --seconds {options} --keep",
                linear_ratios(isa, dtype),
            )
            for machine, isa, most, options in (
                (B, "avx512_bf16", "4,096", "0.15"),
                (E, "amx", "1,024", "0.1 --tokens 1,4,16,64,256,1024"),
            )
            for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))
        ),
        *(
            Row(
                f"weights in {weight_format.upper()} against bf16, 3072x8192, 1, 4, 8 and 16 tokens, one thread by its"
                " own clock",
                f"kernels-{E}",
                "kernel_rates.py --only packed --rounds 1 --seconds 0.1 --keep",
                packed_ratios("amx", weight_format),
            )
            for weight_format in ("q4_k", "q5_k", "q8_0", "fp8_g128")
        ),
    ],
    "What must not fail": [
        Row(
            "jobs killed and interrupted at random moments, in memory, on disk, in 4 bits",
            "kills",
            "make kill-check",
            kills,
        ),
        Row(
            "jobs with KV on disk within 3 GiB, disturbed by deadlines, full disks, kills and interrupts",
            "soak",
            "soak.py --hours 2",
            soak,
        ),
        Row(
            "workers on one output, rows without a model, 8 at a time",
            "share",
            "share.py --rows 12000",
            share,
        ),
        Row(
            "a long prompt (rows x tokens) through the demo model's shape, within memory that does not hold its KV",
            f"long_rows-{E}",
            "long_rows.py --work-dir DIR",
            long_rows,
        ),
        Row(
            "peak memory of a whole job (network stubbed), 1,000,000 rows against 10,000",
            "memory_flat",
            "memory_flat.py",
            memory_flat,
        ),
        Row(
            "sorting 1,000,000 prompts of 1,000 bytes, beside their job as predicted for `zen4`; peak memory, against"
            " that of 100,000",
            "sort_prompts",
            "sort_prompts.py",
            sort_prompts,
        ),
        Row(
            "host time of a million rows of 10 tokens, 4 out, through two layers of 64 columns, reading to joining",
            "host_time",
            "host_time.py --other DIR",
            host_time,
        ),
        *(
            Row(
                f"host time of a sweep of {seqs} sequences on a played card, 32 layers, median",
                "sweep_host_time",
                "sweep_host_time.py --other DIR",
                sweep_host_time(seqs),
            )
            for seqs in (256, 512)
        ),
        Row(
            "random configurations of every family, tiny models in fp32, against transformers",
            "random_configs",
            "random_configs.py --draws 500 --seed 0",
            random_configs,
        ),
        Row(
            "damaged files of ten kinds, 200 cases of each",
            "fuzz",
            "python tests/support/fuzz.py --work-dir DIR --output benchmarks/results/fuzz.json",
            fuzz,
        ),
    ],
}


def quotes() -> Iterator[tuple[Path, str]]:
    """(page, words) for figures that other pages repeat."""
    third = read("first_minutes")["jobs"]["idle"]["quickstart"][2]
    yield ROOT / "README.md", f"the third one took {third['total_s']:.1f} s from start to end"
    tiers = ROOT / "docs" / "tiers.md"
    for name, loss in KV_LOSSES.items():
        yield tiers, f"| `{name}` | {KV_CODE_BITS[name]}.5 | +{format_loss(loss)} |"
    yield tiers, f"Weights in int8 and int4 have a perplexity that is {format_losses(WEIGHT_LOSSES)} higher"
    yield from budget_quotes(ROOT / "docs" / "attention_budget.md", read("attention_budget")["results"])
    for name in ("attention_budget_losses", "attention_budget_losses_8192"):
        yield from budget_losses(ROOT / "docs" / "attention_budget.md", read(name)["results"])
    for quality in (NEAR, SMALL):
        yield ROOT / "docs" / "planning.md", f"at most {QUALITIES[quality]:.0%} higher".replace("%", " %")


def budget_quotes(page: Path, results: dict) -> Iterator[tuple[Path, str]]:
    """Rows of the tables of attention budgets, and the bytes that a sweep reads."""
    for length in BUDGET_LENGTHS:
        for placement, place in (("cpu", "in memory"), ("disk", "on disk")):
            ratios = results[f"demo, bfloat16, {length}, speed, {placement}"]["times_as_fast"]
            yield page, f"| {length:,} | {place} | " + " | ".join(f"{ratios[b]:.2f}" for b in BUDGETS) + " |"
    whole, fifth, tenth = results["demo, bfloat16, 8192, speed, disk"]["disk_bytes_read"].values()
    yield page, f"{whole / 1e6:.0f} MB, {fifth / 1e6:.0f} MB and {tenth / 1e6:.0f} MB"


def budget_losses(page: Path, results: dict) -> Iterator[tuple[Path, str]]:
    """Rows of the table of what attention budgets lose."""
    for name, found in results.items():
        start, kind, budget = name.rsplit(", ", 2)
        if kind != "perplexity":
            continue
        length, value = int(start.rsplit(", ", 1)[1]), found["perplexity"]
        loss = value / results[f"{start}, perplexity, all"]["perplexity"] - 1
        numbers = results[f"{start}, retrieval, {budget}"]
        count = round(numbers["numbers_found"] * numbers["cases"])
        against = f" +{loss * 100:.1f} % " if budget != "all" else " "
        yield page, f"| {length:,} | `{budget}` | {value:.2f} |{against}| {count} of {numbers['cases']} |"


def described() -> str:
    """The text of the page with its tables made anew."""
    text = PAGE.read_text()
    for heading, rows in TABLES.items():
        table = re.compile(rf"(## {re.escape(heading)}\n\n){re.escape(HEADER)}(?:\|.*\n)*")
        body = HEADER + "".join(row.line() for row in rows)
        text, count = table.subn(lambda found, body=body: found[1] + body, text)
        if count != 1:
            raise ValueError(f"{PAGE} has {count} tables under {heading!r}: it must have one")
    return text


def main() -> None:
    PAGE.write_text(described())


if __name__ == "__main__":
    main()
