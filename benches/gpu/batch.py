"""The largest batch of opt13_LR that trains under a memory fraction, for each allocator.

    python benches/gpu/batch.py --allocs native,expandable,glake --fraction 0.25 --out DIR

Each try is a process of its own, with the same sequence lengths for all (the workload's first --steps steps: they hold the
longest two and the first evaluation at twice the batch), in a search that begins at --guess.
The fraction is each process's own, so that tries go side by side on one GPU as far as fractions add up to at most 0.9, and on
several GPUs too: each allocator has its share of these places and tries as many batches at once.
Writes DIR/batch.jsonl. Ends with 1 if a bar was missed.
"""
import sys

import launch


def largest(fits, guess, width=1, stride=2):
    """The greatest n >= 0 that fits, where all up to some n do and none beyond; few calls where guess is near.

    fits takes up to width numbers, in rising order, and returns an answer for each.
    """
    first = guess - (width - 1) // 2 * stride
    low, high, step = 0, None, stride
    at = [first + i * stride for i in range(width)]
    while True:
        at = [n for n in at if n > 0] or [1]
        for n, answer in zip(at, fits(at)):
            if not answer:
                high = n
                break
            low = n
        if high is not None and high - low <= 1:
            return low
        if high is None:  # the guess was too low: upwards in growing steps
            at = [low + i * step for i in range(1, width + 1)]
            step *= 2
        elif low == 0 and high > step:  # it was too high: downwards
            at = [high - i * step for i in range(width, 0, -1)]
            step *= 2
        else:
            parts = min(width + 1, high - low)
            at = [low + (high - low) * i // parts for i in range(1, parts)]


def arguments():
    p = launch.Parser(__doc__)
    p.add_argument("--allocs", default="native,expandable,glake")
    p.add_argument("--workload", default="opt13_LR")
    p.add_argument("--fraction", type=float, default=0.25)
    p.add_argument("--guess", default="32", help="the batch that is tried first: one for all, or one for each of --allocs")
    p.add_argument("--steps", type=int, default=8, help="steps a try; 0: the whole workload")
    p.add_argument("--time-limit", type=float, default=900)
    p.add_argument("--try-limit", type=float, default=120, help="seconds for one try")
    a = p.parse_args()
    a.allocs = a.allocs.split(",")
    for alloc in a.allocs:
        if alloc not in launch.ALLOCS:
            p.error(f"--allocs: {alloc!r} is none of {', '.join(launch.ALLOCS)}")
    guesses = [int(guess) for guess in a.guess.split(",")]
    if len(guesses) not in (1, len(a.allocs)):
        p.error(f"--guess: {len(guesses)} batches for {len(a.allocs)} allocators; name one, or one for each")
    a.guesses = dict(zip(a.allocs, guesses * (len(a.allocs) if len(guesses) == 1 else 1)))
    return a


def main():
    a = arguments()
    visible = launch.needs_gpus("batch.py")
    clock = launch.Clock(a.time_limit)
    log = launch.Log(a.out, "batch.jsonl", clock)
    extra = ["--fraction", str(a.fraction)] + (["--steps", str(a.steps)] if a.steps else [])
    found, broken, known = {}, [], {alloc: {"fits": [], "out of memory": []} for alloc in a.allocs}

    def search(alloc, places):
        [gpus] = places

        def fits(batches):
            answers = {}

            def attempt(batch, gpu):
                if clock.left() < 20:
                    return
                row = launch.harness(a.workload, alloc, gpu, min(a.try_limit, clock.left()), [*extra, "--batch", str(batch)])
                answer = "error" if row.get("error") else "out of memory" if row.get("oom") else "fits"
                log.add({**row, "batch": batch, "answer": answer}, f"{alloc:12} batch {batch:3} on GPU {gpu[0]}: {answer} {row.get('error', '')} ({row['process_s']:.0f} s)")
                answers[batch] = row
                if answer in known[alloc]:
                    known[alloc][answer].append(batch)

            launch.share_out(batches, gpus, attempt)
            for row in answers.values():
                if row.get("error"):
                    raise RuntimeError(row["error"])
            if len(answers) < len(batches):
                raise TimeoutError(f"the time limit of {a.time_limit:.0f} s is spent")
            return [batch in known[alloc]["fits"] for batch in batches]

        try:
            found[alloc] = largest(fits, a.guesses[alloc], len(gpus))
        except (RuntimeError, TimeoutError) as error:
            broken.append(alloc)
            log.say(f"{alloc}: given up: {error}")

    def least_and_most(alloc):
        """Describes the bounds of a search that did not end."""
        fits, not_fits = known[alloc]["fits"], known[alloc]["out of memory"]
        return f"unknown: {max(fits, default=0)} fits, {min(not_fits) if not_fits else 'nothing seen so far'} does not"

    side_by_side = max(1, int(0.9 / a.fraction)) if a.fraction > 0 else 1
    slots = [gpu for _ in range(side_by_side) for gpu in visible]
    shares = min(len(a.allocs), len(slots))
    launch.share_out(a.allocs, [slots[i::shares] for i in range(shares)], search)

    print(f"\nlargest batch of {a.workload} under a memory fraction of {a.fraction}", flush=True)
    for alloc in a.allocs:
        print(f"  {alloc:16} {found.get(alloc) or least_and_most(alloc)}")
    missed = len(broken)
    for alloc in (one for one in found if one.startswith("glake")):
        for other, least in (("native", 1.12), ("expandable", 1.0)):
            if found.get(other):
                ratio = found[alloc] / found[other]
                missed += ratio < least
                print(f"  {'ok     ' if ratio >= least else 'MISSED '} {alloc}: {ratio:.3f} x {other}'s, at least {least}")
    print(f"batch: {len(log.rows)} tries in {clock.spent():.0f} s", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
