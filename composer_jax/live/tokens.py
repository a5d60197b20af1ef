"""Tokens that name an episode of a user who consented; nobody else makes them.

A token is its claim and an HMAC of it, so that a server checks an event without
a look at any file. Users are kept under a pseudonym, which is a keyed hash of
what the client calls them: the folder of episodes names nobody.
"""

import base64
import binascii
import dataclasses
import hmac
import json
import pathlib

from composer_jax.delta.format import keys

SECRET = 'secret'


class Forged(ValueError):
  """A token that this service did not make."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
  """What a token says of its episode.

  Attributes:
    episode: name of the episode, random.
    user: pseudonym of the user.
    domain: domain of the request, such as a product or a language.
    arm: 'control' or 'candidate', whose weights answer.
    trial: name of the trial that drew the arm; '' outside of one.
  """

  episode: str
  user: str
  domain: str
  arm: str
  trial: str = ''


class Tokens:
  """Makes and checks tokens with the secret of a folder of episodes."""

  def __init__(self, folder: pathlib.Path):
    """Reads the secret, which the first process makes."""
    self._key = keys.make_key(folder / SECRET)

  def pseudonym(self, user: str) -> str:
    return self._mac('user', user.encode())

  def sign(self, claim: Claim) -> str:
    data = json.dumps(dataclasses.asdict(claim), sort_keys=True).encode()
    text = base64.urlsafe_b64encode(data).decode()
    return f'{text}.{self._mac("episode", data)}'

  def claim(self, token: str) -> Claim:
    """Returns what a token says; `Forged` if it was not signed here."""
    text, _, mac = token.rpartition('.')
    try:
      data = base64.urlsafe_b64decode(text.encode())
    except (binascii.Error, UnicodeEncodeError):
      data = b''
    if not _equal(mac, self._mac('episode', data)):
      raise Forged('The token of the episode was not made by this service.')
    return Claim(**json.loads(data))

  def withdrawal(self, user: str) -> str:
    """Returns the token by which a user, given as pseudonym, withdraws."""
    return f'{user}.{self._mac("withdrawal", user.encode())}'

  def withdrawing(self, token: str) -> str:
    """Returns the pseudonym of a withdrawal token; `Forged` as `claim`."""
    user, _, mac = token.rpartition('.')
    right = self._mac('withdrawal', user.encode(errors='replace'))
    if not _equal(mac, right):
      raise Forged('The token of withdrawal was not made by this service.')
    return user

  def _mac(self, purpose: str, data: bytes) -> str:
    return self._key.sign(purpose.encode() + b'\0' + data).hex()[:40]


def _equal(given: str, right: str) -> bool:
  # In constant time; bytes, since texts must be ASCII for it.
  return hmac.compare_digest(given.encode(errors='replace'), right.encode())
