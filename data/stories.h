// The built-in corpus's grammar (notation: data/grammar.h). Short stories: what is said early decides what happens
// later. The tables carry that: a row of `wish` is a wish together with the trouble, the advice and the end that
// fit it.
#pragma once

inline constexpr char kStories[] = R"grammar(
# ================================================================ shapes of stories

@rule story
12 {intro} {seen:aside} {wish_story}
10 {intro} {seen:aside} {lost_story}
10 {intro} {seen:aside} {quarrel_story}
9 {intro} {seen:aside} {contest_story}
10 {intro} {seen:aside} {journey_story}
9 {intro} {seen:aside} {gift_story}
9 {intro} {seen:aside} {fear_story}
9 {intro} {seen:aside} {rescue_story}
8 {fable_story}
8 {intro} {seen:aside} {night_story}
9 {intro} {seen:aside} {trade_story}
8 {intro} {seen:aside} {garden_story}

# ---------------------------------------------------------------- how it begins

@rule intro
6 In {home:town}, {town_detail}, there lived a {age} child called {hero:person}. {He} {trait}.
6 {hero:person} was a {hero.boy} from {home:town} who {trait}.
5 Once, in {place_kind} called {home:town}, there was a child named {hero:person} who {trait}.
4 {hero:person}, {years} years old, lived at {house} {street} in {home:town} with {household}. {He} {trait}.
4 Everybody in {home:town} knew {hero:person} {surname}, the {hero.boy} who {trait}.
3 There were (two|three|four|five|six|seven) things to know about {home:town}: {town_fact}, {town_fact_two}, and
  {hero:person} lived there. {He} {trait}.
4 This happened in {home:town} in {century}{count}, the year {year_event}. {hero:person} was {years} then, and {he}
  {trait}.
4 {hero:person} had {household_have} and pockets full of {plural_thing}. {He} lived {dwelling} in {home:town},
  {town_detail}.
3 If you had walked through {home:town} {year_time}, you would have met {hero:person}. {He} {trait}.
3 Long ago, {year_time}, a {hero_size} {hero_kind} called {hero:person} came to live in {home:town}, {town_detail}.
3 "{exclaim}!" {hero:person} used to say, about almost everything. {He} lived {dwelling} in {home:town} and {trait}.
3 {hero:person} of {home:town} owned {number} {plural_thing}, {a_thing} and a {temper} {pet_kind}. {He} {trait}.

@rule he
1 {hero.he}
@rule him
1 {hero.him}
@rule his
1 {hero.his}

@list hero_size
quiet, freckled, stubborn, cheerful, long-legged, curious, sleepy-looking, serious, sunburnt, barefoot, small,
gap-toothed
@list hero_kind
child, youngster, dreamer, chatterbox, tinkerer, wanderer, bookworm

@list trait
could never sit still, counted everything twice, asked a hundred questions a day, sang to the hens every morning,
loved maps more than cake, could whistle with two fingers, collected feathers of every kind, talked to the moon,
knew the name of every cat in the street, was always the last to leave the river, kept a beetle in a matchbox,
climbed anything that had branches, drew faces on foggy windows, could not pass a puddle without jumping,
never forgot a birthday, slept with a book under the pillow, ran everywhere and walked nowhere,
told stories to the goats, believed in luck, laughed louder than the church bells, wanted to know how things worked,
was good at waiting, was never seen without a straw hat, gave half of every apple away, had a laugh like a woodpecker,
wore odd socks on purpose, made friends with stray dogs, hated wasting anything,
could hear a biscuit tin open from a mile away, said very little and noticed everything, dreamed with both eyes open,
could walk on stilts, was afraid of nothing but geese, kept every promise, was always late, mended things with string,
invented a new word every Monday, hummed while thinking, never told a lie (on Sundays|before breakfast|to a friend),
could tell the hour by the smell of the kitchens, fed the sparrows at the window,
had never been further than the mill, skipped stones better than anyone, was known for {plural_talent},
was the youngest of {number} (cousins|children), had a habit of (losing|finding|borrowing) {plural_thing}

@list plural_talent
paper boats, loud sneezes, terrible jokes, clever knots, long letters, wild guesses, good manners, mud pies,
odd questions, tall tales, careful drawings, sudden ideas

@list town_detail
where the streets smelled of {smell}, where the river ran under {number} bridges,
where every door was painted {colour}, where nobody locked a door, where the ferry came twice a day,
where the wind never quite stopped, where the market was held on {weekday}, where the baker was also the mayor,
where the houses leaned together like old friends, where the geese had the right of way,
where the clock was always {number} minutes slow, where {plural_thing} were sold by weight,
between the {colour} hills and the sea, at the end of the railway, a day's walk from anywhere,
on the warm side of the mountain, beside a lake as {lake} as {lake_like}, deep in the beech woods,
below the old {ruin}, high above the valley

@list ruin
castle, quarry, watchtower, windmill, abbey, viaduct, lighthouse, lime kiln
@list lake
round, calm, bright, deep
@list lake_like
a coin, an eye, a mirror, a bowl of ink, a secret, a plate

@rule town_fact
3 the river ran under {number} bridges
3 the bread was good
2 the clock was {number} minutes slow
2 the mayor kept {plural_farm}
2 every door was painted {colour}
2 it smelled of {smell}
1 nobody had ever seen it snow in {month}
@rule town_fact_two
3 the summers were (long|short|hot|windy)
2 the market sold more {plural_thing} than bread
3 the church bell was cracked
2 the geese ruled the square
2 {weekday} was market day
2 the cats outnumbered the people

@list place_kind
a village, a fishing village, a small town, a mountain village, a market town, a harbour town, a windy little village,
a mill town, a forgotten corner of the country, a crooked little town
@list dwelling
above the bakery, behind the church, next to the mill, by the ferry landing, in the last house before the woods,
over a shop that sold {plural_thing}, in a cottage with a {colour} door, beside the railway,
in a house with {number} chimneys, at the top of {number} flights of stairs, in a narrow house by the well,
on an old barge, across from the school, under a roof that leaked, in the tall house by the orchard,
on a farm with more {plural_farm} than people
@rule house
3 number {count},
1 the {colour} house in
1 the end of
1 the top of
1 the corner of
@list household
a large family, {number} brothers and a {temper} {pet_kind}, an uncle who played the trombone,
a grandmother and a {colour} parrot, two aunts and a {temper} {pet_kind}, {number} cats, a father who baked,
a mother who drove the mail cart, {number} sisters, a twin who did the talking, a family of clockmakers
@list household_have
one good coat, {number} cousins, {a_colour} bicycle, no brothers at all, {number} sisters, a {temper} {pet_kind},
a room under the roof, an uncle at sea
@list year_event
of the great snow, the bridge fell down, of the {number} storms, the comet came, of the apple flood,
the circus stayed all winter, when the mill burned, the river froze, of the big harvest, when the trains came,
the swallows came back early, of the {colour} moon
@list year_time
when the trains still ran on steam, in the summer of the long drought, in the week before {festival},
on a wet {weekday}, in the days of lamps and candles, in a cold {month}, one rainy {month}, in the middle of {month}
@list festival
the harvest fair, midsummer, the lantern feast, the spring fair, the first snow, the boat race, the feast of apples,
New Year
@list exclaim
Goodness, Thunder and plums, Well I never, Great green apples, Bless my boots, How odd, Just imagine, Oh my whiskers,
Splendid, What luck

# ---------------------------------------------------------------- the weather of a day: morning, midday, evening

@table weather: dawn, noon, dusk
Rain had been (drumming on the roofs|falling) since before dawn | the rain (ran down the gutters|danced in the
  puddles|came down harder)
  | the rain had stopped and every puddle held a piece of (the sky|the moon)
A thick fog lay over {home} that morning | the fog (hid the rooftops|made every tree look like a giant) | the fog
  had lifted and the first stars came out
It was (a bright morning|a morning without a cloud) | the sun stood (high and hot|straight overhead) | the sun went
  down (red as a plum|behind the hills)
The first snow of the year had fallen in the night | the snow (creaked|squeaked) underfoot | new snow began to fall
  on the (quiet|sleeping) roofs
A warm wind blew from the south | the wind (tugged at every sleeve|chased hats down the street) | the wind had
  fallen and the (leaves|flags) hung still
Frost had drawn (ferns|feathers|flowers) on every window | the frost still glittered in the shade | the frost came
  back and the (stars|lamps) looked sharp enough to cut
It was the hottest day of the (summer|year) | the air shimmered above the road | the evening brought a (breeze|cool
  wind) at last
Thunder had been (grumbling|muttering) in the hills all morning | the first (fat|warm) drops began to fall | the
  storm had passed and the air smelled (clean|of wet earth)
It was one of those grey mornings that cannot make up their minds | the clouds (hung low|drifted by like sheep) | a
  strip of gold showed under the clouds
The blossom was out and the (air|whole street) hummed with bees | petals drifted (down like confetti|across the
  path) | the swifts (screamed|wheeled) over the chimneys
The leaves had begun to turn (red|gold|brown) | the leaves (whirled about|rustled underfoot) | the smell of
  (bonfires|woodsmoke) hung over the gardens
A gale had blown all night | the gale (rattled every shutter|bent the poplars) | the gale had blown itself out and
  the (sea|river) lay quiet

@rule day
4 {sky:weather}.
3 {sky:weather}, and the air smelled of {smell}.
2 {sky:weather} on the {weekday} when it (happened|began).
2 {sky:weather}, and {hero} could hear {sound}.
2 {sky:weather}; even the {plural_farm} (noticed|seemed restless|kept still).

@list sound
the mill wheel turning, a cock crowing, somebody sawing wood, a piano far away, the ferry's horn,
the blacksmith's hammer, children skipping rope, the milk cart, doves on the roof, a dog barking at nothing,
the church organ, a kettle singing, sheep bells on the hill, the train from {other_town}, someone beating a carpet,
the postman's whistle
@rule other_town
1 {town}

# ---------------------------------------------------------------- 1 a wish

@rule wish_story
5 More than anything, {he} wanted {wish:wish}. [65% {wish.try} ]{seen_two:aside!seen}[45%  {wish_feeling}] ¶
  {meet_guide} {wish.advice}[45%  {wish_doubt}] ¶ {wish.turn} {wish.end} {wish_close}
3 {He} had only one wish, and that was {wish:wish}. {wish_laugh} [65% {wish.try} ]{seen_two:aside!seen} ¶
  {meet_guide} {wish.advice} [45% {wish_doubt} ]{wish.turn} ¶ {wish.end} {wish_close}
2 Every evening {he} (told|promised|whispered to) {wish_ear} that one day {he} was going {wish:wish}. [65%
  {wish.try} ]{seen_two:aside!seen}[45%  {wish_feeling}] ¶ {meet_guide} {wish.advice} {wish.turn} {wish.end}
  {wish_close}

@list wish_ear
the ceiling, the cat, the candle, the dark, the lamp by the bed, the first star, {a_thing} on the shelf, the old tree,
the rag doll, the pillow

@table wish: wish, try, advice, turn, end
to play the fiddle
  | {He} practised behind the (barn|shed|mill), but the tune sounded like (a gate|two cats|a rusty pump) and the
    {plural_farm} walked away.
  | "(Stop fighting it|Hold it like a bird|Play one note until it is your friend)," {said} {guide}, and closed both
    eyes to listen.
  | So for {number} weeks {hero} played (a single note|the same three notes) each evening, softer and softer, until
    {he} forgot to be afraid of it.
  | At {festival} {he} played (a waltz|a jig|an old lullaby), and (the whole square danced|nobody wanted to go
    home|even the mayor tapped a foot).
to fly a kite higher than the church tower
  | The first kite (tore on a thorn|dived into the duck pond|broke its back on a chimney), and the second would not
    leave the ground.
  | "It is too proud and too heavy," {said} {guide}. "Give it a longer tail and (a shorter speech|less paint|more
    patience)."
  | {hero} tied {number} {colour} ribbons to the tail and waited on the hill (till the wind came to look|for the
    right wind|all afternoon).
  | Up it went, over the (roofs|poplars), past the tower, until it was (a speck|no bigger than a crumb) and the
    string sang in {his} hand.
to build a boat that would not sink
  | {His} first boat was (a washtub|a door with a sail|a barrel), and it went down in (the middle of the pond|front
    of everyone) with all its {plural_thing}.
  | "Wood remembers it was a tree," {said} {guide}. "(Ask it which way it wants to bend|Fill every crack, then look
    for one more)."
  | {hero} scraped and bent and tarred for {number} weeks, and painted the hull {colour} because (courage needs a
    colour|it looked fast).
  | When they pushed it in, it (wobbled|dipped), thought about it, and floated, and {hero} rowed {guide} all the way
    (to the island|round the bend|across) and back.
to bake a loaf as light as the baker's
  | {His} first loaf could have (stopped a door|sunk a ship|mended a wall), and even the ducks (refused it|looked
    offended).
  | "You are in a hurry, and dough can tell," {said} {guide}. "(Let it sleep|Leave it alone until it has
    doubled|Cover it and sing to it)."
  | {hero} mixed the flour before bed and (did not peek once|sat on both hands), and by morning the dough had
    climbed out of the bowl.
  | The crust (sang|crackled) as it cooled, and {number} neighbours came to the door (with butter|just to smell
    it|holding plates).
to see the sea
  | {He} had only seen it (on a biscuit tin|in a picture above the stove|on a stamp), and every path {he} tried
    ended in somebody's {plural_farm}.
  | "All water goes there in the end," {said} {guide}. "(Follow the brook and ask it nothing|Keep the river on your
    left)."
  | So {hero} followed the water for {number} days, past (mills|meadows) and (weirs|sleeping towns), eating {food}
    and sleeping in barns.
  | And there it was behind the last hill, (bigger than the tin had promised|wide as the sky|shining and never
    still), and {hero} took off both shoes and (ran|shouted for joy).
to catch the moon in a bucket
  | {He} found it in the (well|trough|rain barrel) every night, but each time {he} lifted it out, it (broke into
    pieces|slipped over the rim).
  | "You cannot carry it," {said} {guide}, "but (it will come if you keep still|you can invite it in|you can give it
    a place to rest)."
  | {hero} set the bucket under the {tree} and sat beside it until the water was (smooth as glass|quite still).
  | Slowly the moon climbed in, whole and (white|golden), and stayed until (morning|the cock crowed), and {hero} did
    not touch it once.
to grow the tallest sunflower in {home}
  | The snails ate the first (seedling|shoot), the goat ate the second, and the third was (stepped on by the
    postman|flattened by hail).
  | "Plant {number} and protect one," {said} {guide}. "And (talk to it|water the roots and not the leaves|put it
    where you will see it)."
  | {hero} built a fence of {plural_thing} and carried water morning and evening through all of {month}.
  | By {festival} it looked in at the (attic|bedroom) window, and {hero} had to (borrow a ladder|climb on the roof)
    to say good night to it.
to ride the {colour_horse} pony
  | But the pony (blew out its belly at the sight of a saddle|stepped on feet on purpose), and {hero} sat in the
    nettles {number} times in one week.
  | "Get down and walk beside her," {said} {guide}. "(Nobody carries a stranger gladly|Trust first and saddle later)."
  | So they walked together, along the (river|hedge) and home again, sharing {food}, until the pony (put her nose in
    {his} collar|followed without a rope).
  | One morning she simply stood still and waited, and {hero} rode her (through the ford|down the high street|to
    {home} fair) with no saddle at all.
to read the thick book on the top shelf
  | The letters (swarmed like ants|looked like fence posts), and by the bottom of the first page {he} had always
    forgotten the top.
  | "Nobody eats a loaf in one bite," {said} {guide}. "(Take a line a day|Read one word and then taste it)."
  | {hero} read one line at breakfast and one by candlelight, then (two|three), then a page, and stopped counting
    somewhere near {month}.
  | The book was about (a whale and a stubborn captain|a city under the sand|a girl who sailed round the world), and
    when it was finished {he} turned it over and began again.
to climb the great {tree} on the hill
  | {He} got as far as the (second|third|fourth) branch, looked down, and had to be fetched with the (fire|apple)
    ladder.
  | "Do not look down and do not look up," {said} {guide}. "(Look at the next branch|Mind your hands and let your
    feet follow)."
  | {hero} went up a little further every day and left {a_ribbon} ribbon at the highest place.
  | On {weekday} {he} tied the last ribbon to the very top, and saw {number} villages, (a silver thread of river|the
    train to {town} like a toy) and {his} own chimney, no bigger than a thimble.
to keep bees
  | The first swarm flew away over the (church|rooftops) within an hour, and {hero} was stung on the
    (nose|ear|thumb) by the last to leave.
  | "Bees can smell a worried person," {said} {guide}. "(Move as if under water|Tell them the news every day)."
  | {hero} painted a hive {colour}, put it beneath the {tree}, and spoke to it about (the weather|the
    neighbours|school) in a low voice.
  | In {month} a swarm came down like a brown cloud and stayed, and that winter there was honey on (everything|the
    porridge|every slice of toast).
to ring the great bell of {home}
  | The rope was as thick as {his} arm, and when {he} pulled, (nothing happened at all|the rope pulled back and
    lifted {him} off the floor).
  | "It is not strength," {said} {guide}. "(A bell is a swing and you must push when it wants to go|Find its time
    and then keep it)."
  | {hero} pulled and let go, pulled and let go, as gently as (rocking a cradle|stroking a cat), until the floor
    began to hum.
  | Then the bell spoke, deep and {colour_sound}, and (people opened their windows in {number} streets|every pigeon
    in {home} took off at once).
to skate across the lake
  | {He} bought skates for {number} {plural_thing}, and spent the first day (on the ice flat out|holding on to a
    reed).
  | "Falling is half of it," {said} {guide}. "(Bend your knees and fall on purpose a few times|Lean forward as if
    you had good news)."
  | {hero} fell to the left and the right and (finally|at last) hardly at all, while the {plural_farm} on the bank
    looked on.
  | Before the thaw came {he} skated from shore to shore (by moonlight|with both arms spread|in one long breath),
    and wrote {his} name in the ice.
to paint the sunrise
  | But the sun was always (quicker than the brush|gone before the paint was mixed), and the paper turned (to
    mud|the colour of gravy).
  | "Do not chase it," {said} {guide}. "(Look at it for a week without a brush|Paint what it does to the roofs)."
  | For {number} mornings {hero} only looked, and on the next {he} painted with {his} eyes nearly shut, in {colour}
    and {colour_two}.
  | The picture hung in (the station|the bakery|the school) of {home}, and strangers stopped in front of it (and
    grew warm|and unbuttoned their coats).

@list colour_horse
grey, dappled, chestnut, white, spotted, black
@list colour_sound
golden, slow, solemn, sweet, bronze
@rule a_ribbon
1 a {colour}
@rule colour_two
3 rose
2 pearl
2 smoke
1 honey
1 ash

@rule wish_laugh
3 The other children laughed.
3 Nobody thought it could be done.
2 "(Impossible|Nonsense|Not with those ears)," said {his} (brother|cousin|aunt|neighbour).
2 It was not a large wish, but it was a stubborn one.
1 It had been there for as long as {he} could remember.
@rule wish_feeling
3 {hero} felt as small as {small_like}.
3 {hero} kicked a stone all the way (home|to the bridge).
2 That night {he} ate no supper.
2 {hero} sat on the (wall|steps|fence) and sighed like {sigh_like}.
2 "{exclaim_sad}," {said} {hero}, to nobody.
1 Anyone else would have given up.
@rule wish_doubt
3 It did not sound like (much|magic|an answer).
3 {hero} thought about that all the way home.
2 {hero} nodded, because {it_was}.
2 Then {guide} gave {him} {a_thing} for luck.
1 {hero} was not sure {he} understood.
@list it_was
it cost nothing, there was nothing else to try, somehow it made sense, the {plural_farm} seemed to agree,
it was said so kindly
@list small_like
a crumb, a button, a mouse, a pea, a thimble, a comma, a flea, a grain of salt, an ant, a full stop
@list sigh_like
a bellows, an old sofa, a tired horse, the tide, a leaking tyre, a kettle, a whale
@list exclaim_sad
Oh bother, What a mess, It is no use, Never again, That is that, It was a silly idea, I give up, So much for that
@rule wish_close
3 "You see," {said} {guide}, and said no more.
3 {guide_end} And {hero} has never (forgotten it|stopped smiling about it).
2 That is how wishes work: {wish_moral}.
3 {moral_line}
2 When {hero} told the story later, it began with {a_thing} and ended with "{exclaim}!"
@rule guide_end
1 Behind the crowd {guide} (winked|nodded|waved {guide.his} hat).
1 From then on {guide} always (saved {him} a seat|called {him} "my friend"|asked {him} in for tea).
@list wish_moral
they walk (slowly|on foot), they want company, they like to be fed every day,
they come to those who keep the kettle on, they are mostly work with a bow on top

@table guide: guide, he, his
the old clockmaker / the ferryman / the lighthouse keeper / the retired sea captain / the beekeeper / the
  schoolmaster / the organ grinder /
  the toymaker / the charcoal burner / the night watchman / the one-armed fiddler / the stationmaster / the shepherd
    / the knife grinder | he | his
the miller's wife / the old seamstress / the potter / the schoolteacher / the woman who sold eels / the widow from
  the corner house / the lock keeper / the librarian /
  the midwife / the woman with {number} cats / the washerwoman / the mapmaker's daughter / the gardener at the big
    house / the postmistress | she | her
@rule meet_guide
4 One day, (by the well|on the bridge|at the market|under the {tree}), {he} met {guide:guide}, {surname} by name,
  who looked {him} up and down.
3 It was {guide:guide} who noticed. "(Why so glum|What is the matter|What is it)?" {guide.he} asked.
3 Then, on {a_weekday} in {month}, {guide:guide} stopped {guide.his} work and called {him} over.
2 At last {hero} went to see {guide:guide}, who was busy with {a_thing} and did not look up.
2 "I have been watching you," said a voice. It was {guide:guide}, with {a_thing} in {guide.his} hand.
@rule said
8 said
1 declared
1 announced
1 remarked
1 answered
1 murmured
1 observed
1 replied
1 muttered
@rule a_weekday
1 a {weekday}

# ---------------------------------------------------------------- 2 lost and found

@rule lost_story
5 {lost_have} ¶ {day} {lost_gone} {lost_search} {seen_two:aside!seen} [45% {lost_search_two} ]{lost_sad} ¶
  {find.found} [45% {lost_back} ]{lost_close}
3 {lost_have} ¶ {lost_gone} {lost_search} {seen_two:aside!seen} {lost_help} {lost_sad} ¶ {find.found} [45%
  {lost_back} ]{lost_close}

@rule lost_have
4 {His} greatest treasure was {a_gem}, {gem_from}. {He} {gem_use}.
3 {He} owned {a_gem}, {gem_from}, and would not have traded it for {number} {plural_thing}. {He} {gem_use}.
3 On {his} last birthday {hero} had been given {a_gem}. {He} {gem_use}.
2 Wherever {he} went, {a_gem} went too; it was {gem_from}.
@rule a_gem
1 a {gem:gem}
@rule gem
1 {gem_look} {gem_kind:gem_kind}
@list gem_look
small {colour}, {colour}, tiny, battered, shiny, tin, old {colour}, wooden, carved, polished, dented, much-loved,
lopsided, brass
@list gem_kind
whistle, compass, spinning top, music box, pocket watch, flute, magnifying glass, bell, toy boat, locket, key,
pencil box, telescope, toy horse, penknife, medal, marble, harmonica, puppet, ring, brooch, lantern, sundial,
paintbox, yo-yo, snuff box
@list gem_from
a present from {his} grandfather, found on the beach at {town}, won at the fair in {town},
bought with the savings of {number} months, left behind by a travelling player, made by {his} father,
brought from over the sea, carved by {his} uncle, older than the house, the last thing {his} great-aunt ever gave away
@list gem_use
took it everywhere, kept it under {his} pillow at night, polished it every {weekday}, showed it to no one,
told it secrets, never went to sleep without it, carried it wrapped in a {colour} handkerchief,
held it whenever {he} was afraid, let only the best of friends touch it
@rule lost_gone
4 Then, one (morning|afternoon), {hero} reached into {his} pocket and found {pocket_find}. The {gem_kind} was gone.
3 That day the {gem_kind} was not (in its place|on the shelf|where it should have been).
2 "My {gem_kind}!" {hero} cried. "It is gone!"
2 Somewhere between {search_place} and home, the {gem} vanished.
@list pocket_find
nothing but a hole, only crumbs, {number} {plural_thing} and nothing else, just {a_thing}, a wet leaf and some string,
only {his} own cold fingers
@rule lost_search
4 {He} looked (in|behind|under) the {search_thing} and found {a_thing}. {He} looked (inside|around|beneath) the
  {search_thing_two} and found {plural_thing}.
3 {He} emptied every drawer. Out came {number} {plural_thing}, {a_thing} and {a_pin}, but no {gem_kind}.
2 {He} walked back to {search_place}, step by step, with {his} nose to the ground.
2 {He} asked (the postman|the baker|the milkman|the mayor), who had seen {a_thing} but no {gem_kind}.
@rule lost_search_two
3 {He} asked (the butcher|the sexton|the carter|the fishwife), and {he} asked the {plural_farm}, who only stared.
2 {He} searched {search_place} until {sky.noon}.
2 By noon {sky.noon}, and {his} knees were {colour_mud} with mud.
2 "Have you tried {search_place}?" asked (a neighbour|the gardener|the chimney sweep). {He} had, twice.
@list colour_mud
black, brown, stiff, thick
@list a_pin
a bent pin, a dead moth, an old ticket, half a biscuit, one sock, a broken comb, a letter to the king, a playing card
@list search_thing
bed, stove, cupboard, coal scuttle, flour bin, haystack, woodpile, kennel, carpet, sofa, wash basket, piano
@list search_thing_two
henhouse, bread oven, rabbit hutch, clock, pump, teapot, barrow, cart, beehive, boots by the door
@list search_place
the mill pond, the market square, the churchyard, the ferry landing, the orchard, the ropewalk, the school yard,
the blackberry lane, the sheep pen, the brickworks, the old quay, the bandstand, the tannery, the cricket field,
the castle ditch
@rule lost_sad
3 {hero} did not cry, but {he} came close. {find_hook}
3 When {he} gave up, the house felt (too big|very quiet|like a box with nothing in it). {find_hook}
2 "It is only a {gem_kind}," somebody said. That made it worse. {find_hook}
2 {hero} drew a picture of the {gem} and nailed it to the {tree}. {find_hook}
@rule find_hook
1 Then came {find:find}.
1 It was {find:find} that brought the answer.
1 And who should turn up but {find:find}?
@rule lost_help
1 {finder_is}
@rule finder_is
3 Soon half of {home} was (searching|on its knees|looking under things).
2 Even the mayor (looked under his hat|turned out his pockets).
2 {number_cap} neighbours came with lamps.
@rule number_cap
1 Nearly {number}
1 More than {number}
1 Exactly {number}
@table find: who, found
a magpie with something bright in its beak
  | {hero} followed it to the top of the {tree}, and there in the nest, among {plural_thing} and {a_thing}, lay the
    {gem_kind}. {He} left (a spoon|a button|a thimble) in exchange, which is only fair.
a puppy with muddy paws
  | It dug a hole beside {search_place}, wagging so hard that it fell in, and came up with the {gem_kind} between
    its teeth and an expression of great (innocence|pride).
a small boy with a runny nose
  | "I kept it (warm|safe) for you," he said, and opened his fist. He had found the {gem_kind} near {search_place}
    and had been waiting {number} hours for somebody to cry about it.
a girl whom nobody knew
  | She had picked up the {gem_kind} at {search_place} and carried it from door to door, {number} doors in all,
    asking whose heart was (missing|broken). {hero} could only nod.
the tailor, out of breath
  | "Your coat," he panted, "the one I (mended|let out) on {weekday}!" The {gem_kind} had slipped through the
    lining, and was lying (snug|warm) in the hem the whole time.
a knock at the window
  | It was the milkman, and in his hand was the {gem_kind}. It had been riding round {home} in the bottom of a milk
    can, and it was (cleaner|shinier) than ever.
a goat, coughing
  | It coughed (once|twice), stamped, and spat out the {gem_kind}, which was a little (chewed|damp) but whole. The
    goat walked off as if nothing had happened.
the tide
  | It went out past {search_place}, further than anyone could remember, and there on the wet sand lay the
    {gem_kind}, with {a_crab} sitting on it like a king.
{his} grandmother, who had been baking
  | She cut the pie into {number} pieces, and the third piece rang. "So that is what fell off the
    (shelf|windowsill)," she said, and wiped the {gem_kind} on her apron.
a very old man with a stick
  | He had taken the {gem_kind} for his own, which he had lost at {search_place} (sixty|seventy) years before. "Mine
    had a scratch on it," he said, and gave it back. {hero} let him hold it once more.
@list a_crab
a small crab, a cross crab, a pink crab, a sleepy gull
@rule lost_back
3 {hero} held it to {his} ear, {his} nose and {his} heart, to make sure.
3 {hero} (laughed|shouted|danced) all the way (round the square|home|down the lane).
2 "I will never let you go again," {said} {hero}, {rather} loudly.
2 Nothing had ever felt so (right|good) in {his} hand.
@list rather
rather, much too, happily and
@rule lost_close
3 After that, {he} tied the {gem_kind} to {his} belt with a {colour} string.
3 What is lost is not always gone; sometimes it is only (waiting|somewhere else|late).
2 That night the {gem} lay under the pillow again, and {hero} slept like {sleep_like}.
2 And from then on, whenever anybody in {home} lost {a_thing}, they sent for {hero}.
2 Later {he} could not say which was better: having it, or having it back.
@list sleep_like
a stone, a dormouse, a cat on a stove, a baby, a boat in harbour, the dead king in the abbey, a sack of flour

# ---------------------------------------------------------------- 3 a quarrel

@rule quarrel_story
5 {friends}[45%  {quarrel_happy}] ¶ {day} That was the day they quarrelled. {row.cause} [60% {quarrel_words}
  ]{quarrel_part} ¶ {quarrel_alone} {seen_two:aside!seen} [45% {quarrel_alone_two} ]{quarrel_turn} ¶ {row.mend}
  {quarrel_close}
3 {friends} Then, on {a_weekday} in {month}, everything went wrong. {row.cause}[60%  {quarrel_words}] ¶ [60%
  {quarrel_part} ]{quarrel_alone} {seen_two:aside!seen} {quarrel_turn} {row.mend} ¶ {quarrel_close}

@rule friends
4 {His} best friend was {pal:person!hero}, who {trait}. Together they {row:row}.
3 {He} and {pal:person!hero} had been friends since {since}, and they {row:row}.
3 Across the street lived {pal:person!hero}, and where one was, the other was never far. They {row:row}.
2 You hardly ever saw {him} without {pal:person!hero}. The two of them {row:row}.
@list since
the day they were born, the first day of school, the summer of the wasps, the great flood,
they both fell into the same ditch, one of them bit the other, a fight about {plural_thing}
@rule quarrel_happy
3 They shared {food}, {plural_thing} and all their secrets.
2 They had a password, which was "{colour} {pet_kind}".
2 People called them (salt and pepper|the two thieves|thunder and lightning|needle and thread).
1 They had never had a cross word in their lives.
@table row: what, cause, mend
were building a raft of {plural_barrel}
  | {hero} wanted a sail and {pal} wanted a cabin, and there was wood enough for one.
  | They built the raft with a sail that could be let down to make a (tent|roof), and it floated, and when it rained
    they sat beneath it and ate {food}.
had a den in the {tree}
  | {pal} let a stranger climb up to the den and did not ask, and {hero} found {a_thing} on the floor and wet
    footprints on the map.
  | They carved a rule into the bark: friends of friends may enter if they bring {food}. By {month} the den needed a
    second floor.
kept a {pet_kind} called {nick:pet_name} between them
  | One of them fed it and so did the other, until poor {nick} was as round as a (ball|barrel) and could not walk,
    and each said it was the other's doing.
  | They wrote a list and hung it on the gate: {hero} in the mornings, {pal} in the evenings. {nick} soon grew thin
    enough to be (naughty|chased) again.
played chess every {weekday}
  | {hero} went to fetch water, and when {he} came back a {piece:chess_piece} stood where no {piece} had stood before.
  | They set the pieces up as they had been, and {pal} lost the game in {number} moves and laughed, and they agreed
    that losing together was better than winning alone.
were writing a play about {play_about}
  | Both wanted to be {play_role}, and neither wanted to be the back of the horse.
  | They tossed a coin for each night of the play, and on the last night they were both the horse, and it was the
    horse that got the (applause|flowers).
sold lemonade by the (bridge|station)
  | At the end of the day there were {number} coins in the jar and not one more, and {pal} said there had been
    twelve more at noon.
  | The missing coins were stuck with sugar to the bottom of the jar. They laughed until they hiccuped and spent
    them on {food}.
looked after the same row of beans
  | {hero} pulled up what {he} took for weeds, and it was {pal}'s whole row of {flower}.
  | They sowed the row again, and {pal} put a label on everything, even on {hero}.
shared one bicycle, a {colour} one
  | {pal} rode it down Cutter's Hill and into the {search_thing_three}, and brought it home with a wheel like a
    pretzel.
  | They straightened the wheel with a hammer and {number} good blows each. It (squeaked|clicked) ever after, so
    that one always knew when the other was coming.
were drawing a map of all the lanes round {home}
  | {hero} spilled ink on it, from the church to the river, and said it was the {pet_kind_two}.
  | They turned the blot into a lake and gave it a name, {lake_name} Lake, and it was the most beautiful part of the
    map.
sang in the choir
  | There was one solo at {festival}, and {pal} got it, and {hero} did not say "well done".
  | {hero} stood in the front row that night, and when {pal}'s voice (shook|cracked) on the high note, {he} sang it
    too, softly, until it held.
@list plural_barrel
barrels, old doors, driftwood, fence posts, milk churns, apple crates
@list pet_name
Pepper, Button, Mustard, Biscuit, Admiral, Nutmeg, Pudding, Whisper, Thimble, Clover, Bramble, Captain, Dumpling,
Socks, Treacle, Duchess, Turnip, Marzipan
@list chess_piece
knight, bishop, rook, queen, pawn
@list play_about
a shipwreck, the moon king, three robbers, a haunted bakery, the end of winter, a dragon with a cold, Noah,
a stolen crown
@list play_role
the hero, the villain, the ghost, the queen, the dragon, the captain
@list search_thing_three
duck pond, vicar, hedge, baker's cart, fountain, flower stall
@list lake_name
Inkpot, Mirror, Blackbird, Sorry, Elbow, Whale, Thunder, Teapot
@list pet_kind_two
cat, wind, lamp, dog, parrot
@rule quarrel_words
3 "You always do this!" said {pal}. "And you never {you_never}!" said {hero}.
3 "(Goose|Pudding|Turnip|Donkey)!" shouted {hero}. "(Weasel|Toad|Windbag|Mule)!" shouted {pal}.
2 One word led to another, and the other led to worse.
2 "Then {do_alone} by yourself!" said {hero}, and at once (wished it unsaid|was sorry).
@list you_never
listen, say sorry, wait, think, ask, look where you are going, tell me anything
@list do_alone
do it, play, sit there, carry on, be clever
@rule quarrel_part
3 They went home by different streets.
3 {pal} slammed (the door|the gate), and {hero} slammed (a louder one|one too).
2 They divided {their_things}: {number} for {hero}, {number} for {pal}, and {a_thing} that neither would take.
2 Neither of them looked back, though both (wanted to|listened for footsteps).
@list their_things
the marbles, the walnuts, the pencils, the conkers, the shells, the candle ends, the coloured stones
@rule quarrel_alone
3 The next day was {number} hours longer than usual.
3 {hero} tried to play alone, but {alone_bad}.
2 For {number} days they did not speak.
2 At school {hero} sat by the window, next to {a_thing}, and {pal} sat by the door.
@list alone_bad
a secret is no good to one person, there was nobody to be it, the swing went only half as high,
even {food} tasted of paper, the jokes had nowhere to go, a password needs two
@rule quarrel_alone_two
2 "(Where is {pal}|Have you two fallen out|All alone)?" people kept asking. {hero} (shrugged|looked at the
  floor|pretended not to hear).
2 The {plural_farm} looked at {him} as if they knew.
2 At night {he} thought of {number} good answers, and by morning {he} wanted to give none of them.
1 Being right, {hero} found, was cold company.
@rule quarrel_turn
3 Then {hero} saw {pal} (on the bridge|at the pump|in the lane), carrying {a_thing}. "I am sorry," they both said,
  at the very same time.
3 In the end {hero} put {a_thing} on {pal}'s doorstep, with a note: "{note}."
2 It was raining when {pal} knocked, holding {food} wrapped in a {colour} cloth. "Half is yours," {said} {pal}.
  "{note}."
2 "Who was right?" asked {his} grandmother. {hero} thought for a long time. "I do not care any more," {he} said, and
  ran all the way.
@list note
I was a goose, It is dull without you, Come back, I miss you, I was wrong about the whole thing,
Please shout at me again, Sorry is a short word but I mean all of it
@rule quarrel_close
3 After that they still quarrelled, but never (past supper|for longer than a minute|without a biscuit in between).
3 {A_friend} is worth more than being right.
2 By evening {sky_or_lamp}, and two voices could be heard (laughing|singing|planning something) {where_voices}.
2 And if you ask them what it was about, they look at each other and cannot (remember|say).
@rule a_friend
2 a friend
1 an old friend
1 one who says sorry
@list sky_or_lamp
the lamps were lit, the whole street smelled of {smell}, the bats were out, the first star had come
@list where_voices
under the bridge, in the hayloft, behind the {tree}, on the roof of the bakery, down by the water, on the wall

# ---------------------------------------------------------------- 4 a contest

@rule contest_story
5 Every year at {festival} there was {game:game}, and {prize}. {rival_is}[60%  {game.ready}] ¶ {day} [50%
  {contest_crowd} ]{seen_two:aside!seen} {game.start} {game.mishap} ¶ {choice:choice.what} {choice.then}
  {contest_close}
3 The whole of {home} was talking about {game:game}. {Prize}. [60% {game.ready} ]{rival_is} ¶ [50% {contest_crowd}
  ]{seen_two:aside!seen} {game.start} {game.mishap} {choice:choice.what} ¶ {choice.then} {contest_close}
@list prize
the prize was {a_thing} on a velvet cushion, the winner got {a_prize}, the first prize was {a_prize},
the winner's name was painted on the town hall
@list a_prize
a {colour} ribbon, a whole cheese, a silver cup, a ham as long as an arm, a crown of {flower},
a ride on the fire engine, {number} jars of honey, a goose, a year of free buns
@rule rival_is
3 {rival:person!hero} had won it (two|three|four|five) years running, and looked like it.
2 Everyone said that {rival:person!hero} {surname} would win.
2 "You have no chance," said {rival:person!hero}, combing {rival.his} hair.
2 The one to beat was {rival:person!hero} from {street}, who had new boots and {a_thing} for luck.
@table game: what, ready, start, mishap, mid, win
the great running race
  | {hero} trained by racing (the mail cart|the neighbour's dog|clouds) along the river each morning.
  | The mayor dropped {his_hankie}, and {number} pairs of boots thundered off.
  | Halfway round, by {search_place}, {rival} caught a foot in a root and went down with a cry.
  | reach the finishing line
  | first by the length of (a nose|a loaf|a shoelace)
the soapbox derby
  | {hero} built a cart from {a_thing}, a pram and {number} {plural_thing}, and painted it {colour}.
  | Down Cutter's Hill they went, wheels smoking, chickens flying.
  | At the sharp bend {rival} lost a wheel and ended up in (the hedge|a haystack|the duck pond).
  | roll across the line
  | by half a wheel, with the brake on fire
the pie contest
  | {hero} baked {number} pies in one week and fed the bad ones to the {plural_farm}.
  | The tables stood in a long row, and the steam rose, and the judges loosened their belts.
  | Just before the tasting {rival} opened a basket and went white. Someone had sat on {rival.his} pie.
  | stand before the judges
  | because of the (cinnamon|crust|plums)
the regatta on the mill pond
  | {hero} patched the old rowing boat with tar, {a_thing} and a good deal of hope.
  | The pistol cracked, the ducks fled, and the oars bit into the water.
  | By the reeds {rival}'s boat struck a log and began to (fill|sink|turn in circles).
  | cross the line
  | by an oar's length, with wet feet
the snow sculpture contest
  | {hero} made sketches of (a bear|a whale|an owl|a sleeping giant) on the back of {number} envelopes.
  | The bell rang, and the whole square filled with flying snow.
  | An hour before the end {rival}'s sculpture leaned, groaned and lost its head.
  | finish in time
  | for the kindest face ever made of snow
the spelling contest
  | {hero} spelled everything: the soup, the shop signs, the names of {number} kinds of (beetle|cheese|cloud).
  | One by one the others sat down, over "(rhubarb|pigeon|cupboard|biscuit)" and "{hard_word}".
  | When only two were left, {rival} stood up to answer and no sound came out; {rival.his} eyes filled with tears.
  | stay until the last word
  | with "{harder_word}", spelled backwards for good measure
the kite fight
  | {hero} glued {his} kite from {colour} paper and ran till {his} arms ached.
  | {number_kites} kites went up, dipping and diving like (swallows|fish|angry hats).
  | Then a gust took {rival}'s kite and wound its string round (the weathercock|the tallest {tree}).
  | keep a kite in the sky
  | with the last kite in the sky
the fiddling contest
  | {hero} practised (in the cowshed|on the roof|under the bridge) until the {plural_farm} could hum the tune.
  | The candles were lit, and the first fiddler bowed and began.
  | In the very middle of the tune {rival}'s string snapped, and there was no other.
  | finish a tune
  | with a tune that made the old people cry and the young ones (jump|dance)
@rule number_kites
1 Some {number}
1 As many as {number}
@list his_hankie
a {colour} handkerchief, the flag, {a_thing}, a large cheese, his hat
@list hard_word
necessary, rhythm, neighbour, scissors, mischief, vegetable, handkerchief, yacht
@list harder_word
onomatopoeia, chrysanthemum, archipelago, hippopotamus, kaleidoscope, encyclopedia
@rule contest_crowd
3 All of {home} had come, with {food} and (umbrellas|cushions|grandmothers).
3 The band played (too loudly|nearly in tune|the only march it knew).
2 The square was hung with {colour} flags, and the air smelled of {smell}.
2 {hero} had butterflies in {his} stomach, or perhaps {plural_farm}.
@table choice: what, then
{hero} looked at the prize, and looked at {rival}, and turned back.
  | "Come on," {said} {hero}, and held out a hand. They were the last to {game.mid}, side by side, and the cheer
    that went up (frightened the pigeons|could be heard in {town}).
{hero} could have gone on alone. {He} stopped.
  | "I have enough for two," {said} {hero}. So they shared, and went on together, and the judges, after {number}
    minutes of whispering, gave them the prize in two halves.
{hero} kept going, as fast as {he} could, and did not look round.
  | {He} won {game.win}. But when they handed {him} the prize, {he} carried it straight to {rival} and asked, "(Are
    you all right|Will you teach me|Same again next year)?"
"Wait!" called {hero} to the judges. "That does not count."
  | They began all over again, and this time {rival} won {game.win}. {hero} clapped the loudest, and was surprised
    to find that it was easy.
For one moment {hero} was glad. Then {he} was ashamed of it and ran to help.
  | {rival} said nothing, but the year after, when it was {hero} who needed help to {game.mid}, {rival} was there
    before anyone could blink.
{hero} laughed, and then saw {rival}'s face and stopped laughing.
  | "Take mine," {said} {hero}. Nobody could remember who won that year, but everyone could remember that.
@rule contest_close
3 Now the two of them train together every {weekday}, with {food} for afterwards.
3 The prize is long since (eaten|lost|rusty), but the friendship is not.
2 There are better things than winning, and one of them is {better_thing}.
2 "{exclaim}," said the mayor, and blew his nose.
2 When the lamps were lit, {hero} and {rival} (danced|sat on the wall|ate {food}) until {few} o'clock.
@list better_thing
a friend at the finish, company, sleeping well, a good story to tell, being asked to play again

# ---------------------------------------------------------------- 5 a journey

@rule journey_story
5 {day} {errand}[65%  {set_out}] ¶ {leg:road.what} {leg.how} [60% {rest} ]{seen_two:aside!seen} ¶ [60%
  {leg_two:road.what!leg} {leg_two.how} ]{journey_near} ¶ {arrive} {journey_close}
3 {errand} {day}[65%  {set_out}] ¶ {leg:road.what} {leg.how}[60%  {leg_two:road.what!leg} {leg_two.how}] ¶ [60%
  {rest} ]{seen_two:aside!seen} [45% {journey_near} ]{arrive} {journey_close}
@rule errand
4 {His} {kin:relative} in {goal:town} was {kin_need}, and somebody had to bring {kin.him} {a_parcel}.
3 "Take {a_parcel} to your {kin:relative} in {goal:town}," said {his} (mother|father), "and do not {do_not}."
  {Kin_was}.
2 A letter came from {goal:town}. It was from {his} {kin:relative}, who was {kin_need} and longed for {a_parcel}.
@rule kin_was
2 the poor soul was {kin_need}
1 it was {number} miles
1 it was the first time {he} went alone
@table relative: who, he, him, his
grandmother / great-aunt / godmother / aunt / eldest sister / old nurse | she | her | her
grandfather / great-uncle / godfather / uncle / eldest brother | he | him | his
@list kin_need
ill in bed, about to turn eighty, snowed in with the {plural_farm}, lonely, mending slowly from a fall,
getting married at last, out of (firewood|candles|good humour)
@rule a_parcel
1 a {parcel:parcel}
@rule parcel
1 {parcel_look} {parcel_kind:parcel_kind}
@list parcel_look
covered, large, heavy, warm, fragile, {colour}, carefully wrapped, sweet-smelling, mysterious, round
@list parcel_kind
basket of {food}, cake, pot of soup, cheese, jar of honey, box of {plural_thing}, quilt, lamp, birdcage, clock,
bundle of letters, plum pudding
@list do_not
dawdle, talk to geese, drop it, open it, eat it, take the short cut, stop for anything, sit on it
@rule set_out
3 {hero} packed {a_thing}, {food} and {number} {plural_thing}, and (set out|off {he} went).
3 {He} put on {his} {colour} (scarf|coat|cap|boots) and went out by the {gate} gate. {hero_song}
2 "Back before {weekday}!" {he} called, and the road took {him} round the corner.
@rule hero_song
1 {He} sang to keep {his} feet company.
1 {He} walked (fast|slowly|backwards) at first.
1 Nobody saw {him} go but the {plural_farm}.
@list gate
north, south, east, west, old, churchyard, water
@table road: what, how
First the bridge was gone; the flood had carried it off in the night.
  | {hero} (found a fallen {tree}|borrowed a washtub|asked a carter) and got across with one wet foot and the
    {parcel_kind} held high.
A flock of {number} geese blocked the lane and hissed like kettles.
  | {hero} bowed to each of them, politely, and the geese were so astonished that they let {him} (by|through).
At the crossroads somebody had turned the signpost round.
  | {hero} (asked a snail, which pointed with both horns|threw {a_thing} in the air to see which way it
    fell|followed the smell of {smell}), and it was the right road after all.
In the wood it grew so dark that the path (went out like a candle|hid).
  | {hero} counted steps out loud, {few} hundred of them, until there was light again between the trunks.
A carter with a broken wheel stood by the ditch and scratched his head.
  | {hero} held the axle while he hammered, and rode the next {number} miles on a sack of {plural_crop}, as a reward.
By the inn a thin dog began to follow, and looked at the {parcel_kind}.
  | {hero} gave it {food} instead, and from then on there were (two of them|six legs) on the road.
The road climbed up and up, until the farms below looked like {plural_thing}.
  | {hero} rested at every {number_th} milestone and (told it a joke|sang it one verse|wrote {his} name on it in
    chalk).
An old woman sat on a stile with a bundle of sticks far too large for her.
  | {hero} carried it to her door, and she gave {him} {a_thing} and told {him} which (farm dogs|puddles|innkeepers)
    to avoid.
A bull stood in the meadow, in the middle of the only path.
  | {hero} told it the whole story of {his} life in a low voice, walking sideways, and by the end it was (asleep|in
    tears|eating daisies).
There was a toll gate, and {hero} had no money at all.
  | {hero} paid with {a_riddle}, and the toll keeper is still thinking about it.
@list a_riddle
a riddle about the moon, a riddle about an egg, a song of {number} verses, a card trick, a secret,
the best joke in {home}
@list number_th
third, fourth, fifth, second, other
@list plural_crop
turnips, onions, oats, cabbages, chestnuts, potatoes, beans, apples
@rule rest
3 At noon {sky.noon}, and {he} sat down beneath a {tree} and ate {food}.
2 {He} slept an hour in a barn, next to {plural_farm} and {a_thing}.
2 {He} drank from a spring that tasted of {spring_taste} and washed {his} face.
2 A {temper} {pet_kind} kept {him} company for a mile and told {him} nothing.
@list spring_taste
iron, stones, mint, snow, moss
@rule journey_near
3 {He} was so tired that {his} boots felt like (boats|buckets|two sleeping dogs).
2 By evening {sky.dusk}.
2 The last mile was the longest, as last miles are.
2 "Nearly there," {he} told the {parcel_kind}.
@rule arrive
3 And then there were the lights of {goal}, and in the doorway stood {his} {kin}, with {kin.his} arms wide open.
  "{exclaim}!" {kin.he} said.
3 When the door opened, {his} {kin} could not speak. {Kin.he} looked at the {parcel}, and at {hero}, and put the
  kettle on.
2 "I smelled you coming," said {his} {kin}, "or perhaps it was the {parcel_kind}." And {kin.he} laughed for the
  first time in {number} weeks.
@rule journey_close
3 They talked until the candle was a puddle, and {hero} told {kin.him} about every mile, with (only a few|some|the
  necessary) exaggerations.
3 The {parcel_kind} had not a scratch. {hero} had {number}, and was proud of every one.
2 Going home was shorter; it always is, once you know the way.
2 A road is only long, said {his} {kin}, until you know who is at the end of it.
2 That night {hero} slept under {number} blankets and dreamed of (geese|bridges|the road|nothing at all).

# ---------------------------------------------------------------- 6 a present

@rule gift_story
5 {gift_who} {gift.idea} {seen_two:aside!seen}[50%  {gift_secret}] ¶ {gift.trouble} [45% {gift_sigh} ]{gift.mend} ¶
  {gift_day} {gift.give} {gift_close}
3 {gift_who} {gift_worry} ¶ {gift.idea} {seen_two:aside!seen} {gift.trouble}[45%  {gift_sigh}] ¶ {gift.mend}
  {gift_day} {gift.give} {gift_close}
@rule gift_who
4 Soon it would be the birthday of {dear:dear}, and {hero} had {purse}. {gift_wish}
3 {His} dearest friend was {dear:dear}, who had never in {dear.his} life been given {present_never}. {gift_wish}
2 "What do you want for {festival}?" {hero} asked {dear:dear}. "Nothing," {dear.he} said, looking out of the window.
  {gift_wish}
@table dear: who, he, him, his
the old lamplighter / the blind piano tuner / the postman / the cobbler / the deaf bellringer / the night porter /
  the chimney sweep | he | him | his
the school cook / the seamstress next door / the flower seller / the ticket lady / the goose woman / the laundress /
  the lonely countess | she | her | her
@list purse
{number} pennies, no money at all, one coin with a hole in it, only {plural_thing} and a good idea,
{a_thing} and some string, exactly nothing
@list present_never
a proper present, a surprise, anything with a bow on it, a single present
@rule gift_wish
1 But everyone knew that {dear} dreamed of {gift:gift}.
1 Now, what {dear} loved most in the world was {gift:gift}.
1 If there was one thing {dear} missed, it was {gift:gift}.
@rule gift_worry
2 How do you give that to anyone?
2 {hero} lay awake for {number} nights.
1 You cannot buy that in a shop.
@table gift: what, idea, trouble, mend, give
warm hands in winter
  | {hero} decided to knit a pair of {colour} gloves.
  | The first glove had (six|seven|four) fingers, and the second would have fitted a (spoon|bear).
  | {He} unpicked it all and began again, one stitch and one sigh at a time.
  | {Dear} put them on and clapped, and did not take them off, not even to eat {food}.
the sound of the sea
  | {hero} wrote to a fisherman in {town}, and back came a shell the size of a (fist|loaf).
  | But on the way from the post office {he} tripped over a {pet_kind}, and the shell broke into {number} pieces.
  | {He} glued it with (flour paste|beeswax|pine resin) and patience, and held it up, and there it was again: the
    sea, with a tiny crackle in it.
  | {Dear} held it to one ear, then the other. "I can hear the gulls," {dear.he} said, and sat very still.
flowers at the window
  | {hero} saved seeds in a {colour} envelope and filled a box with earth from {search_place}.
  | Nothing came up but (a mushroom|nettles|one angry-looking thistle).
  | {He} moved the box into the sun, and changed the earth, and on the {number_th} day there was a green thread.
  | When {dear} opened the shutters there were {flower} from one side to the other, and {number} bees already at work.
a cake with {dear.his} name on it
  | {hero} borrowed {number} eggs from {number} neighbours and lit the stove.
  | The cake rose, and rose, looked out of the oven, and fell flat as a (plate|hat|pancake).
  | {He} filled the hole with {berry} and covered it with cream, and wrote the name so large that it ran over the
    edge.
  | {Dear} read the name aloud, twice. "That is me," {dear.he} said, and ate the first letter.
a song that {dear.his} mother used to sing
  | Nobody knew more than the first line, so {hero} went to ask all the old people in {home}, house by house.
  | One knew the middle and (hummed it through the nose|had forgotten the tune), another knew the end but would only
    sing it for {number} {plural_thing}.
  | {He} wrote it down bit by bit, and what was still missing {he} made up.
  | {hero} sang it under {dear.his} window. After a while a second voice joined in, and it knew the missing lines.
the stars, which {dear.he} was too busy to look at
  | {hero} found an old umbrella and {number_more} pinholes' worth of time.
  | The first umbrella (blew inside out|was needed in the rain), and the second turned out to be the mayor's.
  | {He} stitched up the tears and pricked the whole sky into the cloth, the (Bear|Swan|Lyre) and all.
  | {Dear} opened it in front of the lamp, and the stars went round the walls, and supper burned and nobody minded.
news from {dear.his} brother across the ocean
  | {hero} wrote {number} letters to {number} harbours and waited.
  | All of them came back, with stamps like {plural_thing} and the words "not known".
  | Then {he} asked a sailor, who asked a cook, who asked a parrot, and in {month} there came an answer.
  | {Dear} read it standing, and sitting, and standing again. "He has {number} grandchildren," {dear.he} said, "and
    he still {brother_still}."
a chair that did not wobble
  | {hero} begged an old one from the (inn|school|station) and carried it home on {his} head.
  | {He} sawed a bit off one leg, and then off another, until it was fit for a (hen|dwarf|cat).
  | So {he} put four new legs on it, of {tree} wood, and measured twice each time.
  | {Dear} sat down carefully, then leaned back, then shut both eyes. "At last," {dear.he} said.
@list number_more
ninety, two hundred, five hundred, a thousand, a few hundred
@list brother_still
whistles, snores, cannot cook, owes me a penny, cheats at cards, has all his teeth
@list berry
cherries, plums, raspberries, blackberries, gooseberries, currants, pears
@rule gift_secret
3 It had to be a secret, so {he} worked (in the attic|in the hen house|by candlelight|at the bottom of the garden)
  and said {he} was "{excuse}".
2 {He} told nobody but {a_thing}.
2 {He} worked at it for {number} evenings with {his} tongue between {his} teeth.
@list excuse
counting spiders, thinking, busy with nothing, learning Latin, only looking, tidying up
@rule gift_sigh
3 "{exclaim_sad}," {said} {hero}.
2 {hero} looked at it for a long while, and it looked back.
2 There were only {number} days left.
2 Then somebody laughed, and it was {hero}.
@rule gift_day
3 The day came, with {smell_day} in the air.
2 On the morning of the day {hero} could hardly eat {his} {food}.
2 At last everything was ready, wrapped in {colour} paper with a {colour_bow} bow.
@list smell_day
frost, blossom, rain, bonfires, spring, snow, bells, sunshine
@list colour_bow
crooked, huge, silver, spotted, drooping, striped
@rule gift_close
3 "How did you know?" "I listened," {said} {hero}.
3 {hero} walked home with empty hands, and had never felt so rich.
2 It is still there today; you can go to {home} and look.
2 And in the spring, on {hero}'s own birthday, there was {a_thing} on the doorstep and no name on it. {He} knew
  anyway.
2 The best presents are made of (time|attention|listening), with a bow on top.

# ---------------------------------------------------------------- 7 fear

@rule fear_story
5 Now, {he} was afraid of {fear:fear}. [60% {fear.how} ]{seen_two:aside!seen}[45%  {fear_hide}] ¶ {day} {fear.day}
  [45% {fear_heart} ]{fear.must} ¶ {fear.did} [45% {fear_after} ]{fear_close}
3 There was only one thing {he} could not bear, and that was {fear:fear}. [60% {fear.how} ]{seen_two:aside!seen} ¶
  {fear_advice} {fear.day}[45%  {fear_heart}] ¶ {fear.must} {fear.did} [45% {fear_after} ]{fear_close}
@table fear: what, how, day, must, did
the dark
  | At night {he} kept {number} candles burning and slept with {his} boots on.
  | Then came the evening when the candles ran out and the {pet_kind} had not come home.
  | Somewhere beyond {search_place} it was whimpering, and there was no lamp to be had.
  | {He} took one step, then {number} more, and found that the dark was not empty at all: it had owls in it, and the
    smell of {smell}, and at last a warm wet nose.
deep water
  | {He} washed with a sponge and crossed every bridge at a run.
  | Then {his} little cousin's {a_boat} drifted out on the mill pond, with the cousin in it.
  | There was a rope, and a rowing boat, and nobody else in sight.
  | {He} stepped in, rowed with shut eyes, opened them in the middle, and saw the clouds lying on the water
    underneath {him} like a soft bed.
thunder
  | At the first rumble {he} was under the table with a cushion on each ear.
  | Then, one day, {he} was minding the {plural_farm} on the hill when the sky turned {sky_dark}.
  | They were crying and running in circles, and they looked at {him}.
  | {He} began to count aloud between the flash and the bang, and sang the numbers, and by {few} hundred the storm
    was over and the flock was asleep on {his} feet.
speaking in front of people
  | When the teacher called {his} name, {his} voice went off like a (mouse|train in a tunnel) and did not come back.
  | Then the mayor lost his voice an hour before {festival}, and somebody had to read the speech.
  | It was {number} pages long, and everyone pointed at {hero}, because {he} had the clearest handwriting.
  | {He} looked for one kind face, found {his} grandmother's, and told the whole speech to her alone, and {few}
    hundred people happened to hear it.
the neighbour's great black dog
  | {He} went to school the long way round, past {search_place}, just to avoid the gate.
  | Then {he} heard it howl behind the wall, not angry but sad.
  | Its chain was caught round the {tree}, and its master was away in {town}.
  | {He} talked to it all the way across the yard, about {plural_thing} and nothing, and untangled the chain, and
    the great tongue went over {his} face like a wet towel.
heights
  | Even standing on a chair made {his} knees sing.
  | Then the church clock stopped at {few} minutes to {few}, and only a child could fit through the hatch.
  | There were {number} ladders, and the last one had no rail.
  | {He} looked at each rung as if it were the only one, and at the top {he} pulled {a_thing} out of the cogs, a
    jackdaw's, no doubt, and the clock began to tick against {his} cheek.
the old woman at the end of the lane
  | People said she ate {food_bad} and talked to her kettle.
  | Then {his} ball flew over her hedge, and {a_window} broke.
  | The door stood open, and there was a light inside.
  | {He} knocked and said who {he} was and what {he} had done. "At last somebody comes to the door," said the old
    woman. She did talk to her kettle, but only because it was polite.
being lost
  | {He} tied string to the door handle whenever {he} left the house.
  | Then, at the fair in {town}, a very small boy took hold of {his} sleeve and said, "I am lost."
  | So was {hero}, as it turned out.
  | "Then we will be lost together," {said} {hero}, and bought {food} to share, and asked a policeman, and asked a
    clown, and by {few} o'clock both of them were found.
@list sky_dark
black, the colour of slate, yellow and black, purple as a plum, dark as a cellar
@list a_boat
raft, washtub, tin bath, old punt, rowing boat
@list food_bad
snails, boiled moths, candle wax, thistles, nettles and owls
@list a_window
a pane of glass, her {colour} flowerpot, the kitchen window, the greenhouse
@rule fear_hide
3 Nobody knew, for {he} hid it behind {hide_behind}.
2 {His} (brothers|cousins|classmates) made jokes about it.
2 "I will grow out of it," {he} said, and grew, and did not.
@list hide_behind
jokes, a cough, a book, a brave face, a long story about {plural_thing}, good manners
@rule fear_advice
3 "Everyone is afraid of something," said {his} (aunt|father|mother|teacher). "I am afraid of {afraid_of}."
2 "Brave people are afraid too," {his} grandfather used to say. "They only (walk more slowly|do not tell their
  feet|bring a sandwich)."
@list afraid_of
moths, {plural_farm}, the dentist, letters from the bank, empty jars, choirs, {weekday}, soup
@rule fear_heart
3 {His} heart beat like {beat_like}.
2 {His} mouth was as dry as (flour|chalk|a biscuit).
2 {hero} looked round for somebody else. There was nobody else.
2 "Not me," thought {hero}. "Please, anyone but me."
@list beat_like
a drum, a woodpecker, a moth in a lamp, a runaway horse, the mill in spring, rain on a tin roof, somebody at the door
@rule fear_after
3 It was not until (afterwards|bedtime|the next morning) that {his} knees began to shake.
2 "{exclaim}," {said} {hero}, quite surprised.
2 When it was over, {he} sat down on the ground and laughed.
2 {He} was given {food} and {number} pats on the back.
@rule fear_close
3 Was {he} still afraid after that? A little. But the fear was no bigger than a {size_like} now, and it came when it
  was called.
3 Courage, it seems, is only fear that has {courage_is}.
2 That evening {he} gave the {number_th_one} candle to {his} little sister, in case she needed it.
2 And the {colour} scarf that {he} had worn that day hung over {his} bed, like a medal.
@list courage_is
somewhere to go, somebody to look after, said its prayers, put its boots on, no time to lose
@list number_th_one
last, biggest, second-best, only

# ---------------------------------------------------------------- 8 an animal in need

@rule rescue_story
5 {day} {rescue_find} {beast.hurt} {rescue_home} ¶ {beast.care} {seen_two:aside!seen} [45% {rescue_warn}
  ]{beast.grow} ¶ {beast.free} [45% {rescue_miss} ]{rescue_close}
3 {day} {rescue_find} {beast.hurt} ¶ {rescue_home} {beast.care} {seen_two:aside!seen}[70%  {beast.grow}] ¶ [45%
  {rescue_warn} ]{beast.free} {rescue_close}
@rule rescue_find
3 (On the way to|Coming back from|Not far from) {search_place}, {hero} found {beast:beast}.
3 Under the {tree} by {search_place} {hero} heard a small sound. It was {beast:beast}.
2 "What is that?" said {hero}. It was {beast:beast}, no bigger than {beast_big}.
2 There, between {a_thing} and a heap of leaves, sat {beast:beast}.
@list beast_big
a fist, a bun, a teacup, a slipper, a pear, a loaf, a bell
@table beast: what, hurt, care, grow, free
a young owl
  | One of its wings hung like a (broken fan|wet sleeve), and it glared as if that were {hero}'s fault.
  | It slept in a hatbox by day, and by night it walked up and down on the wardrobe and would eat nothing but
    (mice|scraps of liver) from a spoon.
  | After {number} weeks it flew from the wardrobe to the lamp, and the week after, from the lamp to {his} head.
  | On a clear night {hero} opened the window and held out an arm. The owl looked back once, turned its head all the
    way round, and was gone without a sound.
a fox cub
  | It had one paw in a (snare|trap|tin can) and was too tired to bite.
  | {hero} washed the paw with (salt water|camomile) and made a bed of {plural_thing} and straw in the shed, and it
    stole {his} left boot every night.
  | Soon it could run (round the yard|up the stairs and down), and it began to look at the {plural_farm} in a
    certain way.
  | At the edge of the woods {hero} set it down. It ran ten steps, came back with the boot, laid it at {his} feet,
    and ran again.
a hedgehog
  | It was far too thin for the time of year, and it sneezed.
  | {hero} gave it a drawer full of leaves next to the stove and {a_dish} of egg every evening, which it ate with
    its feet in it.
  | It grew as round as a (brush|pudding|cabbage), and marched through the house at night in what sounded like boots.
  | When the first violets came, {hero} carried it out to the compost heap, and it trundled off without a word of
    thanks, as hedgehogs do.
a baby hare
  | It sat quite still with its ears flat, and its heart could be seen beating.
  | {hero} fed it warm milk from (a doll's bottle|the corner of a handkerchief), every {number} hours, and slept on
    the kitchen floor beside it.
  | By {month} it could leap over the {search_thing}, and it drummed on the floor whenever anyone told a lie.
  | In the clover field it stood up on its hind legs, washed its face, and was over the hill before {hero} could say
    goodbye.
a lame duckling
  | It was the last of {number}, and the others had gone on without it.
  | {hero} bound the leg with a matchstick and a {colour} thread, and taught it to swim in the (soup tureen|washtub).
  | It followed {him} everywhere, to school and to church, (talking|complaining) all the while.
  | One autumn day a skein of ducks went over, calling. It looked up, and looked at {hero}, and rose, and made a
    wide circle over {home} before it turned south.
a swallow with oil on its feathers
  | It lay on its side like a little black glove that somebody had dropped.
  | {hero} washed it {number} times with soap and a paintbrush, and caught flies for it until {he} dreamed of flies.
  | It perched on the clothes line among the socks and practised opening its wings.
  | The others gathered on the wires for Africa. {hero} opened both hands, and could not tell, after a moment, which
    one of them was (the one|it).
a stray kitten
  | It was wet, and it had (one torn ear|a bent tail|burrs in its coat), and it was trying to look dangerous.
  | {hero} dried it with a sock and gave it cream, and it hid behind the {search_thing} for {number} days and came
    out only to bite.
  | Then, one night, it climbed on {his} chest and switched on its purr, which was {times} too large for it.
  | {hero} left the door open so that it could choose. It went out, looked at the (weather|world), and came back in.
    That was that.
a seal pup
  | It had round wet eyes, and it was a long way from the sea.
  | {hero} put it in the (bath|horse trough) and fed it {number} herrings a day, and the whole house smelled of
    harbour.
  | It learned to clap when the mailman came, and it grew until it overflowed.
  | They took it to the beach in a wheelbarrow. It slid into the waves, and {number} heads came up out of the water
    to look at it, and then {number_more_one}.
a crow with a broken beak
  | The others were chasing it, and it hopped about with great dignity.
  | {hero} fed it porridge with a straw and told it the news, and it listened with its head on one side.
  | The beak grew straight, or nearly, and the crow learned to say "{crow_says}".
  | It left on {a_weekday}. But every {month} since then there has been a gift on the windowsill: {a_thing}, or
    {a_thing_two}, or a single bright bead.
@list a_dish
a saucer, a spoonful, a dish, a lid
@list times
five times, ten times, a hundred times, several sizes
@list number_more_one
one more, none, only foam
@list crow_says
Shut the door, More, Good grief, Mind the step, Hello old thing, Not on {weekday}, Who is it
@rule a_thing_two
1 {a_thing}
@rule rescue_home
3 {hero} took off {his} {colour} (scarf|cap|jacket), wrapped it up and carried it home.
2 "You had better come with me," {said} {hero}.
2 It shivered. {hero} held it inside {his} coat all the way home and felt it grow warm.
@rule rescue_warn
3 "Do not get too fond of it," {his} (father|mother|uncle) warned. It was too late.
2 People said it would not live. {hero} did not listen to people.
2 {hero} called it {pet_name}, after {named_after}.
@list named_after
nobody in particular, an aunt, a ship, a king, the grocer, the noise it made, a hill behind {home}
@rule rescue_miss
3 The house was very tidy after that, and very quiet.
2 {hero} stood there a long time, with {a_thing} in {his} hand.
2 "{exclaim_bye}," {said} {hero}, and had something in {his} eye.
@list exclaim_bye
Safe journey, Well then, Go on, Look after yourself, Come and see me, Remember me
@rule rescue_close
3 You may love a wild thing, people say in {home}, but only with an open hand.
2 Sometimes, in {month}, {hero} still leaves the window open, just a little.
2 {hero} is grown up now and looks after sick animals, {number} a week, and it all began with {beast}.
2 When anyone asks {him} about it, {he} says only, "We looked after each other."

# ---------------------------------------------------------------- 9 a fable

@rule fable_story
4 {fable_open} {fable_detail} {moral_fable.need}[45%  {fable_say}] ¶ {fable_pass}
  {moral_fable.turn}[45%  {fable_say_two}] ¶ {moral_fable.end} {fable_moral}
3 {fable_open} {fable_detail} {fable_say} {moral_fable.need} ¶ {moral_fable.turn} [45% {fable_say_two}
  ]{moral_fable.end} {fable_moral}
@rule fable_detail
3 The {one} owned {number} {plural_thing} and {a_thing}; the {two} owned {a_thing} and {number} {plural_thing}.
2 In the {tree} above them hung {a_thing}, and round its roots lay {number} {plural_thing}.
2 At night the {one} slept on {number} {plural_thing}, and the {two} slept under {a_thing}.
2 They had a garden with {number} {flower}, a scarecrow in the shape of {a_thing} and a path of {plural_thing}.
2 People from {town} had left {a_thing} there, and {a_thing}, and nobody remembered why.
@rule fable_open
4 A {one:animal} and a {two:animal!one} lived {wild_place}. The {one} was {moral_fable:virtue}.
3 {wild_time}, a {one:animal} and a {two:animal!one} {fable_share} {wild_place}. The {one} was {moral_fable:virtue}.
2 {wild_time}, when the animals still {animals_still}, a {one:animal} met a {two:animal!one} {wild_place}. The {one}
  was {moral_fable:virtue}.
2 "Listen," said {his_gran}, "and I will tell you about a {one:animal} and a {two:animal!one}." They lived
  {wild_place}, {gran_go}, and the {one} was {moral_fable:virtue}.
@rule his_gran
1 (the old|my|our) grandmother
1 (the old|my|our) shepherd
1 (the old|my|our) ferryman
@list gran_go
so the story goes, as everybody knows, in those days, if it is true
@list wild_time
Once upon a time, Before your grandmother was born, In the winter of the great hunger, One hot summer,
Long before there were clocks, One spring, In a wet autumn
@list fable_share
shared a burrow, drank from the same spring, had made their home, were neighbours, set up house
@list animals_still
paid taxes, wore hats, spoke to one another, had a king, held a market on {weekday}
@list wild_place
at the edge of a {kind_wood} wood, beside a {kind_wood} river, under the roots of a {tree},
in the {kind_wood} marshes, on the sunny side of a hill, in a ruined {ruin}, beyond the {colour} mountains,
between the barley and the brook, in a {kind_wood} orchard, near the farm with the {colour} gate
@list kind_wood
dark, wide, quiet, lonely, slow, misty, green, forgotten, nameless
@table virtue: what, need, turn, end, moral
proud of being fast
  | "I can be in {far_place} before you have (found your shoes|finished yawning)," it would say, and the {two} would
    only {two_does}.
  | Then the hunters came, and the {one} ran so fast that it ran past the hole, past the {tree}, and straight into
    the net.
  | The {two} arrived in its own good time and (gnawed|picked) the knots apart, one after another, until the {one}
    was free.
  | (Slow feet reach the supper too|He who hurries past his friends must wait for them)
proud of its fine coat
  | It combed itself by the water for {number} hours a day and would not (carry|dig|fetch) anything.
  | But when the {hard_season} came, the {two} had {plural_store} in the larder, and the {one} had a comb.
  | "Come in," said the {two}, "and bring the comb; my back itches." So each had what the other (needed|lacked), and
    the evenings were long and warm.
  | (A fine coat has no pockets|You cannot eat a mirror)
greedy
  | Every time they found {plural_store}, it said, "One for you and (two|three|four) for me, since I am
    (hungrier|older|thinner)."
  | One night it squeezed into the farmer's larder, and ate, and ate, and could not squeeze out again.
  | "Wait," said the {two} through the gap, "and tell me a story (for each cheese|till you are thin)." It took
    {number} days. After that they shared by halves.
  | (The mouth of the trap is the size of your appetite|Half is more than you think)
sure that it knew everything
  | It gave advice on (weather|marriage|eggs) and {plural_thing}, though nobody had asked for any.
  | When the flood came, it explained to everyone why there could be no flood, until the water reached its chin.
  | The {two} said nothing, but swam by with a {floater} and pushed it under the {one}'s feet. "I was about to
    suggest that," said the {one}.
  | (Those who talk on the bank get wet in the river|Ears stay dry longer than mouths)
always complaining
  | The sun was too hot, the rain was too wet, and supper was never as good as last year.
  | So the {two} proposed to change places for {number} days, house for house and bed for bed.
  | On the {number_th} morning the {one} came back, cleaned its own doorstep, and said it was the finest doorstep
    {far_place_two}.
  | (Your own bed is softest after a night away|Grumbling is a house without windows)
afraid of its own shadow
  | It started at acorns and apologised to (mushrooms|puddles|stumps).
  | One evening the wolf stood before the {two}, and there was nobody else about, and the {one} forgot to be afraid
    and shouted "{exclaim}!" at the top of its voice.
  | The wolf had never been shouted at by anything so small. It (remembered an appointment|coughed politely) and
    left, and the {one} fainted at once.
  | (Even a small drum is loud in the right place|Courage comes when it is called by a friend)
a borrower of other people's things
  | It had the {two}'s {a_spade}, the badger's ladder and {number} of the squirrel's {plural_thing}, and it never
    remembered whose was whose.
  | When its roof blew off, it went from door to door, and every neighbour said, "With what? You have my
    (hammer|saw|nails)."
  | "Let us begin by giving things back," said the {two}. It took all day. By night there were {number} hammers on
    the roof, and by morning there was a roof.
  | (Give things back before the storm|What you return comes to help you)
fond of telling lies
  | It had (met a king|flown to {far_place}|eaten {number} bears), and the {two} always nodded politely.
  | One morning it really did find {treasure}, and ran to tell, and nobody came, because nobody believed it.
  | Only the {two} came, for it believed everything. They shared it between them, and the {one} told the story
    exactly as it happened. Nobody believed that either.
  | (Truth is a coin; do not clip it|A liar walks alone to the treasure)
slow to forgive
  | The {two} had once stepped on its tail, by mistake, {number} years ago, and it had not said good morning since.
  | Then they both fell into the same pit, one after the other, on the same dark night.
  | It is hard to climb out of a pit without standing on somebody's shoulders. "Mind the tail," said the {one}. "I
    always have," said the {two}, and up they went.
  | (A grudge is heavy in a deep hole|Forgive before you need a ladder)
too kind to say no
  | It lent its {bed_part} to the {three:animal!one!two}, its supper to the rats and its door to the woodpecker,
    until it sat in the rain.
  | "Say after me," said the {two}. "No." The {one} tried. It came out as (a squeak|"perhaps"|"no, unless you would
    like to").
  | They practised for {number} days. And when the {three} came for the blanket, the {one} said it, quite softly,
    and the {three} was so surprised that it brought everything back.
  | (A door that never shuts is only a hole|A small no keeps a big house)
@list two_does
blink, smile, chew, nod, yawn, go on digging, scratch an ear
@list far_place
the sea, the city, the next valley, Spain, the moon, {town}
@list far_place_two
in the world, this side of the sea, in seven counties, that ever was swept
@list hard_season
snow, frost, long rain, winter, north wind, great cold
@list plural_store
nuts, chestnuts, berries, beechnuts, mushrooms, acorns, dried apples, grains of barley, turnips, roots, honeycombs,
seeds
@list floater
log, plank, door, barrel, basket, branch
@list a_spade
spade, teapot, umbrella, broom, kettle, best chair, lantern
@list treasure
a cartload of cheese, a whole plum cake, a barrel of honey, a pear tree in fruit, a sack of oats,
a picnic with nobody near it
@list bed_part
bed, blanket, pillow, best bowl, chimney corner
@rule fable_say
3 "{one_says}," the {one} (liked to say|used to say|said).
2 The {two} {two_was}.
2 They were not exactly friends, but {not_exactly}.
2 For {number} years nothing came of it.
@list one_says
There is nobody like me, I was born this way, It is simply my nature, What would you do without me, Ask anyone,
Somebody has to be
@list two_was
was old and patient, kept its thoughts to itself, had a {colour} nose and a good heart, was the quiet sort,
did what needed doing, hummed a great deal, liked everyone, had {number} children and little time
@list not_exactly
they nodded, each was glad the other was there, they shared the path, there was nobody else to talk to
@rule fable_pass
3 So the (summer|year|spring) went by.
2 And so it went on until {month}.
1 The leaves fell, and grew, and fell.
1 This could not last.
@rule fable_say_two
2 "{exclaim_sad}," said the {one}.
2 Nobody laughed. One {bird} coughed.
1 The {two} looked at it for a long time.
1 That was a (cold|long|bad) night.
@list bird
magpie, crow, heron, sparrow, owl, jackdaw
@rule fable_moral
4 {moral_fable.moral}.
3 And that is why, in that part of the country, they say: {moral_fable.moral}.
2 The {one} and the {two} are neighbours still, and on {weekday} they (drink tea|play cards|watch the rain).
1 "And the moral?" asked the children. "{moral_fable.moral}," said the storyteller, and put out the lamp.

# ---------------------------------------------------------------- 10 a noise in the night

@rule night_story
5 One night in {month}, {hero} woke up. {night_heard} [60% {night_think} ]{night_up} ¶ [65% {night_walk}
  ]{night_walk_two}[45%  {night_guess}] ¶ {noise.truth} {noise.end} {night_close}
3 {night_dark} {hero} woke up. {night_heard} {night_up}[65%  {night_walk}] ¶ [60% {night_think} ][45% {night_guess}
  ]{noise.truth} ¶ {noise.end} {night_close}
@rule night_dark
2 The lamps were out, the moon was {moon}, and all of {home} was asleep.
2 It was {number} minutes past midnight, and the moon was {moon}.
1 It was the night before {festival}, and the moon was {moon}.
@list moon
a thin slice, behind a cloud, as round as a plate, the colour of butter, low over the hill, caught in the {tree}, late
@table noise: sound, truth, end
tap, tap, tap, from somewhere above the ceiling
  | In the attic a woodpecker, shut in by mistake, was knocking politely at the inside of the window.
  | {hero} opened it, and in the morning there were {number} round holes in the frame, in the shape of a smile.
a long, low moan, like a {moan_like} with a stomach ache
  | It was the wind, playing on the neck of a bottle that somebody had left beside the {search_thing_two}.
  | {hero} poured a little water into it, and the moan turned into a note, and then, with {number} more bottles,
    into a tune.
footsteps, slow ones, going round and round the house
  | Round the corner came the {plural_farm_one}, wearing {his} father's (hat|nightshirt|boots), which it had pulled
    off the line.
  | {hero} walked it back to the stable by the sleeve, and neither of them ever told.
someone sighing in the cellar
  | Behind the barrels sat the (new|youngest) kitchen maid from next door, who was homesick for {town} and had not
    wanted to wake anyone.
  | They ate {food} on the cellar steps, and {hero} asked her to describe {town_thing} there, one by one, until she
    smiled.
a scratching at the back door
  | On the step sat a {temper} {pet_kind} with a ribbon round its neck and a note: "Please keep me. I eat everything."
  | It did. It ate the note, {number} {plural_thing} and half a boot, and then it fell asleep on {his} feet and
    stayed for {number} years.
a tiny bell, ringing and stopping
  | It came from the cradle of the shop cat, who had {number} new kittens and one bell for all of them.
  | {hero} tied a {colour} thread to the bell so that it could not ring, and sat there until the last one was asleep.
a thump, and then a voice that said "Ow"
  | In the (coal|flower) bed under the window lay {his} {uncle_who}, who had gone to look at the stars and come home
    by way of the {tree}.
  | "Not a word to anyone," he said. {hero} helped him in, and on the next clear night they went together, with a
    ladder.
music, very faint, from the direction of {search_place}
  | On an upturned boat sat the (baker|butcher|sexton), who by day never said a word, and he was playing the
    {instrument} with his eyes shut.
  | {hero} listened from behind the wall until it was over, and the next day {he} bought a bun and whistled the
    tune. The man turned red, and gave {him} {number} buns.
a roaring, as if a {roar_like} were under the bed
  | It was under the bed. It was {his} own {kin_dog}, asleep on its back, snoring.
  | {hero} rolled it on its side, and it said "mff", and for the rest of the night the loudest thing in {home} was
    the clock.
@list moan_like
cow, ghost, giant, trombone, whale, camel
@list roar_like
lion, bear, mill, waterfall, steam engine
@list kin_dog
dog, old hound, spaniel, sheepdog
@list uncle_who
uncle, grandfather, big brother, godfather
@list instrument
flute, concertina, mandolin, clarinet, violin, mouth organ
@list plural_farm_one
donkey, goat, pony, cow, calf
@list town_thing
the streets, the bells, the people, the boats, the cakes
@rule night_heard
4 {He} had heard {noise:noise}.
2 There it was: {noise:noise}.
2 Something was not right. {He} lay still and listened: {noise:noise}.
1 "What was that?" {he} whispered. It was {noise:noise}.
@rule night_think
3 "A {burglar}," thought {hero}, and pulled the blanket up to {his} nose.
2 It could have been a {burglar}. It could have been {a_thing}, falling. It was neither.
2 {hero} thought of every story {he} had ever heard about {burglar_story}.
@rule burglar_story
1 ghosts
1 smugglers
1 the {ruin}
1 the drowned bell
1 wolves
1 a {burglar}
@list burglar
burglar, ghost, pirate, bear, tax collector, witch, highwayman, goblin, spy, wolf, escaped lion
@rule night_up
3 {He} lit {night_light} and put one foot on the floor, which was (cold|very cold|cold as a fish).
2 {He} took {a_thing} in one hand and {night_weapon} in the other.
2 "I am not afraid," {said} {hero} aloud, and {he} nearly believed it.
@list night_light
a candle, the lantern, the stub of a candle, the {colour} lamp, a match
@list night_weapon
a poker, an umbrella, a frying pan, a rolling pin, a broom, one slipper, a cricket bat
@rule night_walk
3 Down the stairs {he} went, past the {search_thing}, past {a_thing} that looked like a face.
2 Every board had something to say. There were {number} of them.
2 The clock on the landing showed {few} minutes to {few}, and {his} shadow went ahead of {him} on the wall.
@rule night_walk_two
2 Something soft brushed against {his} leg. It was only {brushed}.
2 There it was again, (louder|nearer|longer).
1 {He} held {his} breath and counted to {number}.
@list brushed
the cat, the curtain, a moth, {his} own nightshirt, the fringe of the rug
@rule night_guess
3 Then {he} (turned the corner|opened the door|held up the light) and saw what it was.
2 "Who is there?" {he} said. Nobody answered, so {he} went to see.
1 One more step, and {he} understood.
@rule night_close
3 Most terrible things, {hero} found, are {terrible} when you shine a light on them.
3 Then {he} went back to bed and slept until {few} o'clock.
2 And when {he} told it at breakfast, there were {number} (robbers|ghosts|bears) in it, and nobody believed a word.
2 {He} has liked the night ever since; it is full of {plural_night}.
@list terrible
lonely, looking for somebody, only tired, rather small, hungry, glad to see you
@list plural_night
surprises, owls, neighbours, good company, things that want letting out

# ---------------------------------------------------------------- 11 learning a trade

@rule trade_story
5 When {he} was {trade_age}, {he} was sent to learn from {trade:trade}. [60% {trade.first}
  ]{seen_two:aside!seen}[45%  {trade_wrong}] ¶ {trade.mistake} [45% {trade_shame} ]{trade.says} ¶ {trade.right}
  {trade_close}
3 That (spring|autumn|winter) {he} began work with {trade:trade}. [45% {trade_wrong} ][60% {trade.first}
  ]{seen_two:aside!seen} ¶ {day} {trade.mistake}[45%  {trade_shame}] ¶ {trade.says} {trade.right} {trade_close}
@list trade_age
old enough, twelve, tall enough to reach the bench, tired of school, thirteen, big enough to lift {a_thing}
@table trade: who, first, mistake, says, right
the baker
  | The day began at {number_early} in the morning, and it began with sweeping.
  | On the {number_th} day {hero} mixed up the salt and the sugar, and {number} customers bit into their buns at the
    same moment.
  | The baker bit into one too, and chewed for a long time. "Well," he said, "(now you know where the salt
    lives|nobody fell asleep over that one)."
  | {hero} drew a little wave on the salt jar. And by {festival} people came from {town} for a new sort of bun,
    sweet with a pinch of salt, which was called "{hero}'s Mistake".
the clockmaker
  | For {number} weeks {he} was allowed only to (dust|listen|wind things).
  | Then {hero} took a clock apart, just to look, and put it together again, and there were {number} wheels left over.
  | "It still goes," said the clockmaker, with {his_her} ear to it. "(Backwards|Too fast|Only on {weekday}). Most
    people need years to do that."
  | Together they looked for the place of each wheel. The clock hangs in {home} station now, and {hero} never again
    took out a screw without drawing it first.
the potter
  | {He} carried clay until {his} arms were as long as a (gorilla's|week).
  | {His} first pot leaned to the left, {his} second lay down, and the third flew off the wheel and hit the
    {pet_kind}.
  | "The clay wants to be in the middle," said the potter, "and so do you. (Breathe out|Put your elbows on your
    knees|Stop trying)."
  | {hero} breathed, and the wobble went out of the clay like a bird out of a bush. That small {colour} bowl stands
    on the kitchen table to this day, with {plural_thing} in it.
the tailor
  | {He} threaded needles, {number} dozen a day, and swept up the snippets.
  | Then {hero} cut out a pair of trousers for the mayor, and both legs were left legs.
  | "Measure twice and cut once," said the tailor, "or else (find a man with two left legs|learn to sell curtains)."
  | {hero} made the cloth into {number} caps, and gave one to each child in the street. The mayor got new trousers,
    and asked for a cap as well.
the gardener
  | There was a spade, and there was a field, and that was the first month.
  | In {month}, {hero} weeded the long bed so well that not one of the {flower} was left.
  | The gardener leaned on the rake and looked at the bare earth. "Tidy," said the old man at last. "(A weed is a
    plant whose name you have not asked|Next time, introduce yourself first)."
  | {hero} learned the names, {number} a day, leaf by leaf. And in the spring the bed came up so {colour} that the
    trains slowed down to look.
the ferryman
  | {He} was to bail, coil the rope, and keep quiet for the fish.
  | In the second week {hero} tied the boat up with a knot of {his} own, and it drifted off with {number}
    {plural_farm} and the priest.
  | The ferryman did not shout. "A knot," he said, "is a promise. (Show me yours again, slowly|Now make one that you
    can keep)."
  | {hero} tied it {few} hundred times, in the dark and behind {his} back. When the great storm came, only one boat
    in {home} stayed where it was.
the postmistress
  | There were {few} hundred names to learn, and {number} dogs.
  | One {weekday} {hero} put each letter in the box next door, all the way down the street.
  | "People have been opening each other's letters all morning," said the postmistress, "and {letters_end}. All the
    same, my dear, not again."
  | {hero} walked the street with closed eyes until {he} could read the doors with {his} fingers. In {number} years
    not one more letter went astray, unless it was meant to.
the blacksmith
  | {He} pumped the bellows till {he} saw {colour} stars.
  | Then {hero}, who wanted to be quick, struck the iron cold, and it cracked from end to end.
  | "You cannot hurry it," said the blacksmith, "and you cannot be late. (Wait for the colour of ripe cherries|Watch
    it as you would watch milk)."
  | {hero} waited, and watched, and struck. The weathercock on {home} church is {his} work, and it turns at a whisper.
the lighthouse keeper
  | {He} polished the lamp, which had {few} hundred pieces of glass, and started over.
  | One foggy night {hero} fell asleep on the stairs, and the light went out.
  | "A ship came past," said the keeper, "and I lit {a_torch} and stood on the rail and waved it for {number} hours.
    (I was young once|My arms are tired, so you may make the tea)."
  | {hero} never slept on watch again. There is a ship named after {him} now, and it dips its flag when it goes by.
@list number_early
two, three, four, half past three
@list his_her
an, one large, a hairy
@list letters_end
the widow and the sexton are engaged, three quarrels have ended, two old friends have met again,
everybody knows what the mayor owes the grocer
@list a_torch
a broom, my own coat, a barrel of tar, the kitchen chair
@rule trade_wrong
3 It was not what {he} had imagined.
2 {His} hands (hurt|smelled of {smell}|were never clean), and {his} back was {number} years older.
2 "When do I begin?" {he} asked. "You have begun," was the answer.
@rule trade_shame
3 {hero} wished the floor would open. It did not; it was a good floor.
2 {He} turned as {turn_red} as {red_like}.
2 "I will pack my things," {he} whispered.
@list turn_red
red, pink, hot
@list red_like
a radish, a beetroot, a boiled crab, a letterbox, sunset, a poppy
@rule trade_close
3 Years later, when {hero} had pupils too, {he} hid {his} smile at every mistake and waited.
3 You learn a craft from the master, but {learn_from}.
2 "{exclaim}!" say the visitors when they see it, and {hero} only shrugs.
@list learn_from
you learn the master from your mistakes, patience from the work, most of it from getting it wrong,
kindness from the first day you fail

# ---------------------------------------------------------------- 12 something grows

@rule garden_story
5 {garden_get} {garden_plant} ¶ {garden_wait} {seen_two:aside!seen} [45% {garden_wait_two} ]{plant.first} ¶ [75%
  {plant.grew} ]{plant.end} {garden_close}
3 {garden_get} [45% {garden_laugh} ]{garden_plant} ¶ {garden_wait} {seen_two:aside!seen} {plant.first} {plant.grew}
  ¶ {plant.end} {garden_close}
@rule garden_get
4 At the market {hero} swapped {a_thing} for a seed {seed_like}. "It will be {plant:plant}," said the {pedlar}.
3 In the pocket of an old coat {hero} found a seed {seed_like}, and on the paper round it somebody had written:
  {plant:plant}.
2 A {pedlar} stopped at the door, and since nobody else would give him water, he gave {hero} a seed {seed_like}.
  "Wait and see: {plant:plant}," he said.
@list seed_like
as small as a flea, as black as ink, the shape of a tear, as big as a plum, with {colour} stripes,
that rattled when shaken, no bigger than a full stop
@list pedlar
pedlar, tinker, sailor, old soldier, scissors grinder, travelling actor
@table plant: what, first, grew, end
a walnut tree, in time
  | When {hero} had (nearly forgotten it|given up counting), two leaves came up, folded like hands.
  | The tree grew a hand's breadth a year, and {hero} grew faster, and then slower, and then not at all.
  | When {he} was old, {he} sat under it with {number} grandchildren and cracked nuts, and each of them put one in a
    pocket.
a pumpkin, and no ordinary one
  | A green snout pushed up, and by evening it had eaten the path.
  | It grew over the {search_thing_two}, over the wall and round the corner, and the pumpkin at the end of it was as
    big as a (cart|cow|kitchen).
  | All of {home} had soup, {number} pots of it, and in the shell the {plural_farm} kept dry all winter.
beans
  | On the {number_th} morning there was a small green hook in the earth, like a question mark.
  | They climbed the stick, and the rope, and the drainpipe, and looked in at the bathroom window.
  | There were beans for {number} families that summer, and {hero} kept back the best one, wrapped in a {colour}
    rag, for next year.
a rose for someone you love
  | First came thorns, and more thorns, and then, when everybody said so much for that, a bud.
  | It opened in the night, and it was the colour of {rose_colour}.
  | {hero} gave it to {the_lonely}, who put it in a milk bottle and looked at it until the last petal fell, and kept
    the petal.
an apple tree, if you are patient
  | A twig with {number} leaves stood there one morning, looking rather pleased with itself.
  | The goat bit it and the frost burned it and a cart ran over it, and each time it came back (a little
    crooked|thicker).
  | The first year it bore one apple. {hero} cut it into {number} slices, and everybody said it was the best apple
    in the world, and it was.
a sunflower
  | After {number} days the earth cracked, and up it came, still wearing its seed like a hat.
  | It passed {his} knees in {month}, {his} chin a month later, and after that {he} could only look up.
  | In the autumn the finches came, {number} at a time, and {hero} let them have it all, except for {number} seeds.
a vine from the south
  | It came up late, and slowly, and leaned towards the warm wall as if it were listening.
  | It wrote its way across the house front, letter by letter, until the door was only a hole in the green.
  | In {month} the whole street sat under it at one long table, and {the_lonely} made a speech, and the grapes were
    (sour|as sweet as songs), and nobody went home.
nobody knows what
  | What came up was {colour}, and then {colour_leaf}, and had (a smell of {smell}|a leaf like a hand|a hum).
  | Professors came from {town} with {number} books and went away again shaking their heads.
  | It flowers once a year, on {hero}'s birthday, for exactly {number} minutes, and you have to be quiet, and you
    have to be there.
@list colour_leaf
striped, woolly, curly, speckled, shiny, enormous
@list rose_colour
apricots, a sunrise, old letters, cream and smoke, a robin, candlelight, raspberry juice
@list the_lonely
the old widow, the grumpy stationmaster, {his} grandmother, the new teacher, the lamplighter, the cross neighbour,
the lonely signalman
@rule garden_laugh
2 Everyone laughed. "You have been cheated," they said.
2 "That is a mouse dropping," said {his} (brother|sister|cousin).
1 It did not look like much.
@rule garden_plant
3 {hero} planted it (behind the {search_thing_two}|by the {colour} gate|in a {dented} pot), with {a_thing} to mark
  the place.
2 {hero} dug a hole with {a_spoon}, dropped it in and said good night to it.
2 There was no garden, so {hero} filled {a_pot} with earth and set it on the windowsill.
@list dented
dented, cracked, {colour}, chipped
@list a_spoon
a spoon, a roof tile, a soup ladle, an oyster shell, a broken plate
@list a_pot
a teapot, an old boot, a hat, a drawer, a saucepan, a chamber pot
@rule garden_wait
3 {He} watered it every morning and told it {told_it}.
2 A week went by, and {number} more.
2 Nothing happened. It rained, and nothing happened, wetly.
2 {He} chased away the hens, the snails and {number} {plural_farm}.
@list told_it
the news, a joke, to hurry up, about {plural_thing}, what day it was, to take its time, all {his} troubles
@rule garden_wait_two
2 "Perhaps it is shy," {said} {hero}.
2 {hero} wanted to dig it up and look, and sat on {his} hands.
1 In {month} {he} went on watering the bare earth, and people tapped their foreheads.
@rule garden_close
3 "Why did you go on?" people asked. "{went_on}," {said} {hero}.
3 Everything large was once {once_small}, and somebody looked after it.
2 If you go to {home} you can see it, and if you ask nicely you may take home a seed.
@list went_on
It had nobody else, I had told it I would, I wanted to see, Somebody had to, It never said no
@list once_small
small enough to lose in a pocket, a speck in somebody's hand, the size of a full stop, laughed at

# ================================================================ words

@rule moral_line
2 Some things come to those who hurry, but the best come to those who {best_come}.
2 It had taken {number} weeks and a good deal of {good_deal}.
2 {hero} kept {a_thing} from that day, to remember.
@list best_come
stay, listen, begin again, ask, wait their turn, do not mind looking foolish
@list good_deal
string, patience, laughter, bread and butter, courage, falling down, tea

@table person: name, he, him, his, boy
Ada / Agnes / Alma / Amelia / Anna / Beatrice / Bella / Cecily / Clara / Cora / Daisy / Dora / Edith / Elena / Elsie
  / Emma / Esther / Flora / Freya / Greta /
  Hanna / Hazel / Ida / Ines / Iris / Ivy / Jenny / Josie / Juno / Kitty / Lena / Lila / Lotte / Lucy / Mabel / Maia
    / Martha / Matilda / Mina / Nell / Nora /
  Olive / Orla / Paula / Petra / Polly / Rosa / Ruby / Ruth / Sally / Selma / Sofia / Stella / Tess / Thea / Tilda /
    Vera / Wanda / Willa / Yara / Zelda / Zora | she | her | her | girl
Abel / Adam / Albert / Alfie / Anton / Arlo / Ben / Bruno / Caleb / Carl / Casper / Conrad / Daniel / David / Edgar
  / Elias / Emil / Felix / Finn / Frank / Fred /
  George / Gus / Hans / Harry / Henry / Hugo / Ivan / Jack / Jacob / Jasper / Joel / Jonas / Karim / Kit / Leo /
    Linus / Louis / Lukas / Magnus / Marco / Max / Milo /
  Ned / Noah / Omar / Oscar / Otto / Owen / Pablo / Paul / Peter / Ralph / Robin / Rufus / Sam / Simon / Theo / Tom
    / Toby / Victor / Walter / Yusuf | he | him | his | boy

@rule town
5 {town_head}{town_tail}
1 {town_before} {town_head}{town_tail}
1 Port {town_saint}
1 Saint {town_saint}
@list town_head
Alder, Ash, Bram, Bright, Cald, Clay, Copper, Dun, Elm, Fal, Fern, Gar, Glen, Hart, Haw, Holm, Ilk, Kel, Lang, Lin,
Mar, Mill, Nether, Oak, Ox, Pen, Quen, Rams, Raven, Sand, Sel, Stan, Thorn, Tid, Under, Wal, Wey, Whit, Win, Yar
@list town_tail
bury, by, combe, dale, den, field, ford, ham, hurst, ley, mere, mouth, port, stead, stoke, ton, wick, well, worth
@list town_before
Little, Great, Upper, Lower, Old, Nether, High, Market, Castle, Bishop's
@list town_saint
Ansel, Bega, Blaise, Clement, Cuthbert, Elmo, Faith, Hild, Kevern, Maud, Nectan, Oswin, Piran, Quentin, Ronan,
Swithin, Teilo, Winifred

@list age
six-year-old, seven-year-old, eight-year-old, nine-year-old, ten-year-old, eleven-year-old, twelve-year-old
@list few
two, three, four, five, six, seven, eight, nine
@rule count
1 {digit_first}{digit}
@list digit_first
1, 2, 3, 4, 5, 6, 7, 8, 9
@list digit
0, 1, 2, 3, 4, 5, 6, 7, 8, 9
@list century
17, 18
@list years
six, seven, eight, nine, ten, eleven
@list number
two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, seventeen, nineteen, twenty,
thirty, forty
@list weekday
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
@list month
January, February, March, April, May, June, July, August, September, October, November, December
@list colour
red, blue, green, yellow, white, black, brown, grey, purple, orange, scarlet, pink, turquoise, silver, crimson, violet
@rule a_colour
1 a {colour}
@list tree
oak, elm, beech, chestnut tree, apple tree, pear tree, lime tree, willow, birch, walnut tree, larch, ash, cherry tree,
plum tree, poplar, rowan, yew, hawthorn, maple, mulberry tree
@list flower
marigolds, tulips, poppies, violets, daisies, sweet peas, lavender, foxgloves, hollyhocks, snapdragons, pansies,
primroses, cornflowers, asters, lupins, dahlias, bluebells, crocuses
@list smell
bread, woodsmoke, rain, tar, coffee, roses, hay, oranges, wet dog, gingerbread, the sea, cabbage, fried onions, lilac,
ink, leather, pepper, soap, apples, thyme, fish, cut grass, beeswax, cinnamon, peat, pine needles
@list food
bread and cheese, gingerbread, plum cake, cold potatoes, apple pie, hot chestnuts, pea soup, pancakes, honey cake,
pickled eggs, cherry tart, buttered toast, sausages, oat biscuits, nut bread, roast apples, dumplings, cheese pie,
raisin buns, liquorice, pears, walnuts and raisins, rice pudding, cold chicken, sugared almonds, doughnuts
@list temper
fat, lazy, lame, shy, bad-tempered, friendly, deaf, muddy, proud, spotted, striped, greedy, elderly, noisy, timid,
clever, sulky
@list pet_kind
cat, dog, tortoise, hen, goat, rabbit, parrot, donkey, pig, goose, jackdaw, ferret, guinea pig, hedgehog, sheep,
spaniel, terrier, piglet
@list plural_farm
cows, hens, goats, ducks, pigs, geese, sheep, donkeys, turkeys, rabbits, doves, lambs, peacocks, bullocks, calves,
ponies
@list animal
fox, hare, badger, hedgehog, otter, squirrel, mole, toad, frog, beaver, weasel, stag, tortoise, rat, bear, wild boar,
lynx, owl, raven, heron, cuckoo, swan, goose, jay, robin, kingfisher, newt, crab, snail, dormouse, marten, bat,
lizard, goat, donkey, ram, rook, magpie, stork, ox, eel, hamster, porcupine, crane, peacock
@rule a_thing
12 a {look} {object}
2 a {object} from {town}
2 a {object} made of {material}
2 a {object} the size of a {size_like}
1 a {object} that belonged to {owner}
@list look
rusty, dusty, shiny, dented, tattered, wobbly, curious, hollow, crooked, heavy, feathery, gleaming, chipped, faded,
polished, sticky, mossy, painted, sooty, fragrant, lopsided, frosted, patched, borrowed, forgotten, ancient,
brand-new, dripping, embroidered, enormous, foreign, forbidden, gilded, glowing, greasy, handmade, inky, knotted,
leaky, mended, musty, mysterious, narrow, oily, peculiar, pointed, priceless, quaint, rattling, ridiculous, round,
scorched, scratched, second-hand, secret, sinister, slippery, smoky, splintered, spotless, squeaky, stolen, striped,
stubborn, sturdy, swollen, tangled, tarnished, tiny, twisted, unlucky, upside-down, velvety, warped, waxy, weathered,
wilted, worn-out, wrinkled, flowery, magnificent, modest, noisy, nameless, perfect, plain, soggy, speckled, tilted,
treasured, unfinished, valuable
@list object
key, umbrella, tin soldier, jar, boot, candlestick, spoon, bird's nest, teapot, feather, ball of string, nail,
glass eye, decoy duck, plate, postcard, birdcage, horseshoe, pine cone, music stand, bicycle bell, lantern,
doll's shoe, egg timer, hinge, map, bottle, cowbell, mousetrap, glove, pocket mirror, drum, stuffed owl, oil can,
cork, dictionary, fishing rod, garden gnome, hatpin, inkwell, kettle, strap, magnet, nightcap, oar, picture frame,
quill, rocking horse, snow globe, thermometer, accordion, violin bow, basket, tuning fork, top hat, tobacco tin,
straw hat, sugar bowl, seashell, pepper mill, pincushion, envelope, butterfly net, clay pipe, coal shovel, duster,
flat iron, fossil, globe, egg cup, lobster pot, milk jug, nutcracker, onion, paperweight, pumpkin, railway ticket,
ladle, button, watering can, trumpet, sock, alarm clock, atlas, turnip, cushion, doorknob, cheese grater, lemon,
toy train, weathervane, wishbone, abacus, anchor, apron, bellows, bookend, bucket, chessboard, coconut, comb, crown,
doormat, drawer, fan, flag, flute, footstool, funnel, hammer, hammock, kite, lampshade, lasso, letterbox, megaphone,
mandolin, mitten, parasol, pennant, periscope, puppet, ribbon, ruler, saddle, sieve, signpost, sledge, slipper,
stopwatch, suitcase, tambourine, telescope, toothbrush, trowel, vase, wig
@list material
brass, oak, amber, marzipan, newspaper, whalebone, straw, clay, tin, bread dough, wool, pearl buttons, porcelain,
leather, silver, driftwood, wax, cardboard, felt, ivory, copper, bamboo, glass, matchsticks, sugar, slate
@list size_like
thumb, cow, loaf, pea, barn door, cat, walnut, kitchen table, melon, bishop, cherry, wheelbarrow, pillow, coin,
gravestone, piano, plum, horse, thimble, cartwheel
@rule owner
1 a {town} {job}
1 the {job} of {town}
1 {a_person}
@rule plural_thing
3 {look} {plural}
2 {plural}
@list plural
marbles, buttons, walnuts, acorns, feathers, bottle tops, conkers, shells, pebbles, pins, stamps, keys, corks, coins,
beads, clothes pegs, chestnuts, fishhooks, nails, thimbles, spoons, candle ends, cherry stones, postcards,
playing cards, teacups, umbrellas, hats, bells, whistles, balloons, ribbons, paper boats, tin cans, sea urchins,
doorknobs, egg shells, dominoes, jam jars, boots, light bulbs, lumps of coal, peppermints, pine cones, potatoes,
pumpkin seeds, rubber bands, snail shells, sugar lumps, tadpoles, ticket stubs, toffees, turnips, ladles, slippers,
lemons, mittens, mushrooms, needles, onions, pamphlets, pancakes, pencils, pigeons, saucepans, scissors, shoelaces,
songbooks, stopwatches, teaspoons, tulip bulbs, violins
@list job
baker, cooper, glazier, tinsmith, cobbler, weaver, saddler, dentist, bookbinder, notary, rope maker, plumber,
piano tuner, chandler, vicar, hatter, wheelwright, bell founder, locksmith, magician, grocer, barber, photographer,
taxidermist, fishmonger, apothecary, auctioneer, organist, undertaker, umbrella maker, schoolmaster, milliner,
ratcatcher, roofer, printer
@rule a_person
1 Mr. {surname}
1 Mrs. {surname}
1 old {surname}
1 Doctor {surname}
1 Captain {surname}
1 Miss {surname}
@rule surname
1 {surname_head}{surname_tail}
@list surname_head
Apple, Barley, Black, Bramble, Butter, Candle, Cherry, Cold, Copper, Cotter, Crab, Dobbel, Fenni, Finch, Fiddle,
Gander, Good, Gold, Grim, Hather, Honey, Jolly, Larch, Lark, Merri, Mussel, Nettle, Nut, Pebble, Pepper, Pickle, Pock,
Plum, Quill, Rook, Rumble, Silver, Snell, Sparrow, Tadder, Thistle, Tumble, Twine, Wick, Winter, Wither, Wool, Yellow
@list surname_tail
bee, bottom, brook, by, croft, dew, fold, foot, gate, good, hay, hook, house, man, more, nett, pot, ridge, shanks,
shaw, shoe, smith, son, spoon, stone, thwaite, tree, weather, wick, worthy
@rule street
3 {town_head}{town_tail} (Street|Road|Lane|Alley)
2 {surname} (Court|Square|Hill|Row|Crescent)

# ---------------------------------------------------------------- things seen in passing: one or two a story

@table aside: text
In {his} left pocket {he} carried {a_thing}, and in {his} right pocket {number} {plural_thing}.
That very morning {he} had counted {count} {plural_farm}, {count} {plural_thing} and {a_thing}.
A (man|woman|sailor|nun) went by with {a_thing} under one arm and {a_thing} under the other,
  (whistling|limping|humming|singing).
{A_person}, the {job}, leaned out of a window in {street} and asked the price of {plural_thing}.
The {colour} house in {street} smelled of {smell} and {smell}, and somebody there was hammering.
On a wall in {street} hung a notice: "Lost: {a_thing}. Reward: {count} {plural_thing}. Ask for {a_person}."
A {temper} {pet_kind} called {pet_name} sat on {a_thing} and (watched|yawned|stared|sneezed).
{hero} wrote it all down in {his} {colour} notebook: {count} {plural_thing}, {a_thing}, {count} {plural_farm}.
The {job} and the {job} were quarrelling in {street} about {a_thing}.
"Good (day|morning), {hero}!" called {a_person}, who was carrying {number} {plural_thing} in {a_thing}.
In the window of the {job}'s shop lay {a_thing}, {a_thing} and {number} {plural_thing}.
{A_person} from {street} was selling {plural_thing}, {count} for a penny, and {look} {plural_farm_toy}.
Somewhere a {pet_kind} had got into the {job}'s {plural_thing}, and {a_person} was shouting.
It was the year in which {a_person}, the {job}, won {a_thing} and {number} {plural_thing} in a lottery.
The {job} of {street} had {number} children, {pet_name} the {pet_kind}, and a house full of {plural_thing}.
Round {his} neck {he} wore {a_thing} on a {colour} thread, a gift from {a_person}.
{hero} knew {number} riddles, {number} songs and one poem, which was about {a_thing} and {plural_thing}.
For breakfast there had been {food}, {food_two} and, by mistake, {a_thing}.
{A_person} used to say that {he} would grow up to be a {job} or a {job}, and drew {him} {a_thing} on a napkin.
Every {weekday} a {job} came through with a cart of {plural_thing} and a {temper} {pet_kind}.
{hero}'s dreams in those days were full of {plural_thing}, {plural_farm} and {a_thing}.
{A_person}, who had once been a {job} in {town}, kept {number} {plural_thing} in {a_thing}.
{A_person} and {a_person} walked past, arguing whether {a_thing} was worth {count} {plural_thing}.
The museum in {street} had a new (room|window|case), and in it were {a_thing} and {count} {plural_thing}.
{hero} had once lost {a_thing} in {town} and found {a_thing} instead.
Under {his} bed {he} kept {count} {plural_thing}, {a_thing} and a jar that smelled of {smell}.
Letters came from {a_person}, now a {job} in {town}, and there were {plural_thing} in every one of them.
A circus was coming from {town}, with {number} {temper} {plural_farm} and a {job} who juggled {plural_thing}.
{hero}'s cousin, a {job} in {street}, paid for everything with {plural_thing}.
On the step of number {count}, {street}, lay {a_thing}, and nobody knew why.
People still talked about the {job} who had swum to {town} with {a_thing} on his head.
A balloon with {number} {plural_farm} in it drifted over from {town}, and {a_person} waved {a_thing} at it.
The library had {count} books about {plural_thing}, and {hero} had read all but {few}.
It was said that {a_person} could play {number} songs on {a_thing}.
That year everyone wore {plural_thing} on a {colour} string, and only {a_person} laughed.
By mistake the postman had brought {him} a parcel for {a_person}: {a_thing}, packed in {plural_thing}.
@list food_two
cold milk, radishes, mustard, an egg, half a pear, warm beer, cucumber, a kipper, prunes, jam, cocoa, onion rings,
mint tea, porridge
@list plural_farm_toy
gingerbread men, tin horses, paper hats, kites, hoops, masks, rattles, balloons
)grammar";
