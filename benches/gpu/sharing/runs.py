"""The runs of serve.py, part by part; a part for which too little time is left is skipped."""

import contextlib, json, pathlib, threading, time

from . import faults, planned
from .agents import Agent, Front
from .client import Asked, draw, figures, lengths, replay, write
from .fleet import Fleet, Worker
from .meter import Watch, meter
from .setup import FLOOR, GIB, text

NODES = {"glake": {"preempt": "step"}, "no-preempt": {"preempt": "idle"}}
# Of glake's workers, one set for all of them.
OURS = ("calibrate", "plan", "glake", "no-preempt", "overload", "kill-agent", "kill-workers")
PLAN_SEEDS = {"seed": 1001, "seeds": 20}
# So many busy workers are parked for a calibration.
PARKS = 6


class Runs:
    def __init__(self, a, log, clock, folder):
        self.a, self.log, self.clock, self.folder, self.setup = a, log, clock, folder, a.sizes
        if self.setup.simulated:
            pathlib.Path(self.setup.device.split("@", 1)[1]).mkdir(parents=True, exist_ok=True)
        self.left_out, self.fleets, self.rows, self.per_token = [], [], [], None
        self.agent, self.meter, self.before = None, None, 0
        self.asked = {
            "count": self.setup.count,
            "weights": self.setup.weights,
            "kv": self.setup.kv,
            "budget": self.setup.budget,
            "rate": a.rate,
            "duration": a.duration,
            "lengths": a.lengths,
            "zipf": a.zipf,
            "decode_ms": self.setup.decode_ms,
            "scale": self.setup.scale,
        }
        self.lengths = lengths(a.trace) if set(a.only) - {"density"} else []

    # ---- time

    def needs(self, part):
        """Seconds that a part is expected to take on a GPU; starts stand beside it."""
        trace = self.a.duration
        return {
            "calibrate": 50,
            "plan": 5,
            "glake": trace + 12,
            "no-preempt": trace + 20,
            "overload": 2 * self.a.overload_s + 30,
            "kill-agent": trace + 20,
            "kill-workers": 45,
            "per-tensor": trace + 40,
            "start-stop": trace + 90,
            "density": 60,
        }[part]

    def starts(self, kind):
        if self.setup.simulated:
            return 5 + 2 * self.setup.count
        return {"glake": 30 + 6 * self.setup.count, "tensors": 25 + 7 * self.setup.count, "start": 35}[kind]

    def time_plan(self):
        """Describes the runs and how long they take."""
        seeds, lines = len(self.a.seeds), []
        if any(part in self.a.only for part in OURS if part != "plan"):
            lines.append(("start of ours", self.starts("glake")))
        for part in self.a.only:
            if part in ("per-tensor", "start-stop"):
                lines.append((f"start of {part}", self.starts("tensors" if part == "per-tensor" else "start")))
            times = seeds if part in (*NODES, "per-tensor", "start-stop") else 1
            lines.append((part, times * self.needs(part)))
        whole = sum(seconds for _, seconds in lines)
        self.log.say(
            f"plan of {whole:.0f} s, limit {self.clock.limit:.0f} s: "
            + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in lines)
        )

    def in_time(self, part, label=None):
        if self.clock.left() < self.needs(part):
            self.leave_out(label or part, f"{self.clock.left():.0f} s are left, and it takes {self.needs(part):.0f}")
            return False
        return True

    def leave_out(self, label, why):
        self.left_out.append(label)
        self.log.say(f"{label}: left out, {why}")

    # ---- rows

    def add(self, run, row, said):
        row = {"run": run, "asked": self.asked, "device": self.setup.device.split("@")[0], **row}
        self.rows.append(row)
        self.log.add(row, f"{run}: {said}")

    def metered(self, watch, budget=None):
        return {
            "most_bytes": watch.most,
            "before_bytes": self.before,
            "budget_bytes": self.setup.budget_bytes(budget),
            "looked": watch.looked,
            "longest_look_s": round(watch.longest, 3),
            "contexts": self.setup.count,
        }

    def watch(self):
        return Watch(self.meter, self.before)

    def fleet(self, kind, agent=None, file=None):
        fleet = Fleet(kind, self.setup, self.folder, agent, file)
        self.fleets.append(fleet)
        return fleet

    def end(self):
        for fleet in self.fleets:
            fleet.end()
        if self.agent:
            self.agent.end()
        self.file().unlink(missing_ok=True)

    def file(self):
        return (
            self.folder / "weights.safetensors"
            if self.setup.simulated
            else pathlib.Path("/dev/shm", f"{self.folder.name}.safetensors")
        )

    # ---- parts

    def all(self):
        if not set(self.a.only) - {"density"}:
            return
        self.meter = meter(self.setup.device)
        self.before = self.meter.used()
        self.log.say(
            f"{self.before / GIB:.2f} GiB of the GPU are used before anything begins; "
            f"room for {self.setup.room()} of {self.setup.count} workers"
        )
        self.time_plan()
        ours = [part for part in self.a.only if part in OURS]
        if ours:
            self.guarded("ours", ours, self.ours)
        for part, run in (("per-tensor", self.per_tensor), ("start-stop", self.start_stop)):
            if part in self.a.only:
                self.guarded(part, [part], run)

    def guarded(self, run, parts, work):
        """Runs `work` and counts a failure as a missed bar."""
        try:
            work(parts)
        except Exception as error:
            self.add(
                run, {"error": f"{type(error).__name__}: {error}"[:1000]}, f"FAILED: {type(error).__name__}: {error}"
            )
            done = {row["run"] for row in self.rows}
            self.left_out += [part for part in parts if part not in done]
        for fleet in self.fleets:
            fleet.end()

    def ours(self, parts):
        if parts == ["plan"]:
            return self.plan()
        if self.clock.left() < self.starts("glake"):
            return [self.leave_out(part, f"{self.clock.left():.0f} s are left") for part in parts]
        self.agent = Agent(self.setup, self.folder)
        self.agent.start()
        fleet = self.fleet("glake", self.agent)
        fleet.start(self.log.say)
        self.per_token = next(iter(fleet.workers.values())).told["per_token"]
        residue = self.meter.used() - self.before
        if "calibrate" in parts:
            self.calibrate(fleet, residue)
        if "plan" in parts:
            self.plan()
        for seed in self.a.seeds:
            for run in NODES:
                if run in parts and self.in_time(run, f"{run} of seed {seed}"):
                    self.agent.restart(fleet.setup.names, **NODES[run])
                    self.traced(run, seed, fleet)
                    self.keep_decisions(f"{run}-{seed}")
        self.agent.restart(fleet.setup.names)
        for part, work in (
            ("overload", self.overload),
            ("kill-agent", self.kill_agent),
            ("kill-workers", self.kill_workers),
        ):
            if part in parts and self.in_time(part):
                work(fleet)
        self.agent.end()

    def requests(self, seed):
        return draw(self.setup.names, seed, self.a.rate, self.a.duration, self.lengths, self.a.lengths, self.a.zipf)

    def solo(self, fleet, name, context, generated, patience=120):
        asked = Asked(name, context, generated, time.monotonic())
        fleet.workers[name].port.send(asked)
        if not asked.over.wait(patience) or asked.failed:
            raise RuntimeError(f"{name}: {asked.failed or f'no answer within {patience} s'}")
        return asked

    def settle(self, fleet):
        """The first workers of the file are resident, as `glake plan` begins."""
        for name in reversed(self.setup.names):
            self.solo(fleet, name, 16, 2)

    def traced(self, run, seed, fleet, during=None):
        """The requests of a seed, under our agent."""
        self.settle(fleet)
        requests = self.requests(seed)
        send = lambda asked: fleet.workers[asked.worker].port.send(asked)
        with self.watch() as watch:
            asked, _ = replay(requests, send, 120, during or (lambda begin: None))
        self.traced_row(run, seed, asked, watch, fleet)

    def traced_row(self, run, seed, asked, watch, fleet, awake=None, **more):
        row = {"seed": seed, **figures(asked), **self.metered(watch), **fleet.digests(awake), **more}
        warnings = [warning for worker in fleet.workers.values() for warning in worker.warnings]
        if warnings:
            row["warnings"] = warnings[:5]
        p = lambda name, part: planned_quantile(row[name], part)
        self.add(
            run,
            row,
            f"seed {seed}: {row['requests']} requests, first token p50 {p('ttft', 0.5)} p99 {p('ttft', 0.99)} s, "
            f"end p99 {p('e2e', 0.99)} s, "
            f"gap p99 {p('gaps', 0.99)} s, {len(row['failed'])} failed, "
            f"most memory {watch.most / GIB:.2f} of {row['budget_bytes'] / GIB:.2f} GiB",
        )

    def calibrate(self, fleet, residue):
        one, two = self.setup.names[:2]
        decode = lambda asked: (asked.last - asked.first) / (asked.tokens - 1) * 1e3
        alone = lambda: decode(self.solo(fleet, one, 16, 64))

        def pair():
            found = []
            threads = [
                threading.Thread(target=lambda name=name: found.append(decode(self.solo(fleet, name, 16, 96))))
                for name in (one, two)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return planned.median(found)

        for name in (two, one):
            self.agent.do("refill", name)
        row = {"decode_ms": alone(), "pair_ms": pair()}
        context = sorted(round(context * self.a.lengths) for context, _ in self.lengths)[len(self.lengths) // 2]
        read = lambda: planned.median([self.solo(fleet, one, context, 2).ttft for _ in range(5)])
        # The pace of a step would hide a part of its prompt.
        fleet.pace(0)
        row.update(unpaced_ms=alone(), unpaced_pair_ms=pair(), read_s=read())
        fleet.pace(self.setup.decode_ms)
        row["prefill_tok_s"] = context / max(row["read_s"] - row["unpaced_ms"] / 1e3, 1e-3)
        row["read_beside_s"] = self.beside(fleet, two, read)
        resident = planned.median([self.solo(fleet, one, 16, 2).ttft for _ in range(5)])
        clean, back = [], []
        for _ in range(5):
            clean.append(self.agent.do("shrink", one))
            back.append(self.solo(fleet, one, 16, 2).ttft - resident)
        pauses = []
        for _ in range(3):
            asked = Asked(one, 512, 200, time.monotonic())
            fleet.workers[one].port.send(asked)
            time.sleep(1.0)
            with contextlib.suppress(RuntimeError):
                # What a busy worker gave back it wants at once: that it has come back already is no failure here.
                self.agent.do("shrink", one)
            asked.over.wait(60)
            pauses.append(asked.gap)
        switch, parked = self.switches(fleet)
        row.update(
            refill_s=planned.median(back),
            switch_s=planned.median(switch) - resident,
            parked_s=planned.median(parked) - resident,
            parked_each_s=[round(each - resident, 4) for each in parked],
            clean_s=planned.median(clean),
            pause_s=planned.median(pauses),
            weight_bytes=self.setup.weight_bytes,
            share_bytes=self.setup.share,
        )
        rows = self.agent.ps()
        row["resident_bytes"] = max(each["resident"] for each in rows.values())
        row["residue_bytes"] = residue
        room = self.setup.budget_bytes() - self.setup.reserve - residue
        row["fit"] = room // (row["resident_bytes"] + self.setup.growth)
        if row["fit"] < self.setup.room():
            self.log.say(
                f"ONLY {row['fit']} workers fit together, and {self.setup.room()} are to: "
                f"contexts and modules of all take {residue / GIB:.2f} GiB"
            )
        told = {name: value for name, value in row.items() if not isinstance(value, list)}
        self.add("calibrate", row, "  ".join(f"{name} {value:.4g}" for name, value in told.items()))
        self.keep_decisions("calibrate")
        self.calibration().write_text(planned.calibration(self.rows, self.setup, self.setup.names))

    def beside(self, fleet, name, work):
        """Measures the front while a worker answers a long request."""
        long = Asked(name, 16, 250, time.monotonic())
        fleet.workers[name].port.send(long)
        try:
            time.sleep(0.2)
            return work()
        finally:
            long.over.wait(60)

    def switches(self, fleet):
        """Seconds to the first token of workers for which an idle one gives its memory back; and of those for which one
        that answers a request is parked."""
        for name in self.setup.names:
            self.solo(fleet, name, 16, 2)
        asleep = lambda: [name for name, row in self.agent.ps().items() if row["state"] == "asleep"]
        switch = [self.solo(fleet, asleep()[0], 16, 2).ttft for _ in range(5)]
        parked = []
        for _ in range(PARKS):
            waiting = asleep()
            long = [Asked(name, 16, 250, time.monotonic()) for name in self.setup.names if name not in waiting]
            for asked in long:
                fleet.workers[asked.worker].port.send(asked)
            # Longer than a quantum.
            time.sleep(1.0)
            parked.append(self.solo(fleet, waiting[0], 16, 2).ttft)
            for asked in long:
                asked.over.wait(60)
        return switch, parked

    def keep_decisions(self, name):
        """Writes the agent's decisions and their reasons (`glake explain`) to a file beside the rows."""
        lines = [json.dumps(row) + "\n" for row in self.agent.ask("explain")]
        pathlib.Path(self.a.out, f"decisions-{name}.jsonl").write_text("".join(lines))

    def calibration(self):
        return pathlib.Path(self.a.out, f"calibration-{self.a.setup}.toml")

    def plan(self):
        """Plans the load of the runs by the calibration that was written before them, else by an H200's.
        A seed of it is as long as the runs that are pooled: a 99th percentile is then of as many requests."""
        measured = [row for row in self.rows if row["run"] == "calibrate"]
        # What a context takes an agent sees, and a plan is told.
        floor = max(measured[-1]["residue_bytes"] // self.setup.count, 1) if measured else FLOOR
        workers = text(self.folder / "plan.toml", self.setup.node(kv_per_token=self.per_token, floor=floor))
        options = {
            "assign": f"zipf:{self.a.zipf}",
            "rate": self.a.rate,
            "duration": self.a.duration * (len(self.a.seeds) if "glake" in self.a.only else self.a.pooled),
            "lengths": self.a.lengths,
            **PLAN_SEEDS,
        }
        options["contention"] = planned.contention(measured[-1]) if measured else "on"
        if self.calibration().exists():
            options["calibration"] = self.calibration()
        for row in planned.plan(
            workers, self.a.trace, **options, policy="glake,glake-no-preempt,drain-per-tensor,start-stop"
        ):
            self.add(
                "plan",
                {**row, "contention": options["contention"]},
                f"{row['policy']}: first token p50 {row['ttft_p50_s']} p99 {row['ttft_p99_s']} "
                f"({row['ttft_p99_low_s']} to {row['ttft_p99_high_s']}), end p99 {row['e2e_p99_s']}, "
                f"contention {options['contention']}",
            )
        # The runs' own requests too.
        for seed in self.a.seeds if {"glake", "no-preempt"} & set(self.a.only) else []:
            trace = write(self.folder / f"{seed}.csv", self.requests(seed))
            more = {name: options[name] for name in ("contention", "calibration") if name in options}
            for row in planned.plan(workers, trace, **more, policy="glake,glake-no-preempt"):
                self.add(
                    "plan-of-seed",
                    {**row, "seed": seed},
                    f"seed {seed}, {row['policy']}: p50 {row['ttft_p50_s']} p99 {row['ttft_p99_s']}",
                )

    # ---- workers of other policies

    def fronted(self, run, seed, fleet, front, **more):
        patience = max(min(self.clock.left() - self.a.duration - 15, 300), 30)
        with self.watch() as watch:
            asked, _ = replay(self.requests(seed), front.send, patience)
        front.end()
        moved = {
            "sleep_s": planned.median(front.sleeps),
            "wake_s": planned.median(front.wakes),
            "switches": len(front.wakes),
        }
        if front.failed:
            moved["error"] = front.failed
        self.traced_row(
            run, seed, asked, watch, fleet, front.awake, **moved, **{name: each() for name, each in more.items()}
        )

    def per_tensor(self, parts):
        if self.clock.left() < self.starts("tensors") + self.needs("per-tensor"):
            return self.leave_out("per-tensor", f"{self.clock.left():.0f} s are left")
        fleet = self.fleet("tensors")
        fleet.start(self.log.say)
        do = lambda what: lambda name: fleet.workers[name].do(what)
        awake = set()
        for seed in self.a.seeds:
            if self.in_time("per-tensor", f"per-tensor of seed {seed}"):
                for name in awake:
                    do("sleep")(name)
                front = Front(
                    self.setup.names, self.setup.room(), do("sleep"), do("wake"), lambda name: fleet.workers[name].port
                )
                self.wake(front)
                self.fronted("per-tensor", seed, fleet, front)
                awake = front.awake
        fleet.end()

    def wake(self, front):
        """The first of the file, as far as they fit."""
        for name in self.setup.names[: front.room]:
            front.wake(name)
            with front.changed:
                front.awake.add(name)

    def start_stop(self, parts):
        if self.clock.left() < self.starts("start") + self.needs("start-stop"):
            return self.leave_out("start-stop", f"{self.clock.left():.0f} s are left")
        source = self.fleet("start")
        first = source.spawn(self.setup.names[0], 0)
        first.answer("begun")
        digest = first.load()["digest"]
        first.do("save", path=str(self.file()))
        first.kill()
        fleet, loads = self.fleet("start", file=str(self.file())), []

        def start(name):
            worker = fleet.spawn(name, 0)
            worker.answer("begun")
            begin = time.monotonic()
            worker.load()
            loads.append(time.monotonic() - begin)
            if worker.digest != digest:
                raise RuntimeError(f"{name} has started with other weights")

        def stop(name):
            """Until the GPU has its memory back, two seconds at most."""
            used, end = self.meter.used(), time.monotonic() + 2
            fleet.workers[name].kill()
            while self.meter.used() > used - self.setup.share // 2 and time.monotonic() < end:
                time.sleep(0.01)

        # As of a GPU: on a simulated one contexts are not smaller, and would take all.
        whole = self.setup.budget * GIB
        room = max(
            int((whole - max(whole / 100, 512 << 20)) // ((self.setup.weights + self.setup.kv) * GIB + FLOOR)), 1
        )
        for seed in self.a.seeds:
            if self.in_time("start-stop", f"start-stop of seed {seed}"):
                front = Front(self.setup.names, room, stop, start, lambda name: fleet.workers[name].port)
                self.wake(front)
                self.fronted("start-stop", seed, fleet, front, load_s=lambda: planned.median(loads))
                fleet.end()

    # ---- overload and faults

    def overload(self, fleet):
        """Streams without pause: with all resident, and within the budget."""
        fleet.pace(0)
        whole = (self.setup.count * (self.setup.share + FLOOR) * self.setup.scale) / GIB + 4
        rates, row = [], {"streams": self.a.streams}
        for budget in (whole, None):
            for name in self.setup.names:
                self.agent.do("shrink", name)
            self.agent.restart(self.setup.names, budget=budget)
            for name in self.setup.names[: self.setup.room(budget)]:
                self.agent.do("refill", name)
            duty, failed = [], []
            with self.watch() as watch:
                rates.append(self.streams(fleet, duty, failed))
            row.update(self.metered(watch, budget), failed=failed, requests=row.get("requests", 0) + self.streamed)
        fleet.pace(self.setup.decode_ms)
        row.update(
            resident_tokens_s=rates[0],
            tokens_s=rates[1],
            link_duty=sum(duty) / len(duty),
            most_link_duty=max(duty),
            **fleet.digests(),
        )
        self.add("overload", row, f"{rates[1]:.1f} tokens/s of {rates[0]:.1f}, link duty {row['link_duty']:.2f}")

    def streams(self, fleet, duty, failed):
        """Tokens a second of all streams, after the first few seconds."""
        over, lock, counted = threading.Event(), threading.Lock(), []

        def stream(name):
            while not over.is_set():
                asked = Asked(name, 256, 256, time.monotonic())
                with lock:
                    counted.append(asked)
                fleet.workers[name].port.send(asked)
                asked.over.wait(300)
                if asked.failed:
                    return failed.append(f"{name}: {asked.failed}")

        threads = [
            threading.Thread(target=stream, args=[name]) for name in self.setup.names for _ in range(self.a.streams)
        ]
        for thread in threads:
            thread.start()
        tokens = lambda: sum(asked.tokens for asked in list(counted))
        lead = self.a.overload_s / 5
        time.sleep(lead)
        before, begin = tokens(), time.monotonic()
        while time.monotonic() < begin + self.a.overload_s - lead:
            time.sleep(1)
            # Of the GPU that is used, where the machine has more.
            duty.append(max(self.agent.metrics("glake_link_duty_ratio")))
        rate = (tokens() - before) / (time.monotonic() - begin)
        over.set()
        for thread in threads:
            thread.join()
        self.streamed = len(counted)
        return rate

    def kill_agent(self, fleet):
        faults.kill_agent(self, fleet)

    def kill_workers(self, fleet):
        faults.kill_workers(self, fleet)


def planned_quantile(values, part):
    from .client import quantile

    found = quantile(values, part)
    return None if found is None else round(found, 3)


__all__ = ["Runs", "Worker"]
