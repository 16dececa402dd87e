"""The pages say what is so: links lead somewhere, files and functions they name exist, generated parts are up to date."""

import ast
import importlib
import importlib.util
import itertools
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "csrc" / "README.md"],
    key=str,
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*(?:\]\([^)\n]*\)[^\]\n]*)?\]\(([^)\s]+)\)")
TREE = ("batchgen", "benchmarks", "csrc", "docs", "examples", "recipes", "tests")


def load(path):
    """A script that is no part of the package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(page):
    """What is left of a page without its code."""
    return CODE.sub("", page.read_text())


def anchors_of(page):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def defined_in(path):
    """The functions and classes of a file; methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(text_of(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{link}: there is no {there}"
        if DOCS in page.parents:
            assert DOCS in there.parents, f"{link} leads out of docs/, where the site has nothing"
        if anchor:
            assert anchor in anchors_of(there), f"{link}: {there.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text()):
        if name.split("/")[0] in TREE:
            assert (ROOT / name).exists(), f"{name} is not in the tree"


def test_pages_that_code_names_exist():
    code = [path for folder in TREE for end in ("*.py", "*.h", "*.cpp") for path in (ROOT / folder).rglob(end)]
    for path in code:
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text()):
            assert (ROOT / page).exists(), f"{path.relative_to(ROOT)} names {page}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_where_is_what():
    table = (DOCS / "index.md").read_text().partition("## Where is what")[2]
    rows = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)`", table, re.MULTILINE)
    assert len(rows) >= 15
    for question, path, function in rows:
        assert function in defined_in(ROOT / path), f"{question} {path} does not define {function}"


@pytest.mark.parametrize("page", sorted((DOCS / "packages").glob("*.md")), ids=lambda page: page.stem)
def test_package_pages_have_the_docstrings_of_their_modules(page):
    assert page.read_text() == load(DOCS / "describe_packages.py").described(page), (
        "run python docs/describe_packages.py"
    )


def test_every_package_has_a_page():
    pages = load(DOCS / "describe_packages.py")
    packages = {path.parent.name for path in (ROOT / "batchgen").glob("*/__init__.py")}
    assert packages - set(pages.CLIENTS) == {page.stem for page in (DOCS / "packages").glob("*.md")} - {"clients"}


@pytest.mark.parametrize("page", sorted((DOCS / "packages").glob("*.md")), ids=lambda page: page.stem)
def test_package_pages_have_their_parts(page):
    for part in ("**Purpose.**", "| module | what it has |", "**Main values.**", "**Must not ", "**Tests** are in"):
        assert part in page.read_text(), part


def test_the_command_line_page_is_up_to_date():
    from batchgen.cli.commands import cli

    page = (DOCS / "command_line.md").read_text()
    made = load(DOCS / "describe_commands.py").describe(cli)
    assert page == made, "run python docs/describe_commands.py"
    for name, command in cli.commands.items():
        section = made.partition(f"## batchgen {name}\n")[2].partition("\n## ")[0]
        for option in command.params:
            assert f"`{option.opts[-1]}`" in section, f"batchgen {name} {option.opts[-1]}"


def test_the_drawing_is_up_to_date():
    assert (DOCS / "sweep.svg").read_text() == load(DOCS / "draw_sweep.py").draw(), "run python docs/draw_sweep.py"


def test_the_api_page_has_every_public_name():
    import batchgen

    shown = re.findall(r"^::: ([\w.]+)$", (DOCS / "python_api.md").read_text(), re.MULTILINE)
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(batchgen, attribute)
    assert {name.rpartition(".")[2] for name in shown} == set(batchgen.__all__) - {"__version__"}


def test_benchmarks_name_every_result_and_their_commands_exist():
    page = (DOCS / "benchmarks.md").read_text()
    assert set(re.findall(r"`([\w-]+\.json)`", page)) == {
        p.name for p in (ROOT / "benchmarks" / "results").glob("*.json")
    }
    for script in re.findall(r"`python (benchmarks/\w+\.py)", page):
        assert (ROOT / script).exists()


def figures():  # a line or two for each of the files
    """(file, words of docs/benchmarks.md) for the figures there, made from the files they are in."""

    def read(name):
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    def times(ratios, digits):
        shown = [f"{ratio:.{d}f}" for ratio, d in zip(ratios, digits, strict=True)]
        return f"{', '.join(shown[:-1])} and {shown[-1]} times"

    engines = "cpu_engines-amd-epyc-25-17-avx512-bf16"
    for work in read(engines)["workloads"].values():
        rate, share = work["total_tokens_per_s"]["batchgen"], work["bound"]["share_of_wall"]
        if work["rows"] == 64:
            yield (
                engines,
                f"{statistics.mean(work['wall_s']['batchgen']):.1f} s, {rate:,.0f} tokens/s; {share:.0%} of",
            )
        over = [work["batchgen_over"][name] for name in ("openvino", "vllm", "llama.cpp", "transformers")]
        yield engines, times(over, (2, 2, 1, 1))
    zen5_engines = "cpu_engines-amd-epyc-26-2-avx512-bf16"
    for work in read(zen5_engines)["workloads"].values():
        over = times([work["batchgen_over"][name] for name in ("openvino", "vllm")], (2, 2))
        share = work["bound"]["share_of_wall"]
        yield zen5_engines, f"{work['wall_s']['batchgen'][0]:.1f} s; {over} as fast; {share:.0%} of the bound"
    eight_bits = "cpu_engines_int8-amd-epyc-26-2-avx512-bf16"
    over = [work["batchgen_over"]["openvino"] for work in read(eight_bits)["workloads"].values()]
    yield eight_bits, times(over, (2, 2, 2)) + " as fast"
    against = read("azure_vs_transformers")
    rates = against["total_tokens_per_s"]
    yield "azure_vs_transformers", f"{rates['batchgen']:,.0f} against {rates['transformers']:.0f} tokens/s"
    yield "azure_vs_transformers", f"{against['ratio']:.2f} times"
    for moe in sorted((ROOT / "benchmarks" / "results").glob("moe-*.json")):
        result = read(moe.stem)
        bound, made = result["runs"][0]["bound"], result["summary"]["generated_tokens_per_s"]
        share = f"{100 * bound['share_of_bound']:.0f} % of what"
        yield moe.stem, f"{made['batchgen']:.1f} generated tokens/s; {share}"
        yield moe.stem, f"predicted {bound['predicted_over_measured']:.2f} times the measured time"
        if "llama.cpp" in made:
            ratio = result["summary"]["batchgen_over_llama.cpp"]
            yield moe.stem, f"{made['llama.cpp']:.1f} generated tokens/s: {ratio:.1f} times as fast"
    large = read("larger_than_memory")["summary"]
    made = large["generated_tokens_per_s"]
    yield "larger_than_memory", f"{made['batchgen']:.1f} generated tokens/s; {large['share_of_bound'][0]:.0%} of"
    yield "larger_than_memory", f"{made['accelerate']:.1f} and {made['llama.cpp']:.1f} tokens/s"
    yield (
        "larger_than_memory",
        (f"{large['batchgen_over_accelerate']:.1f} and {large['batchgen_over_llama.cpp']:.1f} times as fast"),
    )
    overlap = read("tier_overlap")
    yield "tier_overlap", f"{statistics.median(overlap['gains']):.2f} times as fast"
    yield "tier_overlap", f"{overlap['measured_over_simulated']:.2f} times the simulator's time"
    yield "continuous_vs_static", f"{statistics.mean(read('continuous_vs_static')['ratios']):.2f} times"
    ratios = {name: found.get("ratio_to_fp32") for name, found in read("int4_perplexity")["results"].items()}
    yield "int4_perplexity", f"{ratios['int4 weights']:.2f} times"
    yield "int4_perplexity", f"{ratios['int8 KV']:.4f} and {ratios['int5 KV']:.3f} times"
    errors = sorted(abs(job["error"]) for job in read("plan_accuracy")["jobs"])
    yield "plan_accuracy", f"six within {errors[5]:.0%}"
    yield "plan_accuracy", f"two predicted {100 * errors[6]:.0f} and {errors[7]:.0%} too long"
    plans = read("tier_plans")["planned_error"]
    yield "tier_plans", f"median error {plans['median']:.0%}, worst {plans['worst']:.0%}"
    drawn = read("policy_errors")["settings"]
    errors = [
        ", ".join(
            f"{100 * setting[f'{kind}_error']['median']:.0f} and {setting[f'{kind}_error']['worst']:.0%}".replace(
                "%", " %"
            )
            for kind in ("simulated", "planned")
        )
        for setting in drawn
    ]
    assert [(setting["rank_of_plan"], setting["different_rows"], len(setting["policies"])) for setting in drawn] == [
        (1, 0, 20)
    ] * 3
    yield "policy_errors", "; ".join(errors)
    *ways, flipped = read("way_plans")["settings"]
    assert [setting["fastest_way"] for setting in ways] == ["GPU-only", "NEO", "FlexGen", "APEX"]
    assert all(setting["chosen_goes"] == setting["fastest_way"] in setting["meant_to_win"] for setting in ways)
    slower = max(setting["chosen_against_fastest"] for setting in ways)
    yield "way_plans", f"takes {slower:.2f} times as long as the fastest"
    short = [1 - plan["planned_s"] / plan["measured_s"] for s in ways for plan in s["plans"] if plan["way"] == "chosen"]
    yield "way_plans", f"{100 * min(short):.0f} to {max(short):.0%} too short"
    taken = {plan["way"]: plan["measured_s"] for plan in flipped["plans"]}
    words = f"NEO's strategy takes {taken['NEO'] / taken['APEX']:.2f} times as long as APEX's; the plan uses {flipped['chosen_goes']}'s"
    yield "way_plans", f"{words}, which takes {flipped['chosen_against_fastest']:.2f} times as long as NEO's"
    planning = read("plan_times")
    error, planning_s = planning["prediction_error"], planning["planning_cpu_s"]
    yield "plan_times", f"median error {error['median']:.0%}, worst {error['worst']:.0%}"
    yield "plan_times", f"median {planning_s['median']:.1f} s, worst {planning_s['worst']:.1f} s"
    one, four = next((row["one"], row["four"]) for row in read("flexgen_pipeline")["models"] if row["model"] == "30B")
    yield "flexgen_pipeline", f"OPT-30B decodes {four['decoding'] / one['decoding']:.1f} times as fast"
    stages = read("pipeline")
    predicted = [found["predicted_over_measured"] for found in stages["stages"].values()]
    yield (
        "pipeline",
        f"{stages['speedup']:.2f} times as fast, same output; predicted {times(predicted, (2, 2))} the measured time",
    )
    gains = [cell["gains"] for cell in read("paper_gains")["cells"]]
    neo, apex = (max(found[way] for found in gains if way in found) for way in ("NEO", "APEX"))
    yield "paper_gains", f"NEO up to {neo:.0%}, APEX up to {apex:.0%}"
    sharing = read("prefix_sharing")
    on, off = sharing["wall_s"]["on"][0], sharing["wall_s"]["off"][0]
    yield "prefix_sharing", f"{on:.0f} s against {off:.0f} s: {sharing['ratio_wall']:.1f} times, same answers"
    evaluation = read("lm_eval")
    ours, theirs = evaluation["batchgen"][0]["wall_s"], evaluation["hf"][0]["wall_s"]
    yield "lm_eval", f"{ours:.0f} s against {theirs:.0f} s: {evaluation['ratio']:.2f} times"
    helm = read("helm")
    ours, theirs = helm["wall_s"]["batchgen"][0], helm["wall_s"]["transformers"][0]
    yield "helm", f"{ours:.0f} s against {theirs:.0f} s: {helm['ratio']:.2f} times"
    structured = read("structured_output")
    yield "structured_output", f"{structured['rows_valid']} of {structured['rows']} valid"
    yield "structured_output", f"{structured['ratio']:.0%} of the throughput"
    kernels = "kernels-amd-epyc-25-17-avx512-bf16"
    yield kernels, f"{read(kernels)['medians']['int4 to bf16 weights']['ratio']:.2f} times the rate"
    yield "int8-amd-epyc-25-1-avx2", f"{100 * (read('int8-amd-epyc-25-1-avx2')['ratio_to_fp32'] - 1):.1f} % more"
    rates = {name: row["ratio"] for name, row in read("int8-amd-epyc-25-1-avx2")["gflop_per_s"].items()}
    few = [ratio for name, ratio in rates.items() if name.endswith((", 1 tokens", ", 4 tokens"))]
    many = [ratio for name, ratio in rates.items() if not name.endswith((", 1 tokens", ", 4 tokens"))]
    yield (
        "int8-amd-epyc-25-1-avx2",
        f"{min(few):.1f} to {max(few):.1f} and {min(many):.1f} to {max(many):.1f} times as fast",
    )
    zen5 = "kernels-amd-epyc-26-2-avx512-bf16"
    linear = read(zen5)["medians"]["avx512_bf16: linear bfloat16, all"]
    yield zen5, f"{linear['geometric_mean']:.2f} times as fast (geometric mean; {linear['worst']:.2f} at worst"
    prefill = [
        row["ratio"] for name, row in read(zen5)["medians"].items() if name.startswith("avx512_bf16: prefill bf")
    ]
    yield zen5, f"{min(prefill):.1f} to {max(prefill):.1f} times as fast"
    decode = "decode-amd-epyc-26-2-avx512-bf16"
    shares = {group: [] for group in (1, 4, 8)}
    for name, row in read(decode)["decode"].items():
        if name.startswith("bfloat16"):
            shares[int(name.split("group ")[1].split(",")[0])].append(row["share"])
    yield (
        decode,
        ", ".join(f"{100 * min(found):.0f} to {max(found):.0%}" for found in shares.values()),
    )
    found = read("as_found-amd-epyc-26-2-avx512-bf16")["models"]["demo-Q4_1"]["as_found_over_expanded"]
    rates = [f"{found[f'decoded_tokens_per_s_of_{n}']:.2f}" for n in (1, 4, 16)]
    yield (
        "as_found-amd-epyc-26-2-avx512-bf16",
        f"{rates[0]}, {rates[1]} and {rates[2]} times as fast; {found['model_bytes']:.2f} of the memory; {found['load_s']:.2f} times",
    )
    for file in ("as_found-amd-epyc-25-17-avx512-bf16", "as_found-intel-xeon-processor-6-207-avx512-bf16"):
        packed = read(file)["models"]
        for case, side in itertools.product(("demo-Q4_1", "3B-Q4_1", "3B-Q4_K"), ("expanded", "llama.cpp")):
            ratios = packed[case][f"as_found_over_{side}"]
            of_one, of_four, of_many = (ratios[f"decoded_tokens_per_s_of_{n}"] for n in (1, 4, 16))
            yield file, f"{of_one:.2f}, {of_four:.2f} and {of_many:.2f} times as fast"
    load = read("loading-amd-epyc-25-17-avx512-bf16")["file_load"]
    shares = [100 * load[name]["of_disk_rate"] for name in ("not cached", "cached")]
    yield (
        "loading-amd-epyc-25-17-avx512-bf16",
        f"{shares[0]:.0f} and {shares[1]:.0f} % where it is read around the page cache",
    )
    yield "loading-amd-epyc-25-17-avx512-bf16", f"at {load['memory']['bytes_per_s'] / 1e9:.1f} GB/s"
    for name in ("loading-amd-epyc-26-2-avx512-bf16", "loading-amd-epyc-25-17-avx512-bf16"):
        starts = read(name)["demo_start"]
        ready = [
            starts[f"{dtype}, {how}"]["ready_s"] for how in ("kernels", "numpy") for dtype in ("float32", "bfloat16")
        ]
        yield name, "{:.2f} and {:.2f} s ({:.2f} and {:.2f} s".format(*ready)
    never, before = (read("first_minutes")[name] for name in ("never_measured", "measured_before"))
    waits = [max(run[name] for run in never) for name in ("first_line_s", "measuring_s", "first_row_s")]
    again = max(run["first_row_s"] for run in before)
    yield "first_minutes", "{:.1f} s, {:.0f} s, {:.0f} s; {:.0f} s to".format(*waits, again)
    products = read("int8-amd-epyc-26-2-avx512-bf16")["gflop_per_s"].items()
    many = [(name, row["ratio"]) for name, row in products if not name.endswith((", 1 tokens", ", 4 tokens"))]
    large, small = ([r for name, r in many if ("576" in name) == narrow] for narrow in (False, True))
    yield (
        "int8-amd-epyc-26-2-avx512-bf16",
        f"{min(large):.1f} to {max(large):.1f} and {min(small):.1f} to {max(small):.1f} times as fast",
    )
    yield "sweep_rest", f"{100 * read('sweep_rest')['shares']['here']['share']:.1f}%"
    shares = [100 * result["host_share"] for result in read("host_share")["results"]]
    yield "host_share", f"{min(shares):.1f} to {max(shares):.1f}%"
    few, many = (run["peak_bytes"] / 1e6 for run in read("memory_flat")["runs"])
    yield "memory_flat", f"{many:.0f} MB against {few:.0f} MB"
    kills = read("kills")
    assert kills["mismatches"] == 0
    yield "kills", f"{sum(kills['hits'].values())} kills and interrupts"
    soak = read("soak")
    assert soak["wrong"] == [] and soak["resident_growth"] <= 0.05
    yield "soak", f"for {60 * soak['hours']:.0f} minutes"
    yield "soak", f"{soak['jobs']} jobs, {sum(soak['disturbed'].values())} disturbances"
    yield "soak", f"resident memory grew by {100 * soak['resident_growth']:.1f}%"
    configs = read("random_configs")
    assert configs["wrong"] == [] and configs["largest_difference"] <= configs["margin"]
    equal, refused = (sum(kinds[kind] for kinds in configs["models"].values()) for kind in ("equal", "refused"))
    assert equal + refused == configs["draws"] >= 500 and equal > refused
    yield "random_configs", f"{equal} equal (log-probabilities within {configs['largest_difference']:.0e})"
    yield (
        "random_configs",
        f"{refused} refused by the name of a key, {configs['refused_by_transformers_too']} of them by transformers too",
    )
    fuzz = read("fuzz")
    assert fuzz["failed"] == []
    yield "fuzz", f"{sum(end - begin for begin, end in fuzz['seeds'].values()):,} jobs"
    share = read("share")
    assert share["rows_that_differ"] == 0
    yield "share", f"{share['kills']} of them killed, {share['suspensions']} suspended"
    yield "share", f"all {share['rows']:,} rows equal"
    cost = read("share_cost")
    yield "share_cost", f"{cost['shared_over_alone']:.3f} times"
    yield (
        "share_cost",
        f"{cost['one_over_two']:.2f} times as fast; two `--shard`s on these cores are {cost['two_over_shards']:.2f} times",
    )
    ray = read("ray_cluster")
    yield "ray_cluster", f"{ray['rows']:,} rows in fp32"
    yield "ray_cluster", f"{ray['ray_over_share']:.2f} times; all rows equal"


def test_figures_are_those_of_their_files():
    rows = [line for line in (DOCS / "benchmarks.md").read_text().splitlines() if line.startswith("| ")]
    for name, words in figures():
        words = re.sub(r"(\d)%", r"\1 %", words)
        assert any(f"`{name}.json`" in row and words in row for row in rows), f"{name}.json says {words!r}"


def test_gains_of_the_papers_are_those_of_their_file(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    paper_gains = importlib.import_module("paper_gains")
    tables = paper_gains.markdown(json.loads(paper_gains.RESULT.read_text())["cells"])
    assert tables in (DOCS / "neo_apex_check.md").read_text()


def test_the_import_graph_is_as_the_architecture_page_says():
    graph = load(ROOT / "benchmarks" / "import_graph.py")
    now = graph.count()
    assert now["cycles"] == [] and now["cycles_inside"] == {} and now["against_the_order"] == []
    table = (DOCS / "architecture.md").read_text().partition("## Import graph")[2]
    numbers = [int(row) for row in re.findall(r"^\|[^|]+\| \d+ \| (\d+) \|$", table, re.MULTILINE)]
    counted = [now["rooms"], now["packages_at_two_levels"], now["arrows"], 0, 0]
    assert numbers == counted, "put what benchmarks/import_graph.py counts into docs/architecture.md"


def test_cycles_are_found():
    graph = load(ROOT / "benchmarks" / "import_graph.py")
    assert graph.cycles_of({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert graph.cycles_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    modules = {"core": "", "core.a": "from batchgen.job import b", "job": "", "job.b": "import batchgen.core.a"}
    arrows = graph.collapse(graph.imports_of(modules), 1)
    assert graph.cycles_of(arrows) == [["core", "job"]]
    assert graph.against_the_order(graph.imports_of(modules), {n: n.split(".")[0] for n in modules}) == [
        "core.a -> job.b"
    ]


def test_the_example_of_the_readme_runs(tiny_models, capsys):
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    path, _ = tiny_models("llama")
    assert '"demo"' in example
    exec(example.replace('"demo"', repr(str(path))), {})
    printed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in printed} >= {"0", "1"}


@pytest.fixture(scope="module")
def tiny_model(tiny_models):
    return str(tiny_models("llama")[0])


def test_example_generate(tiny_model):
    texts = load(ROOT / "examples" / "generate.py").main(tiny_model)
    assert len(texts) == 3 and all(texts)


def test_example_structured_output(tiny_model):
    pytest.importorskip("llguidance")
    example = load(ROOT / "examples" / "structured_output.py")
    records = example.main(tiny_model)
    assert len(records) == len(example.LISTINGS)
    assert all(set(record) == set(example.SCHEMA["required"]) for record in records)


def test_example_scoring(tiny_model):
    example = load(ROOT / "examples" / "scoring.py")
    answers = example.main(tiny_model)
    assert all(answers[question] in choices for question, choices in example.QUESTIONS.items())


def test_example_datasets_map(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    answers, mapped = load(ROOT / "examples" / "datasets_map.py").main(tiny_model, str(tmp_path / "answers.arrow"))
    assert answers["text"] == mapped["text"] and answers["topic"] == ["maps", "sums"]


def test_every_example_has_a_test():
    tested = {name.removeprefix("test_example_") for name in dir(sys.modules[__name__]) if "test_example_" in name}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


def test_no_message_or_page_installs_the_package_by_a_name_that_no_registry_has():
    pages = [
        *(ROOT / "batchgen").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").rglob("*.*"),
        ROOT / "README.md",
    ]
    texts = {path: path.read_text(errors="replace") for path in pages if path.suffix in (".py", ".md", ".yaml", ".sh")}
    assert [path for path, text in texts.items() if re.search(r"pip3? install [^\n`]*\bbatchgen\b", text)] == []
