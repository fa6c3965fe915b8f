"""The divisors of a whole number: a count without what stands outside is depth times layer."""

import functools
import math
from collections.abc import Iterator

#: Primes up to here are tried one by one; what is left has few factors.
SMALL = 1000
#: Witnesses that tell every prime below 3.3e24 (Sorenson and Webster, 2015).
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def _primes(most: int) -> tuple[int, ...]:
    return tuple(n for n in range(2, most) if all(n % p for p in range(2, math.isqrt(n) + 1)))


PRIMES = _primes(SMALL)


def divisors_between(number: int, low: int, high: int) -> list[int]:
    """Every divisor from `low` to `high`, in order."""
    found = [1]
    for prime, times in _factors(number).items():
        powers = [prime**i for i in range(times + 1)]
        found = [d * power for d in found for power in powers if d * power <= high]
    return sorted(d for d in found if d >= low)


@functools.lru_cache(maxsize=4096)
def _factors(number: int) -> dict[int, int]:
    """The primes of a number and how often each divides it."""
    found: dict[int, int] = {}
    for prime in PRIMES:
        if prime * prime > number:
            break
        while number % prime == 0:
            found[prime] = found.get(prime, 0) + 1
            number //= prime
    for prime in _large(number) if number > 1 else ():
        found[prime] = found.get(prime, 0) + 1
    return found


def _large(number: int) -> Iterator[int]:
    """The primes of a number that no small prime divides."""
    if number < SMALL * SMALL or is_prime(number):
        yield number
        return
    root = math.isqrt(number)
    factor = root if root * root == number else _factor(number)
    yield from _large(factor)
    yield from _large(number // factor)


def is_prime(number: int) -> bool:
    """By strong pseudoprimes to thirteen bases: exact far beyond any count of parameters."""
    if number < 2 or any(number % p == 0 for p in WITNESSES):
        return number in WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in WITNESSES:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        if all((power := power * power % number) != number - 1 for _ in range(twos - 1)):
            return False
    return True


def _factor(number: int) -> int:
    """A factor of an odd number that is neither prime nor a square, by Pollard's rho."""
    for start in range(1, number):
        slow = fast = 2
        shared = 1
        while shared == 1:
            product = 1
            for _ in range(32):  # one greatest divisor for many steps
                slow = (slow * slow + start) % number
                fast = (fast * fast + start) % number
                fast = (fast * fast + start) % number
                product = product * (slow - fast) % number
            shared = math.gcd(product, number)
        if shared != number:
            return shared
    raise AssertionError("a composite number has a factor")
