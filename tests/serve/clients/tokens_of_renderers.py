"""The client of `renderers` samples tokens with routes by vLLM's token route.

Argument: URL of the API. Prints what the client understood as JSON.
"""

import asyncio
import binascii
import json
import sys
import types

import numpy as np
import openai
from renderers import client as renderers


class Renderer:
  """Renders nothing: the prompt is given as ids."""

  supports_tools = True

  def get_stop_token_ids(self):
    return [9]

  def parse_response(self, ids, prompt_ids=None, tools=None):
    return types.SimpleNamespace(
      content=repr(ids),
      reasoning_content=None,
      reasoning_complete=True,
      tool_calls=[],
    )


async def main(url: str) -> None:
  client = openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)
  result = await renderers.generate(
    client=client,
    renderer=Renderer(),
    messages=[],
    model='tiny',
    prompt_ids=[5, 6, 7],
    sampling_params={'temperature': 1.0, 'max_tokens': 8, 'seed': 3},
    extra_headers={'X-Session-ID': 'one'},
  )
  routes = result['routed_experts']
  ids_TMA = np.frombuffer(
    binascii.a2b_base64(routes['data']), np.dtype(routes['dtype'])
  ).reshape(routes['shape'])
  try:
    await renderers.generate(
      client=client,
      renderer=Renderer(),
      messages=[],
      model='tiny',
      prompt_ids=[5] * 500_000,
    )
  except renderers.OverlongPromptError as error:
    longest = error.max_prompt_len
  kept = ('prompt_ids', 'completion_ids', 'completion_logprobs')
  fields = {name: result[name] for name in (*kept, 'finish_reason')}
  print(
    json.dumps(
      {
        **fields,
        'ids': ids_TMA.tolist(),
        'start': routes['start'],
        'longest': longest,
      }
    )
  )


if __name__ == '__main__':
  asyncio.run(main(*sys.argv[1:]))
