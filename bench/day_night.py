"""Write configs/traces/day-night.toml: when phones would take part, from assumptions and not from measurements.

python bench/day_night.py > configs/traces/day-night.toml
"""

import random

CLIENTS, DAYS = 100, 7
ABOUT = """\
A week of 100 phones, a round an hour. Made from assumptions by bench/day_night.py, not measured:
a phone takes part while it is idle, charging and on Wi-Fi. It is put on charge at about 22:30 (deviation 1.5 hours, its
own habit, and 0.5 hours from night to night) for about 8 hours (deviation 1), in 4 nights of 5. In any other hour it
is there with probability 0.2. Phones live in four time zones, an hour apart. That makes about four times as many at
the best hour as at the worst, which is what Bonawitz et al., "Towards Federated Learning at Scale", 2019, report of
phones in one country. The first round is at noon in the first time zone."""


def hours(draw: random.Random) -> str:
    """The text of a phone: 1 in the hours in which it is there."""
    zone, habit, length = draw.randrange(4), draw.gauss(22.5, 1.5), draw.gauss(8.0, 1.0)
    there = [draw.random() < 0.2 for _ in range(24 * DAYS)]
    for night in range(-1, DAYS):
        if draw.random() < 0.8:
            first = 24 * night + draw.gauss(habit, 0.5) - 12 + zone  # counted from the first round, at noon
            for hour in range(max(0, round(first)), min(24 * DAYS, round(first + length))):
                there[hour] = True
    return "".join("01"[one] for one in there)


def main() -> None:
    """Print the trace."""
    draw = random.Random(0)
    lines = "".join(f'    "{hours(draw)}",\n' for _ in range(CLIENTS))
    print(f'about = """\n{ABOUT}"""\nclients = [\n{lines}]')


if __name__ == "__main__":
    main()
