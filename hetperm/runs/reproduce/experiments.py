"""The experiments: which cells each one runs, and which tables and pictures are made of their rows."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hetperm import mixing
from hetperm.config import Config
from hetperm.engine import choice
from hetperm.methods import METHODS, options_for
from hetperm.report import comparison, comparison_pictures, pictures
from hetperm.report.comparison import BUDGET_WORDS, SPENT, Table
from hetperm.report.paired import Difference, paired
from hetperm.runs import training
from hetperm.runs.placement import one_thread
from hetperm.runs.reproduce import cells
from hetperm.runs.reproduce.cells import Cell, Row, Settings
from hetperm.runs.reproduce.grouped import CLASSES, FEATURES, grouped
from hetperm.runs.reproduce.options import BUDGETS
from hetperm.runs.reproduce.plan import Case, Plan, variants
from hetperm.runs.reproduce.session import Session
from hetperm.runs.setting import Setting, from_model
from submodels import zoo

NEAR = 0.02  # budgets that differ by less count as equal: the row of before stands


def seeded(case: Case, seed: int, **changes: Any) -> Config:
    """The configuration of a cell."""
    return case.config.override(seed=seed, seeds=(), **changes)


def titles(plan: Plan) -> dict[str, str]:
    """setting -> its title."""
    return {case.name: case.title for case in plan.cases}


# Who wins where


def hetero(session: Session) -> None:
    """All methods in all settings at equal steps, then rivals at as many FLOPs and as many bytes as PERM used."""
    plan, settings = session.plan, Settings()
    wanted = plan.options.budgets or plan.table["budgets"]
    budgets = [name for name in BUDGETS if name in wanted or name == "steps"]  # the others are measured by it
    ours = [name for name in plan.methods if METHODS[name].mixes]
    first = [cell for case in plan.cases for cell in _equal_steps(plan, case)]
    rivals = [cell for cell in first if cell.method not in ours]
    session.expect(first, more=[replace(cell, seconds=1.5 * cell.seconds) for cell in rivals] * (len(budgets) - 1))
    measure = partial(_trained, settings)
    rows: dict[str, list[Row]] = {budget: [] for budget in budgets}
    for case in plan.cases:
        rows["steps"] += session.run(_equal_steps(plan, case), measure)
        _show_hetero(session, rows, ours)
    for budget in budgets[1:]:
        for case in plan.cases:
            equal = [row for row in rows["steps"] if row["setting"] == case.name]
            rows[budget] += _at_budget(session, case, equal, budget, measure)
            _show_hetero(session, rows, ours)


def _equal_steps(plan: Plan, case: Case) -> list[Cell]:
    # Seeds outside, methods inside: the methods of a seed share its data.
    return [
        Cell(case.name, method, seeded(case, seed, eval_every=case.config.epochs), "steps", case.seconds)
        for seed in plan.seeds
        for method in plan.methods_of(case)
    ]


def _trained(settings: Settings, cell: Cell) -> Mapping[str, Any]:
    figures, _ = cells.trained(settings(cell.config), cell.method)
    return figures


def _at_budget(
    session: Session, case: Case, equal: Sequence[Row], budget: str, measure: Callable[[Cell], Mapping[str, Any]]
) -> list[Row]:
    """The rows of a setting in which every rival spends as much as PERM did at equal steps, seed by seed."""
    plan, rows = session.plan, []
    for seed in plan.seeds:
        of_seed = {row["method"]: row for row in equal if row["seed"] == seed}
        reference = of_seed.get(plan.methods[0])
        for method, row in of_seed.items():
            steps = None
            if reference and not reference["diverged"] and not row["diverged"] and not METHODS[method].mixes:
                least, most = plan.table["least"], plan.table["most"]
                steps = equal_spending(row, reference, budget, least=least, most=most, home=_at_home(case, method))
            if steps is None:
                rows.append({**row, "variant": budget})
                continue
            config = seeded(case, seed, eval_every=case.config.epochs, steps=steps)
            rows += session.run([Cell(case.name, method, config, budget, case.seconds * steps / row["steps"])], measure)
    return rows


def _at_home(case: Case, method: str) -> int:
    """The steps of a method in which nothing is sent."""
    return getattr(options_for(method, case.config, steps=case.config.steps), "fine_tune_steps", 0)


def equal_spending(row: Row, reference: Row, budget: str, *, least: float, most: float, home: int = 0) -> int | None:
    """The steps with which a method spends as much as another; None if those of the row do, or nothing is spent.

    Args:
        row: of the method, with some number of steps.
        reference: of the other.
        least, most: the fewest and the most steps, times those of the row.
        home: steps of the method that cost nothing of this budget, if it is bytes.

    Example:
        >>> row, reference = ({"steps": 800, "cost": {"macs": macs}} for macs in (4e9, 6e9))
        >>> equal_spending(row, reference, "macs", least=0.25, most=4.0)
        1200
    """
    spent, wanted = (SPENT[budget](each["cost"]) for each in (row, reference))
    if not spent:  # a method that sends nothing needs no more steps to send nothing
        return None
    free = home if budget == "bytes" else 0
    factor = (free + (row["steps"] - free) * wanted / spent) / row["steps"]
    factor = min(max(factor, least), most)
    return None if abs(factor - 1) < NEAR else round(row["steps"] * factor)


def _show_hetero(session: Session, rows: Mapping[str, list[Row]], ours: Sequence[str]) -> None:
    plan = session.plan
    known = {budget: found for budget, found in rows.items() if found}
    seen = {row["setting"] for row in known["steps"]}
    cases = {name: title for name, title in titles(plan).items() if name in seen}
    every = [row for found in known.values() for row in _own(found)]
    rivals = [name for name in plan.methods if name not in ours]
    if ours and rivals:
        table = comparison.wins(known, cases, plan.methods, ours=ours)
        session.table("wins", "Who wins where", table, every, words=2)
        gains = _gains(known, cases, ours[0], rivals)
        axis = f"accuracy of {ours[0]} minus that of the best rival"
        session.picture(
            "wins", "Who wins where", comparison_pictures.forest(list(cases.values()), gains, title="", axis=axis)
        )
        for budget, found in known.items():
            title = f"All methods at equal {BUDGET_WORDS[budget]}"
            session.table(budget, title, comparison.ranking(found, cases, plan.methods, ours=ours), _own(found))
        session.table(
            "spending", "What was spent", comparison.spending(known, cases, plan.methods, ours=ours[0]), every
        )
    worst = comparison.worst(known["steps"], cases, plan.methods)
    session.table("worst", "Worst client and worst tier", worst, known["steps"])


def _own(rows: Sequence[Row]) -> list[Row]:
    """The rows that were run for their budget, and not taken over from another."""
    seen = {}
    for row in rows:
        seen[row["fingerprint"]] = row
    return list(seen.values())


def _gains(
    rows: Mapping[str, Sequence[Row]], cases: Mapping[str, str], method: str, rivals: Sequence[str]
) -> dict[str, list[Difference | None]]:
    """budget -> by how much a method is ahead of the best rival in every setting."""
    gains: dict[str, list[Difference | None]] = {}
    for budget, found in rows.items():
        gains[f"at equal {BUDGET_WORDS[budget]}"] = column = []
        for case in cases:
            rival = comparison.best_rival(found, case, rivals)
            pair = [comparison.sample(found, setting=case, method=name) for name in (method, rival)]
            column.append(paired(*pair) if rival else None)
    return gains


# Curves


def curves(session: Session) -> None:
    """The paper's figures: accuracy and loss along the way, of every method."""
    plan, settings = session.plan, Settings()
    wanted = [
        Cell(case.name, method, seeded(case, seed, eval_every=1, eval_finished=4), "curve", case.seconds)
        for case in plan.cases
        for seed in plan.seeds
        for method in plan.methods
    ]
    session.expect(wanted)

    def measure(cell: Cell) -> Mapping[str, Any]:
        setting = settings(cell.config)
        figures, state = cells.trained(setting, cell.method, history=True)
        if state is not None and state.alpha is not None:
            cells.write_matrix(session.folder / cell.file, setting, state)
        return figures

    for case in plan.cases:
        chosen = [cell for cell in wanted if cell.case == case.name]
        rows = session.run(chosen, measure)
        suffix = "" if len(plan.cases) == 1 else f"-{case.name}"
        session.table(f"methods{suffix}", case.title, comparison.methods_table(rows, plan.methods), rows)
        calm = [name for name in plan.methods if not any([row["diverged"] for row in rows if row["method"] == name])]
        histories = {name: [row["history"] for row in rows if row["method"] == name] for name in calm}
        if histories:
            session.picture(f"curves{suffix}", f"{case.title}: accuracy and loss", _curves(case, plan, histories))
        for cell in chosen:
            if METHODS[cell.method].mixes and cell.seed == plan.seeds[0]:
                title = f"{case.title}: mixing weights of {cell.method}"
                _draw_alpha(session, cell, f"alpha-{cell.method}{suffix}", title)


def _curves(case: Case, plan: Plan, histories: Mapping[str, Sequence[Sequence[Row]]]) -> pictures.Figure:
    N = case.config.num_clients
    return pictures.curves(
        histories,
        figures=[("accuracy_mean", "test accuracy, mean over clients"), ("loss_mean", "test loss, mean over clients")],
        against=[("client_steps", "local steps per client", N), ("rounds", "rounds of communication", 1)],
        strong=[name for name in histories if METHODS[name].mixes],
        title=f"{case.title}: {N} clients, seeds {', '.join(map(str, plan.seeds))}",
    )


def _draw_alpha(session: Session, cell: Cell, name: str, title: str) -> None:
    path = (session.folder / cell.file).with_suffix(".npz")
    if path.is_file():  # a cell that diverged has none
        with np.load(path) as found:
            alpha, groups = found["alpha"], found["groups"].tolist() or None
        session.picture(name, title, pictures.alpha_map(alpha, groups, title=title))


# Who learns from whom


def alpha_maps(session: Session) -> None:
    """Mixing weights after the warm-up in every setting: pictures, partners, and mass on one's own group."""
    plan, settings = session.plan, Settings()
    method = plan.methods[0]
    wanted = [
        Cell(case.name, method, seeded(case, seed), "alpha", case.seconds) for case in plan.cases for seed in plan.seeds
    ]
    session.expect(wanted)

    def measure(cell: Cell) -> Mapping[str, Any]:
        setting = settings(cell.config)
        figures, state = cells.warmed_up(setting, cell.method)
        if state is not None:
            cells.write_matrix(session.folder / cell.file, setting, state)
        return figures

    rows: list[Row] = []
    for case in plan.cases:
        chosen = [cell for cell in wanted if cell.case == case.name]
        rows += session.run(chosen, measure)
        session.table("mixing", "Who learns from whom", comparison.mixing_table(rows, titles(plan)), rows)
        _draw_alpha(session, chosen[0], f"alpha-{case.name}", f"{case.title}: mixing weights, seed {chosen[0].seed}")


def scale(session: Session) -> None:
    """Partners and mass on one's own group with more and more clients in groups of ten."""
    plan = session.plan
    (case,) = plan.cases
    sizes = plan.table["sizes"]
    wanted = [
        Cell(f"clients-{N}", plan.methods[0], seeded(case, seed, num_clients=N), "alpha", case.seconds * N / min(sizes))
        for N in sizes
        for seed in plan.seeds
    ]
    session.expect(wanted)

    def measure(cell: Cell) -> Mapping[str, Any]:
        figures, _ = cells.warmed_up(_grouped_setting(cell.config), cell.method)
        return figures

    rows: list[Row] = []
    for N in sizes:
        rows += session.run([cell for cell in wanted if cell.config.num_clients == N], measure)
        table = comparison.mixing_table(rows, {f"clients-{N}": f"{N:,} clients in groups of ten" for N in sizes})
        session.table("scale", "More clients", table, rows)
    figures = {"effective_partners": "effective partners", "same_group_mass": "mass on one's group"}
    session.picture("scale", "More clients", comparison_pictures.against_clients(table.rows, figures, title=case.title))


def _grouped_setting(config: Config) -> Setting:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = zoo.build(config.model, in_channels=FEATURES, num_classes=CLASSES, image_size=None)
    return from_model(model, grouped(config.num_clients, seed=config.seed), config, loss=None, metric=None)


# One choice at a time

DEFAULT = "default"


def ablations(session: Session, *, name: str = "ablations", title: str = "One choice at a time") -> None:
    """PERM with one choice changed at a time, in every setting, against PERM as it is.

    Args:
        name: of the table and the picture.
    """
    plan, settings = session.plan, Settings()
    method, wanted, labels = plan.methods[0], {}, {}
    for case in plan.cases:
        changes, skipped = variants(plan.table["factors"], case.config)
        session.skip(skipped)
        labels |= dict.fromkeys(changes)
        wanted[case.name] = [
            Cell(case.name, method, seeded(case, seed, eval_every=case.config.epochs, **change), label, case.seconds)
            for seed in plan.seeds
            for label, change in {DEFAULT: {}, **changes}.items()
        ]
    session.expect([cell for chosen in wanted.values() for cell in chosen])
    rows: list[Row] = []
    for chosen in wanted.values():
        rows += session.run(chosen, partial(_trained, settings))
        seen = {row["setting"] for row in rows}
        cases = {name: title for name, title in titles(plan).items() if name in seen}
        table = comparison.ablations(rows, cases, list(labels), default=DEFAULT)
        session.table(name, title, table, rows)
    session.picture(name, title, _ablation_picture(rows, titles(plan), list(labels)))


def _ablation_picture(rows: Sequence[Row], cases: Mapping[str, str], labels: Sequence[str]) -> pictures.Figure:
    def gain(case: str, label: str) -> Difference | None:
        changed, base = (comparison.sample(rows, setting=case, variant=name) for name in (label, DEFAULT))
        return paired(changed, base)

    series = {title: [gain(case, label) for label in labels] for case, title in cases.items()}
    return comparison_pictures.forest(labels, series, title="", axis="accuracy minus that of the default")


# Time


def runtime(session: Session) -> None:
    """Seconds of a communication round of every method, timed in turn in one process."""
    plan, settings = session.plan, Settings()
    # All methods are one cell: only times that were taken side by side can be compared.
    wanted = [
        Cell(case.name, "side by side", seeded(case, seed), "rounds", case.seconds)
        for case in plan.cases
        for seed in plan.seeds[:1]
    ]
    session.expect(wanted)
    repeats = plan.table["repeats"]

    def measure(cell: Cell) -> Mapping[str, Any]:
        return {"diverged": None, "methods": round_times(settings(cell.config), plan.methods, repeats=repeats)}

    rows = session.run(wanted, measure)
    table: Table = comparison.runtime_table(rows, titles(plan), plan.methods)
    session.table("runtime", "Seconds of a communication round", table, rows, words=2)
    title = f"a round of {plan.cases[0].config.local_steps} local steps"
    session.picture("runtime", "Seconds of a round", comparison_pictures.side_by_side(table.rows, title=title))


def round_times(setting: Setting, methods: Sequence[str], *, repeats: int) -> dict[str, dict[str, float]]:
    """method -> seconds of a round, wall and CPU, over those of the first method, and gradients of a client in a round.

    An epoch is timed and divided by its rounds. With PERM these are the rounds of its visits, and the epoch holds the
    step of the global model and the new mixing weights too.
    """
    with one_thread(), ExitStack() as open_engines:
        ready = {name: _ready(setting, name, open_engines) for name in methods}
        for epoch in ready.values():  # caches are filled and kernels chosen
            epoch()
        # To and fro: a machine that grows slower meanwhile favours nobody.
        orders = [methods if k % 2 == 0 else methods[::-1] for k in range(repeats)]
        times = [{name: ready[name]() for name in order} for order in orders]
    first, figures = methods[0], {}
    for name in methods:
        ratios, cpu_ratios = ([each[name][k] / each[first][k] for each in times] for k in (0, 1))
        figures[name] = {
            "seconds": statistics.median(each[name][0] for each in times),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "cpu_ratio": statistics.median(cpu_ratios),  # hardly feels what else the machine does
            "gradients": times[0][name][2],
        }
    return figures


def _ready(setting: Setting, name: str, stack: ExitStack) -> Callable[[], tuple[float, float, float]]:
    """A function that runs an epoch of a method and returns seconds, CPU seconds and gradients a client of a round."""
    config = setting.config
    if METHODS[name].mixes:
        config = config.override(steps=0)  # an epoch is a visit to every partner
    sized = replace(setting, config=config)
    engine = stack.enter_context(choice.opened(sized.engine, config.workers, sized.clients, sized.shop))
    algorithm = training.algorithm_for(sized, name, engine, steps=setting.config.steps)
    start = algorithm.begin()

    def epoch() -> tuple[float, float, float]:
        began, cpu = time.perf_counter(), time.process_time()
        after = algorithm.epoch(start)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        rounds = after.work.rounds - start.work.rounds
        if start.alpha is not None:
            rounds = max(int(mixing.nonzero(alpha).max()) for alpha in (start.alpha, start.alpha.T))
        steps = (after.work.client_steps - start.work.client_steps) / len(setting.clients)
        return seconds / rounds, cpu / rounds, steps / rounds

    return epoch


RUNS: dict[str, Callable[[Session], None]] = {
    "synthetic": curves,
    "cifar10": curves,
    "femnist": curves,
    "alpha-maps": alpha_maps,
    "runtime": runtime,
    "hetero": hetero,
    "budgets": hetero,
    "natural": hetero,
    "ablations": ablations,
    "rates": partial(ablations, name="rates", title="Step sizes"),
    "scale": scale,
}


def check_data(plan: Plan) -> None:
    """Load the data of every setting once: what is missing must show before hours of work, and not after."""
    if plan.experiment != "scale":  # which makes its own
        for case in plan.cases:
            Settings()(seeded(case, plan.seeds[0]))
