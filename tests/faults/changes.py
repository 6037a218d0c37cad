"""What an operator changes of a running group.  Each change has a name and is done; then the next one may come."""

import random

from world import RANKS

MORE = 2  # ranks that a fourth server brings
TOKENS = {"ll": ("--ll-max-tokens", 16), "ht": ("--ht-max-tokens", 32)}  # as the group was made


class Change:
    """What it does to whom was drawn when it was made, so that the same seed brings the same."""

    membership = False  # of servers: a pause may be longer

    def __init__(self, world, draw):
        self.world = world
        self.whom = self.choose(draw)

    @staticmethod
    def possible(world):
        return True

    def choose(self, draw):
        return draw.choice(self.world.nodes)

    def do(self):
        raise NotImplementedError

    def __str__(self):
        return "%s %s" % (type(self).__name__, self.whom)


class Nothing(Change):
    """How long pauses are when nobody changes anything."""

    def choose(self, draw):
        return ""

    def do(self):
        pass


class Modes(Change):
    ORDER = ("ll", "ll,ht", "ht")  # and again

    def choose(self, draw):
        return self.ORDER[(self.ORDER.index(self.world.modes) + 1) % len(self.ORDER)]

    def do(self):
        self.world.modes = self.whom
        self.world.update("--modes=" + self.whom)


class Tokens(Change):
    """Doubled, and back, in a mode that the group has."""

    def choose(self, draw):
        return draw.choice(self.world.modes.split(","))

    def do(self):
        flag, tokens = TOKENS[self.whom]
        self.world.doubled ^= {self.whom}
        self.world.update("%s=%d" % (flag, 2 * tokens if self.whom in self.world.doubled else tokens))


class Added(Change):
    """A fourth server, with ranks that were not there before."""

    membership = True

    @staticmethod
    def possible(world):
        return len(world.homes) == RANKS

    def choose(self, draw):
        return draw.choice(self.world.free())

    def do(self):
        self.world.add_server(self.whom)
        self.world.move(self.world.homes + [self.whom] * MORE)


class Removed(Change):
    """It, or what has taken its place."""

    membership = True

    @staticmethod
    def possible(world):
        return len(world.homes) > RANKS

    def choose(self, draw):
        return self.world.homes[RANKS]

    def do(self):
        self.world.move(self.world.homes[:RANKS])
        self.world.remove_server(self.whom)


class Replaced(Change):
    """By another one, that takes all its ranks."""

    membership = True

    def choose(self, draw):
        return draw.choice(self.world.nodes), draw.choice(self.world.free())

    def do(self):
        old, new = self.whom
        self.world.add_server(new)
        self.world.move([new if home == old else home for home in self.world.homes])
        self.world.remove_server(old)

    def __str__(self):
        return "Replaced %s by %s" % self.whom


class Drained(Change):
    """Its ranks go to the others; it is drained, and uncordoned; they come back."""

    membership = True

    def do(self):
        before = self.world.homes
        others = [node for node in self.world.nodes if node != self.whom]
        self.world.move([others[rank % len(others)] if home == self.whom else home for rank, home in enumerate(before)])
        self.world.operate("node", "drain", self.whom, "--wait=10s")
        self.world.operate("node", "uncordon", self.whom)
        self.world.move(before)


KINDS = (Nothing, Modes, Tokens, Added, Removed, Replaced, Drained)


def draws(world, seed, only=""):
    """Changes without end.  Draw one when the last is done."""
    draw = random.Random(seed)
    chosen = [kind for kind in KINDS if not only or kind.__name__ in only.split(",")]
    while True:
        yield draw.choice([kind for kind in chosen if kind.possible(world)])(world, draw)
