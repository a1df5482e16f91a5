"""Steps of varying length: ours under a budget, and a share of the layers offloaded as it was set by hand."""

import json, random, statistics, time

from .models import chunked_loss, layers_of, llama
from .steps import MIB, Measured, Step, started, warmed

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Lengths come again after so many steps. The last cycle counts: in the first each length is new to all. Of a fraction there are two, of ours
# five.
CYCLE, ROUNDS, ROUNDS_BY_HAND = 40, 5, 2


def lengths(a):
    """Returns the sequence length of each step, in multiples of 64 from a quarter of the maximum to the maximum."""
    most = max(min(a.tokens, a.length) // 64, 1)
    choose = random.Random(22)
    return [64 * choose.randint(max(most // 4, 1), most) for _ in range(CYCLE)]


def varying(a):
    """`--fraction F`: 80 steps with the first F of the layers offloaded; without it 200 under `--budget`."""
    by_hand = a.fraction is not None
    measured = Measured(a)
    # Nothing is offloaded with a fraction of 0: that runs on the CPU too.
    glake = started(a) if a.device == "cuda" or a.fraction != 0.0 else None
    import torch

    model, vocabulary = llama(a, torch)
    step, rows, handles = Step(torch, model, lambda ids: chunked_loss(torch, model, ids)), max(a.tokens // min(a.tokens, a.length), 1), []
    cycle = lengths(a)
    batch = lambda length: torch.randint(0, vocabulary, (rows, length), device=a.device)
    warmed(torch, a, model, step, batch(max(cycle)))
    if by_hand:
        layers = model.get_base_model().model.layers
        handles = [glake.offload.activations(layer) for layer in layers[: round(len(layers) * a.fraction)]]
    else:
        handles = [glake.offload(layers_of(model), budget=f"{a.budget // MIB}MiB")]
    rounds, failed = (ROUNDS_BY_HAND if by_hand else ROUNDS), None
    begin = time.perf_counter()
    try:
        for number in range(-2, rounds * len(cycle)):
            # Two before, of the most: what a first step costs is not compared.
            ids = batch(max(cycle) if number < 0 else cycle[number % len(cycle)])
            with measured.step():
                measured.losses.append(step(ids))
            if time.perf_counter() - begin > a.time_limit:
                break
    except torch.OutOfMemoryError as error:
        failed = str(error)[:200]
    times = measured.times[2:]
    whole = len(times) // len(cycle) * len(cycle)
    row = {"run": a.one, "fraction": a.fraction, "steps": len(times), "most_bytes": measured.most, "budget": None if by_hand else a.budget}
    if whole:
        # Of the last cycle: all had the same lengths there.
        row.update(cycle_s=sum(times[whole - len(cycle):whole]), all_s=sum(times) / len(times), longest_s=max(times))
        row.update(median_s=statistics.median(times))
    if failed:
        row["out_of_memory"] = failed
    if glake:
        row["report"] = glake.offload.report()
    for handle in handles:
        handle.remove()
    print(json.dumps(row, default=str), flush=True)
