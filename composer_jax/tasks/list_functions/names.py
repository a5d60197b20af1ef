"""Names of packages, modules, functions, arguments and variables.

A name is one stem or two, drawn from words, syllables and letters. A hash
divides the stems in two: a name of a training task has no stem that a name of
an unseen-names task can have, on any machine.
"""

import random
import string
import zlib

_WORDS = """
  account acre actor adapt address adjust admit adult affair agent album
  alley amber anchor ankle annual answer apple arena armor arrow asset
  assist atlas attempt audit author autumn award axis badge badger balance
  bandit barn barrel basin battery battle beacon bedrock belief bench berry
  binder birch bison blanket block blossom board bonus border bottle bounce
  bound brake branch bread breeze brick bridge brief broker bronze brook
  brother brush bucket budget buffer bumper bundle burden burger butter
  button buyer cabin cabinet cache calm camera campus cancel candle canyon
  capital capsule caption carbon cargo carpet cashier castle catalog caution
  cedar cement census century cereal chain chair chalk chamber chance
  channel chase cherry chimney chorus cinema circus citizen civil clause
  clerk client climate clinic clock cloud clover coach coast cobalt cocoa
  coconut coffee collar comet comfort concept cone confirm connect context
  cookie copper coral corner cosmic cost costume cottage cotton couch count
  courage course cousin cover craft crane crash crater credit crew cricket
  crisp crop crowd crown crystal culture curve custom cylinder damage dance
  danger daring dawn decade deck decline deep delay delta demand denial
  depth deputy derive desert design desk detail device diamond digest digit
  direct disc discount display distance doctor dollar domain donkey draft
  dragon drama drone duck duty dynamic eagle early easel echo editor effect
  elder elevator ember emerald emotion employ encode energy enforce engine
  enhance enjoy entry epoch error essay estate ethics evening event evolve
  exact excite exhaust exotic express extend faculty fade faint faith falcon
  famous fancy fantasy farm fashion fatal father fault feather fern fetch
  fever fiber fiction field figure finger firm fitness flag flame flight
  flock floor fluid fog follow foot forest forget formal forum fossil
  freight friend fuel galaxy garage garden gate gauge genius gentle gesture
  gift ginger glacier glance glass glide globe glory glue gold gorilla
  gossip grace grade granite graph grocery group growth guard guess hair
  hammer harbor harvest hazel head health heart height helmet helper hero
  high hint holiday hollow honey horn host hour humor hundred hurdle idea
  identity image impact improve impulse inch income indoor infant inherit
  initial insect inside inspire install invest invoice island isolate issue
  item ivory jacket job joke judge jungle junior keen kernel kettle king
  kite kiwi knee knife label labor ladder lady lamp lantern laser later
  latin lawn leaf leisure lemon length letter level liberty library limit
  line lion liquid liter lizard lobster local lock long lottery lounge
  luggage lunar machine magic magnet major mammal manage mandate mango
  manual maple marble marine mark market mass master match mayor meadow
  mechanic media melt member memory mention mercy merit merry mesh metal
  method midnight mineral minor minute miracle mirror missile mobile model
  modify moment monitor monkey mosquito mother motor mule muscle museum
  mutual mystery naive nasty nation nature needle nerve nickel noble node
  noise nominee nothing notice novel number nurse oak obey oblige obtain
  occur ocean office omit online opinion oppose orbit orchard ordinary organ
  orient original outcome outer owner oyster packet paddle page palace palm
  panda panel panic panther paper parade park part patch path pave payment
  peace peanut pear peasant pebble pelican pencil people pepper period
  permit physical piano picture piece pilot pink pizza place planet plastic
  platform player pledge pluck pocket point polar pole police pond pony pool
  popular portion position possible potato poverty powder practice praise
  prepare pretty price prize produce profile promote provide public pull
  pulp pulse pumpkin pupil puppy purchase purity purpose purse puzzle quarry
  quarter question queue quote rabbit radio rain rally ranch rare rating
  reading real reason rebel rebuild receive record reflect reform relax
  relief rely remain remind render renew report require rescue resemble
  response result retreat reveal review reward ribbon rich ridge rifle ring
  risk rival river road rocket role rookie room rotate rough route row
  rubber rude rug rural saddle sadness safe salmon salt salute sample sand
  sauce scale scan scatter scheme school scissors score scorpion scrap
  script scrub season seat section security select senior sensor series
  settle setup seven shadow shaft shelf shell sheriff shift shiver shop
  shoulder sibling side sight sign signal silent silk silver simple since
  sing size skate sketch skirt slab slam slender slogan slot slow smart
  smile smooth soccer social socket soda soft solar soldier solid solution
  solve sorry soul soup spare spatial special sphere spice spider spoil
  sponsor spoon spray spring squeeze stadium staff stage stamp start state
  statue stay steak steel step stereo stick stock stool store stove stream
  strike strong struggle studio stuff subject success sudden sugar suit
  summit sunset supreme sure surge surprise surround survey suspect sustain
  swallow swarm swim switch sword system table tackle tail talk tally tank
  tape target task taste taxi teach team temple tenant tennis tent term
  thank thrive thunder ticket timber tiny tired toast tobacco today toddler
  together toilet token tomato tomorrow tongue tonight tool topic tornado
  toss toward tower town track trade tragic train transfer treat tree trial
  tribe trigger trip trouble truly trust truth tuna tunnel turn turtle
  twenty twin typical ugly umbrella unaware undo unfair unfold unhappy
  unique unit universe unlock until unusual unveil upgrade uphold upper
  upset urban urge usage used useful useless user usual valley value vanish
  vapor various vast vault velvet vendor venture verify vessel veteran
  viable vibrant vicious victory video view vintage violin virus visa visit
  visual volume vote wage wagon walk walnut warfare warm wash wasp waste
  water wave wealth weapon wear weasel weather weight weird west whale wheat
  wheel whip whisper wide width wild will window wing wink winner winter
  wire wisdom wise wonder work worker world wrap wreck wrestle wrist write
  wrong yard year yellow young zone
"""
WORDS = tuple(_WORDS.split())
_CONSONANTS, _VOWELS = 'bdfgklmnprstvz', 'aeiou'

# Words of Python and of the descriptions that are short enough to be drawn.
_RESERVED = """
  abs add all an and any are as back bin body bool by case chr cube def del
  dict dir each elif else eval even exec exit find for from give hash help hex
  id if in int is iter just keep left len less list map max min negate
  negative next not oct odd of one ones only open or ord over pass plus
  positive pow quit repr set sort str sum take than that the them then they to
  try type up vars very what with zip
"""
RESERVED = frozenset(_RESERVED.split())


def is_unseen(stem: str) -> bool:
  """True for the fifth of all stems that no name of a training task has."""
  return zlib.crc32(stem.encode()) % 5 == 0


def _syllables(draw: random.Random, count: int) -> str:
  return ''.join(
    draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(count)
  )


def _letters(draw: random.Random, count: int) -> str:
  return ''.join(draw.choice(string.ascii_lowercase) for _ in range(count))


def _stem(draw: random.Random, kind: str) -> str:
  if kind == 'package':  # Long enough to be no module of Python's own.
    return _syllables(draw, 4)
  if kind == 'variable':
    return _letters(draw, draw.choice((1, 1, 2, 3)))
  return draw.choice(
    (
      draw.choice(WORDS),
      _syllables(draw, draw.choice((2, 2, 3))),
      _letters(draw, draw.choice((2, 3))),
    )
  )


def draw_name(
  kind: str, draw: random.Random, *, unseen: bool, taken: set[str]
) -> str:
  """Returns a name and adds it to those taken.

  Args:
    kind: 'package', 'module', 'function', 'argument' or 'variable'.
    unseen: true for stems that no training task has, false for the others.
    taken: names of the same task, which must differ.
  """
  while True:
    num_stems = draw.choice((1, 1, 2)) if kind == 'function' else 1
    stems = [_stem(draw, kind) for _ in range(num_stems)]
    name = '_'.join(stems)
    if any(s in RESERVED or is_unseen(s) != unseen for s in stems):
      continue
    if name not in taken:
      taken.add(name)
      return name
