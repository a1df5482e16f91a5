"""Kills while other workers are served: of the agent, and of workers that shrink, refill and are parked."""

import dataclasses, threading, time

from .client import Asked, figures, replay


def kill_agent(runs, fleet):
    """The trace, and at each quarter of it the agent is killed; somebody whose memory is away is asked, and half a
    second later another agent is started."""
    agent, kills, broken = runs.agent, [], []
    runs.settle(fleet)
    over = threading.Event()

    def kill(at):
        if over.wait(max(at - time.monotonic(), 0)):
            return
        end, away = time.monotonic() + 10, []
        while not away and time.monotonic() < end:
            away = [name for name, row in agent.ps().items() if row["state"] == "asleep" and row["evicted"]]
        agent.end(kill=True)
        probe = Asked((away or runs.setup.names)[0], 16, 2, time.monotonic())
        fleet.workers[probe.worker].port.send(probe)
        time.sleep(0.5)
        back = agent.start()
        decided = None
        while decided is None and time.monotonic() < back + 20:
            decided = time.monotonic() - back if agent.ask("explain") else None
            time.sleep(0.01)
        probe.over.wait(60)
        outcomes = [f"{row['worker']}: {row['outcome']}" for row in agent.ask("explain")][:8]
        kills.append(
            {
                "decided_s": 20.0 if decided is None else round(decided, 3),
                "outcomes": outcomes,
                "probe": probe.worker,
                "probe_failed": probe.failed,
                "token_s": round((probe.first or time.monotonic()) - back, 3),
            }
        )

    def killing(begin):
        for part in (1, 2, 3):
            try:
                kill(begin + runs.a.duration * part / 4)
            except Exception as error:
                broken.append(f"{type(error).__name__}: {error}")

    threads = []

    def began(begin):
        threads.append(threading.Thread(target=killing, args=[begin]))
        threads[0].start()

    send = lambda asked: fleet.workers[asked.worker].port.send(asked)
    seed = max(runs.a.seeds) + 100
    with runs.watch() as watch:
        asked, _ = replay(runs.requests(seed), send, 120, began)
        over.set()
        threads[0].join()
    row = {"seed": seed, **figures(asked), "kills": kills, **runs.metered(watch), **fleet.digests()}
    row["failed"] += [f"probe of {kill['probe']}: {kill['probe_failed']}" for kill in kills if kill["probe_failed"]]
    if broken or len(kills) < 3:
        row["error"] = "; ".join(broken) or f"{len(kills)} kills of 3 came to pass"
    runs.add(
        "kill-agent",
        row,
        f"{len(kills)} kills, decisions after {[kill['decided_s'] for kill in kills]} s, "
        f"{len(row['failed'])} of {len(asked)} failed, "
        f"most memory {watch.most} of {row['budget_bytes']} bytes",
    )


class Seen:
    """Asks the agent until a worker is as it is waited for."""

    def __init__(self, agent, name, when, patience=20):
        end = time.monotonic() + patience
        while True:
            self.row = agent.ps().get(name)
            if self.row is None or when(self.row):
                return
            if time.monotonic() > end:
                raise RuntimeError(f"{name} was not seen so within {patience} s: {self.row}")


def kill_workers(runs, fleet):
    """Three workers die. After each, two others want all the room, and so the dead one's memory too."""
    agent, names, open_requests, kills = runs.agent, list(runs.setup.names), [], []

    def ask(name, context=16, generated=2):
        asked = Asked(name, context, generated, time.monotonic())
        open_requests.append(asked)
        fleet.workers[name].port.send(asked)
        return asked

    def two_others():
        """Two that live and whose memory is away."""
        rows = agent.ps()
        alive = [name for name in names if name in rows and fleet.workers[name].alive()]
        return sorted(alive, key=lambda name: -rows[name]["evicted"])[:2]

    def killed(victim, doing, others=()):
        seen = agent.ps().get(victim, {}).get("state")
        fleet.workers[victim].process.kill()
        begin = time.monotonic()
        names.remove(victim)
        asked = [one for one in others if one.first is None] or [ask(name) for name in two_others()]
        for each in asked:
            each.over.wait(60)
        usable = max((each.first or time.monotonic()) for each in asked) - begin
        kills.append({"while": doing, "worker": victim, "seen": seen, "usable_s": round(usable, 3)})
        fleet.workers[victim].process.wait()
        if runs.setup.simulated:
            # Contexts are as large as those of a GPU there, and the dead one's would make room for several workers.
            agent.setup = dataclasses.replace(runs.setup, count=len(names))
            agent.restart(names)

    def shrinking():
        runs.settle(fleet)
        victim, busy = names[1], names[0]
        # Its weights have to be copied out, which takes a moment.
        fleet.workers[victim].do("unseal")
        runs.solo(fleet, victim, 16, 2)
        ask(busy, 16, 100)
        wanted = ask(names[-1])
        Seen(agent, victim, lambda row: row["state"] in ("parking", "shrinking"))
        killed(victim, "shrinks", [wanted])

    def refilling():
        victim = names[-1]
        if agent.ps()[victim]["resident"]:
            agent.do("shrink", victim)
        victims = Asked(victim, 16, 2, time.monotonic())
        fleet.workers[victim].port.send(victims)
        Seen(agent, victim, lambda row: row["state"] == "refilling")
        killed(victim, "refills")

    def parked():
        victim = names[0]
        victims = Asked(victim, 64, 2000, time.monotonic())
        fleet.workers[victim].port.send(victims)
        while victims.first is None and not victims.over.is_set():
            time.sleep(0.01)
        others = [ask(name, 16, 100) for name in two_others()]
        Seen(
            agent,
            victim,
            lambda row: row["state"] in ("shrinking", "waiting", "asleep") and not victims.over.is_set(),
        )
        killed(victim, "is parked", others)

    broken = []
    with runs.watch() as watch:
        for work in (shrinking, refilling, parked):
            try:
                work()
            except Exception as error:
                broken.append(f"{work.__name__}: {type(error).__name__}: {error}")
        # Whoever lives is served.
        for name in names:
            ask(name)
        end = time.monotonic() + 60
        for each in open_requests:
            each.over.wait(max(end - time.monotonic(), 0))
    dead = set(runs.setup.names) - set(names)
    waiting = [each.worker for each in open_requests if not each.over.is_set()]
    failed = [f"{each.worker}: {each.failed}" for each in open_requests if each.failed and each.worker not in dead]
    row = {
        "seed": 0,
        "kills": kills,
        "waiting": len(waiting),
        "failed": failed,
        "requests": len(open_requests),
        **runs.metered(watch),
        **fleet.digests(),
    }
    if broken:
        row["error"] = "; ".join(broken)
    runs.add(
        "kill-workers",
        row,
        f"{kills}, {len(waiting)} wait, {len(failed)} failed" + (f", broken off: {broken}" if broken else ""),
    )
