"""Makes traces of the same kinds that nothing was tuned on: python3 tests/traces/perturb.py FOLDER

Each distinct size of each recorded trace is scaled by one factor and moved at random, the same for all blocks of that size;
order, times and streams stay. Three variants a trace: 0.6 +- 20 %, 1.3 +- 10 %, 1.0 +- 30 %.
"""
import gzip, pathlib, random, sys

VARIANTS = [(1, 0.6, 0.2), (2, 1.3, 0.1), (3, 1.0, 0.3)]

if len(sys.argv) != 2:
    sys.exit(__doc__)
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for path in sorted(pathlib.Path(__file__).parent.glob("*.trace.gz")):
    name = path.name.removesuffix(".trace.gz")
    for number, (seed, factor, jitter) in enumerate(VARIANTS):
        draw, sizes = random.Random(seed), {}
        with gzip.open(folder / f"{name}_{number}.trace.gz", "wt", compresslevel=1) as out:
            for line in gzip.open(path, "rt"):
                if line[0] == "a":
                    words = line.split()
                    size = int(words[2])
                    if size not in sizes:
                        sizes[size] = max(1, int(size * factor * (1 + draw.uniform(-jitter, jitter))))
                    words[2] = str(sizes[size])
                    line = " ".join(words) + "\n"
                out.write(line)
