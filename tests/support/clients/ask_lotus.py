"""A map, a filter and an aggregation of LOTUS over a DataFrame: prints what they give.

It runs in the environment of clients, which has nothing of this project. The address and the key are in OPENAI_BASE_URL
and OPENAI_API_KEY.
"""

import json

import lotus
import pandas as pd
from lotus.models import LM

lotus.settings.configure(lm=LM(model="openai/demo", max_tokens=4))
rows = pd.DataFrame({"name": ["a", "b", "c", "d"]})
mapped = rows.sem_map("Say something about {name}")["_map"].tolist()
kept = rows.sem_filter("{name} is a vowel", default=True)["name"].tolist()
joined = rows.sem_agg("Join {name}")["_output"].tolist()
print(json.dumps({"mapped": mapped, "kept": kept, "joined": joined}))
