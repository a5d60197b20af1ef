"""Names of packages, modules, functions, arguments and variables.

A name is one stem or two, drawn from words, syllables and letters. A hash
divides the stems in two: a name of a training task has no stem that a name of
an unseen-names task can have, on any machine.
"""

import random
import string
import zlib

_WORDS = """
  access account acre action active actor adapt address adjust admit adult
  advice affair agenda agent alarm album alert align alley allow amber amount
  anchor angle animal ankle annual answer appeal apple arcade arena armor
  array arrow artist ascent aspect asset assist atlas attach attempt attic
  audio audit author autumn average award axis bacon badge badger bakery
  balance ballad balloon bamboo banana bandit banner barn barrel basin basket
  battery battle beacon beaver bedrock beetle belief bench berry bicycle
  billing binder birch biscuit bison blade blanket blaze blend block blossom
  board bonnet bonus border borrow bottle bounce bound brake branch brand
  brass bread breeze brick bridge brief broker bronze brook brother brush
  bubble bucket budget buffer builder bullet bumper bundle burden burger burst
  butter button buyer cabin cabinet cable cache cactus calendar calm camera
  campus canal cancel candle canyon capital capsule captain caption carbon
  cargo carpet carrier carrot cascade cashier casino castle catalog cattle
  caution cedar cement census center central century cereal chain chair chalk
  chamber chance channel chapter charge chart chase cheese cherry chest chief
  child chimney chorus chrome cinema circus citizen civil claim classic clause
  cleaner clerk clever client climate clinic clock closet cloud clover coach
  coast cobalt cocoa coconut coffee collar colony color column combat comet
  comfort comment compact company compass concept concert cone confirm connect
  contact contest context contract control convert cookie copper coral corner
  cosmic cost costume cottage cotton couch count counter country couple
  courage course cousin cover cowboy craft crane crash crater cream credit
  creek crew cricket crisp critic crop cross crowd crown cruise crust crystal
  culture curtain curve custom cycle cylinder daily dairy damage dance danger
  daring dash data dawn dealer debate debris decade decent deck decline deep
  defend degree delay delta demand denial dentist depart deposit depth deputy
  derive desert design desk detail detect device diamond diary differ digest
  digit dinner direct disc discount display distance divide doctor dollar
  dolphin domain donkey donor dough draft dragon drama drawer dream drift
  driver drone drum duck duty dwarf dynamic eagle early earth easel eastern
  echo editor effect effort elbow elder elect elegant elevator embark ember
  emerald emotion emperor empire employ enable encode energy enforce engine
  enhance enjoy enlist enrich enter entire entry epoch equal equip error
  escape essay estate ethics evening event evolve exact excess excite excuse
  exhaust exhibit exotic expand expect expert explain expose express extend
  extra fabric faculty fade faint faith falcon famous fancy fantasy farm
  fashion fatal father fault favor feather fellow fence fern ferry fetch fever
  fiber fiction field figure final finger finish fire firm fiscal fitness
  fixture flag flame flash flavor fleet flight flock floor flower fluid focus
  fog follow foot force forest forget fork formal fortune forum forward fossil
  found fragile frame freedom freight frequent fresh friend frost fruit fuel
  fungus future gadget galaxy gallery game garage garden garlic gate gather
  gauge general genius gentle genuine gesture ghost giant gift ginger giraffe
  glacier glance glass glide globe glory glove glue goat gold gorilla gossip
  govern grace grade grain granite grape graph grass gravity green grid
  grocery ground group growth guard guess guide guitar habit hair half hammer
  hamster hand happy harbor harvest hawk hazard hazel head health heart heavy
  hedgehog heel height helmet helper hero high hill hint hockey holiday hollow
  home honey horizon horn horse hospital host hotel hour hub human humble
  humor hundred hunter hurdle hybrid icon idea identity image impact impose
  improve impulse inch include income indoor industry infant inform inherit
  initial inner inquiry insect inside inspire install intact interest invest
  invite invoice iron island isolate issue item ivory jacket jaguar jazz jelly
  jewel job joke journey judge juice jump jungle junior junk jury justice keen
  kernel kettle kick kidney kind king kitchen kite kiwi knee knife knock label
  labor ladder lady lake lamp language lantern laptop laser latch later latin
  laundry lava lawn layer leader leaf learn leather lecture legal legend
  leisure lemon length lens leopard lesson letter level liberty library light
  limb limit line link lion liquid liter little live lizard loan lobster local
  lock logic lonely long lottery lounge loyal lucky luggage lumber lunar lunch
  luxury machine magic magnet major mammal manage mandate mango mansion manual
  maple marble margin marine mark market marriage mask mass master match
  material matrix matter mayor meadow measure mechanic medal media melody melt
  member memory mention menu mercy merge merit merry mesh message metal method
  middle midnight milk million mimic mineral minor minute miracle mirage
  mirror missile mistake mixture mobile model modify moment monitor monkey
  month moral morning mosquito mother motion motor mountain mouse movie muffin
  mule multiply muscle museum mushroom music mutual mystery myth naive narrow
  nasty nation nature needle nephew nerve nest network neutral news nice
  nickel night noble node noise nominee noodle north notable nothing notice
  novel nuclear number nurse nut oak obey oblige obscure observe obtain
  obvious occur ocean office olive olympic omit onion online opera opinion
  oppose option orange orbit orchard ordinary organ orient original orphan
  ostrich outcome outdoor outer output oval oven owner oxygen oyster pace
  packet paddle page palace palm panda panel panic panther paper parade parent
  park parrot part partner party patch path patient patrol pattern pause pave
  payment peace peanut pear peasant pebble pelican penalty pencil people
  pepper perfect period permit person photo phrase physical piano picnic
  picture piece pigeon pill pilot pink pioneer pipe pistol pitch pizza place
  planet plastic plate platform player pledge pluck plug plunge pocket poem
  poet point polar pole police pond pony pool popular portion position
  possible post potato pottery poverty powder power practice praise predict
  prefer prepare present pretty prevent price pride primary priority prison
  private prize problem process produce profile program project promote proof
  prosper protect proud provide public pudding pull pulp pulse pumpkin punch
  pupil puppy purchase purity purpose purse puzzle pyramid quality quantum
  quarry quarter question queue quick quiz quote rabbit rack radar radio rail
  rain rally ramp ranch rapid rare rather rating raven razor reading ready
  real reason rebel rebuild recall receive recipe record recycle reduce
  reflect reform refuse region regret regular reject relax release relief rely
  remain remember remind remove render renew rent reopen repair repeat report
  request require rescue resemble resist resource response result retire
  retreat reunion reveal review reward rhythm ribbon rice rich ride ridge
  rifle rigid ring riot ripple risk ritual rival river road roast robot robust
  rocket role romance roof rookie room rose rotate rough route row royal
  rubber rude rug rule runway rural saddle sadness safe sail salad salmon salt
  salute sample sand satisfy satoshi sauce sausage save scale scan scatter
  scene scheme school science scissors score scorpion scout scrap screen
  script scrub season seat second secret section security seek segment select
  sell seminar senior sense sensor series service session settle setup seven
  shadow shaft shallow shed shelf shell sheriff shield shift ship shiver shock
  shoe shoot shop shoulder shove shrimp shrug sibling sick side siege sight
  sign signal silent silk silly silver similar simple since sing siren sister
  situate size skate sketch skill skin skirt skull slab slam sleep slender
  slide slight slim slogan slot slow slush small smart smile smoke smooth
  snack snake snap sniff snow soap soccer social sock socket soda soft solar
  soldier solid solution solve someone song soon sorry soul sound soup south
  spare spatial spawn speak special speed spell spend sphere spice spider
  spike spin spirit spoil sponsor spoon sport spot spray spread spring spy
  squeeze squirrel stable stadium staff stage stamp start state statue stay
  steak steel stem step stereo stick still sting stock stomach stone stool
  store story stove strategy stream street strike strong struggle student
  studio stuff stumble style subject submit subway success sudden suffer sugar
  suggest suit summit sunny sunset supply supreme sure surface surge surprise
  surround survey suspect sustain swallow swamp swap swarm swear sweet swift
  swim swing switch sword symbol symptom syrup system table tackle tail talent
  talk tally tank tape target task taste tattoo taxi teach team temple tenant
  tennis tent term thank theme theory thing thought thrive throw thumb thunder
  ticket tide tiger tilt timber timer tiny tired tissue title toast tobacco
  today toddler toe together toilet token tomato tomorrow tone tongue tonight
  tool tooth topic topple torch tornado tortoise toss tourist toward tower
  town toy track trade traffic tragic train transfer trap trash travel tray
  treat tree trend trial tribe trick trigger trip trophy trouble truck truly
  trumpet trust truth tube tuition tumble tuna tunnel turn turtle twelve
  twenty twin twist typical ugly umbrella unable unaware uncle uncover undo
  unfair unfold unhappy uniform unique unit universe unknown unlock until
  unusual unveil update upgrade uphold upon upper upset urban urge usage used
  useful useless user usual utility vacant vacuum vague valid valley value
  valve vanish vapor various vast vault vehicle velvet vendor venture venue
  verb verify version vessel veteran viable vibrant vicious victory video view
  village vintage violin virtual virus visa visit visual vital vivid vocal
  voice void volcano volume vote voyage wage wagon wait walk wall walnut want
  warfare warm warrior wash wasp waste water wave wealth weapon wear weasel
  weather web wedding weekend weight weird welcome west wet whale wheat wheel
  whip whisper wide width wild will window wine wing wink winner winter wire
  wisdom wise wish witness wolf woman wonder wood wool word work worker world
  worry worth wrap wreck wrestle wrist wrong yard year yellow young youth
  zebra zero zone
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
