"""Ask a door by OpenAI's SDK and by LangChain: `python sdk.py BASE_URL MODEL`; print what came as JSON."""

from __future__ import annotations

import json
import sys

import openai
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "hello"}]
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=4)
parts = list(client.chat.completions.create(model=model, messages=messages, max_tokens=4, stream=True))
try:
    client.chat.completions.create(model="nosuch", messages=messages)
    refused = ""
except openai.NotFoundError as error:
    refused = str(error.code)
chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=4, max_retries=0)
print(
    json.dumps(
        {
            "tokens": whole.usage.completion_tokens,
            "parts": len([each for each in parts if each.choices and each.choices[0].delta.content]),
            "models": [each.id for each in client.models.list()],
            "refused": refused,
            "langchain": chat.invoke("hello").usage_metadata["output_tokens"],
            "langchain parts": len([each for each in chat.stream("hello") if each.content]),
        }
    )
)
