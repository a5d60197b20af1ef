"""Parts that environments share: invalid calls and short quotes."""

from composer_jax.text import tokenizer


class InvalidCall(Exception):
  """A call that cannot be carried out; its message goes to the policy."""

  def __init__(self, outcome: str, message: str):
    super().__init__(message)
    self.outcome = outcome


def quoted(text: str, most: int) -> str:
  """Returns text on one line of at most `most` characters.

  Lone surrogates, which code may answer and no log can hold, are replaced.
  """
  text = ' '.join(tokenizer.without_surrogates(text).split())
  return text if len(text) <= most else f'{text[: most - 3]}...'
