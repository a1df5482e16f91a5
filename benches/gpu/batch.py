"""The largest batch of opt13_LR that trains under a memory fraction, for each allocator.

    python benches/gpu/batch.py --allocs native,expandable,glake --fraction 0.25 --out DIR

Each try is a process of its own, with the same sequence lengths for all (the workload's first --steps steps: they hold the
longest two and the first evaluation at twice the batch), in a bisection that begins at --guess.
The fraction is each process's own, so that tries go side by side on one GPU as far as fractions add up to at most 0.9; tries
on several GPUs go side by side too. Writes DIR/batch.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, sys

import launch


def largest(fits, guess, stride=2):
    """The greatest n >= 0 with fits(n), for a fits that holds up to some n and not beyond; few calls where guess is near."""
    known = {0: True}

    def ask(n):
        if n not in known:
            known[n] = fits(n)
        return known[n]

    low, high, step = 0, None, stride
    at = max(guess, 1)
    while high is None:
        if ask(at):
            low, at = at, at + step
        else:
            high = at
        step *= 2
    step = stride
    while low == 0 and high > 1:  # the guess was too high: downwards in growing steps
        at = max(high - step, 0)
        if ask(at):
            low = at
            break
        high, step = at, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        if ask(middle):
            low = middle
        else:
            high = middle
    return low


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--allocs", default="native,expandable,glake")
    p.add_argument("--workload", default="opt13_LR")
    p.add_argument("--fraction", type=float, default=0.25)
    p.add_argument("--guess", type=int, default=32, help="the batch that is tried first")
    p.add_argument("--steps", type=int, default=8, help="steps a try; 0: the whole workload")
    p.add_argument("--out", default="bench-results")
    p.add_argument("--time-limit", type=float, default=900)
    p.add_argument("--try-limit", type=float, default=120, help="seconds for one try")
    a = p.parse_args()
    a.allocs = a.allocs.split(",")
    for alloc in a.allocs:
        if alloc not in launch.ALLOCS:
            p.error(f"--allocs: {alloc!r} is none of {', '.join(launch.ALLOCS)}")
    return a


def main():
    a = arguments()
    visible = launch.needs_gpus("batch.py")
    clock = launch.Clock(a.time_limit)
    log = launch.Log(a.out, "batch.jsonl", clock)
    extra = ["--fraction", str(a.fraction)] + (["--steps", str(a.steps)] if a.steps else [])
    found, broken, known = {}, [], {alloc: {"fits": [], "out of memory": []} for alloc in a.allocs}

    def search(one, gpus):
        alloc, guess = one

        def fits(batch):
            if clock.left() < 20:
                raise TimeoutError(f"the time limit of {a.time_limit:.0f} s is spent")
            row = launch.harness(a.workload, alloc, gpus, min(a.try_limit, clock.left()), [*extra, "--batch", str(batch)])
            answer = "error" if row.get("error") else "out of memory" if row.get("oom") else "fits"
            log.add({**row, "batch": batch, "answer": answer}, f"{alloc:12} batch {batch:3} on GPU {gpus[0]}: {answer} {row.get('error', '')} ({row['process_s']:.0f} s)")
            if row.get("error"):
                raise RuntimeError(row["error"])
            known[alloc][answer].append(batch)
            return answer == "fits"

        try:
            found[alloc] = largest(fits, guess)
        except (RuntimeError, TimeoutError) as error:
            broken.append(alloc)
            log.say(f"{alloc}: given up: {error}")

    def least_and_most(alloc):
        """What is known of a search that did not end."""
        fits, not_fits = known[alloc]["fits"], known[alloc]["out of memory"]
        return f"unknown: {max(fits, default=0)} fits, {min(not_fits) if not_fits else 'nothing seen so far'} does not"

    side_by_side = max(1, int(0.9 / a.fraction)) if a.fraction > 0 else 1
    slots = [gpu for _ in range(side_by_side) for gpu in visible]
    launch.share_out([(alloc, a.guess) for alloc in a.allocs], slots, search)

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
