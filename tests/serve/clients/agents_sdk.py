"""An agent of OpenAI's agents SDK calls a tool and gives a typed answer.

Arguments: URL of the API, and 'chat' or 'responses'. Prints its answer, the
calls of the tool and the kinds of its events as JSON.
"""

import asyncio
import json
import sys

import agents
import openai
import pydantic

CALLS = []


class Sum(pydantic.BaseModel):
  """The answer."""

  total: int


@agents.function_tool
def add(left: int, right: int) -> str:
  """Adds two numbers."""
  CALLS.append((left, right))
  return str(left + right)


async def main(url: str, api: str) -> None:
  agents.set_tracing_disabled(True)
  client = openai.AsyncOpenAI(base_url=url, api_key='none', max_retries=0)
  models = {
    'chat': agents.OpenAIChatCompletionsModel,
    'responses': agents.OpenAIResponsesModel,
  }
  model = models[api](model='tiny', openai_client=client)
  agent = agents.Agent(
    name='adder',
    instructions='Add with the tool.',
    model=model,
    tools=[add],
    output_type=Sum,
    model_settings=agents.ModelSettings(
      parallel_tool_calls=False, max_tokens=200, temperature=1.0
    ),
  )
  result = await agents.Runner.run(agent, 'What are 2 and 3?')
  streamed = agents.Runner.run_streamed(agent, 'What are 2 and 3?')
  kinds = [event.type async for event in streamed.stream_events()]
  answers = [result.final_output.total, streamed.final_output.total]
  print(json.dumps({'answers': answers, 'calls': CALLS, 'kinds': kinds}))


if __name__ == '__main__':
  asyncio.run(main(*sys.argv[1:]))
