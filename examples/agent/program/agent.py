"""An agent program that knows nothing of Rollweave: it asks a model through OpenAI's
client, looks at the answer, asks for another one if there is no number in it, and
prints the last answer.
"""

import json
import re

from openai import OpenAI

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
with open("task.json") as file:
    task = json.load(file)
messages = [{"role": "user", "content": task["question"]}]
for _ in range(2):
    completion = client.chat.completions.create(model="any", messages=messages)
    answer = completion.choices[0].message.content or ""
    if re.search(r"\d", answer):
        break
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "A number, please."},
    ]
print(answer)
