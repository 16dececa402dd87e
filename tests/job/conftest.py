import pytest


@pytest.fixture(autouse=True)
def plans_of_the_same_problem_are_made_once(monkeypatch):
    from known_plans import plan_problem

    monkeypatch.setattr("batchgen.job.planning.plan_problem", plan_problem)
