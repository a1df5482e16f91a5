"""The parts of serve.py: workers that share a GPU, a client that replays requests, baseline policies, a meter,
bars.

    serve.py ─► fleet ─► worker (a process each) ─► models (a Llama, or a simulated one)
       │         └► agents: `glake serve`, or the two fronts of other policies
       ├► client: requests of a trace, and when each token came
       ├► meter: NVML, or the ledger of a simulated GPU
       ├► planned: a calibration, and `glake plan`
       └► bars: rows of runs to figures with bars

setup says how large all of it is.
"""
