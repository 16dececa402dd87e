"""LiteLLM's chats, and a batch: prints the answers of both.

It runs in the environment of clients, which has nothing of this project. The address and the key are in OPENAI_BASE_URL
and OPENAI_API_KEY.
"""

import json
import time
from pathlib import Path

import litellm

GREEDY = {"temperature": 0, "max_tokens": 4}
CHATS = [[{"role": "user", "content": f"row {number}"}] for number in range(8)]

answers = litellm.batch_completion(model="openai/demo", messages=CHATS, max_workers=8, **GREEDY)
chats = [answer.choices[0].message.content for answer in answers]

lines = [
    {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "demo", "messages": messages, **GREEDY},
    }
    for number, messages in enumerate(CHATS)
]
Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
openai = {"custom_llm_provider": "openai"}
with open("rows.jsonl", "rb") as rows:
    file = litellm.create_file(file=rows, purpose="batch", **openai)
url = "/v1/chat/completions"
batch = litellm.create_batch(completion_window="24h", endpoint=url, input_file_id=file.id, **openai)
while batch.status not in ("completed", "failed"):
    time.sleep(0.1)
    batch = litellm.retrieve_batch(batch_id=batch.id, **openai)
text = litellm.file_content(file_id=batch.output_file_id, **openai).content.decode()
of_batch = [json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] for line in text.splitlines()]
print(json.dumps({"chats": chats, "batch": of_batch}))
