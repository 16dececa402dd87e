"""What a job counts of a mixture's routers is kept, and the next plan counts on it."""

import json

import pytest
from planner_cases import GIB

import batchgen
from batchgen.core.routing import INDEPENDENT, Routing, RoutingCounts
from batchgen.job import planning
from batchgen.job.routing import keep_routing, known_routing
from batchgen.models.files import ModelFiles, read_config, resolve_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("BATCHGEN_CACHE", str(folder))
    return folder


def told():
    counts = RoutingCounts(64, 8)
    for _ in range(40):
        counts.add([4] * 10 + [0] * 54)
    return counts


def test_it_is_kept_for_the_model_that_it_is_of(cache, tiny_models):
    model, other = (resolve_model(str(tiny_models(family)[0])) for family in ("qwen3_moe", "mixtral"))
    config = read_config(model)
    assert known_routing(model, config) == INDEPENDENT
    keep_routing(model, config, RoutingCounts(64, 8))
    assert known_routing(model, config) == INDEPENDENT, "nothing was counted"
    keep_routing(model, config, told())
    assert known_routing(model, config) == told().fitted() != INDEPENDENT
    assert known_routing(other, read_config(other)) == INDEPENDENT
    keep_routing(ModelFiles(other.path, "dummy", "dummy"), read_config(other), told())
    assert known_routing(other, read_config(other)) == INDEPENDENT, "made-up weights say nothing"


@pytest.mark.parametrize("content", ["", "[]", '{"exponent": 2}', '{"exponent": "x"}', '{"other": 1}'])
def test_a_damaged_record_is_as_if_there_were_none(content, cache, tiny_models):
    model = resolve_model(str(tiny_models("qwen3_moe")[0]))
    config = read_config(model)
    keep_routing(model, config, told())
    (path,) = (cache / "routing").iterdir()
    path.write_text(content)
    assert known_routing(model, config) == INDEPENDENT
    keep_routing(model, config, told())
    assert known_routing(model, config) == told().fitted()


def test_the_next_plan_counts_on_what_a_job_has_seen(cache, tiny_models, tmp_path, monkeypatch):
    path, _ = tiny_models("qwen3_moe", num_experts=64, num_experts_per_tok=8)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"{i} apples"}) + "\n" for i in range(3)))
    seen, problem_of = [], planning.problem_of

    def noted(*given, **options):
        seen.append(given[2].routing)
        return problem_of(*given, **options)

    monkeypatch.setattr(planning, "problem_of", noted)
    options = {"max_tokens": 30, "dtype": "float32", "cpu_memory": 4 * GIB, "ignore_eos": True}
    reports = [
        batchgen.run(str(path), str(tmp_path / "in.jsonl"), tmp_path / f"{i}.jsonl", **options) for i in range(2)
    ]
    counted = Routing(**reports[0]["routing"])
    assert 0.5 < counted.exponent <= 1 <= counted.imbalance
    assert (seen[0], seen[-1]) == (INDEPENDENT, counted)


def test_models_without_experts_have_none(cache, tiny_models):
    model = resolve_model(str(tiny_models("llama")[0]))
    keep_routing(model, read_config(model), RoutingCounts(0, 0))
    assert not (cache / "routing").exists()
    assert known_routing(model, read_config(model)) == INDEPENDENT
