"""Which worker runs when, on which GPU: jobs side by side as far as they may be, and every outcome told as it comes."""
import json, os, pathlib, select, signal, subprocess, sys, tempfile, threading, time

STARTUP = 120  # seconds until a worker must have begun its first test
GRACE = 15     # seconds beyond a test's own limit, in which the worker ends itself and says where it stood


class Job:
    """Tests of one module under one backend that share a process."""

    def __init__(self, backend, tests):
        self.backend, self.tests = backend, tests
        self.gpus = max(test["gpus"] for test in tests)
        self.alone = tests[0]["alone"]
        self.order = (self.alone, tests[0]["order"], tests[0]["module"])


def jobs(tests, backends):
    """Isolated tests are jobs of their own; the others go by module and by how many GPUs they want."""
    together, found = {}, []
    for backend in backends:
        for test in tests:
            if test["isolated"]:
                found.append(Job(backend, [test]))
            else:
                together.setdefault((backend, test["module"], test["gpus"]), []).append(test)
    found += [Job(backend, group) for (backend, _, _), group in together.items()]
    return sorted(found, key=lambda job: job.order)


class Gpus:
    """Places on the GPUs: `places` jobs at a time on each, or one that wants it alone."""

    def __init__(self, names, places):
        self.names, self.places = names, places
        self.load = {name: 0 for name in names}

    def take(self, count, alone):
        """The names of `count` GPUs with a place, or None for now."""
        most = 0 if alone else self.places - 1
        free = sorted((name for name in self.names if self.load[name] <= most), key=lambda name: self.load[name])
        if len(free) < count:
            return None
        for name in free[:count]:
            self.load[name] += self.places if alone else 1
        return free[:count]

    def give(self, names, alone):
        for name in names:
            self.load[name] -= self.places if alone else 1


class Schedule:
    def __init__(self, cases, gpus, places, deadline, tell, env=None):
        """`tell` is called for every outcome: a dict with test, backend, outcome, text, seconds."""
        self.cases, self.tell, self.env = cases, tell, env or {}
        self.gpus, self.deadline = Gpus(gpus, places), deadline
        self.changed = threading.Condition()

    def run(self, todo):
        todo, threads = list(todo), []
        with self.changed:
            while todo:
                for job in list(todo):
                    # A job that wants more than there are is told so by the caller; here it would wait for ever.
                    names = self.gpus.take(job.gpus, job.alone)
                    if names:
                        todo.remove(job)
                        threads.append(threading.Thread(target=self.one, args=(job, names)))
                        threads[-1].start()
                if todo:
                    self.changed.wait()
        for thread in threads:
            thread.join()

    def one(self, job, names):
        try:
            left = list(job.tests)
            while left:
                left = self.worker(job, left, names)
        finally:
            with self.changed:
                self.gpus.give(names, job.alone)
                self.changed.notify()

    def worker(self, job, tests, names):
        """One worker over these tests; returns those that it did not come to because it died."""
        if time.time() > self.deadline:
            for test in tests:
                self.tell(dict(test=test["test"], backend=job.backend, outcome="NOT RUN", text="the time limit is spent", seconds=0))
            return []
        env = {**os.environ, **self.env, "GLAKE_TEST_BACKEND": job.backend, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ",".join(names)}
        read, write = os.pipe()
        with tempfile.TemporaryFile() as output:
            command = [sys.executable, str(pathlib.Path(__file__).with_name("worker.py")), "--events", str(write), str(self.cases)]
            child = subprocess.Popen(command + [test["test"] for test in tests], env=env, pass_fds=[write], stdin=subprocess.DEVNULL,
                                     stdout=output, stderr=output, start_new_session=True)
            os.close(write)
            left, running, why = self.follow(child, read, tests, job)
            os.close(read)
            output.seek(0)
            said = output.read().decode(errors="replace")[-6000:]
        code = child.returncode
        if running:
            left = [test for test in left if test["test"] != running]
            self.tell(dict(test=running, backend=job.backend, outcome="FAILED", seconds=0, text=f"{why or f'the process ended with {code}'}\n{said}"))
        elif left and why is None and code == 0:
            missing, left = left, []
            self.lost(missing, job, "the worker left it out", said)
        elif left:  # before its first test, or between two
            missing, left = left, []
            self.lost(missing, job, why or f"the process ended with {code}", said)
        elif code != 0:
            name = f"{tests[0]['module']}.exit"
            self.tell(dict(test=name, backend=job.backend, outcome="FAILED", seconds=0, text=f"{why or f'exit code {code} after the last test'}\n{said}"))
        return left

    def lost(self, tests, job, why, said):
        for number, test in enumerate(tests):
            self.tell(dict(test=test["test"], backend=job.backend, outcome="FAILED", seconds=0, text=f"{why}\n{said if number == 0 else ''}"))

    def follow(self, child, read, tests, job):
        """Reads events until the worker ends; returns (tests without an outcome, the one that was running, why it was ended)."""
        limits = {test["test"]: test["limit"] for test in tests}
        left, running, why, pending = list(tests), None, None, b""
        patience, since = STARTUP, time.time()
        while True:
            now = time.time()
            late = now - since > patience
            if late or now > self.deadline + GRACE:
                why = f"ended: {'no answer for ' + str(round(patience)) + ' s' if late else 'the time limit is spent'}"
                break
            if not select.select([read], [], [], 1.0)[0]:
                continue
            some = os.read(read, 1 << 16)
            if not some:
                break  # the worker has closed its end: it exits
            *lines, pending = (pending + some).split(b"\n")
            for line in lines:
                event, since = json.loads(line), time.time()
                if event["event"] == "begin":
                    running, patience = event["test"], limits.get(event["test"], STARTUP) + GRACE
                else:
                    running, patience = None, STARTUP
                    left = [test for test in left if test["test"] != event["test"]]
                    self.tell(dict(event, backend=job.backend))
        try:
            child.wait(timeout=0 if why else GRACE)
        except subprocess.TimeoutExpired:
            why = why or "the process did not exit"
            os.killpg(child.pid, signal.SIGKILL)  # the session that this worker was started in
            child.wait()
        return left, running, why
