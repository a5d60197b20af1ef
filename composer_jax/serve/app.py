"""The routes of the server as one ASGI application.

Starlette, not FastAPI: bodies are checked against OpenAI's rules and refused in
its words, which FastAPI's own validation would get in the way of.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette import applications, exceptions, requests, responses, routing

from composer_jax.serve import exchange, metrics, recording, service
from composer_jax.serve.api import errors, generate, openai, tokens


def build(
  served: service.Service,
  model: openai.Model,
  token: str = '',
  hosts: Collection[str] | None = None,
  recorder: recording.AnswerRecorder | None = None,
) -> applications.Starlette:
  """Returns the application.

  Args:
    served: service that samples; the caller starts and stops it.
    model: the model's name, tokenizer and format.
    token: bearer token that requests must carry, but for /health and /ready; ''
      asks for none.
    hosts: Host names that requests may use; None allows any.
    recorder: keeps episodes of users who consent; None keeps nothing.
  """
  figures = metrics.Metrics(served)
  text_api = openai.OpenAI(served, figures, model, recorder)
  tokens_api = tokens.TokensApi(served, figures, model.name)
  generate_api = generate.GenerateApi(served, figures, model.name)

  def route(
    method: str,
    path: str,
    respond: Callable[[exchange.Exchange, Any], Awaitable[None]],
    is_open: bool = False,
  ) -> routing.Route:
    endpoint = exchange.HttpRoute(
      respond=respond,
      route=path,
      options=served.options,
      token='' if is_open else token,
      hosts=hosts,
      reads=method == 'POST',
      count=lambda r, s: figures.requests.labels(r, str(s)).inc(),
    )
    return routing.Route(path, endpoint, methods=[method])

  async def scrape(to: exchange.Exchange, _: Any) -> None:
    await to.answer(figures.text(), content_type=metrics.CONTENT_TYPE)

  async def health(to: exchange.Exchange, _: Any) -> None:
    problem = served.unhealthy()
    fields = {'status': 'unhealthy', 'reason': problem} if problem else {}
    await to.answer({'status': 'ok', **fields}, 503 if problem else 200)

  async def ready(to: exchange.Exchange, _: Any) -> None:
    is_ready = served.state == service.SERVING and not served.unhealthy()
    fields = {
      'status': 'ready' if is_ready else served.state,
      'policy_version': served.version,
      # Why newer weights are not served, where there are some.
      'problem': served.problem or None,
    }
    await to.answer(fields, 200 if is_ready else 503)

  recorded = recorder.routes() if recorder is not None else {}
  return applications.Starlette(
    routes=[
      route('POST', '/v1/chat/completions', text_api.chat),
      route('POST', '/v1/completions', text_api.complete),
      route('POST', '/v1/responses', text_api.respond),
      route('GET', '/v1/models', text_api.models),
      route('GET', '/v1/models/{name:path}', text_api.model),
      route('POST', '/v1/tokens', tokens_api.sample),
      route('POST', '/inference/v1/generate', generate_api.sample),
      route('DELETE', '/v1/tokens/sessions/{name:path}', tokens_api.close),
      *(route('POST', path, do) for path, do in recorded.items()),
      route('GET', '/metrics', scrape),
      route('GET', '/health', health, is_open=True),
      route('GET', '/ready', ready, is_open=True),
    ],
    exception_handlers={exceptions.HTTPException: _no_route},
  )


async def _no_route(
  request: requests.Request, error: Exception
) -> responses.Response:
  """Answers 404 and 405 in OpenAI's form."""
  assert isinstance(error, exceptions.HTTPException)
  refusal = errors.ApiError(
    error.status_code,
    f'{request.method} {request.url.path} is not served here: {error.detail}.',
    code='unknown_url' if error.status_code == 404 else 'method_not_allowed',
  )
  return responses.JSONResponse(
    refusal.body(), error.status_code, dict(error.headers or {})
  )
