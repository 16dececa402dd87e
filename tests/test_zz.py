import random, pytest
from dataclasses import replace
from test_run_ahead import *
from test_run_ahead import parts_of

@pytest.mark.parametrize("seed", range(8))
def test_fuzz(parts_of, seed):
    r = random.Random(seed)
    stop = ends_early(parts_of).stop_token_ids
    rows = []
    for i in range(24):
        p = PREFIX[: r.choice((0, 16, 20, 40))] + [r.randrange(4, 500) for _ in range(r.randrange(1, 30))]
        kw = dict(max_tokens=r.choice((1, 2, 3, 9, 20)), ignore_eos=r.random() < .5, n=r.choice((1, 1, 2, 3)))
        if r.random() < .5: kw["stop_token_ids"] = tuple(stop)
        if r.random() < .3: kw["stop"] = ("e", "th")
        if r.random() < .3: kw["repetition_penalty"] = 1.3
        if r.random() < .3: kw["logprobs"] = 2
        if r.random() < .2: kw["regex"] = "[a-z]{3} [0-9]{2}"
        if r.random() < .4 or kw["n"] > 1: kw |= dict(temperature=.8, top_p=.9, seed=i)
        rows.append(Request(p, SamplingParams(**kw)))
    adm = r.choice(["continuous", "static"]) if seed > 1 else "continuous"
    a, s, _ = both(lambda: parts_of(r.choice(list(MODELS)) if False else "llama", tight=True, kv_block_size=8, admission=adm, max_num_batched_tokens=r.choice((16, 16))), rows, expected_output_len=1)
    print(seed, adm, s.sweeps, a.num_ahead, s.preempted, s.cached_prompt_tokens)
