"""Covering sets: few cases in which every two values of different factors meet, and more of them for every three."""

import itertools
import random

import pytest


def pairwise(factors, seed=0, candidates=60, allowed=None):
    """Cases (dicts) that together hold every pair of values of every two factors.

    Greedy: each case starts from a pair not yet covered, fills the other factors in random
    order with the value that covers the most new pairs, and the best of `candidates` such
    cases is kept. Same arguments, same cases.

    factors: dict name -> sequence of values (hashable). allowed: predicate of a full case.
    """
    rng = random.Random(seed)
    names = list(factors)
    order = {name: list(factors[name]) for name in names}
    missing = set()
    for a, b in itertools.combinations(names, 2):
        missing.update(((a, x), (b, y)) for x in order[a] for y in order[b])

    def covered(case):
        items = [(name, case[name]) for name in names if name in case]
        return [pair for pair in itertools.combinations(items, 2) if pair in missing]

    cases = []
    while missing:
        start = sorted(missing, key=repr)
        best, gain = None, -1
        for _ in range(candidates):
            case = dict(rng.choice(start))
            rest = [name for name in names if name not in case]
            rng.shuffle(rest)
            for name in rest:
                values = order[name][:]
                rng.shuffle(values)
                case[name] = max(values, key=lambda v: len(covered({**case, name: v})))
            if allowed is not None and not allowed(case):
                continue
            n = len(covered(case))
            if n > gain:
                best, gain = case, n
        if best is None or gain < 1:
            raise ValueError(f"no allowed case covers any of {start[:5]}")
        missing.difference_update(covered(best))
        cases.append({name: best[name] for name in names})
    return cases


def further(factors, count, cases, seed=0, candidates=20):
    """`count` more cases of the whole product, for triples of values that do not meet in `cases` yet.

    Greedy: each is that of `candidates` random ones in which most triples meet for the first time. It takes half as many as
    random cases alone for the same triples. Same arguments, same cases.
    """
    rng = random.Random(seed)

    def triples(case):
        return set(itertools.combinations([(name, case[name]) for name in factors], 3))

    met = {triple for case in cases for triple in triples(case)}
    made = []
    for _ in range(count):
        drawn = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(candidates)]
        made.append(max(drawn, key=lambda case: len(triples(case) - met)))
        met |= triples(made[-1])
    return made


def half(**factors):
    """Every other case of the whole product, a tuple each: all but one of the factors still meet in every way."""
    of = [list(enumerate(values)) for values in factors.values()]
    return [tuple(value for _, value in case) for case in itertools.product(*of) if sum(i for i, _ in case) % 2 == 0]


def every_value(cases):
    """The cases as pytest parameters: a few that together hold every value of every factor as they are, the others marked slow."""
    missing = {item for case in cases for item in case.items()}
    kept = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(missing & set(cases[i].items())))
        kept.append(best)
        missing -= set(cases[best].items())
    return [case if i in kept else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]
