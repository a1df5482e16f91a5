"""Rows of runs to figures with bars. Pure: runs of several seeds and commands are pooled."""

from .client import quantile
from .setup import FLOOR, GIB, MIB

POLICIES = {"no-preempt": 2.5, "per-tensor": 3.0, "start-stop": 30.0}
# Runs in which requests come as a trace has them.
TRACED = ("glake", *POLICIES)


def figure(scenario, what, value, bar=None, most=False, **more):
    if value is None and bar is not None:
        value = float("inf") if most else 0.0
    return {"scenario": scenario, "what": what, "value": value, "bar": bar, "most": most, **more}


def meets(one):
    value, bar = one["value"], one["bar"]
    return bar is None or (value is not None and (value <= bar if one["most"] else value >= bar))


def ratio(one, other):
    """Returns the ratio of two figures, or infinity, beyond any bar, if one is missing."""
    return one / other if one is not None and other else float("inf")


class Pool:
    """The runs of one kind, over seeds."""

    def __init__(self, rows, run, seeds=None):
        self.rows = [
            row for row in rows if row.get("run") == run and row.get("ttft") and (seeds is None or row["seed"] in seeds)
        ]
        self.seeds = {row["seed"] for row in self.rows}

    def __bool__(self):
        return bool(self.rows)

    def at(self, name, part):
        return quantile([value for row in self.rows for value in row[name]], part)


def pools(rows):
    """Runs by what was asked of whom."""
    found = {}
    for row in rows:
        if "asked" in row:
            found.setdefault(repr(sorted(row["asked"].items())), []).append(row)
    return list(found.values())


def figures(rows):
    """Every bar that these rows tell of."""
    found = []
    for pool in pools(rows):
        asked = pool[0]["asked"]
        scenario = f"{asked['count']} x ({asked['weights']:g}+{asked['kv']:g}) GiB in {asked['budget']:g}"
        found += whole(scenario, pool) + traced(scenario, pool, asked) + planned(scenario, pool)
        found += overload(scenario, pool) + agent_killed(scenario, pool) + workers_killed(scenario, pool)
    return found + density(rows)


def whole(scenario, pool):
    """No request is lost, no byte is another, no byte is taken that is not there to be taken."""
    found = []
    for run in dict.fromkeys(row["run"] for row in pool):
        mine = [row for row in pool if row["run"] == run]
        if any("failed" in row for row in mine):
            failed = [each for row in mine for each in row.get("failed", [])]
            found.append(
                figure(
                    scenario,
                    f"{run}: requests that failed",
                    len(failed),
                    0,
                    True,
                    requests=sum(row.get("requests", 0) for row in mine),
                    **({"why": failed[0][:160]} if failed else {}),
                )
            )
        if any("wrong_weights" in row for row in mine):
            wrong = sum(len(row.get("wrong_weights", [])) + row.get("wrong_cache", 0) for row in mine)
            found.append(
                figure(
                    scenario,
                    f"{run}: workers and requests whose bytes differ",
                    wrong,
                    0,
                    True,
                    parks=sum(row.get("parks", 0) for row in mine),
                )
            )
        errors = [row["error"] for row in mine if row.get("error")]
        if errors:
            found.append(figure(scenario, f"{run}: runs that broke off", len(errors), 0, True, why=errors[0][:200]))
        metered = [row for row in mine if "most_bytes" in row]
        if metered and run != "kill-agent":
            ours = run in ("glake", "no-preempt", "overload", "kill-workers")
            found.append(
                figure(
                    scenario,
                    f"{run}: most memory, of the budget",
                    # Where nothing was seen, nothing was measured.
                    max(row["most_bytes"] / row["budget_bytes"] for row in metered) or float("inf"),
                    1 if ours else None,
                    True,
                    most_gib=max(row["most_bytes"] for row in metered) / GIB,
                    looked=sum(row["looked"] for row in metered),
                )
            )
    return found


def traced(scenario, pool, asked):
    """G4."""
    found, ours = [], Pool(pool, "glake")
    main = asked["count"] == 6
    for run in TRACED:
        each = Pool(pool, run)
        if each:
            bar = {"bar": 1.5, "most": True} if run == "glake" and main else {}
            found.append(
                figure(
                    scenario,
                    f"{run}: first token, p99, s",
                    each.at("ttft", 0.99),
                    **bar,
                    p50=each.at("ttft", 0.5),
                    end_p99=each.at("e2e", 0.99),
                    gap_p99=each.at("gaps", 0.99),
                    seeds=len(each.seeds),
                    requests=sum(row["requests"] for row in each.rows),
                )
            )
    if not ours or not main:
        return found
    for run, least in POLICIES.items():
        other = Pool(pool, run)
        mine = Pool(pool, "glake", other.seeds)
        if other and mine:
            found.append(
                figure(
                    scenario,
                    f"{run}, of ours: first token, p99",
                    ratio(other.at("ttft", 0.99), mine.at("ttft", 0.99)),
                    least,
                    seeds=len(mine.seeds),
                )
            )
    drain = Pool(pool, "no-preempt")
    mine = Pool(pool, "glake", drain.seeds)
    if drain and mine:
        found.append(
            figure(
                scenario,
                "ours, of no-preempt's: end to end, p99",
                ratio(mine.at("e2e", 0.99), drain.at("e2e", 0.99)),
                1.5,
                True,
            )
        )
    found.append(figure(scenario, "ours: longest gap between two tokens, p99, s", ours.at("gaps", 0.99), 2.0, True))
    return found


def planned(scenario, pool):
    """G12, and of ten workers G5: `glake plan` beside the runs. A p99 inside the interval has the distance 0."""
    found, ours = [], Pool(pool, "glake")
    for row in [row for row in pool if row["run"] == "calibrate"]:
        found.append(
            figure(
                scenario,
                "decoding, ms a token: one alone",
                row["decode_ms"],
                two_at_once=row["pair_ms"],
                unpaced=row["unpaced_ms"],
                two_unpaced=row["unpaced_pair_ms"],
                refill_s=row["refill_s"],
                shrink_s=row["clean_s"],
                pause_s=row["pause_s"],
            )
        )
    rows = [row for row in pool if row["run"] == "plan" and row["policy"] == "glake"]
    if not ours or not rows:
        return found
    plan = rows[-1]
    real, low, high = ours.at("ttft", 0.99), plan["ttft_p99_low_s"], plan["ttft_p99_high_s"]
    p50 = ours.at("ttft", 0.5)
    found.append(
        figure(
            scenario,
            "p50 of the first token, off plan's",
            abs(p50 / plan["ttft_p50_s"] - 1),
            0.25,
            True,
            real=p50,
            plan=plan["ttft_p50_s"],
        )
    )
    found.append(
        figure(
            scenario,
            "p99 of the first token, outside of plan's interval by, s",
            max(low - real, real - high, 0.0),
            0.0,
            True,
            real=real,
            low=low,
            high=high,
            contention=plan["contention"],
        )
    )
    found.append(figure(scenario, "plan's interval of p99, high of low", high / low, 2.0, True))
    return found


def overload(scenario, pool):
    """G6."""
    found = []
    for row in [row for row in pool if row["run"] == "overload" and "tokens_s" in row]:
        found.append(
            figure(
                scenario,
                "overload: tokens a second, of those with all resident",
                row["tokens_s"] / row["resident_tokens_s"],
                0.75,
                tokens_s=row["tokens_s"],
                resident=row["resident_tokens_s"],
                streams=row["streams"],
            )
        )
        found.append(
            figure(scenario, "overload: link duty", row["link_duty"], 0.65, True, most_at_once=row["most_link_duty"])
        )
    return found


def agent_killed(scenario, pool):
    """G9."""
    found = []
    for row in [row for row in pool if row["run"] == "kill-agent" and "kills" in row]:
        decided = [kill["decided_s"] for kill in row["kills"]]
        found.append(
            figure(
                scenario,
                "kill-agent: a decision after the socket is back, s",
                max(decided, default=float("inf")),
                1.0,
                True,
                kills=len(decided),
                first_token_after=max((kill["token_s"] for kill in row["kills"]), default=None),
            )
        )
        limit = row["budget_bytes"] * 1.01 + 64 * MIB * row["contexts"]
        found.append(
            figure(
                scenario,
                "kill-agent: most memory, of budget + 1 % + 64 MiB a context",
                row["most_bytes"] / limit,
                1.0,
                True,
            )
        )
    return found


def workers_killed(scenario, pool):
    """G10."""
    found = []
    for row in [row for row in pool if row["run"] == "kill-workers" and "kills" in row]:
        for kill in row["kills"]:
            found.append(
                figure(
                    scenario,
                    f"kill-workers: while it {kill['while']}: others have its memory, s",
                    kill["usable_s"],
                    1.5,
                    True,
                    seen=kill["seen"],
                )
            )
        found.append(figure(scenario, "kill-workers: kills that came to pass", len(row["kills"]), 3))
        found.append(figure(scenario, "kill-workers: requests that wait for ever", row["waiting"], 0, True))
    return found


def density(rows):
    """G5, by plan."""
    found = []
    for row in [row for row in rows if row.get("run") == "density"]:
        for contention in ("on", "off"):
            each = {one["policy"]: one["density"] for one in row["rows"] if one["contention"] == contention}
            if each:
                scenario = f"density by plan, contention {contention}"
                found.append(
                    figure(
                        scenario,
                        "workers with their first token within 2 s: ours",
                        each["glake"],
                        no_preempt=each["glake-no-preempt"],
                        per_tensor=each["drain-per-tensor"],
                        start_stop=each["start-stop"],
                    )
                )
    return found


def table(found):
    """Lines of text."""
    lines = []
    for one in found:
        value, said = one["value"], ""
        if one["bar"] is not None:
            said = f" ({'at most' if one['most'] else 'at least'} {one['bar']:.3g})"
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        beside = "  ".join(
            f"{name} {each:.4g}" if isinstance(each, float) else f"{name} {each}"
            for name, each in one.items()
            if name not in ("scenario", "what", "value", "bar", "most")
        )
        mark = "       " if one["bar"] is None else "ok     " if meets(one) else "MISSED "
        lines.append(f"{mark} {one['scenario']}: {one['what']}: {shown}{said}  {beside}".rstrip())
    return "\n".join(lines)


__all__ = ["FLOOR", "POLICIES", "figures", "meets", "table"]
